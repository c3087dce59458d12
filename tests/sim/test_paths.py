"""Hosts with two addresses: a path that is cut costs no view and no bit; both cut are a partition."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.errors import Diverged, JobDone, LocalError, QuicollError
from quicoll.sim import Settings, Simulation
from quicoll_transport.sim import Conditions

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim.outcome import Outcome

QUICK: dict[str, Any] = {"lost_after": 1.0, "restart_after": 0.1, "recovery": 10.0, "limit": 60.0}
SLOW_LINE = Conditions(latency_ns=5_000_000, bytes_per_second=250_000)


class Told:
    """When views were installed, and when the coordinator ended one, in seconds."""

    def __init__(self) -> None:
        self.views: list[float] = []
        self.ends: list[float] = []

    def __call__(self, t_ns: int, kind: str, who: str, what: Any) -> None:
        if kind == "view_installed" and who == "coordinator":
            self.views.append(t_ns / 1e9)
        if kind == "view_ended" and who == "coordinator":
            self.ends.append(t_ns / 1e9)


async def operations(job: Job) -> tuple[bytes, ...]:
    """Large and small operations for some seconds, and steps with votes between them."""
    group, draw = job.group, np.random.default_rng(job.rank)
    found: list[Any] = []
    for _ in range(3):
        for count in (7, 30_000):
            found.append(await group.all_reduce(draw.standard_normal(count).astype(np.float32)))
            async with job.step():
                found.append(await group.all_reduce(np.full(3, job.rank, np.float32)))
            await asyncio.sleep(0.05)
    return tuple(each.tobytes() for each in found)


def simulate(*faults: tuple[float, int | str, int], seed: int = 0, paths: int = 2) -> tuple[Outcome, Told]:
    told = Told()
    settings = Settings(ranks=3, paths=paths, conditions=SLOW_LINE, **QUICK)
    sim = Simulation(operations, seed=seed, settings=settings, recorder=told)
    for at, node, number in faults:
        sim.at(at).unplug(node, number)
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    return outcome, told


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Any, ...]:
    return simulate(paths=1)[0].results


def test_two_addresses_change_no_bit(undisturbed: tuple[Any, ...]) -> None:
    outcome, told = simulate()
    assert outcome.results == undisturbed
    assert len(told.views) == 1


@pytest.mark.parametrize("seed", range(8))
def test_one_path_of_two_that_is_cut_costs_no_view_and_no_bit(seed: int, undisturbed: tuple[Any, ...]) -> None:
    at = 0.4 + 0.19 * seed
    node = (0, 1, 2, "coordinator")[seed % 4]
    outcome, told = simulate((at, node, 1), seed=seed)
    assert outcome.results == undisturbed
    assert len(told.views) == 1
    assert outcome.injected["unplug"] == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_other_path_may_be_cut_once_the_first_one_is_back(seed: int, undisturbed: tuple[Any, ...]) -> None:
    told = Told()
    settings = Settings(ranks=3, paths=2, conditions=SLOW_LINE, **QUICK)
    sim = Simulation(operations, seed=seed, settings=settings, recorder=told)
    sim.at(0.3 + 0.1 * seed).unplug(1, 1)
    sim.at(1.0 + 0.1 * seed).repair()
    sim.at(1.2 + 0.1 * seed).unplug(1, 2)
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert outcome.results == undisturbed
    assert len(told.views) == 1
    assert outcome.injected["unplug"] == 2


async def steps(job: Job, sim: Simulation) -> None:
    """Steps until all ranks have done some after the last fault."""
    count = np.zeros(1, np.float32)
    job.register_state(lambda: {"count": count.copy()}, lambda state: np.copyto(count, state["count"]))
    x = np.ones(10_000, np.float32)
    while not sim.everyone_at(4):
        try:
            async with job.step() as step:
                await job.group.all_reduce(x, timeout=5.0)
                step.on_commit(lambda: np.add(count, 1, out=count))
        except (LocalError, Diverged, JobDone):
            raise
        except QuicollError:
            continue


@pytest.mark.parametrize("paths", [1, 2])
def test_all_paths_that_are_cut_are_a_partition_as_soon_as_one_is_elsewhere(paths: int) -> None:
    told = Told()
    settings = Settings(ranks=3, paths=paths, conditions=SLOW_LINE, **QUICK)
    sim = Simulation(steps, settings=settings, recorder=told)
    for number in range(1, paths + 1):
        sim.at(1.0).unplug(1, number)
    sim.at(3.0).heal()
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert 1.9 <= told.ends[0] <= 2.1, "lost_after is 1 s"
    assert len(told.views) >= 2
