"""How a process of a simulated run may end: what is a failed test, and what is a process that is started again."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.errors import (
    AuditError,
    CheckpointError,
    Corrupted,
    LocalError,
    Mismatch,
    Partitioned,
    PeerError,
    QuicollError,
    StepAborted,
)
from quicoll.sim import Outcome, RunFailed, Settings, Simulation
from quicoll.sim.checked import CheckedGroup
from quicoll.sim.runner import run_scenario
from quicoll.sim.scenario.swarm import Scenario

if TYPE_CHECKING:
    from quicoll.job import Job

SEED = 5


def run(worker: Callable[[Job, Simulation], Awaitable[None]], *, limit: float = 20.0) -> Outcome:
    return Simulation(worker, seed=SEED, settings=Settings(ranks=2, limit=limit)).run()


def failed(worker: Callable[[Job, Simulation], Awaitable[None]], *, limit: float = 20.0) -> RunFailed:
    """The failure, which names seed, time and node."""
    outcome = run(worker, limit=limit)
    error = outcome.error
    assert error is not None
    assert error.seed == SEED
    assert error.at == outcome.virtual_s
    assert f"[seed {SEED}, at {error.at:.6f} s of simulated time]" in str(error)
    return error


def failed_at_once(worker: Callable[[Job, Simulation], Awaitable[None]]) -> RunFailed:
    error = failed(worker)
    assert error.kind == "worker"
    assert error.at < 1.0
    assert error.node in ("worker-0", "worker-1")
    assert f"(node={error.node})" in str(error)
    assert error.__cause__ is not None
    return error


# -- a failed test ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_a_step", [True, False])
def test_ranks_that_call_different_things_fail_the_run_at_once(in_a_step: bool) -> None:
    async def worker(job: Job, sim: Simulation) -> None:
        part = np.ones(3 + job.rank, np.float32)
        if in_a_step:
            async with job.step():
                await job.group.all_reduce(part)
        else:
            await job.group.all_reduce(part)

    error = failed_at_once(worker)
    assert isinstance(error.__cause__, Mismatch)
    assert "shape (3,)" in str(error)
    assert "(4,)" in str(error)


def test_the_built_in_workload_passes_over_no_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks call the same things; one that is told otherwise, though the next try is well, has found a bug."""
    told: list[str] = []
    honest: Any = CheckedGroup.all_reduce

    def once(self: CheckedGroup, *args: Any, **settings: Any) -> Any:
        if not told:
            told.append("once")
            raise Mismatch("made up")
        return honest(self, *args, **settings)

    monkeypatch.setattr(CheckedGroup, "all_reduce", once)
    error = run_scenario(Scenario(seed=SEED, steps=2, settings=Settings(ranks=2))).error
    assert error is not None
    assert "worker: Mismatch: made up" in str(error)


@pytest.mark.parametrize(
    "wrong", [LocalError("a rule"), QuicollError("no class of its own"), ValueError("a bug"), GeneratorExit("odd")]
)
def test_an_error_that_blames_nothing_outside_fails_the_run_at_once(wrong: BaseException) -> None:
    async def worker(job: Job, sim: Simulation) -> None:
        if job.rank == 1:
            raise wrong
        await asyncio.sleep(5.0)

    error = failed_at_once(worker)
    assert error.node == "worker-1"
    assert f"worker: {type(wrong).__name__}: {wrong}" in str(error)


def test_a_process_that_cancels_itself_fails_the_run_at_once() -> None:
    async def worker(job: Job, sim: Simulation) -> None:
        if job.rank == 1:
            waiter = asyncio.ensure_future(asyncio.sleep(9.0))
            waiter.cancel()
            await waiter
        await asyncio.sleep(5.0)

    error = failed_at_once(worker)
    assert error.node == "worker-1"
    assert isinstance(error.__cause__, asyncio.CancelledError)
    assert "nobody had cancelled this process" in str(error)


async def leaves(job: Job, sim: Simulation) -> None:
    if job.rank == 1:
        sys.exit(3)
    await asyncio.sleep(5.0)


async def leaves_in_another_task(job: Job, sim: Simulation) -> None:
    async def leave() -> None:
        sys.exit(3)

    if job.rank == 1:
        asyncio.get_running_loop().create_task(leave())
    await asyncio.sleep(5.0)


async def leaves_in_a_callback(job: Job, sim: Simulation) -> None:
    if job.rank == 1:
        asyncio.get_running_loop().call_soon(sys.exit, 3)
    await asyncio.sleep(5.0)


async def leaves_and_returns(job: Job, sim: Simulation) -> None:
    if job.rank == 1:
        asyncio.get_running_loop().call_soon(sys.exit, 3)
    await asyncio.sleep(0.0)


async def leaves_in_a_thread(job: Job, sim: Simulation) -> None:
    if job.rank == 1:
        await asyncio.to_thread(sys.exit, 3)
    await asyncio.sleep(5.0)


@pytest.mark.parametrize(
    "worker", [leaves, leaves_in_another_task, leaves_in_a_callback, leaves_and_returns, leaves_in_a_thread]
)
def test_a_process_that_exits_fails_the_run_and_not_who_runs_it(
    worker: Callable[[Job, Simulation], Awaitable[None]],
) -> None:
    error = failed_at_once(worker)
    assert error.node == "worker-1"
    assert "worker: SystemExit: 3" in str(error)
    assert isinstance(error.__cause__, SystemExit)


# -- a process that is started again ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        PeerError("lost"),
        Partitioned("alone"),
        StepAborted("not committed"),
        Corrupted("other bits"),
        CheckpointError("no space", path="/data"),
        AuditError("no space", path="/data"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_process_that_ends_by_what_the_world_did_is_started_again(error: QuicollError) -> None:
    lives: list[str] = []

    async def worker(job: Job, sim: Simulation) -> None:
        lives.append(job.node)
        if lives.count(job.node) < 3:
            raise error

    assert run(worker).error is None
    assert sorted(lives) == ["worker-0"] * 3 + ["worker-1"] * 3


# -- a run that does not come to its end -----------------------------------------------------------------------------


def test_a_run_without_end_names_the_last_error_of_each_node() -> None:
    async def worker(job: Job, sim: Simulation) -> None:
        raise PeerError(f"never enough for {job.node}")

    error = failed(worker, limit=9.5)
    assert error.kind == "OutOfTime"
    for node in ("worker-0", "worker-1"):
        assert f"the last error of {node} (its process ended by errors " in str(error)
        assert f"PeerError: never enough for {node}" in str(error)


def test_a_run_without_end_names_what_the_workers_pass_over() -> None:
    async def worker(job: Job, sim: Simulation) -> None:
        while True:
            try:
                async with job.step():
                    await job.group.all_reduce(np.ones(3 + job.rank, np.float32))
            except QuicollError:
                await asyncio.sleep(0.5)

    error = failed(worker, limit=5.0)
    assert error.kind == "OutOfTime"
    for node in ("worker-0", "worker-1"):
        assert f"the last error of {node}, at " in str(error)
    for part in ("Mismatch: ", "called all_reduce differently", "shape (3,) on rank 0", "(4,) on rank 1"):
        assert part in str(error)
