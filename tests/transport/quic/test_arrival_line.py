"""What a receiver allots to each of those who send to it: of what they bring, and of who has become silent."""

from __future__ import annotations

import pytest

from quicoll_transport.quic.arrival_line import ArrivalLine, FairRate

MS = 1_000_000
S = 1_000_000_000
RTT = 50 * MS
K = 1000  # bytes a second; a byte a millisecond


class Host:
    """Some connections to one receiver, and a clock. Rates are in K."""

    def __init__(self, count: int, *, rtt: int | None = RTT) -> None:
        self.line = ArrivalLine()
        self.shares = [self.line.join() for _ in range(count)]
        self.now, self.rtt = S, rtt

    def run(self, ms: int, *rates: int, wait: int = 0) -> list[tuple[int, bool] | None]:
        """Let connections, in their order, bring so much for so long; what each of them is allotted then."""
        for _ in range(ms):
            self.now += MS
            for share, rate in zip(self.shares, rates, strict=False):
                if rate:
                    share.on_arrived(rate, self.rtt, self.now - wait)
        return self.fair_rates()

    def fair_rates(self) -> list[tuple[int, bool] | None]:
        found = [share.fair_rate(self.now) for share in self.shares]
        return [None if fair_rate is None else (round(fair_rate.rate / K), fair_rate.is_full) for fair_rate in found]

    @property
    def rate(self) -> int:
        return round(self.line.rate / K)


def test_to_whom_alone_brings_something_nothing_is_allotted() -> None:
    assert Host(1).run(300, 100) == [None]
    assert Host(3).run(300, 0, 100) == [None, None, None]


def test_who_brings_less_than_an_equal_part_is_allotted_that_and_the_others_what_is_left() -> None:
    host = Host(3)
    equal, _, level = host.run(300, 60, 30, 10)[::-1]
    assert host.rate in (98, 99, 100), "within what a step of the measurement is"
    assert equal == (33, True)
    assert level == (50, True), "what a quarter more of the others leaves: 100 - 37 - 12"


def test_of_equal_parts_each_is_allotted_one() -> None:
    assert Host(4).run(300, 25, 25, 25, 25) == [(25, True)] * 4


def test_who_is_left_is_allotted_all_of_it_a_round_trip_after_the_others_are_silent() -> None:
    host = Host(3)
    host.run(300, 50, 40, 10)
    assert host.run(40, 0, 0, 10)[2] == (33, False), "they may only pause"
    assert host.run(20, 0, 0, 10)[2] == (host.rate, False)


def test_one_that_comes_back_is_counted_at_once() -> None:
    host = Host(3)
    host.run(300, 50, 40, 10)
    host.run(100, 0, 0, 30)
    fair_rates = host.run(60, 30, 30, 30)
    assert {fair_rate[0] for fair_rate in fair_rates if fair_rate is not None} == {33}


def test_whose_packets_are_few_takes_nothing_from_the_others() -> None:
    """Barriers and votes go on beside."""
    assert Host(3).run(300, 49, 49, 2)[:2] == [(50, True)] * 2


def test_after_two_periods_what_the_line_carried_before_counts_no_more() -> None:
    host = Host(2)
    host.run(1000, 50, 50)
    assert host.rate in (98, 99, 100)
    host.run(2600, 10, 10)
    assert host.rate in (98, 99, 100)
    host.run(2600, 10, 10)
    assert host.rate in (19, 20)


def test_a_silence_makes_the_line_no_slower() -> None:
    host = Host(2)
    host.run(1000, 50, 50)
    host.now += 60 * S
    assert host.run(60, 40, 10)[1] == (50, False)
    assert host.rate in (98, 99, 100)


def test_who_was_silent_for_a_period_is_forgotten() -> None:
    """Then the other one is alone, and its sender knows the path best."""
    host = Host(2)
    host.run(300, 50, 50)
    assert host.run(2400, 0, 50)[1] is not None
    assert host.run(200, 0, 50) == [None, None]


def test_of_connections_that_have_ended_nothing_is_kept() -> None:
    host = Host(100)
    for number in range(100):
        host.run(5, *(0,) * number, 50)
    host.run(2600, 50)
    assert len(host.line._members) == 1


def test_what_is_read_late_counts_from_when_it_came() -> None:
    """The receiver was away for 100 ms, and reads all of it at once."""
    host = Host(2)
    host.run(300, 50, 50)
    host.now += 100 * MS
    for late in range(100, 0, -1):
        for share in host.shares:
            share.on_arrived(50, RTT, host.now - late * MS)
    assert host.rate in (98, 99, 100, 101)


@pytest.mark.parametrize("rtt", [None, 1 * MS])
def test_within_a_site_and_before_a_round_trip_is_known_nothing_is_allotted(rtt: int | None) -> None:
    assert Host(2, rtt=rtt).run(300, 50, 50) == [None, None]


def test_parts_of_a_rate_are_measured_over_the_longest_round_trip_of_all() -> None:
    """One of 10 ms and one of 200: a burst in each round trip of the long one is no more than its mean."""
    line = ArrivalLine()
    near, far = line.join(), line.join()
    now = S
    for at in range(2000):
        now += MS
        near.on_arrived(50, 10 * MS, now)
        if at % 200 < 20:
            far.on_arrived(500, 200 * MS, now)
    assert 95 <= line.rate // K <= 110
    assert near.fair_rate(now) is not None
    assert 48 <= near.claim // K <= 51
    assert 45 <= far.claim // K <= 60


def test_the_same_calls_lead_to_the_same_fair_rates() -> None:
    def run() -> list[list[tuple[int, bool] | None]]:
        host = Host(3)
        return [host.run(7, at % 50, 20, 50 - at % 50) for at in range(200)]

    assert run() == run()


def test_a_fair_rate_says_what_it_is() -> None:
    assert FairRate(7, is_full=True) == (7, True)
