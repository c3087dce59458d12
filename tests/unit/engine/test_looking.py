"""The engine's loop looks before it sleeps, as far as that pays."""

from __future__ import annotations

import asyncio
import itertools
import selectors
import socket
import threading
from collections.abc import Iterator

import pytest

from quicoll.engine import looking
from quicoll.engine.looking import FOUND_NS, LATELY_NS, LOOK_NS, MOST_NS, PART, QUESTION_NS, LookingSelector, Looks
from quicoll.engine.runtime import ThreadRuntime
from quicoll.engine.share import REST_NS, Used


class Sender:
    """Sends nothing."""

    def gather(self) -> None: ...
    def send_gathered(self) -> None: ...


class Clock:
    """Each question takes as long as it may."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        self.now_ns += QUESTION_NS
        return self.now_ns


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LookingSelector, socket.socket, list[float | None]]]:
    """A selector that waits for a socket, the socket's other end, and how long the system was asked to wait."""
    asked: list[float | None] = []
    system = selectors.DefaultSelector.select

    def select(self: selectors.BaseSelector, timeout: float | None = None) -> object:
        asked.append(timeout)
        return system(self, 0)  # nothing here sleeps

    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    monkeypatch.setattr(looking, "processors", lambda: 2)
    near, far = socket.socketpair()
    with near, far, LookingSelector(Clock()) as selector:
        selector.register(near, selectors.EVENT_READ)
        yield selector, far, asked


def test_what_is_ready_is_given_without_a_look(
    pair: tuple[LookingSelector, socket.socket, list[float | None]],
) -> None:
    selector, far, asked = pair
    far.send(b"x")
    assert [events for _, events in selector.select(None)] == [selectors.EVENT_READ]
    assert asked == [0]


