"""States in simulated clusters: what is a rank's own when its process is killed, nested states, bits that flip."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from quicoll.errors import Diverged, LocalError, QuicollError
from quicoll.sim import Settings, Simulation

if TYPE_CHECKING:
    from quicoll.job import Job

STEPS = 12
Worker = Callable[["Job", Simulation], Any]


def run(worker: Worker, *, crash: int | None, **settings: Any) -> Any:
    sim = Simulation(worker, seed=3, settings=Settings(ranks=3, limit=60.0, **settings))
    if crash is not None:
        sim.at(0.4).crash(crash)
        sim.at(0.6).restart(crash)
    return sim.run()


async def steps(job: Job, sim: Simulation, apply: Callable[[Any], None], mine: Callable[[], Any]) -> None:
    while not sim.everyone_at(STEPS):
        try:
            async with job.step() as step:
                await asyncio.sleep(0.05)
                total = await job.group.all_reduce(mine())
                step.on_commit(lambda total=total: apply(total))
        except (LocalError, Diverged):
            raise
        except QuicollError:
            continue


@pytest.mark.parametrize("killed", [0, 2])
def test_a_ranks_own_part_is_kept_when_it_is_killed_and_comes_back(killed: int) -> None:
    """Shards 100, 101, 102: what was declared as each rank's own is never another rank's."""
    begun: list[tuple[str, int]] = []
    shards: dict[str, dict[str, Any]] = {}

    async def worker(job: Job, sim: Simulation) -> int:
        number = int(job.node.removeprefix("worker-"))
        mine: dict[str, Any] = {"w": np.zeros(4), "data": {"shard": np.array([100 + number]), "files": ["a", "b"]}}
        begun.append((job.node, number))
        shards[job.node] = mine

        def load(state: Any) -> None:
            mine.update(state)

        job.register_state(lambda: mine, load, own=["data.shard"])
        await steps(job, sim, lambda total: np.add(mine["w"], total, out=mine["w"]), lambda: np.ones(4))
        return int(mine["w"][0])

    outcome = run(worker, crash=killed)
    assert outcome.error is None, outcome.error
    assert begun.count((f"worker-{killed}", killed)) == 2
    assert {node: held["data"]["shard"].tolist() for node, held in shards.items()} == {
        f"worker-{number}": [100 + number] for number in range(3)
    }
    assert len(set(outcome.results)) == 1


def test_the_state_of_a_schedule_and_an_optimizer_is_handed_to_a_rank_that_comes_back() -> None:
    held: dict[str, Any] = {}

    async def worker(job: Job, sim: Simulation) -> float:
        torch.manual_seed(len(held))  # another one each time
        weight = torch.nn.Parameter(torch.randn(5))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
        held[job.node] = (weight, optimizer)

        def load(state: Any) -> None:
            with torch.no_grad():
                weight.copy_(state["weight"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])

        def save() -> Any:
            return {
                "weight": weight.detach(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }

        def apply(total: Any) -> None:
            weight.grad = total
            optimizer.step()
            scheduler.step()

        job.register_state(save, load)
        await steps(job, sim, apply, lambda: weight.detach() * 0.01)
        return float(scheduler.get_last_lr()[0])

    outcome = run(worker, crash=1)
    assert outcome.error is None, outcome.error
    assert len(set(outcome.results)) == 1
    assert outcome.results[0] < 0.01
    weights = {tuple(weight.tolist()) for weight, _ in held.values()}
    momenta = {tuple(optimizer.state_dict()["state"][0]["momentum_buffer"].tolist()) for _, optimizer in held.values()}
    assert (len(weights), len(momenta)) == (1, 1)


def test_shards_that_nobody_declared_are_refused_where_their_shapes_differ() -> None:
    async def worker(job: Job, sim: Simulation) -> str:
        mine = {"shard": np.zeros(3 + job.rank % 2)}
        job.register_state(lambda: mine, lambda state: pytest.fail("nothing may be loaded"))
        with pytest.raises(Diverged) as caught:
            await job.ready()
        return str(caught.value)

    outcome = run(worker, crash=None)
    assert outcome.error is None, outcome.error
    (said,) = set(outcome.results)
    assert "'shard': float64 (3,) on worker-0, worker-2 and float64 (4,) on worker-1" in said


@pytest.mark.parametrize("bit", [5, 777])
def test_a_bit_that_flips_is_found_within_the_steps_that_are_set_and_healed(bit: int) -> None:
    aborted: list[tuple[str, str]] = []

    async def worker(job: Job, sim: Simulation) -> list[float]:
        mine = {"w": np.zeros(16), "n": 0}

        def load(state: Any) -> None:
            mine.update(state)

        def apply(total: Any) -> None:
            mine.update(w=mine["w"] + total, n=int(mine["n"]) + 1)

        job.register_state(lambda: mine, load)
        flipped = False
        while not sim.everyone_at(STEPS):
            try:
                async with job.step() as step:
                    await asyncio.sleep(0.05)
                    total = await job.group.all_reduce(np.ones(16))
                    step.on_commit(lambda total=total: apply(total))
            except QuicollError as error:
                if isinstance(error, LocalError | Diverged):
                    raise
                aborted.append((error.node, str(error)))
                continue
            if job.node == "worker-2" and step.number == 5 and not flipped:
                flipped = True
                assert job.flip_bit(bit) == "w"
        return [float(value) for value in np.asarray(mine["w"])]

    outcome = run(worker, crash=None, state_check_every=3)
    assert outcome.error is None, outcome.error
    assert outcome.results[0] == outcome.results[1] == outcome.results[2]
    assert len(set(outcome.results[0])) == 1
    found = [(node, said) for node, said in aborted if "is not what most ranks hold" in said]  # not who left at the end
    assert len(found) == 3
    assert all(node == "worker-2" and "step 8 was not committed" in said and "in 'w'" in said for node, said in found)
