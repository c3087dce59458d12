"""Threads for what may block."""

from __future__ import annotations

import threading

from quicoll.torch_backend.pool import run_aside


def test_calls_that_wait_for_later_ones_all_end() -> None:
    count = 100
    gates = [threading.Event() for _ in range(count + 1)]
    ended = [threading.Event() for _ in range(count)]

    def wait_for_the_next(n: int) -> None:
        gates[n + 1].wait(60)
        gates[n].set()
        ended[n].set()

    for n in range(count):
        run_aside(lambda n=n: wait_for_the_next(n))
    gates[count].set()
    assert all(each.wait(60) for each in ended)


def test_after_a_call_that_raises_the_next_one_runs() -> None:
    done = threading.Event()
    run_aside(lambda: 1 / 0)
    run_aside(done.set)
    assert done.wait(60)
