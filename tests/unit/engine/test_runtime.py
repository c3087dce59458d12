"""Calls cross from the caller's loop to the engine's thread and back."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from quicoll.engine.answers import Start, attend
from quicoll.engine.inline import InlineRuntime
from quicoll.engine.runtime import ThreadRuntime
from quicoll.errors import LocalError


async def test_work_runs_on_the_thread_and_its_result_and_error_come_back() -> None:
    runtime = ThreadRuntime("test")

    async def name() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise ValueError("there")

    assert await runtime.call(name()) == "quicoll-test"
    with pytest.raises(ValueError, match="there"):
        await runtime.call(fail())
    await runtime.aclose()
    await runtime.aclose()  # closing twice is harmless


class Interrupted(deque[Any]):
    """A queue whose next caller is interrupted behind its place in it, until the engine has begun what it called."""

    def __init__(self, runtime: ThreadRuntime, begun: threading.Event) -> None:
        super().__init__()
        self._interrupts: tuple[ThreadRuntime, threading.Event] | None = (runtime, begun)

    def append(self, value: Any, /) -> None:
        super().append(value)
        interrupts, self._interrupts = self._interrupts, None
        if interrupts is not None:
            runtime, begun = interrupts
            runtime.loop.call_soon_threadsafe(runtime._begin_queued)  # as for a caller before this one
            assert begun.wait(60.0)


def test_a_call_that_began_before_its_caller_asked_leaves_no_later_one_behind() -> None:
    runtime, begun, asked = ThreadRuntime("test"), threading.Event(), threading.Event()
    runtime._queue = Interrupted(runtime, begun)

    def first(ended: Callable[[int | None, BaseException | None], None]) -> None:
        begun.set()
        assert asked.wait(60.0)  # the thread is awake when its caller asks
        ended(1, None)

    def second(ended: Callable[[int | None, BaseException | None], None]) -> None:
        ended(2, None)

    one = runtime.submit(first, Sender())
    asked.set()
    assert one.result(60.0) == 1
    while runtime._selector is None or not runtime._selector.asleep:
        threading.Event().wait(0.001)
    assert runtime.submit(second, Sender()).result(60.0) == 2
    asyncio.run(runtime.aclose())


async def test_where_no_share_is_named_only_calls_through_memory_that_nobody_waits_for_are_not_hurried() -> None:
    class Nothing:
        def cancel(self) -> None:
            pass

    runtime = ThreadRuntime("test", share=None)
    assert runtime._is_hurried(), "it serves others alone"
    one, other = (runtime.hold(Nothing(), in_loop=False) for _ in range(2))
    assert not runtime._is_hurried()
    attend(one.future)
    assert runtime._is_hurried(), "somebody waits"
    attend(one.future, ends=True)
    assert not runtime._is_hurried()
    answer = runtime.submit(lambda ended: None, Sender())
    assert runtime._is_hurried(), "what goes over a link is under way as well"
    runtime.let_go(answer)
    for each in (one, other):
        each.settle(1, None, idle=False)
    await runtime.aclose()


async def test_the_engine_knows_whether_somebody_waits() -> None:
    runtime = ThreadRuntime("test", share=0.1)

    async def forever() -> None:
        await asyncio.Event().wait()

    called = runtime.call(forever())
    assert not runtime._is_awaited()
    task = asyncio.ensure_future(asyncio.wait_for(called, None))
    await asyncio.sleep(0)
    assert runtime._is_awaited()
    task.cancel()
    await asyncio.wait({task})
    runtime.let_go(called)
    answer = runtime.submit(lambda ended: None, Sender())
    assert not runtime._is_awaited()
    during: list[bool] = []

    def wait(times: int) -> bool:
        return runtime.wait(
            answer,
            0.0,
            lambda timeout: during.append(runtime._is_awaited()) if times == 1 else during.append(wait(times - 1)),
        )

    assert await asyncio.to_thread(wait, 1) is False
    assert during == [True]
    attend(answer)
    assert runtime._is_awaited()
    assert await asyncio.to_thread(wait, 2) is False  # one waits beside another one
    assert runtime._is_awaited()
    attend(answer, ends=True)
    assert not runtime._is_awaited()
    attend(asyncio.get_running_loop().create_future())  # of other futures it is known
    await runtime.aclose()


async def test_cancelling_the_caller_cancels_the_work() -> None:
    runtime = ThreadRuntime("test")
    started, cancelled = threading.Event(), threading.Event()

    async def forever() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    task = asyncio.ensure_future(runtime.call(forever()))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(cancelled.wait)
    await runtime.aclose()


async def test_closing_ends_what_still_runs_and_later_calls_are_refused() -> None:
    runtime = ThreadRuntime("test")
    ended = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.ensure_future(runtime.call(forever()))
    await runtime.call(asyncio.sleep(0))
    await runtime.aclose()
    assert ended.is_set()
    with pytest.raises(LocalError, match="the engine is closed"):  # nobody has cancelled the caller
        await task
    with pytest.raises(LocalError, match="closed"):
        await runtime.call(asyncio.sleep(0))
    assert not any(thread.name == "quicoll-test" for thread in threading.enumerate())


async def test_a_call_from_the_engine_itself_is_refused_instead_of_waiting_for_ever() -> None:
    runtime = ThreadRuntime("test")

    async def inner() -> None:
        await runtime.call(asyncio.sleep(0))

    with pytest.raises(LocalError, match="own thread"):
        await runtime.call(inner())
    await runtime.aclose()


async def test_calls_made_while_the_thread_ends_have_an_end_each() -> None:
    """Whatever the moment: run, or refused, or ended by an error; never left."""
    for _ in range(50):
        runtime = ThreadRuntime("test")

        async def calls(runtime: ThreadRuntime = runtime) -> None:
            while True:
                await runtime.call(asyncio.sleep(0))

        callers = [asyncio.create_task(calls()) for _ in range(4)]
        await asyncio.sleep(0)
        await asyncio.gather(runtime.aclose(), runtime.aclose())
        for caller in callers:
            with pytest.raises(LocalError, match="the engine is closed"):
                await caller


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_thread_that_dies_ends_its_calls() -> None:
    runtime = ThreadRuntime("test")

    async def leave() -> None:
        raise KeyboardInterrupt  # what asyncio lets through a loop

    waiting = asyncio.ensure_future(runtime.call(asyncio.Event().wait()))
    runtime.loop.call_soon_threadsafe(lambda: runtime.loop.create_task(leave()))
    with pytest.raises(LocalError, match="the engine is closed"):
        await waiting
    await runtime.aclose()


async def test_calls_to_a_blocked_thread_end_and_say_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ThreadRuntime("test", ask_s=0.01)
    monkeypatch.setattr("quicoll.engine.runtime._END_S", 0.05)
    go_on = threading.Event()

    def an_observer_that_waits() -> None:
        go_on.wait()

    runtime.loop.call_soon_threadsafe(an_observer_that_waits)
    calls = [runtime.call(asyncio.sleep(0)) for _ in range(3)]
    for call in calls:
        with pytest.raises(
            LocalError, match=r"thread has been blocked for 0\.3 s, in wait \(.*threading.py:"
        ) as raised:
            await call
        assert not raised.value.usable
    with pytest.raises(LocalError, match="does not end: it is blocked"):
        await runtime.aclose()
    go_on.set()
    await runtime.aclose()


async def test_what_has_ended_in_a_turn_that_never_ends_is_under_way_until_then() -> None:
    """Its caller would wait for ever otherwise: it hears of ends where a turn of the engine's loop does."""
    runtime = ThreadRuntime("test", ask_s=0.01)
    go_on = threading.Event()

    def start(ended: Callable[[int, None], None]) -> None:
        ended(1, None)
        go_on.wait()

    answer = runtime.begin(start, SENDER)
    with pytest.raises(LocalError, match="thread has been blocked"):
        await answer
    go_on.set()
    assert await runtime.call(asyncio.sleep(0, "works")) == "works"
    await runtime.aclose()


