"""torch's optimizers a block of elements at a time: what they do to a whole parameter, pure, or refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from quicoll.errors import LocalError
from quicoll.train.block_optimizer import BlockOptimizer

SIZES = ((3, 4), (5,), (2, 1))
LENGTH = 19
GRADIENTS = [np.sin(np.arange(LENGTH, dtype=np.float32) * np.float32(step + 1)) for step in range(4)]
Made = Callable[[Any], torch.optim.Optimizer]


def parameters() -> list[torch.nn.Parameter]:
    values = torch.linspace(-1, 1, LENGTH).split([12, 5, 2])
    return [torch.nn.Parameter(each.reshape(size).clone()) for each, size in zip(values, SIZES, strict=True)]


def flat(tensors: list[torch.nn.Parameter]) -> Any:
    return torch.cat([each.detach().reshape(-1) for each in tensors]).numpy()


def whole(made: Made) -> Any:
    tensors = parameters()
    optimizer = made(tensors)
    for gradient in GRADIENTS:
        for tensor, part in zip(tensors, torch.tensor(gradient).split([12, 5, 2]), strict=True):
            tensor.grad = part.reshape(tensor.shape)
        optimizer.step()
    return flat(tensors)


def in_blocks(made: Made, cuts: tuple[int, ...], start: int = 0, before: Any = None) -> tuple[Any, Any, BlockOptimizer]:
    """All steps from one on, each block for itself; or those after `start` from what another has kept."""
    tensors = parameters()
    optimizer = made(tensors)
    blocks = BlockOptimizer(optimizer, tensors)
    kept = {name: np.zeros(LENGTH, np.float32) for name in blocks.moments}
    if before is not None:
        values, kept, other = before
        _set(tensors, values)
        blocks.load(optimizer.state_dict()["param_groups"], other.state())
    for gradient in GRADIENTS[start:]:
        values, new = np.empty(LENGTH, np.float32), {name: np.empty(LENGTH, np.float32) for name in kept}
        for first, last in pairwise(cuts):
            held = {name: each[first:last] for name, each in kept.items()}
            for each in held.values():
                each.flags.writeable = False
            values[first:last], found = blocks.update(first, last, gradient[first:last], held)
            for name, each in found.items():
                new[name][first:last] = each
        _set(tensors, values)
        kept = new
        blocks.progress = blocks.advanced()
    return flat(tensors), kept, blocks


def _set(tensors: list[torch.nn.Parameter], values: Any) -> None:
    with torch.no_grad():
        for tensor, part in zip(tensors, torch.tensor(values).split([12, 5, 2]), strict=True):
            tensor.copy_(part.reshape(tensor.shape))


MADE: dict[str, Made] = {
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda given: torch.optim.Adam(given, lr=0.1, amsgrad=True),
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.1, weight_decay=0.2),
    "rmsprop": lambda given: torch.optim.RMSprop(given, lr=0.01, centered=True, momentum=0.5),
    "nadam": lambda given: torch.optim.NAdam(given, lr=0.1),
    "groups": lambda given: torch.optim.AdamW(
        [{"params": given[:1], "lr": 0.1}, {"params": given[1:], "lr": 0.01, "weight_decay": 0.5}]
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_blocks_are_stepped_as_the_whole_is(name: str) -> None:
    for cuts in ((0, LENGTH), (0, 7, 8, 14, LENGTH)):
        found, kept, _ = in_blocks(MADE[name], cuts)
        assert np.allclose(found, whole(MADE[name]), rtol=1e-5, atol=1e-7)
        assert all(each.any() for each in kept.values())


def test_a_parameter_that_the_optimizer_does_not_know_stays_as_it_is() -> None:
    found, _, _ = in_blocks(lambda given: torch.optim.Adam(given[:2], lr=0.1), (0, 7, LENGTH))
    assert found[17:].tolist() == flat(parameters())[17:].tolist()
    assert (found[1:17] != flat(parameters())[1:17]).all()  # the first has a gradient of 0


def test_an_update_changes_nothing_so_that_an_attempt_may_be_aborted() -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors, lr=0.1)
    blocks = BlockOptimizer(optimizer, tensors)
    held = {name: np.zeros(7, np.float32) for name in blocks.moments}
    first = blocks.update(3, 10, GRADIENTS[0][3:10], held)
    again = blocks.update(3, 10, GRADIENTS[0][3:10], held)
    assert torch.equal(first[0], again[0])
    assert list(first[1]) == list(again[1]) == ["exp_avg", "exp_avg_sq"]
    assert all(map(torch.equal, first[1].values(), again[1].values()))
    assert flat(tensors).tobytes() == flat(parameters()).tobytes()
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == [id(each) for each in tensors]
    assert not optimizer.state
    assert blocks.state() == {"classes": [0, 0, 0], "counters": [None]}


def test_another_rank_goes_on_from_what_is_kept_to_the_same_bits() -> None:
    cuts = (0, 7, 14, LENGTH)
    expected, _, _ = in_blocks(MADE["groups"], cuts)
    later = GRADIENTS[2:]
    del GRADIENTS[2:]
    try:
        half = in_blocks(MADE["groups"], cuts)
    finally:
        GRADIENTS.extend(later)
    found, _, _ = in_blocks(MADE["groups"], cuts, start=2, before=half)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (torch.optim.LBFGS, "LBFGS cannot be divided"),
        (torch.optim.Adafactor, "Adafactor cannot be divided"),
        (torch.optim.Adagrad, "Adagrad has a state already"),
    ],
)
def test_what_does_not_work_element_by_element_is_refused(made: Any, said: str) -> None:
    tensors = parameters()
    with pytest.raises(LocalError, match=said):
        BlockOptimizer(made(tensors), tensors)


class Normed(torch.optim.Optimizer):
    """All gradients of a step divided by the norm of all of them."""

    def __init__(self, given: Any) -> None:
        super().__init__(given, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        gradients = [each.grad for group in self.param_groups for each in group["params"]]
        norm = torch.cat([each.reshape(-1) for each in gradients]).norm()
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["kept"] = each.grad.clone()
                each.data -= group["lr"] * each.grad / norm


class ByRows(torch.optim.Optimizer):
    """A vector is stepped by its elements, a matrix by the mean of each of its rows."""

    def __init__(self, given: Any) -> None:
        super().__init__(given, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["kept"] = each.grad.clone()
                each.data -= group["lr"] * (each.grad.mean(1, keepdim=True) if each.ndim == 2 else each.grad)


class CountedInGroups(torch.optim.Optimizer):
    """The number of steps is one of the groups' settings."""

    def __init__(self, given: Any) -> None:
        super().__init__(given, {"lr": 0.1, "steps": 0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for each in group["params"]:
                self.state[each]["kept"] = each.grad.clone()
                each.data -= group["lr"] / group["steps"] * each.grad


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Normed, "Normed cannot be divided: it does not work element by element"),
        (ByRows, "ByRows cannot be divided: it does not work element by element"),
        (CountedInGroups, "a step changes steps of its groups"),
    ],
)
def test_what_only_seems_to_work_element_by_element_is_refused_and_left_as_it_was(made: Any, said: str) -> None:
    tensors = parameters()
    optimizer = made(tensors)
    before = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    with pytest.raises(LocalError, match=said):
        BlockOptimizer(optimizer, tensors)
    assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == before
    assert not optimizer.state


