"""Hand a state from the rank that has it to those that need it, into the memory where it ends, chunk by chunk.

Only the giver and the receivers take part. They are a chain, in the order (giver, *receivers): each hands the state to
the next one, and a chunk goes on as soon as it has arrived and is right. So the giver sends the state once, however
many receivers there are, and all are through about when the first one is. A star, where the giver sends to each, takes
as many times as long as there are receivers, which at a job's start are all ranks but one. A rank that is lost in the
middle costs nothing more than in a star: the view ends for all of them with any of them.

What goes between two neighbours, `up` and `down`, as sends of the group:

    offer     up to down   the digest of each chunk (quicoll.state.chunks)
    request   down to up   a bit for each chunk: it is set where down's memory holds something else
    ready     up to down   how many chunks of the request, in ascending order, come next; 0: none yet, but up got on
    chunk     up to down   its bytes; as many as the last ready said. Then another ready, until all have come

A receiver digests what its memory holds before it asks. So a transfer that was cut goes on in the next view where it
was, and a state that is nearly current costs its digests and what has changed. All sizes follow from the manifest, not
from what a peer says.

Memory. A chunk is sent from where it lies (quicoll.state.tensor_memory has the exceptions, which are copied chunk by
chunk). It arrives in memory of its own and is put in place when its digest is right: one more copy than receiving it in
place, thousands of times as fast as the network, and for it no wrong byte is ever in the state, and nobody writes to
the state's memory once a transfer has ended, however it did. At most WINDOW chunks are under way on each side: beside
the state, a rank in the middle holds that many that arrive and that many that go on, and what its links hold unclaimed
of the former. With CHUNK_BYTES of 4 MiB that is 16 MiB at the giver, 32 at a receiver, 48 in the middle.

Time. Each send and receive has the job's timeout for itself, and no more of them are under way than the window has; so
the timeout bounds a window, and a large state on a slow path goes on for as long as chunks arrive. A rank whose chunks
come late, because the one before it waits for its own, hears `ready` with 0 each time that one got on.

A rank that takes no part, or is through, waits in `together` for the others. They are sure to come to an end: each of
them waits for a neighbour alone, and by the timeout; if it fails, the view ends, and with it the wait of all.

    failure                                 who finds it, and what follows
    a rank is lost; the view ends           every operation under way fails, as always
    a neighbour does nothing any more       the operation that waits for it, by the timeout
    a chunk with other bits than announced  the receiver: Corrupted, naming its tensors. Not put in place
    a tensor that is not as its record      the receiver, at the end: Corrupted. The manifest has the last word
    a request, or ready, that cannot be     its receiver: PeerError, before anything is done with it

Invariants. A receiver's memory has, in each chunk, what it had before or what the offer announced. Between the first
chunk and the end it is neither of the two states, so its owner must not take it for one. Everything ends: a ready with
0 is refused once there have been more than the chunks that the ranks before can have got.

The operations of a transfer that failed are not taken back here. Whoever called it ends the view, as after any failure
of a rank's own code, and that ends them; until then they touch memory that is read only, or their own.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quicoll.errors import Corrupted, LocalError, PeerError
from quicoll.numerics.buffers import begun_digest
from quicoll.numerics.dtypes import DType
from quicoll.state.chunks import DIGEST_BYTES, ChunkedState, ChunkTable, chunk_digest
from quicoll.state.tensor_memory import readable, writable

if TYPE_CHECKING:
    from quicoll.collectives.group import Group
    from quicoll.numerics.dtypes import Array
    from quicoll.state.manifest import TensorRecord
    from quicoll.state.tensor_memory import TensorMemory

__all__ = ["CHUNK_BYTES", "WINDOW", "all_done", "chunks_of", "opened", "together", "transfer"]

CHUNK_BYTES = 4 << 20
WINDOW = 4
"""Chunks that are under way from one rank to the next."""

_WHOLE_S = 86_400.0  # of `together`, whose end is that of the ranks that it waits for

T = TypeVar("T")


async def transfer(
    group: Group,
    *,
    giver: int,
    receivers: tuple[int, ...],
    records: Sequence[TensorRecord],
    tensors: Sequence[Any],
    view_id: int,
    learn_from: int = 0,
) -> None:
    """Hand a state from one rank to others. Called by these ranks, and by no other one.

    When it raises, the caller has to end the view; a receiver's memory may then be a mixture of two states. Calling it
    again in another view, with the same memory, goes on where it was.

    Args:
        group: All ranks of the view.
        giver: The rank that has the state.
        receivers: The ranks that get it, at least one, in the order in which it goes from one to the next: those of a
            site should stand together.
        records: The state's manifest; the same on all of these ranks.
        tensors: In the order of `records`. On the giver the state, which must not change meanwhile; on a receiver the
            memory where it ends.
        view_id: The view's number, for errors.
        learn_from: As for `chunks_of`.
    Raises:
        LocalError: A tensor is not as its record says, or cannot be written; or this rank takes no part.
        PeerError: A rank was lost, did nothing in time, or sent what it must not.
        Corrupted: Bits came that are not those of the state.
    """
    chain = (giver, *receivers)
    if not receivers or len(set(chain)) < len(chain) or group.rank not in chain:
        raise LocalError(f"rank {group.rank} cannot hand over a state from rank {giver} to ranks {receivers}")
    place = chain.index(group.rank)
    state = ChunkedState(opened(records, tensors, writing=place > 0), chunks_of(records, learn_from))
    holding = _Holding(len(state.table))
    work = []
    if place:
        work.append(_Fetch(group, chain[place - 1], state, holding, place=place, view_id=view_id).run(records))
    else:
        work.append(_hold_all(state, holding))
    if place + 1 < len(chain):
        work.append(_serve(group, chain[place + 1], state, holding, view_id=view_id))
    await all_done(work)


async def together(group: Group) -> None:
    """Wait until every rank of the view has what `transfer` brings. Called by all of them, once.

    Args:
        group: All ranks of the view.
    Raises:
        PeerError: The view ended.
    """
    await group.barrier(timeout=_WHOLE_S)


def chunks_of(records: Sequence[TensorRecord], learn_from: int) -> ChunkTable:
    """Return the chunks of a state. All ranks that have to do with it compute the same.

    Args:
        records: The state's manifest.
        learn_from: Bytes from which on a state is learned (quicoll.state.learning): such a one has 16 chunks or more,
            or there would be nothing to learn. 0: none is.
    """
    most = min(CHUNK_BYTES, max(learn_from // 16, 1)) if learn_from else CHUNK_BYTES
    return ChunkTable([(math.prod(record.shape), DType.parse(record.dtype).itemsize) for record in records], most)


def opened(records: Sequence[TensorRecord], tensors: Sequence[Any], *, writing: bool) -> list[TensorMemory]:
    """Open a state's tensors for reading or writing.

    Args:
        records: The state's manifest.
        tensors: In its order.
        writing: Whether they are to be written.
    Raises:
        LocalError: A tensor is not as its record says, or cannot be written.
    """
    if len(records) != len(tensors):
        raise LocalError(f"a state of {len(records)} tensors is handed over, and there are {len(tensors)}")
    open_one = writable if writing else readable
    return [
        open_one(record.path, tensor, dtype=record.dtype, shape=record.shape)
        for record, tensor in zip(records, tensors, strict=True)
    ]


class _Holding:
    """What this rank has, for the rank after it.

    offer: the digests of all chunks; done once they are known. held: 1 for each chunk that is in place. moves: grows
    with each chunk that arrives, and each time that the rank before got on.
    """

    def __init__(self, chunks: int) -> None:
        self.held = bytearray(chunks)
        self.offer: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
        self.moves = 0
        self._moved = asyncio.Event()

    def known(self, offer: Array, held: Array) -> None:
        self.held[:] = held.astype(np.uint8).tobytes()
        self.offer.set_result(offer)

    def moved(self) -> None:
        self.moves += 1
        self._moved.set()

    async def after(self, moves: int) -> None:
        """Wait until there have been more moves than that."""
        while self.moves <= moves:
            self._moved.clear()
            await self._moved.wait()


async def _hold_all(state: ChunkedState, holding: _Holding) -> None:
    """The giver's part, but for sending."""
    holding.known(await _digests(state), np.ones(len(state.table), bool))


