"""Cases of every operation with every type, and the comparison of what a group makes of them with slow definitions.

A case is a value: its inputs come from its seed alone, so they, and the expected result, are made once in a process,
whatever the number of ranks and however often the case is tried. `reductions` and `moves` are what one rank does: issue
all, then await and compare each. They run wherever a job has other ranks that do the same: in a cluster on loopback
sockets, in a step of a simulated one.

By default each operation meets each type at a world size of 2 or 3 and at one of 4 to 8, and shapes, numbers of leaves,
algorithms, precisions, kinds and layouts of memory take turns, so that all of them come up. A deep run
(tests/helpers/depth.py) takes each once at each world size; QUICOLL_TEST_ORACLE=20 takes twenty times as many, up to
all combinations that there are (and more time than a test has by default: pytest --timeout=0).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from depth import DEEP
from slow_reference import COMPLEX, DTYPES, FLOATS, INTEGERS, OPS, is_defined, reduced

if TYPE_CHECKING:
    from quicoll.job import Job

DEPTH = int(os.environ.get("QUICOLL_TEST_ORACLE", "1"))
WORLDS = (1, 2, 3, 4, 5, 7, 8)
SHAPES = ((), (0,), (1,), (3,), (67,), (5, 13), (2, 0, 3), (129,))
REDUCTIONS = {
    "all_reduce": ("direct", "tree", "hierarchical", "exchange", "auto"),
    "reduce": ("direct", "tree", "hierarchical", "auto"),
    "reduce_scatter": ("direct", "tree", "hierarchical", "auto"),
}
MOVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "all_to_all lists", "send and recv", "barrier")
DEFINED = [(name, op, dtype) for name, op, dtype in product(REDUCTIONS, OPS, DTYPES) if is_defined(op, dtype)]
PRECISIONS = ("default", "float64", "exact")
LAYOUTS = ("numpy", "torch", "numpy strided", "torch strided")
TOGETHER = 24  # operations in flight
KEPT = 4 * TOGETHER  # cases whose inputs and results stay in memory
WHOLE = DEEP or DEPTH > 1

T = TypeVar("T")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One reduction."""

    name: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    leaves: int
    algorithm: str
    precision: str
    layout: str
    seed: int


@dataclass(frozen=True)
class Move:
    """All MOVES with one type."""

    dtype: str
    seed: int


def cases(world: int, turn: int = 0) -> Iterator[Case]:
    """turn: where the turns begin; another one gives other shapes and algorithms to the same operations and types."""
    turn += world
    for name, op, dtype in DEFINED:
        every = _axes(name, tuple(each for each in PRECISIONS if is_defined(op, dtype, each)), world)
        for _ in range(min(DEPTH, len(every))):
            turn += 1
            # Steps of a prime: neighbours in turn differ in every axis, and none comes twice within one round.
            yield Case(name, op, dtype, *every[turn * 1009 % len(every)], turn)


def shared(every: Sequence[T], world: int, shares: dict[int, tuple[int, int]]) -> list[T]:
    """The part of these that a world size has where several divide them: from which on, and one in how many."""
    first, one_in = (0, 1) if WHOLE else shares[world]
    return list(every)[first::one_in]


@lru_cache(maxsize=64)
def _axes(name: str, precisions: tuple[str, ...], world: int) -> list[tuple[tuple[int, ...], int, str, str, str]]:
    counts = sorted({1, world, world + 1, 8, 2 * world + 3})
    every = product(SHAPES, counts, REDUCTIONS[name], precisions, LAYOUTS)
    return [axes for axes in every if axes[0] or name != "reduce_scatter"]


# ---------------------------------------------------------------------------------------------------------------------
# Inputs


def width(dtype: str) -> int:
    """Bytes of a number; a complex one has two."""
    part = COMPLEX.get(dtype, dtype)
    if part in FLOATS:
        return FLOATS[part].size // 8
    return INTEGERS[part][0] // 8 if part in INTEGERS else 1


