"""Every operation on every type at every world size over real sockets, bit for bit against definitions in slow Python.

The cases, and QUICOLL_TEST_ORACLE for more of them, are those of tests/helpers/oracle.py. Each is met at 2 or 3 ranks,
and at one of 4, 5, 7 and 8 ranks; a deep run, or QUICOLL_TEST_ORACLE=2 or more, takes all everywhere.
"""

from __future__ import annotations

import asyncio
from itertools import product

import numpy as np
import pytest
from depth import some
from oracle import (
    DEFINED,
    PRECISIONS,
    REDUCTIONS,
    TOGETHER,
    WORLDS,
    Case,
    Move,
    cases,
    moves,
    reductions,
    shared,
    tensor,
    width,
)
from slow_reference import DTYPES, OPS, is_defined

from quicoll.errors import LocalError
from quicoll.testing import cluster

SHARES = {1: (0, 4), 2: (0, 2), 3: (1, 2), 4: (0, 2), 5: (1, 4), 7: (3, 8), 8: (7, 8)}


@pytest.mark.parametrize("world", WORLDS)
async def test_every_operation_gives_the_bits_of_its_definition(world: int) -> None:
    sites = [f"site-{3 * rank // world}" for rank in range(world)]
    # Small chunks, so that the larger cases are several messages.
    async with cluster(world, sites=sites, chunk_bytes=500) as jobs:
        every = list(cases(world))
        assert {(case.name, case.op, case.dtype) for case in every} == set(DEFINED)
        mine = shared(every, world, SHARES)
        for at in range(0, len(mine), TOGETHER):
            chosen = mine[at : at + TOGETHER]
            await asyncio.gather(*(reductions(job, chosen) for job in jobs))
        for turn, dtype in shared(list(enumerate(DTYPES)), world, SHARES):
            await asyncio.gather(*(moves(job, [Move(dtype, turn + world)]) for job in jobs))


def test_every_operation_meets_every_type_at_a_small_and_at_a_large_world() -> None:
    for worlds in ((2, 3), (4, 5, 7, 8)):
        met = [case for world in worlds for case in shared(list(cases(world)), world, SHARES)]
        assert {(case.name, case.op, case.dtype) for case in met} == set(DEFINED)
        assert {dtype for world in worlds for dtype in shared(list(DTYPES), world, SHARES)} == set(DTYPES)


@pytest.mark.parametrize("world", some([3, 8], 2))
async def test_a_tensor_with_several_owners_gives_the_bits_of_its_definition(world: int) -> None:
    large = [
        Case("all_reduce", "sum", "float32", (9001,), 3, "direct", "default", "numpy", 1),
        Case("reduce", "avg", "bfloat16", (16387,), 2, "direct", "default", "torch", 2),
    ]
    async with cluster(world, chunk_bytes=5000) as jobs:
        await asyncio.gather(*(reductions(job, large) for job in jobs))


async def test_what_has_no_definition_is_refused_before_anything_is_sent() -> None:
    async with cluster(1) as (job,):
        for op, dtype, precision in product(OPS, DTYPES, PRECISIONS):
            if not is_defined(op, dtype, precision):
                x = tensor(np.zeros(4 * width(dtype), np.uint8).view(f"u{width(dtype)}"), dtype, (-1,), "torch")
                for name in REDUCTIONS:
                    with pytest.raises(LocalError):
                        getattr(job.group, name)(x, op=op, precision=precision)
        assert (await job.group.all_reduce(np.ones(1))).tolist() == [1]
