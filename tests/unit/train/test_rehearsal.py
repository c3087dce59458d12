"""A forward and a backward pass for nothing: they leave the task, and torch, as they were."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from quicoll.errors import LocalError
from quicoll.numerics.seed import Seed
from quicoll.train import Part, TorchTask, rehearse


class Counted:
    """A task in numpy that knows what it was asked for."""

    def __init__(self, spoils: str = "") -> None:
        self.weights = np.arange(6, dtype=np.float32)
        self.spoils = spoils
        self.calls: list[Any] = []

    def architecture(self) -> Mapping[str, Any]:
        return {}

    def parameters(self) -> Mapping[str, Any]:
        return {"weights": self.weights}

    def forward(self, part: Part) -> Part:
        self.calls.append((part.samples, part.indices))
        if self.spoils == "forward":
            self.weights[3] += 1
        return part

    def backward(self, loss: Part) -> Sequence[Any]:
        self.calls.append(loss.step)
        if self.spoils == "backward":
            self.weights = self.weights + 1
        return [self.weights]

    def apply(self, average: Sequence[Any]) -> None:
        raise AssertionError("nothing is applied in a rehearsal")

    def state(self) -> Mapping[str, Any]:
        raise AssertionError("a divided task may have no state yet")

    def load_state(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("nothing is loaded in a rehearsal")


def test_both_passes_run_once_with_what_stands_for_the_samples() -> None:
    task = Counted()
    places = np.arange(3)
    rehearse(task, samples="rows", indices=places)
    assert task.calls == [("rows", places), 1]


@pytest.mark.parametrize("spoils", ["forward", "backward"])
def test_a_pass_that_changes_what_is_trained_is_refused(spoils: str) -> None:
    with pytest.raises(LocalError, match="forward or backward of Counted changes what is trained: only apply may"):
        rehearse(Counted(spoils))


def layers() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        module = torch.nn.Sequential(
            torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.5), torch.nn.Linear(5, 1)
        )
    return module, torch.optim.Adam(module.parameters(), lr=0.1)


def loss(module: torch.nn.Module, part: Part) -> torch.Tensor:
    return torch.as_tensor(module(part.samples).square().mean())


@pytest.mark.parametrize("divided", [False, True])
def test_a_torch_task_and_torch_are_as_they_were_and_the_next_pass_has_the_same_bits(divided: bool) -> None:
    """Neither statistics, nor gradients, nor the optimizer, nor the generator of random numbers move."""
    samples = torch.linspace(-1, 1, 12).reshape(4, 3)
    module, optimizer = layers()
    task = TorchTask(module, optimizer, loss)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    chance = torch.get_rng_state()
    rehearse(task, samples=samples * 7)
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(value.grad is None for value in module.parameters())
    assert not optimizer.state
    other = TorchTask(*layers(), loss)
    if divided:
        assert task.divide() == other.divide()
    part = Part(3, 1, Seed(5), samples=samples)
    for mine, fresh in zip(task.backward(task.forward(part)), other.backward(other.forward(part)), strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(fresh))


def test_what_a_pass_raises_comes_through() -> None:
    task = TorchTask(*layers(), loss)
    with pytest.raises(RuntimeError, match=re.escape("shapes cannot be multiplied")):
        rehearse(task, samples=torch.zeros(2, 7))
