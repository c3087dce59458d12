"""What packets carried, so that it can be done with when they arrive, and done again when they are lost.

A run of packets has a tuple of items (`recovery.PacketRun.items`); each packet of it carried its part of each item.
They are plain classes, because one is made for nearly each packet: a tuple with names takes a call of Python's even
where all is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from quicoll_transport.quic.acknowledgements import ToldNumbers
    from quicoll_transport.quic.control import ControlKey
    from quicoll_transport.quic.recovery import PacketRun
    from quicoll_transport.quic.streams import SendStream

__all__ = ["Carried", "SentControl", "SentNumbers", "SentParity", "SentStripe"]


class SentStripe:
    """Bytes [start, stop) of a stream, `step` in each packet and the rest in the last; with one packet, all in it.

    fin: the last packet said that the stream ends there.
    """

    __slots__ = ("fin", "start", "step", "stop", "stream")

    def __init__(self, stream: SendStream, start: int, step: int, stop: int, fin: bool) -> None:
        self.stream = stream
        self.start = start
        self.step = step
        self.stop = stop
        self.fin = fin

    def part(self, run: PacketRun[Carried], first: int, end: int) -> tuple[int, int, bool]:
        """Return the bytes that packets [first, end) of a run carried, as (start, stop, fin)."""
        low = self.start + (first - run.first) * self.step
        if end == run.stop:
            return low, self.stop, self.fin
        return low, self.start + (end - run.first) * self.step, False


class SentNumbers:
    """An ACK frame."""

    __slots__ = ("told",)

    def __init__(self, told: ToldNumbers) -> None:
        self.told = told


class SentControl:
    """Frames of `ControlFrames`."""

    __slots__ = ("keys",)

    def __init__(self, keys: list[ControlKey]) -> None:
        self.keys = keys


class SentParity:
    """A packet of a set of parity, and which one of it."""

    __slots__ = ("place", "set_id")

    def __init__(self, set_id: int, place: int) -> None:
        self.set_id = set_id
        self.place = place


Carried: TypeAlias = SentStripe | SentNumbers | SentControl | SentParity