async def test_a_thread_that_is_only_slow_to_answer_is_not_taken_for_blocked() -> None:
    runtime = ThreadRuntime("test", ask_s=0.01)
    passes = 0

    async def busy() -> int:
        nonlocal passes
        while passes < 10:
            threading.Event().wait(0.05)
            passes += 1
            await asyncio.sleep(0)
        return passes

    assert await runtime.call(busy()) == 10
    await runtime.aclose()


@pytest.mark.slow
async def test_a_call_in_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    runtime = ThreadRuntime("test")
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            loop = asyncio.new_event_loop()

            async def use() -> str:
                try:
                    await runtime.call(asyncio.sleep(0))
                except LocalError as error:
                    await runtime.aclose()
                    return str(error)
                return "not refused"

            os.write(write, loop.run_until_complete(use()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        assert "fork of the one that joined" in told.read()
    await asyncio.to_thread(os.waitpid, child, 0)
    await runtime.call(asyncio.sleep(0))
    await runtime.aclose()


@pytest.mark.parametrize("inline", [True, False])
async def test_a_call_that_is_cancelled_at_once_has_begun_all_the_same(inline: bool) -> None:
    """An operation takes its number in its first step: without one it would take the place of the next."""
    runtime = InlineRuntime() if inline else ThreadRuntime("test")
    seen: list[str] = []

    async def numbered() -> None:
        seen.append("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    for _ in range(20):
        seen.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await runtime.call(numbered())
        await runtime.call(asyncio.sleep(0))
        assert seen == ["begun", "cancelled"]
    await runtime.aclose()


async def test_the_inline_runtime_uses_the_callers_loop() -> None:
    runtime = InlineRuntime()
    assert runtime.loop is asyncio.get_running_loop()

    async def where() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert await runtime.call(where()) is runtime.loop
    await runtime.aclose()


async def test_what_is_begun_beside_an_engine_on_its_callers_loop_ends_there_and_is_cancelled_with_its_future() -> None:
    runtime = InlineRuntime()
    begun = SimpleNamespace(cancelled=0)
    begun.cancel = lambda: setattr(begun, "cancelled", begun.cancelled + 1)
    held = runtime.hold(begun, in_loop=True)
    held.settle(7, None, False)
    assert not held.future.done()  # its caller is in the middle of something, and may ask to be called back yet
    assert await held.future == 7
    held = runtime.hold(begun, in_loop=True)
    held.settle(None, ValueError("why"), True)
    with pytest.raises(ValueError, match="why"):
        await held.future
    held = runtime.hold(begun, in_loop=True)
    assert begun.cancelled == 0
    held.future.cancel()
    assert begun.cancelled == 1
    held.settle(8, None, False)  # which comes too late
    await asyncio.sleep(0)
    assert held.future.cancelled()
    with pytest.raises(LocalError, match="no thread to wait for"):
        runtime.hold(begun, in_loop=False)
    await runtime.aclose()


# ---------------------------------------------------------------------------------------------------------------------
# Threads without an event loop


async def sleep_for_ever() -> None:
    await asyncio.Event().wait()


class Sender:
    """Takes down when it is told to gather and to send."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def gather(self) -> None:
        self.seen.append("gather")

    def send_gathered(self) -> None:
        self.seen.append("send")


SENDER = Sender()  # of operations that send nothing


def beginning(make: Callable[[], Coroutine[Any, Any, Any]]) -> Start:
    """What begins a coroutine, as others begin an operation."""

    def begin(ended: Callable[[Any, BaseException | None], None]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(make())

        def over(task: asyncio.Task[Any]) -> None:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            ended(None if error is not None else task.result(), error)

        task.add_done_callback(over)
        return task

    return begin


def test_a_thread_without_a_loop_submits_and_waits() -> None:
    runtime = ThreadRuntime("test")

    async def name() -> str:
        return threading.current_thread().name

    answer = runtime.submit(beginning(name), SENDER)
    assert runtime.wait(answer, None)
    assert answer.result() == "quicoll-test"
    pending = runtime.submit(beginning(sleep_for_ever), SENDER)
    assert not runtime.wait(pending, 0.01)
    asyncio.run(runtime.aclose())
    assert runtime.wait(pending, None)
    with pytest.raises(LocalError, match="the engine is closed"):
        pending.result()
    with pytest.raises(LocalError, match="the engine is closed"):
        runtime.submit(beginning(sleep_for_ever), SENDER)


def held(runtime: ThreadRuntime) -> threading.Event:
    """Keep the engine's thread at work until the event is set."""
    go_on = threading.Event()
    runtime.loop.call_soon_threadsafe(go_on.wait)
    return go_on


def test_operations_that_begin_together_are_sent_together_in_the_same_turn() -> None:
    runtime, one, another = ThreadRuntime("test"), Sender(), Sender()
    go_on = held(runtime)

    def noting(sender: Sender, name: str) -> Start:
        def begin(ended: Callable[[Any, BaseException | None], None]) -> None:
            sender.seen.append(name)
            runtime.loop.call_soon(sender.seen.append, "next turn")
            ended(len(sender.seen), None)

        return begin

    answers = [runtime.submit(noting(one, "a"), one), runtime.submit(noting(another, "b"), another)]
    answers.append(runtime.submit(noting(one, "c"), one))
    go_on.set()
    for answer in answers:
        assert runtime.wait(answer, None)
    asyncio.run(runtime.aclose())
    assert one.seen == ["gather", "a", "c", "send", "next turn", "next turn"]
    assert another.seen == ["gather", "b", "send", "next turn"]


def test_calls_and_operations_begin_in_the_order_in_which_they_were_made() -> None:
    runtime = ThreadRuntime("test")
    seen: list[int] = []

    async def numbered(number: int) -> None:
        seen.append(number)

    async def mixed() -> None:
        go_on = held(runtime)
        made = [
            runtime.call(numbered(number)) if number % 3 else runtime.begin(operation(number), SENDER)
            for number in range(30)
        ]
        go_on.set()
        await asyncio.gather(*made)
        await runtime.aclose()

    def operation(number: int) -> Start:
        return beginning(lambda: numbered(number))

    asyncio.run(mixed())
    assert seen == list(range(30))


def test_what_is_posted_takes_its_place_among_the_operations() -> None:
    runtime = ThreadRuntime("test")
    seen: list[str] = []

    def noting(name: str) -> Start:
        def begin(ended: Callable[[Any, BaseException | None], None]) -> None:
            seen.append(name)
            ended(0, None)

        return begin

    go_on = held(runtime)
    first = runtime.submit(noting("a"), SENDER)
    runtime.post(lambda: seen.append("b"))
    second = runtime.submit(noting("c"), SENDER)
    runtime.post(lambda: seen.append("d"))
    go_on.set()
    assert runtime.wait(first, None)
    assert runtime.wait(second, None)
    asyncio.run(runtime.aclose())
    assert seen == ["a", "b", "c", "d"]
    with pytest.raises(LocalError, match="the engine is closed"):
        runtime.post(lambda: seen.append("e"))


def test_what_is_posted_and_raises_is_reported_and_keeps_nobody_waiting() -> None:
    runtime = ThreadRuntime("test")
    reported: list[dict[str, Any]] = []
    runtime.loop.set_exception_handler(lambda loop, context: reported.append(context))

    def post_and_call() -> None:
        runtime.post(lambda: 1 // 0)
        answer = runtime.submit(beginning(lambda: asyncio.sleep(0, 7)), SENDER)
        assert runtime.wait(answer, None)
        assert answer.result() == 7

    post_and_call()
    asyncio.run(runtime.aclose())
    assert [type(each["exception"]) for each in reported] == [ZeroDivisionError]


async def test_who_waits_on_a_loop_goes_on_in_the_turn_in_which_the_end_comes() -> None:
    """Each turn of the loop is time that an operation takes."""
    runtime, loop = ThreadRuntime("test"), asyncio.get_running_loop()
    seen: list[str] = []
    go_on = held(runtime)
    answer = runtime.begin(beginning(lambda: asyncio.sleep(0)), SENDER)

    def broken(_: Any) -> None:
        raise ValueError("of a callback")

    def heard(_: Any) -> None:
        loop.call_soon(seen.append, "the next turn")
        seen.append("called back")

    async def waits() -> None:
        await answer
        seen.append("goes on")

    reports: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, report: reports.append(report))
    answer.add_done_callback(broken)
    answer.add_done_callback(heard)
    waiting = asyncio.ensure_future(waits())
    await asyncio.sleep(0)
    removed = asyncio.ensure_future(asyncio.wait({answer}, timeout=0))  # it takes its callback back
    assert await removed == (set(), {answer})
    go_on.set()
    await waiting
    assert seen[:2] == ["called back", "goes on"]
    assert [str(report["exception"]) for report in reports] == ["of a callback"]
    answer.add_done_callback(heard)  # one that comes later is called as asyncio does it, in the next turn
    assert len(seen) == 2 + seen.count("the next turn")
    await asyncio.sleep(0)
    assert seen.count("called back") == 2
    await runtime.aclose()


async def test_who_waits_for_a_call_that_another_one_cancels_hears_of_it() -> None:
    runtime = ThreadRuntime("test")
    answer = runtime.begin(beginning(sleep_for_ever), SENDER)
    waiting = asyncio.ensure_future(asyncio.wait({answer}))
    await asyncio.sleep(0)
    assert answer.cancel()
    assert not answer.cancel()
    assert (await waiting)[0] == {answer}
    await runtime.aclose()


def test_what_a_thread_cancels_is_cancelled_on_the_engine() -> None:
    runtime = ThreadRuntime("test")
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await sleep_for_ever()
        finally:
            cancelled.set()

    assert runtime.submit(beginning(forever), SENDER).cancel()
    assert cancelled.wait(30)
    asyncio.run(runtime.aclose())


async def test_a_wait_where_a_loop_runs_or_on_the_engines_own_thread_is_refused() -> None:
    runtime = ThreadRuntime("test")
    answer = runtime.submit(beginning(sleep_for_ever), SENDER)
    with pytest.raises(LocalError, match="there nothing may block"):
        runtime.wait(answer, 1.0)

    async def inner() -> None:
        runtime.wait(answer, 1.0)

    with pytest.raises(LocalError, match="own thread"):
        await runtime.call(inner())
    await runtime.aclose()


def test_a_thread_that_waits_for_a_blocked_engine_gets_an_error() -> None:
    runtime = ThreadRuntime("test", ask_s=0.01)
    go_on = threading.Event()
    runtime.loop.call_soon_threadsafe(go_on.wait)
    answer = runtime.submit(beginning(lambda: asyncio.sleep(0)), SENDER)
    assert runtime.wait(answer, None)
    with pytest.raises(LocalError, match=r"thread has been blocked for 0\.3 s"):
        answer.result()
    go_on.set()
    asyncio.run(runtime.aclose())


async def test_the_inline_runtime_has_no_thread_to_wait_for() -> None:
    with pytest.raises(LocalError, match="shares the loop of its caller"):
        InlineRuntime().submit(beginning(sleep_for_ever), SENDER)


@pytest.mark.parametrize("in_loop", [True, False])
@pytest.mark.parametrize("after", ["let_go", "settle", "tell"])
async def test_an_answer_whose_settling_is_interrupted_is_settled_by_the_engine(
    in_loop: bool, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a signal handler, between any two steps."""
    runtime = ThreadRuntime("test")
    held = runtime.hold(NothingBegun(), in_loop=in_loop)
    future: Any = held.future
    if after == "let_go":
        let_go = runtime.let_go

        def interrupted(answer: Any) -> bool:
            if let_go(answer):
                raise KeyboardInterrupt
            return False

        monkeypatch.setattr(runtime, "let_go", interrupted)
    else:
        name = "settle_here" if in_loop else after
        monkeypatch.setattr(future, name, lambda *_: pytest.fail("twice") if raised else interrupt())
        raised: list[None] = []

        def interrupt() -> None:
            raised.append(None)
            monkeypatch.undo()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        held.settle(7, None, False)
    assert await (future if in_loop else asyncio.wrap_future(future)) == 7
    assert not runtime._calls
    await runtime.aclose()


class NothingBegun:
    """What is not cancelled."""

    def cancel(self) -> None:
        pytest.fail("it was cancelled")


def in_turn(runtime: ThreadRuntime, work: Callable[[], None]) -> None:
    """Do something in one turn of the engine's loop, and wait until that is over."""
    done = threading.Event()
    runtime.loop.call_soon_threadsafe(lambda: (work(), done.set()))
    assert done.wait(60.0)


def test_what_is_called_upon_an_answer_begins_in_the_same_turn_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, log, queued = ThreadRuntime("test"), [], threading.Event()
    selector = runtime._selector
    assert selector is not None
    monkeypatch.setattr(selector, "offer", lambda: queued.wait(60.0))
    ends: list[Callable[[int | None, BaseException | None], None]] = []
    begun = threading.Event()

    def first(ended: Callable[[int | None, BaseException | None], None]) -> None:
        ends.append(ended)
        begun.set()

    def second(ended: Callable[[int | None, BaseException | None], None]) -> None:
        log.append("second")
        ended(2, None)

    def turn() -> None:
        ends[0](1, None)
        runtime.hand_out()
        log.append("the rest of the turn")

    one, sender = runtime.submit(first, SENDER), Sender()
    assert begun.wait(60.0)
    runtime.loop.call_soon_threadsafe(turn)
    assert one.result(60.0) == 1
    two = runtime.submit(second, sender)
    queued.set()
    assert two.result(60.0) == 2
    in_turn(runtime, lambda: None)
    assert log == ["second", "the rest of the turn"]
    assert sender.seen == ["gather", "send"]
    asyncio.run(runtime.aclose())


def test_an_answer_that_was_handed_out_in_a_turn_counts_as_given_at_its_end() -> None:
    """So that the thread does not look for more, while somebody wants Python's lock."""
    runtime, found = ThreadRuntime("test"), []
    ends: list[Callable[[int | None, BaseException | None], None]] = []
    one = runtime.submit(ends.append, SENDER)

    def turn() -> None:
        runtime.hand_out()  # nothing is settled
        found.append(runtime._give())
        ends[0](1, None)
        runtime.hand_out()
        found.extend([one.done(), runtime._give(), runtime._give()])

    while not ends:
        in_turn(runtime, lambda: None)
    in_turn(runtime, turn)
    assert found == [False, True, True, False]
    asyncio.run(runtime.aclose())
