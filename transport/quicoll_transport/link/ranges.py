"""A set of integers kept as sorted, disjoint, half-open ranges: what has arrived of a numbered sequence."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

__all__ = ["Ranges"]


class Ranges:
    """Cost of `add`, `subtract` and `in` is logarithmic in the number of gaps; of adding at the end, constant."""

    __slots__ = ("_starts", "_stops")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add(start, stop)

    def __contains__(self, value: int) -> bool:
        i = bisect_right(self._starts, value)
        return i > 0 and value < self._stops[i - 1]

    def covers(self, start: int, stop: int) -> bool:
        """Return whether all of [start, stop), which is not empty, is in here."""
        i = bisect_right(self._starts, start)
        return i > 0 and stop <= self._stops[i - 1]

    def __len__(self) -> int:
        """Number of ranges (not of integers)."""
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def __reversed__(self) -> Iterator[tuple[int, int]]:
        return zip(reversed(self._starts), reversed(self._stops), strict=True)

    @property
    def first(self) -> tuple[int, int]:
        """The lowest range; there has to be one."""
        return self._starts[0], self._stops[0]

    @property
    def last(self) -> tuple[int, int]:
        """The highest range; there has to be one."""
        return self._starts[-1], self._stops[-1]

    def add(self, start: int, stop: int | None = None) -> None:
        """Add [start, stop), or the one integer `start`."""
        stop = start + 1 if stop is None else stop
        if stop <= start:
            return
        starts, stops = self._starts, self._stops
        if stops and start == stops[-1]:  # what nearly always happens
            stops[-1] = stop
            return
        i, j = bisect_left(stops, start), bisect_right(starts, stop)
        if i < j:
            start, stop = min(start, starts[i]), max(stop, stops[j - 1])
        starts[i:j], stops[i:j] = [start], [stop]

    def subtract(self, start: int, stop: int) -> None:
        """Take [start, stop) out."""
        starts, stops = self._starts, self._stops
        i, j = bisect_right(stops, start), bisect_left(starts, stop)
        if start >= stop or i >= j:
            return
        keep = [piece for piece in ((starts[i], start), (stop, stops[j - 1])) if piece[0] < piece[1]]
        starts[i:j], stops[i:j] = [low for low, _ in keep], [high for _, high in keep]

    def absorb(self, upto: int) -> int:
        """Return how far [0, upto) reaches together with what is here; that goes out of here."""
        while self._starts and self._starts[0] <= upto:
            upto = max(upto, self._stops[0])
            del self._starts[0], self._stops[0]
        return upto

    @property
    def upto(self) -> int:
        """The first integer from 0 on that is missing."""
        return self._stops[0] if self._starts and self._starts[0] == 0 else 0

    def tuples(self) -> tuple[tuple[int, int], ...]:
        return tuple(self)
