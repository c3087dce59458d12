"""Large calls between ranks of one host: every order of steps that chance finds, and a death at each."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import TypeAlias

import numpy as np
import pytest
from host_memory import Host, Killed, SteppedMemory

from quicoll.local.large import canonical_tree, carry
from quicoll.local.layout import CHUNK as CHUNK_AT_LEAST
from quicoll.local.layout import MAX_ITEM, MAX_ROOMS, MAX_WORLD, OWNERS, RECORD, RING, STAGE, SegmentLayout
from quicoll.local.passages import Moved, Passage, Reduce, Reduced, Routes, share_out
from quicoll.local.small import Spoiled
from quicoll.numerics.canonical_order import leaves_of
from quicoll.numerics.dtypes import FLOAT32, Array
from quicoll.numerics.reduce import After, ReduceOp, reduce_tree

CHUNK = 1024
STEP = CHUNK // 4
SIZES = (1, 255, STEP, 257, 3 * STEP, 7 * STEP + 19)


Stand: TypeAlias = Callable[[Array], Array]
"""Gives values a place to stand."""


def leaf(number: int, size: int) -> Array:
    rng = np.random.default_rng(size * 31 + number)
    return rng.standard_normal(size).astype(np.float32) * np.float32(10**number)


def combine(values: Sequence[Array], out: Array, after: After | None = None) -> None:
    reduce_tree(
        canonical_tree(len(values)),
        values.__getitem__,
        op=ReduceOp.SUM,
        dtype=FLOAT32,
        acc=FLOAT32,
        out=out,
        final=True,
        leaves=len(values),
        block=STEP // 4,
        after=after,
    )


def reduced(leaves: int, size: int) -> Array:
    out = np.empty(size, np.float32)
    combine([leaf(number, size) for number in range(leaves)], out)
    return out


@dataclass(frozen=True)
class Called:
    """A large call. gives: by rank, what it gives. table: for what is moved, elements from whom to whom."""

    what: str
    size: int
    leaves: int = 0
    root: int | None = None

    def table(self, world: int) -> list[list[int]]:
        """Elements of each rank for each: uneven, some none, as the call's size draws them."""
        rng = np.random.default_rng(self.size)
        return (rng.integers(0, 2, (world, world)) * rng.integers(0, self.size + 1, (world, world))).tolist()

    def rows(self, world: int) -> list[int]:
        cuts = sorted(np.random.default_rng(self.size).integers(0, self.size + 1, world - 1).tolist())
        return [b - a for a, b in pairwise([0, *cuts, self.size])]

    def expected(self, rank: int, world: int) -> bytes:
        if self.what == "all_reduce":
            return reduced(self.leaves or world, self.size).tobytes()
        if self.what == "reduce":
            return reduced(self.leaves or world, self.size).tobytes() if rank == self.root else b""
        if self.what == "reduce_scatter":
            ends = [0, *accumulate(self.rows(world))]
            return reduced(self.leaves or world, self.size)[ends[rank] : ends[rank + 1]].tobytes()
        table = self.table(world)
        if self.what == "all_to_all":
            parts = []
            for writer in range(world):
                ends = [0, *accumulate(table[writer])]
                parts.append(leaf(writer, ends[-1])[ends[rank] : ends[rank + 1]])
            return np.concatenate(parts).tobytes()
        if self.root not in (None, rank):
            return b""
        return np.concatenate([leaf(writer, table[writer][0]) for writer in range(world)]).tobytes()

    def passage(
        self, layout: SegmentLayout, rank: int, world: int, out: Array, reduce: Reduce, stand: Stand = lambda x: x
    ) -> Passage:
        if self.what in ("all_reduce", "reduce", "reduce_scatter"):
            held = [len(leaves_of(each, world, self.leaves or world)) for each in range(world)]
            first = sum(held[:rank])
            return Reduced(
                layout=layout,
                rank=rank,
                held=held,
                leaves=[stand(leaf(first + i, self.size)) for i in range(held[rank])],
                storage=out.dtype,
                elements=self.size,
                rows=self.rows(world) if self.what == "reduce_scatter" else None,
                root=self.root,
                output=out,
                combine=reduce,
            )
        table, reads = self.table(world), self.root in (None, rank)
        if self.what == "all_to_all":
            routes = Routes([sum(row) for row in table], table)
        else:
            routes = Routes([row[0] for row in table])
        return Moved(layout, rank, routes, stand(leaf(rank, routes.given[rank])), out, reads=reads)


