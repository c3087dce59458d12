"""What bounds a rate-based controller: what is given way, alone and together, what is raised, what is undone."""

from __future__ import annotations

from functools import partial

from acknowledged import acknowledged

from quicoll_transport.quic.access_line import AccessLine
from quicoll_transport.quic.limits import Limits
from quicoll_transport.quic.path_model import Bandwidth

MS = 1_000_000
S = 1_000_000_000
RTT = 50 * MS
RATE = 1_000_000
SIZE = 1000


sample = partial(acknowledged, rtt_ns=RTT, in_flight=20_000)


class Mates:
    """Connections of one host, which claim and deliver as they are told."""

    def __init__(self, count: int) -> None:
        line = AccessLine()
        self.limits = [Limits(line.join()) for _ in range(count)]
        self.now = S

    def run(self, ms: int, *claims: int, bound: bool = True) -> None:
        """Let them, in their order, be busy for so long, and have equal parts of the rate."""
        for _ in range(ms):
            self.now += MS
            for limits, claim in zip(self.limits, claims, strict=False):
                limits.on_sent(20_000, self.now, few=False)
                limits.share(limits.claim(claim), RTT, sample(self.now, RATE // 1000 // len(claims)), bound=bound)


def bandwidth(rate: int = RATE) -> Bandwidth:
    known = Bandwidth()
    known.on_sample(rate, app_limited=False)
    return known


def test_giving_way_takes_a_quarter_each_time_until_the_cycle_ends_which_believes_in_that() -> None:
    limits, known = Limits(None), bandwidth()
    assert not limits.has_given_way
    limits.give_way(known.value, 1)
    limits.give_way(known.value, 4)
    assert limits.has_given_way
    assert limits.gave_way_round == 4
    assert limits.claim(RATE) == limits.bounded(RATE) == RATE * 9 // 16
    limits.end_cycle(known)
    assert known.value == RATE * 9 // 16
    assert not limits.has_given_way
    assert limits.bounded(known.value) == known.value


def test_on_a_full_line_all_give_a_part_of_the_quarter_and_the_claim_stays() -> None:
    mates = Mates(4)
    mates.run(300, RATE, RATE, RATE, RATE)
    one, other = mates.limits[:2]
    before = one.bounded(RATE)
    one.give_way(RATE, 1)
    mates.run(1, RATE, RATE, RATE, RATE)
    assert one.has_given_way
    assert not other.has_given_way
    assert one.claim(RATE) == RATE
    assert one.bounded(RATE) == other.bounded(RATE)
    assert abs(one.bounded(RATE) - before * 15 // 16) <= 2
    known = bandwidth()
    one.end_cycle(known)
    mates.run(1, RATE, RATE, RATE, RATE)
    assert known.value == RATE
    assert abs(other.bounded(RATE) - before) <= 2


def test_on_a_line_that_has_more_it_gives_way_alone() -> None:
    mates = Mates(2)
    mates.run(300, RATE, RATE)
    mates.run(2, RATE // 4, RATE // 4)
    one, other = mates.limits
    one.give_way(RATE // 4, 1)
    mates.run(2, RATE // 4, RATE // 4)
    assert one.bounded(RATE // 4) == RATE * 3 // 16
    assert other.bounded(RATE // 4) == RATE // 4


def test_who_looks_for_its_rate_is_bound_by_no_mate_but_tells_them_of_itself() -> None:
    mates = Mates(2)
    mates.run(300, RATE, RATE)
    one = mates.limits[0]
    assert one.bounded(RATE) < RATE
    assert one.window(10 * RATE, modest=True) < RATE
    one.unbind()
    assert one.bounded(RATE) == RATE
    mates.run(1, RATE, RATE, bound=False)
    assert one.bounded(RATE) == RATE
    assert one.window(10 * RATE, modest=True) == 10 * RATE


def test_a_mistake_takes_back_what_was_given_since_and_no_more() -> None:
    mates = Mates(2)
    mates.run(300, RATE, RATE)
    one = mates.limits[0]
    one.give_way(RATE, 1)
    mates.run(1, RATE, RATE)
    once, before = one.bounded(RATE), one.before()
    one.give_way(RATE, 4)
    one.most = 5000
    mates.run(1, RATE, RATE)
    assert one.bounded(RATE) < once
    one.restore(before)
    mates.run(1, RATE, RATE)
    assert one.bounded(RATE) == once
    assert one.most is None
    one.end_giving()
    one.restore(before)
    assert not one.has_given_way, "what is over by itself does not come back"


def test_forgetting_leaves_no_limit_and_gives_nothing() -> None:
    mates = Mates(2)
    mates.run(300, RATE, RATE)
    one, other = mates.limits
    before = other.bounded(RATE)
    one.give_way(RATE, 1)
    one.most = 5000
    one.forget()
    assert not one.has_given_way
    assert one.bounded(RATE) == RATE
    assert one.window(RATE, modest=False) == RATE
    mates.run(1, RATE, RATE)
    assert abs(other.bounded(RATE) - before) <= 2


def test_what_is_safe_in_flight_is_kept_away_from_where_others_are_to_have_room() -> None:
    limits = Limits(None)
    limits.most = 10_000
    assert limits.window(20_000, modest=True) == 8500
    assert limits.window(20_000, modest=False) == 10_000
    assert limits.window(5000, modest=True) == 5000


def rises(limits: Limits) -> int:
    """By how many datagrams a round raises what is safe."""
    assert limits.most is not None
    before = limits.most
    for _ in range(10):
        limits.raise_most(sample(S, before // 10), SIZE)
    assert limits.end_up_round()
    return round((limits.most - before) / SIZE)


def test_it_is_raised_by_one_two_four_datagrams_a_round_and_by_one_again_in_the_next_up() -> None:
    limits = Limits(None)
    limits.most = 100_000
    limits.begin_up()
    assert [rises(limits) for _ in range(4)] == [1, 2, 4, 8]
    assert not limits.end_up_round(), "nobody asked for it"
    limits.begin_up()
    assert rises(limits) == 1
    limits.most = None
    limits.raise_most(sample(S, SIZE), SIZE)
    assert not limits.end_up_round(), "there is nothing to raise"


def calm(limits: Limits) -> int:
    """How many rounds without a queue it waits for."""
    for count in range(100):
        if limits.may_look_again():
            return count
        limits.on_round(queue=False, limited=False)
    raise AssertionError


def test_it_looks_again_after_four_calm_rounds_and_after_twice_as_many_where_that_was_too_soon() -> None:
    limits, known = Limits(None), bandwidth()
    assert not limits.may_look_again(), "it has not given way"
    waits = []
    for count in range(7):
        limits.give_way(known.value, count)
        limits.on_round(queue=False, limited=False)
        limits.on_round(queue=True, limited=False)
        limits.on_round(queue=False, limited=True)
        waits.append(calm(limits))
        limits.end_cycle(known)
    assert waits == [4, 8, 16, 32, 64, 64, 64]
    limits.end_wait()
    limits.give_way(known.value, 9)
    assert calm(limits) == 4, "a cycle did without"


def test_what_is_lost_on_a_full_line_bounds_nothing_in_flight_but_room_does() -> None:
    mates = Mates(2)
    one = mates.limits[0]
    one.lose(10_000)
    assert one.most == 10_000, "nothing is known of the line"
    mates.run(300, RATE, RATE)
    one.lose(5000)
    assert one.most == 10_000
    one.most = None
    assert one.window(10 * RATE, modest=False) < RATE


def test_on_a_full_line_it_looks_again_as_well() -> None:
    mates = Mates(2)
    mates.run(300, RATE, RATE)
    one = mates.limits[0]
    one.give_way(RATE, 1)
    assert one.slow is None
    assert calm(one) == 4
