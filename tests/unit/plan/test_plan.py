"""Plans, run in memory by a machine that knows only the rules of `plan.model` (requirements D1, D2, D6, C3)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from plan_machine import Numbers, in_memory

from quicoll.errors import LocalError
from quicoll.numerics.canonical_order import leaves_of
from quicoll.numerics.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Array, DType, narrow, widen
from quicoll.numerics.reduce import ReduceOp, accumulator
from quicoll.plan import (
    Buf,
    CopyStep,
    Lane,
    Pair,
    Plan,
    RecvStep,
    ReduceStep,
    Scratch,
    SendStep,
    Span,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    validate,
)
from quicoll.plan.chunks import chunks, shares

WORLDS = range(1, 18)
LEAVES = (1, 2, 3, 5, 8, 13)
CUTS = ((1, 1), (2, 1 << 20), (7, 4), (1000, 1024), (1000, 1 << 20), (20_011, 16_000))
"""Elements and bytes of a chunk."""


def cuts(world: int, leaves: int) -> Sequence[tuple[int, int]]:
    """Two of CUTS, in turns: each number of leaves meets all of them over the worlds. QUICOLL_TEST_SWEEP=2: all."""
    if int(os.environ.get("QUICOLL_TEST_SWEEP", "1")) > 1:
        return CUTS
    first = world + LEAVES.index(leaves)
    return CUTS[first % 3], CUTS[first % 3 + 3]


def run(
    plans: Sequence[Plan],
    inputs: Sequence[Sequence[Array]],
    *,
    op: ReduceOp = ReduceOp.SUM,
    dtype: DType = FLOAT32,
    window: int = 4,
    seed: int = 0,
) -> list[Array]:
    """The outputs of all ranks. `seed` decides who goes on next, step by step."""
    return in_memory(plans, inputs, Numbers(dtype, op), window=window, seed=seed)


# ---------------------------------------------------------------------------------------------------------------------
# What is expected, from the definitions, on whole arrays


def canonical(values: list[Array], op: Callable[[Array, Array], Array] = np.add) -> Array:
    if len(values) == 1:
        return values[0]
    m = 1
    while 2 * m < len(values):
        m *= 2
    return op(canonical(values[:m], op), canonical(values[m:], op))


def left_fold(values: list[Array]) -> Array:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def canonical_nodes(start: int, stop: int, total: int) -> list[tuple[int, int]]:
    def below(a: int, b: int) -> list[tuple[int, int]]:
        if start <= a and b <= stop:
            return [(a, b)]
        if b <= start or stop <= a:
            return []
        m = 1
        while 2 * m < b - a:
            m *= 2
        return below(a, a + m) + below(a + m, b)

    return below(0, total)


def draw(dtype: DType, elements: int, leaves: int, seed: int = 0) -> list[Array]:
    """Magnitudes so far apart that another order gives other bits."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((leaves, elements)) * 2.0 ** rng.integers(-12, 12, (leaves, elements))
    out = [np.empty(elements, dtype.storage) for _ in range(leaves)]
    for leaf, row in zip(out, values, strict=True):
        narrow(row, FLOAT64, dtype, leaf)
    return out


def accumulated(dtype: DType, leaves: list[Array]) -> list[Array]:
    acc = accumulator(dtype, ReduceOp.SUM)
    wide = [np.empty(leaf.size, acc.storage) for leaf in leaves]
    for leaf, place in zip(leaves, wide, strict=True):
        widen(leaf, dtype, acc, place)
    return wide


def rounded(dtype: DType, total: Array) -> Array:
    out = np.empty(total.size, dtype.storage)
    narrow(total, accumulator(dtype, ReduceOp.SUM), dtype, out)
    return out


def all_reduced(
    algorithm: str,
    leaves: list[Array],
    *,
    world: int,
    dtype: DType = FLOAT32,
    chunk_bytes: int = 1 << 20,
    op: ReduceOp = ReduceOp.SUM,
    window: int = 4,
    seed: int = 0,
) -> list[Array]:
    """Plan for all ranks, check, run."""
    plans = all_reduce_plans(algorithm, world, leaves[0].size, len(leaves), dtype=dtype, chunk_bytes=chunk_bytes, op=op)
    validate(plans)
    shards = [[leaves[leaf] for leaf in leaves_of(rank, world, len(leaves))] for rank in range(world)]
    return run(plans, shards, op=op, dtype=dtype, window=window, seed=seed)


