"""A worker's checkpoints: when, where, and found again. All ranks write them together (quicoll.train.checkpointer);
this is the one place that says so for a worker: its state, as `packed_state` takes it apart, by its policy.

What is written is the worker's whole state, data position and all (quicoll.train.worker). It is found again by each
rank for itself, before it is in a view: a rank that starts again while the others train has nobody to agree with, and
is handed what it needs by the others. Of a job whose ranks all begin again, the newest checkpoint that any of them has
read is the job's (`Job.resume_from`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quicoll.checkpoint.parts import Contents, Shard
from quicoll.checkpoint.store import newest_of, stored_of_step
from quicoll.errors import LocalError
from quicoll.train.checkpointer import Checkpointer
from quicoll.train.copies import COPY_LIMIT, demand_copies
from quicoll.train.packing import packed_names, packed_state, unpacked_state

if TYPE_CHECKING:
    from quicoll.checkpoint.storage import Place
    from quicoll.checkpoint.store import Stored
    from quicoll.job import Job
    from quicoll.step.context import Step

__all__ = ["CheckpointPolicy", "SavedState", "Saver", "newest_state", "state_of_step"]


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """When a worker writes checkpoints, and where.

    Attributes:
        directory: Where they are, and are looked for at the start: a path, or an fsspec URL.
        every: The ranks write one, each a part of it, after every so many steps, after the last, and when rank 0 is
            asked to stop; 0: none is. One that is due while another is under way begins after that.
        keep: How many stay.
        shared: Whether `directory` is the same place for all ranks. Otherwise each has a disk of its own, and writes
            all of the state that it holds.
        copies: On how many disks each shard of a state that is divided is written, where each rank has a disk of its
            own: with 2, the loss of one disk loses nothing.
        copy_limit: Bytes that one rank gives as copies at most to each of the ranks that write them too.
    Raises:
        LocalError: `every` is negative, `keep`, `copies` or `copy_limit` is not 1 or more, or there are copies on a
            disk that all share.
    """

    directory: Place
    every: int = 0
    keep: int = 3
    shared: bool = True
    copies: int = 1
    copy_limit: int = COPY_LIMIT

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 1:
            raise LocalError(f"every is 0 or more and keep 1 or more, not {self.every} and {self.keep}")
        demand_copies(self.copies, self.copy_limit, shared=self.shared)


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state from a checkpoint. where: the file, for people."""

    step: int
    state: Mapping[Any, Any]
    where: str


async def newest_state(policy: CheckpointPolicy) -> SavedState | None:
    """Return the newest state that is whole; None where there is no checkpoint.

    Raises:
        CheckpointError: There are checkpoints, and none is whole.
    """
    return await asyncio.to_thread(newest_of, policy.directory, _saved_state)


async def state_of_step(directory: Place, step: int) -> SavedState:
    """Return the state of one step.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    return await asyncio.to_thread(lambda: _saved_state(stored_of_step(directory, step)))


def _saved_state(found: Stored) -> SavedState:
    """The state of a checkpoint, without what is divided between the ranks: a disk of this rank's own may lack that."""
    return SavedState(found.step, unpacked_state(found.load(names=packed_names(found.metadata))), found.path)


class Saver:
    """The checkpoints that one worker takes part in: `Checkpointer` with the worker's policy and state."""

    def __init__(
        self,
        job: Job,
        policy: CheckpointPolicy,
        state: Callable[[], Mapping[Any, Any]],
        *,
        resumed_from: int,
        shards: Callable[[], Mapping[str, Shard]] | None = None,
    ) -> None:
        """Make it. state: returns the state as it is then. resumed_from: the step of the checkpoint that is there.
        shards: returns what this rank holds of what is divided."""
        self._job = job
        self._shared = policy.shared
        self._state = state
        self._shards = shards or dict
        self._checkpointer = Checkpointer(
            job,
            policy.directory,
            every=policy.every,
            keep=policy.keep,
            shared=policy.shared,
            copies=policy.copies,
            copy_limit=policy.copy_limit,
            resumed_from=resumed_from,
        )

    async def in_step(self, step: Step) -> None:
        """Do what there is to do for checkpoints, first of all in a step's body, on every rank."""
        await self._checkpointer.in_step(step, self._contents)

    async def finish(self) -> None:
        """Save the state after the last step and wait for it, on every rank.

        Raises:
            CheckpointError: It could not be written.
        """
        await self._checkpointer.finish(self._contents)
        self._checkpointer.raise_last()

    async def leave(self) -> None:
        """Save the state of a rank that is asked to stop, by itself: the others may wait for it in a step, or be gone.

        It is rank 0 that does so; where each rank has a disk of its own, all do. A state that was overwritten by half
        is not saved.

        Raises:
            CheckpointError: It could not be written.
        """
        if (self._job.rank == 0 or not self._shared) and not self._job.state_torn:
            await self._checkpointer.save_alone(self._contents)

    async def settle(self) -> None:
        """Wait until this rank writes nothing any more."""
        await self._checkpointer.settle()

    def _contents(self) -> Contents:
        packed = packed_state(self._state())
        return Contents({**packed.tensors, **self._shards()}, packed.metadata)
