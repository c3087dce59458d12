"""A job that grows and shrinks while it runs has the bits of one that never did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.errors import QuicollError
from quicoll.sim import Settings, Simulation

if TYPE_CHECKING:
    from quicoll.job import Job

STEPS = 40
SHARDS = 8


def train(held: dict[str, Any], shard: int, step: int) -> Any:
    """What one logical shard gives in a step: it depends on the state, and the sum on the order of adding."""
    index = np.arange(64, dtype=np.float32)
    return (np.sin(index * (shard + 1) + step) - held["weights"] * np.float32(0.01)).astype(np.float32)


async def worker(job: Job) -> dict[str, Any]:
    """`STEPS` steps with replicated state: weights, momentum, and who took part."""
    held = {"weights": np.zeros(64, np.float32), "momentum": np.zeros(64, np.float32), "sizes": np.zeros(STEPS)}

    def load(state: Any) -> None:
        held.update({name: value.copy() for name, value in state.items()})

    job.register_state(lambda: held, load, own=("sizes",))
    while job.committed_step < STEPS:
        try:
            async with job.step() as step:
                if step.number > STEPS:
                    break
                shards = job.group.shards(SHARDS)
                leaves = [train(held, shard, step.number) for shard in shards]
                total = await job.group.all_reduce(shards.leaves(leaves, like=held["weights"]), op="avg")
                number, world_size = step.number, job.world_size

                def apply(total: Any = total, number: int = number, world_size: int = world_size) -> None:
                    held["momentum"] = held["momentum"] * np.float32(0.9) + total
                    held["weights"] = held["weights"] - held["momentum"] * np.float32(0.1)
                    held["sizes"][number - 1] = world_size

                step.on_commit(apply)
        except QuicollError:
            continue
    return held


def alone() -> bytes:
    """The weights after all steps on one worker, without a cluster: leaves added in the canonical tree."""
    outcome = Simulation(worker, seed=1, settings=Settings(ranks=1, limit=60.0), compute=0.05).run()
    assert outcome.error is None, outcome.error
    weights: Any = outcome.results[0]["weights"]
    return weights.tobytes()


def test_four_three_eight_two_four_workers_give_the_bits_of_one() -> None:
    simulation = Simulation(worker, seed=3, settings=Settings(ranks=4, limit=120.0), compute=0.1)
    simulation.at(0.6).scale(3)
    simulation.at(1.4).scale(8)
    simulation.at(2.4).scale(2)
    simulation.at(3.2).scale(4)
    outcome = simulation.run()
    assert outcome.error is None, outcome.error
    ends = [result for result in outcome.results if result is not None]
    assert len(ends) == 4
    expected = alone()
    assert all(result["weights"].tobytes() == expected for result in ends)
    sizes = [int(size) for size in ends[0]["sizes"]]
    seen = [size for index, size in enumerate(sizes) if index == 0 or size != sizes[index - 1]]
    assert [size for size in (4, 3, 8, 2, 4) if size in seen] == [4, 3, 8, 2, 4]
    assert outcome.aborted == 0  # nobody lost a step by that
    assert outcome.committed == STEPS


def test_a_coordinator_that_crashes_after_the_request_goes_on_with_it() -> None:
    simulation = Simulation(worker, seed=4, settings=Settings(ranks=4, limit=120.0), compute=0.1)
    simulation.at(0.6).scale(2)
    simulation.at(0.605).crash("coordinator")
    simulation.at(1.0).restart("coordinator")
    outcome = simulation.run()
    assert outcome.error is None, outcome.error
    assert sum(result is not None for result in outcome.results) == 2


def test_a_rank_moves_to_another_node_with_one_change_of_view() -> None:
    simulation = Simulation(worker, seed=5, settings=Settings(ranks=3, limit=120.0), compute=0.1)
    simulation.at(0.6).scale(3, leave=1)
    simulation.at(1.0).join(7)
    outcome = simulation.run()
    assert outcome.error is None, outcome.error
    assert [result is not None for result in outcome.results] == [True, False, True, True]
    assert outcome.views == 2
    assert outcome.aborted == 0
