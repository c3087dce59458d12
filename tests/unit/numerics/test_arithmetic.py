"""What one reduction of two numbers gives where implementations differ: NaN, zeros, subnormals, overflow, wrapping."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scalar_oracle import COMPLEX, FLOATS, ONE, SMALL, bits, drawn, reduced, same_bits

from quicoll.errors import LocalError
from quicoll.numerics.dtypes import (
    BOOL,
    COMPLEX64,
    COMPLEX128,
    DTYPES,
    FLOAT32,
    FLOAT64,
    DType,
    narrow,
    require_ieee,
)
from quicoll.numerics.reduce import ReduceOp


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_every_nan_becomes_the_one_even_from_a_single_leaf(dtype: DType, op: ReduceOp) -> None:
    sign = 1 << (8 * dtype.itemsize - 1)
    odd = np.array([dtype.top + 1, sign - 1, sign | dtype.nan, sign | (dtype.top + 1)], dtype.bits)
    values = np.tile(odd, 50).view(dtype.storage)
    for leaves in ([values], [values, values[::-1].copy()], [values, np.zeros(200, dtype.storage), values]):
        assert (bits(reduced(dtype, op, leaves)) == dtype.nan).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_minus_zero_is_below_plus_zero_in_every_place(dtype: DType) -> None:
    minus = 1 << (8 * dtype.itemsize - 1)
    for size in (1, 3, 17, 100):
        zeros = [np.full(size, pattern, dtype.bits).view(dtype.storage) for pattern in (0, minus)]
        for leaves in (zeros, zeros[::-1]):
            assert (bits(reduced(dtype, ReduceOp.MIN, leaves)) == minus).all()
            assert (bits(reduced(dtype, ReduceOp.MAX, leaves)) == 0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_subnormals_are_kept(dtype: DType) -> None:
    smallest = np.full(37, 1, dtype.bits).view(dtype.storage)
    assert (bits(reduced(dtype, ReduceOp.SUM, [smallest] * 3)) == 3).all()
    assert (bits(reduced(dtype, ReduceOp.MAX, [smallest, np.zeros(37, dtype.storage)])) == 1).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_overflow_is_infinity_without_a_warning_and_nan_where_there_is_none(dtype: DType) -> None:
    largest = np.full(19, dtype.top - dtype.infinite, dtype.bits).view(dtype.storage)
    expected = dtype.top if dtype.infinite else dtype.nan
    assert (bits(reduced(dtype, ReduceOp.SUM, [largest, largest])) == expected).all()
    assert (bits(reduced(dtype, ReduceOp.PRODUCT, [largest, largest])) == expected).all()


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_narrow_floats_are_rounded_once_at_the_end(dtype: DType) -> None:
    """One and many halves of its last place: rounded after each addition the sum would stay at one."""
    half_ulp = np.empty(1, dtype.storage)
    narrow(np.array([2.0**-dtype.digits]), FLOAT64, dtype, half_ulp)
    leaves = [
        np.full(9, pattern, dtype.bits).view(dtype.storage) for pattern in [ONE[dtype]] + [int(bits(half_ulp)[0])] * 4
    ]
    assert (bits(reduced(dtype, ReduceOp.SUM, leaves)) == ONE[dtype] + 2).all()


def test_float64_precision_keeps_what_float32_loses() -> None:
    leaves = [np.full(5, value, np.float32) for value in (2.0**24, 1.0, -(2.0**24))]
    assert (reduced(FLOAT32, ReduceOp.SUM, leaves) == 0).all()
    assert (reduced(FLOAT32, ReduceOp.SUM, leaves, precision="float64") == 1).all()


def test_avg_is_one_division_of_the_sum() -> None:
    leaves = [drawn(FLOAT32, 1000, seed=leaf) for leaf in range(7)]
    with np.errstate(all="ignore"):
        expected = reduced(FLOAT32, ReduceOp.SUM, leaves) / np.float32(7)
    finite = np.isfinite(expected)
    same_bits(reduced(FLOAT32, ReduceOp.AVG, leaves)[finite], expected[finite])


def test_integers_wrap_and_their_avg_rounds_down() -> None:
    def of(name: str, op: ReduceOp, *values: int) -> int:
        dtype = DTYPES[name]
        return int(reduced(dtype, op, [np.full(3, value, dtype.storage) for value in values])[1])

    assert of("int8", ReduceOp.SUM, 127, 1) == -128
    assert of("uint8", ReduceOp.PRODUCT, 16, 17) == 16
    assert of("int8", ReduceOp.AVG, 127, 127, 127) == 127
    assert of("int8", ReduceOp.AVG, -1, 0) == -1
    assert of("int32", ReduceOp.AVG, -7, 0, 0) == -3
    assert of("uint64", ReduceOp.MAX, 1, (1 << 64) - 1) == (1 << 64) - 1


@pytest.mark.parametrize("size", [1, 5, 80])
def test_a_true_that_is_not_one_counts_as_true(size: int) -> None:
    odd = np.resize(np.array([2, 1, 0, 255], np.uint8), size).view(bool)
    truth, ones = odd != 0, np.ones(size, bool)
    for op in (ReduceOp.BAND, ReduceOp.MIN):
        for leaves in ([odd], [odd, ones], [ones, odd]):
            assert reduced(BOOL, op, leaves).view(np.uint8).tolist() == truth.tolist()
    for op in (ReduceOp.BOR, ReduceOp.MAX):
        assert reduced(BOOL, op, [odd, ~ones]).view(np.uint8).tolist() == truth.tolist()
    assert reduced(BOOL, ReduceOp.BXOR, [odd, ones]).view(np.uint8).tolist() == (~truth).tolist()


@pytest.fixture
def _flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("_flushing")
def test_a_thread_that_flushes_subnormals_is_refused() -> None:
    with pytest.raises(LocalError, match="flushes subnormal"):
        reduced(FLOAT32, ReduceOp.SUM, [np.ones(1, np.float32)])


def test_an_ordinary_thread_is_accepted() -> None:
    require_ieee()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_torch_by_hand_gives_the_same_bits(name: str) -> None:
    """Someone who checks us with torch's own operations, on the same tree, finds no difference."""
    generator = torch.Generator().manual_seed(7)
    dtype, theirs = DTYPES[name], getattr(torch, name)
    wide = torch.float64 if name == "float64" else torch.float32
    tensors = [torch.randn(5000, generator=generator).to(theirs) for _ in range(6)]
    a, b, c, d, e, f = (t.to(wide) for t in tensors)
    expected = ((((a + b) + (c + d)) + (e + f)) / 6).to(theirs)
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    leaves = [t.view(as_int).numpy().view(dtype.storage) for t in tensors]
    same_bits(reduced(dtype, ReduceOp.AVG, leaves), expected.view(as_int).numpy())


