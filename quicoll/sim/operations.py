"""One use of each operation in the built-in workload, with a result that every rank knows beforehand.

A step calls one of them beside its reduction; each seed has a few, and all seeds together all of them, with lists,
`out=`, exact sums, encodings for the wire, uneven parts and parts of nobody. What a rank sends depends on its rank, on
the step and on the view: a result of another view, or of another rank, is a wrong one. Each rank computes in plain
numpy what it has to get, and compares bit for bit before it votes; so a mistake shows on the rank that has it,
although the result of a scatter or of a `recv` is no part of the state that the ranks have in common.

Sizes are small: an operation costs its messages. The reduction of the workload itself is above the thresholds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.local.tensors import empty

if TYPE_CHECKING:
    from quicoll.collectives.group import Group

__all__ = ["LONG_FOR_ONE", "OPERATIONS", "CallSite", "long_ones", "several_at_once", "tree"]


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where an operation is called: by which rank, among how many; mark: one number for the step and its view."""

    rank: int
    world: int
    mark: int

    @property
    def root(self) -> int:
        """Another one from step to step."""
        return self.mark % self.world

    def counts(self, turn: int = 0) -> list[int]:
        """Rows for each rank: 0 to 3, not all alike."""
        return [(self.mark + 3 * rank + turn) % 4 for rank in range(self.world)]

    def numbers(self, rank: int, *shape: int, salt: int = 0) -> Any:
        """Return int64 values below 1000 that this rank sends."""
        count = math.prod(shape)
        mixed = (np.arange(count, dtype=np.uint64) + np.uint64(salt)) * np.uint64(2654435761)
        return ((mixed + np.uint64(self.mark * 97 + rank * 1009)) % np.uint64(997)).astype(np.int64).reshape(shape)

    def fractions(self, rank: int, *shape: int, dtype: Any = np.float32) -> Any:
        """Values whose sum depends on the order of adding."""
        return (self.numbers(rank, *shape).astype(dtype) / dtype(317.0) - dtype(1.5)).astype(dtype)

    @property
    def ranks(self) -> range:
        return range(self.world)


def tree(leaves: list[Any]) -> Any:
    """The canonical order: the left child has the largest power of two of leaves that is below their number."""
    if len(leaves) == 1:
        return leaves[0]
    left = 1 << ((len(leaves) - 1).bit_length() - 1)
    return tree(leaves[:left]) + tree(leaves[left:])


def _same(what: str, found: Any, expected: Any) -> None:
    """Raise AssertionError unless these are the same bits; lists by their elements."""
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        for one, other in zip(found, expected, strict=True):
            _same(what, one, other)
    elif isinstance(expected, np.ndarray):
        alike = isinstance(found, np.ndarray) and found.dtype == expected.dtype and found.shape == expected.shape
        if not alike or found.tobytes() != expected.tobytes():
            raise AssertionError(f"{what} gave {found!r}, not {expected!r}")
    elif found != expected:
        raise AssertionError(f"{what} gave {found!r}, not {expected!r}")


# -- reductions ------------------------------------------------------------------------------------------------------


async def _exact_list_with_out(group: Group, here: CallSite) -> None:
    shapes = ((5,), (2, 3))
    x = [here.fractions(here.rank, *shape, dtype=np.float64) for shape in shapes]
    out = [np.empty(shape) for shape in shapes]
    await group.all_reduce(x, out=out, exact=True)
    for shape, found in zip(shapes, out, strict=True):
        leaves = [here.fractions(rank, *shape, dtype=np.float64).reshape(-1) for rank in here.ranks]
        sums = [math.fsum(column) for column in zip(*leaves, strict=True)]
        _same("an exact all_reduce of a list", found, np.array(sums).reshape(shape))


async def _wide_average(group: Group, here: CallSite) -> None:
    found = await group.all_reduce(here.fractions(here.rank, 7), op="avg", precision="float64")
    total = tree([here.fractions(rank, 7).astype(np.float64) for rank in here.ranks])
    _same("an average in float64", found, (total / here.world).astype(np.float32))


async def _bfloat16_on_the_wire(group: Group, here: CallSite) -> None:
    """Of integers so small that they and their sums have no more digits than bfloat16."""
    found = await group.all_reduce((here.numbers(here.rank, 9) % 15).astype(np.float32), wire="bfloat16")
    total = sum((here.numbers(rank, 9) % 15).astype(np.float32) for rank in here.ranks)
    _same("a sum that travels as bfloat16", found, total)


async def _int8_on_the_wire(group: Group, here: CallSite) -> None:
    """Of integers whose largest is 126 on every rank, so that the scale is 1."""

    def given(rank: int) -> Any:
        return np.append(here.numbers(rank, 8) % 100, 126).astype(np.float32)

    found = await group.all_reduce(given(here.rank), op="max", wire="int8")
    _same("a maximum that travels as int8", found, np.maximum.reduce([given(rank) for rank in here.ranks]))


