"""The restarts of one process: how many, within which time, after which wait."""

from __future__ import annotations

from quicoll.launch.restarts import RestartBudget


def test_so_many_restarts_are_granted_and_no_more() -> None:
    budget = RestartBudget(2, window=100.0, backoff=0.5)
    assert [budget.died(now) for now in (0.0, 1.0, 2.0)] == [0.5, 1.0, None]
    assert budget.recent == 3


def test_a_death_counts_for_the_window_and_no_longer() -> None:
    budget = RestartBudget(1, window=100.0, backoff=0.5)
    assert budget.died(0.0) == 0.5
    assert budget.died(100.0) == 0.5, "the first is forgotten, its wait too"
    assert budget.recent == 1
    assert budget.died(199.9) is None


def test_a_process_that_dies_now_and_then_is_started_for_ever() -> None:
    budget = RestartBudget(3, window=600.0, backoff=0.5)
    assert {budget.died(hours * 3600.0) for hours in range(1000)} == {0.5}


def test_the_wait_doubles_up_to_ten_seconds() -> None:
    budget = RestartBudget(99, window=1e6, backoff=1.0)
    assert [budget.died(float(now)) for now in range(6)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_without_restarts_the_first_death_is_the_last() -> None:
    assert RestartBudget(0, window=1.0, backoff=0.5).died(5.0) is None


def test_a_wait_of_nothing_stays_nothing() -> None:
    budget = RestartBudget(5, window=1.0, backoff=0.0)
    assert {budget.died(0.0) for _ in range(5)} == {0.0}
