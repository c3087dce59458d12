"""Reading undoes writing, and wrong bytes lead to a FrameError only."""

from __future__ import annotations

from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll_transport.quic.frame_reader import read_frames
from quicoll_transport.quic.frames import (
    FRAME_ENCODING_ERROR,
    PROTOCOL_VIOLATION,
    AckFrame,
    CloseFrame,
    CryptoFrame,
    DataBlockedFrame,
    FairRateFrame,
    Frame,
    FrameError,
    HandshakeDoneFrame,
    MaxDataFrame,
    MaxStreamDataFrame,
    MaxStreamsFrame,
    NewConnectionIdFrame,
    NewTokenFrame,
    ParityFrame,
    PathChallengeFrame,
    PathResponseFrame,
    PingFrame,
    ProtectedFrame,
    RepairedFrame,
    ResetStreamFrame,
    RetireConnectionIdFrame,
    StampFrame,
    StopSendingFrame,
    StreamDataBlockedFrame,
    StreamFrame,
    StreamsBlockedFrame,
    stream_head,
)
from quicoll_transport.quic.varint import MAX_VARINT, varint

fixed = settings(derandomize=True, deadline=None, max_examples=200)
number = st.one_of(st.integers(0, 300), st.integers(0, MAX_VARINT))
data = st.binary(max_size=40)
streams = st.integers(0, 1 << 60)
eight = st.binary(min_size=8, max_size=8)


