"""A training loop as a user writes it: fit a line by gradient descent, in atomic steps, over whatever network there is.

It knows nothing of simulation. What makes it safe when the network splits is one line, `step.on_commit(...)`: the
weights change if the step is committed, and never otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quicoll import Job, StepAborted

SHARDS = 8
RATE = np.float32(0.1)
TRUE_WEIGHTS = np.array([2.0, -1.0, 0.5], np.float32)

Weights = NDArray[np.float32]


def gradient(weights: Weights, shard: int, step: int) -> Weights:
    """Of the squared error on the shard's 64 points, drawn from (shard, step) alone: any rank can compute any shard."""
    x = np.random.default_rng([shard, step]).standard_normal((64, 3), dtype=np.float32)
    found: Weights = x.T @ (x @ weights - x @ TRUE_WEIGHTS) / np.float32(64)
    return found


async def train(job: Job, *, done: Callable[[], bool], compute_s: float = 0.02) -> Weights:
    """Train until `done()`; the weights. compute_s: seconds that the pretended work of a step takes."""
    weights = np.zeros(3, np.float32)

    def load(state: dict[str, Weights]) -> None:
        weights[:] = state["weights"]

    job.register_state(lambda: {"weights": weights}, load)
    while not done():
        try:
            async with job.step() as step:
                await asyncio.sleep(compute_s)
                shards = job.group.shards(SHARDS)
                leaves = [gradient(weights, shard, step.number) for shard in shards]
                average = await job.group.all_reduce(shards.leaves(leaves, like=weights), op="avg")
                step.on_commit(partial(np.subtract, weights, RATE * average, out=weights))
        except StepAborted:
            continue  # nothing was changed: the same step again, with whoever is there now
    return weights
