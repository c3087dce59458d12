"""Hints: what a loop did with its state inside its steps, by digests alone."""

from __future__ import annotations

from quicoll.sim.hints import Habits


def test_nothing_is_said_of_a_loop_that_changes_nothing_early() -> None:
    habits = Habits()
    habits.changed("worker-0", 1, 1, 1, {})
    assert habits.hints() == []


def test_what_all_ranks_changed_alike_is_changed_before_its_commit() -> None:
    habits = Habits()
    for node in ("worker-0", "worker-1"):
        habits.changed(node, 1, 3, 7, {"weights": b"same"})
    (hint,) = habits.hints()
    assert "'weights' of the registered state was changed inside step 7 on worker-0, before the commit" in hint


def test_what_differs_from_rank_to_rank_in_one_attempt_is_a_buffer_of_each() -> None:
    habits = Habits()
    habits.changed("worker-0", 1, 3, 7, {"running_mean": b"one", "weights": b"same"})
    habits.changed("worker-1", 1, 3, 7, {"running_mean": b"other", "weights": b"same"})
    own, early = habits.hints()
    assert "'running_mean' of the registered state was changed inside a step" in own
    assert "worker-0 and worker-1 changed it differently" in own
    assert "'weights'" in early


def test_two_attempts_may_differ() -> None:
    habits = Habits()
    habits.changed("worker-0", 1, 3, 7, {"weights": b"one"})
    habits.changed("worker-1", 2, 3, 7, {"weights": b"other"})
    assert ["before the commit" in hint for hint in habits.hints()] == [True]


def test_few_are_said() -> None:
    habits = Habits()
    habits.changed("worker-0", 1, 1, 1, {f"tensor{n}": b"x" for n in range(9)})
    assert len(habits.hints()) == 3