@st.composite
def ranges(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Half-open and descending, with gaps between them."""
    at, found = draw(st.integers(0, 1 << 40)), []
    for gap, length in draw(st.lists(st.tuples(st.integers(1, 20000), st.integers(1, 20000)), min_size=1, max_size=20)):
        found.append((at + gap, at + gap + length))
        at += gap + length
    return found[::-1]


spans = st.builds(
    lambda stream_id, start, size, fin: (stream_id, start, start + size, fin),
    number, st.integers(0, 1 << 60), st.integers(0, 1 << 60), st.booleans(),
)  # fmt: skip
counts = st.none() | st.tuples(number, number, number)
frames = st.one_of(
    st.builds(PingFrame),
    st.builds(AckFrame, ranges(), number, counts),
    st.builds(ResetStreamFrame, number, number, number),
    st.builds(StopSendingFrame, number, number),
    st.builds(CryptoFrame, st.integers(0, 1 << 61), data),
    st.builds(NewTokenFrame, st.binary(min_size=1, max_size=40)),
    st.builds(StreamFrame, number, st.integers(0, 1 << 61), data, st.booleans()),
    st.builds(MaxDataFrame, number),
    st.builds(MaxStreamDataFrame, number, number),
    st.builds(MaxStreamsFrame, streams, st.booleans()),
    st.builds(DataBlockedFrame, number),
    st.builds(StreamDataBlockedFrame, number, number),
    st.builds(StreamsBlockedFrame, streams, st.booleans()),
    st.builds(
        NewConnectionIdFrame,
        st.integers(1000, 2000),
        st.integers(0, 1000),
        st.binary(min_size=1, max_size=20),
        st.binary(min_size=16, max_size=16),
    ),
    st.builds(RetireConnectionIdFrame, number),
    st.builds(PathChallengeFrame, eight),
    st.builds(PathResponseFrame, eight),
    st.builds(CloseFrame, number, st.none() | number, data),
    st.builds(HandshakeDoneFrame),
    st.builds(ProtectedFrame, number, number, number, st.lists(spans, max_size=20)),
    st.builds(RepairedFrame, number),
    st.builds(StampFrame, number),
    st.builds(FairRateFrame, st.integers(0, (1 << 61) - 1), st.booleans()),
)


@fixed
@given(sent=st.lists(st.tuples(frames, st.integers(0, 200)), min_size=1, max_size=8))
def test_reading_undoes_writing_whatever_padding_is_between(sent: list[tuple[Frame, int]]) -> None:
    payload = b"".join(bytes(padding) + frame.encode() + bytes(padding // 3) for frame, padding in sent)
    expected = [frame for frame, _ in sent]
    for memory in (payload, bytearray(payload), memoryview(payload)):
        assert list(read_frames(memory)) == expected
        assert [type(frame) for frame in read_frames(memory)] == [type(frame) for frame in expected]


@fixed
@given(before=frames, parity=st.builds(ParityFrame, number, number, number, data))
def test_parity_is_all_that_is_left_of_its_packet(before: Frame, parity: ParityFrame) -> None:
    assert list(read_frames(before.encode() + parity.encode())) == [before, parity]


@fixed
@given(payload=st.binary(min_size=1, max_size=80))
def test_any_bytes_are_frames_or_a_frame_error(payload: bytes) -> None:
    assert_read_or_refused(payload)


@fixed
@given(frame=frames, where=st.integers(0, 1 << 30), value=st.integers(0, 255))
def test_a_frame_with_one_byte_changed_is_frames_or_a_frame_error(frame: Frame, where: int, value: int) -> None:
    payload = bytearray(frame.encode())
    payload[where % len(payload)] = value
    assert_read_or_refused(bytes(payload))


def assert_read_or_refused(payload: bytes) -> None:
    taken, code = 0, None
    try:
        for frame in read_frames(payload):
            taken += len(frame.data) if isinstance(frame, StreamFrame | CryptoFrame) else 0
    except FrameError as error:
        code = error.code
    assert taken < len(payload)
    assert code in (None, FRAME_ENCODING_ERROR, PROTOCOL_VIOLATION)


@fixed
@given(frame=frames.filter(lambda frame: not isinstance(frame, PingFrame | HandshakeDoneFrame)), at=st.integers(0, 99))
def test_a_frame_that_is_cut_short_is_refused(frame: Frame, at: int) -> None:
    whole = frame.encode()
    with pytest.raises(FrameError, match="cut short") as refused:
        list(read_frames(whole[: 1 + at % (len(whole) - 1)]))
    assert refused.value.code == FRAME_ENCODING_ERROR


def test_frames_before_a_wrong_one_are_given_first() -> None:
    reader = read_frames(b"\x01\x1e\x3f")
    assert [next(reader), next(reader)] == [PingFrame(), HandshakeDoneFrame()]
    with pytest.raises(FrameError, match="unknown frame type 0x3f"):
        next(reader)


@pytest.mark.parametrize(
    ("payload", "code", "text"),
    [
        (b"", PROTOCOL_VIOLATION, "without frames"),
        (b"\x1f", FRAME_ENCODING_ERROR, "unknown"),
        (b"\x30", FRAME_ENCODING_ERROR, "unknown"),
        (b"\x40\x01", PROTOCOL_VIOLATION, "longer than it must be"),
        (b"\x80\x00\x00\x30", PROTOCOL_VIOLATION, "longer than it must be"),
        (b"\x40\x42", FRAME_ENCODING_ERROR, "unknown"),
        (b"\x40", FRAME_ENCODING_ERROR, "cut short"),
        (b"\x6a", FRAME_ENCODING_ERROR, "cut short"),
        (b"\x6a\x55\x00", FRAME_ENCODING_ERROR, "unknown frame type 0x2a55"),
        (b"\x6a\x50\x00\x00\x00" + varint(MAX_VARINT), FRAME_ENCODING_ERROR, "cut short"),
        (b"\x6a\x50\x00\x00\x00\x01\x02" + 2 * varint(MAX_VARINT), FRAME_ENCODING_ERROR, "beyond"),
        (b"\x02\x05\x00\x00\x06", FRAME_ENCODING_ERROR, "negative"),
        (b"\x02\x05\x00\x01\x00\x04\x00", FRAME_ENCODING_ERROR, "negative"),
        (b"\x02" + varint(9) + b"\x00" + varint(MAX_VARINT) + b"\x00", FRAME_ENCODING_ERROR, "cut short"),
        (b"\x06" + varint(MAX_VARINT) + b"\x01\x00", FRAME_ENCODING_ERROR, "beyond"),
        (b"\x06\x00" + varint(MAX_VARINT), FRAME_ENCODING_ERROR, "cut short"),
        (b"\x07\x00", FRAME_ENCODING_ERROR, "empty token"),
        (b"\x0c\x00" + varint(MAX_VARINT) + b"\x00", FRAME_ENCODING_ERROR, "beyond"),
        (b"\x0a\x00" + varint(MAX_VARINT), FRAME_ENCODING_ERROR, "cut short"),
        (b"\x12" + varint((1 << 60) + 1), FRAME_ENCODING_ERROR, "more streams"),
        (b"\x17" + varint((1 << 60) + 1), FRAME_ENCODING_ERROR, "more streams"),
        (b"\x18\x02\x00\x00" + bytes(16), FRAME_ENCODING_ERROR, "0 bytes"),
        (b"\x18\x02\x00\x15" + bytes(37), FRAME_ENCODING_ERROR, "21 bytes"),
        (b"\x18\x02\x03\x08" + bytes(24), FRAME_ENCODING_ERROR, "before it is known"),
        (b"\x1c\x00\x00" + varint(1 << 40), FRAME_ENCODING_ERROR, "cut short"),
    ],
)
def test_what_rfc_9000_forbids_is_refused(payload: bytes, code: int, text: str) -> None:
    with pytest.raises(FrameError, match=text) as refused:
        list(read_frames(payload))
    assert refused.value.code == code


def test_a_stream_frame_without_length_takes_the_rest_and_copies_nothing() -> None:
    memory = bytearray(stream_head(7, 1 << 20, None, fin=True) + b"payload")
    (frame,) = read_frames(memory)
    assert isinstance(frame, StreamFrame)
    assert (frame.stream_id, frame.offset, frame.fin, bytes(frame.data)) == (7, 1 << 20, True, b"payload")
    memory[-1] = ord("!")
    assert bytes(frame.data) == b"payloa!"


@pytest.mark.parametrize(
    "unit", [b"\x00\x01", b"\x01", b"\x0a\x00\x00", b"\x00"], ids=["mixed", "ping", "stream", "pad"]
)
def test_reading_takes_time_in_proportion_to_the_payload(unit: bytes) -> None:
    """Sixteen times the payload takes far less than the 256 times that a square would."""

    def seconds(size: int) -> float:
        payload = (unit * size)[:size]
        best = 1.0
        for _ in range(3):
            began = process_time()
            for _frame in read_frames(payload):
                pass
            best = min(best, process_time() - began)
        return best

    assert seconds(64 * 900) < 100 * max(seconds(4 * 900), 1e-4)
