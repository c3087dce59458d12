"""NewReno and CUBIC: the rules of their RFCs, and what both have in common."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll_transport.quic.controller import AckSample, LossSample, minimum_window, paced_rate, start_window
from quicoll_transport.quic.cubic import Cubic, _cube_root
from quicoll_transport.quic.newreno import NewReno

fixed = settings(derandomize=True, deadline=None, max_examples=200)
MSS = 1000
MS = 1_000_000
SECOND = 1000 * MS
RTT = 100 * MS
BOTH = pytest.mark.parametrize("kind", [NewReno, Cubic])


def ack(
    nbytes: int, now_ns: int = 0, *, limited: bool = False, in_flight: int = 0, fresh: int | None = None
) -> AckSample:
    fresh = nbytes if fresh is None else fresh
    return AckSample(now_ns, now_ns, nbytes, fresh, in_flight, 0, 0, 0, None, limited, RTT, RTT, RTT, now_ns)


def loss(now_ns: int = 0, *, begins: bool = True) -> LossSample:
    return LossSample(now_ns, MSS, 10 * MSS, 0, begins)


def grown(kind: type[NewReno | Cubic], window: int) -> NewReno | Cubic:
    controller = kind(MSS)
    controller.on_acked(ack(window - controller.window))
    return controller


def test_the_first_window() -> None:
    """RFC 9002 section 7.2."""
    assert [start_window(size) for size in (1200, 1452, 1500, 9000, 65000)] == [12000, 14520, 14720, 18000, 130000]
    assert minimum_window(1200) == 2400


@BOTH
def test_slow_start_grows_by_what_arrives(kind: type[NewReno | Cubic]) -> None:
    controller = kind(MSS)
    assert controller.window == 10 * MSS
    controller.on_acked(ack(3500))
    assert controller.window == 13_500


@BOTH
def test_what_was_sent_before_the_recovery_period_grows_nothing(kind: type[NewReno | Cubic]) -> None:
    controller = grown(kind, 100 * MSS)
    controller.on_lost(loss())
    window = controller.window
    controller.on_acked(ack(50 * MSS, fresh=0))
    assert controller.window == window


@BOTH
def test_a_window_that_is_not_used_does_not_grow(kind: type[NewReno | Cubic]) -> None:
    """RFC 9002 section 7.8."""
    controller = grown(kind, 100 * MSS)
    controller.on_acked(ack(MSS, limited=True, in_flight=40 * MSS))
    assert controller.window == 100 * MSS
    controller.on_acked(ack(MSS, limited=True, in_flight=50 * MSS))
    assert controller.window == 101 * MSS, "slow start doubles what was sent a round trip ago"
    controller.on_lost(loss())
    window = controller.window
    for at in range(100):
        controller.on_acked(ack(window, at * RTT, limited=True, in_flight=window * 7 // 10))
    assert controller.window == window
    for at in range(100, 110):
        controller.on_acked(ack(window, at * RTT, limited=True, in_flight=window))
    assert controller.window > window


@BOTH
def test_one_reduction_in_a_recovery_period(kind: type[NewReno | Cubic]) -> None:
    controller = grown(kind, 100 * MSS)
    controller.on_lost(loss())
    window = controller.window
    assert window == (50 if kind is NewReno else 70) * MSS
    controller.on_lost(loss(begins=False))
    assert controller.window == window


@BOTH
def test_never_below_two_datagrams(kind: type[NewReno | Cubic]) -> None:
    controller = kind(MSS)
    for at in range(20):
        controller.on_lost(loss(at * RTT))
    assert controller.window == 2 * MSS
    controller.on_persistent_congestion(0)
    assert controller.window == 2 * MSS
    controller.on_datagram_size(9000)
    assert controller.window == 18_000


@BOTH
def test_persistent_congestion_begins_at_the_bottom_with_slow_start(kind: type[NewReno | Cubic]) -> None:
    controller = grown(kind, 100 * MSS)
    controller.on_lost(loss())
    controller.on_persistent_congestion(0)
    assert controller.window == 2 * MSS
    controller.on_acked(ack(2 * MSS, SECOND))
    assert controller.window == 4 * MSS
    controller.on_spurious(SECOND)
    assert controller.window == 4 * MSS, "that is not taken back"


@BOTH
def test_a_mistake_is_undone_once(kind: type[NewReno | Cubic]) -> None:
    controller = grown(kind, 100 * MSS)
    controller.on_lost(loss())
    controller.on_spurious(RTT)
    assert controller.window == 100 * MSS
    controller.on_acked(ack(5 * MSS, RTT))
    assert controller.window == 105 * MSS, "in slow start again"
    controller.on_spurious(RTT)
    assert controller.window == 105 * MSS


@BOTH
def test_the_rate_sends_a_window_in_less_than_a_round_trip(kind: type[NewReno | Cubic]) -> None:
    controller = grown(kind, 100 * MSS)
    assert controller.rate(RTT) == 2_000_000
    controller.on_lost(loss())
    assert controller.rate(RTT) == controller.window * 10 * 5 // 4
    assert paced_rate(1, 10**12, slow_start=False) == 1


def test_newreno_grows_by_a_datagram_for_each_window() -> None:
    """RFC 9002 section 7.3.3, however the acknowledgements come."""
    for step in (500, 1000, 5000, 50_000):
        controller = grown(NewReno, 100 * MSS)
        controller.on_lost(loss())
        total = 0
        while total < 50 * MSS:
            controller.on_acked(ack(step))
            total += step
        assert abs(controller.window - 51 * MSS) <= 20


def cubic_after_loss(window: int) -> Cubic:
    controller = Cubic(MSS)
    controller.on_acked(ack(window - controller.window))
    controller.on_lost(loss())
    return controller


def run_round_trips(controller: Cubic, begin: int, count: int) -> list[int]:
    windows = []
    for at in range(begin, begin + count):
        window = controller.window
        for part in range(10):
            controller.on_acked(ack(window // 10, at * RTT + part * RTT // 10))
        windows.append(controller.window)
    return windows


def test_cubic_is_flat_at_the_old_window_and_reaches_it_when_the_formula_says() -> None:
    """RFC 9438 section 4.2: K = cbrt(W_max (1 - 0.7) / 0.4), 9.1 s for 1000 datagrams."""
    controller = cubic_after_loss(1000 * MSS)
    windows = run_round_trips(controller, 0, 150)
    at = [window / MSS for window in windows]
    for seconds in (1, 3, 5, 9, 12, 14):
        expected = 0.4 * (seconds - 9.086) ** 3 + 1000
        assert abs(at[seconds * 10 - 1] - expected) < 0.02 * expected
    assert windows == sorted(windows)


def test_cubic_is_no_slower_than_newreno_where_windows_are_small() -> None:
    """RFC 9438 section 4.3."""
    controller = cubic_after_loss(20 * MSS)
    windows = run_round_trips(controller, 0, 10)
    assert windows[-1] >= 14 * MSS + 10 * MSS * 9 // 17 - MSS


def test_cubic_gives_way_when_it_lost_below_where_it_lost_before() -> None:
    """Fast convergence, RFC 9438 section 4.7."""
    controller = cubic_after_loss(1000 * MSS)
    controller.on_lost(loss(RTT))
    assert controller.window == 490 * MSS
    assert controller._most == 595 * MSS


def test_time_without_data_is_no_time_to_grow_in() -> None:
    """RFC 9438 section 5.8."""
    still, busy = cubic_after_loss(1000 * MSS), cubic_after_loss(1000 * MSS)
    run_round_trips(busy, 0, 20)
    run_round_trips(still, 0, 10)
    for at in range(10, 1000):
        still.on_acked(ack(MSS, at * RTT, limited=True, in_flight=MSS))
    run_round_trips(still, 1000, 10)
    assert abs(still.window - busy.window) < 10 * MSS


def test_a_mistake_leaves_cubics_curve_as_it_was() -> None:
    undone, left = cubic_after_loss(1000 * MSS), cubic_after_loss(1000 * MSS)
    run_round_trips(undone, 0, 20)
    run_round_trips(left, 0, 20)
    undone.on_lost(loss(20 * RTT))
    undone.on_spurious(20 * RTT)
    assert run_round_trips(undone, 20, 50) == run_round_trips(left, 20, 50)


@fixed
@given(value=st.integers(0, 10**60))
def test_the_cube_root_is_exact(value: int) -> None:
    root = _cube_root(value)
    assert root**3 <= value < (root + 1) ** 3
