"""The order of streams, and what holds them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from quicoll_transport.quic.control import ControlFrames, ControlKey, Saying
from quicoll_transport.quic.flow import StreamLimits
from quicoll_transport.quic.frames import (
    STREAM_STATE_ERROR,
    FrameError,
    MaxStreamDataFrame,
    MaxStreamsFrame,
    StopSendingFrame,
)
from quicoll_transport.quic.outbound import OutboundStreams

if TYPE_CHECKING:
    from quicoll_transport.quic.streams import SendStream

LIMITS = StreamLimits(
    data=1 << 20, stream_ours=1 << 18, stream_theirs=1 << 18, stream_uni=1 << 18, streams_bidi=1, streams_uni=4
)


def streams(limits: StreamLimits = LIMITS) -> tuple[OutboundStreams, ControlFrames]:
    control = ControlFrames()
    return OutboundStreams(is_client=True, limits=limits, control=control), control


def opened(outbound: OutboundStreams, size: int, *, urgent: bool = False) -> SendStream:
    stream = outbound.open(unidirectional=not urgent, urgent=urgent)
    outbound.write(stream, memoryview(bytes(size)), fin=not urgent)
    return stream


def wanted(control: ControlFrames) -> list[ControlKey]:
    return control.fill([], 10_000)[0]


def send_all(outbound: OutboundStreams, stream: SendStream) -> int:
    """Send what may be sent of a stream; how many bytes that was."""
    total = 0
    while True:
        start, stop = outbound.next_piece(stream, 1 << 30)
        fin = stream.fin and stop == stream.length
        if stop == start:
            outbound.look_again(stream)
            return total
        outbound.sent(stream, start, stop, fin=fin)
        total += stop - start


def test_urgent_ones_go_first_then_small_ones_then_bulk_each_by_age() -> None:
    outbound, _ = streams()
    bulk = [opened(outbound, 100_000), opened(outbound, 50_000)]
    small = [opened(outbound, 100), opened(outbound, 10)]
    urgent = opened(outbound, 10, urgent=True)
    assert list(outbound.small()) == [urgent, *small]
    assert outbound.oldest_bulk() is bulk[0]
    send_all(outbound, bulk[0])
    assert outbound.oldest_bulk() is bulk[1]
    outbound.on_lost(bulk[0], 0, 20_000, fin=False)
    assert outbound.oldest_bulk() is bulk[0], "the oldest again"


def test_what_grows_becomes_bulk_and_what_is_nearly_through_becomes_small() -> None:
    outbound, _ = streams()
    stream = outbound.open()
    outbound.write(stream, bytes(72))
    assert list(outbound.small()) == [stream]
    outbound.write(stream, memoryview(bytes(100_000)), fin=True)
    assert outbound.oldest_bulk() is stream
    outbound.sent(stream, 0, 100_000, fin=False)
    assert outbound.oldest_bulk() is None
    assert list(outbound.small()) == [stream]


def test_streams_beyond_the_limit_wait_and_can_be_withdrawn() -> None:
    outbound, control = streams()
    made = [opened(outbound, 10) for _ in range(7)]
    assert [stream.id for stream in made] == [2, 6, 10, 14, -1, -1, -1]
    assert wanted(control) == [(Saying.STREAMS_BLOCKED, 1)]
    outbound.reset(made[5], 0)
    outbound.on_max_streams(MaxStreamsFrame(3, True))  # an older limit changes nothing
    assert made[4].id == -1
    outbound.on_max_streams(MaxStreamsFrame(100, True))
    assert [stream.id for stream in made] == [2, 6, 10, 14, 18, -1, 22]
    assert wanted(control) == []


def test_a_stream_that_is_given_up_again_is_gone_once_whether_it_waits_or_not() -> None:
    outbound, control = streams()
    gone: list[SendStream] = []
    outbound.on_gone = gone.append
    made = [opened(outbound, 10) for _ in range(5)]
    for stream in (made[4], made[0]) * 2:
        outbound.reset(stream, 3)
    outbound.finish(made[4])
    assert gone == [made[4], made[0]]
    assert wanted(control).count((Saying.RESET_STREAM, made[0].id)) == 1


def test_limits_block_and_let_go_and_a_part_is_kept_for_what_is_urgent() -> None:
    outbound, control = streams()
    made = [opened(outbound, 1 << 18) for _ in range(4)]
    assert sum(send_all(outbound, stream) for stream in made) == (1 << 20) - (1 << 16)
    assert wanted(control) == [(Saying.DATA_BLOCKED, 0)]
    urgent = opened(outbound, 1000, urgent=True)
    assert send_all(outbound, urgent) == 1000
    outbound.on_max_data(1 << 21)
    assert outbound.oldest_bulk() is made[3]
    assert send_all(outbound, made[3]) == 1 << 16


def test_a_streams_own_limit_blocks_only_it() -> None:
    outbound, control = streams()
    long, other = opened(outbound, 1 << 19), opened(outbound, 50_000)
    assert send_all(outbound, long) == 1 << 18
    assert wanted(control) == [(Saying.STREAM_DATA_BLOCKED, long.id)]
    assert outbound.oldest_bulk() is other
    outbound.on_max_stream_data(MaxStreamDataFrame(long.id, 1 << 19))
    assert outbound.oldest_bulk() is long


def test_a_stream_is_gone_when_all_is_acknowledged_or_its_reset_is() -> None:
    outbound, control = streams()
    gone: list[SendStream] = []
    outbound.on_gone = gone.append
    first, second, third = (opened(outbound, 100) for _ in range(3))
    for stream in (first, second, third):
        send_all(outbound, stream)
    outbound.on_acked(first, 0, 100, fin=True)
    outbound.on_stop_sending(StopSendingFrame(second.id, 9))
    outbound.finish(third)
    assert gone == [first, second, third]
    assert len(outbound) == 1
    assert wanted(control) == [(Saying.RESET_STREAM, second.id)]
    outbound.on_reset_acked(second.id)
    assert len(outbound) == 0


def test_frames_about_streams_that_we_do_not_send_on_are_refused() -> None:
    outbound, _ = streams()
    opened(outbound, 10)
    outbound.on_stop_sending(StopSendingFrame(2, 0))
    for stream_id in (6, 0, 3):
        with pytest.raises(FrameError) as caught:
            outbound.on_stop_sending(StopSendingFrame(stream_id, 0))
        assert caught.value.code == STREAM_STATE_ERROR
