"""How bytes of streams are cut into segments that have parity in common: what both ends have to count alike.

A set protects spans of streams. Each span is cut from its beginning on into segments as long as what one packet of a
run carries of its stream, so that a lost packet is one lost segment: `room` bytes less those of the stream's id. The
last one of a span may be shorter, and all are filled up with zeros, which are not sent, to the length of the longest.

Segments are counted through all spans. They are dealt out to `groups` in turn, number n to group n % groups, so that
packets which are lost one after the other are of different groups: each group has its own parity, of `erasure`.

Bounds: a layout has at most MOST_SPANS spans, MOST_GROUPS groups, MOST_SEGMENTS segments in a group, and MOST_PROTECTED
bytes. A peer that names another one is wrong: ValueError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quicoll_transport.quic.erasure import MOST_SEGMENTS
from quicoll_transport.quic.varint import MAX_VARINT, varint_size

__all__ = ["MOST_GROUPS", "MOST_PROTECTED", "MOST_SPANS", "ParityLayout", "ProtectedSpan"]

MOST_SPANS = 96
MOST_GROUPS = 32
MOST_PROTECTED = 4 << 20
_LEAST_ROOM, _MOST_ROOM = 256, 1 << 16


class ProtectedSpan(NamedTuple):
    """Bytes [start, stop) of a stream. fin: it ends there."""

    stream_id: int
    start: int
    stop: int
    fin: bool


class ParityLayout:
    """See the module's head.

    spans, room, groups: what the peer is told of it. count: of all segments. size: bytes of a segment with its filling.
    """

    __slots__ = ("_firsts", "_steps", "count", "groups", "room", "size", "spans")

    def __init__(self, spans: Sequence[ProtectedSpan], room: int, groups: int) -> None:
        """Cut spans into segments.

        Args:
            spans: In the order in which they were sent; each has a byte at least.
            room: Bytes of a packet for a stream's id and its bytes.
            groups: How many have parity of their own.
        Raises:
            ValueError: It is beyond a bound.
        """
        if not _LEAST_ROOM <= room < _MOST_ROOM or not 1 <= groups <= MOST_GROUPS or not 1 <= len(spans) <= MOST_SPANS:
            raise ValueError(f"{len(spans)} spans in {groups} groups, {room} bytes in a packet")
        self.spans, self.room, self.groups = tuple(spans), room, groups
        self._firsts: list[int] = []  # the number of each span's first segment
        self._steps: list[int] = []
        count = size = total = 0
        for span in self.spans:
            if not 0 <= span.start < span.stop <= MAX_VARINT:
                raise ValueError(f"a span of [{span.start}, {span.stop})")
            total += span.stop - span.start
            step = room - varint_size(span.stream_id)
            self._firsts.append(count)
            self._steps.append(step)
            count += -(-(span.stop - span.start) // step)
            size = max(size, step)
        if total > MOST_PROTECTED or not groups <= count <= groups * MOST_SEGMENTS:
            raise ValueError(f"{total} bytes, {count} segments in {groups} groups")
        self.count, self.size = count, size

    @property
    def words(self) -> int:
        """64-bit words that a segment takes."""
        return -(-self.size // 8)

    def members(self, group: int) -> int:
        """Return how many segments a group has."""
        return (self.count - group + self.groups - 1) // self.groups

    def segments(self, group: int) -> Iterator[tuple[ProtectedSpan, int, int]]:
        """Iterate over the segments of a group, each as a span and its bytes [start, stop)."""
        at, last = 0, len(self._firsts) - 1
        for number in range(group, self.count, self.groups):
            while at < last and self._firsts[at + 1] <= number:
                at += 1
            span, step = self.spans[at], self._steps[at]
            start = span.start + (number - self._firsts[at]) * step
            yield span, start, min(start + step, span.stop)

    def step(self, span: ProtectedSpan) -> int:
        """Return how many bytes of a span a segment has."""
        return self.room - varint_size(span.stream_id)
