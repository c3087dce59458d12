"""The tensors of one operation, read as one flat array: put together where they are small, else where they are."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from quicoll.errors import LocalError
from quicoll.numerics.buffers import GATHERED_BYTES, argument
from quicoll.numerics.bundle import Bundle, Joined, bundle, leaves_like, results
from quicoll.numerics.dtypes import DTYPES

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "equal": [(2, 3)] * 4,
    "different": [(2, 3), (5,), (), (1, 1, 4)],
    "flat": [(3,), (1,), (7,)],
    "scalars": [()] * 3,
    "empty": [(0,), (2, 0)],
    "some empty": [(2, 0), (3,), (0,)],
    "one": [(2, 2)],
}


def tensors(kind: str, name: str, shapes: list[tuple[int, ...]]) -> list[Any]:
    rng, found = np.random.default_rng(1), []
    for shape in shapes:
        values = rng.integers(0, 2 if name == "bool" else 100, shape)
        if kind == "torch":
            found.append(torch.from_numpy(np.asarray(values)).to(getattr(torch, name)))
        else:
            found.append(np.asarray(values).astype(np.dtype(getattr(ml_dtypes, name, name))))
    return found


def one_by_one(values: list[Any]) -> bytes:
    return b"".join(argument(value).flat.tobytes() for value in values)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_small_list_is_one_array_of_its_elements_in_order(
    kind: str, name: str, shapes: list[tuple[int, ...]]
) -> None:
    values = tensors(kind, name, shapes)
    read = bundle(values)
    assert isinstance(read.flat, np.ndarray)
    assert not read.flat.flags.writeable
    assert read.flat.tobytes() == one_by_one(values)
    assert read.flat.dtype == read.dtype.storage == DTYPES[name].storage
    assert [each.tobytes() for each in read.flats] == [argument(value).flat.tobytes() for value in values]
    assert list(read.shapes) == shapes
    assert read.text == Bundle(read.first, read.flats, tuple(shapes), many=True).text
    assert read.elements == sum(each.size for each in read.flats)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_large_list_is_read_where_it_is(kind: str) -> None:
    half = GATHERED_BYTES // 8
    values: list[Any] = [np.ones(half, np.float32), np.zeros(half + 1, np.float32)]
    given = [torch.from_numpy(each) for each in values] if kind == "torch" else values
    read = bundle(given)
    assert isinstance(read.flat, Joined)
    assert [np.shares_memory(mine, theirs) for mine, theirs in zip(read.flats, values, strict=True)] == [True, True]
    smaller = bundle([given[0], given[1][1:]])
    assert isinstance(smaller.flat, np.ndarray)
    assert not np.shares_memory(smaller.flat, values[0])


def test_tensors_with_gaps_and_views_that_stand_for_other_values_are_read_as_they_look() -> None:
    wide = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    lists: list[list[Any]] = [
        [wide[:, ::2], wide.t()],
        [wide, wide[:, 1]],
        [numbers, numbers.conj()],
        [numbers.conj().imag, numbers.real],
        [wide.numpy()[::-1], wide.numpy().T],
        [wide.numpy(), wide.numpy()[:, 1]],
    ]
    for values in lists:
        assert bundle(values).flat[:].tobytes() == one_by_one(values)


def test_what_is_wrong_with_a_tensor_of_a_small_list_is_said() -> None:
    plain = torch.ones(3)
    for other, said in (
        (torch.ones(3, requires_grad=True), "requires grad"),
        (torch.ones(3, device="meta"), "device meta"),
        (torch.ones(3).to_sparse(), "layout"),
        (torch.ones(3, dtype=torch.float64), "differ"),
        (np.ones(3, np.float32), "differ"),
        (3.0, "item 1 of the list is a float"),
    ):
        with pytest.raises(LocalError, match=said):
            bundle([plain, other])
    for other, said in (
        (np.ones(3, ">f4"), "byte order"),
        (np.ones(3, np.float64), "differ"),
        (np.ma.masked_array(np.ones(3, np.float32)), "masked"),
    ):
        with pytest.raises(LocalError, match=said):
            bundle([np.ones(3, np.float32), other])


def test_parameters_are_taken_where_nothing_is_recorded() -> None:
    values = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(3))]
    with torch.no_grad():
        assert bundle(values).flat[:].tolist() == [1, 1, 0, 0, 0]
    with torch.inference_mode():
        assert bundle([torch.ones(2), torch.zeros(1)]).flat[:].tolist() == [1, 1, 0]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (), (0,), (3, 0)])
def test_leaves_of_one_tensor_each_are_viewed_at_once(kind: str, shape: tuple[int, ...]) -> None:
    values = tensors(kind, "float32", [shape] * 3)
    found = leaves_like(values)
    assert found is not None
    rows, like = found
    flats = list(rows)
    assert [each.tobytes() for each in flats] == [argument(value).flat.tobytes() for value in values]
    assert not like.many
    assert like.is_like(bundle(values[0]))
    assert like.text == bundle(values[0]).text


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_leaves_that_differ_or_are_lists_are_looked_at_one_by_one(kind: str) -> None:
    one, other = tensors(kind, "float32", [(2,), (3,)])
    assert leaves_like([one, other]) is None
    assert leaves_like([[one, other], [one, other]]) is None
    assert leaves_like([one, [one]]) is None


def test_a_bundle_of_other_elements_has_the_same_tensors() -> None:
    like = bundle([np.zeros((2, 2), np.float32), np.zeros(3, np.float32)])
    parts = [np.arange(4, dtype=np.float32), np.arange(3, dtype=np.float32)]
    for memory in (np.concatenate(parts), Joined(parts)):
        again = like.at(memory)
        assert again.is_like(like)
        assert [each.tolist() for each in again.flats] == [[0, 1, 2, 3], [0, 1, 2]]


def test_an_out_that_is_a_list_has_one_buffer_beside_it_and_each_of_its_tensors_none() -> None:
    given = [np.ones(1 << 18, np.float32) for _ in range(4)]
    out = [np.zeros_like(each) for each in given]
    nbytes = sum(each.nbytes for each in given)
    tracemalloc.start()
    try:
        place = results(out, bundle(given))
        place.flat[:] = 7
        assert place.commit()[3] is out[3]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all((each == 7).all() for each in out)
    assert nbytes <= most < 1.1 * nbytes
