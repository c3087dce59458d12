"""Which lane a message takes: the one that has carried it first, by what each has shown."""

from __future__ import annotations

import random

import pytest

from quicoll.engine.lane_rate import FORGET_NS, LaneRate, soonest

MESSAGE = 1 << 20


class Paths:
    """Lanes that carry one message after the other, each at a rate of its own."""

    def __init__(self, *bytes_per_ns: float) -> None:
        self.now_ns = 0
        self.speeds = list(bytes_per_ns)
        self.rates = [LaneRate() for _ in bytes_per_ns]
        self.queues: list[list[tuple[int, int]]] = [[] for _ in bytes_per_ns]  # when each ends, and its size
        self.carried = [0] * len(bytes_per_ns)

    def give(self, nbytes: int) -> int:
        place = soonest(self.rates, nbytes, self.now_ns)[0]
        queue = self.queues[place]
        begins_ns = max(self.now_ns, queue[-1][0]) if queue else self.now_ns
        queue.append((begins_ns + round(nbytes / self.speeds[place]), nbytes))
        self.rates[place].begun(nbytes, self.now_ns)
        return place

    def pass_on(self) -> bool:
        """Go to the next end."""
        ends = [(queue[0][0], place) for place, queue in enumerate(self.queues) if queue]
        if not ends:
            return False
        self.now_ns, place = min(ends)
        _, nbytes = self.queues[place].pop(0)
        self.carried[place] += nbytes
        self.rates[place].ended(nbytes, self.now_ns, well=True)
        return True

    def operation(self, messages: int, *, open_at_most: int = 8) -> int:
        """Carry messages, some at a time; return how long that took."""
        began = self.now_ns
        under_way = 0
        for _ in range(messages):
            if under_way == open_at_most:
                self.pass_on()
                under_way -= 1
            self.give(MESSAGE)
            under_way += 1
        while self.pass_on():
            pass
        return self.now_ns - began


def test_without_knowledge_the_fewest_open_bytes_decide_and_then_the_number() -> None:
    rates = [LaneRate(), LaneRate(), LaneRate()]
    rates[0].begun(10, 0)
    assert soonest(rates, 5, 0) == [1, 2, 0]


@pytest.mark.parametrize("fast", [1.0, 2.0, 5.0, 20.0])
def test_two_paths_carry_an_operation_in_nearly_the_time_that_both_together_need(fast: float) -> None:
    paths = Paths(0.02, 0.02 * fast)
    paths.operation(16)  # learns
    messages = 64
    took = paths.operation(messages)
    ideal = messages * MESSAGE / (0.02 * (1 + fast))
    last = MESSAGE / 0.02  # a message is not divided
    assert took <= ideal + last
    assert took < messages * MESSAGE / (0.02 * fast) * 1.01  # never worse than the faster one alone


def test_a_path_that_slows_down_is_given_less() -> None:
    paths = Paths(0.1, 0.1)
    paths.operation(32)
    paths.speeds[0] = 0.005
    paths.operation(32)
    before = list(paths.carried)
    paths.operation(64)
    slow, quick = (after - was for after, was in zip(paths.carried, before, strict=True))
    assert slow * 8 < quick


def test_a_path_that_was_slow_is_tried_again_after_a_while() -> None:
    rates = [LaneRate(), LaneRate()]
    for rate, took in zip(rates, (1_000_000, 1_000), strict=True):
        rate.begun(1000, 0)
        rate.ended(1000, took, well=True)
    assert soonest(rates, 1000, 2_000_000) == [1, 0]
    later = 1_000_000 + FORGET_NS + 1
    rates[1].begun(1000, later - 10)
    rates[1].ended(1000, later, well=True)
    assert rates[0].bytes_per_ns(later) is None
    rates[1].begun(1, later)
    assert soonest(rates, 1000, later) == [0, 1]


def test_what_has_not_arrived_says_nothing_of_the_rate() -> None:
    rate = LaneRate()
    rate.begun(1000, 0)
    rate.ended(1000, 10, well=False)
    assert rate.bytes_per_ns(10) is None
    assert rate.open_bytes == 0


def test_time_without_work_does_not_count() -> None:
    rate = LaneRate()
    rate.begun(1000, 0)
    rate.ended(1000, 1000, well=True)
    rate.begun(1000, 5_000_000)
    rate.ended(1000, 5_001_000, well=True)
    assert rate.bytes_per_ns(5_001_000) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(20))
def test_every_lane_is_named_once_whatever_is_under_way(seed: int) -> None:
    draw = random.Random(seed)
    rates = [LaneRate() for _ in range(8)]
    now_ns = 0
    for _ in range(200):
        now_ns += draw.randrange(1, FORGET_NS // 20)
        rate = draw.choice(rates)
        if rate.open_bytes and draw.random() < 0.6:
            rate.ended(rate.open_bytes, now_ns, well=draw.random() < 0.8)
        else:
            rate.begun(draw.randrange(1, MESSAGE), now_ns)
        assert sorted(soonest(rates, draw.randrange(1, MESSAGE), now_ns)) == list(range(8))
