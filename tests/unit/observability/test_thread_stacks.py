"""Where threads are, as others are told: the program's own, without values, in bounds."""

from __future__ import annotations

import threading

from quicoll.observability.thread_stacks import thread_stacks


def test_each_thread_is_told_with_functions_and_lines_and_without_values() -> None:
    at_work, over = threading.Event(), threading.Event()

    def wait_somewhere(secret: str) -> None:
        at_work.set()
        over.wait()

    thread = threading.Thread(target=wait_somewhere, args=("hush",), name="my-loader")
    thread.start()
    at_work.wait()
    try:
        text = thread_stacks()
        assert text.startswith("thread MainThread:\n")
        assert "thread my-loader:\n" in text
        assert "unit/observability/test_thread_stacks.py:" in text
        assert " in wait_somewhere" in text
        assert "hush" not in text
        assert "_bootstrap" not in text
        assert len(thread_stacks(200)) == 200
        assert thread_stacks(200).endswith("... cut here")
    finally:
        over.set()
        thread.join()


def test_the_thread_that_answers_is_left_out() -> None:
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(thread_stacks()), name="quicoll-engine")
    thread.start()
    thread.join()
    assert "quicoll-engine" not in told[0]
    assert "thread MainThread:" in told[0]


def test_a_deep_stack_is_cut() -> None:
    def deep(left: int) -> str:
        return deep(left - 1) if left else thread_stacks()

    assert "  ... and its callers" in deep(100).split("thread ")[1]
