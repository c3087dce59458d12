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


class Counts(torch.nn.Module):
    """A linear layer that counts its forward passes, in place or by a new tensor each."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.line = torch.nn.Linear(3, 1)
        self.register_buffer("passes", torch.zeros(1))
        self.register_buffer("mask", torch.full((3,), float("-inf")))
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.line(x)
        self.passes = self.passes.add_(1) if self.in_place else self.passes + 1
        return torch.as_tensor(found)


def normalised(momentum: float | None = 0.1) -> tuple[TorchTask, torch.nn.Sequential]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2, momentum=momentum))
    return TorchTask(module, torch.optim.SGD(module.parameters(), lr=0.1), loss), module


def statistics(module: torch.nn.Module) -> list[list[float]]:
    return [value.reshape(-1).tolist() for value in module.buffers()]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_move_at_the_commit_by_the_mean_of_what_the_parts_move_them_by(momentum: float) -> None:
    made, layer = normalised(momentum)
    expected = []
    for shard in range(3):  # what torch itself does, part by part from the same start
        _, its = normalised(momentum)
        its(X[2 * shard : 2 * shard + 2])
        expected.append([torch.as_tensor(value, dtype=torch.float32) for value in its.buffers()])
    held = list(layer.buffers())
    before = statistics(layer)
    losses = [made.forward(part(shard)) for shard in range(3)]  # all before the first backward pass
    found = [made.backward(each) for each in losses]
    assert statistics(layer) == before
    assert all(one is other for one, other in zip(held, layer.buffers(), strict=True))
    made.apply([torch.stack(list(each)).mean(0) for each in zip(*found, strict=True)])
    for value, parts in zip(layer.buffers(), zip(*expected, strict=True), strict=True):
        assert torch.allclose(value.float(), torch.stack(parts).mean(0), atol=1e-6)
    assert statistics(layer)[2] == [1]


def test_a_forward_pass_that_fails_moves_nothing() -> None:
    made, layer = normalised()
    before = statistics(layer)
    made_of = Part(1, 0, Seed(9), np.array([999]))
    with pytest.raises(IndexError):
        made.forward(made_of)
    layer.register_forward_hook(lambda *given: (_ for _ in ()).throw(ValueError("after the layer")))
    with pytest.raises(ValueError, match="after the layer"):
        made.forward(part(0))
    assert statistics(layer) == before


def test_statistics_are_among_what_ranks_compare_and_average() -> None:
    made, _ = normalised()
    assert list(made.parameters())[-3:] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert [tuple(each.shape) for each in made.backward(made.forward(part(0)))][-3:] == [(2,), (2,), ()]


def test_layers_that_use_their_statistics_without_moving_them_stay_as_they_are() -> None:
    made, layer = normalised()
    layer.eval()
    before = statistics(layer)
    made.apply(made.backward(made.forward(part(0))))
    assert statistics(layer) == before


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_is_moved_has_to_be_declared_and_moves_then(in_place: bool) -> None:
    def made(**options: Any) -> tuple[TorchTask, Counts]:
        module = Counts(in_place=in_place)
        return TorchTask(module, torch.optim.SGD(module.parameters(), lr=0.1), loss, **options), module

    undeclared, _ = made()
    with pytest.raises(LocalError, match=r"changes buffer passes.*moving=\['passes'\]"):
        undeclared.forward(part(0))
    declared, module = made(moving=["passes"])
    declared.apply(declared.backward(declared.forward(part(0))))
    assert module.passes.tolist() == [1.0]
    assert module.mask.tolist() == [float("-inf")] * 3
    with pytest.raises(LocalError, match="no buffer 'other'; it has passes, mask"):
        made(moving=["other"])


def test_a_module_that_is_not_float32_is_refused() -> None:
    double = torch.nn.Linear(3, 1).double()
    with pytest.raises(LocalError, match=r"weight is torch\.float64"):
        TorchTask(double, torch.optim.SGD(double.parameters(), lr=0.1), loss)
