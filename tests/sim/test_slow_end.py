"""The last of the ranks to end: the others have left meanwhile, with what they owned of a divided state.

It has the state after the last step, so it ends as they did; it needs no view in which parts of that state are missing.
"""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from elastic_task import BATCH, SAMPLES, SHARDS, Elastic

from quicoll import checkpoint
from quicoll.data import Sampler
from quicoll.sim import Settings, Simulation
from quicoll.torch import AsyncTraining
from quicoll.train import Divide, Worker

if TYPE_CHECKING:
    from quicoll.job import Job

STEPS = 4
LATE_S = 5.0  # after the others, who are gone by then
EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "sharded_adam.py"))


async def by_the_example(job: Job, pause: Callable[[int], Awaitable[None]]) -> str:
    model = EXAMPLE["Model"]()
    job.register_state(model.save, model.load, sharded={"adam": model.moments})
    late = job.rank == 2
    await EXAMPLE["train"](job, model, steps=STEPS, pace=LATE_S if late else 0.0)
    return checkpoint.digest(model.save())


async def by_a_worker(job: Job, pause: Callable[[int], Awaitable[None]]) -> str:
    data = Sampler(SAMPLES, batch_size=BATCH, shards=SHARDS, seed=7)
    return (await Worker(job, Elastic(), data=data, divide=Divide(16), on_step=pause).run(steps=STEPS)).digest


async def by_a_loop_of_torch(job: Job, pause: Callable[[int], Awaitable[None]]) -> str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        net = torch.nn.Linear(6, 20)
    optimizer = torch.optim.Adam(net.parameters())
    training = AsyncTraining(job, net, optimizer, None, shards=SHARDS, divide=Divide(16))
    async for step in training.steps(STEPS):
        async with step:
            for shard, _ in step.shards:
                step.backward(net(torch.full((6,), float(shard))).square().mean())
        await pause(step.number)
    return training.digest()


@pytest.mark.parametrize("train", [by_the_example, by_a_worker, by_a_loop_of_torch])
def test_a_rank_that_is_late_after_the_last_step_ends_though_the_others_have_left_with_what_they_owned(
    train: Callable[..., Awaitable[str]],
) -> None:
    async def worker(job: Job, sim: Simulation) -> Any:
        async def pause(step: int) -> None:
            if job.rank == 2 and step == STEPS:
                await asyncio.sleep(LATE_S)

        return await train(job, pause)

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=3, limit=120.0), compute=0.05).run()
    assert outcome.error is None, outcome.error
    assert len(set(outcome.results)) == 1
    assert outcome.results[0] is not None
