"""Training on data that is read exactly once: a worker, its data, checkpoints and figures.

    quicoll run -n 2 --seed 7 examples/data_once.py --epochs 3 --checkpoints /tmp/once

Kill a worker while it runs (`kill -9 PID`), or all of them and start it again: the line at the end says how often each
sample was used in steps that were committed, which is once in each epoch, and the digest is the same every time, on any
number of ranks. With --workers 2 the samples come from processes of torch's DataLoader that read ahead.
"""

import argparse
import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import quicoll
from quicoll.data import Feed, Sampler
from quicoll.train import CheckpointPolicy, Part, Worker

SAMPLES = 250  # no multiple of the batch: the last step of an epoch has what is left
TRUE_WEIGHTS = np.array([2.0, -1.0, 0.5], np.float32)


class Points(Dataset):
    """Sample i is a point, what is to be predicted of it, and its number i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.float32, int]:
        x = np.random.default_rng(index).standard_normal(3, dtype=np.float32)
        return x, x @ TRUE_WEIGHTS, index


class Line:
    """A linear model. Beside its weights it counts, in the same reduction, how often each sample was used."""

    def __init__(self) -> None:
        self.weights = np.zeros(3, np.float32)
        self.used = np.zeros(SAMPLES, np.float32)

    def architecture(self) -> Mapping[str, Any]:
        return {"model": "linear", "learning rate": 0.1}

    def parameters(self) -> Mapping[str, np.ndarray]:
        return {"weights": self.weights, "used": self.used}

    def forward(self, part: Part) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        x, y, index = (np.asarray(each) for each in part.samples)
        return x, x @ self.weights - y, index

    def backward(self, loss: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Sequence[np.ndarray]:
        x, error, index = loss
        mean = np.float32(1 / len(index))
        return [x.T @ error * mean, np.bincount(index, minlength=SAMPLES).astype(np.float32) * mean]

    def apply(self, average: Sequence[np.ndarray]) -> None:
        self.weights -= np.float32(0.1) * average[0]
        self.used += average[1] > 0  # a mean above 0: it was among the samples of this step

    def state(self) -> Mapping[str, np.ndarray]:
        return {"weights": self.weights, "used": self.used}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self.weights[:], self.used[:] = state["weights"], state["used"]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoints")
    parser.add_argument("--workers", type=int, default=0, help="processes that read ahead, for each rank")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between two steps")
    options = parser.parse_args()

    def loader(lists: Any) -> DataLoader:
        # The reading processes come from a server that is forked before any socket is open: they hold none of them.
        context = "forkserver" if options.workers else None
        return DataLoader(
            Points(),
            batch_sampler=lists,
            num_workers=options.workers,
            persistent_workers=bool(options.workers),
            multiprocessing_context=context,
        )

    async with quicoll.join() as job:
        task = Line()
        sampler = Sampler(SAMPLES, batch_size=16, shards=8, seed=job.seed)
        feed = Feed(sampler, loader)
        worker = Worker(
            job,
            task,
            data=feed,
            checkpoints=CheckpointPolicy(options.checkpoints, every=20) if options.checkpoints else None,
            on_step=lambda step: asyncio.sleep(options.pace),
            report_every=10,
        )
        print(f"process {os.getpid()} is rank {job.rank} of {job.world_size}", flush=True)
        result = await worker.run(epochs=options.epochs)
        feed.close()
        times = sorted({int(count) for count in task.used})
        print(f"each sample was used {' or '.join(map(str, times))} times in {sampler.epoch} epochs")
        print(f"{worker.figures.communication_share:.0%} of a step is communication; digest {result.digest[:16]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main())