def patterns(dtype: str, count: int, rng: np.random.Generator) -> Array:
    """Numbers as unsigned integers: any patterns, special ones, and ones that are near each other.

    Of floats, every fifth is a zero in all leaves: a zero among other numbers seldom says how its sign was found.
    """
    size = width(dtype)
    anything = np.frombuffer(rng.bytes(count * size), f"u{size}")
    if dtype == "bool":
        return anything & 1
    if dtype in INTEGERS:
        few = rng.integers(0, 4, count).astype(f"u{size}")
        return np.where(rng.random(count) < 0.5, anything, few)
    form = FLOATS[COMPLEX.get(dtype, dtype)]
    sign = 1 << (form.size - 1)
    special = [0, 1, form.top - 1, form.top, form.nan, (1 << (form.digits - 1)) - 1, 1 << (form.digits - 1)]
    if form.infinite and form.digits > 3:
        special.append(form.top + 1)  # a NaN that is not the one
    drawn = rng.choice(np.array([*special, *(sign | bits for bits in special)], f"u{size}"), count)
    # Any conversion will do: these are inputs, and what it makes of a number is what both sides begin with.
    near = torch.from_numpy(np.ldexp(rng.standard_normal(count), rng.integers(-4, 4, count)))
    near_bits = near.to(getattr(torch, COMPLEX.get(dtype, dtype))).view(getattr(torch, f"int{8 * size}")).numpy()
    pick = rng.random(count)
    found = np.where(pick < 0.25, anything, np.where(pick < 0.4, drawn, near_bits.view(f"u{size}")))
    return np.where(np.arange(count) % 5 == 2, rng.choice(np.array([0, sign], f"u{size}"), count), found)


def tensor(bits: Array, dtype: str, shape: tuple[int, ...], layout: str) -> Any:
    """The tensor of these patterns, in memory of the layout."""
    kind, *strided = layout.split()
    unknown_to_numpy = dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    if kind == "numpy" and not unknown_to_numpy:
        value = bits.view(dtype).reshape(shape)
        if strided:
            room = np.zeros((*shape[::-1], 2), value.dtype)
            room[..., 1].T[...] = value
            value = room[..., 1].T
        return value
    plain = torch.from_numpy(bits.view(f"i{bits.itemsize}" if unknown_to_numpy else dtype).copy())
    given = (plain.view(getattr(torch, dtype)) if unknown_to_numpy else plain).reshape(shape)
    if strided:
        room = torch.zeros((*shape[::-1], 2), dtype=getattr(torch, dtype))
        turned = room[..., 1].permute(tuple(reversed(range(len(shape)))))
        turned.copy_(given)
        given = turned
    return given


def bits_of(value: Any, dtype: str) -> Array:
    """The patterns of a result, a complex number's parts one after the other."""
    if isinstance(value, torch.Tensor):
        flat = value.contiguous().reshape(-1).view(torch.uint8).numpy() if value.numel() else np.empty(0, np.uint8)
    else:
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return flat.view(f"u{width(dtype)}")


# ---------------------------------------------------------------------------------------------------------------------
# Reductions


@lru_cache(maxsize=KEPT)
def prepared(case: Case) -> tuple[list[Any], Array]:
    """The leaves of all ranks, and the patterns of their reduction by its definition: ranks are no part of it."""
    rng = np.random.default_rng(case.seed)
    size = math.prod(case.shape) * (2 if case.dtype in COMPLEX else 1)
    leaves = [patterns(case.dtype, size, rng) for _ in range(case.leaves)]
    expected = reduced(case.op, case.dtype, [leaf.tolist() for leaf in leaves], case.precision)
    inputs = [tensor(leaf, case.dtype, case.shape, case.layout) for leaf in leaves]
    return inputs, np.array(expected, f"u{width(case.dtype)}")


