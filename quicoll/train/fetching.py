"""A checkpoint that is read by all ranks together, where each has a disk of its own.

What a rank's reader wants and its disk does not have comes from other ranks' disks while the reader waits for it. The
ranks go in rounds, all together, until the readers of all are done:

    told        each rank: whether its reader is done or has failed, and which pieces it waits for          all ranks
    planned     who gives which piece to whom (quicoll.checkpoint.exchange); the same on all ranks
    looked up   each giver reads what it is to give, and tells a digest of it, or that it cannot            all ranks
    moved       each pair with something to move has a transfer (quicoll.state.transfer): first those to higher ranks,
                then those to lower ones, so that what goes both ways between two ranks is numbered apart
    put aside   each receiver compares a piece with the manifest's digest and keeps it on its own disk, where its
                reader finds it

Invariants. A reader gets nothing but bytes that have the manifest's digest. A rank whose reader takes long, from its
disk or in its own code, says so in every round, so nobody's wait runs out of time. What is under way is bounded
(quicoll.checkpoint.exchange); what has arrived is on the disk, so a restore that was cut goes on where it was, even in
another process.

    failure                                  what follows
    a rank is lost; the view ends            PeerError on all ranks; what has arrived is on their disks
    a giver's file is damaged                another rank that has a copy is asked in the next round
    nobody has a piece                       the reader that wants it gets CheckpointError; the ranks take another one
    a piece comes with other bits            Corrupted by the transfer
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quicoll.checkpoint.exchange import PieceMove, PieceSources, planned_moves
from quicoll.errors import CheckpointError, LocalError
from quicoll.numerics.buffers import begun_digest
from quicoll.numerics.dtypes import DType
from quicoll.state.chunks import DIGEST_BYTES
from quicoll.state.manifest import TensorRecord
from quicoll.state.transfer import all_done, transfer

if TYPE_CHECKING:
    from quicoll.checkpoint.datafile import PieceReader
    from quicoll.checkpoint.manifest import CheckpointManifest
    from quicoll.checkpoint.parts import Array
    from quicoll.checkpoint.regions import Region
    from quicoll.collectives.group import Group
    from quicoll.membership.view import View

__all__ = ["FetchedCheckpoint", "InThread", "fetched", "flat_digest", "moved"]

T = TypeVar("T")
InThread = Callable[..., Awaitable[Any]]
"""Runs a function that blocks beside the loop."""

_POLL_S = 0.5
"""How long a rank waits for its own reader before it tells the others that it is not done."""
_BYTES = DType.parse("uint8")


class FetchedCheckpoint:
    """A checkpoint that all ranks of a job restore together: any part of it, whoever's disk that is on.

    Attributes:
        step: The step whose state it is.
        metadata: What was saved beside the tensors.
    """

    def __init__(self, manifest: CheckpointManifest, reader: PieceReader, in_thread: InThread, *, alone: bool) -> None:
        """Look at a checkpoint.

        Args:
            manifest: The same on all ranks.
            reader: Of this rank's disk.
            in_thread: Runs what blocks.
            alone: Whether nothing is on another rank's disk: all have one.
        """
        self.step = manifest.step
        self.metadata = dict(manifest.metadata)
        self._manifest = manifest
        self._reader = reader
        self._in_thread = in_thread
        self._alone = alone
        self._asked: dict[int, asyncio.Future[bool]] = {}
        self._busy = 0
        self._moved = asyncio.Event()

    def shapes(self, node: str = "") -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole tensors by name.

        Args:
            node: Whose own; "" takes those that belong to all.
        """
        return {tensor.name: tensor.shape for tensor in self._manifest.tensors if tensor.node == node}

    async def read(
        self, name: str, *, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None, node: str = ""
    ) -> Array:
        """Read a tensor, or a region of it. Several may be read at once.

        Args:
            name: The tensor's.
            offset: The region's first index; None takes the tensor's.
            shape: The region's shape; None takes all from `offset` on.
            node: Whose own tensor it is; "" for one that belongs to all.
        Returns:
            New memory, bit for bit as it was saved.
        Raises:
            LocalError: There is no such tensor or region.
            CheckpointError: What is needed is damaged or missing, on all disks. Names the file.
        """
        region = self._manifest.region(name, offset=offset, shape=shape, node=node)
        return (await self._regions([region]))[0]

    async def load(self, node: str = "") -> dict[str, Array]:
        """Read all tensors that belong to all, whole, and what is a node's own.

        Args:
            node: Whose own tensors are read as well; "" reads no node's. Its name wins where both have one.
        Returns:
            The tensors by name.
        Raises:
            CheckpointError: As `read`.
        """
        wanted = self._manifest.whole(node)
        return dict(zip(wanted, await self._regions(list(wanted.values())), strict=True))

    async def _regions(self, wanted: Sequence[tuple[int, Region]]) -> list[Array]:
        """Read regions of tensors, and ask for what is not here until it is."""
        while True:
            try:
                found: list[Array] = await self._beside(self._reader.regions, wanted)
                return found
            except CheckpointError as error:
                lacking = await self._beside(self._lacking, wanted)
                if not lacking:
                    raise
                await self._ask(lacking, error)

    def _lacking(self, wanted: Sequence[tuple[int, Region]]) -> list[int]:
        return list(dict.fromkeys(piece for each in wanted for piece in self._reader.lacking(*each)))

    async def _beside(self, function: Callable[..., T], wanted: Sequence[tuple[int, Region]]) -> T:
        self._busy += 1
        try:
            found: T = await self._in_thread(function, wanted)
            return found
        finally:
            self._busy -= 1
            self._moved.set()

    async def _ask(self, pieces: Sequence[int], error: CheckpointError) -> None:
        """Wait until another rank has given these pieces. Raises `error` where one is nowhere."""
        loop = asyncio.get_running_loop()
        waits = [self._asked.setdefault(piece, loop.create_future()) for piece in pieces]
        self._moved.set()
        for piece, wait in zip(pieces, waits, strict=True):
            if not await asyncio.shield(wait):
                raise error if self._alone else self._nowhere(piece, error)

    def _nowhere(self, number: int, error: CheckpointError) -> CheckpointError:
        piece = self._manifest.pieces[number]
        name, node = self._manifest.tensors[piece.tensor].name, self._manifest.files[piece.file].node
        return CheckpointError(
            f"{piece.region} of tensor {name!r}, which {node} wrote, can be read on no rank's disk; here: {error}"
        )

    # -- for the rounds --------------------------------------------------------------------------------------------

    @property
    def asked(self) -> list[int]:
        """The pieces that are waited for, in the order in which they were asked for."""
        return list(self._asked)

    async def stirred(self, reading: asyncio.Future[Any], within: float) -> None:
        """Wait until the reader is done, or waits for pieces and for nothing else; `within` seconds at most."""
        deadline = asyncio.get_running_loop().time() + within
        while not reading.done() and (self._busy or not self._asked):
            self._moved.clear()
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return
            moving = asyncio.ensure_future(self._moved.wait())
            await asyncio.wait((reading, moving), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            moving.cancel()

    def came(self, piece: int, *, here: bool, error: CheckpointError | None = None) -> None:
        """Take note that a piece is here, or is nowhere, or cannot be kept."""
        wait = self._asked.pop(piece, None)
        if wait is None or wait.done():
            return
        if error is None:
            wait.set_result(here)
        else:
            wait.set_exception(error)
            wait.exception()  # perhaps nobody waits for this one


async def fetched(
    read: Callable[[FetchedCheckpoint], Awaitable[T]],
    manifest: CheckpointManifest,
    reader: PieceReader,
    *,
    group: Group,
    view: View,
    in_thread: InThread,
    timeout: float,
    alone: bool,
) -> tuple[list[T], list[str]]:
    """Read one checkpoint on all ranks of a view, each what it wants.

    Args:
        read: This rank's reader.
        manifest: The same on all ranks.
        reader: Of this rank's disk.
        group: All ranks of the view.
        view: The view.
        in_thread: Runs what blocks.
        timeout: The job's, of one operation.
        alone: Whether nothing is on another rank's disk: all have one.
    Returns:
        What `read` has returned, in a list, and what went wrong on each rank, by rank; "" where nothing did. The list
        is empty where anything did.
    Raises:
        PeerError: A rank was lost.
        Corrupted: A piece came with other bits than were sent.
        Exception: What `read` raises, but for CheckpointError and LocalError; the ranks are left waiting for this one.
    """
    found = FetchedCheckpoint(manifest, reader, in_thread, alone=alone)
    files = [] if alone else await in_thread(reader.files_here)
    sources = PieceSources(manifest, await group.all_gather_object(files))
    reading = asyncio.ensure_future(_begun(read, found))
    sites = [member.site for member in view.members]
    try:
        while True:
            await found.stirred(reading, min(_POLL_S, timeout / 4))
            over, trouble = reading.done(), _trouble(reading)
            told = await group.all_gather_object([over, trouble, [] if over else found.asked])
            troubles = [str(text) for _, text, _ in told]
            if any(troubles):
                return [], troubles
            if all(done for done, _, _ in told):
                return [reading.result()], troubles
            asked = {rank: [int(piece) for piece in pieces] for rank, (_, _, pieces) in enumerate(told) if pieces}
            plan, nowhere = planned_moves(manifest, sources, asked, sites)
            for rank, piece in nowhere:
                if rank == group.rank:
                    found.came(piece, here=False)
            if plan:
                coming = await _round(plan, manifest, reader, sources, group, view, in_thread)
                for piece, data in coming.items():
                    found.came(piece, here=True, error=await in_thread(_kept, reader, piece, data))
    finally:
        if not reading.done():
            reading.cancel()
            await asyncio.wait((reading,))


async def _begun(read: Callable[[FetchedCheckpoint], Awaitable[T]], found: FetchedCheckpoint) -> T:
    return await read(found)


def _trouble(reading: asyncio.Future[Any]) -> str:
    """What this rank's reader has failed by, in words; "" if it has not."""
    if not reading.done():
        return ""
    error = reading.exception()
    if error is None:
        return ""
    if isinstance(error, CheckpointError | LocalError):
        return str(error)
    raise error


async def _round(
    plan: Sequence[PieceMove],
    manifest: CheckpointManifest,
    reader: PieceReader,
    sources: PieceSources,
    group: Group,
    view: View,
    in_thread: InThread,
) -> dict[int, Any]:
    """Move what was planned; return the pieces that came to this rank."""
    mine = {move.copy: None for move in plan if move.giver == group.rank}
    given = {}
    for copy in mine:
        given[copy] = await in_thread(_readable, reader, copy)
    told = await group.all_gather_object(
        [[copy, b"" if data is None else flat_digest(data)] for copy, data in given.items()]
    )
    digests = {(rank, int(copy)): bytes(digest) for rank, row in enumerate(told) for copy, digest in row}
    for (rank, copy), digest in digests.items():
        if not digest:
            sources.strike(rank, copy)
    pairs: dict[tuple[int, int], list[tuple[TensorRecord, Any]]] = {}
    coming = {}
    for move in plan:
        digest = digests.get((move.giver, move.copy), b"")
        if len(digest) != DIGEST_BYTES:
            continue
        size = manifest.pieces[move.copy].nbytes
        record = TensorRecord(f"piece {move.piece}", "uint8", (size,), "numpy", digest)
        memory = given[move.copy] if move.giver == group.rank else None
        if move.receiver == group.rank:
            memory = coming[move.piece] = np.empty(size, np.uint8)
        pairs.setdefault((move.giver, move.receiver), []).append((record, memory))
    await moved(pairs, group, view.view_id)
    return coming


def _readable(reader: PieceReader, copy: int) -> Any:
    try:
        return np.frombuffer(reader.piece(copy), np.uint8)
    except CheckpointError:
        return None


def _kept(reader: PieceReader, piece: int, data: Any) -> CheckpointError | None:
    try:
        reader.put_aside(piece, data.data)
    except CheckpointError as error:
        return error
    return None


async def moved(pairs: dict[tuple[int, int], list[tuple[TensorRecord, Any]]], group: Group, view_id: int) -> None:
    """Move memory between ranks: all pairs at once, but for those from a higher rank to a lower one, which come later.

    Args:
        pairs: By giver and receiver, what goes from the one to the other; all that concern this rank.
        group: All ranks of the view.
        view_id: Its number.
    Raises:
        PeerError: A rank was lost.
        Corrupted: Bits came that are not those that were sent.
    """
    for upwards in (True, False):
        await all_done(
            [
                transfer(
                    group,
                    giver=giver,
                    receivers=(receiver,),
                    records=[record for record, _ in what],
                    tensors=[memory for _, memory in what],
                    view_id=view_id,
                )
                for (giver, receiver), what in pairs.items()
                if group.rank in (giver, receiver) and (giver < receiver) == upwards
            ]
        )


def flat_digest(data: Any) -> bytes:
    """Return the digest by which a transfer knows an array of bytes."""
    digest = begun_digest(_BYTES, (data.nbytes,))
    digest.update(data)
    return digest.digest()
