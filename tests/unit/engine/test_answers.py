"""The future of a thread without a loop is one of concurrent.futures, made for less."""

from __future__ import annotations

import concurrent.futures
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from quicoll.engine.answers import HeldAnswer, ThreadAnswer

HOME: Any = SimpleNamespace(rouse=lambda: None, withdraw=lambda answer: None)


def test_it_has_what_a_future_has_and_its_condition_when_that_is_needed() -> None:
    answer: ThreadAnswer[int] = ThreadAnswer(HOME)
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    assert "_condition" not in vars(answer)
    assert not answer._done_callbacks
    theirs = {name: value for name, value in vars(future).items() if name not in ("_condition", "_done_callbacks")}
    assert {name: getattr(answer, name) for name in theirs} == theirs
    assert type(answer._condition) is type(future._condition)
    assert answer._condition is answer._condition
    assert not hasattr(answer, "no_such_thing")


def test_threads_that_need_its_condition_at_the_same_time_have_one() -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for _ in range(100):
            answer: ThreadAnswer[int] = ThreadAnswer(HOME)
            together = threading.Barrier(2)

            def need(answer: ThreadAnswer[int] = answer, together: threading.Barrier = together) -> object:
                together.wait(60.0)
                return answer._condition

            one, other = [threads.submit(need) for _ in range(2)]
            assert one.result() is other.result() is answer._condition


def test_who_waits_for_it_and_who_is_told_of_its_end_have_what_they_would_of_any_future() -> None:
    answer: ThreadAnswer[int] = ThreadAnswer(HOME)
    with pytest.raises(TimeoutError):
        answer.result(0.001)
    told: list[object] = []
    answer.add_done_callback(told.append)
    threading.Timer(0.01, answer.settle, (7, None)).start()
    assert answer.result(60.0) == 7
    assert concurrent.futures.wait([answer], 60.0).done == {answer}
    assert told == [answer]
    failed: ThreadAnswer[int] = ThreadAnswer(HOME)
    failed.settle(None, ValueError("there"))
    with pytest.raises(ValueError, match="there"):
        failed.result()
    assert not failed.cancel()


def test_who_waits_for_several_hears_of_each_end_once_whatever_it_is() -> None:
    answers: list[ThreadAnswer[int]] = [ThreadAnswer(HOME) for _ in range(4)]
    found: concurrent.futures.Future[object] = concurrent.futures.Future()

    def wait() -> None:
        found.set_result(set(concurrent.futures.as_completed(answers, 60.0)))

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not all("_condition" in vars(each) and each._waiters for each in answers):
        pass
    assert answers[0].cancel()
    answers[0].add_done_callback(lambda _: None)
    answers[1].settle(1, None)
    answers[1].add_done_callback(lambda _: None)  # which looks once more who is to be told
    answers[2].settle(None, ValueError("there"))
    assert not found.done()
    answers[0].settle(0, None)  # `as_completed` hears of a cancelled one when it would have begun
    answers[3].settle(3, None)
    assert found.result(60.0) == set(answers)
    waiter.join(60.0)
    assert concurrent.futures.wait(answers, 60.0).done == set(answers)
    assert answers[0].cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        answers[0].result()


def test_who_blocks_on_it_while_it_ends_goes_on() -> None:
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        for number in range(300):
            answer: ThreadAnswer[int] = ThreadAnswer(HOME)
            together = threading.Barrier(3)

            def block(answer: ThreadAnswer[int] = answer, together: threading.Barrier = together) -> object:
                together.wait(60.0)
                try:
                    return answer.result(60.0)
                except concurrent.futures.CancelledError:
                    return "cancelled"

            def end(
                answer: ThreadAnswer[int] = answer, together: threading.Barrier = together, how: int = number
            ) -> object:
                together.wait(60.0)
                return answer.cancel() if how % 2 else answer.settle(how, None)

            blocked = [threads.submit(block) for _ in range(2)]
            threads.submit(end).result()
            assert {each.result() for each in blocked} == {"cancelled" if number % 2 else number}


def test_of_an_end_and_a_cancellation_at_the_same_time_one_comes_to_be() -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for _ in range(300):
            answer: ThreadAnswer[int] = ThreadAnswer(HOME)
            together = threading.Barrier(2)

            def cancel(answer: ThreadAnswer[int] = answer, together: threading.Barrier = together) -> bool:
                together.wait(60.0)
                return answer.cancel()

            def end(answer: ThreadAnswer[int] = answer, together: threading.Barrier = together) -> None:
                together.wait(60.0)
                answer.settle(1, None)

            cancelled, over = threads.submit(cancel), threads.submit(end)
            over.result()
            assert answer.done()
            assert answer.cancelled() == cancelled.result()
            assert cancelled.result() or answer.result() == 1


def test_who_asks_to_be_told_while_it_ends_is_told_once() -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for number in range(200):
            answer: ThreadAnswer[int] = ThreadAnswer(HOME)
            together = threading.Barrier(2)
            told: list[int] = []

            def ask(
                answer: ThreadAnswer[int] = answer,
                together: threading.Barrier = together,
                told: list[int] = told,
            ) -> None:
                together.wait(60.0)
                for each in range(20):
                    answer.add_done_callback(lambda ended, each=each: told.append(each))

            def end(
                answer: ThreadAnswer[int] = answer, together: threading.Barrier = together, how: int = number
            ) -> None:
                together.wait(60.0)
                _ = answer.cancel() if how % 2 else answer.settle(1, None)

            for each in [threads.submit(ask), threads.submit(end)]:
                each.result()
            assert sorted(told) == list(range(20))


def test_a_callback_that_raises_keeps_no_other_from_being_called(caplog: pytest.LogCaptureFixture) -> None:
    def fails(ended: object) -> None:
        raise ValueError("mine")

    answer: ThreadAnswer[int] = ThreadAnswer(HOME)
    told: list[object] = []
    for callback in (fails, told.append):
        answer.add_done_callback(callback)
    answer.settle(1, None)
    assert told == [answer]
    assert "what was to be called at the end of an operation raised" in caplog.text


def test_who_was_interrupted_before_it_told_of_the_end_has_that_done_by_another() -> None:
    """As by Ctrl-C, between the end and the callbacks."""
    later: list[Any] = []
    home: Any = SimpleNamespace(
        let_go=lambda answer: True,
        loop=SimpleNamespace(call_soon_threadsafe=lambda call, *given: later.append((call, given))),
    )
    answer: ThreadAnswer[int] = ThreadAnswer(home)
    told: list[object] = []
    answer.add_done_callback(told.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadAnswer, "tell", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            HeldAnswer(home, answer).settle(1, None, idle=False)
    assert answer.done()
    assert not told
    ((call, given),) = later
    call(*given)
    assert told == [answer]


def _interrupted(answer: object) -> None:
    raise KeyboardInterrupt