def held(rank: int, world: int, leaves: int) -> range:
    return range(rank * leaves // world, (rank + 1) * leaves // world)


def rows_of(rank: int, world: int, rows: int) -> tuple[int, int]:
    each = -(-rows // world)
    return min(rank * each, rows), min((rank + 1) * each, rows)


async def reductions(job: Job, chosen: Sequence[Case]) -> list[tuple[str, str, str]]:
    """This rank's part in all of them at once. Gives name, op and dtype of each, once its bits are found right."""
    world, rank = job.world_size, job.rank
    handles = []
    for case in chosen:
        leaves, _ = prepared(case)
        shards = job.group.shards(case.leaves)
        mine = shards.leaves([leaves[number] for number in held(rank, world, case.leaves)], like=leaves[0])
        how: dict[str, Any] = {"op": case.op, "algorithm": case.algorithm, "precision": case.precision}
        if case.name == "reduce":
            how["root"] = case.seed % world
        handles.append(getattr(job.group, case.name)(mine, **how))
    compared = []
    for case, handle in zip(chosen, handles, strict=True):
        result = await handle
        leaves, expected = prepared(case)
        if case.name == "reduce" and rank != case.seed % world:
            assert result is None, case
        else:
            shape = case.shape
            if case.name == "reduce_scatter":
                first, last = rows_of(rank, world, shape[0])
                row = len(expected) // shape[0] if shape[0] else 0
                expected, shape = expected[first * row : last * row], (last - first, *shape[1:])
            assert tuple(result.shape) == shape, case
            assert isinstance(result, torch.Tensor) == isinstance(leaves[0], torch.Tensor), case
            assert np.array_equal(bits_of(result, case.dtype), expected), case
        compared.append((case.name, case.op, case.dtype))
    return compared


# ---------------------------------------------------------------------------------------------------------------------
# Moves

WIDE = 3  # numbers in a row


@dataclass(frozen=True)
class Moved:
    """What the ranks of a world give: to whom[i][j] rows go from rank i to rank j, in a tensor of rank i's."""

    tensors: list[Any]
    patterns: list[list[int]]
    to_whom: list[list[int]]

    def part(self, of: int, to: int, counts: Sequence[int]) -> list[int]:
        """The patterns that go from one rank to another, where the one divides its rows so."""
        row = len(self.patterns[of]) // max(1, sum(counts))
        return self.patterns[of][sum(counts[:to]) * row : sum(counts[: to + 1]) * row]


@lru_cache(maxsize=KEPT)
def moved(move: Move, world: int) -> Moved:
    rng = np.random.default_rng(move.seed)
    numbers = WIDE * (2 if move.dtype in COMPLEX else 1)
    to_whom = [(rng.integers(0, 4, world) * rng.integers(0, 2, world)).tolist() for _ in range(world)]
    given = [patterns(move.dtype, sum(counts) * numbers, rng) for counts in to_whom]
    layout = LAYOUTS[move.seed % len(LAYOUTS)]
    tensors = [
        tensor(bits, move.dtype, (sum(counts), WIDE), layout) for bits, counts in zip(given, to_whom, strict=True)
    ]
    return Moved(tensors, [bits.tolist() for bits in given], to_whom)


def even(rows: int, world: int) -> list[int]:
    ends = [rows_of(rank, world, rows) for rank in range(world)]
    return [last - first for first, last in ends]


def _issued(job: Job, move: Move) -> list[tuple[str, Any, Any]]:
    """The name of each operation, its handle, and the patterns that have to come: of a tensor, of several, or None."""
    group, rank, world = job.group, job.rank, job.world_size
    given, root = moved(move, world), move.seed % world
    x, here, to_whom, part = given.tensors[rank], given.patterns, given.to_whom, given.part
    unlike = torch.empty_like if isinstance(x, torch.Tensor) else np.empty_like
    whole = list(chain(*here))
    parts = [x[sum(to_whom[rank][:to]) : sum(to_whom[rank][: to + 1])] for to in range(world)]
    coming = [part(of, rank, to_whom[of]) for of in range(world)]
    evenly = [part(of, rank, even(sum(to_whom[of]), world)) for of in range(world)]
    issued = [
        ("broadcast", group.broadcast(x if rank == root else unlike(given.tensors[root]), root=root), here[root]),
        ("all_gather", group.all_gather(x), whole),
        ("gather", group.gather(x, root=root), whole if rank == root else None),
        ("scatter", group.scatter(x, root=root), evenly[root]),
        ("scatter", group.scatter(x, root=root, counts=to_whom[rank] if rank == root else None), coming[root]),
        ("all_to_all", group.all_to_all(x), list(chain(*evenly))),
        ("all_to_all", group.all_to_all(x, counts=to_whom[rank]), list(chain(*coming))),
        ("all_to_all lists", group.all_to_all(parts), coming),
        ("barrier", group.barrier(), None),
    ]
    if world > 1:
        after, before = (rank + 1) % world, (rank - 1) % world
        issued.append(("send and recv", group.send(x, to=after), None))
        issued.append(("send and recv", group.recv(given.tensors[before], source=before), here[before]))
    return issued


async def moves(job: Job, chosen: Sequence[Move]) -> list[tuple[str, str]]:
    """This rank's part in all of them at once. Gives name and dtype of each, once its bits are found right."""
    compared = []
    for move, issued in [(move, _issued(job, move)) for move in chosen]:
        for name, handle, expected in issued:
            got = await handle
            found: Any = None
            if isinstance(got, list):
                found = [bits_of(each, move.dtype).tolist() for each in got]
            elif got is not None:
                found = bits_of(got, move.dtype).tolist()
            assert found == expected, (name, move, job.rank, job.world_size)
            compared.append((name, move.dtype))
    return compared
