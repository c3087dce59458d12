"""Cutting spans of streams into segments: both ends have to count alike, within bounds."""

from __future__ import annotations

import random

import pytest

from quicoll_transport.quic.erasure import MOST_SEGMENTS
from quicoll_transport.quic.segments import MOST_GROUPS, MOST_PROTECTED, MOST_SPANS, ParityLayout, ProtectedSpan


def span(stream_id: int, start: int, stop: int) -> ProtectedSpan:
    return ProtectedSpan(stream_id, start, stop, fin=False)


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_is_in_one_segment_and_groups_take_turns(seed: int) -> None:
    rng = random.Random(seed)
    spans = [
        span(stream_id, start := rng.randrange(100_000), start + rng.randrange(1, 30_000))
        for stream_id in rng.sample((2, 6, 66, 70, 16_386, 70_002), rng.randrange(1, 7))
    ]
    layout = ParityLayout(spans, 1400, groups := rng.randrange(1, 4))
    segments = {}
    for group in range(groups):
        members = list(layout.segments(group))
        assert len(members) == layout.members(group)
        segments.update({group + i * groups: segment for i, segment in enumerate(members)})
    assert sorted(segments) == list(range(layout.count))
    at = {one.stream_id: one.start for one in spans}
    for number in range(layout.count):
        owner, start, stop = segments[number]
        assert start == at[owner.stream_id]
        assert stop - start == layout.step(owner) or stop == owner.stop
        assert 0 < stop - start <= layout.size <= 8 * layout.words
        at[owner.stream_id] = stop
    assert at == {one.stream_id: one.stop for one in spans}


def test_a_segment_is_what_a_packet_carries_of_its_stream() -> None:
    layout = ParityLayout([span(2, 0, 10_000), span(66, 0, 10_000), span(20_002, 0, 10_000)], 1400, 1)
    assert [layout.step(one) for one in layout.spans] == [1399, 1398, 1396]


@pytest.mark.parametrize(
    ("spans", "room", "groups"),
    [
        ([], 1400, 1),
        ([span(2, 0, 10)] * (MOST_SPANS + 1), 1400, 1),
        ([span(2, 0, 9000)], 1400, 0),
        ([span(2, 0, 9000)], 1400, MOST_GROUPS + 1),
        ([span(2, 0, 9000)], 1400, 8),
        ([span(2, 0, 9000)], 0, 1),
        ([span(2, 0, 9000)], 1 << 16, 1),
        ([span(2, 9, 9)], 1400, 1),
        ([span(2, 9, 8)], 1400, 1),
        ([span(2, 0, 1 << 62)], 1400, 1),
        ([span(2, 0, MOST_PROTECTED + 1)], 8000, MOST_GROUPS),
        ([span(2, 0, 1399 * MOST_SEGMENTS + 1)], 1400, 1),
    ],
)
def test_what_is_beyond_a_bound_is_refused(spans: list[ProtectedSpan], room: int, groups: int) -> None:
    with pytest.raises(ValueError, match=r"span|groups"):
        ParityLayout(spans, room, groups)
