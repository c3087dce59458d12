"""Every operation on every type at every world size, bit for bit against definitions written out in slow Python.

By default each operation meets each type once at each world size, and shapes, numbers of leaves, algorithms,
precisions, kinds and layouts of memory take turns, so that all of them come up. QUICOLL_ORACLE=20 takes twenty times as
many, up to all combinations that there are.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from slow_reference import COMPLEX, DTYPES, FLOATS, INTEGERS, OPS, is_defined, reduced

from quicoll.errors import LocalError
from quicoll.testing import Cluster, cluster

DEPTH = int(os.environ.get("QUICOLL_ORACLE", "1"))
WORLDS = (1, 2, 3, 4, 5, 7, 8)
SHAPES = ((), (0,), (1,), (3,), (67,), (5, 13), (2, 0, 3), (129,))
REDUCTIONS = {
    "all_reduce": ("direct", "tree", "hierarchical", "exchange", "auto"),
    "reduce": ("direct", "tree", "hierarchical", "auto"),
    "reduce_scatter": ("direct", "tree", "hierarchical", "auto"),
}
PRECISIONS = ("default", "float64", "exact")
LAYOUTS = ("numpy", "torch", "numpy strided", "torch strided")
TOGETHER = 24  # operations in flight

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    name: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    leaves: int
    algorithm: str
    precision: str
    layout: str
    seed: int


def width(dtype: str) -> int:
    """Bytes of a number; a complex one has two."""
    part = COMPLEX.get(dtype, dtype)
    if part in FLOATS:
        return FLOATS[part].size // 8
    return INTEGERS[part][0] // 8 if part in INTEGERS else 1


def cases(world: int) -> Iterator[Case]:
    turn = world
    for name, op, dtype in product(REDUCTIONS, OPS, DTYPES):
        counts = sorted({1, world, world + 1, 8, 2 * world + 3})
        every = list(product(SHAPES, counts, REDUCTIONS[name], PRECISIONS, LAYOUTS))
        every = [axes for axes in every if is_defined(op, dtype, axes[3]) and (axes[0] or name != "reduce_scatter")]
        if not every:
            continue
        for _ in range(min(DEPTH, len(every))):
            turn += 1
            # Steps of a prime: neighbours in turn differ in every axis, and none comes twice within one round.
            yield Case(name, op, dtype, *every[turn * 1009 % len(every)], turn)


def patterns(dtype: str, count: int, rng: np.random.Generator) -> Array:
    """Numbers as unsigned integers: any patterns, special ones, and ones that are near each other."""
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
    near = [form.encode(float(value)) for value in np.ldexp(rng.standard_normal(count), rng.integers(-4, 4, count))]
    pick = rng.random(count)
    return np.where(pick < 0.25, anything, np.where(pick < 0.4, drawn, np.array(near, f"u{size}")))


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


def held(rank: int, world: int, leaves: int) -> range:
    return range(rank * leaves // world, (rank + 1) * leaves // world)


def rows_of(rank: int, world: int, rows: int) -> tuple[int, int]:
    each = -(-rows // world)
    return min(rank * each, rows), min((rank + 1) * each, rows)


async def reductions(jobs: Cluster, chosen: Sequence[Case]) -> None:
    world = len(jobs)
    inputs, wanted = [], []
    for case in chosen:
        parts = 2 if case.dtype in COMPLEX else 1
        rng = np.random.default_rng(case.seed)
        size = math.prod(case.shape) * parts
        leaves = [patterns(case.dtype, size, rng) for _ in range(case.leaves)]
        inputs.append([tensor(leaf, case.dtype, case.shape, case.layout) for leaf in leaves])
        expected = reduced(case.op, case.dtype, [leaf.tolist() for leaf in leaves], case.precision)
        wanted.append(np.array(expected, f"u{width(case.dtype)}"))

    async def one(job: Any) -> None:
        handles = []
        for case, leaves in zip(chosen, inputs, strict=True):
            shards = job.group.shards(case.leaves)
            mine = shards.leaves([leaves[number] for number in held(job.rank, world, case.leaves)], like=leaves[0])
            how: dict[str, Any] = {"op": case.op, "algorithm": case.algorithm, "precision": case.precision}
            if case.name == "reduce":
                how["root"] = case.seed % world
            handles.append(getattr(job.group, case.name)(mine, **how))
        for case, handle, expected in zip(chosen, handles, wanted, strict=True):
            result = await handle
            if case.name == "reduce" and job.rank != case.seed % world:
                assert result is None, case
                continue
            shape = case.shape
            if case.name == "reduce_scatter":
                first, last = rows_of(job.rank, world, shape[0])
                row = len(expected) // shape[0] if shape[0] else 0
                expected, shape = expected[first * row : last * row], (last - first, *shape[1:])
            assert tuple(result.shape) == shape, case
            assert isinstance(result, torch.Tensor) == isinstance(inputs[chosen.index(case)][0], torch.Tensor), case
            assert np.array_equal(bits_of(result, case.dtype), expected), case

    await asyncio.gather(*map(one, jobs))


async def moves(jobs: Cluster, dtype: str, turn: int) -> None:
    """Every operation that moves, on parts of odd sizes: the bits of the parts, whatever they mean."""
    world = len(jobs)
    parts = 2 if dtype in COMPLEX else 1
    rng = np.random.default_rng(turn)
    shapes = [((turn + rank) % 4, 3) for rank in range(world)]
    given = [patterns(dtype, math.prod(shape) * parts, rng) for shape in shapes]
    layout, root = LAYOUTS[turn % len(LAYOUTS)], turn % world
    tensors = [tensor(bits, dtype, shape, layout) for bits, shape in zip(given, shapes, strict=True)]
    lists = [bits.tolist() for bits in given]
    whole = [bits for row in lists for bits in row]

    def part(of: int, to: int) -> list[int]:
        first, last = rows_of(to, world, shapes[of][0])
        return lists[of][first * 3 * parts : last * 3 * parts]

    async def one(job: Any) -> None:
        group, rank = job.group, job.rank
        x = tensors[rank]
        handles = [
            group.broadcast(tensors[root] if rank == root else torch.empty_like(torch.as_tensor(tensors[root]))
                            if isinstance(x, torch.Tensor) else np.empty_like(tensors[root]), root=root),
            group.all_gather(x),
            group.gather(x, root=root),
            group.scatter(x, root=root),
            group.all_to_all(x),
        ]  # fmt: skip
        if world > 1:
            handles.append(group.send(x, to=(rank + 1) % world))
            handles.append(group.recv(tensors[rank - 1], source=(rank - 1) % world))
        got = [await handle for handle in handles]
        expected = [
            lists[root],
            whole,
            whole if rank == root else None,
            part(root, rank),
            [bits for of in range(world) for bits in part(of, rank)],
        ]
        if world > 1:
            expected += [None, lists[rank - 1]]
        found = [None if value is None else bits_of(value, dtype).tolist() for value in got]
        assert found == expected, (dtype, turn, rank)

    await asyncio.gather(*map(one, jobs))


@pytest.mark.parametrize("world", WORLDS)
async def test_every_operation_gives_the_bits_of_its_definition(world: int) -> None:
    sites = [f"site-{3 * rank // world}" for rank in range(world)]
    # Small chunks, so that the larger cases are several messages.
    async with cluster(world, sites=sites, chunk_bytes=500) as jobs:
        every = list(cases(world))
        assert {(case.name, case.op, case.dtype) for case in every} == {
            (name, op, dtype) for name in REDUCTIONS for op in OPS for dtype in DTYPES if is_defined(op, dtype)
        }
        for at in range(0, len(every), TOGETHER):
            await reductions(jobs, every[at : at + TOGETHER])
        for turn, dtype in enumerate(DTYPES):
            await moves(jobs, dtype, turn + world)


@pytest.mark.parametrize("world", [3, 8])
async def test_a_tensor_with_several_owners_gives_the_bits_of_its_definition(world: int) -> None:
    async with cluster(world, chunk_bytes=5000) as jobs:
        await reductions(
            jobs,
            [
                Case("all_reduce", "sum", "float32", (9001,), 3, "direct", "default", "numpy", 1),
                Case("reduce", "avg", "bfloat16", (16387,), 2, "direct", "default", "torch", 2),
            ],
        )


async def test_what_has_no_definition_is_refused_before_anything_is_sent() -> None:
    async with cluster(1) as (job,):
        for op, dtype, precision in product(OPS, DTYPES, PRECISIONS):
            if not is_defined(op, dtype, precision):
                x = tensor(np.zeros(4 * width(dtype), np.uint8).view(f"u{width(dtype)}"), dtype, (-1,), "torch")
                for name in REDUCTIONS:
                    with pytest.raises(LocalError):
                        getattr(job.group, name)(x, op=op, precision=precision)
        assert (await job.group.all_reduce(np.ones(1))).tolist() == [1]
