"""The peer's streams: which may be, what they may hold, who hears of them, and what is over."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from quicoll_transport.quic.control import ControlFrames, ControlKey, Saying
from quicoll_transport.quic.flow import StreamLimits
from quicoll_transport.quic.frame_reader import read_frames
from quicoll_transport.quic.frames import (
    FINAL_SIZE_ERROR,
    FLOW_CONTROL_ERROR,
    STREAM_LIMIT_ERROR,
    STREAM_STATE_ERROR,
    FrameError,
    MaxDataFrame,
    MaxStreamDataFrame,
    MaxStreamsFrame,
    ResetStreamFrame,
    StopSendingFrame,
)
from quicoll_transport.quic.inbound import InboundStreams
from quicoll_transport.quic.outbound import OutboundStreams
from quicoll_transport.quic.streams import ReceiveStream

LIMITS = StreamLimits(data=4000, stream_ours=1000, stream_theirs=1000, stream_uni=2000, streams_bidi=1, streams_uni=4)
BIDI, UNI = 1, 3  # of the peer, who is the server
OURS_UNI, OURS_BIDI = 2, 0


class Target:
    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)
        self.view = memoryview(self.memory)
        self.filled, self.alive = 0, True


class Reader:
    """Reads what comes, unless `waits`; with `header` the bytes behind so many go to a target.

    stops: what to do with a stream first.
    """

    stops: Callable[[ReceiveStream], None] | None = None

    def __init__(self) -> None:
        self.read = bytearray()
        self.told: list[int] = []
        self.gone: list[tuple[int, int]] = []
        self.waits = False
        self.header = 0
        self.target = Target(5000)

    def stream_arrived(self, stream: ReceiveStream) -> None:
        self.told.append(stream.id)
        if self.stops is not None:
            self.stops(stream)
        if self.header and not stream.is_direct and stream.peek(self.header) is not None:
            stream.direct(self.target, self.header)
        elif not (self.waits or self.header or stream.is_direct):
            self.read += stream.read()

    def stream_reset(self, stream: ReceiveStream, code: int) -> None:
        self.gone.append((stream.id, code))


class Streams:
    def __init__(self) -> None:
        self.control, self.reader = ControlFrames(), Reader()
        self.outbound = OutboundStreams(is_client=True, limits=LIMITS, control=ControlFrames())
        self.inbound = InboundStreams(
            is_client=True, limits=LIMITS, outbound=self.outbound, control=self.control, reader=self.reader
        )

    def arrive(self, offset: int, size: int, *, stream: int = UNI, fin: bool = False) -> None:
        self.inbound.on_stream(stream, offset, memoryview(bytes(size)), size, fin=fin)

    def wanted(self) -> list[ControlKey]:
        return self.control.fill([], 10_000)[0]

    def said(self) -> list[object]:
        parts: list[bytes | memoryview] = []
        self.control.fill(parts, 10_000)
        return list(read_frames(b"".join(parts))) if parts else []


def refused(work: Callable[[], None], code: int) -> None:
    with pytest.raises(FrameError) as caught:
        work()
    assert caught.value.code == code


@pytest.fixture
def streams() -> Streams:
    return Streams()


# -- which there may be ------------------------------------------------------------------------------------------------


def test_the_peer_may_not_send_on_our_unidirectional_streams_nor_on_any_that_we_did_not_open(streams: Streams) -> None:
    """RFC 9000 section 19.8."""
    refused(lambda: streams.arrive(0, 1, stream=OURS_UNI), STREAM_STATE_ERROR)
    refused(lambda: streams.arrive(0, 1, stream=OURS_BIDI), STREAM_STATE_ERROR)
    streams.outbound.open(unidirectional=False)
    streams.arrive(0, 1, stream=OURS_BIDI)
    streams.outbound.open()
    refused(lambda: streams.arrive(0, 1, stream=OURS_UNI), STREAM_STATE_ERROR)
    refused(lambda: streams.inbound.on_blocked(OURS_UNI), STREAM_STATE_ERROR)
    refused(lambda: streams.inbound.on_reset(ResetStreamFrame(OURS_UNI, 0, 0)), STREAM_STATE_ERROR)


def test_more_streams_than_were_allowed_are_refused_each_kind_by_itself(streams: Streams) -> None:
    """Section 4.6; a stream that is opened opens nothing but itself, whatever is below it."""
    streams.arrive(0, 1, stream=UNI + 4 * 3)
    assert len(streams.inbound) == 1
    refused(lambda: streams.arrive(0, 1, stream=UNI + 4 * 4), STREAM_LIMIT_ERROR)
    streams.arrive(0, 1, stream=BIDI)
    refused(lambda: streams.inbound.on_blocked(BIDI + 4), STREAM_LIMIT_ERROR)


def test_streams_that_are_over_make_room_for_others_and_the_peer_hears_of_it(streams: Streams) -> None:
    for i in range(20):
        streams.arrive(0, 10, stream=UNI + 4 * i, fin=True)
        streams.said()
        assert len(streams.inbound) == 0
    streams.arrive(0, 10, stream=UNI + 4 * 20, fin=True)
    streams.arrive(0, 10, stream=UNI + 4 * 21, fin=True)
    assert any(isinstance(frame, MaxStreamsFrame) and frame.limit > 22 for frame in streams.said())


def test_what_comes_late_for_a_stream_that_is_over_does_not_open_it_again(streams: Streams) -> None:
    """Section 3.2."""
    streams.arrive(0, 10, fin=True)
    told = len(streams.reader.told)
    streams.arrive(0, 10, fin=True)
    streams.inbound.on_reset(ResetStreamFrame(UNI, 0, 10))
    assert (len(streams.inbound), len(streams.reader.told), streams.reader.gone) == (0, told, [])
    assert streams.inbound.received == 10


# -- what they may hold ------------------------------------------------------------------------------------------------


def test_a_stream_and_all_together_are_held_to_their_limits(streams: Streams) -> None:
    """Section 4.1. Counted is the highest offset of each, gaps included."""
    streams.reader.waits = True
    refused(lambda: streams.arrive(0, 1001, stream=BIDI), FLOW_CONTROL_ERROR)
    refused(lambda: streams.arrive(2000, 1), FLOW_CONTROL_ERROR)
    other = Streams()
    other.reader.waits = True
    other.arrive(1999, 1)
    other.arrive(1999, 1, stream=UNI + 4)
    assert other.inbound.received == 4000
    refused(lambda: other.arrive(0, 1, stream=UNI + 8), FLOW_CONTROL_ERROR)
    other.arrive(0, 1999)  # into the gap: it has been counted


def test_limits_slide_with_what_was_taken_and_not_with_what_was_sent(streams: Streams) -> None:
    streams.reader.waits = True
    streams.arrive(0, 1900)
    assert streams.wanted() == []
    streams.reader.waits = False
    streams.arrive(1900, 100)
    assert streams.inbound.taken == 2000
    said = streams.said()
    assert MaxStreamDataFrame(UNI, 4000) in said
    streams.arrive(2000, 1)  # what has been told counts
    streams.arrive(0, 600, stream=UNI + 4)
    assert MaxDataFrame(6601) in streams.said()


def test_a_stream_whose_size_is_known_needs_no_more_room(streams: Streams) -> None:
    streams.reader.waits = True
    streams.arrive(0, 1500, fin=True)
    (stream,) = streams.inbound._streams.values()
    streams.reader.waits = False
    streams.arrive(0, 1500, fin=True)
    assert stream.is_whole
    assert (Saying.MAX_STREAM_DATA, UNI) not in streams.wanted()


def test_a_reset_counts_what_was_never_sent_and_makes_room_for_it(streams: Streams) -> None:
    """Section 4.5: both sides have to agree on what the connection has used."""
    streams.reader.waits = True
    streams.arrive(0, 100)
    streams.inbound.on_reset(ResetStreamFrame(UNI, 9, 1900))
    assert (streams.inbound.received, streams.inbound.taken) == (1900, 1900)
    assert streams.reader.gone == [(UNI, 9)]
    assert len(streams.inbound) == 0
    streams.inbound.on_reset(ResetStreamFrame(UNI + 4, 9, 700))  # one that never began
    assert streams.inbound.taken == 2600
    assert Saying.MAX_DATA in [kind for kind, _ in streams.wanted()]


def test_an_end_may_not_move_whoever_says_it(streams: Streams) -> None:
    streams.reader.waits = True
    streams.arrive(0, 100)
    refused(lambda: streams.inbound.on_reset(ResetStreamFrame(UNI, 0, 99)), FINAL_SIZE_ERROR)
    refused(lambda: streams.inbound.on_reset(ResetStreamFrame(UNI, 0, 2001)), FLOW_CONTROL_ERROR)
    other = Streams()
    other.arrive(50, 10, fin=True)
    refused(lambda: other.arrive(60, 1), FINAL_SIZE_ERROR)
    refused(lambda: other.inbound.on_reset(ResetStreamFrame(UNI, 0, 61)), FINAL_SIZE_ERROR)


def test_holes_of_all_streams_are_counted_together_and_go_with_their_stream() -> None:
    streams = Streams()
    most = 64 + LIMITS.data // 256
    for i in range(most // 2):
        streams.arrive(2 * i + 1, 1)
        streams.arrive(2 * i + 1, 1, stream=UNI + 4)
    assert streams.inbound.holes == most // 2 * 2
    streams.inbound.on_reset(ResetStreamFrame(UNI, 0, 1000))
    assert streams.inbound.holes == most // 2
    while streams.inbound.holes < most:
        streams.arrive(2 * streams.inbound.holes + 1, 1, stream=UNI + 8)
    with pytest.raises(FrameError, match="holes"):
        streams.arrive(1999, 1, stream=UNI + 8)


# -- who hears of them -------------------------------------------------------------------------------------------------


def test_the_reader_hears_of_what_is_in_order_and_of_the_end_alone(streams: Streams) -> None:
    streams.arrive(10, 10)
    assert streams.reader.told == []
    streams.arrive(0, 10)
    assert (streams.reader.told, len(streams.reader.read)) == ([UNI], 20)
    streams.arrive(5, 10)  # again
    assert streams.reader.told == [UNI]
    streams.arrive(20, 0, fin=True)
    assert streams.reader.told == [UNI, UNI]
    assert len(streams.inbound) == 0


def rows(count: int, step: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.arange(count * step, dtype=np.uint32).astype(np.uint8).reshape(count, step)


@pytest.mark.interpreted
@pytest.mark.parametrize("step", [20, 100, 700])
def test_a_header_in_the_first_row_says_where_the_other_rows_go(
    streams: Streams, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    hold = ReceiveStream._hold
    monkeypatch.setattr(ReceiveStream, "_hold", lambda *of: (held.append(of[-1]), hold(*of)))
    streams.reader.header = 16
    table = rows(4, step)[:, :]
    count = min(4, 2000 // step)
    streams.inbound.on_rows(UNI, 0, table[:count], fin=False)
    expected = table[:count].tobytes()[16:]
    assert streams.reader.target.filled == len(expected)
    assert bytes(streams.reader.target.memory[: len(expected)]) == expected
    assert streams.reader.told == [UNI], "what has its place needs no reader"
    (stream,) = streams.inbound._streams.values()
    assert not stream._held
    assert held == [min(step, 256)], "only its beginning waits for the reader"
    assert streams.inbound.taken == count * step


def test_rows_are_as_good_as_their_frames_one_by_one() -> None:
    table = rows(5, 100)
    together, alone = Streams(), Streams()
    together.inbound.on_rows(UNI, 0, table, fin=True)
    for i, row in enumerate(table):
        alone.inbound.on_stream(UNI, 100 * i, memoryview(row.tobytes()), 100, fin=i == 4)
    for streams in (together, alone):
        assert bytes(streams.reader.read) == table.tobytes()
        assert (streams.inbound.received, streams.inbound.taken, len(streams.inbound)) == (500, 500, 0)
    assert together.wanted() == alone.wanted()


def test_a_stream_can_be_read_later(streams: Streams) -> None:
    streams.reader.waits = True
    streams.arrive(0, 1500)
    (stream,) = streams.inbound._streams.values()
    assert streams.inbound.taken == 0
    streams.reader.waits = False
    streams.inbound.again(stream)
    assert streams.inbound.taken == 1500
    streams.arrive(1500, 0, fin=True)
    streams.inbound.again(stream)  # it is over: nobody hears of it
    assert len(streams.reader.told) == 3


def test_who_is_asked_to_stop_is_asked_while_it_may_go_on(streams: Streams) -> None:
    """Section 3.5: no STOP_SENDING for a stream whose end is known; what comes still is taken and thrown away."""
    codes = itertools.count(7)
    streams.reader.stops = lambda stream: streams.inbound.stop(stream, next(codes))
    streams.arrive(0, 100)
    (stream,) = streams.inbound._streams.values()
    streams.inbound.again(stream)
    assert StopSendingFrame(UNI, 7) in streams.said()
    streams.arrive(100, 1800)
    assert not stream._held
    streams.arrive(100, 1800)
    assert streams.inbound.taken == 1900
    streams.inbound._control.want(Saying.STOP_SENDING, UNI)  # it was lost
    streams.arrive(1950, 0, fin=True)
    assert not [frame for frame in streams.said() if isinstance(frame, StopSendingFrame)]
    streams.arrive(1900, 50)
    assert len(streams.inbound) == 0
    known = Streams()
    known.reader.stops = lambda stream: known.inbound.stop(stream, 7)
    known.arrive(100, 100, fin=True)
    known.arrive(0, 50)
    assert not [frame for frame in known.said() if isinstance(frame, StopSendingFrame)]
    assert known.inbound.taken == 50


def test_released_streams_hold_nothing_and_tell_nobody(streams: Streams) -> None:
    streams.reader.header = 16
    streams.arrive(0, 100)
    streams.arrive(0, 10, stream=UNI + 4)
    streams.inbound.release()
    for stream in streams.inbound._streams.values():
        assert (stream._target, bytes(stream._held)) == (None, b"")
    told = len(streams.reader.told)
    streams.arrive(10, 10, stream=UNI + 4)
    assert len(streams.reader.told) == told
