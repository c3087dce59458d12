"""A worker's divided state in checkpoints: read by a rank's own manifest, or by one that another rank has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll import checkpoint
from quicoll.errors import CheckpointError
from quicoll.train.divided import Divide, Moments

if TYPE_CHECKING:
    from quicoll.state.sharded import PieceIndex

SIZE, STEP = 24, 8


class Task:
    """What keeps one number for each element; the worker's other methods are not asked for."""

    def divide(self) -> Mapping[str, str]:
        return {"m": "float32"}

    def update(self, *given: Any) -> Any:
        raise AssertionError("no step is made here")

    def advance(self, *given: Any) -> Any:
        raise AssertionError("no step is made here")


def moments(place: Path | None) -> Moments:
    task: Any = Task()
    return Moments(task, Divide(blocks=4), SIZE, place)


def saved(place: Path, step: int = STEP) -> np.ndarray[Any, np.dtype[np.float32]]:
    values = np.arange(SIZE, dtype=np.float32) + step
    checkpoint.save(place, step=step, tensors={"divided.m": values})
    return values


def index_of(found: Moments) -> PieceIndex:
    index = found.sharded.index
    assert index is not None
    return index


def read(found: Moments, start: int = 6, stop: int = 12) -> list[float]:
    assert found.sharded.read is not None
    return [float(each) for each in np.asarray(found.sharded.read(STEP, "m", start, stop))]


def test_elements_are_read_by_the_manifest_of_their_step(tmp_path: Path) -> None:
    saved(tmp_path, STEP - 4)
    assert read_error(moments(tmp_path)) == f"there is no checkpoint of step {STEP}: {tmp_path}"
    values = saved(tmp_path)
    found = moments(tmp_path)
    assert read(found) == values[6:12].tolist()
    assert index_of(found).of_step(STEP) is not None
    assert index_of(found).of_step(STEP + 1) is None


def test_where_the_manifest_is_on_another_disk_the_pieces_are_read_by_that_one(tmp_path: Path) -> None:
    values = saved(tmp_path / "here")
    index = index_of(moments(tmp_path / "here")).of_step(STEP)
    assert index is not None
    for manifest in (tmp_path / "here").glob("*.manifest.json"):
        manifest.unlink()
    found = moments(tmp_path / "here")
    assert index_of(found).of_step(STEP) is None
    assert "there is no checkpoint" in read_error(found)
    index_of(found).take(STEP, index)
    assert read(found) == values[6:12].tolist()
    without = moments(tmp_path / "empty")
    index_of(without).take(STEP, index)
    assert "No such file" in read_error(without)


def test_a_manifest_of_another_step_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    found = moments(tmp_path)
    index = index_of(found).of_step(STEP)
    assert index is not None
    with pytest.raises(CheckpointError, match=f"the manifest that came is of step {STEP}, not 9"):
        index_of(found).take(9, index)
    with pytest.raises(CheckpointError):
        index_of(found).take(STEP, index[:-9] + bytes(9))


def test_without_a_directory_nothing_is_read() -> None:
    found = moments(None)
    assert index_of(found).of_step(STEP) is None
    assert read_error(found) == "no directory of checkpoints is given"


def read_error(found: Moments) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(found)
    return str(caught.value)
