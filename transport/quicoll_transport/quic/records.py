"""What packets carried, so that it can be done with when they arrive, and done again when they are lost.

A run of packets has a tuple of items (`recovery.PacketRun.items`); each packet of it carried its part of each item.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from quicoll_transport.quic.acknowledgements import ToldNumbers
    from quicoll_transport.quic.control import ControlKey
    from quicoll_transport.quic.recovery import PacketRun
    from quicoll_transport.quic.streams import SendStream

__all__ = ["Carried", "SentControl", "SentNumbers", "SentParity", "SentStripe"]


class SentStripe(NamedTuple):
    """Bytes [start, stop) of a stream, `step` in each packet and the rest in the last; with one packet, all in it.

    fin: the last packet said that the stream ends there.
    """

    stream: SendStream
    start: int
    step: int
    stop: int
    fin: bool

    def part(self, run: PacketRun[Carried], first: int, end: int) -> tuple[int, int, bool]:
        """Return the bytes that packets [first, end) of a run carried, as (start, stop, fin)."""
        low = self.start + (first - run.first) * self.step
        if end == run.stop:
            return low, self.stop, self.fin
        return low, self.start + (end - run.first) * self.step, False


class SentNumbers(NamedTuple):
    """An ACK frame."""

    told: ToldNumbers


class SentControl(NamedTuple):
    """Frames of `ControlFrames`."""

    keys: list[ControlKey]


class SentParity(NamedTuple):
    """A packet of a set of parity, and which one of it."""

    set_id: int
    place: int


Carried: TypeAlias = SentStripe | SentNumbers | SentControl | SentParity
