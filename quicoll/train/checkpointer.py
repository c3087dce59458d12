"""Checkpoints by all ranks of a job together, beside the training.

Each rank writes what it holds and a part of what all hold; the manifest that makes the checkpoint complete is agreed in
a step, and written when that step is committed. `quicoll.checkpoint.agreement` has the states, what a crash leaves at
each moment, and who cleans up; this module is its shell: the exchange between ranks, copies, threads and files.

Where the time goes. In the step after the one that is saved: a copy of this rank's part, on the caller's thread. In
the steps until the checkpoint is complete: one exchange of small messages. Files are written in a thread; nothing waits
for them but `finish`. Memory: one copy of this rank's part, 1/n of what all hold, and its shards, and what it writes of
others' shards. It stays for the next checkpoint, since new memory costs more than the copy itself
(`quicoll.checkpoint.lending`); it is given back when the file is durable, and after an error or a cancelled wait not at
all, so that a thread that still writes reads what it was given.

A rank that is lost takes its part of a checkpoint under way along: the others give that one up, and begin another in
the next view.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quicoll.checkpoint.agreement import Agreement, CheckpointOutcome, CheckpointStage, decoded_report, encoded_report
from quicoll.checkpoint.datafile import Piece, PieceReader, write_share
from quicoll.checkpoint.lending import CopyMemory, Loan
from quicoll.checkpoint.manifest import MAX_MANIFEST_BYTES, decoded, digest_of, encoded, encoded_share
from quicoll.checkpoint.parts import Contents, HeldPart, Local, Shard, copy_bytes, parts_of
from quicoll.checkpoint.planning import assignment
from quicoll.checkpoint.storage import storage_at
from quicoll.checkpoint.store import Stored, check_save, prune, save, stored, why_unreadable, write_manifest
from quicoll.errors import CheckpointError, Corrupted, JobDone, LocalError, Partitioned, PeerError, StepAborted
from quicoll.state.manifest import TensorRecord
from quicoll.state.transfer import transfer
from quicoll.train.copies import COPY_LIMIT, copies_of_others, demand_copies
from quicoll.train.fetching import FetchedCheckpoint, fetched, flat_digest

if TYPE_CHECKING:
    from quicoll.checkpoint.disk import Disk
    from quicoll.checkpoint.manifest import CheckpointManifest
    from quicoll.checkpoint.storage import Place
    from quicoll.job import Job
    from quicoll.step.context import Step

__all__ = ["Checkpointer"]

T = TypeVar("T")

_log = logging.getLogger("quicoll.train")

_POLL_S = 0.5
"""How long a rank waits for its own file, in `finish`, before it tells the others that it is not there yet."""
_MAX_SHARE = 8 << 20
"""Bytes of what a rank tells the others of its file; a collective takes 16 MiB of one rank."""
_CANDIDATES = 1000
"""The newest checkpoints that a rank tells of when one is to be restored."""


class Checkpointer:
    """Takes the checkpoints of a job, on all its ranks. Not thread-safe: use it on the job's loop.

        saver = quicoll.train.Checkpointer(job, directory, every=100)
        ...
        async with job.step() as step:
            await saver.in_step(step, contents)    # first of all, on every rank
            ...
        await saver.finish(contents)               # after the last step, on every rank

    `contents` is a plain function that returns `quicoll.checkpoint.Contents`, of the state as it is then.
    """

    def __init__(
        self,
        job: Job,
        directory: Place,
        *,
        every: int,
        keep: int = 3,
        shared: bool = True,
        copies: int = 1,
        copy_limit: int = COPY_LIMIT,
        resumed_from: int = 0,
        patience: float = 600.0,
        disk: Disk | None = None,
    ) -> None:
        """Begin with no checkpoint under way. Every rank makes one, with equal arguments but for resumed_from.

        Args:
            job: The job.
            directory: Where the checkpoints are: a path, or an fsspec URL.
            every: One is due when a multiple of it was passed since the newest one; 0: none but the last.
            keep: How many stay.
            shared: Whether `directory` is the same place for all ranks. Otherwise each has a disk of its own: every
                rank writes all that it holds, and its own copy of the manifest.
            copies: On how many disks each shard is written, and what is a node's own, where each rank has a disk of
                its own: with 2, the loss of one disk loses nothing. The copies travel in the step that begins a
                checkpoint.
            copy_limit: Bytes that one rank gives as copies at most to each of the ranks that write them too, which take
                memory for them. A rank that tells of more is refused.
            resumed_from: The step of the checkpoint with which this rank began; 0: none.
            patience: Seconds in which the last checkpoint has to be complete.
            disk: Where paths lead; None: the real disk.
        Raises:
            LocalError: An argument cannot be used.
        """
        check_save(step=0, keep=keep, metadata={})
        if every < 0:
            raise LocalError(f"every is 0 or more, not {every}")
        demand_copies(copies, copy_limit, shared=shared)
        self.error: CheckpointError | None = None
        self._job = job
        self._directory = directory
        self._disk = disk
        self._storage = storage_at(directory, disk)
        self._keep = keep
        self._shared = shared
        self._copies = copies
        self._copy_limit = copy_limit
        self._memory = CopyMemory()
        self._memory_of_others = CopyMemory()
        self._patience = patience
        self._agreement = Agreement(every=every or 1 << 62, newest=resumed_from)
        self._work: asyncio.Task[None] | None = None

    @property
    def newest(self) -> int:
        """The step of the newest complete checkpoint that is known here; 0: none."""
        return self._agreement.newest

    # -- beside the training ---------------------------------------------------------------------------------------

    async def in_step(self, step: Step, contents: Callable[[], Contents]) -> None:
        """Do what there is to do for checkpoints, first of all in a step's body, on every rank.

        Where one is due, it is of the state before this step: what this rank is to write is copied, and the step may go
        on to change the state. Failures of a disk are logged and known to all ranks; the training goes on.

        Args:
            step: The open step.
            contents: Returns the state as it is now.
        Raises:
            LocalError: What contents returns cannot be saved.
            PeerError: A rank was lost, as in any operation of a group.
            Corrupted: As in any operation of a group.
        """
        self._agreement.enter(self._job.view.view_id)
        if self._agreement.has_news:
            outcome = await self._exchange()
            step.on_commit(lambda: self._follow(outcome))
        if self._agreement.due(step.number - 1):
            await self._begin(step.number - 1, contents())

    async def finish(self, contents: Callable[[], Contents]) -> None:
        """Save the state after the last step, and wait until that is complete or has failed, on every rank.

        A failure is in `error` then.

        Args:
            contents: Returns the state as it is now.
        Raises:
            LocalError: What contents returns cannot be saved.
            Partitioned: There was no view for the job's hold_timeout.
            Terminated: This rank was asked to stop.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._patience
        over = False
        while not over:
            try:
                await self._job.ready()
            except StepAborted:
                continue
            except JobDone:
                break  # all others have ended, and with them the checkpoint that was under way
            try:
                over = await self._round(contents, late=clock() > deadline)
            except (PeerError, Corrupted, Partitioned, StepAborted) as error:
                if clock() > deadline:
                    self._failed(self._job.committed_step, f"not complete within {self._patience:g} s: {error}")
                    break
        await self.settle()

    async def save_alone(self, contents: Callable[[], Contents]) -> None:
        """Save the state of the last committed step by this rank alone, which is about to leave the others.

        Args:
            contents: Returns the state as it is now, with no shards in it: those of the others are not here.
        Raises:
            LocalError: What contents returns cannot be saved.
            CheckpointError: It could not be written.
        """
        await self.settle()
        step = self._job.committed_step
        if step <= self.newest:
            return
        found = contents()
        if any(isinstance(each, Shard) for each in found.tensors.values()):
            _log.warning("no checkpoint of step %d: the other ranks hold parts of the state", step)
            return
        # What is this node's own belongs to nobody else: it would be taken for everybody's.
        tensors = {name: each for name, each in found.tensors.items() if not isinstance(each, Shard | Local)}
        await self._in_thread(
            save,
            self._directory,
            step=step,
            tensors=tensors,
            metadata=found.metadata,
            keep=self._keep,
            disk=self._disk,
        )

    async def settle(self) -> None:
        """Wait until this rank writes nothing any more."""
        while self._work is not None and not self._work.done():
            await asyncio.wait([self._work])

    def raise_last(self) -> None:
        """Raise the CheckpointError of the newest checkpoint that was tried, if that has failed."""
        if self.error is not None:
            raise self.error

    async def _round(self, contents: Callable[[], Contents], *, late: bool) -> bool:
        """One exchange after the last step; whether there is nothing left to do. The same on all ranks of the view."""
        agreement, last = self._agreement, self._job.committed_step
        agreement.enter(self._job.view.view_id)
        if late:
            agreement.failed(self._job.view.view_id, agreement.step, f"not complete within {self._patience:g} s")
        if agreement.has_news:
            outcome = await self._exchange()
            if outcome.manifest is not None and agreement.stage is CheckpointStage.WRITING:
                outcome = await self._confirmed(outcome, outcome.manifest)
            self._follow(outcome)
        if agreement.stage is CheckpointStage.IDLE:
            if not agreement.due(last, last=True):
                return True
            await self._begin(last, contents())
        if self._work is not None:
            await asyncio.wait([self._work], timeout=min(_POLL_S, self._job.config.timeout / 4))
        return False

    async def _confirmed(self, outcome: CheckpointOutcome, manifest: CheckpointManifest) -> CheckpointOutcome:
        """No step's vote compares what was heard after the last step: so the ranks compare it."""
        told = await self._job.group.all_gather_object(digest_of(encoded(manifest)))
        if all(each == told[0] for each in told):
            return outcome
        return CheckpointOutcome(
            manifest.step, CheckpointStage.IDLE, error="the ranks have heard different things of it"
        )

    async def _exchange(self) -> CheckpointOutcome:
        told = await self._job.group.all_gather_object(encoded_report(self._agreement.report()))
        return self._agreement.conclude([decoded_report(each) for each in told], self._job.view.nodes)

    def _follow(self, outcome: CheckpointOutcome) -> None:
        """Act on what was concluded, now that it holds."""
        agreement = self._agreement
        step, before, view = outcome.step, agreement.stage, self._job.view.view_id
        agreement.follow(outcome)
        if outcome.error:
            self._failed(step, outcome.error)
        elif outcome.complete and outcome.manifest is not None:
            self.error = None
            if self._seals:
                self._start(self._in_thread(prune, self._storage, outcome.manifest, keep=self._keep))
        elif before is CheckpointStage.WRITING and outcome.manifest is not None:
            if self._seals:
                self._start(self._seal(view, outcome.manifest))
            else:
                agreement.sealed(view, step)

    @property
    def _seals(self) -> bool:
        return self._job.rank == 0 or not self._shared

    def _failed(self, step: int, text: str) -> None:
        self.error = CheckpointError(f"the checkpoint of step {step} is not complete: {text}", path=self._storage.where)
        _log.error("training goes on without this checkpoint: %s", self.error)

    # -- files -----------------------------------------------------------------------------------------------------

    async def _begin(self, step: int, contents: Contents) -> None:
        """Copy what this rank is to write, get what it is to write of others, and begin to write it."""
        job, metadata = self._job, dict(contents.metadata)
        check_save(step=step, keep=self._keep, metadata=metadata)
        parts = parts_of(contents.tensors, node=job.node)
        chosen = assignment(parts, rank=job.rank, world_size=job.world_size, divide=self._shared)
        loans = [self._memory.lend([region.size * part.width for part, region in chosen])]
        pieces = [(part, region, room) for (part, region), room in zip(chosen, loans[0].pieces, strict=True)]
        for piece in pieces:
            copy_bytes(*piece)
        described = [_described(part) for part in parts]
        if self._copies > 1:
            more, copied, loan = await copies_of_others(
                pieces,
                copies=self._copies,
                limit=self._copy_limit,
                memory=self._memory_of_others,
                group=job.group,
                view_id=job.view.view_id,
                in_thread=self._in_thread,
            )
            described, pieces, loans = described + more, pieces + copied, [*loans, loan]
        self._agreement.begin(step, metadata)
        self._start(self._write(job.view.view_id, step, job.rank, described, pieces, metadata, loans))

    async def _write(
        self,
        view: int,
        step: int,
        rank: int,
        parts: list[HeldPart],
        pieces: list[Piece],
        metadata: Mapping[str, str],
        loans: list[Loan],
    ) -> None:
        try:
            share = await self._in_thread(
                write_share,
                self._storage,
                step=step,
                rank=rank,
                node=self._job.node,
                parts=parts,
                pieces=pieces,
                metadata=metadata,
            )
            for loan in loans:
                loan.give_back()
            data = encoded_share(share)
            if len(data) > _MAX_SHARE:
                raise CheckpointError(f"{len(share.pieces)} pieces are more than one rank can tell the others of")
        except Exception as error:  # whatever it is, memory for instance: the others must not wait for this file
            self._agreement.failed(view, step, str(error) or type(error).__name__)
        else:
            self._agreement.written(view, step, data)

    async def _seal(self, view: int, manifest: CheckpointManifest) -> None:
        try:
            await self._in_thread(write_manifest, self._storage, manifest, shared=self._shared, node=self._job.node)
        except Exception as error:  # likewise
            self._agreement.failed(view, manifest.step, str(error) or type(error).__name__)
        else:
            self._agreement.sealed(view, manifest.step)

    def _start(self, work: Any) -> None:
        """Begin what is to be done beside the training, after what is under way."""
        before = self._work

        async def after() -> None:
            if before is not None:
                await asyncio.wait([before])
            await work

        self._work = asyncio.create_task(after())

    async def _in_thread(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        return await asyncio.to_thread(function, *arguments, **options)

    # -- reading ---------------------------------------------------------------------------------------------------

    async def restore(self, read: Callable[[FetchedCheckpoint], Awaitable[T]]) -> tuple[int, T] | None:
        """Read the newest checkpoint that every rank of the view can read, on every rank, outside of steps.

        The ranks agree on the checkpoints that all of them see complete, and try the newest of them. If what one of
        them needs of it is damaged, all take the one before. Where each rank has a disk of its own, one that any of
        them sees complete is tried, and what a rank needs and does not have comes from the others' disks; it is kept on
        this rank's until all are done, so that a restore that was cut goes on where it was. To go on from what was
        read, call `job.resume_from(step)`.

        Args:
            read: Reads what this rank needs: `lambda stored: stored.read("w", offset=..., shape=...)`, or a coroutine
                function. May be called several times, for one checkpoint after the other; so let it return what it has
                read, and change nothing. It uses no collectives.
        Returns:
            The step and what `read` has returned; None where no rank sees any checkpoint.
        Raises:
            CheckpointError: There are checkpoints, and none that all ranks can read. Says why.
            PeerError: A rank was lost.
            Corrupted: As in any operation of a group.
        """
        group, nodes = self._job.group, self._job.view.nodes
        trouble = ""
        try:
            found = await self._in_thread(self._candidates)
        except CheckpointError as error:
            found, trouble = {}, str(error)
        told = await group.all_gather_object([sorted(found), trouble])
        seen = [dict.fromkeys(str(key) for key in keys) for keys, _ in told]
        troubles = [f"{who}: {text}" for who, (_, text) in zip(nodes, told, strict=True) if text]
        if not any(seen) and not troubles:
            return None
        for key in sorted({key: None for keys in seen for key in keys}, reverse=True):
            holders = [rank for rank, keys in enumerate(seen) if key in keys]
            if self._shared and len(holders) < len(seen):
                continue
            manifest = await self._manifest_of(key, found.get(key), holders)
            reader = PieceReader(self._storage, manifest)
            value, said = await fetched(
                read,
                manifest,
                reader,
                group=group,
                view=self._job.view,
                in_thread=self._in_thread,
                timeout=self._job.config.timeout,
                alone=self._shared,
            )
            if not any(said):
                await self._in_thread(reader.drop_aside)
                self._agreement.restored(manifest.step)
                _log.info("restored step %d from %s", manifest.step, self._storage.where)
                return manifest.step, value[0]
            troubles += [f"{who}: {text}" for who, text in zip(nodes, said, strict=True) if text]
            _log.warning("skipping a checkpoint: %s", troubles[-1])
        raise CheckpointError(
            f"there is no checkpoint that all ranks can read; {self._job.node} sees {len(found)}"
            + "".join(f"; {text}" for text in troubles),
            path=self._storage.where,
        )

    def _candidates(self) -> dict[str, Stored]:
        """The complete checkpoints by what tells them apart, in an order that is that of their steps."""
        found: dict[str, Stored] = {}
        for each in stored(self._directory, disk=self._disk):
            found[f"{each.step:019d} {digest_of(encoded(each.manifest))}"] = each
            if len(found) == _CANDIDATES:
                break
        why = "" if found else why_unreadable(self._storage)
        if why:  # to begin anew would throw work away: that is for a person to decide
            raise CheckpointError(f"no manifest can be read; the newest: {why}", path=self._storage.where)
        return found

    async def _manifest_of(self, key: str, here: Stored | None, holders: list[int]) -> CheckpointManifest:
        """A manifest that at least one rank has, on all of them."""
        group, world_size = self._job.group, self._job.world_size
        lacking = tuple(rank for rank in range(world_size) if rank not in holders)
        if not lacking:
            if here is None:
                raise AssertionError("all ranks have it")
            return here.manifest
        data = np.frombuffer(b"" if here is None else encoded(here.manifest), np.uint8)
        size, digest = (await group.all_gather_object([data.nbytes, flat_digest(data)]))[holders[0]]
        if group.rank == holders[0] or here is None:
            if not 0 < int(size) <= MAX_MANIFEST_BYTES:
                raise PeerError(f"tells of a manifest of {size} bytes", rank=holders[0], view=self._job.view.view_id)
            memory = data if here is not None else np.empty(int(size), np.uint8)
            record = TensorRecord("manifest", "uint8", (int(size),), "numpy", bytes(digest))
            await transfer(
                group,
                giver=holders[0],
                receivers=lacking,
                records=[record],
                tensors=[memory],
                view_id=self._job.view.view_id,
            )
            data = memory
        manifest = here.manifest if here is not None else decoded(data.tobytes())
        if f"{manifest.step:019d} {digest_of(encoded(manifest))}" != key:
            raise Corrupted(
                f"rank {holders[0]} gave another manifest than it had told of",
                rank=holders[0],
                view=self._job.view.view_id,
                odd=(holders[0],),
            )
        return manifest


def _described(part: HeldPart) -> HeldPart:
    """The part without its tensor, which may change while the file is written."""
    return HeldPart(part.name, part.node, part.code, part.shape, part.region, part.of_torch, part.replicated, None)
