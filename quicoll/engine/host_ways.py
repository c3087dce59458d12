"""The ways between ranks of one host in a view that has others as well: long messages go through the host's memory.

Where all ranks of a view share a host their calls go through its memory whole (neighbourhood.py). Here plans run as
over the network (executor.py): which message goes from whom to whom, and what is reduced where, is the plan's, so
results have the same bits. A way to a rank of this host takes the place of its link and carries long payloads as
parcels (quicoll.local.parcels); short ones, and all that is not a message of a plan, go over the link as ever.

A message of LEAST to as many bytes as a parcel has, which both ends know from the plan, so both know how it goes:

    given      its payload is in a place of the sender's segment, and a notice under the message's own tag is sent
    no place   its notice says so; the payload follows over the link, under a tag of its own (`_direct`)
    told       the notice is here: the payload is copied to where it belongs, and its checksum compared
    taken      the sender has been woken (at the back), has seen so, and has the place again

Who waits for what, and until when, is the executor's affair and the communicator's, as with links; what ends a link
ends the view. Of a process that has ended the host tells (process_ends.py).

Invariants:
    - a message goes by one way alone, and nobody waits for a place: so nothing waits here that would not on the links
    - whether these ways are used is settled before the view is installed, and equal on all ranks of the host
    - after `end` nothing of the memory is touched, no timer is left, and `HostWakes` is closed
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from quicoll.engine.process_ends import ProcessEnds
from quicoll.local.parcels import NOTICE_BYTES, Notice, Parcels
from quicoll.local.small import Spoiled
from quicoll_transport.errors import ProtocolError, TransportError
from quicoll_transport.link.frames import INLINE_BYTES

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from quicoll.engine.executor import Moving, Way
    from quicoll.engine.host import MetHost
    from quicoll_transport.endpoint import Link

__all__ = ["LEAST", "HostWays", "SpoiledInMemory"]

LEAST: Final = INLINE_BYTES + 1  # bytes of a message from which on a notice beside it costs less than its datagrams


class SpoiledInMemory(TransportError):
    """What was copied out of a peer's segment is not what its checksum says."""


class HostWays:
    """See the module's head. Everything on the engine's loop.

    ranks: of the view, which are on this host, by their number there.
    """

    def __init__(self, met: MetHost, ranks: Sequence[int], *, loop: asyncio.AbstractEventLoop) -> None:
        """Take what ranks have that have met.

        Args:
            met: It; `end` gives it back, and so does this where it raises.
            ranks: Of the view, by their number on the host.
            loop: The engine's.
        Raises:
            OSError: There is no memory for what is needed at least.
        """
        self.ranks = tuple(ranks)
        self._wakes = met.wakes
        self._ends = ProcessEnds(loop)
        self._given: dict[int, _Given] = {}  # by turn: whose ends are awaited
        self.whole = True
        try:
            self.parcels = Parcels(met.memory)
        except BaseException:
            met.wakes.close()
            raise

    def attach(self, on_gone: Callable[[int], None]) -> None:
        """Go to work for a view that is installed.

        Args:
            on_gone: Called with the rank of a process that has ended, when it has had time to say good-bye before.
        """
        self._wakes.listen(self._on_taken, lambda number: self._ends.note(self.ranks[number], on_gone))

    def end(self) -> None:
        """Stop for good, and let go of all that the host has given."""
        if self.whole:
            self.whole = False
            self._ends.stop()
            self._given.clear()
            self._wakes.close()

    def to(self, links: Mapping[int, Link]) -> dict[int, Way]:
        """Return the ways to the ranks of this host among those that there are links to, by rank."""
        return {rank: _HostWay(self, number, links[rank]) for number, rank in enumerate(self.ranks) if rank in links}

    def give(self, number: int, payload: memoryview) -> Notice | None:
        """Put a payload for a rank of the host into a place; None where that cannot be."""
        if not self.whole:
            return None
        notice = self.parcels.give(number, payload)
        if notice is None and self._free():
            notice = self.parcels.give(number, payload)
        return notice

    def take(self, number: int, notice: Notice, target: memoryview) -> None:
        """Copy a parcel that a rank has given, and tell it. Raises Spoiled."""
        self.parcels.take(number, notice, target)
        self._wakes.ring(number, front=False)

    def awaits(self, turn: int, given: _Given) -> None:
        """Have a message told when its parcel has been taken."""
        self._given[turn] = given

    def _on_taken(self) -> None:
        self._free()

    def _free(self) -> bool:
        over = self.parcels.taken() if self.whole else []
        for turn in over:
            given = self._given.pop(turn, None)
            if given is not None:
                given.finish(None)
        return bool(over)


