"""The engine's thread is woken where its caller is, while somebody waits for it."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable

import pytest

from quicoll.engine import looking
from quicoll.engine.looking import LookingSelector
from quicoll.engine.placing import PAUSE_NS, SMALL_NS, Placing, system_processors
from quicoll.engine.runtime import ThreadRuntime


class Two:
    """Two processors: whoever asks is on `place`."""

    def __init__(self) -> None:
        self.set = {0, 1}
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


class Sender:
    """Sends nothing."""

    def gather(self) -> None: ...
    def send_gathered(self) -> None: ...


def apart() -> tuple[Two, Placing]:
    """A caller on processor 1, and from then on everybody on 0."""
    two = Two()
    placing = Placing(two)
    call(two, placing, 1)
    return two, placing


def call(two: Two, placing: Placing, now_ns: int) -> None:
    two.place = 1
    placing.called(now_ns)
    two.place = 0


def waits() -> bool:
    return True


def test_it_is_woken_where_its_caller_is_and_may_run_anywhere_when_it_is_awake() -> None:
    two, placing = apart()
    placed = placing.sleep(1, waits)
    assert two.set == {1}
    assert placed is not None
    placing.woke(placed)
    assert two.set == {0, 1}


def test_where_it_already_is_with_its_caller_nothing_is_asked_for() -> None:
    two, placing = apart()
    two.place = 1
    assert placing.sleep(1, lambda: pytest.fail("no need to know")) is None
    assert not two.asked


def test_for_a_caller_that_computes_it_stays() -> None:
    two, placing = apart()
    assert placing.sleep(1, lambda: False) is None
    assert not two.asked


def test_before_anybody_has_called_it_stays() -> None:
    two = Two()
    assert Placing(two).sleep(1, waits) is None
    assert not two.asked


def test_where_they_part_again_and_again_it_follows_once_in_a_while() -> None:
    two, placing = apart()
    for now in range(0, 10 * PAUSE_NS, PAUSE_NS // 10):
        call(two, placing, now)
        placed = placing.sleep(now, waits)
        if placed is not None:
            placing.woke(placed)
    assert two.asked == 10 * [{1}, {0, 1}]


def test_in_an_operation_that_lasts_it_stays_where_it_has_a_processor_for_itself() -> None:
    two, placing = apart()
    for now in range(2 + SMALL_NS, 20 * PAUSE_NS, PAUSE_NS // 10):
        assert placing.sleep(now, lambda: pytest.fail("no need to know")) is None
    assert not two.asked
    call(two, placing, 20 * PAUSE_NS)
    assert placing.sleep(20 * PAUSE_NS + SMALL_NS, waits) is not None


def test_a_processor_that_it_may_not_have_is_not_asked_for() -> None:
    two, placing = apart()
    two.set = {0}
    assert placing.sleep(1, waits) is None
    assert not two.asked


def test_what_others_have_changed_while_it_slept_stays() -> None:
    two, placing = apart()
    placed = placing.sleep(1, waits)
    assert placed is not None
    two.set = {0, 1, 2}
    placing.woke(placed)
    assert two.set == {0, 1, 2}


def test_where_the_system_refuses_nothing_is_tried_again() -> None:
    two, placing = apart()
    two.refuses = True
    assert placing.sleep(1, waits) is None
    two.refuses = False
    call(two, placing, 2 * PAUSE_NS)
    assert placing.sleep(2 * PAUSE_NS, waits) is None
    assert not two.asked


def test_a_system_without_a_choice_is_left_alone() -> None:
    placing = Placing(None)
    placing.called(0)
    assert placing.sleep(1, waits) is None


@pytest.mark.parametrize(("awaited", "gave"), [(True, False), (False, True), (False, False)])
def test_the_loop_of_the_engine_sleeps_where_its_caller_is_while_it_is_awaited_and_when_it_has_given(
    monkeypatch: pytest.MonkeyPatch, awaited: bool, gave: bool
) -> None:
    two, placing = apart()
    system = selectors.DefaultSelector.select
    during: list[set[int]] = []
    dozed: list[set[int]] = []

    def select(self: selectors.DefaultSelector, timeout: float | None = None) -> object:
        if timeout is None:
            during.append(set(two.set))
        return system(self, 0)  # nothing here sleeps

    monkeypatch.setattr(looking, "doze", lambda selector: dozed.append(set(two.set)))
    monkeypatch.setattr(looking, "processors", lambda: 2)
    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    near, far = socket.socketpair()
    with near, far, LookingSelector(lambda: SMALL_NS, give=lambda: gave, awaited=lambda: awaited) as selector:
        selector.placing = placing
        selector.register(near, selectors.EVENT_READ)
        monkeypatch.setattr(selector, "_looks", _NoLooks())
        selector.select(None)
    assert (dozed, during) == ([{1}] if gave else [], [{1} if awaited else {0, 1}])
    assert two.set == {0, 1}


class _NoLooks:
    def may(self, now_ns: int) -> bool:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="threads choose processors by sched_setaffinity of Linux")
def test_a_thread_of_this_system_goes_to_the_processor_of_its_caller_and_is_free_afterwards() -> None:
    mine = os.sched_getaffinity(0)
    if len(mine) < 2:
        pytest.skip("one processor: there is nothing to choose")
    found = system_processors()
    assert found is not None
    placing, processors = Placing(found), found
    runtime = ThreadRuntime("test")
    seen: list[tuple[int, set[int]]] = []

    def note() -> None:
        placed = placing.sleep(0, waits)
        seen.append((processors.here(), processors.allowed()))
        if placed is not None:
            placing.woke(placed)
        seen.append((processors.here(), processors.allowed()))

    try:
        here = max(mine)
        os.sched_setaffinity(0, {here})  # the caller's thread, for this test
        placing.called(0)
        runtime.loop.call_soon_threadsafe(os.sched_setaffinity, 0, mine)  # a thread has what its maker had
        done = threading.Event()
        runtime.loop.call_soon_threadsafe(os.sched_setaffinity, 0, {min(mine)})
        runtime.loop.call_soon_threadsafe(os.sched_setaffinity, 0, mine)
        runtime.loop.call_soon_threadsafe(note)
        runtime.loop.call_soon_threadsafe(done.set)
        assert done.wait(10)
    finally:
        os.sched_setaffinity(0, mine)
        asyncio.run(runtime.aclose())
    (during, then), (_, after) = seen
    assert after == mine
    assert then == mine or (during, then) == (here, {here})  # it may have been there before


def _over(ended: Callable[[int, BaseException | None], None]) -> None:
    ended(1, None)


def test_a_caller_looks_where_it_is_once_a_millisecond_and_says_each_time_that_it_has_called() -> None:
    two = Two()
    runtime = ThreadRuntime("test")
    selector = runtime._selector
    assert selector is not None
    placing = selector.placing = Placing(two)
    now = SMALL_NS
    selector.clock = lambda: now

    async def call(place: int) -> None:
        two.place = place
        assert await runtime.begin(_over, Sender()) == 1

    async def calls() -> None:
        nonlocal now
        await call(1)
        now += SMALL_NS - 1
        await call(0)
        assert (placing._caller, placing.called_ns) == (1, now)
        now += 1
        await call(0)
        assert (placing._caller, placing.called_ns) == (0, now)
        await runtime.aclose()

    asyncio.run(calls())


def test_who_calls_says_where() -> None:
    two = Two()
    runtime = ThreadRuntime("test")
    assert runtime._selector is not None
    runtime._selector.placing = Placing(two)
    two.place = 1

    async def call() -> None:
        assert await runtime.begin(_over, Sender()) == 1
        await runtime.aclose()

    asyncio.run(call())
    two.place = 0
    placed = runtime._selector.placing.sleep(PAUSE_NS, waits)
    assert placed == ({0, 1}, {1})
