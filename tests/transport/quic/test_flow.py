"""Windows slide with what was taken; limits only grow; a stream that has ended does not begin again."""

from __future__ import annotations

import pytest

from quicoll_transport.quic.flow import Allowance, PeerLimit, StreamAllowance
from quicoll_transport.quic.frames import FLOW_CONTROL_ERROR, STREAM_LIMIT_ERROR, FrameError


def test_a_window_slides_with_what_was_taken() -> None:
    allowance = Allowance(100)
    allowance.demand(100)
    with pytest.raises(FrameError) as caught:
        allowance.demand(101)
    assert caught.value.code == FLOW_CONTROL_ERROR
    told = [allowance.limit for _ in range(20) if allowance.take(10)]
    assert told == [160, 220, 280]
    assert allowance.limit - allowance.taken <= allowance.window


def test_a_limit_only_grows_and_is_complained_of_once() -> None:
    limit = PeerLimit(10)
    limit.used = 10
    assert limit.room == 0
    assert limit.is_news()
    assert not limit.is_news()
    assert not limit.raise_to(10)
    assert not limit.raise_to(5)
    assert limit.raise_to(30)
    assert limit.room == 20
    assert limit.is_news()


def test_streams_are_let_in_as_others_end_and_never_twice() -> None:
    streams = StreamAllowance(8)
    with pytest.raises(FrameError) as caught:
        streams.is_over(8)
    assert caught.value.code == STREAM_LIMIT_ERROR
    assert not streams.is_over(3)
    raised = [streams.limit for index in (3, 0, 5, 1, 2, 7, 4, 6) if streams.end(index)]
    assert raised == [12, 16]
    assert all(streams.is_over(index) for index in range(8))
    assert not streams.is_over(8)