def all_reduce_plans(
    algorithm: str,
    world: int,
    elements: int,
    leaves: int,
    *,
    dtype: DType = FLOAT32,
    chunk_bytes: int = 1 << 20,
    op: ReduceOp = ReduceOp.SUM,
) -> list[Plan]:
    return [
        all_reduce(
            algorithm=algorithm,
            rank=rank,
            world=world,
            elements=elements,
            leaves=leaves,
            itemsize=dtype.itemsize,
            wide_itemsize=accumulator(dtype, op).itemsize,
            chunk_bytes=chunk_bytes,
        )
        for rank in range(world)
    ]


def same_everywhere(outputs: list[Array], expected: Array) -> None:
    for output in outputs:
        np.testing.assert_array_equal(output.view(np.uint8), expected.view(np.uint8))


# ---------------------------------------------------------------------------------------------------------------------
# direct


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("world", WORLDS)
def test_direct_is_the_canonical_tree_for_every_world_size_and_chunk(world: int, leaves: int) -> None:
    """D8: the same leaves on 1 to 17 ranks, cut in any way: the bits of the definition."""
    for elements, chunk_bytes in cuts(world, leaves):
        shards = draw(FLOAT32, elements, leaves, seed=elements)
        outputs = all_reduced("direct", shards, world=world, chunk_bytes=chunk_bytes, seed=world)
        same_everywhere(outputs, canonical(shards))


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT64], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 13])
def test_direct_rounds_once_whoever_holds_the_leaves(world: int, dtype: DType) -> None:
    shards = draw(dtype, 3001, 8)
    expected = rounded(dtype, canonical(accumulated(dtype, shards)))
    for chunk_bytes in (256, 4096, 1 << 20):
        same_everywhere(all_reduced("direct", shards, world=world, dtype=dtype, chunk_bytes=chunk_bytes), expected)


@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("world", [1, 2, 3, 8, 9])
def test_direct_gives_other_operations_the_same_bits_too(world: int, op: ReduceOp) -> None:
    shards = draw(FLOAT32, 500, 8)
    function = {ReduceOp.AVG: np.add, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}[op]
    expected = canonical(shards, function)
    if op is ReduceOp.AVG:
        expected = expected / np.float32(8)
    same_everywhere(all_reduced("direct", shards, world=world, op=op, chunk_bytes=512), expected)


def test_a_few_elements_have_one_owner_and_many_are_shared() -> None:
    def owners(elements: int) -> list[int]:
        plans = all_reduce_plans("direct", 8, elements, 8)
        finishing = [any(isinstance(s, ReduceStep) and s.finish for lane in p.lanes for s in lane.steps) for p in plans]
        return [rank for rank, finishes in enumerate(finishing) if finishes]

    assert owners(10) == [0]
    assert owners(4096) == [0]
    assert owners(3 * 4096) == [0, 1, 2]
    assert owners(1_000_000) == list(range(8))


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_a_small_tensor_in_blocks_of_a_wire_format_is_shared_so_that_no_rank_sends_much_more_than_another(
    world: int,
) -> None:
    row, blocks = 34, 421  # int4, of 26,944 numbers: less than what one owner has of numbers
    plans = [
        all_reduce(
            algorithm="direct", rank=rank, world=world, elements=blocks, leaves=world, itemsize=row, wide_itemsize=256,
            loose=7,
        )
        for rank in range(world)
    ]  # fmt: skip
    validate(plans)
    mean = 2 * (world - 1) / world * row * blocks
    assert sum(plan.bytes_sent for plan in plans) == round(mean * world)
    for plan in plans:
        assert abs(plan.bytes_sent / mean - 1) < 0.04
    few = [
        all_reduce(
            algorithm="direct", rank=rank, world=world, elements=60, leaves=world, itemsize=row, wide_itemsize=256,
            loose=7,
        )
        for rank in range(world)
    ]  # fmt: skip
    assert [bool(plan.bytes_sent) for plan in few] == [True] * world
    assert few[0].bytes_sent == (world - 1) * 60 * row, "so few have one owner"


def test_direct_moves_no_more_bytes_than_a_ring_needs() -> None:
    """One leaf on each rank: (p - 1) / p of the tensor out and in, twice."""
    for world in (2, 4, 8):
        for plan in all_reduce_plans("direct", world, 1 << 20, world):
            assert plan.bytes_sent == plan.bytes_received == 2 * (world - 1) * (1 << 22) // world


