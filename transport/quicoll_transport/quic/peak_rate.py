"""The most that a rate has come to lately: what a line carries. Sans-IO, integers.

Of two periods, the present one and the one before; only time counts in which the line had something to carry, so a
silence makes it neither larger nor smaller, however long it lasts.
"""

from __future__ import annotations

__all__ = ["PERIOD_NS", "PeakRate"]

PERIOD_NS = 2_500_000_000


class PeakRate:
    """See the module's head. rate: bytes a second; 0 before it is known."""

    __slots__ = ("_before", "_last_ns", "_now", "_passed_ns", "rate")

    def __init__(self) -> None:
        self.rate = self._before = self._now = 0
        self._passed_ns, self._last_ns = 0, 0  # of this period; when there was something to carry last

    def pass_until(self, now_ns: int, most_ns: int) -> None:
        """Take note that there is something to carry now: so there was since the last time, or for `most_ns` of it."""
        self._passed_ns += min(max(now_ns - self._last_ns, 0), most_ns)
        self._last_ns = max(now_ns, self._last_ns)

    def on_measured(self, rate: int) -> None:
        """Take a rate that was just measured: bytes a second."""
        if self._passed_ns >= PERIOD_NS:
            self._passed_ns, self._before, self._now = 0, self._now, 0
        self._now = max(self._now, rate)
        self.rate = max(self._before, self._now)
