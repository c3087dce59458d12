"""Reductions one element at a time, with scalars, no vector loop, no block; and the values that they are tried with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from quicoll.errors import LocalError
from quicoll.numerics.dtypes import (
    BFLOAT16,
    BOOL,
    COMPLEX64,
    COMPLEX128,
    DTYPES,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    DType,
    NumberKind,
    narrow,
)
from quicoll.numerics.reduce import REDUCE_BLOCK, Array, ReduceOp, accumulator, reduce_tree

__all__ = [
    "COMPLEX",
    "FLOATS",
    "INTEGERS",
    "ONE",
    "PAIRS",
    "SMALL",
    "Leaf",
    "bits",
    "canonical",
    "defined",
    "drawn",
    "fold",
    "number",
    "one_of_two",
    "oracle",
    "overflows_to_nan",
    "pair",
    "reduced",
    "rounded",
    "same_bits",
    "special",
]

SMALL = [FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT16, BFLOAT16]
COMPLEX = [COMPLEX64, COMPLEX128]
FLOATS = [dtype for dtype in DTYPES.values() if dtype.kind is NumberKind.FLOAT]
INTEGERS = [dtype for dtype in DTYPES.values() if dtype.kind in (NumberKind.INT, NumberKind.UINT)]


def defined(dtype: DType, op: ReduceOp) -> bool:
    try:
        accumulator(dtype, op)
    except LocalError:
        return False
    return True


PAIRS = [(dtype, op) for dtype, op in product(DTYPES.values(), ReduceOp) if defined(dtype, op)]


@dataclass(frozen=True)
class Leaf:
    values: Array
    wide: bool = False


def canonical(leaves: list[Leaf]) -> Any:
    """The tree, from its definition."""
    if len(leaves) == 1:
        return leaves[0]
    m = 1
    while 2 * m < len(leaves):
        m *= 2
    return canonical(leaves[:m]), canonical(leaves[m:])


def reduced(
    dtype: DType,
    op: ReduceOp,
    leaves: list[Array],
    *,
    precision: Any = "default",
    block: int = REDUCE_BLOCK,
    told: list[Array] | None = None,
) -> Array:
    """told: gets the result's pieces, as they stand when they are said to be done."""
    out = np.empty(leaves[0].size, dtype.storage)

    def after(a: int, b: int) -> None:
        assert told is not None
        assert a == sum(piece.size for piece in told)
        told.append(out[a:b].copy())

    reduce_tree(
        canonical([Leaf(values) for values in leaves]),
        lambda leaf: leaf.values,
        op=op,
        dtype=dtype,
        acc=accumulator(dtype, op, precision),
        out=out,
        final=True,
        leaves=len(leaves),
        block=block,
        after=None if told is None else after,
    )
    return out


def bits(values: Array) -> Array:
    """A complex number's are two."""
    return values.view(f"u{values.itemsize // 2 if values.dtype.kind == 'c' else values.itemsize}")


def same_bits(left: Array, right: Array) -> None:
    np.testing.assert_array_equal(bits(left), bits(right))


ONE = {
    FLOAT8_E4M3FN: 0x38,
    FLOAT8_E5M2: 0x3C,
    FLOAT16: 0x3C00,
    BFLOAT16: 0x3F80,
    FLOAT32: 0x3F80_0000,
    FLOAT64: 0x3FF0 << 48,
}


def special(dtype: DType) -> Array:
    """The values at which implementations differ: zeros, NaN of all kinds, subnormals, infinities, extremes."""
    if dtype.kind is NumberKind.FLOAT:
        sign = 1 << (8 * dtype.itemsize - 1)
        lowest_nan = dtype.top + 1
        patterns = [0, 1, 2, ONE[dtype], ONE[dtype] + 1, dtype.top - 1, dtype.top, lowest_nan, dtype.nan, sign - 1]
        return np.array([p | s for p in patterns for s in (0, sign)], dtype.bits).view(dtype.storage)
    if dtype.part is not None:
        parts = special(dtype.part)[[0, 1, 4, 5, 11, 12, 13, 17]]
        return np.stack([np.repeat(parts, parts.size), np.tile(parts, parts.size)], axis=1).view(dtype.storage)[:, 0]
    if dtype is BOOL:
        return np.array([False, True])
    info = np.iinfo(dtype.storage)
    return np.array([info.min, info.min + 1, 0, 1, 2, 3, info.max - 1, info.max], dtype.storage)


