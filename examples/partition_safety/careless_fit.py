"""The loop of line_fit.py with a mistake that every test on a healthy network passes.

It applies the update as soon as the all-reduce has returned here. If the step is then aborted, because another rank did
not get as far, this rank has the update and that one has not; and it gets it a second time when the step is repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
from line_fit import RATE, SHARDS, Weights, gradient

from quicoll import Job, StepAborted


async def train(job: Job, *, done: Callable[[], bool], compute_s: float = 0.02) -> Weights:
    """Train until `done()`; the weights."""
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
                weights -= RATE * average  # the mistake: nobody has said yet that this step counts
        except StepAborted:
            continue
    return weights
