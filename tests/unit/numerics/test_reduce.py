"""The promise under test: bits depend on the leaves in canonical order and on nothing else (requirements D1, D4)."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from quicoll.errors import LocalError
from quicoll.numerics.canonical_order import leaves_of, split, subtrees
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
    require_ieee,
)
from quicoll.numerics.reduce import REDUCE_BLOCK, Array, ReduceOp, accumulator, combine, finish, reduce_tree, widen

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
    dtype: DType, op: ReduceOp, leaves: list[Array], *, precision: Any = "default", block: int = REDUCE_BLOCK
) -> Array:
    out = np.empty(leaves[0].size, dtype.storage)
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
            results += [rounded(dtype.part, part) for part in fold(op, canonical([list(x) for x in column]))]  # type: ignore[misc]
        return results
    for column in zip(*leaves, strict=True):
        numbers = [number(dtype, value) for value in column]
        if dtype.kind in (NumberKind.INT, NumberKind.UINT) and op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
            value: Any = fold(op, canonical([int(x) for x in numbers]))  # type: ignore[misc]
            if op is ReduceOp.AVG:
                low = -(1 << 63) if dtype.kind is NumberKind.INT else 0
                value = ((value - low) % (1 << 64) + low) // count
            results.append(value % (1 << (8 * dtype.itemsize)))
            continue
        value = fold(op, canonical(numbers))
        results.append(rounded(dtype, value / type(value)(count) if op is ReduceOp.AVG else value))
    return results


@pytest.fixture
def _quiet() -> Iterator[None]:
    """The oracle's scalars overflow; what is under test must not warn, and has its own guard."""
    with np.errstate(all="ignore"):
        yield


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda value: str(value))
def test_every_op_of_every_dtype_is_the_canonical_tree_of_scalars(dtype: DType, op: ReduceOp) -> None:
    for count, size in [(1, 50), (2, 67), (3, 1), (3, 33), (5, 16), (8, 31), (13, 7)]:
        leaves = [drawn(dtype, size, seed=100 * count + leaf) for leaf in range(count)]
        got = reduced(dtype, op, leaves)
        assert bits(got).tolist() == oracle(dtype, op, leaves), (count, size)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda value: str(value))
def test_every_pair_of_special_values(dtype: DType, op: ReduceOp) -> None:
    values = special(dtype)
    leaves = [np.repeat(values, values.size), np.tile(values, values.size)]
    assert bits(reduced(dtype, op, leaves)).tolist() == oracle(dtype, op, leaves)


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda value: str(value))
def test_bits_do_not_depend_on_where_an_element_stands(dtype: DType, op: ReduceOp) -> None:
    """Vector body, scalar tail, alignment: each element at many offsets in slices of many lengths."""
    leaves = [drawn(dtype, 200, seed=leaf) for leaf in range(3)]
    whole = reduced(dtype, op, leaves)
    for start, stop in [(0, 1), (1, 2), (1, 200), (3, 67), (5, 6), (7, 40), (13, 144), (64, 129), (199, 200)]:
        same_bits(reduced(dtype, op, [leaf[start:stop] for leaf in leaves]), whole[start:stop])


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda value: str(value))
def test_bits_do_not_depend_on_blocks(dtype: DType, op: ReduceOp) -> None:
    leaves = [drawn(dtype, 200, seed=leaf) for leaf in range(5)]
    whole = reduced(dtype, op, leaves)
    for block in (1, 7, 64, 66, 199):
        same_bits(reduced(dtype, op, leaves, block=block), whole)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT])
def test_blocks_of_the_real_size_meet_without_a_seam(dtype: DType, op: ReduceOp) -> None:
    size = 2 * REDUCE_BLOCK + 5
    leaves = [drawn(dtype, size, seed=leaf) for leaf in range(3)]
    whole = reduced(dtype, op, leaves)
    for cut in (REDUCE_BLOCK - 1, REDUCE_BLOCK, REDUCE_BLOCK + 1):
        same_bits(
            np.concatenate(
                [reduced(dtype, op, [x[:cut] for x in leaves]), reduced(dtype, op, [x[cut:] for x in leaves])]
            ),
            whole,
        )


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda value: str(value))
def test_no_elements_give_no_elements(dtype: DType, op: ReduceOp) -> None:
    assert reduced(dtype, op, [np.empty(0, dtype.storage)] * 3).size == 0


# ---------------------------------------------------------------------------------------------------------------------
# The tree


