"""Widening to an accumulator and narrowing from it, by all bit patterns."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from scalar_oracle import SMALL, bits, drawn, overflows_to_nan, same_bits, special

from quicoll.numerics.dtypes import (
    FLOAT8_E4M3FN,
    FLOAT32,
    FLOAT64,
    DType,
    narrow,
)
from quicoll.numerics.reduce import Array, widen

ALL_16_BITS = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def every(dtype: DType) -> Array:
    """All bit patterns."""
    return np.arange(1 << 8 * dtype.itemsize, dtype=np.uint32).astype(dtype.bits)


def torch_of(values: Array, name: str) -> torch.Tensor:
    return torch.from_numpy(values).view(getattr(torch, name))


def widened(dtype: DType, values: Array, acc: DType) -> Array:
    out = np.empty(values.size, acc.storage)
    widen(values, dtype, acc, out)
    return out


def narrowed(acc: DType, values: Array, dtype: DType) -> Array:
    out = np.empty(values.size, dtype.storage)
    narrow(values, acc, dtype, out)
    return out


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("acc", [FLOAT32, FLOAT64], ids=str)
def test_all_narrow_floats_widen_as_torch_widens_them_and_come_back(dtype: DType, acc: DType) -> None:
    patterns = every(dtype)
    values = patterns.view(dtype.storage)
    theirs = torch_of(patterns, dtype.name).to(getattr(torch, acc.name)).numpy()
    wide = widened(dtype, values, acc)
    nan = np.greater(patterns & ((1 << (8 * dtype.itemsize - 1)) - 1), dtype.top)
    np.testing.assert_array_equal(np.isnan(wide), nan)
    same_bits(wide[~nan], theirs[~nan])
    same_bits(narrowed(acc, wide, dtype), np.where(nan, dtype.nan, patterns).astype(dtype.bits))
    for start in range(0, patterns.size, 1 << 6):  # finite stretches take another way than those that hold infinities
        piece = slice(start, start + (1 << 6))
        same_bits(widened(dtype, values[piece], acc)[~nan[piece]], wide[piece][~nan[piece]])


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_float32_narrows_as_torch_narrows_it(dtype: DType) -> None:
    """Random bits, and around every midpoint of two neighbours: the tie itself and one place to either side."""
    rng = np.random.default_rng(3)
    low = widened(dtype, every(dtype).view(dtype.storage), FLOAT64)
    low = low[np.isfinite(low)]
    ties = ((low[:-1] + low[1:]) / 2).astype(np.float32)
    values = np.concatenate(
        [
            rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32),
            rng.standard_normal(1 << 16, np.float32),
            np.nextafter(ties, np.float32(-np.inf)),
            ties,
            np.nextafter(ties, np.float32(np.inf)),
            special(FLOAT32),
            np.array([65504, 65519.996, 65520, 65536, 1e38, 3.3961775e38, 3.4e38], np.float32),
            np.array([448, 463.99997, 464, 464.00003, 480, 512, 57344, 61439.996, 61440, 65536], np.float32),
        ]
    )
    theirs = torch.from_numpy(values).to(getattr(torch, dtype.name))
    nan = np.isnan(values) | overflows_to_nan(dtype, values)
    ours = narrowed(FLOAT32, values, dtype)
    same_bits(ours[~nan], theirs.view(getattr(torch, f"uint{8 * dtype.itemsize}")).numpy()[~nan])
    assert (bits(ours)[nan] == dtype.nan).all()


def test_float8_overflow_is_that_of_ml_dtypes() -> None:
    values = np.array([448, 463.99997, 464, 464.00003, 480, 1e38, np.inf], np.float32)
    theirs = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    same_bits(narrowed(FLOAT32, values, FLOAT8_E4M3FN), theirs)
    same_bits(
        narrowed(FLOAT32, -values, FLOAT8_E4M3FN),
        np.where(np.isnan(values.astype(ml_dtypes.float8_e4m3fn)), theirs, theirs | 0x80),
    )


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_float64_narrows_by_one_rounding_and_not_by_two(dtype: DType) -> None:
    """A hair beside a tie: rounded to float32 first it would be the tie, and go to the even neighbour."""
    end = dtype.top + 1 if dtype.infinite else dtype.nan + 1
    positive = every(dtype)[:end]
    low = widened(dtype, positive.view(dtype.storage), FLOAT64)
    low[-1] = 2 * low[-2] - low[-3]  # where infinity, or NaN, begins, were the range to go on
    ties = (low[:-1] + low[1:]) / 2
    below, above = positive[:-1], positive[1:]
    even = np.where(below & 1, above, below)
    for sign, values in ((0, ties), (1 << (8 * dtype.itemsize - 1), -ties)):

        def signed(patterns: Array, sign: int = sign) -> Array:
            overflow = (patterns == dtype.nan) & ~np.array(dtype.infinite)  # the one NaN has no sign
            return patterns | np.where(overflow, 0, sign).astype(dtype.bits)

        same_bits(narrowed(FLOAT64, values, dtype), signed(even))
        same_bits(narrowed(FLOAT64, np.nextafter(values, 0), dtype), signed(below))
        same_bits(narrowed(FLOAT64, np.nextafter(values, np.copysign(np.inf, values)), dtype), signed(above))


def test_float64_narrows_to_float32_as_numpy_narrows_it() -> None:
    values = drawn(FLOAT64, 10_000, seed=5)
    with np.errstate(all="ignore"):
        values *= np.random.default_rng(5).standard_normal(10_000)
        theirs = values.astype(np.float32)
    ours = narrowed(FLOAT64, values, FLOAT32)
    nan = np.isnan(values)
    same_bits(ours[~nan], theirs[~nan])
    assert (bits(ours)[nan] == FLOAT32.nan).all()
