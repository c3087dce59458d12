"""What connections that leave by one line may have each: of claims, of what they deliver, and of who is busy."""

from __future__ import annotations

import pytest
from acknowledged import acknowledged

from quicoll_transport.quic.access_line import AccessLine, AccessShare

MS = 1_000_000
S = 1_000_000_000
RTT = 50 * MS
K = 1000  # bytes a second; a byte a millisecond


class Host:
    """Some connections of one line, and a clock. Rates are in K."""

    def __init__(self, count: int, *, rtt: int = RTT) -> None:
        self.line = AccessLine()
        self.shares = [self.line.join() for _ in range(count)]
        self.now, self.rtt = S, rtt

    def acked(
        self, share: AccessShare, claim: int, rate: int, *, in_flight: int = 0, app_limited: bool = False, wait: int = 0
    ) -> int | None:
        """Let what a millisecond carries arrive; return the level."""
        sample = acknowledged(
            self.now, rate, rtt_ns=self.rtt, in_flight=in_flight, wait_ns=wait, app_limited=app_limited
        )
        share.on_acked(claim * K, self.rtt, sample)
        level = share.level(self.now)
        return None if level is None else round(level / K)

    def run(self, ms: int, *, in_flight: int = 1, **rates: tuple[int, int]) -> list[int | None]:
        """Let connections, by number (`_0=(claim, rate)`), send and be acknowledged for so long; their last levels."""
        last: list[int | None] = []
        for _ in range(ms):
            self.now += MS
            last = []
            for name, (claim, rate) in rates.items():
                share = self.shares[int(name[1:])]
                last.append(self.acked(share, claim, rate, in_flight=in_flight))
                share.on_sent(in_flight, self.now, few=False)
        return last

    @property
    def rate(self) -> int:
        return round(self.line.rate / K)


def test_who_is_alone_is_bound_by_nothing() -> None:
    assert Host(1).run(300, _0=(100, 100)) == [None]
    assert Host(3).run(300, _1=(100, 100)) == [None]


def test_claims_that_come_to_no_more_than_the_line_are_bound_by_nothing() -> None:
    host = Host(3)
    host.run(300, _0=(40, 40), _1=(30, 30), _2=(30, 30))
    assert host.rate in (98, 99, 100), "within what a step of the measurement is"
    assert host.run(10, _0=(38, 30), _1=(30, 30), _2=(30, 30)) == [None] * 3


def test_of_claims_that_come_to_more_the_largest_are_cut_to_what_the_others_leave() -> None:
    host = Host(3)
    host.run(300, _0=(40, 40), _1=(30, 30), _2=(30, 30))
    assert host.run(10, _0=(100, 40), _1=(100, 30), _2=(24, 30)) == [38] * 3
    assert host.run(10, _0=(100, 40), _1=(100, 30), _2=(100, 30)) == [33] * 3


def test_what_one_claims_the_line_has() -> None:
    """Each has found a part of it, one after the other: together they have never been measured."""
    host = Host(2)
    host.run(3, _0=(0, 10), _1=(0, 10))
    assert host.run(10, _0=(90, 10), _1=(30, 10)) == [60] * 2


def test_what_arrives_one_after_the_other_is_not_taken_for_what_arrives_together() -> None:
    host = Host(2)
    for _ in range(20):
        host.run(25, _0=(100, 100))
        host.run(25, _1=(100, 100))
    assert host.rate in (98, 99, 100)


def test_acknowledgements_that_come_together_make_the_rate_no_larger() -> None:
    host = Host(2)
    for _ in range(40):
        host.run(24, _0=(50, 0), _1=(50, 0))
        host.run(1, _0=(50, 25 * 50), _1=(50, 25 * 50))
    assert 95 <= host.rate <= 125, "one clump more than there is room for, at most"


def test_what_has_waited_at_a_host_counts_from_when_it_had_arrived() -> None:
    """The engine was away for 100 ms; a stamp says when each acknowledgement had come."""
    host = Host(2)
    host.run(300, _0=(50, 50), _1=(50, 50))
    host.now += 100 * MS
    for late in range(100, 0, -1):
        for share in host.shares:
            host.acked(share, 50, 50, wait=late * MS)
    assert host.rate in (99, 100, 101)


def test_while_one_looks_for_its_bandwidth_nobody_is_bound() -> None:
    host = Host(2)
    host.run(300, _0=(50, 50), _1=(50, 50))
    assert host.run(10, _0=(100, 50), _1=(0, 50)) == [None] * 2
    assert [share.room() for share in host.shares] == [None] * 2
    assert host.run(10, _0=(100, 50), _1=(100, 50)) == [50] * 2


def test_who_has_nothing_to_send_leaves_its_part_within_a_quarter_of_a_round_trip() -> None:
    host = Host(2)
    host.run(300, _0=(100, 50), _1=(100, 50))
    assert host.run(1, _0=(100, 50)) == [50]
    assert host.run(13, _0=(100, 50)) == [None]


