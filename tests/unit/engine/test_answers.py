"""The future of a thread without a loop is one of concurrent.futures, made for less."""

from __future__ import annotations

import concurrent.futures
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from quicoll.engine.answers import ThreadAnswer

HOME: Any = SimpleNamespace(rouse=lambda: None, withdraw=lambda answer: None)


def test_it_has_what_a_future_has_and_its_condition_when_that_is_needed() -> None:
    answer: ThreadAnswer[int] = ThreadAnswer(HOME)
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    assert "_condition" not in vars(answer)
    theirs = {name: value for name, value in vars(future).items() if name != "_condition"}
    assert {name: vars(answer)[name] for name in theirs} == theirs
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