class _HostWay:
    """To one rank: quicoll.engine.executor.Way."""

    def __init__(self, ways: HostWays, number: int, link: Link) -> None:
        self.ways = ways
        self.number = number
        self.link = link

    def _carries(self, nbytes: int) -> bool:
        return nbytes >= LEAST and self.ways.parcels.fits(nbytes)

    @property
    def min_rtt_ns(self) -> int | None:
        return self.link.min_rtt_ns

    def send_copy(self, tag: bytes, payload: memoryview) -> None:
        self.link.send_copy(tag, payload)

    def send(self, tag: bytes, payload: memoryview, on_done: Callable[[Moving], None]) -> Moving:
        if not self._carries(len(payload)):
            return self.link.send(tag, payload, on_done)
        notice = self.ways.give(self.number, payload)
        if notice is None:
            self.link.send_copy(tag, memoryview(Notice(0, 0, 0, 0).packed()))
            return self.link.send(_direct(tag), payload, on_done)
        given = _Given(on_done)
        self.ways.awaits(notice.turn, given)
        self.link.send_copy(tag, memoryview(notice.packed()))
        return given

    def post(self, tag: bytes, buffer: memoryview, on_done: Callable[[Moving], None]) -> Moving:
        if not self._carries(len(buffer)):
            return self.link.post(tag, buffer, on_done)
        return _Awaited(self, tag, buffer, on_done)


class _Message:
    """A message under way: quicoll.engine.executor.Moving."""

    def __init__(self, on_done: Callable[[Moving], None]) -> None:
        self.done = False
        self.aborted = False
        self.error: TransportError | None = None
        self._on_done = on_done

    def finish(self, error: TransportError | None) -> None:
        """It is there, or has failed."""
        if not self.done:
            self.done = True
            self.error = error
            self._on_done(self)

    def abort(self) -> None:
        """Nobody waits for it any more, and its memory is its owner's."""
        if not self.done:
            self.done = self.aborted = True


class _Given(_Message):
    """A parcel of this rank, until it is taken. Its payload was copied."""


class _Awaited(_Message):
    """A message that comes to this rank: first its notice, then perhaps its payload over the link."""

    def __init__(self, way: _HostWay, tag: bytes, buffer: memoryview, on_done: Callable[[Moving], None]) -> None:
        super().__init__(on_done)
        self._way = way
        self._tag = tag
        self._buffer = buffer
        notice = bytearray(NOTICE_BYTES)
        self._under_way: Moving = way.link.post(tag, memoryview(notice), partial(self._told, notice))

    def abort(self) -> None:
        super().abort()
        self._under_way.abort()

    def _told(self, packed: bytearray, transfer: Moving) -> None:
        way = self._way
        if self.done or transfer.error is not None or not way.ways.whole:
            self.finish(transfer.error)
            return
        notice = Notice.read(packed)
        if notice.turn == 0:
            self._under_way = way.link.post(_direct(self._tag), self._buffer, self._came)
            return
        try:
            way.ways.take(way.number, notice, self._buffer)
        except Spoiled as error:
            self.finish(self._spoiled(error, notice))
        else:
            self.finish(None)

    def _came(self, transfer: Moving) -> None:
        self.finish(transfer.error)

    def _spoiled(self, error: Spoiled, notice: Notice) -> TransportError:
        if not error.bits:
            return ProtocolError(f"tells of what cannot be: {error}", peer=self._way.link.node)
        return SpoiledInMemory(str(error), peer=self._way.link.node)


def _direct(tag: bytes) -> bytes:
    """The tag of a payload whose notice says that it comes over the link; no message's number has that bit."""
    return tag[:-4] + bytes((tag[-4] | 0x80,)) + tag[-3:]
