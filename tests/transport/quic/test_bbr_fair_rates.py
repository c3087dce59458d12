"""BBR and what a receiver allots: when it goes to that rate, when it is held to it, and what a wrong one costs."""

from __future__ import annotations

import pytest
from driven_bbr import CONTENTS, RATE, RTT, SIZE, Driven, cruising

from quicoll_transport.quic.arrival_line import FairRate
from quicoll_transport.quic.bbr import BbrState

QUEUE = RTT * 3 // 2  # a round trip with a queue


def allotted(rate: int, *, full: bool = False) -> FairRate:
    return FairRate(rate, full)


def test_more_than_it_sends_is_tried_at_once_and_believed_when_a_flight_has_shown_it() -> None:
    driven = cruising()
    driven.round(fair_rate=allotted(2 * RATE))
    assert driven.bbr.state is BbrState.RESUME
    assert driven.paced() == 2 * RATE * 99 // 100
    for _ in range(3):
        driven.round(2 * RATE)
    assert driven.states[-3:] == [BbrState.RESUME, BbrState.DOWN, BbrState.CRUISE], "it leaves nothing to look for"
    assert driven.bbr.bandwidth.value == 2 * RATE


def test_a_fair_rate_that_the_path_does_not_carry_ends_with_what_was_measured_and_is_not_tried_again_soon() -> None:
    driven = cruising()
    driven.round(fair_rate=allotted(2 * RATE))
    for _ in range(4):
        driven.round(rtt=2 * RTT, flight=2 * CONTENTS)
    assert BbrState.DRAIN in driven.states
    assert driven.bbr.bandwidth.value == RATE
    driven.until(BbrState.CRUISE)
    driven.round(fair_rate=allotted(2 * RATE))
    assert driven.bbr.state is BbrState.CRUISE


def test_what_others_have_lost_before_says_nothing_of_a_fair_rate() -> None:
    driven = cruising()
    driven.round(fair_rate=allotted(2 * RATE))
    driven.lose(CONTENTS // 2)
    assert driven.bbr.state is BbrState.RESUME
    driven.round(2 * RATE)
    driven.lose(CONTENTS // 2, flight=2 * CONTENTS)
    assert driven.bbr.state is BbrState.DRAIN


def test_a_fair_rate_is_nothing_to_who_has_no_more_to_send() -> None:
    driven = cruising()
    driven.round(limited=True, fair_rate=allotted(2 * RATE))
    assert driven.bbr.state is BbrState.CRUISE


def test_whatever_is_allotted_no_more_than_four_times_as_much_is_tried() -> None:
    driven = cruising()
    driven.round(fair_rate=allotted(1 << 60))
    assert driven.paced() == 4 * RATE * 99 // 100
    assert driven.bbr.window < 6 * CONTENTS, "with room for bursts and clumps"


def test_while_it_looks_for_the_rate_nothing_that_is_allotted_counts() -> None:
    driven = Driven()
    driven.round(RATE // 8, fair_rate=allotted(4 * RATE))
    driven.round(RATE // 4, rtt=QUEUE, fair_rate=allotted(1, full=True))
    assert driven.states == [BbrState.STARTUP]


def test_who_has_more_than_is_allotted_on_a_full_line_with_a_queue_is_held_to_it() -> None:
    driven = cruising()
    driven.round(fair_rate=allotted(RATE // 2, full=True))
    assert driven.bbr.bandwidth.value == RATE, "it has no queue"
    driven.round(rtt=QUEUE, fair_rate=allotted(RATE // 2))
    assert driven.bbr.bandwidth.value == RATE, "the line is not full"
    driven.round(rtt=QUEUE, fair_rate=allotted(RATE // 2, full=True))
    assert driven.bbr.state is BbrState.DOWN
    assert driven.paced() == RATE // 2 * 90 * 99 // 10_000


def test_that_ends_an_up() -> None:
    driven = cruising()
    driven.until(BbrState.UP)
    driven.round(rtt=QUEUE, fair_rate=allotted(RATE // 2, full=True))
    assert driven.bbr.state is BbrState.DOWN
    assert driven.bbr.bandwidth.value == RATE // 2


@pytest.mark.parametrize("times", [1, 3])
def test_to_be_held_to_it_again_and_again_leaves_it(times: int) -> None:
    """What was seen of two cycles is not forgotten by it: samples of before do not become the rate."""
    driven = cruising()
    for _ in range(times):
        driven.round(RATE // 8, rtt=QUEUE, fair_rate=allotted(RATE // 2, full=True))
    assert driven.bbr.bandwidth.value == RATE // 2


def test_limits_of_before_do_not_bind_what_is_tried() -> None:
    """`most` is what was safe beside those who have become silent."""
    driven = cruising()
    driven.bbr._limits.most = 4 * SIZE
    driven.round(fair_rate=allotted(2 * RATE))
    assert driven.bbr.window >= CONTENTS


def test_what_mates_leave_of_the_hosts_own_line_is_the_most_that_is_tried() -> None:
    driven = cruising()
    driven.bbr._limits._level = RATE * 11 // 10
    driven.round(fair_rate=allotted(2 * RATE))
    assert driven.bbr.state is not BbrState.RESUME
    driven.bbr._limits._level = RATE * 3 // 2
    driven.round(fair_rate=allotted(2 * RATE))
    assert driven.paced() == RATE * 3 // 2 * 99 // 100
