"""Which frames ask for an answer; acknowledgements as aioquic writes and reads them. More is in test_frame_reader."""

from __future__ import annotations

from collections.abc import Sequence

from aioquic.buffer import Buffer
from aioquic.quic.packet import QuicFrameType, pull_ack_frame, push_ack_frame
from aioquic.quic.rangeset import RangeSet
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll_transport.quic.frames import (
    AckFrame,
    CloseFrame,
    FairRateFrame,
    PingFrame,
    StampFrame,
    StreamFrame,
    asks_for_acknowledgement,
)
from quicoll_transport.quic.varint import MAX_VARINT

fixed = settings(derandomize=True, deadline=None, max_examples=200)
number = st.one_of(st.integers(0, 300), st.integers(0, MAX_VARINT))


@st.composite
def ranges(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Half-open and descending, with gaps between them."""
    at, found = draw(st.integers(0, 1 << 40)), []
    for gap, length in draw(st.lists(st.tuples(st.integers(1, 20000), st.integers(1, 20000)), min_size=1, max_size=20)):
        found.append((at + gap, at + gap + length))
        at += gap + length
    return found[::-1]


def test_only_acknowledgements_with_their_stamps_and_fair_rates_and_the_end_are_not_acknowledged() -> None:
    assert not asks_for_acknowledgement(AckFrame([(0, 1)], 0))
    assert not asks_for_acknowledgement(CloseFrame(0, None, b""))
    assert not asks_for_acknowledgement(StampFrame(0))
    assert not asks_for_acknowledgement(FairRateFrame(0, is_full=False))
    assert asks_for_acknowledgement(PingFrame())
    assert asks_for_acknowledgement(StreamFrame(0, 0, b""))


@fixed
@given(acknowledged=ranges(), delay=number)
def test_acknowledgements_are_aioquics(acknowledged: Sequence[tuple[int, int]], delay: int) -> None:
    buffer = Buffer(capacity=1 << 12)
    push_ack_frame(buffer, RangeSet([range(*pair) for pair in acknowledged[::-1]]), delay, 1 << 12)
    assert AckFrame(acknowledged, delay).encode() == bytes((QuicFrameType.ACK,)) + buffer.data
    theirs, their_delay = pull_ack_frame(Buffer(data=AckFrame(acknowledged, delay).encode()[1:]))
    assert ([(found.start, found.stop) for found in theirs][::-1], their_delay) == (acknowledged, delay)
