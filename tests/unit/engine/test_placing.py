"""A thread keeps off the processor where another rank was in its way, while it sleeps and for as long as that helps."""

from __future__ import annotations

import random
import selectors
import socket
import sys
import threading
from itertools import pairwise

import pytest

from quicoll.engine import looking
from quicoll.engine.looking import LOOK_NS, QUESTION_NS, LookingSelector
from quicoll.engine.placing import (
    AWAY_NS,
    FIRST_PAUSE_NS,
    HELPS_NS,
    MOST_PAUSE_NS,
    Placing,
    Processors,
    system_processors,
)


class Chance(random.Random):
    """Always goes."""

    def random(self) -> float:
        return 0.0


class Stays(random.Random):
    """Never goes."""

    def random(self) -> float:
        return 0.9


class Two:
    """Two processors, the thread on the first one."""

    def __init__(self, allowed: set[int] | None = None) -> None:
        self.set = {0, 1} if allowed is None else allowed
        self.place = 0
        self.refuses = False
        self.asked: list[set[int]] = []

    def here(self) -> int:
        return self.place

    def allowed(self) -> set[int]:
        return set(self.set)

    def allow(self, processors: set[int]) -> None:
        if self.refuses:
            raise PermissionError("not allowed")
        assert processors
        self.asked.append(processors)
        self.set = set(processors)


def slept(placing: Placing, now_ns: int) -> None:
    kept = placing.sleep(now_ns)
    if kept is not None:
        placing.woke(kept)


def test_it_sleeps_on_another_processor_and_is_free_again_when_it_wakes() -> None:
    two = Two()
    placing = Placing(two, Chance())
    assert placing.sleep(0) is None
    placing.in_the_way(1)
    kept = placing.sleep(2)
    assert two.set == {1}
    assert kept is not None
    placing.woke(kept)
    assert two.set == {0, 1}
    slept(placing, 1 + AWAY_NS)
    assert len(two.asked) == 2  # the time is over
    assert not placing.away


def test_one_of_two_that_see_each_other_stays() -> None:
    two = Two()
    placing = Placing(two, Stays())
    placing.in_the_way(1)
    assert not placing.away
    goes = sum(went(seed) for seed in range(1000))
    assert 400 < goes < 600


def went(seed: int) -> bool:
    placing = Placing(Two(), random.Random(seed))
    placing.in_the_way(1)
    return placing.away


def test_where_moving_does_not_help_it_tries_less_and_less() -> None:
    placing = Placing(Two(), Chance())
    now, tries = 0, []
    while now < 20_000_000_000:
        now += 1_000_000
        before = placing.away
        placing.in_the_way(now)
        if placing.away and not before:
            tries.append(now)
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 3 * FIRST_PAUSE_NS
    assert MOST_PAUSE_NS <= pauses[-1] <= MOST_PAUSE_NS + 2_000_000
    assert len(tries) < 20


def test_where_moving_has_helped_for_a_while_the_next_try_comes_at_once() -> None:
    two = Two()
    placing = Placing(two, Chance())
    placing.in_the_way(1)
    placing.in_the_way(2)  # it did not help
    assert not placing.away
    placing.in_the_way(3 + 2 * FIRST_PAUSE_NS)
    assert placing.away
    two.place = 1
    later = 3 + 2 * FIRST_PAUSE_NS + HELPS_NS
    placing.in_the_way(later)  # it did
    assert placing.away
    placing.sleep(later)
    assert two.set == {0}


def test_a_thread_with_one_processor_stays_there() -> None:
    two = Two({0})
    placing = Placing(two, Chance())
    placing.in_the_way(1)
    assert placing.sleep(2) is None
    assert two.set == {0}


def test_what_others_have_changed_while_it_slept_stays() -> None:
    two = Two()
    placing = Placing(two, Chance())
    placing.in_the_way(1)
    kept = placing.sleep(2)
    assert kept is not None
    two.set = {0, 1, 2}
    placing.woke(kept)
    assert two.set == {0, 1, 2}


def test_where_the_system_refuses_nothing_is_tried_again() -> None:
    two = Two()
    two.refuses = True
    placing = Placing(two, Chance())
    placing.in_the_way(1)
    assert placing.sleep(2) is None
    two.refuses = False
    placing.in_the_way(3 + HELPS_NS)
    slept(placing, 4 + HELPS_NS)
    assert not two.asked


def test_a_system_without_a_choice_is_left_alone() -> None:
    placing = Placing(None, Chance())
    placing.in_the_way(1)
    assert not placing.away
    assert placing.sleep(2) is None


@pytest.mark.parametrize(("by_others", "goes"), [(True, True), (False, False)])
def test_who_finds_another_process_in_its_way_goes_and_for_its_own_caller_it_stays(
    monkeypatch: pytest.MonkeyPatch, by_others: bool, goes: bool
) -> None:
    """A question that took long: the processor was another process's, or was this process's own."""
    now = 1_000

    def clock() -> int:
        nonlocal now
        now += QUESTION_NS + 1
        return now

    monkeypatch.setattr(looking, "processors", lambda: 2)
    system = selectors.DefaultSelector.select
    during: list[set[int]] = []

    def select(self: selectors.BaseSelector, timeout: float | None = None) -> object:
        if timeout is None:
            during.append(set(two.set))
        return system(self, 0)  # nothing here sleeps

    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    two = Two()
    near, far = socket.socketpair()
    placing = Placing(two, Chance())
    with (
        near,
        far,
        LookingSelector(clock, process=(lambda: 5) if by_others else (lambda: now), placing=placing) as selector,
    ):
        selector.register(near, selectors.EVENT_READ)
        selector.select(None)
    assert during == [{1} if goes else {0, 1}]
    assert two.set == {0, 1}


def test_a_look_that_was_merely_in_vain_moves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000

    def clock() -> int:
        nonlocal now
        now += LOOK_NS // 20
        return now

    monkeypatch.setattr(looking, "processors", lambda: 2)
    near, far = socket.socketpair()
    placing = Placing(Two(), Chance())
    with near, far, LookingSelector(clock, process=lambda: 5, placing=placing) as selector:
        selector.register(near, selectors.EVENT_READ)
        selector.select(0.001)
    assert not placing.away


@pytest.mark.skipif(sys.platform != "linux", reason="threads choose processors by sched_setaffinity of Linux")
def test_the_systems_processors_are_those_of_the_thread_that_asks() -> None:
    seen: list[set[int]] = []

    def ask() -> None:
        processors: Processors | None = system_processors()
        assert processors is not None
        before = processors.allowed()
        here = processors.here()
        assert here in before
        processors.allow({here})
        seen.append(processors.allowed())
        processors.allow(before)
        assert processors.allowed() == before

    thread = threading.Thread(target=ask)
    mine = system_processors()
    assert mine is not None
    all_of_mine = mine.allowed()
    thread.start()
    thread.join()
    assert len(seen[0]) == 1
    assert mine.allowed() == all_of_mine
