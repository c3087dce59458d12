"""What ranks compare of their data sets: whatever lies in memory, and nothing of the program's own code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from quicoll.data import Feed, Sampler
from quicoll.torch import contents
from quicoll.torch.contents import contents_of


def points(rows: int = 512) -> torch.Tensor:
    return torch.arange(rows * 4, dtype=torch.float32).reshape(rows, 4)


def changed(row: int = 137) -> torch.Tensor:
    found = points()
    found[row, 2] += 1.0
    return found


def fed(x: torch.Tensor) -> Feed:
    sampler = Sampler(len(x), batch_size=8, shards=4, seed=1)
    return Feed(sampler, lambda lists: DataLoader(TensorDataset(x), batch_sampler=lists))


MADE = {
    "a tensor": lambda x: x,
    "an array": lambda x: x.numpy(),
    "columns": lambda x: TensorDataset(x, torch.ones(len(x))),
    "a feed": fed,
    "small floats": lambda x: TensorDataset((x % 251).to(torch.bfloat16)),
    "a part": lambda x: Subset(TensorDataset(x), [7, 137, 3]),
    "several": lambda x: ConcatDataset([TensorDataset(torch.ones(2, 4)), TensorDataset(x[137:139])]),
    "a list": lambda x: [{"x": row, "name": f"row {number}"} for number, row in enumerate(x[130:140])],
    "pairs": lambda x: [(float(row[2]), b"y") for row in x[130:140]],
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_equal_data_is_described_alike_and_another_sample_is_seen(made: Any) -> None:
    generator = torch.get_rng_state()
    one, same, other = contents_of(made(points())), contents_of(made(points())), contents_of(made(changed()))
    assert one is not None
    assert one == same
    assert other is not None
    assert other != one
    assert torch.equal(generator, torch.get_rng_state())


def test_types_and_shapes_count_and_the_length_is_told() -> None:
    zeros = [torch.zeros(6, 2), torch.zeros(6, 2, dtype=torch.int32), torch.zeros(3, 4), torch.zeros(12)]
    found = [contents_of(each) for each in zeros]
    assert len(set(found)) == 4
    assert str(found[2]).startswith("3 samples, digest ")


def test_of_much_data_some_samples_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "WHOLE", 100)
    assert contents_of(points()) == contents_of(changed(136))
    for row in (0, 511):
        assert contents_of(points()) != contents_of(changed(row))


class Own(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read")


class OwnColumns(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read")


@pytest.mark.parametrize(
    "data",
    [Own(), OwnColumns(torch.ones(3)), Subset(Own(), [1]), ConcatDataset([Own()]), [object()], None, Sampler],
    ids=["own", "own columns", "a part", "several", "objects", "none", "a sampler"],
)
def test_what_is_the_programs_own_is_not_read(data: Any) -> None:
    assert contents_of(data) is None


def test_objects_in_an_array_are_not_read() -> None:
    assert contents_of(np.array([object()])) is None