def nodes(start: int, stop: int) -> Iterator[tuple[int, int]]:
    yield start, stop
    if stop - start > 1:
        m = 1
        while 2 * m < stop - start:
            m *= 2
        yield from nodes(start, start + m)
        yield from nodes(start + m, stop)


def test_a_node_is_split_at_the_largest_power_of_two_below_its_length() -> None:
    assert [split(0, n) for n in range(2, 18)] == [1, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 16]
    assert split(5, 8) == 7
    with pytest.raises(LocalError, match=r"\[3, 4\) has no children"):
        split(3, 4)


def test_subtrees_are_the_fewest_nodes_that_make_up_a_range() -> None:
    for total in range(1, 20):
        tree = sorted(nodes(0, total))
        for start in range(total + 1):
            for stop in range(start, total + 1):
                inside = [node for node in tree if start <= node[0] and node[1] <= stop]
                largest = [n for n in inside if not any(m != n and m[0] <= n[0] and n[1] <= m[1] for m in inside)]
                assert list(subtrees(start, stop, total)) == largest
                assert [leaf for a, b in largest for leaf in range(a, b)] == list(range(start, stop))


@pytest.mark.parametrize("leaves", [(-1, 1, 2), (1, 0, 2), (0, 3, 2)])
def test_subtrees_outside_the_tree_are_refused(leaves: tuple[int, int, int]) -> None:
    with pytest.raises(LocalError, match="are not among"):
        subtrees(*leaves)


def test_ranks_hold_all_leaves_in_order_and_evenly() -> None:
    for world, total in product(range(1, 18), range(1, 40)):
        shards = [leaves_of(rank, world, total) for rank in range(world)]
        assert [leaf for shard in shards for leaf in shard] == list(range(total))
        assert max(map(len, shards)) - min(map(len, shards)) <= 1
    with pytest.raises(LocalError, match="rank 3 is not in a world of 3"):
        leaves_of(3, 3, 8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_rank_may_replace_its_leaves_by_their_subtrees(dtype: DType) -> None:
    """Partials in the accumulator's type, combined upwards by any rank: the bits of the whole tree."""
    total, acc = 13, accumulator(dtype, ReduceOp.SUM)
    leaves = [Leaf(drawn(dtype, 500, seed=leaf)) for leaf in range(total)]
    whole = reduced(dtype, ReduceOp.SUM, [leaf.values for leaf in leaves])
    for world in (1, 2, 3, 5, 8, 13, 17):
        known: dict[tuple[int, int], Leaf] = {}
        for rank in range(world):
            shard = leaves_of(rank, world, total)
            for a, b in subtrees(shard.start, shard.stop, total):
                partial = np.empty(500, acc.storage)
                reduce_tree(
                    canonical(leaves[a:b]),
                    lambda leaf: leaf.values,
                    op=ReduceOp.SUM, dtype=dtype, acc=acc, out=partial, final=False,
                )  # fmt: skip
                known[a, b] = Leaf(partial, wide=True)

        def above(a: int, b: int, known: dict[tuple[int, int], Leaf] = known) -> Any:
            return known[a, b] if (a, b) in known else (above(a, split(a, b)), above(split(a, b), b))

        out = np.empty(500, dtype.storage)
        reduce_tree(
            above(0, total),
            lambda leaf: leaf.values,
            op=ReduceOp.SUM, dtype=dtype, acc=acc, out=out, final=True, leaves=total,
        )  # fmt: skip
        same_bits(out, whole)


def test_memory_grows_with_the_depth_of_the_tree_and_not_with_leaves_or_length() -> None:
    size, count = 20 * REDUCE_BLOCK, 64
    leaves = [Leaf(np.ones(size, np.float16)) for _ in range(count)]
    tree, out = canonical(leaves), np.empty(size, np.float16)
    tracemalloc.start()
    try:
        reduce_tree(
            tree,
            lambda leaf: leaf.values,
            op=ReduceOp.SUM,
            dtype=FLOAT16,
            acc=FLOAT32,
            out=out,
            final=True,
            leaves=count,
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * REDUCE_BLOCK * 4  # seven registers, and what one conversion takes
    assert (out == count).all()


def test_an_operand_of_another_length_is_refused() -> None:
    with pytest.raises(LocalError, match=r"shape \(3,\) in a reduction of 4"):
        reduce_tree(
            (Leaf(np.ones(4)), Leaf(np.ones(3))),
            lambda leaf: leaf.values,
            op=ReduceOp.SUM, dtype=FLOAT64, acc=FLOAT64, out=np.empty(4), final=True,
        )  # fmt: skip


def test_operands_are_not_changed() -> None:
    for dtype, op in PAIRS:
        leaves = [drawn(dtype, 100, seed=leaf) for leaf in range(5)]
        before = [leaf.copy() for leaf in leaves]
        for leaf in leaves:
            leaf.flags.writeable = False
        reduced(dtype, op, leaves)
        reduced(dtype, op, leaves[:1])
        for leaf, kept in zip(leaves, before, strict=True):
            same_bits(leaf, kept)


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda value: str(value))
def test_combine_may_write_over_either_operand(dtype: DType, op: ReduceOp) -> None:
    acc = accumulator(dtype, op)
    left, right = drawn(acc, 300, seed=1), drawn(acc, 300, seed=2)
    apart = np.empty_like(left)
    combine(op, acc, left, right, apart)
    for choose in (0, 1):
        operands = [left.copy(), right.copy()]
        combine(op, acc, operands[0], operands[1], operands[choose])
        total, other = np.empty(300, dtype.storage), np.empty(300, dtype.storage)
        finish(op, operands[choose], 2, dtype, total)  # which of two NaN comes out is settled only here
        finish(op, apart, 2, dtype, other)
        same_bits(total, other)


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic


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


# ---------------------------------------------------------------------------------------------------------------------
# Conversions


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


# ---------------------------------------------------------------------------------------------------------------------
# What is refused, and the registry


@pytest.mark.parametrize("op", [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR])
@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
def test_bitwise_operations_refuse_floats(dtype: DType, op: ReduceOp) -> None:
    with pytest.raises(LocalError, match=f"{op} is bitwise and {dtype} is not an integer"):
        accumulator(dtype, op)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_an_order_of_complex_numbers_is_refused(dtype: DType, op: ReduceOp) -> None:
    with pytest.raises(LocalError, match=f"{op} of {dtype} is not defined: complex numbers have no order"):
        accumulator(dtype, op)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT])
