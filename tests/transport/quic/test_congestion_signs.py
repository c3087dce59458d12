"""Signs of congestion: a queue, noise, and what is lost besides, round by round."""

from __future__ import annotations

import pytest
from recovery_link import MS

from quicoll_transport.quic.congestion_signs import CongestionSigns
from quicoll_transport.quic.path_model import Noise

SIZE = 1452
RTT = 40 * MS
ROUND = 1000 * SIZE


class Rounds:
    """Signs that are told of whole rounds, of a thousand packets."""

    def __init__(self) -> None:
        self.noise = Noise()
        self.signs = CongestionSigns(self.noise)
        self.now = 0

    def begin(self, rtt: int, lost: int = 0) -> None:
        """A round with so many packets lost, that is not over."""
        self.now += rtt
        self.signs.on_lost(lost * SIZE, ROUND)
        self.signs.on_acked(ROUND - lost * SIZE, ROUND)
        self.signs.on_round_trip(rtt, self.now)

    def round(self, rtt: int = RTT, lost: int = 0) -> None:
        self.begin(rtt, lost)
        self.signs.learn_noise(SIZE)
        self.signs.end_round(None)

    def settle(self) -> None:
        """Two rounds, after which no round trip of before counts for a queue."""
        self.round()
        self.round()


def known(deepest: int = RTT) -> Rounds:
    """A path without loss whose round trip was once so long."""
    rounds = Rounds()
    rounds.settle()
    rounds.round(deepest)
    rounds.settle()
    return rounds


def test_the_longest_queue_is_remembered_from_one_cycle_to_the_next() -> None:
    assert CongestionSigns(Noise()).longest_queue_ns == 0
    rounds = known(3 * RTT)
    assert rounds.signs.longest_queue_ns == 2 * RTT
    rounds.signs.longest.end_cycle()
    rounds.settle()
    assert rounds.signs.longest_queue_ns == 2 * RTT
    rounds.signs.longest.end_cycle()
    assert rounds.signs.longest_queue_ns == 0


def test_more_than_noise_is_lost_where_a_queue_may_be_full() -> None:
    rounds = known(2 * RTT)
    rounds.begin(2 * RTT, lost=3)
    assert rounds.signs.is_more_than_noise(SIZE)
    assert not rounds.signs.is_too_much(0, SIZE)


@pytest.mark.parametrize(("rtt", "is_full"), [(RTT * 14 // 10, False), (RTT * 16 // 10, True)])
def test_a_queue_that_held_more_than_twice_as_much_loses_nothing_by_being_full(rtt: int, is_full: bool) -> None:
    rounds = known(2 * RTT)
    rounds.begin(rtt, lost=40)
    assert rounds.signs.has_queue()
    assert rounds.signs.is_more_than_noise(SIZE) is is_full
    assert rounds.signs.is_too_much(0, SIZE) is is_full
    rounds.signs.learn_noise(SIZE)
    assert (rounds.noise.share > 0) is not is_full, "it is noise, and learned"


def test_how_long_a_queue_was_is_forgotten_after_two_cycles() -> None:
    rounds = known(2 * RTT)
    for _ in range(2):
        rounds.signs.longest.end_cycle()
        rounds.settle()
    rounds.begin(RTT * 14 // 10, lost=4)
    assert rounds.signs.is_more_than_noise(SIZE)


def test_before_the_noise_is_known_little_loss_is_nobodys() -> None:
    rounds = Rounds()
    rounds.signs.on_round_trip(RTT, 0)
    rounds.begin(2 * RTT, lost=10)
    assert not rounds.signs.is_more_than_noise(SIZE)
    rounds.signs.end_round(None)
    rounds.begin(2 * RTT, lost=40)
    assert rounds.signs.is_too_much(0, SIZE), "but 4 % are too much"


def test_loss_as_usual_is_noise_whatever_queue_there_is() -> None:
    rounds = known(2 * RTT)
    for _ in range(20):
        rounds.round(lost=10)
    rounds.begin(2 * RTT, lost=20)
    assert not rounds.signs.is_more_than_noise(SIZE)
    rounds.signs.on_lost(30 * SIZE, ROUND)
    assert rounds.signs.is_more_than_noise(SIZE)


def test_what_is_lost_in_bursts_is_too_much_beyond_five_times_its_spread() -> None:
    """Three times were reached by one in six looks for more, on a path that loses 1 % in bursts of eight."""
    rounds = known(2 * RTT)
    for _ in range(40):
        rounds.round(lost=20)
        rounds.round()
    assert 80 <= rounds.noise.share <= 110
    assert 80 <= rounds.noise.spread <= 110
    rounds.begin(2 * RTT, lost=45)
    assert not rounds.signs.is_too_much(0, SIZE)
    rounds.signs.on_lost(30 * SIZE, ROUND)
    assert rounds.signs.is_too_much(0, SIZE)


def test_without_a_queue_all_loss_is_noise_up_to_a_fifth() -> None:
    rounds = known()
    rounds.begin(RTT, lost=199)
    assert not rounds.signs.is_more_than_noise(SIZE)
    assert not rounds.signs.is_too_much(0, SIZE)
    rounds.signs.on_lost(3 * SIZE, ROUND)
    assert rounds.signs.is_too_much(0, SIZE)


def test_eight_packets_are_never_too_much() -> None:
    rounds = known(2 * RTT)
    rounds.signs.on_round_trip(2 * RTT, rounds.now)
    rounds.signs.on_acked(2 * SIZE, 0)
    rounds.signs.on_lost(8 * SIZE, 10 * SIZE)
    assert not rounds.signs.is_too_much(0, SIZE)
    rounds.signs.on_lost(SIZE, 10 * SIZE)
    assert rounds.signs.is_too_much(0, SIZE)