def test_several_leaves_travel_as_one_wide_partial_and_a_lone_one_as_it_is() -> None:
    plan = all_reduce_plans("direct", 2, 100, 3, dtype=FLOAT16)[1]  # holds leaves 1 and 2; the tree is ((0 1) 2)
    sent = [step.src for step in plan.lanes[0].steps if isinstance(step, SendStep)]
    assert sent == [Span(Buf.INPUT, 0, 0, 100), Span(Buf.INPUT, 1, 0, 100)]
    plan = all_reduce_plans("direct", 2, 100, 4, dtype=FLOAT16)[1]
    sent = [step.src for step in plan.lanes[0].steps if isinstance(step, SendStep)]
    assert sent == [Span(Buf.SCRATCH, 0, 0, 100, wide=True)]


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_no_message_is_longer_than_a_chunk_even_where_partials_are_wide(algorithm: str) -> None:
    for world, leaves in [(2, 8), (3, 3), (3, 8), (5, 2)]:
        for plan in all_reduce_plans(algorithm, world, 50_000, leaves, dtype=BFLOAT16, chunk_bytes=5000):
            for lane in plan.lanes:
                for step in lane.steps:
                    if isinstance(step, SendStep):
                        assert plan.nbytes(step.src) <= 5000


# ---------------------------------------------------------------------------------------------------------------------
# ring


def ring_of(leaves: list[Array], world: int) -> Array:
    """The order that the docstring states, segment by segment."""
    total = len(leaves)
    out = np.empty_like(leaves[0])
    for segment, (start, stop) in enumerate(shares(leaves[0].size, world)):
        parts = []
        for i in range(world):
            shard = leaves_of((segment + 1 + i) % world, world, total)
            if shard:
                mine = canonical_nodes(shard.start, shard.stop, total)
                parts.append(left_fold([canonical([leaf[start:stop] for leaf in leaves[a:b]]) for a, b in mine]))
        out[start:stop] = left_fold(parts)
    return out


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("world", WORLDS)
def test_ring_is_the_stated_order_whatever_the_chunks(world: int, leaves: int) -> None:
    for elements, chunk_bytes in cuts(world, leaves):
        shards = draw(FLOAT32, elements, leaves, seed=elements)
        outputs = all_reduced("ring", shards, world=world, chunk_bytes=chunk_bytes, seed=leaves)
        same_everywhere(outputs, ring_of(shards, world))


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 5, 9])
def test_ring_rounds_once_at_the_last_rank(world: int, dtype: DType) -> None:
    for leaves in (world, 5):
        shards = draw(dtype, 1500, leaves)
        expected = rounded(dtype, ring_of(accumulated(dtype, shards), world))
        for chunk_bytes in (256, 1 << 20):
            same_everywhere(all_reduced("ring", shards, world=world, dtype=dtype, chunk_bytes=chunk_bytes), expected)


def test_ring_and_direct_differ_in_bits_so_that_the_tests_above_can_tell() -> None:
    shards = draw(FLOAT32, 1000, 5)
    ring, direct = (all_reduced(algorithm, shards, world=5)[0] for algorithm in ("ring", "direct"))
    assert (ring != direct).any()
    np.testing.assert_allclose(ring, direct, rtol=1e-2, atol=1e-2)


def test_ring_only_talks_to_its_neighbours() -> None:
    for plan in all_reduce_plans("ring", 5, 1000, 5):
        for lane in plan.lanes:
            for step in lane.steps:
                if isinstance(step, SendStep):
                    assert step.peer == (plan.rank + 1) % 5
                if isinstance(step, RecvStep):
                    assert step.peer == (plan.rank - 1) % 5


# ---------------------------------------------------------------------------------------------------------------------
# The other collectives


