"""The demo's task: a small convolutional net on scikit-learn's 8x8 digits, the same bits in every run.

What determines the bits, and how each is pinned down:
- which samples a shard sees: a counter-based generator (Philox4x64-10; Salmon et al. 2011, "Parallel
  random numbers: as easy as 1, 2, 3") keyed by (seed, shard) with the step as counter. No state is carried along, so
  any rank can compute any shard of any step. Raw output modulo the number of samples: NumPy guarantees the raw stream
  for ever, unlike the distributions, and the bias is below 2^-53.
- the order of additions inside a gradient: one torch thread, deterministic algorithms (`pin_torch`), whole batches in
  memory of their own (an offset into other memory could choose another vector path).
- the order of additions across shards: `quicoll.numerics.reduce`'s canonical tree over the 8 leaves.
Same machine, same torch: same bits. Other processors may choose other kernels for the convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quicoll.errors import LocalError
from quicoll.numerics.canonical_order import split
from quicoll.numerics.dtypes import FLOAT32
from quicoll.numerics.reduce import ReduceOp, combine, finish
from quicoll.train.bucket import Bucket

if TYPE_CHECKING:
    from quicoll.checkpoint.parts import Array
    from quicoll.train.task import Part

__all__ = ["BATCH", "SHARDS", "Digits", "baseline", "pin_torch"]

SHARDS = 8
BATCH = 96
"""Samples per shard: 768 per step out of 1438, about 40 ms on one core, so that two workers have something to share."""

_CHANNELS = 32
_LEARNING_RATE = 0.1
_MOMENTUM = 0.9
_SPLIT_KEY = 0x5EED_0F_5B117
"""Fixed, so that every seed is measured against the same held-out fifth."""


def pin_torch() -> None:
    """Make torch compute the same bits every time: one thread, deterministic algorithms. For the whole process."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


