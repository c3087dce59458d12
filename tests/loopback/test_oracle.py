"""Every operation on every type at every world size over real sockets, bit for bit against definitions in slow Python.

The cases, and QUICOLL_TEST_ORACLE for more of them, are those of tests/helpers/oracle.py. Each is met at 1, 2, 3 and 5
ranks, and either at 4 and 7 or at 8, whose trees and messages cost the most; QUICOLL_TEST_ORACLE=2 or more takes all
everywhere.
"""

from __future__ import annotations

import asyncio
from itertools import product

import numpy as np
import pytest
from oracle import (
    DEFINED,
    DEPTH,
    PRECISIONS,
    REDUCTIONS,
    TOGETHER,
    WORLDS,
    Case,
    Move,
    cases,
    moves,
    reductions,
    tensor,
    width,
)
from slow_reference import DTYPES, OPS, is_defined

from quicoll.errors import LocalError
from quicoll.testing import cluster

HALVES = {4: 0, 7: 0, 8: 1} if DEPTH == 1 else {}
"""Worlds that meet every second case, and with which they begin."""


@pytest.mark.parametrize("world", WORLDS)
async def test_every_operation_gives_the_bits_of_its_definition(world: int) -> None:
    sites = [f"site-{3 * rank // world}" for rank in range(world)]
    # Small chunks, so that the larger cases are several messages.
    async with cluster(world, sites=sites, chunk_bytes=500) as jobs:
        every = list(cases(world))
        assert {(case.name, case.op, case.dtype) for case in every} == set(DEFINED)
        every = every[HALVES[world] :: 2] if world in HALVES else every
        for at in range(0, len(every), TOGETHER):
            chosen = every[at : at + TOGETHER]
            await asyncio.gather(*(reductions(job, chosen) for job in jobs))
        for turn, dtype in enumerate(DTYPES):
            await asyncio.gather(*(moves(job, [Move(dtype, turn + world)]) for job in jobs))


@pytest.mark.parametrize("world", [3, 8])
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
