"""The restarts of one process: how many, within which time, after which wait."""

from __future__ import annotations

import pytest

from quicoll.launch.restarts import Death, RestartBudget, hopeless


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


def death(last_line: str, *, status: int = 1, committed: bool = False) -> Death:
    return Death(status=status, last_line=last_line, committed=committed)


TYPO = "TypeError: Training.__init__() got an unexpected keyword argument 'batchsize'"


def test_the_same_words_twice_before_a_step_are_enough() -> None:
    assert not hopeless(death(TYPO), None)
    assert hopeless(death(TYPO), death(TYPO)) == "the second time in the same way, before its first step"
    assert hopeless(death("KeyError: 7 of 0x7f"), death("KeyError: 19 of 0x3f")), "numbers differ each time"
    assert not hopeless(death(TYPO), death("NameError: name 'x' is not defined"))
    assert not hopeless(death(""), death("")), "who says nothing is not known to end alike"
    assert not hopeless(death(TYPO, status=2), death(TYPO))


@pytest.mark.parametrize("committed", [(True, False), (False, True), (True, True)])
def test_who_has_committed_a_step_gets_all_restarts(committed: tuple[bool, bool]) -> None:
    assert not hopeless(death(TYPO, committed=committed[1]), death(TYPO, committed=committed[0]))


@pytest.mark.parametrize("status", [-9, -11, 128, 137, 143])
def test_a_signal_is_never_hopeless(status: int) -> None:
    said = "quicoll.errors.LocalError: no"
    assert not hopeless(death(said, status=status), death(said, status=status))


@pytest.mark.parametrize("name", ["LocalError", "Mismatch", "Diverged"])
def test_errors_of_the_program_end_it_at_the_start_and_may_come_once_later(name: str) -> None:
    said = f"quicoll.errors.{name}: rank 1 (view=1)"
    assert hopeless(death(said), None) == f"a restart mends no {name} that comes before the first step"
    assert not hopeless(death(said, committed=True), None)
    assert not hopeless(death(said, committed=True), death(TYPO, committed=True))
    later = death(f"quicoll.errors.{name}: rank 1 (view=4)", committed=True)
    assert hopeless(later, death(said, committed=True)) == f"a restart has not mended this {name}"


@pytest.mark.parametrize(
    "said",
    [
        "quicoll.errors.PeerError: not joined within 60 s: 1 of 3 nodes are here: worker-0",
        "quicoll.errors.Partitioned: cut off (view=2)",
        "quicoll_transport.errors.TransportError: no route",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "urllib3.exceptions.ConnectTimeoutError: no answer",
        "TimeoutError",
        "torch.OutOfMemoryError: CUDA out of memory",
        "MemoryError",
    ],
)
def test_what_may_pass_by_itself_gets_all_restarts(said: str) -> None:
    assert not hopeless(death(said), death(said))