@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_brings_the_roots_elements_to_everyone(world: int) -> None:
    for root in {0, world // 2, world - 1}:
        for elements, chunk_bytes in [(0, 8), (1, 8), (1000, 1 << 20), (1000, 700)]:
            plans = [
                broadcast(rank=rank, world=world, root=root, elements=elements, itemsize=4, chunk_bytes=chunk_bytes)
                for rank in range(world)
            ]
            validate(plans)
            value = np.arange(elements, dtype=np.float32)
            outputs = run(plans, [[value] if rank == root else [] for rank in range(world)], seed=root)
            same_everywhere(outputs, value)


def test_broadcast_takes_as_many_rounds_as_the_world_has_bits() -> None:
    for world in WORLDS:
        depth = {0: 0}
        for rank in range(1, world):
            parent = next(
                step.peer
                for step in broadcast(rank=rank, world=world, root=0, elements=1, itemsize=1).lanes[0].steps
                if isinstance(step, RecvStep)
            )
            depth[rank] = depth[parent] + 1
        assert max(depth.values()) <= (world - 1).bit_length()


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_puts_uneven_parts_one_after_the_other(world: int) -> None:
    for counts in ([0] * world, [5] * world, [(37 * rank) % 101 for rank in range(world)], [0] * (world - 1) + [300]):
        for chunk_bytes in (1 << 20, 64):
            plans = [
                all_gather(rank=rank, world=world, counts=counts, itemsize=4, chunk_bytes=chunk_bytes)
                for rank in range(world)
            ]
            validate(plans)
            parts = [np.arange(count, dtype=np.float32) + 1000 * rank for rank, count in enumerate(counts)]
            same_everywhere(run(plans, [[part] for part in parts]), np.concatenate(parts))
            assert [plan.output for plan in plans] == [list(accumulate(counts))[-1]] * world


def test_a_barrier_sends_nothing_since_all_ranks_announce_their_calls() -> None:
    for world in (1, 2, 3, 17):
        plans = [barrier(rank=rank, world=world) for rank in range(world)]
        validate(plans)
        assert all(plan.lanes == () for plan in plans)


# ---------------------------------------------------------------------------------------------------------------------
# Rules that every plan keeps


@pytest.mark.parametrize("window", [1, 2, 100])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_any_number_of_open_lanes_comes_to_the_same_end(algorithm: str, window: int) -> None:
    shards = draw(FLOAT32, 5000, 6)
    expected = all_reduced(algorithm, shards, world=6)[0]
    for seed in range(3):
        outputs = all_reduced(algorithm, shards, world=6, chunk_bytes=600, window=window, seed=seed)
        same_everywhere(outputs, expected)


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_no_elements_need_no_lane(algorithm: str) -> None:
    for plan in all_reduce_plans(algorithm, 3, 0, 3):
        assert plan.lanes == ()
        assert plan.width == 1


def test_shares_and_chunks_are_near_equal_and_cover_everything() -> None:
    for elements in (0, 1, 63, 64, 65, 1000, 12_345):
        for parts in (1, 2, 7, 17):
            pieces = shares(elements, parts)
            assert len(pieces) <= parts
            assert [i for a, b in pieces for i in range(a, b)] == list(range(elements))
        for limit in (1, 10, 64, 100, 1000, 1 << 20):
            cut = chunks((5, 5 + elements), limit)
            assert [i for a, b in cut for i in range(a, b)] == list(range(5, 5 + elements))
            assert all(0 < b - a <= limit for a, b in cut)
            assert len(cut) <= math.ceil(elements / (limit - limit % 64 or limit))


def test_ranks_compare_one_line_and_a_reader_gets_all_of_them() -> None:
    plans = all_reduce_plans("direct", 3, 200, 4, dtype=FLOAT16)
    assert {plan.signature for plan in plans} == {
        "all_reduce/direct world=3 elements=200 leaves=4 itemsize=2 wide_itemsize=4 chunk_bytes=1048576"
    }
    assert plans[2].describe().splitlines() == [
        plans[0].signature,
        "rank 2: 1 lanes, 1 at a time keep all ranks busy; sends 800 bytes, receives 400",
        "lane 0: 800 bytes of scratch",
        "  reduce  (input0[0:200] input1[0:200]) to scratch0[0:200]w",
        "  send    scratch0[0:200]w to 0 as #0",
        "  receive output0[0:200] from 0 as #0",
    ]
    gather = all_gather(rank=0, world=2, counts=(3, 4), itemsize=4)
    assert gather.signature == "all_gather/direct world=2 counts=3,4 itemsize=4 chunk_bytes=1048576"
    assert barrier(rank=0, world=2).signature == "barrier/announced world=2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 3}, "rank 3 is not in a world of 3"),
        ({"rank": -1}, "rank -1 is not"),
        ({"world": 0}, "world of 0"),
        ({"elements": -1}, "elements=-1 is below 0"),
        ({"leaves": 0}, "leaves=0 is below 1"),
        ({"itemsize": 0}, "itemsize=0 is below 1"),
        ({"wide_itemsize": 2}, "wide_itemsize=2 is below 4"),
        ({"chunk_bytes": 0}, "chunk_bytes=0 is below 1"),
        ({"loose": 0}, "loose=0 is below 1"),
        ({"algorithm": "ring", "loose": 2}, "none of them is loose"),
        (
            {"algorithm": "torus"},
            "algorithm 'torus' is not known; use one of direct, tree, hierarchical",
        ),
        ({"algorithm": "hierarchical", "sites": (0, 0)}, "sites for 2 ranks in a world of 3"),
    ],
)
def test_all_reduce_refuses_what_makes_no_plan(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "algorithm": "direct", "rank": 0, "world": 3, "elements": 10, "leaves": 3, "itemsize": 4, "wide_itemsize": 4,
    }  # fmt: skip
    with pytest.raises(LocalError, match=message):
        all_reduce(**{**good, **change})