def drawn(dtype: DType, size: int, seed: int) -> Array:
    """Mostly ordinary values, of magnitudes apart enough that every sum rounds; one in four special."""
    rng = np.random.default_rng(seed)
    if dtype.part is not None:
        values = drawn(dtype.part, 2 * size, seed).view(dtype.storage)
    elif dtype.kind is NumberKind.FLOAT:
        ordinary = (rng.standard_normal(size) * 2.0 ** rng.integers(-8, 8, size)).astype(np.float32)
        values = np.empty(size, dtype.storage)
        narrow(ordinary.astype(np.float64), FLOAT64, dtype, values)
    elif dtype is BOOL:
        values = rng.integers(0, 2, size).astype(bool)
    else:
        values = rng.integers(0, 256, (size, dtype.itemsize), dtype=np.uint8).view(dtype.storage).reshape(size)
    return np.where(rng.integers(0, 4, size) == 0, rng.choice(special(dtype), size), values).astype(dtype.storage)


# ---------------------------------------------------------------------------------------------------------------------
# The oracle: one element at a time, with scalars, no vector loop, no block


def number(dtype: DType, value: Any) -> Any:
    if dtype is BFLOAT16:
        return np.uint32(int(value) << 16).view(np.float32)
    if dtype in (FLOAT8_E4M3FN, FLOAT8_E5M2):
        theirs = torch.tensor(int(value), dtype=torch.uint8).view(getattr(torch, dtype.name))
        return np.float32(theirs.to(torch.float32).item())
    return np.float32(value) if dtype is FLOAT16 else value


def one_of_two(op: ReduceOp, a: Any, b: Any) -> Any:
    if np.isnan(a) or np.isnan(b):
        return a if np.isnan(a) else b
    first, second = sorted((a, b), key=lambda x: (x, not np.signbit(x)))
    return first if op is ReduceOp.MIN else second


def pair(op: ReduceOp, a: Any, b: Any) -> Any:
    match op:
        case ReduceOp.SUM | ReduceOp.AVG:
            return a + b
        case ReduceOp.PRODUCT if isinstance(a, list):
            (real, imaginary), (c, d) = a, b
            return [real * c - imaginary * d, real * d + imaginary * c]
        case ReduceOp.PRODUCT:
            return a * b
        case ReduceOp.MIN | ReduceOp.MAX if isinstance(a, np.floating):
            return one_of_two(op, a, b)
        case ReduceOp.MIN:
            return min(a, b)
        case ReduceOp.MAX:
            return max(a, b)
        case ReduceOp.BAND:
            return a & b
        case ReduceOp.BOR:
            return a | b
        case ReduceOp.BXOR:
            return a ^ b


def fold(op: ReduceOp, tree: Any) -> Any:
    return pair(op, fold(op, tree[0]), fold(op, tree[1])) if isinstance(tree, tuple) else tree


def overflows_to_nan(dtype: DType, values: Any) -> Any:
    """What rounds to above 448, which torch's versions cast differently; ml_dtypes has the same rule as we."""
    return np.logical_and(np.abs(values) > 464, not dtype.infinite)


def rounded(dtype: DType, value: Any) -> int:
    """The bits of the result, by torch for the 8-bit and 16-bit types."""
    if dtype.kind is NumberKind.FLOAT and np.isnan(value):
        return dtype.nan
    if dtype in SMALL:
        narrowed = torch.tensor(float(value), dtype=torch.float32).to(getattr(torch, dtype.name))
        if overflows_to_nan(dtype, value):
            return dtype.nan
        return int(narrowed.view(torch.uint8 if dtype.itemsize == 1 else torch.uint16).item())
    return int(dtype.storage.type(value).view(dtype.bits))


def oracle(dtype: DType, op: ReduceOp, leaves: list[Array]) -> list[int]:
    count = len(leaves)
    results: list[int] = []
    if dtype.part is not None:
        if op is not ReduceOp.PRODUCT:
            return oracle(dtype.part, op, [leaf.view(dtype.part.storage) for leaf in leaves])
        for column in zip(*(leaf.view(dtype.part.storage).reshape(-1, 2) for leaf in leaves), strict=True):
            results += [rounded(dtype.part, part) for part in fold(op, canonical([list(x) for x in column]))]
        return results
    for column in zip(*leaves, strict=True):
        numbers = [number(dtype, value) for value in column]
        if dtype.kind in (NumberKind.INT, NumberKind.UINT) and op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
            value: Any = fold(op, canonical([int(x) for x in numbers]))
            if op is ReduceOp.AVG:
                low = -(1 << 63) if dtype.kind is NumberKind.INT else 0
                value = ((value - low) % (1 << 64) + low) // count
            results.append(value % (1 << (8 * dtype.itemsize)))
            continue
        value = fold(op, canonical(numbers))
        results.append(rounded(dtype, value / type(value)(count) if op is ReduceOp.AVG else value))
    return results