CALLS = (
    *(Called("all_reduce", size) for size in SIZES),
    Called("reduce", 5 * STEP + 3, root=1),
    Called("all_gather", 9 * STEP + 1),
    Called("all_reduce", STEP + 5),
    Called("all_to_all", 3 * STEP + 7),
    Called("reduce_scatter", 6 * STEP + 2),
    Called("gather", 3 * STEP + 1, root=0),
    Called("all_gather", 1),
    Called("all_to_all", 1),
    Called("reduce_scatter", 3),
    Called("all_reduce", 2 * STEP + 5, leaves=7),
    Called("reduce_scatter", STEP + 1, leaves=3),
    Called("reduce", STEP - 1, leaves=1, root=0),
    Called("gather", 5 * STEP + 11, root=1),
    Called("all_reduce", STEP),
)


def reached(memory: SteppedMemory, stage: int) -> bool:
    return all(memory.load(rank, STAGE) >= stage for rank in range(memory.layout.world))


class Lending:
    """Lets values of a rank stand in its arena, one after the other; those of every third call do not."""

    def __init__(self, memory: SteppedMemory) -> None:
        self._arena = memory.host.arenas[memory.rank]
        self._turn = memory.rank
        self._taken = 0

    def stand(self, values: Array) -> Array:
        nbytes = values.nbytes
        if self._turn % 3 == 2 or self._taken + nbytes > self._arena.size:
            return values
        place = self._arena[self._taken : self._taken + nbytes].view(values.dtype)
        place[:] = values
        self._taken += nbytes
        return place

    def over(self) -> None:
        """The call has ended, and the caller may do with his tensors what he likes."""
        self._turn += 1
        self._taken = 0
        self._arena[:] = 0xA5