async def _in_the_order_of_a_ring(group: Group, here: CallSite) -> None:
    found = await group.all_reduce(here.numbers(here.rank, 70).astype(np.float32), reduce_order="ring")
    _same("a ring", found, sum(here.numbers(rank, 70).astype(np.float32) for rank in here.ranks))


_INTEGERS: dict[str, Any] = {
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


async def _of_integers(group: Group, here: CallSite) -> None:
    op, ufunc = list(_INTEGERS.items())[here.mark % len(_INTEGERS)]
    x = here.numbers(here.rank, 3, 2)
    found = await group.all_reduce(x, op=op, out=x)
    _same(op, found, ufunc.reduce([here.numbers(rank, 3, 2) for rank in here.ranks]))


async def _to_a_root(group: Group, here: CallSite) -> None:
    found = await group.reduce([here.fractions(here.rank, 4), here.fractions(here.rank, 2, 2)], root=here.root)
    if here.rank == here.root:
        expected = [tree([here.fractions(rank, *shape) for rank in here.ranks]) for shape in ((4,), (2, 2))]
        _same("a reduce", found, expected)
    else:
        _same("a reduce elsewhere than at its root", found, None)


async def _scattered(group: Group, here: CallSite) -> None:
    counts = here.counts()
    start = sum(counts[: here.rank])
    found = await group.reduce_scatter(here.fractions(here.rank, sum(counts), 3), counts=counts)
    total = tree([here.fractions(rank, sum(counts), 3) for rank in here.ranks])
    _same("a reduce_scatter", found, total[start : start + counts[here.rank]])


# -- movements -------------------------------------------------------------------------------------------------------


async def _gathered_by_all(group: Group, here: CallSite) -> None:
    counts = here.counts()
    out = np.empty((sum(counts), 2), np.int64)
    known = counts if here.root % 2 else None
    found = await group.all_gather(here.numbers(here.rank, counts[here.rank], 2), counts=known, out=out)
    _same("an all_gather", found, np.concatenate([here.numbers(rank, counts[rank], 2) for rank in here.ranks]))


async def _gathered_by_one(group: Group, here: CallSite) -> None:
    counts = here.counts(1)
    mine, known = here.numbers(here.rank, counts[here.rank]), counts if here.root % 2 else None
    found = await group.gather(mine, root=here.root, counts=known, algorithm="auto" if known else "hierarchical")
    expected = np.concatenate([here.numbers(rank, counts[rank]) for rank in here.ranks])
    _same("a gather", found, expected if here.rank == here.root else None)


async def _scattered_by_one(group: Group, here: CallSite) -> None:
    counts = here.counts(2)
    whole = here.numbers(here.root, sum(counts), 2)
    mine = whole if here.rank == here.root else np.empty((0, 2), np.int64)
    found = await group.scatter(mine, root=here.root, counts=counts if here.rank == here.root else None)
    start = sum(counts[: here.rank])
    _same("a scatter", found, whole[start : start + counts[here.rank]])


def _part(here: CallSite, source: int, to: int) -> Any:
    return here.numbers(source, (here.mark + source + 2 * to) % 4, salt=to)


async def _exchanged_rows(group: Group, here: CallSite) -> None:
    parts = [_part(here, here.rank, rank) for rank in here.ranks]
    found = await group.all_to_all(np.concatenate(parts), counts=[len(part) for part in parts])
    _same("an all_to_all", found, np.concatenate([_part(here, rank, here.rank) for rank in here.ranks]))


async def _exchanged_lists(group: Group, here: CallSite) -> None:
    found = await group.all_to_all([_part(here, here.rank, rank) for rank in here.ranks])
    _same("an all_to_all of lists", found, [_part(here, rank, here.rank) for rank in here.ranks])


async def _broadcast(group: Group, here: CallSite) -> None:
    out = [np.empty(6, np.int64), np.empty((2, 2), np.int64)]
    x = [here.numbers(here.rank, 6), here.numbers(here.rank, 2, 2)]
    await group.broadcast(x, root=here.root, out=out, algorithm=("auto", "tree", "hierarchical")[here.mark % 3])
    _same("a broadcast", out, [here.numbers(here.root, 6), here.numbers(here.root, 2, 2)])


async def _to_the_next(group: Group, here: CallSite) -> None:
    if here.world == 1:
        return
    after, before = (here.rank + 1) % here.world, (here.rank - 1) % here.world
    sent = group.send(here.numbers(here.rank, 5), to=after)
    received = group.recv(np.empty(5, np.int64), source=before)
    await sent
    _same("a recv", await received, here.numbers(before, 5))


async def _object_from_one(group: Group, here: CallSite) -> None:
    told = await group.broadcast_object({"mark": here.mark, "by": here.rank}, root=here.root)
    _same("a broadcast_object", told, {"mark": here.mark, "by": here.root})


async def _objects_of_all(group: Group, here: CallSite) -> None:
    told = await group.all_gather_object([here.rank, here.mark, "x" * here.rank])
    _same("an all_gather_object", told, [[rank, here.mark, "x" * rank] for rank in here.ranks])


async def _barrier(group: Group, here: CallSite) -> None:
    """That none ends too early is for the invariant "together"."""
    await group.barrier()


async def several_at_once(group: Group, here: CallSite) -> None:
    """Small and large reductions in flight together, more of them than a rank may be ahead in its host's memory.

    Every other rank lends its large tensor, and changes it when it is its own again. It is none of OPERATIONS: those
    are drawn for every seed, and this is for the ranks of one host.
    """
    given = here.fractions(here.rank, 21_001)
    if (here.rank + here.mark) % 2:
        given, values = empty(given.shape, given.dtype), given
        given[:] = values
    await _several(group, here, given)
    await asyncio.sleep(0)  # who looks whether it was touched does so in the turn in which an operation ends
    given[:] = math.nan


async def _several(group: Group, here: CallSite, given: Any) -> None:
    small = [group.all_reduce(here.fractions(here.rank, 11, dtype=np.float64) * turn) for turn in range(1, 20)]
    large = group.all_reduce(given)
    middle = group.barrier()
    integers = group.all_reduce([here.numbers(here.rank, 10_000), here.numbers(here.rank, 3)], op="max")
    for turn in (19, *range(1, 19)):  # the last one first
        expected = tree([here.fractions(rank, 11, dtype=np.float64) * turn for rank in here.ranks])
        _same("one of several all_reduces", await small[turn - 1], expected)
    most = [np.maximum.reduce([here.numbers(rank, count) for rank in here.ranks]) for count in (10_000, 3)]
    _same("a large maximum", await integers, most)
    await middle
    _same("a large all_reduce", await large, tree([here.fractions(rank, 21_001) for rank in here.ranks]))


LONG_FOR_ONE = 200 << 10
"""Bytes of a message that is so long that one rank alone sends it: what a run costs is its datagrams."""


async def long_ones(group: Group, here: CallSite, nbytes: int) -> None:
    """Messages of so many bytes, from rank to rank and in an operation of all: what lanes carry, where there are any.

    Two operations are in flight at once, and some messages are more than a lane has slots for. Those that are very long
    go from one rank to the next one alone.
    """
    if here.world == 1:
        return
    count = nbytes // 8
    after, before = (here.rank + 1) % here.world, (here.rank - 1) % here.world
    alone = nbytes > LONG_FOR_ONE
    sent = received = None
    if not alone or here.rank == here.root:
        sent = group.send(here.numbers(here.rank, count, salt=1), to=after)
    if not alone or before == here.root:
        received = group.recv(np.empty(count, np.int64), source=before)
    if not alone:
        await _LONG[here.mark % len(_LONG)](group, here, count)
    if received is not None:
        _same("a long recv", await received, here.numbers(before, count, salt=1))
    if sent is not None:
        await sent


async def _long_reduction(group: Group, here: CallSite, count: int) -> None:
    found = await group.all_reduce(here.fractions(here.rank, count, dtype=np.float64), algorithm="tree")
    _same("a long all_reduce", found, tree([here.fractions(rank, count, dtype=np.float64) for rank in here.ranks]))


async def _long_broadcast(group: Group, here: CallSite, count: int) -> None:
    found = await group.broadcast(here.numbers(here.rank, count), root=here.root, algorithm="tree")
    _same("a long broadcast", found, here.numbers(here.root, count))


async def _long_parts(group: Group, here: CallSite, count: int) -> None:
    found = await group.gather(here.numbers(here.rank, count), root=here.root)
    expected = np.concatenate([here.numbers(rank, count) for rank in here.ranks])
    _same("a long gather", found, expected if here.rank == here.root else None)


_LONG = (_long_reduction, _long_broadcast, _long_parts)

OPERATIONS: dict[str, Callable[[Group, CallSite], Awaitable[None]]] = {
    "exact list with out": _exact_list_with_out,
    "wide average": _wide_average,
    "bfloat16 on the wire": _bfloat16_on_the_wire,
    "int8 on the wire": _int8_on_the_wire,
    "ring": _in_the_order_of_a_ring,
    "integers": _of_integers,
    "reduce": _to_a_root,
    "reduce_scatter": _scattered,
    "all_gather": _gathered_by_all,
    "gather": _gathered_by_one,
    "scatter": _scattered_by_one,
    "all_to_all": _exchanged_rows,
    "all_to_all of lists": _exchanged_lists,
    "broadcast": _broadcast,
    "send and recv": _to_the_next,
    "broadcast_object": _object_from_one,
    "all_gather_object": _objects_of_all,
    "barrier": _barrier,
}
"""By name, in the order in which a seed's choice is drawn."""
