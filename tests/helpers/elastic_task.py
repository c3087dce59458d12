"""Training in which everything shows that could go wrong where ranks come and go, and a rank of it as a process.

Its state has Adam's weights, and for each epoch how often each sample was used; the optimizer's moments, and what is
kept of those counts, are divided between the ranks. All of it is float32 in numpy, so that the bits depend on nothing
but the order of additions. A rank computes step N when the file `gate` has a number from N on: so a test says how far
the job is, whatever the machine has to do besides.

    python elastic_task.py GATE CHECKPOINTS
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import quicoll
from quicoll.data import Sampler
from quicoll.train import CheckpointPolicy, Divide, Part, TrainingResult, Worker

if TYPE_CHECKING:
    from quicoll.job import Job

SIZE, SAMPLES, BATCH, SHARDS, EPOCHS = 61, 36, 8, 8, 6
STEPS_PER_EPOCH = 5  # the last of them with four samples
STEPS = EPOCHS * STEPS_PER_EPOCH
_LOOK_S = 0.01


class Elastic:
    """A task whose state is divided. gate: see the module's head; None holds nothing up."""

    def __init__(self, gate: Path | None = None) -> None:
        self.weights = np.zeros(SIZE, np.float32)
        self.used = np.zeros((EPOCHS, SAMPLES), np.float32)
        self._gate = gate
        self._open = 0  # the step up to which the gate was seen open

    def architecture(self) -> Mapping[str, Any]:
        return {}

    def parameters(self) -> Mapping[str, Any]:
        return {"weights": self.weights, "used": self.used}

    def forward(self, part: Part) -> Part:
        while self._gate is not None and self._open < part.step:
            self._open = int(self._gate.read_text())
            if self._open < part.step:
                time.sleep(_LOOK_S)
        return part

    def backward(self, loss: Part) -> Sequence[Any]:
        assert loss.indices is not None
        gradient = -self.weights * np.float32(0.01)
        for sample in loss.indices:
            gradient += np.sin(np.arange(SIZE, dtype=np.float32) * np.float32(sample + 1))
        used = np.zeros_like(self.used)
        used[(loss.step - 1) // STEPS_PER_EPOCH] = np.bincount(loss.indices, minlength=SAMPLES)
        return [gradient, used]

    def apply(self, average: Sequence[Any]) -> None:
        raise AssertionError("the state is divided")

    def divide(self) -> Mapping[str, str]:
        return {"m": "float32", "v": "float32"}

    def update(self, start: int, stop: int, average: Any, moments: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Adam for the weights. A count grows by one for each step in which any shard had the sample; m is a copy."""
        now = np.concatenate([self.weights, self.used.reshape(-1)])[start:stop]
        weights = max(0, min(stop, SIZE) - start)
        m = moments["m"] * np.float32(0.9) + average * np.float32(0.1)
        v = moments["v"] * np.float32(0.99) + average * average * np.float32(0.01)
        new = now - np.float32(0.05) * m / (np.sqrt(v) + np.float32(1e-6))
        new[weights:] = m[weights:] = moments["m"][weights:] + (average[weights:] > 0)
        return new, {"m": m, "v": v}

    def advance(self, values: Sequence[Any]) -> None:
        self.weights, self.used = np.array(values[0]), np.array(values[1])

    def state(self) -> Mapping[str, Any]:
        return {"weights": self.weights, "used": self.used}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.weights, self.used = np.array(state["weights"]), np.array(state["used"])


async def train(job: Job, task: Elastic, checkpoints: Path) -> TrainingResult:
    """Train all epochs. The last state is in the checkpoints then, with what each rank owns of it."""
    data = Sampler(SAMPLES, batch_size=BATCH, shards=SHARDS, seed=7)
    policy = CheckpointPolicy(checkpoints, every=STEPS)
    return await Worker(job, task, data=data, divide=Divide(16, backup=0), checkpoints=policy).run(epochs=EPOCHS)


async def main(gate: Path, checkpoints: Path) -> None:
    task = Elastic(gate)
    async with quicoll.join() as job:
        result = await train(job, task, checkpoints)
    once = bool((task.used == 1).all())
    sys.stdout.write(f"process {os.getpid()}: step {result.steps}, each sample once in every epoch: {once}\n")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
