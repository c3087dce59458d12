"""Every collective and every algorithm against its mathematical definition, on world sizes from 1 to 33.

Reductions run on words that stand for formulas (`plan_machine.Words`), so that equal results mean equal bits for every
type and operation. Every set of plans is checked (`validate`) and then run with messages that come late and lanes that
take turns at random.

By default each world size up to 5 meets two of the combinations of sizes, numbers of leaves and sites, and larger ones
one, drawn in turn; of those above 12 the ones around powers of two. A deep run (tests/helpers/depth.py) takes all
sizes.
QUICOLL_TEST_SWEEP=20 takes twenty times as many combinations (ten minutes), up to all there are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, product
from typing import Any

import numpy as np
import pytest
from depth import deep
from plan_machine import Words, in_memory, joined, sealed

from quicoll import plan
from quicoll.errors import LocalError
from quicoll.plan import ALGORITHMS, CANONICAL, MOVES, Plan, SendStep, validate

Array = np.ndarray[Any, Any]

SWEEP = int(os.environ.get("QUICOLL_TEST_SWEEP", "1"))
WORLDS = [
    pytest.param(world, marks=[pytest.mark.slow] if world > 5 else [])
    for world in deep((*range(1, 13), 15, 16, 17, 24, 31, 33), tuple(range(1, 34)))
]
SIZES = (0, 1, 63, 64, 65, 1009, 4133)
# Bytes an element is said to have. 16 KiB make a share of 64 elements worth an owner, so that small arrays have many.
ITEMSIZES = (8, 16 * 1024)


def cases(*axes: Sequence[Any], most: int, turn: int) -> Iterator[tuple[Any, ...]]:
    """All combinations, or `most` of them, spread evenly and shifted by `turn`, so that all come up over the worlds."""
    whole = list(product(*axes))
    most *= SWEEP
    if len(whole) <= most:
        yield from whole
        return
    stride = len(whole) / most
    for k in range(most):
        yield whole[int(k * stride + 7 * turn) % len(whole)]


def few(world: int) -> int:
    """The work grows with the square of the world, and what a larger one shows is its own size."""
    return 2 if world <= deep(5, 12) else 1


def leaf_counts(world: int) -> list[int]:
    return sorted({1, 2, world - 1 or 1, world, world + 1, 8, 2 * world, 2 * world + 1})


def site_layouts(world: int) -> list[tuple[int, ...]]:
    """One site; halves; three sites in turns, so that no site's ranks are neighbours; one alone; each on its own."""
    return [
        (0,) * world,
        tuple(int(rank >= world // 2) for rank in range(world)),
        tuple(rank % 3 for rank in range(world)),
        tuple(int(rank == world - 1) for rank in range(world)),
        tuple(reversed(range(world))),
    ]


def words(world: int, leaves: int, elements: int) -> list[Array]:
    rng = np.random.default_rng([world, leaves, elements])
    return [rng.integers(0, 1 << 64, elements, dtype=np.uint64) for _ in range(leaves)]


def held(rank: int, world: int, leaves: int) -> range:
    """Contiguous, in rank order, balanced: stated here once more, not imported."""
    return range(rank * leaves // world, (rank + 1) * leaves // world)


def formula(values: Sequence[Array]) -> Array:
    """The canonical tree: the left child has the largest power of two of leaves below the whole."""
    if len(values) == 1:
        return values[0]
    left = 1
    while 2 * left < len(values):
        left *= 2
    return joined(formula(values[:left]), formula(values[left:]))


def run(plans: Sequence[Plan], inputs: Sequence[Sequence[Array]], *, seed: int) -> list[Array]:
    validate(plans)
    return in_memory(plans, inputs, Words(), window=1 + seed % 5, seed=seed)


def by_rank(planner: Callable[..., Plan], world: int, **arguments: Any) -> list[Plan]:
    return [planner(rank=rank, world=world, **arguments) for rank in range(world)]


def equal(got: Array, expected: Array) -> None:
    np.testing.assert_array_equal(got, expected)


def inputs_of(shards: Sequence[Array], world: int) -> list[list[Array]]:
    return [[shards[leaf] for leaf in held(rank, world, len(shards))] for rank in range(world)]


# ---------------------------------------------------------------------------------------------------------------------
# Reductions


@pytest.mark.parametrize("algorithm", CANONICAL["all_reduce"])
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_gives_everyone_the_canonical_formula(algorithm: str, world: int) -> None:
    layouts = site_layouts(world) if algorithm == "hierarchical" else [()]
    for elements, leaves, sites, itemsize, parts in cases(
        SIZES, leaf_counts(world), layouts, ITEMSIZES, (1, 7), most=few(world), turn=world
    ):
        shards = words(world, leaves, elements)
        plans = by_rank(
            plan.all_reduce,
            world,
            algorithm=algorithm,
            elements=elements,
            leaves=leaves,
            itemsize=itemsize,
            wide_itemsize=itemsize,
            chunk_bytes=max(1, elements * itemsize // parts),
            sites=sites,
        )
        for output in run(plans, inputs_of(shards, world), seed=world + elements):
            equal(output, sealed(formula(shards), leaves))


@pytest.mark.parametrize("algorithm", CANONICAL["reduce"])
@pytest.mark.parametrize("world", WORLDS)
def test_reduce_gives_the_root_the_canonical_formula_and_the_others_nothing(algorithm: str, world: int) -> None:
    layouts = site_layouts(world) if algorithm == "hierarchical" else [()]
    roots = sorted({0, world // 2, world - 1})
    for elements, leaves, sites, itemsize, root, parts in cases(
        SIZES, leaf_counts(world), layouts, ITEMSIZES, roots, (1, 7), most=few(world), turn=world
    ):
        shards = words(world, leaves, elements)
        plans = by_rank(
            plan.reduce,
            world,
            algorithm=algorithm,
            root=root,
            elements=elements,
            leaves=leaves,
            itemsize=itemsize,
            wide_itemsize=itemsize,
            chunk_bytes=max(1, elements * itemsize // parts),
            sites=sites,
        )
        outputs = run(plans, inputs_of(shards, world), seed=world + elements)
        equal(outputs.pop(root), sealed(formula(shards), leaves))
        assert all(output.size == 0 for output in outputs)


@pytest.mark.parametrize("algorithm", CANONICAL["reduce_scatter"])
@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter_gives_each_rank_its_part_of_the_canonical_formula(algorithm: str, world: int) -> None:
    layouts = site_layouts(world) if algorithm == "hierarchical" else [()]
    for counts, leaves, sites, limit in cases(
        uneven(world), leaf_counts(world), layouts, (64, 1000, 1 << 20), most=few(world), turn=world
    ):
        shards = words(world, leaves, sum(counts))
        plans = by_rank(
            plan.reduce_scatter,
            world,
            algorithm=algorithm,
            counts=counts,
            leaves=leaves,
            itemsize=8,
            wide_itemsize=8,
            chunk_bytes=limit,
            sites=sites,
        )
        whole = sealed(formula(shards), leaves)
        outputs = run(plans, inputs_of(shards, world), seed=world)
        for output, expected in zip(outputs, split(whole, counts), strict=True):
            equal(output, expected)


@pytest.mark.parametrize("algorithm", CANONICAL["all_reduce"])
@pytest.mark.parametrize("world", WORLDS)
def test_nodes_that_are_loose_travel_as_their_leaves_and_the_formula_is_the_same(algorithm: str, world: int) -> None:
    layouts = site_layouts(world) if algorithm == "hierarchical" else [()]
    for elements, leaves, sites, loose in cases(
        (1, 65, 1009), [*leaf_counts(world), 4 * world + 3], layouts, (2, 3, 11), most=few(world), turn=world
    ):
        shards = words(world, leaves, elements)
        common: dict[str, Any] = {
            "algorithm": algorithm,
            "elements": elements,
            "leaves": leaves,
            "itemsize": 8,
            "wide_itemsize": 8 * loose,
            "chunk_bytes": 8000,
            "sites": sites,
        }
        plans = by_rank(plan.all_reduce, world, loose=loose, **common)
        for output in run(plans, inputs_of(shards, world), seed=world + elements):
            equal(output, sealed(formula(shards), leaves))
        if leaves <= loose:
            assert not any(slot.wide for made in plans for lane in made.lanes for slot in lane.scratch)
        elif algorithm == "direct":
            whole = by_rank(plan.all_reduce, world, **common)
            assert sum(made.bytes_sent for made in plans) <= sum(other.bytes_sent for other in whole)


@pytest.mark.parametrize("world", WORLDS)
def test_ring_gives_everyone_the_order_it_states(world: int) -> None:
    for elements, leaves in cases(SIZES, leaf_counts(world), most=few(world), turn=world):
        shards = words(world, leaves, elements)
        plans = by_rank(
            plan.all_reduce,
            world,
            algorithm="ring",
            elements=elements,
            leaves=leaves,
            itemsize=8,
            wide_itemsize=8,
            chunk_bytes=1000,
        )
        outputs = run(plans, inputs_of(shards, world), seed=world)
        width = -(-elements // world)
        width = -(-width // 64) * 64
        for segment, start in enumerate(range(0, elements, max(1, width))):
            rows = [shard[start : start + width] for shard in shards]
            parts = []
            for i in range(1, world + 1):
                mine = held((segment + i) % world, world, leaves)
                if mine:
                    parts.append(left_fold([formula(rows[a:b]) for a, b in nodes(0, leaves, mine)]))
            for output in outputs:
                equal(output[start : start + width], sealed(left_fold(parts), leaves))


def left_fold(values: Sequence[Array]) -> Array:
    total = values[0]
    for value in values[1:]:
        total = joined(total, value)
    return total


def nodes(a: int, b: int, mine: range) -> list[tuple[int, int]]:
    """The largest nodes of the tree over [a, b) that lie in `mine`."""
    if b <= mine.start or mine.stop <= a:
        return []
    if mine.start <= a and b <= mine.stop:
        return [(a, b)]
    left = 1
    while 2 * left < b - a:
        left *= 2
    return nodes(a, a + left, mine) + nodes(a + left, b, mine)


# ---------------------------------------------------------------------------------------------------------------------
# What moves as it is


def uneven(world: int) -> list[tuple[int, ...]]:
    """Elements by rank: none at all, one each, all with one rank, and of every kind."""
    return [
        (0,) * world,
        (1,) * world,
        (*(0,) * (world - 1), 65),
        tuple(SIZES[rank % 5] for rank in range(world)),
        tuple((37 * rank + 11) % 131 for rank in range(world)),
    ]


def split(whole: Array, counts: Sequence[int]) -> list[Array]:
    ends = list(accumulate(counts))
    return [whole[end - count : end] for end, count in zip(ends, counts, strict=True)]


def moved(algorithm: str, sites: tuple[int, ...]) -> dict[str, Any]:
    return {"algorithm": algorithm, "sites": sites} if algorithm == "hierarchical" else {"algorithm": algorithm}


def crossing(plans: Sequence[Plan], sites: Sequence[int]) -> list[tuple[int, int, int]]:
    """(from, to, elements) of every message between two sites."""
    return [
        (made.rank, step.peer, step.src.elements)
        for made in plans
        for lane in made.lanes
        for step in lane.steps
        if isinstance(step, SendStep) and sites[made.rank] != sites[step.peer]
    ]


@pytest.mark.parametrize("algorithm", MOVES["broadcast"])
@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_gives_everyone_the_roots_elements(world: int, algorithm: str) -> None:
    for elements, root, limit, sites in cases(
        SIZES, range(world), (64, 1 << 20), site_layouts(world), most=few(world), turn=world
    ):
        (value,) = words(world, 1, elements)
        how = moved(algorithm, sites)
        plans = by_rank(plan.broadcast, world, root=root, elements=elements, itemsize=8, chunk_bytes=limit, **how)
        for output in run(plans, [[value] if rank == root else [] for rank in range(world)], seed=root):
            equal(output, value)
        if algorithm == "hierarchical":
            once = elements * (len(set(sites)) - 1)  # into each remote site
            assert sum(size for _, _, size in crossing(plans, sites)) == once


@pytest.mark.parametrize("algorithm", MOVES["gather"])
@pytest.mark.parametrize("world", WORLDS)
def test_gathers_put_the_parts_one_after_the_other_in_rank_order(world: int, algorithm: str) -> None:
    for counts, root, limit, sites in cases(
        uneven(world), range(world), (64, 1000, 1 << 20), site_layouts(world), most=few(world), turn=world
    ):
        (whole,) = words(world, 1, sum(counts))
        parts = [[part] for part in split(whole, counts)]
        how: dict[str, Any] = {"counts": counts, "itemsize": 8, "chunk_bytes": limit, **moved(algorithm, sites)}
        to_all = by_rank(plan.all_gather, world, **how)
        for output in run(to_all, parts, seed=world):
            equal(output, whole)
        to_root = by_rank(plan.gather, world, root=root, **how)
        if algorithm == "hierarchical":
            assert sum(size for _, _, size in crossing(to_all, sites)) == sum(counts) * (len(set(sites)) - 1)
            from_afar = sum(count for count, site in zip(counts, sites, strict=True) if site != sites[root])
            assert sum(size for _, _, size in crossing(to_root, sites)) == from_afar
        outputs = run(to_root, parts, seed=root)
        equal(outputs.pop(root), whole)
        assert all(output.size == 0 for output in outputs)


@pytest.mark.parametrize("algorithm", MOVES["scatter"])
@pytest.mark.parametrize("world", WORLDS)
def test_scatter_gives_each_rank_its_part_of_the_roots_elements(world: int, algorithm: str) -> None:
    for counts, root, limit, sites in cases(
        uneven(world), range(world), (64, 1000, 1 << 20), site_layouts(world), most=few(world), turn=world
    ):
        (whole,) = words(world, 1, sum(counts))
        how = moved(algorithm, sites)
        plans = by_rank(plan.scatter, world, root=root, counts=counts, itemsize=8, chunk_bytes=limit, **how)
        if algorithm == "hierarchical":
            to_afar = sum(count for count, site in zip(counts, sites, strict=True) if site != sites[root])
            assert sum(size for _, _, size in crossing(plans, sites)) == to_afar
        outputs = run(plans, [[whole] if rank == root else [] for rank in range(world)], seed=root)
        for output, expected in zip(outputs, split(whole, counts), strict=True):
            equal(output, expected)


def test_small_parts_of_a_remote_site_cross_as_one_message_and_large_ones_straight_from_their_ranks() -> None:
    sites = (0, 0, 1, 1, 1, 1, 2)
    for planner in (plan.gather, plan.scatter):
        how: dict[str, Any] = {"root": 1, "itemsize": 8, "algorithm": "hierarchical", "sites": sites}
        few = by_rank(planner, 7, counts=(5, 6, 7, 8, 9, 4, 3), **how)
        assert sorted(size for _, _, size in crossing(few, sites)) == [3, 7 + 8 + 9 + 4]
        many = by_rank(planner, 7, counts=(128,) * 7, chunk_bytes=128 * 8, **how)
        assert sorted(crossing(many, sites)) == sorted(
            (rank, 1, 128) if planner is plan.gather else (1, rank, 128) for rank in range(2, 7)
        )
        assert not any(lane.scratch for made in many for lane in made.lanes)


def test_heads_take_turns_so_that_each_rank_of_a_site_carries_a_like_share() -> None:
    sites = (0, 0, 0, 0, 1, 1, 1, 1)
    how: dict[str, Any] = {"itemsize": 8, "chunk_bytes": 64 * 8, "algorithm": "hierarchical", "sites": sites}
    plans = by_rank(plan.broadcast, 8, root=0, elements=64 * 40, **how)
    assert Counter(to for _, to, _ in crossing(plans, sites)) == {4: 10, 5: 10, 6: 10, 7: 10}
    plans = by_rank(plan.all_gather, 8, counts=(64,) * 8, **how)
    assert Counter(to for _, to, _ in crossing(plans, sites)) == dict.fromkeys(range(8), 1)


@pytest.mark.parametrize("collective", sorted(MOVES))
def test_moves_know_their_algorithms_and_refuse_others(collective: str) -> None:
    sized: dict[str, Any] = {"elements": 3} if collective == "broadcast" else {"counts": (1, 2)}
    if collective != "all_gather":
        sized["root"] = 0
    planner = getattr(plan, collective)
    with pytest.raises(LocalError, match=f"use one of {', '.join(MOVES[collective])}"):
        planner(rank=0, world=2, itemsize=4, algorithm="exchange", **sized)
    with pytest.raises(LocalError, match="sites for 3 ranks in a world of 2"):
        planner(rank=0, world=2, itemsize=4, algorithm="hierarchical", sites=(0, 1, 1), **sized)
    made = [planner(rank=rank, world=2, itemsize=4, algorithm="hierarchical", sites=(4, 9), **sized) for rank in (0, 1)]
    assert made[0].signature == made[1].signature
    assert made[0].signature.endswith("sites=0,1")
    assert made[0].signature != planner(rank=0, world=2, itemsize=4, **sized).signature


@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all_transposes_uneven_and_empty_parts(world: int) -> None:
    tables = [
        [[0] * world for _ in range(world)],
        [[5] * world for _ in range(world)],
        [[(7 * s + 3 * r) % 11 for r in range(world)] for s in range(world)],
        [[65 if (s + 2 * r) % world == 1 else 0 for r in range(world)] for s in range(world)],
        [[SIZES[(s + r) % 5] if s < 3 else 0 for r in range(world)] for s in range(world)],
    ]
    for counts, limit in cases(tables, (64, 1 << 20), most=few(world), turn=world):
        sent = [split(words(world, 1, sum(row))[0] + np.uint64(s), row) for s, row in enumerate(counts)]
        plans = by_rank(plan.all_to_all, world, counts=counts, itemsize=8, chunk_bytes=limit)
        outputs = run(plans, [[np.concatenate(parts)] for parts in sent], seed=world)
        for rank, output in enumerate(outputs):
            equal(output, np.concatenate([sent[source][rank] for source in range(world)]))


@pytest.mark.parametrize("world", WORLDS[1:])
def test_send_moves_elements_from_one_rank_to_one_other_and_nobody_else_does_anything(world: int) -> None:
    pairs = [(source, to) for source in range(world) for to in range(world) if source != to]
    for elements, (source, to), limit in cases(SIZES, pairs, (64, 1 << 20), most=few(world), turn=world):
        (value,) = words(world, 1, elements)
        plans = by_rank(plan.send, world, source=source, to=to, elements=elements, itemsize=8, chunk_bytes=limit)
        assert not any(lane.steps for made in plans if made.rank not in (source, to) for lane in made.lanes)
        outputs = run(plans, [[value] if rank == source else [] for rank in range(world)], seed=to)
        equal(outputs.pop(to), value)
        assert all(output.size == 0 for output in outputs)


@pytest.mark.parametrize("world", WORLDS)
def test_barrier_ends_for_everyone(world: int) -> None:
    for seed in range(3):
        run(by_rank(plan.barrier, world), [[]] * world, seed=seed)


# ---------------------------------------------------------------------------------------------------------------------
# The machine would notice


def test_words_tell_every_other_order_and_grouping() -> None:
    a, b, c = words(1, 3, 100)
    assert (joined(a, b) != joined(b, a)).all()
    assert (joined(joined(a, b), c) != joined(a, joined(b, c))).all()
    assert (sealed(a, 2) != a).all()
    assert (sealed(a, 2) != sealed(a, 3)).all()
    assert (sealed(sealed(a, 2), 2) != sealed(a, 2)).all()


def test_an_algorithm_that_reduces_what_is_no_node_of_the_tree_is_found_out() -> None:
    """3 + 3 ranks: a rank that adds up a whole site gets (0 1) 2 + (3 4) 5, which is not the tree over six leaves."""
    shards = words(6, 6, 10)
    by_sites = joined(formula(shards[:3]), formula(shards[3:]))
    assert (by_sites != formula(shards)).all()


def test_every_algorithm_of_every_operation_is_tested_above() -> None:
    assert {name: set(known) - {"ring"} for name, known in ALGORITHMS.items()} == {
        name: set(known) for name, known in {**CANONICAL, **MOVES}.items()
    }
    assert sorted(CANONICAL) == ["all_reduce", "reduce", "reduce_scatter"]
    assert sorted(MOVES) == ["all_gather", "broadcast", "gather", "scatter"]
    assert MOVES["all_gather"] == MOVES["gather"]