def test_what_comes_while_it_looks_ends_the_look(
    pair: tuple[LookingSelector, socket.socket, list[float | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    selector, far, asked = pair
    offers: list[None] = []

    def offer() -> None:
        offers.append(None)
        if len(offers) == 3:
            far.send(b"x")

    monkeypatch.setattr(looking, "offer", offer)
    assert [events for _, events in selector.select(None)] == [selectors.EVENT_READ]
    assert asked == [0] * 4


def test_a_look_in_vain_is_part_of_the_time_that_it_waits(
    pair: tuple[LookingSelector, socket.socket, list[float | None]],
) -> None:
    selector, _, asked = pair
    assert selector.select(1.0) == []
    assert asked[:-1] == [0] * len(asked[:-1])
    assert asked[-1] == pytest.approx(1.0 - LOOK_NS / 1e9)
    assert selector.select(None) == []
    assert asked[-1] is None


def test_who_is_in_the_way_of_others_sleeps(
    pair: tuple[LookingSelector, socket.socket, list[float | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    selector, _, asked = pair
    monkeypatch.setattr(looking, "QUESTION_NS", QUESTION_NS - 1)
    for _ in range(MOST_NS // LOOK_NS):
        asked.clear()
        selector.select(None)
        assert asked == [0, 0, None]
    asked.clear()
    selector.select(None)
    assert asked == [0, None]  # each has counted as a whole look in vain


@pytest.mark.parametrize("timeout", [-1.0, 0.0, LOOK_NS / 2e9])
def test_who_has_no_time_for_a_look_does_not_look(
    pair: tuple[LookingSelector, socket.socket, list[float | None]], timeout: float
) -> None:
    selector, _, asked = pair
    selector.select(timeout)
    assert asked == [timeout]


def test_after_looks_in_vain_it_sleeps_at_once(
    pair: tuple[LookingSelector, socket.socket, list[float | None]],
) -> None:
    selector, _, asked = pair
    for _ in range(MOST_NS // LOOK_NS):
        selector.select(None)
    asked.clear()
    selector.select(None)
    assert asked == [0, None]


def test_who_has_had_nothing_under_way_for_a_while_sleeps_at_once_and_looks_again_when_there_is_something(
    pair: tuple[LookingSelector, socket.socket, list[float | None]],
) -> None:
    _, _, asked = pair
    clock, idle = Clock(), [True]
    with LookingSelector(clock, idle=lambda: idle[0]) as selector:

        def looked() -> bool:
            asked.clear()
            selector.select(None)
            return len(asked) > 2

        assert looked()  # the call that is over may be followed by another
        clock.now_ns += LATELY_NS
        assert not looked()
        idle[0] = False
        assert looked()
        idle[0] = True
        assert looked()
        clock.now_ns += LATELY_NS
        assert not looked()


def test_with_one_processor_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "processors", lambda: 1)
    monkeypatch.setattr(looking, "offer", lambda: pytest.fail("it looked"))
    near, far = socket.socketpair()
    with near, far, LookingSelector() as selector:
        selector.register(near, selectors.EVENT_READ)
        assert selector.select(0.001) == []


def test_what_was_settled_for_other_threads_is_handed_out_first_and_then_nobody_looks(
    pair: tuple[LookingSelector, socket.socket, list[float | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks takes Python's lock again and again, which those who are woken by it need."""
    _, _, asked = pair
    monkeypatch.setattr(looking, "offer", lambda: pytest.fail("it looked"))
    done: list[str] = []
    settled = ["one", "two"]

    def give() -> bool:
        assert not asked
        done.extend(settled)
        return bool(settled)

    dozed: list[bool] = []
    monkeypatch.setattr(looking, "doze", lambda selector: dozed.append(selector.asleep))
    with LookingSelector(Clock(), give=give) as selector:
        assert selector.select(None) == []
        assert (done, asked, dozed) == (["one", "two"], [None], [False])
        asked.clear()
        assert selector.select(0) == []  # there is more to do in this thread
        assert asked == [0]
        settled.clear()
        asked.clear()
        monkeypatch.setattr(looking, "offer", lambda: None)
        assert selector.select(None) == []
        assert asked[:2] == [0, 0]


def test_who_was_given_something_and_calls_with_it_finds_nobody_asleep(
    pair: tuple[LookingSelector, socket.socket, list[float | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, asked = pair
    called: list[bool] = []
    monkeypatch.setattr(looking, "doze", lambda selector: called.append(selector.asleep))
    with LookingSelector(Clock(), lambda: bool(called), give=lambda: True) as selector:
        assert selector.select(None) == []
    assert (called, asked) == ([False], [0])


def test_a_doze_is_part_of_the_time_that_it_waits(
    pair: tuple[LookingSelector, socket.socket, list[float | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, asked = pair
    clock = Clock()

    def doze(selector: LookingSelector) -> None:
        clock.now_ns += 400_000_000

    monkeypatch.setattr(looking, "doze", doze)
    with LookingSelector(clock, give=lambda: True) as selector:
        assert selector.select(1.0) == []
    assert asked == [pytest.approx(0.6, abs=1e-3)]


def test_a_doze_ends_with_what_is_selected_for() -> None:
    near, far = socket.socketpair()
    with near, far, LookingSelector() as selector:
        selector.register(near, selectors.EVENT_READ)
        far.send(b"x")
        looking.doze(selector)
        assert [events for _, events in selector.select(0)] == [selectors.EVENT_READ]


def test_what_another_thread_has_queued_ends_a_look_and_keeps_from_sleeping(
    pair: tuple[LookingSelector, socket.socket, list[float | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever moment it comes: before, while it looks, or between the last look and the sleep."""
    _, _, asked = pair
    asleep: list[bool] = []

    def called() -> bool:
        asleep.append(selector.asleep)
        return len(asleep) == when

    with LookingSelector(Clock(), called) as selector:
        when = 1
        assert selector.select(None) == []
        assert (asked, asleep) == ([0], [False])
        looks = LOOK_NS // QUESTION_NS
        for when in (2, looks, looks + 1):
            asked.clear()
            asleep.clear()
            assert selector.select(None) == []
            assert asked == [0] * when
            assert asleep == [False] * when
        when = 0
        asked.clear()
        asleep.clear()
        selector.select(None)
        assert asked[-1] is None
        assert asleep[-1:] == [True]
        when, count = len(asleep), len(asked)  # the last moment
        asked.clear()
        asleep.clear()
        assert selector.select(None) == []
        assert asked == [0] * count
        assert asleep == [*[False] * (when - 1), True]
        assert not selector.asleep


def test_a_thread_that_is_awake_is_not_written_to_and_begins_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ThreadRuntime("test")
    at_work, go_on = threading.Event(), threading.Event()

    def work() -> None:
        at_work.set()
        go_on.wait()

    runtime.loop.call_soon_threadsafe(work)
    at_work.wait()
    with monkeypatch.context() as patch:
        patch.setattr(runtime.loop, "call_soon_threadsafe", lambda *_: pytest.fail("it was written to"))
        answers = [runtime.submit(lambda ended, number=number: ended(number, None), Sender()) for number in range(3)]
    go_on.set()
    assert [answer.result() for answer in answers] == [0, 1, 2]
    for number in range(300):  # whether it sleeps, is about to or looks
        assert runtime.submit(lambda ended, number=number: ended(number, None), Sender()).result() == number
    asyncio.run(runtime.aclose())


class Busy:
    """A thread that takes 10 ms of the processor in each turn, beside one that wants the lock as well."""

    def __init__(self) -> None:
        self.turns = 0

    def clock(self) -> int:
        self.turns += 1
        return self.turns * 10_000_000

    def used(self) -> Used:
        return Used(self.turns * 10_000_000, self.turns)


def test_who_rests_goes_on_when_somebody_begins_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether that is before the rest begins, in the moment in which it does, or in its middle."""
    busy = Busy()
    answers: list[bool] = []
    rests: list[float] = []
    when = 0

    def awaited() -> bool:
        answers.append(selector.resting)
        return len(answers) >= when

    with LookingSelector(busy.clock, share=0.1, hurried=awaited, idle=lambda: True, used=busy.used) as selector:
        wait = selector._roused.wait

        def middle(timeout: float) -> bool:
            rests.append(timeout)
            assert selector.resting
            selector.rouse()  # by who begins to wait now
            return wait(60.0)  # and would be for so long without it

        monkeypatch.setattr(selector._roused, "wait", middle)
        selector.select(0)  # the first turn, before which nothing is known of the thread
        for when, asked, rested in ((1, [False], 0), (2, [False, True], 0), (3, [False, True], 1)):  # noqa: B007 - `awaited` uses it
            answers.clear()
            rests.clear()
            assert selector.select(0) == []
            assert (answers, len(rests)) == (asked, rested)
            assert not selector.resting
            assert not selector._roused.is_set()
        assert rests == [REST_NS / 1e9]


def test_a_doze_counts_as_a_sleep_of_its_own_will(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for a wait for the lock it would make the engine rest beside nobody."""
    busy = Busy()
    dozes: list[None] = []
    answers = itertools.cycle((False, True))  # in each turn: before the doze, and after it
    monkeypatch.setattr(looking, "doze", lambda selector: dozes.append(None))
    with LookingSelector(
        busy.clock,
        lambda: next(answers),
        give=lambda: True,
        share=0.1,
        idle=lambda: True,
        used=lambda: Used(busy.turns * 10_000_000, len(dozes)),
    ) as selector:
        monkeypatch.setattr(selector._roused, "wait", lambda timeout: pytest.fail("it rests"))
        for _ in range(20):
            selector.select(None)
    assert len(dozes) == 20


def test_without_a_bound_nothing_is_asked_of_the_thread() -> None:
    with LookingSelector(Clock(), used=lambda: pytest.fail("it was asked")) as selector:
        for _ in range(100):
            selector.select(0)


@pytest.mark.parametrize("idle", [False, True])
def test_while_calls_may_not_wait_nothing_is_asked_of_the_thread(*, idle: bool) -> None:
    busy = Busy()
    asked: list[int] = []

    def used() -> Used:
        asked.append(busy.turns)
        return busy.used()

    with LookingSelector(busy.clock, share=0.1, hurried=lambda: True, idle=lambda: idle, used=used) as selector:
        for _ in range(100):
            selector.select(0)
            selector.select(1e-5)  # a sleep
    assert (len(asked) == 1) is not idle, "at its beginning alone, where there are calls"


def test_four_looks_that_find_something_pay_for_one_in_vain() -> None:
    looks = Looks(0)
    for _ in range(100):
        assert looks.may(0)
        looks.in_vain(LOOK_NS)
        for _ in range(LOOK_NS // FOUND_NS):
            looks.found()


def test_looks_in_vain_take_no_more_than_their_part_of_the_time() -> None:
    looks, now, spent = Looks(0), 0, 0
    while now < 1_000_000_000:
        if looks.may(now):
            looks.in_vain(LOOK_NS)
            now += LOOK_NS
            spent += LOOK_NS
        now += 10_000
    assert now / PART - LOOK_NS < spent <= now / PART + MOST_NS


def test_what_has_been_saved_has_an_end() -> None:
    looks = Looks(0)
    looks.found()
    looks.may(1_000_000_000_000)
    for _ in range(MOST_NS // LOOK_NS):
        assert looks.may(1_000_000_000_000)
        looks.in_vain(LOOK_NS)
    assert not looks.may(1_000_000_000_000)


def test_what_this_thread_has_used_grows() -> None:
    first = looking.used_by_this_thread()
    sum(range(200_000))
    assert looking.used_by_this_thread().cpu_ns > first.cpu_ns
