"""To and from torch.distributed.checkpoint: the same bits, and no pickle of a stranger is read unasked."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from quicoll import checkpoint
from quicoll.checkpoint import dcp
from quicoll.errors import CheckpointError, LocalError

# torch says so of its own way of saving in one process, which is meant here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

TENSORS = {
    "w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "half": torch.tensor([-0.0, 1.5], dtype=torch.bfloat16),
    "numbers": np.arange(5),
    "one": np.float64(2),
}


def test_there_and_back_gives_the_same_bits_and_metadata(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "ours", step=7, tensors=TENSORS, metadata={"epoch": "2"})
    dcp.export(checkpoint.load(path), tmp_path / "dcp")
    read = {name: torch.empty_like(torch.as_tensor(value)) for name, value in TENSORS.items()}
    torch_dcp.load(read, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)  # by torch alone
    assert checkpoint.digest(read) == checkpoint.digest(TENSORS)
    back = checkpoint.load(dcp.import_(tmp_path / "dcp", tmp_path / "again", step=7, trust_pickle=True))
    assert (back.step, back.metadata) == (7, {"epoch": "2"})
    assert back.digest == checkpoint.digest(TENSORS)


def test_what_torch_saved_itself_is_imported(tmp_path: Path) -> None:
    saved = {"a": torch.ones(3, 2), "b": torch.zeros(0)}
    torch_dcp.save(saved, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    back = checkpoint.load(dcp.import_(tmp_path / "dcp", tmp_path / "ours", step=1, trust_pickle=True))
    assert (back.digest, back.metadata) == (checkpoint.digest(saved), {})


class Bomb:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (Path.touch, (self.path,))


def test_nothing_is_unpickled_unless_the_caller_says_so(tmp_path: Path) -> None:
    folder, trace = tmp_path / "dcp", tmp_path / "trace"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(LocalError, match="trust_pickle"):
        dcp.import_(folder, tmp_path / "ours", step=1)
    assert not trace.exists()


def test_what_cannot_be_taken_is_named(tmp_path: Path) -> None:
    torch_dcp.save({"w": torch.ones(2), "epoch": 3}, checkpoint_id=str(tmp_path / "values"), no_dist=True)
    with pytest.raises(LocalError, match=r"'epoch'.*is no tensor"):
        dcp.import_(tmp_path / "values", tmp_path / "ours", step=1, trust_pickle=True)
    with pytest.raises(CheckpointError, match="torch cannot read it"):
        dcp.import_(tmp_path / "missing", tmp_path / "ours", step=1, trust_pickle=True)
    found = checkpoint.load(checkpoint.save(tmp_path / "ours", step=1, tensors={"w": np.ones(2)}))
    with pytest.raises(LocalError, match="is not empty"):
        dcp.export(found, tmp_path / "values")