def test_arithmetic_refuses_bools(op: ReduceOp) -> None:
    with pytest.raises(LocalError, match=f"{op} of bools is not defined"):
        accumulator(BOOL, op)


def test_accumulators_are_wide_where_it_pays() -> None:
    names = {
        (dtype.name, op.value, precision): accumulator(dtype, op, precision).name
        for dtype, op in PAIRS
        for precision in ("default", "float64")
    }
    assert names["float16", "sum", "default"] == names["bfloat16", "avg", "default"] == "float32"
    assert names["float8_e4m3fn", "sum", "default"] == names["float8_e5m2", "product", "default"] == "float32"
    assert names["complex64", "sum", "default"] == "complex64"
    assert names["complex64", "avg", "float64"] == names["complex128", "sum", "default"] == "complex128"
    assert names["float32", "product", "default"] == "float32"
    assert names["float32", "sum", "float64"] == names["bfloat16", "sum", "float64"] == "float64"
    assert names["float16", "min", "float64"] == "float16"
    assert names["int8", "sum", "float64"] == "int8"
    assert names["int8", "avg", "default"] == "int64"
    assert names["uint16", "avg", "default"] == "uint64"
    assert names["bool", "bxor", "default"] == "bool"
    with pytest.raises(LocalError, match="precision 'float128' is not known"):
        accumulator(FLOAT32, ReduceOp.SUM, "float128")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["sum", "SUM", ReduceOp.SUM])
def test_an_op_is_known_by_its_name_in_any_case(text: str) -> None:
    assert ReduceOp.parse(text) is ReduceOp.SUM


@pytest.mark.parametrize("value", ["mean", "", None, 3])
def test_an_unknown_op_is_refused_with_those_there_are(value: Any) -> None:
    with pytest.raises(LocalError, match="use one of sum, avg, min, max, product, band, bor, bxor"):
        ReduceOp.parse(value)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])  # noqa: S301
def test_a_copy_of_a_dtype_is_the_dtype(duplicate: Callable[[DType], DType]) -> None:
    for name, dtype in DTYPES.items():
        assert duplicate(dtype) is dtype
        assert DType.parse(name) is dtype
        assert dtype.storage.itemsize == dtype.itemsize


def test_an_unknown_dtype_is_refused_with_those_there_are() -> None:
    with pytest.raises(LocalError, match=r"'float128' is not supported; use one of float8_e4m3fn, .*bool"):
        DType.parse("float128")
