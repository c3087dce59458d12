"""A training loop by hand: atomic steps, state for whoever (re)joins, checkpoints.

    quicoll run -n 3 examples/train_loop.py --steps 400 --checkpoints /tmp/line

Kill a worker while it runs (`kill -9 PID`): the others give up the step, go on as two, and take the new one in. Start
it a second time: it goes on from the checkpoint. The last line, the digest, is the same every time.
`quicoll.train.Worker` is this loop with the edges filed off.
"""

import argparse
import asyncio
import os
from functools import partial

import numpy as np

import quicoll
from quicoll import checkpoint
from quicoll.errors import StepAborted

SHARDS = 8
TRUE_WEIGHTS = np.array([2.0, -1.0, 0.5], np.float32)


def gradient(weights: np.ndarray, shard: int, step: int) -> np.ndarray:
    """Of the squared error on the shard's 64 points, drawn from (shard, step) alone: any rank can compute any shard."""
    x = np.random.default_rng([shard, step]).standard_normal((64, 3), dtype=np.float32)
    return x.T @ (x @ weights - x @ TRUE_WEIGHTS) / np.float32(64)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--checkpoints")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of pretended work in a step")
    options = parser.parse_args()

    weights = np.zeros(3, np.float32)
    async with quicoll.join() as job:

        def load(state: dict[str, np.ndarray]) -> None:
            weights[:] = state["weights"]

        saved = checkpoint.latest(options.checkpoints) if options.checkpoints else None
        if saved:
            load(saved.tensors)
            job.resume_from(saved.step)
        job.register_state(lambda: {"weights": weights}, load)

        print(f"process {os.getpid()} is rank {job.rank} of {job.world_size}, at step {job.committed_step}")
        while job.committed_step < options.steps:
            try:
                async with job.step() as step:
                    await asyncio.sleep(options.pace)
                    shards = job.group.shards(SHARDS)
                    leaves = [gradient(weights, shard, step.number) for shard in shards]
                    average = await job.group.all_reduce(shards.leaves(leaves, like=weights), op="avg")
                    step.on_commit(partial(np.subtract, weights, 0.1 * average, out=weights))
            except StepAborted as aborted:
                print(f"rank {job.rank}: {aborted}")
                continue
            if options.checkpoints and job.rank == 0 and step.number % 100 == 0:
                state = checkpoint.snapshot({"weights": weights})
                await asyncio.to_thread(checkpoint.save, options.checkpoints, step=step.number, tensors=state)
        digest = checkpoint.digest({"weights": weights})
        print(f"rank {job.rank}: {weights} after step {job.committed_step}, digest {digest[:16]}")


asyncio.run(main())
