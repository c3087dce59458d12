"""Packet numbers in half-open ranges: which of them the peer has acknowledged, and what of some ranges lies in others.

Acknowledgements repeat what they said before, range by range; `KnownNumbers` tells what of one is news. Its ranges are
ascending and disjoint, and two never touch. Lists of ranges that come from elsewhere are sorted and disjoint as well.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

__all__ = ["KnownNumbers", "split_ranges"]


class KnownNumbers:
    """Numbers that the peer has acknowledged, as disjoint ascending ranges; all below some number count as known."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def learn_all(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Add descending ranges; return what of them is new, ascending."""
        news: list[tuple[int, int]] = []
        for start, stop in reversed(ranges):
            self._learn(start, stop, news)
        return news

    def _learn(self, start: int, stop: int, news: list[tuple[int, int]]) -> None:
        starts, stops = self._starts, self._stops
        i = bisect_left(stops, start)
        if i < len(starts) and starts[i] <= start and stop <= stops[i]:
            return  # what nearly all ranges of a frame are
        j = bisect_right(starts, stop, i)
        at = start
        for k in range(i, j):
            if at < starts[k]:
                news.append((at, starts[k]))
            at = max(at, stops[k])
        if at < stop:
            news.append((at, stop))
        if i < j:
            start, stop = min(start, starts[i]), max(stop, stops[j - 1])
        starts[i:j], stops[i:j] = [start], [stop]

    def overlaps(self, start: int, stop: int) -> bool:
        """Return whether any of [start, stop) is known."""
        i = bisect_right(self._stops, start)
        return i < len(self._starts) and self._starts[i] < stop and start < stop

    def forget(self, below: int) -> None:
        """Take everything below a number for known."""
        starts, stops = self._starts, self._stops
        if below <= 0 or (starts and starts[0] <= 0 and below <= stops[0]):
            return
        count = bisect_right(starts, below)
        stop = max(stops[count - 1], below) if count else below
        starts[:count], stops[:count] = [0], [stop]


def split_ranges(
    pieces: list[tuple[int, int]], ranges: list[tuple[int, int]], at: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return what of the pieces lies in the ranges from the one at `at` on, and what does not; all ascending."""
    hits: list[tuple[int, int]] = []
    rest: list[tuple[int, int]] = []
    for start, stop in pieces:
        while at < len(ranges) and ranges[at][1] <= start:
            at += 1
        i = at
        while start < stop and i < len(ranges) and ranges[i][0] < stop:
            low, high = ranges[i]
            if low > start:
                rest.append((start, low))
                start = low
            end = min(stop, high)
            hits.append((start, end))
            start = end
            i += 1
        if start < stop:
            rest.append((start, stop))
    return hits, rest
