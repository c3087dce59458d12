"""Who steps an optimizer and a scheduler: its owner while it is held, and what is left of that afterwards."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from quicoll.errors import LocalError
from quicoll.torch.ownership import Ownership


def held() -> tuple[torch.nn.Parameter, torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR, Ownership]:
    value = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([value], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ownership = Ownership(optimizer, scheduler)
    ownership.hold()
    ownership.hold()
    value.grad = torch.ones(3)
    return value, optimizer, scheduler, ownership


def test_a_step_by_others_changes_nothing_and_one_by_the_owner_does() -> None:
    value, optimizer, scheduler, ownership = held()
    with pytest.raises(LocalError, match=r"remove optimizer\.step\(\) from the loop \(a GradScaler calls it"):
        optimizer.step()
    with pytest.raises(LocalError, match=r"remove scheduler\.step\(\) from the loop\. The call"):
        scheduler.step()
    assert torch.equal(value, torch.ones(3))
    assert scheduler.get_last_lr() == [0.5]
    with ownership.changing():
        optimizer.step()
        scheduler.step()
    assert torch.equal(value, torch.full((3,), 0.5))
    assert scheduler.get_last_lr() == [0.05]
    with pytest.raises(LocalError):
        optimizer.step()


def test_a_scaler_that_steps_the_optimizer_is_refused() -> None:
    value, optimizer, _, _ = held()
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    scaler.scale(torch.tensor(1.0))
    with pytest.raises(LocalError, match="GradScaler"):
        scaler.step(optimizer)
    assert torch.equal(value, torch.ones(3))


def test_nothing_is_left_of_it_when_they_are_released_or_the_owner_has_raised() -> None:
    _, optimizer, scheduler, ownership = held()
    ownership.release()
    ownership.release()
    assert type(scheduler) is torch.optim.lr_scheduler.StepLR
    optimizer.step()
    scheduler.step()
    ownership.hold()
    with pytest.raises(KeyError), ownership.unless_raised():
        raise KeyError
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.005)]


def test_a_scheduler_that_is_held_has_the_state_and_the_copies_that_it_had() -> None:
    _, _, scheduler, _ = held()
    assert sorted(scheduler.state_dict()) == sorted(
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 1).state_dict()
    )
    for copied in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))):  # noqa: S301 - its own
        assert type(copied) is torch.optim.lr_scheduler.StepLR
        assert copied.state_dict() == scheduler.state_dict()
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
