"""What connections that leave by one line may have each: of claims, of what they deliver, and of who is busy."""

from __future__ import annotations

import pytest

from quicoll_transport.quic.access_line import AccessLine, AccessShare

MS = 1_000_000
S = 1_000_000_000
RTT = 50 * MS


class Host:
    """Some connections of one line, and a clock."""

    def __init__(self, count: int, *, rtt: int = RTT) -> None:
        self.line = AccessLine()
        self.shares = [self.line.join() for _ in range(count)]
        self.now, self.rtt = S, rtt

    def acked(
        self, share: AccessShare, claim: int, rate: int | None = None, *, app_limited: bool = False
    ) -> int | None:
        return share.on_acked(claim, rate, self.rtt, self.now, app_limited=app_limited)

    def run(self, ms: int, **rates: tuple[int, int]) -> list[int | None]:
        """Let connections, by number (`_0=(claim, rate)`), send and be acknowledged for so long; their last levels."""
        last: list[int | None] = []
        for _ in range(ms):
            self.now += MS
            last = []
            for name, (claim, rate) in rates.items():
                share = self.shares[int(name[1:])]
                last.append(self.acked(share, claim, rate))
                share.on_sent(self.now)
        return last


def test_who_is_alone_is_bound_by_nothing() -> None:
    assert Host(1).run(100, _0=(100, 100)) == [None]
    assert Host(3).run(100, _1=(100, 100)) == [None]


def test_claims_that_come_to_no_more_than_the_line_are_bound_by_nothing() -> None:
    host = Host(3)
    host.run(100, _0=(40, 40), _1=(30, 30), _2=(30, 30))
    assert host.line.rate == 100
    assert host.run(10, _0=(40, 30), _1=(30, 30), _2=(30, 30)) == [None] * 3


def test_of_claims_that_come_to_more_the_largest_are_cut_to_what_the_others_leave() -> None:
    host = Host(3)
    host.run(100, _0=(40, 40), _1=(30, 30), _2=(30, 30))
    assert host.run(10, _0=(98, 40), _1=(98, 30), _2=(24, 30)) == [38] * 3
    assert host.run(10, _0=(98, 40), _1=(98, 30), _2=(98, 30)) == [33] * 3


def test_what_one_claims_the_line_has() -> None:
    """Each has found a part of it, one after the other: together they have never been measured."""
    host = Host(2)
    host.run(3, _0=(0, 10), _1=(0, 10))
    assert host.run(10, _0=(90, 10), _1=(30, 10)) == [60] * 2


def test_while_one_looks_for_its_bandwidth_nobody_is_bound() -> None:
    host = Host(2)
    host.run(100, _0=(50, 50), _1=(50, 50))
    assert host.run(10, _0=(100, 50), _1=(0, 50)) == [None] * 2
    assert host.run(10, _0=(100, 50), _1=(100, 50)) == [50] * 2


def test_who_has_nothing_to_send_leaves_its_part_within_a_quarter_of_a_round_trip() -> None:
    host = Host(2)
    host.run(100, _0=(100, 50), _1=(100, 50))
    assert host.run(1, _0=(100, 50)) == [50]
    assert host.run(13, _0=(100, 50)) == [None]


def test_a_silence_and_what_the_application_limits_make_the_rate_no_smaller() -> None:
    host = Host(2)
    host.run(100, _0=(50, 50), _1=(50, 50))
    for _ in range(3600):
        host.now += S
        for share in host.shares:
            host.acked(share, 50, 1, app_limited=True)
    assert host.line.rate == 100
    assert host.run(10, _0=(80, 1), _1=(80, 1)) == [50] * 2


def test_a_line_that_has_become_slower_is_known_after_two_periods_of_work() -> None:
    host = Host(2)
    host.run(100, _0=(50, 50), _1=(50, 50))
    host.run(2500, _0=(20, 20), _1=(20, 20))
    assert host.line.rate == 100
    host.run(2600, _0=(20, 20), _1=(20, 20))
    assert host.line.rate == 40
    host.run(10, _0=(20, 60), _1=(20, 20))
    assert host.line.rate == 80, "and one that has become faster at once"


def test_round_trips_of_a_site_take_no_part() -> None:
    host = Host(2, rtt=4 * MS)
    assert host.run(100, _0=(100, 50), _1=(100, 50)) == [None] * 2
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
    claims = ((98, 40), (60, 30), (24, 30))
    rates = {f"_{number}": claims[number] for number in order}
    host.run(100, **rates)
    assert set(host.run(10, **rates)) == {38}
