"""Exact sums: the real number, rounded once, in any order. The oracle is `fractions.Fraction`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from depth import some
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.errors import LocalError
from quicoll.numerics.canonical_order import leaves_of
from quicoll.numerics.dtypes import (
    BFLOAT16,
    COMPLEX64,
    DTYPES,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    Array,
    DType,
    NumberKind,
    narrow,
    widen,
)
from quicoll.numerics.exact import MAX_LEAVES, exact_accumulator
from quicoll.numerics.reduce import ReduceOp, accumulator, reduce_tree

FLOATS = [dtype for dtype in DTYPES.values() if dtype.kind is NumberKind.FLOAT]
COMPLEX = [dtype for dtype in DTYPES.values() if dtype.kind is NumberKind.COMPLEX]
OPS = [ReduceOp.SUM, ReduceOp.AVG]


def sign_of(dtype: DType) -> int:
    return 1 << (8 * dtype.itemsize - 1)


def exact_value(dtype: DType, bits: int) -> Fraction | float:
    """A finite element as a fraction, any other as float, by the definition of the format and nothing else."""
    size, sign = bits & (sign_of(dtype) - 1), -1 if bits & sign_of(dtype) else 1
    if size > dtype.top:
        return math.nan
    if size == dtype.top and dtype.infinite:
        return sign * math.inf
    field, fraction = size >> (dtype.digits - 1), size & ((1 << (dtype.digits - 1)) - 1)
    return sign * (fraction + (1 << (dtype.digits - 1) if field else 0)) * unit(dtype) * 2 ** (max(field, 1) - 1)


def unit(dtype: DType) -> Fraction:
    """The smallest subnormal."""
    bias = {FLOAT8_E4M3FN: 7, FLOAT8_E5M2: 15, FLOAT16: 15, BFLOAT16: 127, FLOAT32: 127, FLOAT64: 1023}[dtype]
    return Fraction(1, 2 ** (bias + dtype.digits - 2))


def rounded(dtype: DType, value: Fraction) -> int:
    """The bits of `value` rounded to nearest, ties to even, by counting in units of the last place."""
    count = abs(value) / unit(dtype)
    places = max(0, int(count).bit_length() - dtype.digits)
    whole = round(count / 2**places)  # Fraction rounds ties to even
    bits = (places << (dtype.digits - 1)) + whole
    overflow = dtype.top if dtype.infinite else dtype.nan
    if bits >= overflow:
        bits = overflow
        if not dtype.infinite:
            return bits
    return bits | (sign_of(dtype) if value < 0 else 0)


def oracle(dtype: DType, op: ReduceOp, columns: list[list[int]]) -> list[int]:
    results = []
    for column in columns:
        values = [exact_value(dtype, bits) for bits in column]
        special = [value for value in values if isinstance(value, float)]
        if special:
            total = sum(special)
            results.append(dtype.nan if math.isnan(total) else dtype.top | (sign_of(dtype) if total < 0 else 0))
            continue
        exact = sum((Fraction(value) for value in values), Fraction(0))
        if op is ReduceOp.AVG:
            exact /= len(column)
        if exact == 0:
            results.append(sign_of(dtype) if all(bits == sign_of(dtype) for bits in column) else 0)
        else:
            results.append(rounded(dtype, exact))
    return results


@dataclass(frozen=True)
class Leaf:
    values: Array
    wide: bool = False


def chain(leaves: list[Any]) -> Any:
    tree = leaves[0]
    for leaf in leaves[1:]:
        tree = (tree, leaf)
    return tree


def reduced(
    dtype: DType, leaves: list[Array | Leaf], *, op: ReduceOp = ReduceOp.SUM, final: bool = True, count: int = 0
) -> Array:
    operands = [leaf if isinstance(leaf, Leaf) else Leaf(leaf) for leaf in leaves]
    acc = accumulator(dtype, op, "exact")
    out = np.empty(operands[0].values.size, (dtype if final else acc).storage)
    reduce_tree(
        chain(operands),
        lambda leaf: leaf.values,
        op=op, dtype=dtype, acc=acc, out=out, final=final, leaves=count or len(leaves),
    )  # fmt: skip
    return out


def bits(dtype: DType, values: Array) -> Array:
    return values.view(dtype.bits)


def of(dtype: DType, patterns: Any) -> Array:
    return np.array(patterns, dtype.bits).view(dtype.storage)


def drawn(dtype: DType, size: int, seed: int, spread: int | None = None) -> Array:
    """Random bits; or, with `spread`, normal values with exponents spread over about that many powers of two."""
    rng = np.random.default_rng(seed)
    if spread is None:
        return rng.integers(0, 256, (size, dtype.itemsize), dtype=np.uint8).view(dtype.bits)[:, 0].view(dtype.storage)
    values = np.empty(size, dtype.storage)
    narrow(rng.standard_normal(size) * 2.0 ** rng.integers(-spread, spread + 1, size), FLOAT64, dtype, values)
    return values


def columns_of(dtype: DType, leaves: list[Array]) -> list[list[int]]:
    return [list(column) for column in zip(*(bits(dtype, leaf).tolist() for leaf in leaves), strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# The value


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("spread", [0, 3, 30, None])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_result_is_the_real_number_rounded_once(dtype: DType, spread: int | None, op: ReduceOp) -> None:
    for count, size in [(1, 30), (2, 30), (3, 31), (4, 33), (7, 20), (8, 20), (13, 10)]:
        leaves = [drawn(dtype, size, 100 * count + leaf, spread) for leaf in range(count)]
        expected = oracle(dtype, op, columns_of(dtype, leaves))
        assert bits(dtype, reduced(dtype, leaves, op=op)).tolist() == expected, count
        # The long way, through accumulators as they travel.
        wide = [Leaf(reduced(dtype, [leaf], final=False), wide=True) for leaf in leaves]
        assert bits(dtype, reduced(dtype, wide, op=op)).tolist() == expected, count
        mixed = [*leaves[: count // 2], *wide[count // 2 :]]
        assert bits(dtype, reduced(dtype, mixed, op=op)).tolist() == expected, count


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "op"), some(product([FLOAT8_E4M3FN, FLOAT8_E5M2], OPS), 3), ids=str)
def test_every_pair_of_float8(dtype: DType, op: ReduceOp) -> None:
    """Each once, now the larger first and now the smaller: what the order decides, the special values show below."""
    one, other = (each.astype(np.uint8) for each in np.triu_indices(256))
    turned = np.arange(len(one)) % 2 == 0
    leaves = [np.where(turned, one, other), np.where(turned, other, one)]
    assert reduced(dtype, leaves, op=op).tolist() == oracle(dtype, op, columns_of(dtype, leaves))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_three_of_the_special_values(dtype: DType, op: ReduceOp) -> None:
    one = (dtype.top >> (dtype.digits - 1)) // 2 << (dtype.digits - 1)
    sizes = [0, 1, 2, (1 << (dtype.digits - 1)) - 1, one, one + 1, dtype.top - 1, dtype.top, dtype.nan]
    patterns = [size | sign for size in sizes for sign in (0, sign_of(dtype))]
    leaves = [
        of(dtype, column)
        for column in zip(*((a, b, c) for a in patterns for b in patterns for c in patterns), strict=True)
    ]
    assert bits(dtype, reduced(dtype, leaves, op=op)).tolist() == oracle(dtype, op, columns_of(dtype, leaves))


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_any_column_of_any_bits(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(FLOATS))
    near = st.integers(0, 6).map(lambda back: dtype.top - back)
    pattern = st.one_of(st.integers(0, 2 * sign_of(dtype) - 1), near, st.integers(0, 4))
    column = data.draw(st.lists(pattern, min_size=1, max_size=20))
    op = data.draw(st.sampled_from(OPS))
    leaves = [of(dtype, [value]) for value in column]
    assert bits(dtype, reduced(dtype, leaves, op=op)).tolist() == oracle(dtype, op, [column])


def test_float64_is_what_fsum_says() -> None:
    leaves = [drawn(FLOAT64, 500, leaf, 40) for leaf in range(11)]
    expected = [math.fsum(column) for column in zip(*(leaf.tolist() for leaf in leaves), strict=True)]
    assert reduced(FLOAT64, leaves).tolist() == expected


def test_the_oracle_rounds_as_the_types_do() -> None:
    for dtype in (FLOAT16, FLOAT32, FLOAT64):
        for value in (1.0, -2.5, 1 / 3, 6e-8, -5e-324, 65504.0, 65519.9, 65520.0):
            with np.errstate(all="ignore"):
                expected = int(dtype.storage.type(value).view(dtype.bits))
            exact = Fraction(value)
            assert rounded(dtype, exact) & (sign_of(dtype) - 1) == expected & (sign_of(dtype) - 1)


# ---------------------------------------------------------------------------------------------------------------------
# What differs from a sum in any order


def test_what_cancels_is_gone_and_what_is_left_is_kept() -> None:
    leaves = [np.array([value], np.float32) for value in (3e38, 1e-45, -3e38, 3e38, -3e38)]
    for order in permutations(leaves):
        assert reduced(FLOAT32, list(order)).tolist() == [np.float32(1e-45)]


def test_nothing_overflows_on_the_way() -> None:
    for dtype in FLOATS:
        largest = dtype.top - dtype.infinite
        leaves = [of(dtype, [pattern]) for pattern in [largest] * 5 + [largest | sign_of(dtype)] * 4]
        assert bits(dtype, reduced(dtype, leaves)).tolist() == [largest]
        assert bits(dtype, reduced(dtype, leaves[:5], op=ReduceOp.AVG)).tolist() == [largest]
        assert bits(dtype, reduced(dtype, leaves[:5])).tolist() == [dtype.top if dtype.infinite else dtype.nan]


def test_an_average_is_rounded_once_and_not_after_the_sum_and_again() -> None:
    """Sum 2**24 + 1 rounds to 2**24 in float32; a third of it lies below the midpoint, of the rounded one not."""
    found = 0
    for seed in range(50):
        leaves = [drawn(FLOAT32, 100, 1000 * seed + leaf, 1) for leaf in range(3)]
        exact = reduced(FLOAT32, leaves, op=ReduceOp.AVG)
        twice = reduced(FLOAT32, leaves) / np.float32(3)
        found += int((exact != twice).sum())
        assert bits(FLOAT32, exact).tolist() == oracle(FLOAT32, ReduceOp.AVG, columns_of(FLOAT32, leaves))
    assert found > 100


@pytest.mark.parametrize("leaves", [3, 5, 6, 7, 13, 31])
def test_an_average_within_a_hair_of_a_midpoint_goes_to_its_own_side(leaves: int) -> None:
    """m * L and the float64 next to it on either side, m midway between two float32, cut into float32 that add up."""
    rng = np.random.default_rng(leaves)
    columns = []
    for odd in (2 * rng.integers(1 << 23, 1 << 24, 100) + 1).tolist():
        for hair in (-1, 0, 1):
            product = odd * leaves
            rest = (product << (53 - product.bit_length())) + hair
            column = []
            for _ in range(leaves):
                piece = rest >> max(0, rest.bit_length() - 24) << max(0, rest.bit_length() - 24)
                column.append(rounded(FLOAT32, Fraction(piece, 2**40)))
                rest -= piece
            assert rest == 0
            columns.append(column)
    rows = [of(FLOAT32, row) for row in zip(*columns, strict=True)]
    assert bits(FLOAT32, reduced(FLOAT32, rows, op=ReduceOp.AVG)).tolist() == oracle(FLOAT32, ReduceOp.AVG, columns)


@pytest.mark.parametrize("leaves", [3, 5, 7, 8, 31])
def test_an_average_of_float64_next_to_a_midpoint_goes_to_its_own_side(leaves: int) -> None:
    """m * L in two float64, m midway between neighbours, and a third leaf that is far too small to be seen in both."""
    rng = np.random.default_rng(leaves)
    columns = []
    for odd in (2 * rng.integers(1 << 52, 1 << 53, 60) + 1).tolist():
        for hair in (0.0, 2.0**-60, -(2.0**-60), 2.0**-300, -(2.0**-300)):
            product = odd * leaves
            high = product >> 20 << 20
            column = [float(high), float(product - high), hair] + [0.0] * (leaves - 3)
            columns.append(np.array(column).view(np.uint64).tolist())
    rows = [of(FLOAT64, row) for row in zip(*columns, strict=True)]
    assert bits(FLOAT64, reduced(FLOAT64, rows, op=ReduceOp.AVG)).tolist() == oracle(FLOAT64, ReduceOp.AVG, columns)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_have_the_sign_that_ieee_gives_them(dtype: DType) -> None:
    zero, minus = of(dtype, [0] * 3), of(dtype, [sign_of(dtype)] * 3)
    one = of(dtype, [4] * 3)
    negative = of(dtype, [4 | sign_of(dtype)] * 3)
    for wide in (False, True):

        def go(leaves: list[Array], op: ReduceOp = ReduceOp.SUM, wide: bool = wide) -> set[int]:
            operands: list[Any] = leaves
            if wide:
                operands = [Leaf(reduced(dtype, [leaf], final=False), wide=True) for leaf in leaves]
            return set(bits(dtype, reduced(dtype, operands, op=op)).tolist())

        assert go([minus, minus]) == go([minus]) == go([minus] * 3, ReduceOp.AVG) == {sign_of(dtype)}
        assert go([minus, zero]) == go([zero]) == go([one, negative]) == go([minus, one, negative]) == {0}
        smallest = of(dtype, [1 | sign_of(dtype)] * 3)
        assert go([smallest, zero, zero], ReduceOp.AVG) == {sign_of(dtype)}  # a third of it: rounds to zero


# ---------------------------------------------------------------------------------------------------------------------
# Order, grouping, blocks


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_no_order_and_no_grouping_changes_a_bit_of_result_or_accumulator(dtype: DType) -> None:
    part = dtype.part or dtype
    leaves = [drawn(part, 40 * dtype.itemsize // part.itemsize, leaf, None if leaf % 2 else 20) for leaf in range(9)]
    leaves = [leaf.view(dtype.storage) for leaf in leaves]
    whole, total = reduced(dtype, leaves).tobytes(), reduced(dtype, leaves, final=False).tobytes()
    rng = np.random.default_rng(5)
    for world in (1, 2, 3, 4, 9):
        order = rng.permutation(9)
        partials: list[Array | Leaf] = []
        for rank in range(world):
            mine: list[Array | Leaf] = [leaves[order[leaf]] for leaf in leaves_of(rank, world, 9)]
            partials.append(Leaf(reduced(dtype, mine, final=False), wide=True))
        partials = [partials[index] for index in rng.permutation(world)]
        assert reduced(dtype, partials, count=9).tobytes() == whole
        assert reduced(dtype, partials, final=False).tobytes() == total


def test_combine_is_associative_and_commutative_and_may_write_in_place() -> None:
    for dtype in (FLOAT32, FLOAT64, FLOAT16):
        acc = exact_accumulator(dtype)
        a, b, c = (np.empty(50, acc.wide.storage) for _ in range(3))
        for seed, out in enumerate((a, b, c)):
            acc.from_leaf(drawn(dtype, 50, seed, 9 * seed), out)

        def plus(left: Array, right: Array, acc: Any = acc) -> Array:
            out = np.empty_like(left)
            acc.combine(left, right, out)
            return out

        expected = plus(plus(a, b), c).tobytes()
        assert plus(a, plus(b, c)).tobytes() == plus(c, plus(b, a)).tobytes() == expected
        acc.combine(a, b, a)
        acc.combine(c, a, a)
        assert a.tobytes() == expected


@pytest.mark.parametrize("dtype", [FLOAT8_E5M2, FLOAT32, FLOAT64, COMPLEX64], ids=str)
def test_blocks_meet_without_a_seam(dtype: DType) -> None:
    part = dtype.part or dtype
    size = 9001
    leaves = [drawn(part, size * dtype.itemsize // part.itemsize, leaf, 30).view(dtype.storage) for leaf in range(3)]
    whole, total = reduced(dtype, leaves), reduced(dtype, leaves, final=False)
    for start, stop in [(0, 1), (1, 4097), (4095, 9001), (9000, 9001), (255, 257)]:
        piece = [leaf[start:stop] for leaf in leaves]
        assert reduced(dtype, piece).tobytes() == whole[start:stop].tobytes()
        assert reduced(dtype, piece, final=False).tobytes() == total[start:stop].tobytes()
    assert reduced(dtype, [leaf[:0] for leaf in leaves]).size == 0
    assert reduced(dtype, [leaf[:0] for leaf in leaves], final=False).size == 0


def test_operands_are_not_changed() -> None:
    for dtype in (FLOAT32, FLOAT64):
        leaves = [drawn(dtype, 100, leaf) for leaf in range(4)]
        wide = [reduced(dtype, [leaf], final=False) for leaf in leaves]
        before = [array.tobytes() for array in leaves + wide]
        for array in leaves + wide:
            array.flags.writeable = False
        reduced(dtype, [*leaves, *(Leaf(array, wide=True) for array in wide)])
        assert [array.tobytes() for array in leaves + wide] == before


# ---------------------------------------------------------------------------------------------------------------------
# The accumulator, and limits


def test_an_accumulator_is_the_integer_of_the_sum_in_twos_complement() -> None:
    for dtype in FLOATS:
        acc = exact_accumulator(dtype)
        leaves = [drawn(dtype, 30, leaf, 3) for leaf in range(3)]
        rows = reduced(dtype, leaves, final=False).view(np.uint32).reshape(30, acc.words + 1)
        for row, column in zip(rows, columns_of(dtype, leaves), strict=True):
            count = sum(Fraction(exact_value(dtype, pattern)) for pattern in column) / unit(dtype)
            assert int.from_bytes(row[:-1].tobytes(), "little", signed=True) == count


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_leaves_in_the_largest_number_do_not_overflow(dtype: DType) -> None:
    """2**28 leaves, made by doubling."""
    acc = exact_accumulator(dtype)
    for sign in (0, sign_of(dtype)):
        leaf = of(dtype, [dtype.top - dtype.infinite | sign])
        total = np.empty(1, acc.wide.storage)
        acc.from_leaf(leaf, total)
        for _ in range(28):
            acc.combine(total, total.copy(), total)
        out = np.empty(1, dtype.storage)
        acc.finish(total, out, leaves=MAX_LEAVES, avg=True)
        assert out.tobytes() == leaf.tobytes()
        acc.finish(total, out, leaves=MAX_LEAVES)
        assert bits(dtype, out)[0] == (dtype.top | sign if dtype.infinite else dtype.nan)


def test_many_operands_at_once_are_carried_in_time() -> None:
    leaf = of(FLOAT32, [FLOAT32.top - 1, 1, sign_of(FLOAT32) | 1])
    expected = oracle(FLOAT32, ReduceOp.AVG, [[pattern] * 3 for pattern in bits(FLOAT32, leaf).tolist()])
    assert bits(FLOAT32, reduced(FLOAT32, [leaf] * 3000, op=ReduceOp.AVG)).tolist() == expected


@pytest.mark.parametrize("leaves", [0, MAX_LEAVES + 1])
def test_a_number_of_leaves_that_could_overflow_is_refused(leaves: int) -> None:
    acc, out = exact_accumulator(FLOAT32), np.empty(1, np.float32)
    with pytest.raises(LocalError, match=f"has 1 to {MAX_LEAVES} leaves, not {leaves or 1}"):
        acc.finish(np.zeros(1, acc.wide.storage), out, leaves=leaves)


def test_what_needs_no_exact_accumulator_has_none() -> None:
    assert accumulator(DTYPES["int8"], ReduceOp.SUM, "exact") is DTYPES["int8"]
    assert accumulator(DTYPES["int8"], ReduceOp.AVG, "exact") is DTYPES["int64"]
    assert accumulator(FLOAT32, ReduceOp.MAX, "exact") is FLOAT32
    assert accumulator(FLOAT32, ReduceOp.SUM, "exact") is exact_accumulator(FLOAT32).wide
    for dtype in (FLOAT32, COMPLEX64):
        with pytest.raises(LocalError, match=f"product of {dtype} has no exact form"):
            accumulator(dtype, ReduceOp.PRODUCT, "exact")
    with pytest.raises(LocalError, match="exact sums of int8 need no accumulator"):
        exact_accumulator(DTYPES["int8"])


def test_an_operand_of_another_length_is_refused() -> None:
    with pytest.raises(LocalError, match=r"shape \(3,\) in a reduction of 4"):
        reduced(FLOAT32, [np.zeros(4, np.float32), np.zeros(3, np.float32)])


def test_most_sums_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would be correct, and a hundred times slower."""
    taken: list[int] = []
    acc = exact_accumulator(FLOAT32)
    whole: Callable[..., Any] = type(acc)._long_sum
    monkeypatch.setattr(
        type(acc), "_long_sum", lambda self, leaves, where: (taken.append(where.size), whole(self, leaves, where))[1]
    )
    for dtype in FLOATS:
        reduced(dtype, [drawn(dtype, 50_000, leaf, 0) for leaf in range(8)])
        reduced(dtype, [drawn(dtype, 50_000, leaf, 0) for leaf in range(7)], op=ReduceOp.AVG)
    assert sum(taken) < 20
    reduced(FLOAT32, [drawn(FLOAT32, 1000, leaf, 60) for leaf in range(8)])
    assert sum(taken) > 500


def test_widening_is_what_the_short_way_counts_on() -> None:
    """Every finite element is a float64 that is a multiple of the unit."""
    for dtype in FLOATS:
        values = drawn(dtype, 2000, 1)
        wide = np.empty(values.size)
        widen(values, dtype, FLOAT64, wide)
        for pattern, value in zip(bits(dtype, values).tolist(), wide.tolist(), strict=True):
            if math.isfinite(value):
                assert Fraction(value) == exact_value(dtype, pattern)
