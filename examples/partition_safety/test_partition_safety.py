"""Does the loop survive a network that splits? Each test is a whole cluster on a virtual clock; none takes a second.

pytest examples/partition_safety            (--sim-seeds 0:1000 for a night)
"""

from __future__ import annotations

import careless_fit
import line_fit
import numpy as np

import quicoll.sim
from quicoll import Job

STEPS = 10


def split(sim: quicoll.sim.Simulation) -> None:
    """Two and two for some seconds: neither half has a quorum, so nothing may be committed until they meet again."""
    sim.at(0.1).partition({0, 1}, {2, 3})
    sim.at(4.0).heal()


def lose_one(sim: quicoll.sim.Simulation) -> None:
    """One rank is cut off, its machine loses power, and the coordinator is killed as well."""
    sim.at(0.1).partition(3, {0, 1, 2, "coordinator"})
    sim.at(0.5).crash(3, power=True)
    sim.at(1.0).crash("coordinator")
    sim.at(2.0).heal()


def go_deaf(sim: quicoll.sim.Simulation) -> None:
    """Worker 3 hears nothing of worker 0 any more, one way: the others finish a collective that it cannot finish."""
    sim.at(0.6).partition(0, 3, one_way=True)
    sim.at(2.0).heal()


async def fit(job: Job, sim: quicoll.sim.Simulation) -> None:
    weights = await line_fit.train(job, done=lambda: sim.everyone_at(STEPS))
    assert np.abs(weights - line_fit.TRUE_WEIGHTS).max() < 1.5


@quicoll.sim.scenario(seeds=3, ranks=4, steps=STEPS)
async def test_the_loop_survives_whatever_a_seed_breaks(job: Job, sim: quicoll.sim.Simulation) -> None:
    await fit(job, sim)


@quicoll.sim.scenario(seeds=1, ranks=4, script=split)
async def test_the_loop_survives_a_split(job: Job, sim: quicoll.sim.Simulation) -> None:
    await fit(job, sim)


@quicoll.sim.scenario(seeds=1, ranks=4, script=lose_one)
async def test_the_loop_survives_the_loss_of_a_machine_and_of_the_coordinator(
    job: Job, sim: quicoll.sim.Simulation
) -> None:
    await fit(job, sim)


@quicoll.sim.scenario(seeds=1, ranks=4, script=go_deaf)
async def test_the_loop_survives_a_rank_that_hears_nothing(job: Job, sim: quicoll.sim.Simulation) -> None:
    await fit(job, sim)


@quicoll.sim.scenario(ranks=4, script=go_deaf)
async def careless(job: Job, sim: quicoll.sim.Simulation) -> None:
    await careless_fit.train(job, done=lambda: sim.everyone_at(STEPS))


def test_the_careless_loop_is_caught() -> None:
    outcome = careless.run(seed=0)
    assert outcome.error is not None
    assert outcome.error.kind == "all-or-none"


@quicoll.sim.scenario(seeds=1, ranks=4, script=lambda sim: None)
async def test_the_careless_loop_passes_every_test_on_a_healthy_network(job: Job, sim: quicoll.sim.Simulation) -> None:
    await careless_fit.train(job, done=lambda: sim.everyone_at(STEPS))
