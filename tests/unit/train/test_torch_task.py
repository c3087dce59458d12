"""A torch module as a task: gradients and random numbers by the part alone, states that come back, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from quicoll.errors import LocalError
from quicoll.numerics.seed import Seed
from quicoll.state.tree import flatten
from quicoll.train import Part, TorchTask

X = torch.linspace(-1, 1, 24).reshape(8, 3)


def loss(module: torch.nn.Module, part: Part) -> torch.Tensor:
    return module(X[torch.as_tensor(part.indices)]).square().mean()


def task(**options: Any) -> tuple[TorchTask, torch.nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(module.parameters(), lr=options.get("lr", 0.1))
    return TorchTask(module, optimizer, loss, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2)), module


def part(shard: int, step: int = 1) -> Part:
    return Part(step, shard, Seed(9).for_step(step).for_shard(shard), np.arange(2 * shard, 2 * shard + 2))


def gradients(of: TorchTask, *asked: Part) -> list[bytes]:
    return [gradient.numpy().tobytes() for each in asked for gradient in of.backward(of.forward(each))]


def test_gradients_depend_on_the_state_and_the_part_alone_dropout_too() -> None:
    before = torch.random.get_rng_state()
    one, other = task()[0], task()[0]
    torch.rand(3)
    expected = gradients(one, part(2))
    gradients(other, part(0), part(1))
    assert gradients(other, part(2)) == expected
    assert gradients(other, part(2, step=2)) != expected
    torch.random.set_rng_state(before)
    gradients(one, part(1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_its_state_is_taken_over_by_another_and_goes_on_to_the_same_bits() -> None:
    one, other = task()[0], task()[0]

    def step(of: TorchTask, number: int) -> None:
        of.apply([gradient.clone() for gradient in of.backward(of.forward(part(number % 4, number)))])

    for number in range(1, 4):
        step(one, number)
    other.load_state(copy.deepcopy(one.state()))  # an optimizer keeps the tensors that it is given
    assert flatten(other.state()).digest == flatten(one.state()).digest
    for of in (one, other):
        step(of, 4)
    assert flatten(other.state()).digest == flatten(one.state()).digest


def test_layers_and_settings_of_the_optimizer_are_its_architecture() -> None:
    one, other = task()[0].architecture(), task(lr=0.2)[0].architecture()
    assert "Dropout(p=0.5" in one["module"]
    assert one["optimizer"].startswith("Adam {")
    assert {name for name in one if one[name] != other[name]} == {"optimizer"}
    assert list(task()[0].parameters()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_parameter_without_part_in_the_loss_has_a_gradient_of_zeros_and_a_frozen_one_has_none() -> None:
    module = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 1), "not": torch.nn.Linear(3, 1)})
    module["used"].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=0.1)
    made = TorchTask(module, optimizer, lambda module, part: loss(module["used"], part))
    found = made.backward(made.forward(part(0)))
    assert list(made.parameters()) == ["used.weight", "not.weight", "not.bias"]
    assert [bool(gradient.any()) for gradient in found] == [True, False, False]


def test_a_module_whose_forward_pass_changes_it_and_one_that_is_not_float32_are_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(LocalError, match="1 is a BatchNorm1d, whose forward pass changes its running mean"):
        TorchTask(module, optimizer, loss)
    double = torch.nn.Linear(3, 1).double()
    with pytest.raises(LocalError, match=r"weight is torch\.float64"):
        TorchTask(double, torch.optim.SGD(double.parameters(), lr=0.1), loss)
