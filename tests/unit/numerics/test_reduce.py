"""The promise under test: bits depend on the leaves in canonical order and on nothing else (requirements D1, D4)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from scalar_oracle import FLOATS, PAIRS, Leaf, bits, canonical, drawn, oracle, reduced, same_bits, special

from quicoll.errors import LocalError
from quicoll.numerics.canonical_order import leaves_of, split, subtrees
from quicoll.numerics.dtypes import (
    FLOAT16,
    FLOAT32,
    FLOAT64,
    Array,
    DType,
    NumberKind,
)
from quicoll.numerics.reduce import (
    REDUCE_BLOCK,
    ReduceOp,
    accumulator,
    combine,
    finish,
    reduce_few,
    reduce_rows,
    reduce_tree,
)


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


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda value: str(value))
def test_a_level_of_the_tree_at_a_time_gives_the_same_bits_or_is_refused(dtype: DType, op: ReduceOp) -> None:
    acc = accumulator(dtype, op)
    for count, size in [*((count, 5) for count in range(1, 18)), (4, 0), (3, 700)]:
        leaves = np.stack([drawn(dtype, size, seed=100 * count + leaf) for leaf in range(count)])
        if size == 5:
            leaves[count // 2] = np.resize(special(dtype), size)
        out = np.empty(size, dtype.storage)
        done = reduce_rows(leaves, op=op, dtype=dtype, acc=acc, out=out)
        assert done == (
            acc is dtype
            and dtype.kind in (NumberKind.FLOAT, NumberKind.INT, NumberKind.UINT)
            and op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)
        )
        if done:
            same_bits(out, reduced(dtype, op, list(leaves)))


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda value: str(value))
def test_a_handful_of_single_numbers_gives_the_same_bits_or_is_refused(dtype: DType, op: ReduceOp) -> None:
    acc = accumulator(dtype, op)
    plain = dtype in (FLOAT32, FLOAT64) and op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)
    refused = 0
    for count in range(1, 10):
        for seed in range(12):
            leaves = np.stack([drawn(dtype, 1, seed=100 * seed + leaf) for leaf in range(count)])
            if seed % 2:
                leaves[seed % count] = np.roll(special(dtype), seed)[:1]
            out = np.empty(1, dtype.storage)
            done = reduce_few(leaves.tobytes(), op=op, dtype=dtype, acc=acc, out=out)
            expected = reduced(dtype, op, list(leaves))
            assert done == (plain and count <= 8 and bool(np.isfinite(expected).all()))
            if done:
                same_bits(out, expected)
            refused += not done and count <= 8
    assert refused  # of those that are plain, what is not finite


def test_a_handful_of_float32_is_rounded_at_each_level_of_the_tree() -> None:
    """Tuples whose exponents differ by up to 30, so that sums and products are halfway now and then."""
    state = np.random.default_rng(7)
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
        rows = np.ldexp(state.integers(-(1 << 24), 1 << 24, (5, 1000)), state.integers(-30, 1, (5, 1000)))
        rows = rows.astype(np.float32)
        expected = reduced(FLOAT32, op, list(rows))
        out = np.empty(1, np.float32)
        for at in range(rows.shape[1]):
            leaves = rows[:, at].tobytes()
            assert reduce_few(leaves, op=op, dtype=FLOAT32, acc=FLOAT32, out=out)
            assert out.view(np.uint32)[0] == expected.view(np.uint32)[at]


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


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda value: str(value))
def test_elements_are_said_to_be_done_in_their_order_and_change_no_more(dtype: DType, op: ReduceOp) -> None:
    for count, precision in product((1, 2, 5), ("default", "exact")):
        if precision == "exact" and (op not in (ReduceOp.SUM, ReduceOp.AVG) or dtype not in FLOATS):
            continue
        leaves = [drawn(dtype, 200, seed=leaf) for leaf in range(count)]
        told: list[Array] = []
        whole = reduced(dtype, op, leaves, precision=precision, block=66, told=told)
        assert len(told) == 4 or precision == "exact"
        same_bits(np.concatenate(told), whole)


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
