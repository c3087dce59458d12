"""Large reductions between ranks of one host: every order of steps that chance finds, and a death at each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from host_memory import Host, Killed, SteppedMemory

from quicoll.local.large import canonical_tree, reduce_in_chunks, share_out
from quicoll.local.layout import MAX_ITEM, RING, STAGE, SegmentLayout
from quicoll.local.small import Spoiled
from quicoll.numerics.dtypes import FLOAT32
from quicoll.numerics.reduce import ReduceOp, reduce_tree

CHUNK = 1024
SIZES = (1, 255, 256, 257, 3 * 256, 7 * 256 + 19)


def leaf(rank: int, size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(size * 31 + rank).standard_normal(size).astype(np.float32) * np.float32(10**rank)


def combine(values: Sequence[np.ndarray[Any, Any]], out: np.ndarray[Any, Any]) -> None:
    reduce_tree(
        canonical_tree(len(values)),
        values.__getitem__,
        op=ReduceOp.SUM,
        dtype=FLOAT32,
        acc=FLOAT32,
        out=out,
        final=True,
        leaves=len(values),
    )


def expected(world: int, size: int) -> bytes:
    out = np.empty(size, np.float32)
    combine([leaf(rank, size) for rank in range(world)], out)
    return out.tobytes()


def reached(memory: SteppedMemory, stage: int) -> bool:
    return all(memory.load(rank, STAGE) >= stage for rank in range(memory.layout.world))


def work(memory: SteppedMemory, results: dict[tuple[int, int], bytes], patience: int) -> None:
    """One reduction of each size after the other."""
    base = 0
    for size in SIZES:
        out = np.zeros(size, np.float32)
        run = reduce_in_chunks(memory, base, leaf(memory.rank, size), out, combine)
        while True:
            try:
                needs = next(run)
            except StopIteration as stop:
                base = stop.value
                break
            idle = 0
            while not reached(memory, needs):
                idle += 1
                if idle > patience:
                    return
        results[memory.rank, size] = out.tobytes()


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_every_rank_gets_the_bits_of_the_canonical_order_in_whatever_order_steps_come(world: int, seed: int) -> None:
    host = Host(world, seed, chunk=CHUNK)
    results: dict[tuple[int, int], bytes] = {}
    host.run(lambda memory: work(memory, results, 1_000_000))
    assert host.ended == dict.fromkeys(range(world))
    assert results == {(rank, size): expected(world, size) for rank in range(world) for size in SIZES}


def test_a_rank_killed_at_any_step_leaves_the_others_with_right_results_or_none() -> None:
    host = Host(3, 0, chunk=CHUNK)
    host.run(lambda memory: work(memory, {}, 1_000_000))
    total = host.steps[2]
    for step in range(1, total + 1, 3):
        host = Host(3, 0, chunk=CHUNK, kill=(2, step))
        results: dict[tuple[int, int], bytes] = {}
        host.run(lambda memory, results=results: work(memory, results, 300))
        assert isinstance(host.ended.pop(2), Killed | None)
        assert host.ended == {0: None, 1: None}, step
        assert all(bits == expected(3, size) for (_, size), bits in results.items()), step


@pytest.mark.parametrize("what", ["input", "result"])
def test_what_changes_while_it_is_used_is_found_out(what: str) -> None:
    host = Host(2, 3, chunk=CHUNK)
    spoiled = host.layout.input(0) + 4 if what == "input" else host.layout.result(0) + 4
    errors: dict[int, Exception] = {}

    def spoiling(values: Sequence[np.ndarray[Any, Any]], out: np.ndarray[Any, Any]) -> None:
        combine(values, out)
        if what == "input":
            host.segments[1][spoiled] ^= 1

    def rank(memory: SteppedMemory) -> None:
        out = np.zeros(SIZES[-1], np.float32)
        run = reduce_in_chunks(memory, 0, leaf(memory.rank, SIZES[-1]), out, spoiling)
        try:
            for idle, needs in enumerate(run):
                while not reached(memory, needs):
                    if errors:
                        return
                if what == "result" and idle > 2 and memory.rank == 0:
                    host.segments[1][spoiled] ^= 1
        except Spoiled as error:
            errors[memory.rank] = error

    host.run(rank)
    assert isinstance(errors[0], Spoiled)
    assert errors[0].rank == 1
    assert errors[0].bits


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_all_of_a_chunk_once_and_fit_into_their_slots(seed: int) -> None:
    chance = random.Random(seed)
    world, itemsize = chance.randrange(2, 65), chance.choice([1, 2, 8, 16, 260, MAX_ITEM])
    layout = SegmentLayout(world)
    for count in (1, 15, 16, 17, chance.randrange(1, layout.chunk // itemsize + 1), layout.chunk // itemsize):
        parts = share_out(count, world)
        assert len(parts) == world
        assert [a for a, _ in parts] == [0, *[b for _, b in parts[:-1]]]
        assert parts[-1][1] == count
        assert all(0 <= (b - a) * itemsize <= layout.share for a, b in parts)


def test_nothing_in_a_segment_overlaps() -> None:
    layout = SegmentLayout(5, 8192)
    places = [(0, 4096)]
    places += [(layout.input_sum(i, reader), 8) for i in range(RING) for reader in range(5)]
    places += [(layout.result_sum(i), 8) for i in range(RING)]
    places += [(layout.slot(i), layout.slot(1) - layout.slot(0)) for i in range(16)]
    places += [(layout.input(i), layout.chunk) for i in range(RING)]
    places += [(layout.result(i), layout.share) for i in range(RING)]
    places.sort()
    assert all(at + size <= following for (at, size), (following, _) in pairwise(places))
    assert sum(places[-1]) == layout.size
