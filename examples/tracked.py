"""Figures of a job in Weights & Biases, in MLflow, or on the terminal: your losses, and what becomes of steps.

    quicoll run -n 2 examples/tracked.py --to print
    WANDB_MODE=offline quicoll run -n 2 examples/tracked.py --to wandb
    MLFLOW_TRACKING_URI=http://127.0.0.1:5000 quicoll run -n 2 examples/tracked.py --to mlflow

Each rank has a run of its own, named after its node; the group of wandb, and the experiment of MLflow, is the job.
"""

import argparse
import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

import quicoll

TRUE_WEIGHTS = np.array([2.0, -1.0, 0.5], np.float32)


@contextmanager
def tracked_run(to: str) -> Iterator[Callable[..., object]]:
    """Open a run, and give the function that logs to it."""
    node = os.environ["QUICOLL_NODE"]
    if to == "wandb":
        import wandb

        with wandb.init(project="quicoll", group="line", name=node) as run:
            yield run.log
    elif to == "mlflow":
        import mlflow

        mlflow.set_experiment("quicoll")
        with mlflow.start_run(run_name=node) as run:
            yield partial(mlflow.log_metrics, run_id=run.info.run_id)  # another thread has no run by itself
    else:
        yield lambda figures, *, step: print(f"step {step}: {figures}")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--to", choices=["wandb", "mlflow", "print"], default="print")
    options = parser.parse_args()

    weights = np.zeros(3, np.float32)
    with tracked_run(options.to) as log, quicoll.Tracker(log) as tracker:
        async with quicoll.join(observer=tracker) as job:
            job.register_state(lambda: {"weights": weights}, lambda state: np.copyto(weights, state["weights"]))
            while job.committed_step < options.steps:
                async with job.step() as step:
                    x = np.random.default_rng([job.rank, step.number]).standard_normal((64, 3), dtype=np.float32)
                    error = x @ (weights - TRUE_WEIGHTS)
                    average = await job.group.all_reduce(x.T @ error / np.float32(64), op="avg")
                    step.on_commit(partial(np.subtract, weights, 0.1 * average, out=weights))
                tracker.log({"loss": np.square(error).mean()}, step=step.number)


if __name__ == "__main__":
    asyncio.run(main())