def test_what_the_others_have_under_way_leaves_who_finds_them_silent_less_room() -> None:
    """The line holds 5600 bytes in a round trip and a peer's delay, and half as much more."""
    host = Host(2)
    host.run(300, _0=(100, 50), _1=(100, 50), in_flight=2500)
    host.now += 20 * MS
    assert host.acked(host.shares[0], 100, 50, in_flight=1000) is None, "the other one is silent"
    room = host.shares[0].room()
    assert room is not None
    assert 5700 <= room <= 5900, "8400 less 2500"
    host.now += 100 * MS
    host.acked(host.shares[0], 100, 50, in_flight=1000)
    assert host.shares[0].room() is None, "what the others have had under way has left"


def test_heartbeats_beside_it_do_not_bound_who_is_alone() -> None:
    host = Host(2)
    host.run(300, _0=(100, 100), in_flight=5000)
    host.acked(host.shares[1], 0, 1, in_flight=300)
    host.acked(host.shares[0], 100, 1, in_flight=5000)
    assert host.shares[0].room() is None


def test_an_equal_part_is_everybodys_whatever_the_others_have_under_way() -> None:
    host = Host(2)
    host.run(300, _0=(100, 50), _1=(100, 50), in_flight=100_000)
    for share in host.shares:
        room = share.room()
        assert room is not None
        assert room in range(2700, 2900)


def test_what_one_gives_on_a_full_line_is_taken_off_everybodys_part() -> None:
    host = Host(3)
    host.run(300, _0=(40, 33), _1=(40, 33), _2=(40, 34))
    assert host.shares[0].give(9 * K)
    assert host.run(2, _0=(40, 33), _1=(40, 33), _2=(40, 34)) == [30] * 3
    host.shares[0].take_back()
    assert host.run(2, _0=(40, 33), _1=(40, 33), _2=(40, 34)) == [33] * 3


def test_who_gave_and_finds_the_others_silent_is_still_slower_by_that() -> None:
    host = Host(2)
    host.run(300, _0=(100, 50), _1=(100, 50))
    assert host.shares[0].give(20 * K)
    assert host.run(50, _0=(100, 50)) == [80]


def test_a_line_that_is_not_full_takes_nothing() -> None:
    host = Host(2)
    host.run(300, _0=(50, 50), _1=(50, 50))
    host.run(2, _0=(50, 50), _1=(30, 30))
    assert not host.shares[0].give(10 * K)
    host.run(20, _0=(100, 50))
    assert not host.shares[0].give(10 * K), "nor does one that has it alone"
    assert host.shares[0].given == 0


def test_who_has_a_slower_path_than_its_part_gives_nothing() -> None:
    """What it loses is lost there."""
    host = Host(3)
    host.run(300, _0=(45, 40), _1=(45, 45), _2=(15, 15))
    assert not host.shares[2].give(3 * K)
    assert host.shares[0].give(10 * K)


def test_whatever_is_given_the_level_is_above_nothing() -> None:
    host = Host(2)
    host.run(300, _0=(50, 50), _1=(50, 50))
    for share in host.shares:
        assert share.give(1000 * K)
    host.run(2, _0=(50, 50), _1=(50, 50))
    assert host.line.level == 1


def test_a_silence_and_what_the_application_limits_make_the_rate_no_smaller() -> None:
    host = Host(2)
    host.run(300, _0=(50, 50), _1=(50, 50))
    rate = host.line.rate
    for _ in range(3600):
        host.now += S
        for share in host.shares:
            host.acked(share, 50, 1, app_limited=True)
    assert host.line.rate == rate
    assert host.run(10, _0=(80, 1), _1=(80, 1)) in ([49] * 2, [50] * 2)


def test_a_line_that_has_become_slower_is_known_after_two_periods_of_work() -> None:
    host = Host(2)
    host.run(300, _0=(50, 50), _1=(50, 50))
    host.run(2500, _0=(20, 20), _1=(20, 20))
    assert host.rate > 90
    host.run(2800, _0=(20, 20), _1=(20, 20))
    assert host.rate in range(38, 41)
    host.run(100, _0=(20, 60), _1=(20, 20))
    assert host.rate > 70, "and one that has become faster within two round trips"


def test_round_trips_of_a_site_take_no_part() -> None:
    host = Host(2, rtt=4 * MS)
    assert host.run(300, _0=(100, 50), _1=(100, 50)) == [None] * 2
    assert [share.room() for share in host.shares] == [None] * 2
    assert not host.shares[0].give(K)
    assert host.line.rate == 0


def test_connections_that_have_ended_are_forgotten() -> None:
    host = Host(100)
    for number in range(100):
        host.run(30, **{f"_{number}": (50, 50)})
    host.run(2600, _0=(50, 50))
    assert len(host.line._members) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_order_of_connections_changes_nothing(order: tuple[int, ...]) -> None:
    host = Host(3)
    claims = ((100, 40), (60, 30), (24, 30))
    rates = {f"_{number}": claims[number] for number in order}
    host.run(300, **rates)
    assert set(host.run(10, **rates)) == {38}