def test_the_others_refuse_what_makes_no_plan() -> None:
    with pytest.raises(LocalError, match="root 2 is not in a world of 2"):
        broadcast(rank=0, world=2, root=2, elements=1, itemsize=1)
    with pytest.raises(LocalError, match="elements=-1 is below 0"):
        broadcast(rank=0, world=2, root=0, elements=-1, itemsize=1)
    with pytest.raises(LocalError, match="counts for 1 ranks in a world of 2"):
        all_gather(rank=0, world=2, counts=[1], itemsize=1)
    with pytest.raises(LocalError, match=r"counts\[1\]=-1 is below 0"):
        all_gather(rank=0, world=2, counts=[1, -1], itemsize=1)
    with pytest.raises(LocalError, match="rank 2 is not in a world of 2"):
        barrier(rank=2, world=2)


# ---------------------------------------------------------------------------------------------------------------------
# The checker finds each kind of fault


def pair(first: Sequence[Any], second: Sequence[Any], **changes: Any) -> list[Plan]:
    """Two ranks with one lane each, two elements of INPUT and OUTPUT and two slots of scratch, the second wide."""
    scratch = (Scratch(2, wide=False), Scratch(2, wide=True))
    common: dict[str, Any] = {
        "collective": "test", "algorithm": "test", "world": 2, "inputs": (2,), "output": 2, "leaves": 2,
        "itemsize": 2, "wide_itemsize": 4, "width": 1, "parameters": (),
    }  # fmt: skip
    plans = [
        Plan(**common, rank=rank, lanes=(Lane(tuple(steps), scratch),)) for rank, steps in enumerate((first, second))
    ]
    return [plans[0], replace(plans[1], **changes)]


IN, OUT, TEMP = Span(Buf.INPUT, 0, 0, 2), Span(Buf.OUTPUT, 0, 0, 2), Span(Buf.SCRATCH, 0, 0, 2)
WIDE = Span(Buf.SCRATCH, 1, 0, 2, wide=True)
DONE = [CopyStep(OUT, IN)]


