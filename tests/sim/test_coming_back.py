"""Nodes that come back: after a partition of one pair, after their clock was set back, after the end of the job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from depth import some

from quicoll.errors import StepAborted
from quicoll.sim import Settings, Simulation

if TYPE_CHECKING:
    from quicoll.job import Job

LOST_AFTER = 1.0
SETTINGS = Settings(ranks=3, lost_after=LOST_AFTER, limit=120.0)


def training(
    *, until: float, seen: list[tuple[float, int, str]], then: float = 0.0
) -> Callable[[Job, Simulation], Awaitable[int]]:
    """A worker that takes a step every 250 ms until that time; `seen` gets (time, world size, node) of each.

    then: seconds that a rank still takes when it has ended.
    """

    async def worker(job: Job, sim: Simulation) -> int:
        state = {"sum": np.zeros(1)}
        job.register_state(lambda: dict(state), lambda tensors: state.update(sum=tensors["sum"].copy()))
        while True:
            try:
                await job.ready()
                late = np.array([sim.now >= until], np.float64)
                async with job.step() as step:
                    over = await job.group.all_reduce(late)
                    total = await job.group.all_reduce(np.ones(1))
                    step.on_commit(lambda total=total: state.update(sum=state["sum"] + total))
            except StepAborted:
                continue
            seen.append((sim.now, job.world_size, job.node))
            if over[0]:
                break
            await asyncio.sleep(0.25)
        await asyncio.sleep(then)
        return job.committed_step

    return worker


@pytest.mark.parametrize(("seed", "repaired"), some([(1, 9.0), (2, 16.5)], 2))
def test_a_node_left_out_is_back_within_two_loss_deadlines_of_its_path_being_good_again(
    seed: int, repaired: float
) -> None:
    seen: list[tuple[float, int, str]] = []
    sim = Simulation(training(until=repaired + 4.0, seen=seen), seed=seed, settings=SETTINGS)
    sim.at(1.0).partition(0, 2)
    sim.at(repaired).repair(0, 2)
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert {size for at, size, _ in seen if 4.0 < at < repaired} == {2}, "two go on while the pair is broken"
    assert min(at for at, size, _ in seen if size == 3 and at > repaired) - repaired <= 2 * LOST_AFTER
    assert outcome.views <= 3 + 2 * (repaired // 30), "trials without hope are rare"


def test_a_node_whose_clock_was_set_back_is_back_at_once() -> None:
    seen: list[tuple[float, int, str]] = []
    sim = Simulation(training(until=8.0, seen=seen), seed=4, settings=SETTINGS)
    for at in (2.0, 4.0):
        sim.at(at).crash(1)
        sim.at(at + 0.1).step_wall(1, -60.0)
        sim.at(at + 0.2).restart(1)
    sim.at(5.0).step_wall("coordinator", -60.0)
    sim.at(5.0).crash("coordinator")
    sim.at(5.2).restart("coordinator")
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    for crashed in (2.0, 4.0):
        assert min(at for at, _, node in seen if node == "worker-1" and at > crashed + 0.2) < crashed + 0.2 + LOST_AFTER


@pytest.mark.parametrize("seed", some(range(3), 2))
def test_a_worker_killed_just_before_the_end_comes_back_to_a_job_that_is_done(seed: int) -> None:
    seen: list[tuple[float, int, str]] = []
    sim = Simulation(training(until=2.0, seen=seen, then=0.5), seed=seed, settings=SETTINGS)
    sim.at(2.3).crash(1)
    sim.at(2.4 + seed).restart(1)
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert outcome.virtual_s < 12.0
