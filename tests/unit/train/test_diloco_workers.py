"""Logical workers as rows and as memory of an attempt: nothing is lost on the way, and nothing of an attempt stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quicoll.errors import LocalError
from quicoll.train.diloco_workers import WorkerRows, in_place_of, kept_by, step_apart


def two_parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(6.0).reshape(2, 3)), nn.Parameter(torch.tensor([0.5, -0.5]))]


def gradients() -> list[torch.Tensor]:
    return [torch.full((2, 3), 0.25), torch.tensor([1.0, -1.0])]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=0.1, amsgrad=True),
    "Adagrad": lambda given: torch.optim.Adagrad(given, lr=0.1),
    "RMSprop": lambda given: torch.optim.RMSprop(given, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_worker_that_was_a_row_in_between_goes_on_as_one_that_was_not(name: str) -> None:
    plain = two_parameters()
    optimizer = OPTIMIZERS[name](plain)
    mine = two_parameters()
    inner = OPTIMIZERS[name](mine)
    rows = WorkerRows(mine, [0, 1], kept_by(inner, mine), [6, 2])
    row = torch.zeros(rows.length)
    for number in range(3):
        for parameter, gradient in zip(plain, gradients(), strict=True):
            parameter.grad = gradient
        optimizer.step()
        worker = rows.worker(7, row)
        with in_place_of(mine, worker.values, inner, worker.state) as state:
            for parameter, gradient in zip(mine, gradients(), strict=True):
                parameter.grad = gradient
            inner.step()
        worker.state = state
        worker.residuals[1] += number
        row = torch.full((rows.length,), float("nan"))  # all of it is written
        rows.write(worker, row)
        assert all(map(torch.equal, worker.values, plain))
        assert all(map(torch.equal, mine, two_parameters())), "the job's are as they were"
    assert rows.worker(7, row).residuals[1].tolist() == [3.0, 3.0]
    assert rows.worker(7, row).residuals[0].tolist() == [0.0] * 6


def test_a_row_of_zeros_is_a_worker_that_has_the_parameters_of_the_job_and_no_state() -> None:
    mine = two_parameters()
    rows = WorkerRows(mine, [0, 1], kept_by(OPTIMIZERS["AdamW"](mine), mine), [])
    worker = rows.worker(0, torch.zeros(rows.length))
    assert all(map(torch.equal, worker.values, mine))
    assert worker.state is None
    worker.values[0].zero_()
    assert mine[0].abs().sum() > 0, "in memory of its own"


def test_a_worker_that_has_not_stepped_keeps_what_it_has_and_the_optimizer_as_it_was_made() -> None:
    mine = two_parameters()
    rows = WorkerRows(mine, [1], kept_by(OPTIMIZERS["AdamW"](mine), mine), [8])
    worker = rows.worker(0, torch.zeros(rows.length))
    worker.values[1] += 1
    worker.residuals[0] += 2
    row = torch.full((rows.length,), float("nan"))
    rows.write(worker, row)
    again = rows.worker(0, row)
    assert again.state is None
    assert torch.equal(again.values[1], mine[1] + 1)
    assert again.residuals[0].tolist() == [2.0] * 8


def test_parameters_that_are_not_carried_are_those_of_the_job() -> None:
    mine = two_parameters()
    rows = WorkerRows(mine, [1], kept_by(OPTIMIZERS["SGD"](mine), mine), [])
    assert rows.length == 2 + 2
    worker = rows.worker(0, torch.zeros(rows.length))
    worker.values[0] += 1
    row = torch.zeros(rows.length)
    rows.write(worker, row)
    assert torch.equal(rows.worker(0, row).values[0], mine[0])


def test_a_step_apart_changes_neither_parameters_nor_the_optimizer() -> None:
    mine = two_parameters()
    optimizer = OPTIMIZERS["momentum"](mine)
    for parameter, gradient in zip(mine, gradients(), strict=True):
        parameter.grad = gradient
    optimizer.step()
    before = [each.detach().clone() for each in mine]
    momentum = [optimizer.state[each]["momentum_buffer"].clone() for each in mine]
    values, state = step_apart(optimizer, mine[:1], gradients()[:1])
    assert all(map(torch.equal, mine, before))
    assert all(
        torch.equal(optimizer.state[each]["momentum_buffer"], its) for each, its in zip(mine, momentum, strict=True)
    )
    assert all(each.grad is None for each in mine)
    mine[0].grad = gradients()[0]
    optimizer.step()
    assert torch.equal(values[0], mine[0])
    assert torch.equal(state[0]["momentum_buffer"], optimizer.state[mine[0]]["momentum_buffer"])


def test_an_error_in_the_block_puts_back_what_was_there() -> None:
    mine = two_parameters()
    optimizer = OPTIMIZERS["momentum"](mine)
    held, memory = optimizer.state, [each.data_ptr() for each in mine]

    def of_a_user() -> None:
        with in_place_of(mine, [each.detach() + 1 for each in mine], optimizer):
            mine[0].grad = gradients()[0]
            optimizer.step()
            raise ValueError("of the loss")

    with pytest.raises(ValueError, match="of the loss"):
        of_a_user()
    assert optimizer.state is held
    assert [each.data_ptr() for each in mine] == memory
    assert all(each.grad is None for each in mine)
    assert not held


class Counting(torch.optim.SGD):
    """Its step moves a setting of its groups."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


class InHalves(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            self.state[each]["half"] = torch.zeros(2, dtype=torch.bfloat16)


class WithACount(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            self.state[each]["count"] = 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Counting, "a step of Counting changes k of its groups"),
        (InHalves, "keeps half, a torch.bfloat16"),
        (WithACount, "keeps count, a int"),
        (torch.optim.LBFGS, "LBFGS cannot be used here"),
    ],
)
def test_an_optimizer_whose_state_is_no_row_is_refused_by_name(kind: Any, words: str) -> None:
    mine = two_parameters()[:1]
    with pytest.raises(LocalError, match=words):
        kept_by(kind(mine, lr=0.1), mine)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    mine = two_parameters()
    with pytest.raises(LocalError, match="SGD has other parameters"):
        kept_by(OPTIMIZERS["SGD"](mine[:1]), mine)