async def _digests(state: ChunkedState) -> Array:
    """The digests of all chunks as they are in memory, in one array of bytes. The loop runs between any two."""
    found = np.empty((len(state.table), DIGEST_BYTES), np.uint8)
    for chunk in range(len(state.table)):
        found[chunk] = np.frombuffer(state.digest(chunk), np.uint8)
        await asyncio.sleep(0)
    return found.reshape(-1)


# -- towards the end of the chain ------------------------------------------------------------------------------------


async def _serve(group: Group, to: int, state: ChunkedState, holding: _Holding, *, view_id: int) -> None:
    """Offer the state to the next rank and send the chunks that it asks for."""
    count = len(state.table)
    if not count:
        return
    await _kept(group.send(await asyncio.shield(holding.offer), to=to))
    asked = await _kept(group.recv(np.empty(-(-count // 8), np.uint8), source=to))
    bits = np.unpackbits(asked)
    if bits[count:].any():
        raise PeerError(f"asked for chunks of the state that there are not, beyond {count}", rank=to, view=view_id)
    wanted = [int(chunk) for chunk in np.flatnonzero(bits)]
    sending = _Sending()
    at = 0
    while at < len(wanted):
        moves, end = holding.moves, at
        while end < len(wanted) and holding.held[wanted[end]]:
            end += 1
        await sending.room()
        sending.add(group.send(np.array([end - at], np.int64), to=to))
        for chunk in wanted[at:end]:
            await sending.room()
            sending.add(group.send(state.read(chunk), to=to))
        if at == end:
            await holding.after(moves)
        at = end
    await sending.over()


class _Sending:
    """Sends under way, at most a window of them, the oldest first."""

    def __init__(self) -> None:
        self._under_way: deque[asyncio.Future[None]] = deque()

    async def room(self) -> None:
        while len(self._under_way) >= WINDOW:
            await asyncio.shield(self._under_way.popleft())

    def add(self, handle: Awaitable[None]) -> None:
        self._under_way.append(_begun(handle))

    async def over(self) -> None:
        while self._under_way:
            await asyncio.shield(self._under_way.popleft())


# -- towards its beginning -------------------------------------------------------------------------------------------


class _Fetch:
    """What a receiver gets from the rank before it."""

    def __init__(
        self, group: Group, source: int, state: ChunkedState, holding: _Holding, *, place: int, view_id: int
    ) -> None:
        """place: this rank's in the chain, from 1."""
        self._group = group
        self._source = source
        self._state = state
        self._holding = holding
        self._view_id = view_id
        # All that the receivers before can have got, each of which is a reason to say that they got on; and the start.
        self._patience = (len(state.table) + 1) * (place - 1)
        self._offer: Array = np.empty(0, np.uint8)

    async def run(self, records: Sequence[TensorRecord]) -> None:
        if len(self._state.table):
            await self._take(await self._ask())
        await self._check(records)

    async def _ask(self) -> list[int]:
        """Learn what the state is, and ask for what this rank has not."""
        count = len(self._state.table)
        offered = _begun(self._group.recv(np.empty(count * DIGEST_BYTES, np.uint8), source=self._source))
        own = await _digests(self._state)
        self._offer = await asyncio.shield(offered)
        other = (own != self._offer).reshape(count, DIGEST_BYTES).any(axis=1)
        self._holding.known(self._offer, ~other)
        await _kept(self._group.send(np.packbits(other), to=self._source))
        return [int(chunk) for chunk in np.flatnonzero(other)]

    async def _take(self, wanted: list[int]) -> None:
        """Receive chunks and put them in place."""
        room = np.empty(max((self._state.table.nbytes(chunk) for chunk in wanted), default=0), np.uint8)
        number = np.empty(1, np.int64)
        # Receives under way, in the order of the sends: of a chunk, or None for a ready.
        under_way: deque[tuple[int | None, asyncio.Future[Any]]] = deque()
        issued = placed = coming = 0
        asked = False
        while placed < len(wanted):
            while coming and len(under_way) < WINDOW:
                like = room[: self._state.table.nbytes(wanted[issued])]
                under_way.append((wanted[issued], _begun(self._group.recv(like, source=self._source))))
                issued, coming = issued + 1, coming - 1
            if not coming and not asked and issued < len(wanted):
                under_way.append((None, _begun(self._group.recv(number, source=self._source))))
                asked = True
            chunk, future = under_way.popleft()
            came = await asyncio.shield(future)
            if chunk is None:
                coming, asked = self._coming(int(came[0]), len(wanted) - issued), False
            else:
                self._put(chunk, came)
                placed += 1

    def _coming(self, count: int, missing: int) -> int:
        """How many chunks come next, as the rank before said."""
        if not count:
            self._patience -= 1
            self._holding.moved()
        if self._patience < 0:
            raise PeerError("has no chunk of the state to send, again and again", rank=self._source, view=self._view_id)
        if not 0 <= count <= missing:
            said = f"said that {count} chunks of the state come, where {missing} are missing"
            raise PeerError(said, rank=self._source, view=self._view_id)
        return count

    def _put(self, chunk: int, data: Array) -> None:
        announced = self._offer[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES].tobytes()
        if chunk_digest(data) != announced:
            names = self._state.names(chunk)
            raise Corrupted(
                f"chunk {chunk} of the state, of {names}, came with other bits than rank {self._source} announced",
                rank=self._source,
                view=self._view_id,
                odd=(self._source,),
            )
        self._state.write(chunk, data)
        self._holding.held[chunk] = 1
        self._holding.moved()

    async def _check(self, records: Sequence[TensorRecord]) -> None:
        """Compare all that is here with the manifest."""
        for record, tensor in zip(records, self._state.tensors, strict=True):
            digest = begun_digest(tensor.dtype, tensor.shape)
            most = max(CHUNK_BYTES // tensor.dtype.itemsize, 1)
            for start in range(0, tensor.elements, most):
                digest.update(tensor.read(start, min(start + most, tensor.elements)).data)
                await asyncio.sleep(0)
            if digest.digest() != record.digest:
                raise Corrupted(
                    f"the state's {record.path!r}, as rank {self._source} sent it, fails its digest",
                    rank=self._source,
                    view=self._view_id,
                    odd=(self._source,),
                )


# -- waiting ---------------------------------------------------------------------------------------------------------


def _begun(handle: Awaitable[T]) -> asyncio.Future[T]:
    """An operation as a future. What it raises is no news if nobody comes to await it: then another has failed."""
    future = asyncio.ensure_future(handle)
    future.add_done_callback(_seen)
    return future


def _seen(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


async def _kept(handle: Awaitable[T]) -> T:
    """Await an operation; a cancellation ends the wait alone."""
    return await asyncio.shield(_begun(handle))


async def all_done(work: Sequence[Awaitable[object]]) -> None:
    """Await all; when one fails, the others wait no longer.

    Args:
        work: What is awaited, all at once.
    """
    parts = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*parts)
    finally:
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
