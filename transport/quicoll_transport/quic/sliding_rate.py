"""The rate at which bytes have come lately: those of a time that slides along. Sans-IO, integers.

What came is kept in steps of a 64th of that time, so memory is bounded and a look costs next to nothing. The time that
counts may change from look to look.
"""

from __future__ import annotations

from collections import deque

__all__ = ["SlidingRate"]

_NS = 1_000_000_000
_STEPS = 64


class SlidingRate:
    """See the module's head. total: bytes so far; whoever counts adds to it."""

    __slots__ = ("_steps", "total")

    def __init__(self) -> None:
        self.total = 0
        self._steps: deque[tuple[int, int]] = deque()  # times, and what had come until then

    def measure(self, at_ns: int, within_ns: int) -> int:
        """Return the bytes a second of the time before.

        Args:
            at_ns: Now, by whichever clock the bytes go; what is before an earlier look counts as that.
            within_ns: The time that counts.
        """
        steps, step_ns = self._steps, within_ns // _STEPS
        if steps:
            at_ns = max(at_ns, steps[-1][0])  # paths of several connections wait differently
        while len(steps) > 1 and steps[1][0] + within_ns <= at_ns:
            steps.popleft()
        before = steps[0][1] if steps else 0
        if not steps or steps[-1][0] + step_ns <= at_ns:
            steps.append((at_ns, self.total))
        return (self.total - before) * _NS // (within_ns + step_ns)
