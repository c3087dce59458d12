"""A small all_reduce that comes again takes over what the first came to: it is what making it anew gives."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from quicoll.collectives.base import GroupView
from quicoll.collectives.reductions import AllReduce, all_reduce_again
from quicoll.collectives.shards import Leaves, Shards
from quicoll.collectives.subgroups import WORLD
from quicoll.errors import LocalError
from quicoll.local.layout import SMALL_BYTES
from quicoll.numerics.canonical_order import leaves_of
from quicoll.numerics.dtypes import DTYPES

TORCH_TYPES = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool", "complex64"]
NUMPY_TYPES = ["float32", "float64", "float16", "int8", "uint16", "int64", "bool", "complex128"]


def place(*, near: bool = False) -> GroupView:
    return GroupView(7, WORLD, 1, (0, 1, 2), (0, 0, 0), 64, near=near)


def made(here: GroupView, x: Any, op: str = "sum", **options: Any) -> AllReduce:
    """As `Group.all_reduce` makes the first."""
    operation = AllReduce(here, x, op=op, **options)
    operation.remember(op)
    return operation


def again(here: GroupView, x: Any, op: str = "sum", out: Any = None) -> AllReduce:
    operation = all_reduce_again(here, x, x.shape, op, out)
    assert operation is not None
    return operation


def seen(operation: AllReduce) -> dict[str, Any]:
    """All that the engine, the vote and the audit take of it."""
    issued = operation.issued()
    if operation.announced and not operation.sealed:
        operation.seal()
    call = operation.call()
    return {
        "call": (call.name, call.signature, call.counts, call.gathers, call.measures, call.ranks, call.watched),
        "given": call.given,
        "sizes": operation.sizes(),
        "payload": operation.payload(),
        "text": (operation.text(), operation.terms(), operation.called),
        "inputs": [(number, bytes(leaf[:])) for number, leaf in operation.inputs()],
        "issued": (issued.group, issued.op, issued.agreed, issued.terms, issued.members),
        "flags": (operation.shared, operation.holds, operation.in_place, operation.divides, operation.feedback),
        "total": operation.total,
        "reaches": operation.reaches(),
    }


def ended(operation: AllReduce, payloads: list[bytes]) -> Any:
    operation.combine(payloads, [(), (), ()])
    operation.bits()
    return operation.result()


def same(one: Any, other: Any) -> bool:
    assert type(one) is type(other)
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)  # no nan among these
    return bool(one.tobytes() == other.tobytes())


def ops_of(dtype: str) -> list[str]:
    return ["bor", "band"] if dtype == "bool" else ["sum", "product"] if "complex" in dtype else ["sum", "avg", "max"]


def valued(kind: str, dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    numbers = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 5, shape)
    return numbers.astype(dtype) if kind == "numpy" else torch.from_numpy(numbers).to(getattr(torch, dtype))


CASES = [("numpy", dtype) for dtype in NUMPY_TYPES] + [("torch", dtype) for dtype in TORCH_TYPES]


@pytest.mark.parametrize("near", [False, True], ids=["announced", "near"])
@pytest.mark.parametrize("shape", [(3,), (), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_one_that_comes_again_is_what_making_it_anew_gives(
    kind: str, dtype: str, shape: tuple[int, ...], near: bool
) -> None:
    assert dtype in DTYPES
    for op in ops_of(dtype):
        if op == "avg" and "int" in dtype:
            continue
        here = place(near=near)
        made(here, valued(kind, dtype, shape, 0), op)
        x = valued(kind, dtype, shape, 1)
        repeated, anew = again(here, x, op), AllReduce(here, x, op=op)
        assert seen(repeated) == seen(anew)
        payloads = [valued(kind, dtype, shape, seed) for seed in (2, 1, 3)]
        given = [AllReduce(here, each, op=op).payload() for each in payloads]
        assert same(ended(repeated, given), ended(anew, given))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_elements_of_any_strides_are_taken_in_their_order(kind: str) -> None:
    here = place()
    made(here, valued(kind, "float32", (3, 2), 0))
    wide = np.arange(24, dtype=np.float32).reshape(6, 4)
    source: Any = wide if kind == "numpy" else torch.from_numpy(wide)
    for x in (source[::2, ::2], source[:3, 1:3], source[:2, :3].T):
        assert again(here, x).payload() == np.ascontiguousarray(x).tobytes()
        assert seen(again(here, x)) == seen(AllReduce(here, x))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_what_it_gives_is_a_copy_that_no_later_change_reaches(kind: str) -> None:
    here = place()
    made(here, valued(kind, "float32", (3,), 0))
    x = valued(kind, "float32", (3,), 1)
    before = x.tolist()
    operation = again(here, x)
    x[:] = 9
    assert np.frombuffer(operation.payload(), np.float32).tolist() == before
    assert [leaf[:].tolist() for leaf in operation.given_leaves] == [before]


def test_nothing_of_the_first_tensors_memory_is_kept_or_reached() -> None:
    here = place()
    x = np.full(3, 7, np.float32)
    made(here, x)
    operation = again(here, np.zeros(3, np.float32))
    assert not any(np.shares_memory(x, np.asarray(each)) for each in (operation.like.flat, operation.like.first.flat))
    assert "x" not in vars(operation)


def test_what_has_to_be_looked_at_is_not_taken_for_the_same() -> None:
    here = place()
    for dtype in (torch.float32, torch.complex64):
        made(here, torch.ones(2, dtype=dtype))
    made(here, np.ones(2, np.float32))
    lazily = torch.tensor([1 + 2j, 3 + 4j])
    strange: list[Any] = [
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, device="meta"),
        torch.ones(2).to_sparse(),
        lazily.conj(),
        lazily.conj().imag,
        torch._efficientzerotensor(2),
        np.ma.masked_array(np.ones(2, np.float32)),
        np.ones(2, ">f4"),
        np.float32(1),
        [np.ones(2, np.float32)],
        None,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that its sparse tensors may change
        for x in strange:
            assert all_reduce_again(here, x, getattr(x, "shape", None), "sum") is None
    assert all_reduce_again(here, torch.ones(2), (2,), ["sum"]) is None
    assert all_reduce_again(here, torch.ones(2), (2,), "max") is None


def test_elements_of_any_shape_come_again_as_one_dimension() -> None:
    here = place()
    made(here, torch.ones(6))
    operation = all_reduce_again(here, torch.arange(6.0).reshape(2, 3).T, (6,), "sum")
    assert operation is not None
    assert seen(operation)["payload"] == np.array([0, 3, 1, 4, 2, 5], np.float32).tobytes()
    assert operation.signature == AllReduce(here, torch.ones(6)).signature
    assert ended(operation, [np.ones(6, np.float32).tobytes()] * 3).tolist() == [3.0] * 6


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_out_is_checked_each_time_and_written_at_the_end(kind: str) -> None:
    here = place()
    x = valued(kind, "float32", (3,), 0)
    made(here, x)
    out = valued(kind, "float32", (3,), 1)
    before = out.tolist()
    operation = again(here, x, out=out)
    payloads = [AllReduce(here, x).payload()] * 3
    operation.combine(payloads, [(), (), ()])
    assert out.tolist() == before
    assert operation.result() is out
    assert out.tolist() == (x * 3).tolist()
    assert seen(again(here, x, out=out)) == seen(AllReduce(here, x, out=out))
    for wrong in (out[:2], valued(kind, "float64", (3,), 0), "out"):
        with pytest.raises(LocalError, match="out"):
            all_reduce_again(here, x, x.shape, "sum", wrong)


def test_large_ones_lists_leaves_and_what_is_no_plain_tensor_are_made_anew() -> None:
    here = place(near=True)
    most, more = SMALL_BYTES // 4, SMALL_BYTES // 4 + 1
    mine = leaves_of(here.rank, 3, 5)
    leaf = np.ones(2)
    with torch.no_grad():
        for x in (
            np.ones(more, np.float32),
            [leaf],
            Leaves(Shards(5, mine.start, len(mine), here.view_id), [leaf] * len(mine)),
            np.float32(1),
            torch.nn.Parameter(torch.ones(2)),
        ):
            made(here, x)
            assert len(here.repeats) == 0
    made(here, np.ones(most, np.float32))
    assert len(here.repeats) == 1
    elsewhere = place()
    made(elsewhere, np.ones(257, np.float32))
    assert len(elsewhere.repeats) == 0
    made(elsewhere, np.ones(256, np.float32))
    assert len(elsewhere.repeats) == 1
