"""How a torch program's state is read and written."""

from __future__ import annotations

import pytest
import torch

from quicoll.data import Sampler
from quicoll.errors import LocalError
from quicoll.torch import state_of
from quicoll.train.packing import packed_state


def made(seed: int, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, object, Sampler]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler, Sampler(32, batch_size=8, shards=4, seed=seed)


def test_what_one_program_saves_another_loads() -> None:
    source, target = state_of(*made(1, 3)), state_of(*made(2, 0))
    saved = source.save()
    assert list(saved) == ["model", "optimizer", "scheduler", "data"]
    target.load(saved)
    assert packed_state(target.save()).digest == packed_state(saved).digest


def test_others_go_by_their_names() -> None:
    model, optimizer, *_ = made(1, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    assert list(state_of(model, optimizer, average=average).save()) == ["model", "optimizer", "average"]


def test_what_has_no_state_is_named() -> None:
    model, *_ = made(1, 0)
    with pytest.raises(LocalError, match=r"ema is a float, without state_dict"):
        state_of(model, ema=0.9)
    with pytest.raises(LocalError, match=r"sampler is a quicoll\.data\.Sampler or Feed, not a list"):
        state_of(model, sampler=[])


def test_a_state_of_other_parts_or_data_changes_nothing() -> None:
    model, optimizer, _, sampler = made(1, 1)
    state = state_of(model, optimizer, sampler=sampler)
    before = packed_state(state.save()).digest
    with pytest.raises(LocalError, match="here it is of model, optimizer, data"):
        state.load(state_of(model).save())
    other = state_of(made(2, 0)[0], optimizer, sampler=Sampler(33, batch_size=8, shards=4, seed=1)).save()
    with pytest.raises(LocalError, match="length is 32 here and was 33"):
        state.load(other)
    assert packed_state(state.save()).digest == before
