"""A set of integers kept as sorted, disjoint, half-open ranges: what has arrived of a numbered sequence."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

__all__ = ["Ranges"]


class Ranges:
    """Grows only. Cost of `add` and `in` is logarithmic in the number of gaps."""

    __slots__ = ("_starts", "_stops")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add(start, stop)

    def __contains__(self, value: int) -> bool:
        i = bisect_right(self._starts, value)
        return i > 0 and value < self._stops[i - 1]

    def __len__(self) -> int:
        """Number of ranges (not of integers)."""
        return len(self._starts)

    def add(self, start: int, stop: int | None = None) -> None:
        """Add [start, stop), or the one integer `start`."""
        stop = start + 1 if stop is None else stop
        if stop <= start:
            return
        i = bisect_right(self._starts, start)
        if i > 0 and self._stops[i - 1] >= start:
            i -= 1
            start = self._starts[i]
        j = i
        while j < len(self._starts) and self._starts[j] <= stop:
            stop = max(stop, self._stops[j])
            j += 1
        self._starts[i:j] = [start]
        self._stops[i:j] = [stop]

    @property
    def upto(self) -> int:
        """The first integer from 0 on that is missing."""
        return self._stops[0] if self._starts and self._starts[0] == 0 else 0

    def tuples(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self._starts, self._stops, strict=True))
