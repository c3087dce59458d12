"""Adam whose moments are divided between the ranks (ZeRO-1): each rank owns a part, and updates the parameters in it.

    quicoll run -n 4 examples/sharded_adam.py

The line at the end is the same on any number of ranks, and however often that number changes meanwhile
(`quicoll scale 2` in another terminal) or a rank is killed (`kill -9 PID`): every block of the moments has a copy on
another rank. In `quicoll.train.Worker` all of this is `divide=quicoll.train.Divide()`.
"""

import argparse
import asyncio
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

import quicoll

SHARDS, SIZE = 8, 1000  # logical shards of the data; parameters


class Model:
    """Parameters on all ranks, two moments for each of them on one rank and its backup."""

    def __init__(self) -> None:
        self.weights = np.zeros(SIZE, np.float32)
        self.moments = quicoll.Sharded(SIZE, {"m": "float32", "v": "float32"}, blocks=64, backup=1)

    def gradient(self, step: int, shard: int) -> np.ndarray:
        """Of one shard of a step: towards waves that all shards have in common, and its own noise."""
        places = np.arange(SIZE, dtype=np.float32)
        noise = np.random.default_rng([step, shard]).standard_normal(SIZE, dtype=np.float32)
        return self.weights - np.sin(places / np.float32(50)) + np.float32(0.1) * noise

    def adam(self, mean: np.ndarray) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        """Return what this rank's part becomes, parameters and moments; nothing has changed yet."""
        m = np.float32(0.9) * self.moments["m"] + np.float32(0.1) * mean
        v = np.float32(0.99) * self.moments["v"] + np.float32(0.01) * mean * mean
        new = self.weights[self.moments.mine] - np.float32(0.02) * m / (np.sqrt(v) + np.float32(1e-8))
        return new, {"m": m, "v": v}

    def save(self) -> Mapping[str, np.ndarray]:
        return {"weights": self.weights}

    def load(self, state: Mapping[str, Any]) -> None:
        self.weights[:] = state["weights"]


async def step_of(job: quicoll.Job, model: Model) -> None:
    async with job.step() as step:
        shards = job.group.shards(SHARDS)
        leaves = [model.gradient(step.number, shard) for shard in shards]
        mean = await job.group.reduce_scatter(  # of the elements that this rank owns
            shards.leaves(leaves, like=model.weights), counts=model.moments.counts, op="avg"
        )
        new, moments = model.adam(mean)
        await model.moments.stage(step, moments)  # they count with the commit, here and on the backup
        weights = await job.group.all_gather(new)
        step.on_commit(lambda: np.copyto(model.weights, weights))


async def train(job: quicoll.Job, model: Model, *, steps: int, pace: float) -> None:
    """Step until so many are committed.

    Who has the last one waits for no further view: the others may have left by then, with the moments that they owned.
    """
    while job.committed_step < steps:
        try:
            await job.ready()  # a rank that comes late learns here how far the job is
            if job.committed_step < steps:
                await step_of(job, model)
        except quicoll.StepAborted as aborted:
            print(aborted, flush=True)
        await asyncio.sleep(pace)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between two steps")
    options = parser.parse_args()
    async with quicoll.join() as job:
        model = Model()
        job.register_state(model.save, model.load, sharded={"adam": model.moments})
        print(f"process {os.getpid()} is rank {job.rank} of {job.world_size}", flush=True)
        await train(job, model, steps=options.steps, pace=options.pace)
        mine = model.moments.mine
        print(f"this rank had the moments of elements {mine.start} to {mine.stop}", flush=True)
        digest = quicoll.checkpoint.digest(model.save())
        print(f"step {job.committed_step}, digest {digest[:16]}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