def test_a_complex_product_is_six_rounded_operations_and_saves_no_infinity() -> None:
    def product_of(a: complex, b: complex) -> complex:
        return complex(reduced(COMPLEX128, ReduceOp.PRODUCT, [np.array([a] * 5), np.array([b] * 5)])[3])

    assert product_of(1 + 2j, 3 + 4j) == -5 + 10j
    third = 1 / 3  # a fused multiply-add would leave the rounding error of third * third here
    assert product_of(complex(third, third), complex(third, third)) == complex(0, 2 * (third * third))
    infinite = product_of(complex(np.inf, 0), 1 + 0j)
    assert infinite.real == np.inf
    assert np.isnan(infinite.imag)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_a_part_that_is_nan_leaves_the_other_alone(dtype: DType) -> None:
    assert dtype.part is not None
    odd = np.array([dtype.part.nan + 5, 0], dtype.bits).view(dtype.part.storage)
    odd[1] = 2.5
    for value, expected in (
        (odd, [dtype.part.nan, odd.view(dtype.bits)[1]]),
        (odd[::-1], [odd.view(dtype.bits)[1], dtype.part.nan]),
    ):
        leaf = np.tile(value, 7).view(dtype.storage)
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
            assert bits(reduced(dtype, op, [leaf])).reshape(7, 2).tolist() == [expected] * 7


def test_complex_avg_divides_both_parts() -> None:
    leaves = [np.full(3, value, np.complex64) for value in (1 + 2j, 2 + 2j, 3 + 3j)]
    assert reduced(COMPLEX64, ReduceOp.AVG, leaves).tolist() == [complex(2, np.float32(7) / np.float32(3))] * 3