class Digits:
    """The training task (`quicoll.train.Task`). Parameters, momentum and gradients are float32 on the CPU.

    seed: of the initial parameters and of the samples drawn. batch: samples per shard and step.
    `pin_torch` is the caller's to call, once per process.
    """

    def __init__(self, *, seed: int = 0, batch: int = BATCH) -> None:
        if seed < 0 or batch < 1:
            raise LocalError(f"seed is 0 or more and batch 1 or more, not {seed} and {batch}")
        self._seed = seed
        self._batch = batch
        self._told_of, self._told = 0, list[float]()
        images, labels = _load()
        order = np.argsort(_raw(_SPLIT_KEY, 0, 0, len(labels)), kind="stable")
        fifth = len(labels) // 5
        held_out, training = torch.from_numpy(order[:fifth].copy()), torch.from_numpy(order[fifth:].copy())
        self._images, self._labels = images[training], labels[training]
        self._test_images, self._test_labels = images[held_out], labels[held_out]
        self._parameters = _initial(seed)
        self._momentum = {name: torch.zeros_like(value) for name, value in self._parameters.items()}

    def architecture(self) -> dict[str, object]:
        """What parameters' shapes do not say."""
        return {"batch": self._batch, "learning rate": _LEARNING_RATE, "momentum": _MOMENTUM, "seed": self._seed}

    def parameters(self) -> dict[str, Array]:
        """The live parameters."""
        return dict(self._parameters)

    def gradients(self, shard: int, step: int) -> list[Tensor]:
        """Gradients of the mean loss over the shard's samples of this step, in the order of the parameters."""
        return self.backward(self._loss(shard, step))

    def forward(self, part: Part) -> Tensor:
        """The mean loss over a shard's samples, which are drawn by shard and step."""
        return self._loss(part.shard, part.step)

    def backward(self, loss: Any) -> list[Tensor]:
        """Its gradients."""
        return list(torch.autograd.grad(loss, list(self._parameters.values())))

    def _loss(self, shard: int, step: int) -> Tensor:
        drawn = _raw(self._seed, shard, step, self._batch) % np.uint64(len(self._labels))
        index = torch.from_numpy(drawn.astype(np.int64))
        loss = F.cross_entropy(self._logits(self._images[index]), self._labels[index])
        if self._told_of != step:
            self._told_of, self._told = step, []
        self._told.append(float(loss.detach()))
        return loss

    @property
    def loss(self) -> float | None:
        """The mean loss of the shards that were computed here in the last step; None before the first."""
        return sum(self._told) / len(self._told) if self._told else None

    @torch.no_grad()
    def apply(self, average: Sequence[Array]) -> None:
        """SGD with momentum (Sutskever et al. 2013): v = 0.9 v + g; p = p - 0.1 v."""
        for (name, parameter), gradient in zip(self._parameters.items(), average, strict=True):
            velocity = self._momentum[name]
            velocity.mul_(_MOMENTUM).add_(torch.as_tensor(gradient))
            parameter.sub_(velocity, alpha=_LEARNING_RATE)

    def state(self) -> dict[str, Array]:
        """Parameters under "parameter.", momentum under "momentum."; these alias the live tensors."""
        named: dict[str, Array] = {f"parameter.{name}": value.detach() for name, value in self._parameters.items()}
        return named | {f"momentum.{name}": value for name, value in self._momentum.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Array]) -> None:
        """Copy a state in. Raises LocalError, with nothing changed, if names or shapes are not this task's."""
        mine = self.state()
        expected = {name: tuple(value.shape) for name, value in mine.items()}
        found = {name: tuple(value.shape) for name, value in state.items()}
        if found != expected:
            raise LocalError(f"the state has {found}, this task has {expected}")
        for name, value in mine.items():
            torch.as_tensor(value).copy_(torch.as_tensor(state[name]))

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of the held-out fifth (359 images, never trained on) that is classified right."""
        return float((self._logits(self._test_images).argmax(1) == self._test_labels).double().mean())

    def _logits(self, images: Tensor) -> Tensor:
        p = self._parameters
        hidden = F.relu(F.conv2d(images, p["conv1.weight"], p["conv1.bias"], padding=1))
        hidden = F.relu(F.conv2d(hidden, p["conv2.weight"], p["conv2.bias"], padding=1))
        return F.linear(F.max_pool2d(hidden, 2).flatten(1), p["out.weight"], p["out.bias"])


def baseline(*, steps: int, seed: int = 0, batch: int = BATCH) -> Digits:
    """Train in this process alone, with no network and no plan, and return the task: what every job must equal.

    The reduction is written out here in the plainest form, the canonical tree of `quicoll.numerics.canonical_order`
    leaf by leaf, so that equal digests say something about the cluster's plans and do not only compare them with
    themselves.
    """
    task = Digits(seed=seed, batch=batch)
    for step in range(1, steps + 1):
        gradients = [task.gradients(shard, step) for shard in range(SHARDS)]
        bucket = Bucket.of(gradients[0])
        leaves = [bucket.pack(gradient) for gradient in gradients]
        average = np.empty(bucket.size, np.float32)
        finish(ReduceOp.AVG, _reduced(leaves, 0, SHARDS), SHARDS, FLOAT32, average)
        task.apply(bucket.unpack(average, gradients[0]))
    return task


def _reduced(leaves: Sequence[np.ndarray[Any, Any]], start: int, stop: int) -> np.ndarray[Any, Any]:
    if stop - start == 1:
        return leaves[start]
    middle = split(start, stop)
    out = np.empty_like(leaves[start])
    combine(ReduceOp.AVG, FLOAT32, _reduced(leaves, start, middle), _reduced(leaves, middle, stop), out)
    return out


def _load() -> tuple[Tensor, Tensor]:
    """1797 images as (n, 1, 8, 8) float32 in [0, 1], and their labels.

    Its file is read and scikit-learn not imported, which takes each process longer than a training of the demo's steps.
    """
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise LocalError("the digits come with scikit-learn: pip install quicoll[demo]")
    file = Path(found.origin).with_name("datasets") / "data" / "digits.csv.gz"
    if file.exists():
        table = np.loadtxt(file, delimiter=",")
        pixels, labels = table[:, :-1], table[:, -1]
    else:  # another version may keep it elsewhere
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels.astype(np.float32).reshape(-1, 1, 8, 8) / np.float32(16))
    return images, torch.from_numpy(labels.astype(np.int64))


def _raw(key: int, stream: int, counter: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    generator = np.random.Philox(key=[key, stream], counter=[0, counter, 0, 0])
    drawn: np.ndarray[Any, np.dtype[np.uint64]] = generator.random_raw(count)
    return drawn


def _initial(seed: int) -> dict[str, Tensor]:
    """He initialisation (He et al. 2015), from a generator of its own: the process's global one is left alone."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "conv1.weight": (_CHANNELS, 1, 3, 3),
        "conv1.bias": (_CHANNELS,),
        "conv2.weight": (_CHANNELS, _CHANNELS, 3, 3),
        "conv2.bias": (_CHANNELS,),
        "out.weight": (10, _CHANNELS * 16),
        "out.bias": (10,),
    }
    parameters = {}
    for name, shape in shapes.items():
        value = torch.zeros(shape)
        if name.endswith("weight"):
            value = torch.randn(shape, generator=generator) * (2.0 / value[0].numel()) ** 0.5
        parameters[name] = value.requires_grad_()
    return parameters