def work(memory: SteppedMemory, results: dict[tuple[int, int], bytes], patience: int, calls: Sequence[Called]) -> None:
    """One call after the other."""
    base, world, lending = 0, memory.layout.world, Lending(memory)
    for at, call in enumerate(calls):
        out = np.zeros(len(call.expected(memory.rank, world)) // 4, np.float32)
        passage = call.passage(memory.layout, memory.rank, world, out, combine, lending.stand)
        run = carry(memory, base, passage)
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
        lending.over()
        results[memory.rank, at] = out.tobytes()


ARENA = 1 << 17


@pytest.mark.parametrize("arena", [0, ARENA])
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_every_rank_gets_what_is_defined_in_whatever_order_steps_come(world: int, seed: int, arena: int) -> None:
    """Of calls of every kind, one after the other in a drawn order; sums are those of the canonical order. What is lent
    changes as soon as its rank's call has ended."""
    calls = random.Random(seed).sample(CALLS, len(CALLS))
    host = Host(world, seed, chunk=CHUNK, arena=arena)
    results: dict[tuple[int, int], bytes] = {}
    host.run(lambda memory: work(memory, results, 1_000_000, calls))
    assert host.ended == dict.fromkeys(range(world))
    for rank, (at, call) in product(range(world), enumerate(calls)):
        assert results[rank, at] == call.expected(rank, world), (rank, call)


KILLED = (*CALLS[3:6], Called("all_gather", STEP + 3), Called("reduce_scatter", 2 * STEP), Called("all_reduce", 9))


@pytest.mark.parametrize("arena", [0, ARENA])
def test_a_rank_killed_at_any_step_leaves_the_others_with_right_results_or_none(arena: int) -> None:
    host = Host(3, 0, chunk=CHUNK, arena=arena)
    host.run(lambda memory: work(memory, {}, 1_000_000, KILLED))
    total = host.steps[2]
    for step in range(1, total + 1, 3):
        host = Host(3, 0, chunk=CHUNK, kill=(2, step), arena=arena)
        results: dict[tuple[int, int], bytes] = {}
        host.run(lambda memory, results=results: work(memory, results, 300, KILLED))
        assert isinstance(host.ended.pop(2), Killed | None)
        assert host.ended == {0: None, 1: None}, step
        for (rank, at), bits in results.items():
            assert bits == KILLED[at].expected(rank, 3), (step, rank, at)


@pytest.mark.parametrize("what", ["input", "result", "copied"])
def test_what_changes_while_it_is_used_is_found_out(what: str) -> None:
    host = Host(2, 3, chunk=CHUNK)
    size = SIZES[-1]
    place = host.layout.result(0) if what == "result" else host.layout.input(0)
    errors: dict[int, Exception] = {}

    def spoil() -> None:
        host.segments[1][place + 4] ^= 1

    def spoiling(values: Sequence[Array], out: Array, after: After) -> None:
        def used(a: int, b: int) -> None:
            if what == "input" and a == 0:
                spoil()
            after(a, b)

        combine(values, out, used)

    def rank(memory: SteppedMemory) -> None:
        call = Called("all_gather" if what == "copied" else "all_reduce", size)
        out = np.zeros(len(call.expected(memory.rank, 2)) // 4, np.float32)
        if what == "copied":  # every rank gives as much, so that there is something in round 0
            out = np.zeros(2 * size, np.float32)
            routes = Routes([size, size])
            passage: Passage = Moved(memory.layout, memory.rank, routes, leaf(memory.rank, size), out, reads=True)
        else:
            passage = call.passage(memory.layout, memory.rank, 2, out, spoiling)
        run = carry(memory, 0, passage)
        try:
            for idle, needs in enumerate(run):
                while not reached(memory, needs):
                    if errors:
                        return
                if memory.rank == 0 and (idle > 2 if what == "result" else idle == 1 and what == "copied"):
                    spoil()
        except Spoiled as error:
            errors[memory.rank] = error

    host.run(rank)
    assert isinstance(errors[0], Spoiled)
    assert errors[0].rank == 1
    assert errors[0].bits


def one_call(
    memory: SteppedMemory, call: Called, out: Array, lending: Lending
) -> Generator[tuple[int, bool], None, None]:
    """A call, step by step: at which stage it waits, and whether all have reached it."""
    run = carry(memory, 0, call.passage(memory.layout, memory.rank, memory.layout.world, out, combine, lending.stand))
    try:
        for needs in run:
            while not reached(memory, needs):
                yield needs, False
            yield needs, True
    finally:
        run.close()


GIVEN_UP = (
    Called("all_reduce", 5 * STEP + 3),
    Called("reduce_scatter", 6 * STEP + 2),
    Called("all_gather", 9 * STEP + 1),
    Called("all_to_all", 3 * STEP + 7),
)


@pytest.mark.parametrize("call", GIVEN_UP, ids=lambda call: call.what)
@pytest.mark.parametrize("turn", range(6))
def test_a_rank_that_gives_a_call_up_and_changes_what_it_lent_is_blamed_by_nobody(call: Called, turn: int) -> None:
    """The others have a right result, or wait for what does not come, which is the end of the view."""
    met = 0
    for seed in range(40):
        host = Host(3, seed, chunk=CHUNK, arena=ARENA)
        results: dict[int, bytes] = {}

        def rank(memory: SteppedMemory, results: dict[int, bytes] = results) -> None:
            nonlocal met
            out = np.zeros(len(call.expected(memory.rank, 3)) // 4, np.float32)
            lending = Lending(memory)
            steps, waits, turns = one_call(memory, call, out, lending), 0, 0
            for needs, there in steps:
                waits = 0 if there else waits + 1
                turns += there
                if memory.rank == 1 and turns > turn:
                    steps.close()
                    lending.over()
                    return
                if waits > 400:
                    met += needs > 1 << 60
                    return
            results[memory.rank] = out.tobytes()

        host.run(rank)
        assert host.ended == dict.fromkeys(range(3)), (seed, host.ended)
        for each, bits in results.items():
            assert bits == call.expected(each, 3), (seed, each)
    assert met or turn not in (1, 2)  # somebody has met with bytes that had changed, or with the word of it


@pytest.mark.parametrize("call", GIVEN_UP, ids=lambda call: call.what)
def test_who_changes_what_it_has_lent_while_the_call_is_under_way_is_named(call: Called) -> None:
    named = 0
    for seed in range(20):
        host = Host(3, seed, chunk=CHUNK, arena=ARENA)
        found: dict[int, BaseException] = {}

        def rank(memory: SteppedMemory, found: dict[int, BaseException] = found) -> None:
            out = np.zeros(len(call.expected(memory.rank, 3)) // 4, np.float32)
            lending, waits = Lending(memory), 0
            try:
                for turn, (_, there) in enumerate(one_call(memory, call, out, lending)):
                    waits = 0 if there else waits + 1
                    if memory.rank == 1 and turn == 1:
                        lending.over()
                    if waits > 400:
                        return
            except Spoiled as spoiled:
                found[memory.rank] = spoiled

        host.run(rank)
        assert all(isinstance(error, Spoiled) and error.rank == 1 and error.bits for error in found.values())
        assert all("quicoll.empty" in str(error) for error in found.values())
        named += bool(found)
    assert named > 10


@pytest.mark.parametrize("place", [ARENA + 1, ARENA - 4, (1 << 64) - 2])
def test_a_rank_that_names_a_place_that_it_has_not_is_named(place: int) -> None:
    host = Host(2, 0, chunk=CHUNK, arena=ARENA)
    errors: dict[int, Spoiled] = {}

    def rank(memory: SteppedMemory) -> None:
        if memory.rank == 1:
            memory.place = lambda values: place  # a peer that lies
        out, waits = np.zeros(STEP, np.float32), 0
        try:
            for _, there in one_call(memory, Called("all_reduce", STEP), out, Lending(memory)):
                waits = 0 if there else waits + 1
                if waits > 400:
                    return
        except Spoiled as error:
            errors[memory.rank] = error

    host.run(rank)
    assert errors[0].rank == 1
    assert not errors[0].bits


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_all_of_a_chunk_once_and_fit_into_their_slots(seed: int) -> None:
    chance = random.Random(seed)
    world, itemsize = chance.randrange(2, 65), chance.choice([1, 2, 8, 16, 260, MAX_ITEM])
    layout = SegmentLayout.of_ranks(world)
    for count in (1, 15, 16, 17, chance.randrange(1, layout.chunk // itemsize + 1), layout.chunk // itemsize):
        parts = share_out(count, world)
        assert len(parts) == world
        assert [a for a, _ in parts] == [0, *[b for _, b in parts[:-1]]]
        assert parts[-1][1] == count
        assert all(0 <= (b - a) * itemsize <= layout.share for a, b in parts)


def test_nothing_in_a_segment_overlaps() -> None:
    layout = SegmentLayout(5, 8192)
    places = [(0, 4096)]
    places += [(layout.input_record(i, reader), RECORD) for i in range(RING) for reader in range(5)]
    places += [(layout.result_sum(i), 8) for i in range(RING)]
    places += [(layout.slot(i), layout.slot(1) - layout.slot(0)) for i in range(16)]
    places += [(layout.input(i), layout.chunk) for i in range(RING)]
    places += [(layout.result(i), layout.share) for i in range(RING)]
    places.sort()
    assert all(at + size <= following for (at, size), (following, _) in pairwise(places))
    assert sum(places[-1]) == layout.base
    rooms = [
        (layout.room(number), layout.of_group(world).base) for number in range(layout.rooms) for world in (2, 3, 5)
    ]
    assert rooms[0][0] == layout.base
    assert all(at % 4096 == 0 and at + size <= layout.room(i // 3 + 1) for i, (at, size) in enumerate(rooms))
    assert layout.room(MAX_ROOMS) == layout.taken_at < layout.size
    assert 8 * (OWNERS + 2 * MAX_ROOMS) <= 4096


def test_all_segments_of_a_host_together_remain_in_bounds() -> None:
    for world in range(2, MAX_WORLD + 1):
        layout = SegmentLayout.of_ranks(world)
        assert CHUNK_AT_LEAST <= layout.chunk <= 8 << 20
        assert world * layout.base < 450 << 20
        assert layout.of_group(2).base < 8 << 20