def test_the_checker_accepts_the_plans_that_the_faults_below_are_made_from() -> None:
    validate(pair(DONE, DONE))
    validate(pair([SendStep(1, 0, IN), RecvStep(1, 0, OUT)], [RecvStep(0, 0, TEMP), *DONE, SendStep(0, 0, TEMP)]))
    validate(pair([ReduceStep(WIDE, Pair(IN, IN), finish=False), ReduceStep(OUT, WIDE, finish=True)], DONE))


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([], "there is no plan"),
        (pair(DONE, DONE)[:1], "plan 0 of 1 is for rank 0 of 2"),
        (pair(DONE, DONE, rank=0), "plan 1 of 2 is for rank 0"),
        (pair(DONE, DONE, parameters=(("elements", 3),)), "rank 1 plans 'test/test world=2 elements=3', rank 0"),
        (pair(DONE, DONE, width=2), "rank 1 has 1 lanes, 2 at a time; rank 0 has 1, 1 at a time"),
        (pair(DONE, DONE, lanes=()), "rank 1 has 0 lanes"),
        (pair([], DONE), "rank 0: not every element of its output is written"),
        (pair([CopyStep(replace(OUT, stop=1), replace(IN, stop=1))], DONE), "not every element"),
        (pair(DONE * 2, DONE), "rank 0, lane 0, step 1: .* is written a second time"),
        (pair([*DONE, CopyStep(TEMP, IN), CopyStep(TEMP, IN)], DONE), "step 2: .* is written a second time"),
        (pair([*DONE, CopyStep(IN, IN)], DONE), "is the caller's and must not be written"),
        (pair([CopyStep(OUT, TEMP)], DONE), "step 0: .* is read before this lane has written it"),
        (pair([*DONE, CopyStep(replace(TEMP, stop=3), IN)], DONE), "differ in length"),
        (pair([*DONE, CopyStep(replace(TEMP, start=1, stop=3), IN)], DONE), "is out of bounds"),
        (pair([*DONE, CopyStep(replace(TEMP, slot=2), IN)], DONE), "is out of bounds"),
        (pair([*DONE, CopyStep(replace(TEMP, slot=-1), IN)], DONE), "is out of bounds"),
        (pair([*DONE, ReduceStep(replace(TEMP, wide=True), IN, finish=False)], DONE), "is not of its buffer's type"),
        (pair([*DONE, CopyStep(WIDE, IN)], DONE), "would need a conversion"),
        (pair([ReduceStep(OUT, IN, finish=False)], DONE), "is neither"),
        (pair([*DONE, ReduceStep(WIDE, IN, finish=True)], DONE), "is both"),
        (
            pair([*DONE, SendStep(1, 0, IN)], DONE),
            r"from rank 0 to rank 1: sent as .* \(0, 2, False\), awaited as None",
        ),
        (pair([*DONE, RecvStep(1, 0, TEMP)], DONE), r"sent as .* None, awaited as \(0, 2, False\)"),
        (
            pair([*DONE, SendStep(1, 0, IN)], [*DONE, RecvStep(0, 0, replace(TEMP, stop=1))]),
            r"awaited as \(0, 1, False\)",
        ),
        (pair([*DONE, SendStep(1, 0, IN)], [*DONE, RecvStep(0, 0, WIDE)]), r"awaited as \(0, 2, True\)"),
        (
            pair([*DONE, SendStep(1, 0, IN), SendStep(1, 0, IN)], [*DONE, RecvStep(0, 0, TEMP)]),
            "message 0 from 0 to 1 stands",
        ),
        (pair([*DONE, SendStep(0, 0, IN)], DONE), "exchanges with rank 0"),
        (pair([*DONE, SendStep(2, 0, IN)], DONE), "exchanges with rank 2"),
        (
            pair([RecvStep(1, 0, OUT), SendStep(1, 0, OUT)], [RecvStep(0, 0, OUT), SendStep(0, 0, OUT)]),
            "rank 0, lane 0, step 1 waits for ever",
        ),
    ],
)  # fmt: skip
def test_the_checker_names_the_fault(plans: list[Plan], message: str) -> None:
    with pytest.raises(LocalError, match=message):
        validate(plans)


def test_messages_between_lanes_of_different_numbers_are_found() -> None:
    """They would stop an executor that has only the first lane open."""
    plans = pair([*DONE, SendStep(1, 0, IN)], [*DONE, RecvStep(0, 0, TEMP)])
    empty = Lane(())
    plans[0] = replace(plans[0], lanes=(*plans[0].lanes, empty))
    plans[1] = replace(plans[1], lanes=(empty, *plans[1].lanes))
    with pytest.raises(LocalError, match=r"sent as .* \(0, 2, False\), awaited as \(1, 2, False\)"):
        validate(plans)


def test_a_token_waits_for_the_receive_that_fills_it_and_for_no_other() -> None:
    token, other = Span(Buf.SCRATCH, 0, 0, 0), Span(Buf.SCRATCH, 1, 0, 0)
    lane = Lane((RecvStep(1, 0, token), SendStep(1, 0, other), SendStep(1, 1, token)), (Scratch(0, wide=False),) * 2)
    assert lane.waits == ((), (), (0,))


def test_a_step_waits_only_for_receives_that_it_reads() -> None:
    halves = [Span(Buf.SCRATCH, 0, 0, 1), Span(Buf.SCRATCH, 0, 1, 2)]
    lane = Lane(
        (
            RecvStep(1, 0, halves[0]),
            RecvStep(1, 1, halves[1]),
            SendStep(1, 0, IN),
            SendStep(1, 1, halves[1]),
            ReduceStep(OUT, Pair(TEMP, Pair(IN, TEMP)), finish=True),
        ),
        (Scratch(2, wide=False),),
    )
    assert lane.waits == ((), (), (), (1,), (0, 1))