HAD = [[True, True, False], [True, False, False], [False, True, True], [True, True, True]]


@pytest.mark.parametrize("name", MADE)
def test_a_parameter_without_gradient_is_passed_over_and_counts_its_own_steps(name: str) -> None:
    tensors, apart = parameters(), parameters()
    optimizer = MADE[name](tensors)
    blocks = BlockOptimizer(MADE[name](apart), apart)
    kept = {key: np.zeros(LENGTH, np.float32) for key in blocks.moments}
    for gradient, had in zip(GRADIENTS, HAD, strict=True):
        for tensor, part, there in zip(tensors, torch.tensor(gradient).split([12, 5, 2]), had, strict=True):
            tensor.grad = part.reshape(tensor.shape) if there else None
        optimizer.step()
        values, found = blocks.update(0, LENGTH, gradient, kept, had)
        kept = {key: each.numpy() for key, each in found.items()}
        blocks.progress = blocks.advanced(had)
        _set(apart, values.numpy())
    assert flat(apart).tobytes() == flat(tensors).tobytes()
    own = [{key: each for key, each in optimizer.state[tensor].items() if key not in kept} for tensor in tensors]
    mine = [blocks.progress.counters[number] for number in blocks.progress.classes]
    assert len(set(blocks.progress.classes)) == 3
    assert [*map(str, mine)] == [*map(str, own)]


def test_parameters_with_the_same_history_share_their_counters() -> None:
    tensors = parameters()
    blocks = BlockOptimizer(torch.optim.Adam(tensors, lr=0.1), tensors)
    for _ in range(3):
        blocks.progress = blocks.advanced([True, True, False])
    assert blocks.progress.classes == (0, 0, 1)
    first, second = blocks.progress.counters
    assert first is not None
    assert float(first["step"]) == 3.0
    assert second is None


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    tensors = parameters()
    optimizer = torch.optim.Adam(tensors)
    tensors[0].grad = torch.ones(3, 4)
    optimizer.step()
    with pytest.raises(LocalError, match="Adam has a state already"):
        BlockOptimizer(optimizer, tensors)


def test_one_without_moments_has_nothing_to_divide() -> None:
    tensors = parameters()
    assert BlockOptimizer(torch.optim.SGD(tensors, lr=0.1), tensors).moments == {}
