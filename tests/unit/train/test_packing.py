"""A task's state in a checkpoint file: nested states come back as they were, plain ones are written as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quicoll import checkpoint
from quicoll.errors import CheckpointError, LocalError
from quicoll.state.tree import flatten
from quicoll.train.packing import SKELETON, packed_state, unpacked_state


def kept(directory: Path, state: Any) -> Any:
    packed = packed_state(state)
    checkpoint.save(directory, step=3, tensors=packed.tensors, metadata=packed.metadata)
    found = checkpoint.latest(directory)
    assert found is not None
    return unpacked_state(found)


def test_names_and_tensors_are_written_as_they_are(tmp_path: Path) -> None:
    state = {"w": np.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    packed = packed_state(state)
    assert (packed.metadata, packed.digest) == ({}, checkpoint.digest(state))
    assert flatten(kept(tmp_path, state)).digest == flatten(state).digest


def test_the_state_of_an_optimizer_comes_back_from_a_file(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.square().sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    state = {"w": parameter, "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "n": 3}
    back = kept(tmp_path, state)
    assert flatten(back).digest == flatten(state).digest
    assert sorted(packed_state(state).tensors) == ["optimizer.state.0.momentum_buffer", "w"]
    torch.optim.SGD([parameter], lr=0.5, momentum=0.9).load_state_dict(back["optimizer"])


def test_paths_that_are_the_same_are_told_apart(tmp_path: Path) -> None:
    state = {"a.b": np.ones(1), "a": {"b": np.zeros(2)}}
    assert flatten(kept(tmp_path, state)).digest == flatten(state).digest


def test_the_digest_is_of_the_values_too() -> None:
    digests = {packed_state({"w": np.ones(1), "n": n}).digest for n in (1, 2, 1.0)}
    assert len(digests) == 3
    assert (
        packed_state({"w": np.ones(1), "n": 1}).digest
        == packed_state({"n": 1, "w": torch.ones(1, dtype=torch.float64)}).digest
    )


@pytest.mark.parametrize("damage", [{SKELETON: "?"}, {"state.names": "[1]"}, {"state.names": "[]"}])
def test_a_file_of_another_program_is_an_error_that_names_it(tmp_path: Path, damage: dict[str, str]) -> None:
    packed = packed_state({"w": np.ones(1), "n": 3})
    path = checkpoint.save(tmp_path, step=1, tensors=packed.tensors, metadata={**packed.metadata, **damage})
    with pytest.raises(CheckpointError, match="no state of a task") as caught:
        unpacked_state(checkpoint.load(path))
    assert caught.value.path == str(path)


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(LocalError, match="the state's 'n'"):
        packed_state({"n": object()})
