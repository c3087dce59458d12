"""Every rule does what it says, the first opinion wins, and a seed repeats."""

from __future__ import annotations

import random

import pytest

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.faults import Corrupt, Cut, Datagram, Delay, Delivery, Drop, Duplicate, Faults, Rng, Rule

A, B = ("10.0.0.1", 1000), ("10.0.0.2", 2000)
OUT = Datagram(b"hello", A, outgoing=True)
IN = Datagram(b"hello", B, outgoing=False)
PASSED = [Delivery(b"hello")]


def judged(rule: Rule, datagram: Datagram = OUT, now_ns: int = 0) -> list[Delivery]:
    faults = Faults(random.Random(1))
    faults.add(rule)
    return faults.judge(datagram, now_ns)


def test_without_rules_everything_passes_unchanged() -> None:
    assert Faults(random.Random(1)).judge(OUT, 0) == PASSED


def test_cut_drops_everything_until_its_time() -> None:
    assert judged(Cut()) == judged(Cut(), IN) == []
    assert judged(Cut(until_ns=10), now_ns=9) == []
    assert judged(Cut(until_ns=10), now_ns=10) == PASSED


def test_cut_may_concern_one_direction_or_some_addresses() -> None:
    assert judged(Cut(outgoing=True), OUT) == []
    assert judged(Cut(outgoing=True), IN) == PASSED
    assert judged(Cut(outgoing=False), OUT) == PASSED
    assert judged(Cut(addresses=(A,)), OUT) == []
    assert judged(Cut(addresses=(A,)), IN) == PASSED
    six = Datagram(b"hello", ("::1", 1, 0, 0), outgoing=True)
    assert judged(Cut(addresses=(("::1", 1),)), six) == [], "flow and scope of an IPv6 address do not matter"


@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_drop_loses_about_its_share(probability: float) -> None:
    faults = Faults(random.Random(7))
    installed = faults.add(Drop(probability))
    lost = sum(faults.judge(OUT, 0) == [] for _ in range(2000))
    assert installed.judged == lost
    assert abs(lost / 2000 - probability) < 0.04


def test_delay_is_constant_plus_jitter() -> None:
    assert judged(Delay(500)) == [Delivery(b"hello", 500)]
    faults = Faults(random.Random(3))
    faults.add(Delay(100, jitter_ns=50, reorder=True))
    delays = {faults.judge(OUT, 0)[0].delay_ns for _ in range(500)}
    assert min(delays) == 100
    assert max(delays) == 150
    assert len(delays) > 40, "all of the jitter comes up"


def test_duplicate_delivers_twice() -> None:
    assert judged(Duplicate(1.0, later_ns=9)) == [Delivery(b"hello"), Delivery(b"hello", 9)]
    assert judged(Duplicate(0.0)) == PASSED


def test_corrupt_flips_exactly_one_bit() -> None:
    faults = Faults(random.Random(5))
    faults.add(Corrupt(1.0))
    seen = set()
    for _ in range(400):
        (delivery,) = faults.judge(OUT, 0)
        assert len(delivery.data) == len(OUT.data)
        difference = int.from_bytes(delivery.data, "big") ^ int.from_bytes(OUT.data, "big")
        assert difference.bit_count() == 1
        seen.add(difference)
    assert len(seen) == 8 * len(OUT.data), "every bit comes up"
    assert faults.judge(Datagram(b"", A, outgoing=True), 0) == [Delivery(b"")]


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_probability_out_of_range_is_refused(probability: float) -> None:
    for make in (Drop, Duplicate, Corrupt):
        with pytest.raises(ConfigurationError, match="probability"):
            make(probability)


def test_first_opinion_wins_in_the_order_of_installation() -> None:
    faults = Faults(random.Random(1))
    silent, delay, cut = faults.add(Drop(0.0)), faults.add(Delay(7)), faults.add(Cut())
    assert faults.judge(OUT, 0) == [Delivery(b"hello", 7)]
    assert (silent.judged, delay.judged, cut.judged) == (0, 1, 0)
    delay.remove()
    assert faults.judge(OUT, 0) == []
    assert cut.judged == 1


def test_removal_takes_away_just_that_rule_even_among_equal_ones() -> None:
    faults = Faults(random.Random(1))
    first, second = faults.add(Delay(1)), faults.add(Delay(1))
    first.remove()
    assert [other is second for other in faults.rules] == [True]
    first.remove()
    assert len(faults.rules) == 1
    with faults.add(Cut()):
        second.remove()
        assert faults.judge(OUT, 0) == []
    assert faults.judge(OUT, 0) == PASSED


def test_a_rule_that_removes_itself_while_judging_does_not_disturb_the_others() -> None:
    class Once:
        def judge(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
            once.remove()
            return None

    faults = Faults(random.Random(1))
    once = faults.add(Once())
    cut = faults.add(Cut())
    assert faults.judge(OUT, 0) == []
    assert [other is cut for other in faults.rules] == [True]


def trace(seed: int) -> list[list[Delivery]]:
    faults = Faults(random.Random(seed))
    for rule in (Drop(0.2), Duplicate(0.2), Corrupt(0.2), Delay(5, jitter_ns=100)):
        faults.add(rule)
    return [faults.judge(Datagram(bytes([i % 256] * 20), A, outgoing=bool(i % 2)), i) for i in range(500)]


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
