"""The ways between ranks of one host in a view that has others as well: long messages go through the host's memory.

Where all ranks of a view share a host their calls go through its memory whole (neighbourhood.py). Here plans run as
over the network, and a way to a rank of this host has its memory beside its link (noticed.py): a message of LEAST to as
many bytes as a parcel has is a parcel (quicoll.local.parcels).

    given      its payload is in a place of the sender's segment, and a notice under the message's own tag is sent
    told       the notice is here: the payload is copied to where it belongs, and its checksum compared
    taken      the sender has been woken (at the back), has seen so, and has the place again

What ends a link ends the view. Of a process that has ended the host tells (process_ends.py).

Invariants:
    - a message goes by one way alone, and nobody waits for a place: so nothing waits here that would not on the links
    - whether these ways are used is settled before the view is installed, and equal on all ranks of the host
    - after `end` nothing of the memory is touched, no timer is left, and `HostWakes` is closed
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from quicoll.engine.noticed import NoticedWay
from quicoll.engine.process_ends import ProcessEnds
from quicoll.local.parcels import Parcels
from quicoll.local.small import Spoiled
from quicoll_transport.errors import ProtocolError, TransportError
from quicoll_transport.link.frames import INLINE_BYTES

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from quicoll.engine.executor import Way
    from quicoll.engine.host import MetHost
    from quicoll.engine.noticed import AwaitedMessage, Carried, GivenMessage
    from quicoll.local.parcels import Notice
    from quicoll_transport.endpoint import Link

__all__ = ["LEAST", "HostWays", "SpoiledInMemory"]

LEAST: Final = INLINE_BYTES + 1  # bytes of a message from which on a notice beside it costs less than its datagrams


class SpoiledInMemory(TransportError):
    """What was copied out of a peer's segment is not what its checksum says."""


class HostWays:
    """See the module's head. Everything on the engine's loop.

    ranks: of the view, which are on this host, by their number there.
    """

    in_memory = True

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
        self._given: dict[int, GivenMessage] = {}  # by turn: whose ends are awaited
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
        return {
            rank: NoticedWay(links[rank], _Memory(self, number))
            for number, rank in enumerate(self.ranks)
            if rank in links
        }

    def carried(self) -> dict[int, Carried]:
        """Return nothing: memory is no network."""
        return {}

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

    def awaits(self, turn: int, given: GivenMessage) -> None:
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


class _Memory:
    """The memory of this host, beside the link to one rank: quicoll.engine.noticed.Beside."""

    def __init__(self, ways: HostWays, number: int) -> None:
        self._ways = ways
        self._number = number

    @property
    def whole(self) -> bool:
        return self._ways.whole

    def carries(self, nbytes: int) -> bool:
        return nbytes >= LEAST and self._ways.parcels.fits(nbytes)

    def give(self, given: GivenMessage) -> Notice | None:
        notice = self._ways.give(self._number, given.payload)
        if notice is not None:
            self._ways.awaits(notice.turn, given)
        return notice

    def take(self, notice: Notice, awaited: AwaitedMessage) -> None:
        try:
            self._ways.take(self._number, notice, awaited.buffer)
        except Spoiled as error:
            node = awaited.link.node
            if error.bits:
                awaited.finish(SpoiledInMemory(str(error), peer=node))
            else:
                awaited.finish(ProtocolError(f"tells of what cannot be: {error}", peer=node))
        else:
            awaited.finish(None)
