"""Every rule does what it says, the first opinion wins, and a seed repeats."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.faults.compose import (
    Between,
    BurstLoss,
    Chain,
    Corrupt,
    Cut,
    Datagram,
    Delay,
    Delivery,
    Drop,
    Duplicate,
    Faults,
    First,
    Hold,
    Only,
    Partition,
    PayloadCorrupt,
    Rate,
    Reorder,
    Rng,
    Rule,
)

A, B = ("10.0.0.1", 1000), ("10.0.0.2", 2000)
OUT = Datagram(b"hello", A, outgoing=True)
IN = Datagram(b"hello", B, outgoing=False)
PASSED = [Delivery(b"hello")]


def decided(rule: Rule, datagram: Datagram = OUT, now_ns: int = 0) -> list[Delivery]:
    faults = Faults(random.Random(1))
    faults.add(rule)
    return faults.decide(datagram, now_ns)


def test_without_rules_everything_passes_unchanged() -> None:
    assert Faults(random.Random(1)).decide(OUT, 0) == PASSED


def test_cut_drops_everything_until_its_time() -> None:
    assert decided(Cut()) == decided(Cut(), IN) == []
    assert decided(Cut(until_ns=10), now_ns=9) == []
    assert decided(Cut(until_ns=10), now_ns=10) == PASSED


def test_cut_may_concern_one_direction_or_some_addresses() -> None:
    assert decided(Cut(outgoing=True), OUT) == []
    assert decided(Cut(outgoing=True), IN) == PASSED
    assert decided(Cut(outgoing=False), OUT) == PASSED
    assert decided(Cut(addresses=(A,)), OUT) == []
    assert decided(Cut(addresses=(A,)), IN) == PASSED
    six = Datagram(b"hello", ("::1", 1, 0, 0), outgoing=True)
    assert decided(Cut(addresses=(("::1", 1),)), six) == [], "flow and scope of an IPv6 address do not matter"


@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_drop_loses_about_its_share(probability: float) -> None:
    faults = Faults(random.Random(7))
    installed = faults.add(Drop(probability))
    lost = sum(faults.decide(OUT, 0) == [] for _ in range(2000))
    assert installed.decided == lost
    assert abs(lost / 2000 - probability) < 0.04


def test_delay_is_constant_plus_jitter() -> None:
    assert decided(Delay(500)) == [Delivery(b"hello", 500)]
    faults = Faults(random.Random(3))
    faults.add(Delay(100, jitter_ns=50, reorder=True))
    delays = {faults.decide(OUT, 0)[0].delay_ns for _ in range(500)}
    assert min(delays) == 100
    assert max(delays) == 150
    assert len(delays) > 40, "all of the jitter comes up"


def test_duplicate_delivers_twice() -> None:
    assert decided(Duplicate(1.0, later_ns=9)) == [Delivery(b"hello"), Delivery(b"hello", 9)]
    assert decided(Duplicate(0.0)) == PASSED


def test_corrupt_flips_exactly_one_bit() -> None:
    faults = Faults(random.Random(5))
    faults.add(Corrupt(1.0))
    seen = set()
    for _ in range(400):
        (delivery,) = faults.decide(OUT, 0)
        assert len(delivery.data) == len(OUT.data)
        difference = int.from_bytes(delivery.data, "big") ^ int.from_bytes(OUT.data, "big")
        assert difference.bit_count() == 1
        seen.add(difference)
    assert len(seen) == 8 * len(OUT.data), "every bit comes up"
    assert faults.decide(Datagram(b"", A, outgoing=True), 0) == [Delivery(b"")]


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_probability_out_of_range_is_refused(probability: float) -> None:
    for make in (Drop, Duplicate, Corrupt):
        with pytest.raises(ConfigurationError, match="probability"):
            make(probability)


def test_first_opinion_wins_in_the_order_of_installation() -> None:
    faults = Faults(random.Random(1))
    silent, delay, cut = faults.add(Drop(0.0)), faults.add(Delay(7)), faults.add(Cut())
    assert faults.decide(OUT, 0) == [Delivery(b"hello", 7)]
    assert (silent.decided, delay.decided, cut.decided) == (0, 1, 0)
    delay.remove()
    assert faults.decide(OUT, 0) == []
    assert cut.decided == 1


def test_removal_takes_away_just_that_rule_even_among_equal_ones() -> None:
    faults = Faults(random.Random(1))
    first, second = faults.add(Delay(1)), faults.add(Delay(1))
    first.remove()
    assert [other is second for other in faults.rules] == [True]
    first.remove()
    assert len(faults.rules) == 1
    with faults.add(Cut()):
        second.remove()
        assert faults.decide(OUT, 0) == []
    assert faults.decide(OUT, 0) == PASSED


def test_a_rule_that_removes_itself_while_deciding_does_not_disturb_the_others() -> None:
    class Once:
        def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
            once.remove()
            return None

    faults = Faults(random.Random(1))
    once = faults.add(Once())
    cut = faults.add(Cut())
    assert faults.decide(OUT, 0) == []
    assert [other is cut for other in faults.rules] == [True]


def trace(seed: int) -> list[list[Delivery]]:
    faults = Faults(random.Random(seed))
    for rule in (Drop(0.2), Duplicate(0.2), Corrupt(0.2), Delay(5, jitter_ns=100)):
        faults.add(rule)
    return [faults.decide(Datagram(bytes([i % 256] * 20), A, outgoing=bool(i % 2)), i) for i in range(500)]


def test_the_same_seed_gives_the_same_faults() -> None:
    assert trace(11) == trace(11)
    assert trace(11) != trace(12)


def test_payload_fault_changes_the_payload_in_place() -> None:
    def flip(view: memoryview) -> None:
        view[0] ^= 1

    data = bytearray(b"abc")
    faults = Faults(random.Random(1))
    faults.apply_payload(memoryview(data))
    assert data == b"abc"
    faults.payload_fault = flip
    faults.apply_payload(memoryview(data))
    assert data == b"`bc"


# -- the rules, each against its definition, on a virtual clock -------------------------------------------------------

MS, SECOND = 1_000_000, 1_000_000_000


def at(size: int, *, outgoing: bool = True, mark: int = 0) -> Datagram:
    return Datagram(bytes([mark % 256]) * size, A if outgoing else B, outgoing)


class Wire:
    """Carries deliveries out on a virtual clock, as a simulator would: by due time, equal ones in their order."""

    def __init__(self, rule: Rule, *, seed: int = 1) -> None:
        self.faults = Faults(random.Random(seed))
        self.installed = self.faults.add(rule)
        self.arrivals: list[tuple[int, int, bytes]] = []

    def send(self, datagram: Datagram, now_ns: int) -> None:
        self._carry(self.faults.decide(datagram, now_ns), now_ns)

    def take_released(self, now_ns: int) -> None:
        for _, deliveries in self.faults.released(now_ns):
            self._carry(deliveries, now_ns)

    def _carry(self, deliveries: list[Delivery], now_ns: int) -> None:
        for delivery in deliveries:
            self.arrivals.append((now_ns + delivery.delay_ns, len(self.arrivals), delivery.data))

    def received(self) -> list[tuple[int, bytes]]:
        return [(when, data) for when, _, data in sorted(self.arrivals)]


def test_jitter_keeps_the_order_of_a_path_and_only_of_a_path() -> None:
    wire = Wire(Delay(10 * MS, jitter_ns=5 * MS))
    for i in range(500):
        wire.send(at(4, mark=i), i * MS // 10)
    assert [data[0] for _, data in wire.received()] == [i % 256 for i in range(500)]
    for i, (when, _, _) in enumerate(wire.arrivals):
        assert 10 * MS <= when - i * MS // 10 <= 15 * MS, "keeping order never exceeds the largest delay"


class Script:
    """A generator that gives what it was told."""

    def __init__(self, *values: int) -> None:
        self.values = list(values)

    def random(self) -> float:
        return self.values.pop(0)

    def randrange(self, stop: int, /) -> int:
        return self.values.pop(0)


def test_who_goes_another_way_does_not_wait_for_this_one() -> None:
    rule, rng = Delay(100, jitter_ns=50), Script(50, 10, 20, 30, 5)
    other = Datagram(b"x", ("10.0.0.3", 3), outgoing=True)
    answers = [rule.decide(each, 0, rng) for each in (OUT, IN, other, OUT, IN)]
    assert [answer[0].delay_ns for answer in answers if answer] == [150, 110, 120, 150, 110]


def test_the_memory_of_a_delay_is_bounded() -> None:
    rule, rng = Delay(1, jitter_ns=5), random.Random(1)
    for port in range(10_000):
        rule.decide(Datagram(b"x", ("192.0.2.1", port), True), 0, rng)
    assert len(rule._last) == 4096


def test_reorder_delays_its_share_by_exactly_its_time() -> None:
    wire = Wire(Reorder(0.25, later_ns=5 * MS), seed=3)
    for i in range(4000):
        wire.send(at(2, mark=i), i * MS)
    delays = [when - i * MS for i, (when, _, _) in enumerate(wire.arrivals)]
    assert set(delays) == {0, 5 * MS}
    assert abs(delays.count(5 * MS) / 4000 - 0.25) < 0.03
    assert len(wire.received()) == 4000


def test_copies_follow_each_other() -> None:
    assert decided(Duplicate(1.0, later_ns=9, copies=3)) == [Delivery(b"hello", delay) for delay in (0, 9, 18, 27)]


@pytest.mark.parametrize("bits", [1, 2, 7, 40, 64])
def test_corrupt_flips_exactly_so_many_different_bits(bits: int) -> None:
    (delivery,) = decided(Corrupt(1.0, bits=bits))
    difference = int.from_bytes(delivery.data, "big") ^ int.from_bytes(OUT.data, "big")
    assert difference.bit_count() == min(bits, 8 * len(OUT.data))


def test_a_partition_cuts_between_two_sets_and_nothing_else() -> None:
    one, two, three = ("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3)

    def passes(rule: Rule, source: tuple[str, int], destination: tuple[str, int]) -> bool:
        leaving = Datagram(b"x", destination, True, source)
        entering = Datagram(b"x", source, False, destination)
        verdicts = [rule.decide(each, 0, random.Random(1)) is None for each in (leaving, entering)]
        assert verdicts[0] == verdicts[1], "seen from either end it is the same datagram"
        return verdicts[0]

    both = Partition((one,), (two, ("10.0.0.9",)))
    assert [passes(both, one, two), passes(both, two, one)] == [False, False]
    assert passes(both, one, three)
    assert passes(both, two, three)
    assert not passes(both, one, ("10.0.0.9", 77)), "a host without a port is all its ports"
    one_way = Partition((one,), (two,), one_way=True)
    assert [passes(one_way, one, two), passes(one_way, two, one)] == [False, True]
    assert Partition((one,), (two,), until_ns=5).decide(Datagram(b"x", two, True, one), 5, random.Random(1)) is None
    assert both.decide(Datagram(b"x", two, True), 0, random.Random(1)) is None, "our end is not known"


def test_an_address_that_is_only_text_is_refused() -> None:
    for make in (
        lambda: Cut(addresses=("10.0.0.1",)),
        lambda: Partition(("a",), ("b",)),
        lambda: Only(Cut(), None, ("a",)),
    ):
        with pytest.raises(ConfigurationError, match="an address is"):
            make()


# -- loss in bursts ---------------------------------------------------------------------------------------------------


def losses(rule: BurstLoss, count: int, seed: int) -> list[bool]:
    rng = random.Random(seed)
    return [rule.decide(OUT, 0, rng) is not None for _ in range(count)]


@pytest.mark.parametrize(
    "rule",
    [BurstLoss(0.01, 0.25), BurstLoss(0.05, 0.5, good_loss=0.002, bad_loss=0.6), BurstLoss.mean(0.02, burst=8)],
)
def test_burst_loss_loses_its_stationary_share(rule: BurstLoss) -> None:
    lost = losses(rule, 200_000, seed=11)
    # the chain is correlated over about 1 / (to_bad + to_good) datagrams, which widens the error of the mean
    correlated = 2 / (rule.to_bad + rule.to_good)
    error = (rule.stationary_loss * correlated / 200_000) ** 0.5
    assert abs(sum(lost) / 200_000 - rule.stationary_loss) < 4 * error


def test_bursts_have_the_mean_length_that_was_asked_for() -> None:
    rule = BurstLoss.mean(0.02, burst=8)
    assert rule.stationary_loss == pytest.approx(0.02)
    lost = losses(rule, 200_000, seed=12)
    starts = sum(now and not before for before, now in zip([False, *lost], lost, strict=False))
    assert sum(lost) / starts == pytest.approx(8, rel=0.1)


def test_burst_loss_at_its_limits() -> None:
    assert losses(BurstLoss(0.0, 0.0), 100, seed=1) == [False] * 100
    assert losses(BurstLoss(1.0, 0.0), 100, seed=1) == [True] * 100
    assert losses(BurstLoss(1.0, 1.0), 6, seed=1) == [True, False] * 3
    assert BurstLoss(0.0, 0.0, good_loss=0.5).stationary_loss == 0.5


def test_the_directions_of_burst_loss_are_independent() -> None:
    rule, rng = BurstLoss(1.0, 0.0), random.Random(1)
    rule.decide(OUT, 0, rng)
    assert rule._bad == {True: True}


@pytest.mark.parametrize(("loss", "burst"), [(1.0, 2.0), (0.9, 1.0), (0.1, 0.5), (0.1, float("nan"))])
def test_a_chain_that_cannot_be_is_refused(loss: float, burst: float) -> None:
    with pytest.raises(ConfigurationError):
        BurstLoss.mean(loss, burst=burst)


# -- rate and queue ---------------------------------------------------------------------------------------------------


def test_a_line_serialises_to_the_nanosecond() -> None:
    wire = Wire(Rate(125_000, queue_bytes=10_000))  # 1 Mbit/s: 8 us a byte
    for i in range(5):
        wire.send(at(1000, mark=i), 0)
    assert [when for when, _ in wire.received()] == [8 * MS * i for i in range(1, 6)]
    wire.send(at(500, mark=9), 100 * MS)
    assert wire.arrivals[-1][0] == 104 * MS, "an idle line saves nothing up"


def test_a_bucket_lets_its_burst_through_and_then_its_rate() -> None:
    wire = Wire(Rate(1000, burst_bytes=300, queue_bytes=10_000))
    for i in range(5):
        wire.send(at(100, mark=i), 0)
    assert [when for when, _ in wire.received()] == [0, 0, 0, SECOND // 10, SECOND // 5]
    wire.send(at(250), 10 * SECOND)
    assert wire.arrivals[-1][0] == 10 * SECOND, "it fills up again, to its size and no more"
    wire.send(at(100), 10 * SECOND)
    assert wire.arrivals[-1][0] == 10 * SECOND + SECOND // 20


def test_a_datagram_larger_than_the_bucket_waits_for_what_it_would_have_held() -> None:
    assert decided(Rate(1000, burst_bytes=50), at(150)) == [Delivery(at(150).data, SECOND // 10)]


def test_the_queue_drops_its_tail_by_bytes() -> None:
    wire = Wire(Rate(1000, queue_bytes=250))
    for i in range(4):
        wire.send(at(100, mark=i), 0)
    assert [data[0] for _, data in wire.received()] == [0, 1]
    assert wire.installed.stats.dropped == 2
    wire.send(at(100, mark=9), 50 * MS)
    assert [data[0] for _, data in wire.received()] == [0, 1, 9], "50 bytes were through, so there is room for 100"
    assert decided(Rate(1000, queue_bytes=0), at(100)) != [], "what finds nothing waiting is never dropped"


def test_the_queue_drops_its_tail_by_time() -> None:
    wire = Wire(Rate(1000, queue_bytes=None, queue_ns=250 * MS))
    for i in range(4):
        wire.send(at(100, mark=i), 0)
    assert [(when, data[0]) for when, data in wire.received()] == [(100 * MS, 0), (200 * MS, 1)]


def test_directions_have_a_line_each_and_the_backlog_can_be_read() -> None:
    rule = Rate(1000)
    wire = Wire(rule)
    wire.send(at(100), 0)
    wire.send(at(100, outgoing=False), 0)
    assert [when for when, _ in wire.received()] == [100 * MS, 100 * MS]
    assert rule.backlog_bytes(50 * MS, outgoing=True) == 50
    assert rule.backlog_bytes(100 * MS, outgoing=True) == 0


def test_overhead_counts_on_the_line() -> None:
    assert decided(Rate(1000, overhead_bytes=28), at(72))[0].delay_ns == SECOND // 10


def test_a_queue_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="without an end"):
        Rate(1000, queue_bytes=None)


@given(
    rate=st.integers(1, 10**10),
    burst=st.integers(0, 20_000),
    queue=st.integers(0, 50_000),
    traffic=st.lists(st.tuples(st.integers(0, 10 * MS), st.integers(1, 1500)), min_size=1, max_size=60),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_rate_is_never_exceeded_in_any_interval_nor_wasted(
    rate: int, burst: int, queue: int, traffic: list[tuple[int, int]]
) -> None:
    rule, rng = Rate(rate, burst_bytes=burst, queue_bytes=queue), random.Random(1)
    now = 0
    left: list[tuple[int, int]] = []  # when, bytes
    tokens, tokens_at = burst * SECOND, 0  # an ordinary bucket beside it, in exact arithmetic
    for gap, size in traffic:
        now += gap
        answer = rule.decide(at(size), now, rng)
        if answer:
            left.append((now + answer[0].delay_ns, size))
            start = max(now * rate, tokens_at)  # scaled by the rate: no rounding
            tokens = min(burst * SECOND, tokens + start - tokens_at)
            wait = max(0, size * SECOND - tokens)
            tokens, tokens_at = tokens + wait - size * SECOND, start + wait
            assert left[-1][0] == -(-tokens_at // rate), "as soon as an ordinary bucket has the tokens, and no sooner"
    assert [when for when, _ in left] == sorted(when for when, _ in left)
    largest = max(size for _, size in traffic)
    for i in range(len(left)):
        total = 0
        for when, size in left[i:]:
            total += size
            # departures are rounded up to whole nanoseconds, in which `rate` scaled bytes may come together
            assert total * SECOND <= rate * (when - left[i][0]) + max(burst, largest) * SECOND + rate


# -- hold -------------------------------------------------------------------------------------------------------------


def test_a_hold_gives_back_in_order_what_it_kept() -> None:
    wire = Wire(Hold())
    woken: list[bool] = []
    wire.faults.wake = lambda: woken.append(True)
    for i in range(5):
        wire.send(at(1, outgoing=i % 2 == 0, mark=i), i)
    assert wire.arrivals == []
    assert wire.faults.released(50) == [], "nobody let go"
    wire.installed.release()
    assert woken == [True]
    wire.take_released(100)
    wire.send(at(1, mark=9), 100)
    assert [(when, data[0]) for when, data in wire.received()] == [(100, i) for i in (0, 1, 2, 3, 4, 9)]


def test_removing_a_hold_releases_it() -> None:
    wire = Wire(Hold())
    with wire.installed:
        wire.send(at(1, mark=7), 0)
    wire.take_released(5)
    assert wire.received() == [(5, b"\x07")]
    assert wire.faults.rules == []


@pytest.mark.parametrize("hold", [Hold(limit=3), Hold(limit_bytes=30)])
def test_a_hold_is_bounded(hold: Hold) -> None:
    wire = Wire(hold)
    for i in range(10):
        wire.send(at(10, mark=i), 0)
    assert (hold.kept, hold.overflowed) == (3, 7)
    wire.installed.release()
    wire.take_released(1)
    assert [data[0] for _, data in wire.received()] == [0, 1, 2]


def test_a_hold_may_release_itself_at_a_time() -> None:
    wire = Wire(Hold(until_ns=100))
    for i in range(5):
        wire.send(at(1, mark=i), 30 * i)
    assert [(when, data[0]) for when, data in wire.received()] == [(100, 0), (100, 1), (100, 2), (100, 3), (120, 4)]


def test_what_a_hold_in_a_chain_releases_goes_through_the_rest_of_it() -> None:
    wire = Wire(Chain(Delay(10), Hold(), Rate(1000, queue_bytes=250)))
    for i in range(4):
        wire.send(at(100, mark=i), 0)
    wire.installed.release()
    wire.take_released(SECOND)
    assert [(when, data[0]) for when, data in wire.received()] == [
        (SECOND + 100 * MS, 0),
        (SECOND + 200 * MS, 1),
    ], "a burst into a queue of 250 bytes"


def test_holds_in_a_chain_keep_the_order_when_released_together() -> None:
    late = Hold()
    wire = Wire(Chain(Between(10, None, Hold()), late))
    wire.send(at(1, mark=1), 0)  # waits in the second
    wire.send(at(1, mark=2), 10)  # in the first
    wire.installed.release()
    wire.take_released(20)
    assert [data[0] for _, data in wire.received()] == [1, 2]


# -- composition ------------------------------------------------------------------------------------------------------


def plain(seed: int) -> list[Rule]:
    return [
        Drop(0.2),
        Duplicate(0.3, later_ns=50),
        Corrupt(0.2),
        Delay(5, jitter_ns=100),
        Rate(10**7, queue_bytes=3000),
        BurstLoss(0.1, 0.4),
        Reorder(0.2, later_ns=30),
        Between(100, 300, Drop(0.5)),
        Only(Duplicate(0.5), outgoing=True),
    ]


def story(rule: Rule, seed: int) -> list[list[Delivery] | None]:
    rng = random.Random(seed)
    return [rule.decide(Datagram(bytes([i % 256]) * (20 + i % 7), A, outgoing=bool(i % 3)), i, rng) for i in range(400)]


@pytest.mark.parametrize("kind", [Chain, First])
def test_nesting_changes_nothing(kind: Callable[..., Rule]) -> None:
    for seed in range(5):
        flat = story(kind(*plain(seed)), seed)
        rules = plain(seed)
        assert story(kind(kind(*rules[:4]), *rules[4:]), seed) == flat
        rules = plain(seed)
        assert story(kind(rules[0], kind(rules[1], kind(*rules[2:]))), seed) == flat


@pytest.mark.parametrize("kind", [Chain, First])
def test_composed_of_nothing_there_is_no_opinion_and_of_one_it_is_that_one(kind: Callable[..., Rule]) -> None:
    assert story(kind(), 1) == [None] * 400
    for index in range(len(plain(0))):
        assert story(kind(plain(0)[index]), 3) == story(plain(0)[index], 3)


def test_a_chain_adds_delays_and_lets_each_rule_see_the_time_of_arrival() -> None:
    seen: list[tuple[int, bytes]] = []

    class Watch:
        def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
            seen.append((now_ns, datagram.data))
            return None

    assert decided(Chain(Delay(100), Duplicate(1.0, later_ns=7), Watch(), Delay(1)), now_ns=1000) == [
        Delivery(b"hello", 101),
        Delivery(b"hello", 108),
    ]
    assert seen == [(1100, b"hello"), (1107, b"hello")]
    assert decided(Chain(Delay(100), Between(1100, None, Cut())), now_ns=1000) == []
    assert decided(Chain(Delay(99), Between(1100, None, Cut())), now_ns=1000) == [Delivery(b"hello", 99)]


def test_what_one_rule_drops_no_later_one_sees() -> None:
    chain = Chain(Cut(), Drop(0.0))
    assert decided(chain) == []
    assert [stats.seen for stats in chain.stats] == [1, 0]


def test_copies_in_a_chain_are_bounded() -> None:
    assert len(decided(Chain(*[Duplicate(1.0, copies=16)] * 5))) == 256


def test_only_and_between_leave_all_else_alone() -> None:
    assert decided(Only(Cut(), outgoing=True), OUT) == []
    assert decided(Only(Cut(), outgoing=True), IN) == PASSED
    assert decided(Only(Cut(), addresses=((A[0],),)), OUT) == []
    assert decided(Only(Cut(), addresses=((A[0],),)), IN) == PASSED
    times = [decided(Between(10, 20, Cut()), now_ns=now) == [] for now in (9, 10, 19, 20)]
    assert times == [False, True, True, False]
    with pytest.raises(ConfigurationError, match="ends"):
        Between(2, 1, Cut())


def test_statistics_say_what_each_rule_did() -> None:
    faults = Faults(random.Random(1))
    chain = Chain(Drop(0.5), Corrupt(1.0), Delay(5), Duplicate(1.0))
    whole = faults.add(chain)
    for _ in range(100):
        faults.decide(OUT, 0)
    drop, corrupt, delay, duplicate = chain.stats
    assert drop.seen == whole.stats.seen == 100
    assert drop.decided == drop.dropped == whole.stats.dropped
    assert drop.bytes_dropped == 5 * drop.dropped
    left = 100 - drop.dropped
    assert (corrupt.seen, corrupt.altered, corrupt.delayed) == (left, left, 0)
    assert (delay.delayed, delay.altered, delay.copies) == (left, 0, 0)
    assert duplicate.copies == whole.stats.copies == left
    assert whole.stats.altered == whole.stats.delayed == left


def test_the_same_seed_repeats_every_rule_and_another_does_not() -> None:
    for make in (lambda: Chain(*plain(0)), lambda: First(*plain(0))):
        assert story(make(), 11) == story(make(), 11)
        assert story(make(), 11) != story(make(), 12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Delay(-1),
        lambda: Delay(0, jitter_ns=-1),
        lambda: Reorder(0.1, later_ns=0),
        lambda: Duplicate(0.1, copies=0),
        lambda: Duplicate(0.1, copies=17),
        lambda: Corrupt(0.1, bits=0),
        lambda: Rate(0),
        lambda: Rate(1, burst_bytes=-1),
        lambda: BurstLoss(0.1, 1.5),
        lambda: PayloadCorrupt(every=0),
        lambda: PayloadCorrupt(min_bytes=5, max_bytes=4),
        lambda: PayloadCorrupt(bits=65),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError):
        make()


# -- payloads ---------------------------------------------------------------------------------------------------------


def hits(rule: PayloadCorrupt, sizes: list[int], seed: int = 1) -> list[int]:
    """Which of the payloads were changed; each by as many bits as the rule says."""
    faults = Faults(random.Random(seed))
    installed = faults.add_payload(rule)
    found = []
    for i, size in enumerate(sizes):
        data = bytearray(size)
        faults.apply_payload(memoryview(data))
        flipped = int.from_bytes(data, "big").bit_count()
        assert flipped in (0, min(rule.bits, 8 * size))
        if flipped:
            found.append(i)
    assert (installed.seen, installed.changed) == (len(sizes), len(found))
    return found


def test_every_nth_payload_is_corrupted() -> None:
    assert hits(PayloadCorrupt(every=3), [10] * 10) == [2, 5, 8]
    assert hits(PayloadCorrupt(every=2, times=2, bits=3), [10] * 10) == [1, 3]
    assert hits(PayloadCorrupt(times=0), [10] * 3) == []


def test_only_payloads_of_some_length_count() -> None:
    assert hits(PayloadCorrupt(min_bytes=5, max_bytes=6, every=2), [4, 5, 0, 6, 7, 5, 6]) == [3, 6]


def test_payloads_are_corrupted_with_their_probability_and_the_seed_repeats() -> None:
    found = hits(PayloadCorrupt(0.2), [8] * 5000, seed=4)
    assert abs(len(found) / 5000 - 0.2) < 0.02
    assert hits(PayloadCorrupt(0.2), [8] * 5000, seed=4) == found
    assert hits(PayloadCorrupt(0.2), [8] * 5000, seed=5) != found


def test_a_payload_rule_that_is_removed_does_nothing_more() -> None:
    faults = Faults(random.Random(1))
    data = bytearray(4)
    with faults.add_payload(PayloadCorrupt()), faults.add_payload(PayloadCorrupt(times=0)) as other:
        faults.apply_payload(memoryview(data))
    assert other.seen == 1
    changed = bytes(data)
    assert changed != bytes(4)
    faults.apply_payload(memoryview(data))
    assert data == changed
