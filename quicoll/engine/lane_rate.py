"""How fast a lane carries what it is given, by which a message chooses between lanes.

    idle      nothing is under way
    busy      something is. The time from its beginning, or from the end before, to the next end is the lane's

The rate is the bytes that were carried over the time that they took, of late: both sums lose an eighth with each end.
It is not known before the first end, and no more `FORGET_NS` after the last one: a path may have become better, and a
lane that is given nothing shows nothing. Where it is not known a lane is taken to be as fast as the fastest one, so it
is tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FORGET_NS", "LaneRate", "soonest"]

FORGET_NS: Final = 30_000_000_000
"""How long a rate counts after what it was seen by."""
_KEPT: Final = 7 / 8


class LaneRate:
    """See the module's head. open_bytes: of what was begun and has not ended."""

    __slots__ = ("_bytes", "_since_ns", "_time_ns", "open_bytes")

    def __init__(self) -> None:
        self.open_bytes = 0
        self._since_ns = 0
        self._bytes = self._time_ns = 0.0

    def begun(self, nbytes: int, now_ns: int) -> None:
        """Note that the lane has got a message."""
        if not self.open_bytes:
            self._since_ns = now_ns
        self.open_bytes += nbytes

    def ended(self, nbytes: int, now_ns: int, *, well: bool) -> None:
        """Note that a message has ended. well: it has arrived; how long others take says nothing."""
        if now_ns - self._since_ns > FORGET_NS:
            self._bytes = self._time_ns = 0.0
        if well:
            self._bytes = _KEPT * self._bytes + nbytes
            self._time_ns = _KEPT * self._time_ns + max(1, now_ns - self._since_ns)
        self.open_bytes -= nbytes
        self._since_ns = now_ns

    def bytes_per_ns(self, now_ns: int) -> float | None:
        """Return the rate; None while it is not known."""
        if not self._time_ns or (not self.open_bytes and now_ns - self._since_ns > FORGET_NS):
            return None
        return self._bytes / self._time_ns


def soonest(rates: Sequence[LaneRate], nbytes: int, now_ns: int) -> list[int]:
    """Return the places of lanes, in the order in which they would have carried a message.

    Args:
        rates: Of the lanes.
        nbytes: The message's size.
        now_ns: The time.
    """
    seen = [rate.bytes_per_ns(now_ns) for rate in rates]
    fastest = max((rate for rate in seen if rate), default=1.0)
    after = [(each.open_bytes + nbytes) / (rate or fastest) for each, rate in zip(rates, seen, strict=True)]
    return sorted(range(len(rates)), key=lambda place: (after[place], place))
