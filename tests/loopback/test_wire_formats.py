"""`wire=`: results are the same bits on every rank, at every world size, by every algorithm and chunk size."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from depth import deep

from quicoll.errors import LocalError, Mismatch
from quicoll.local.sealing import unusable
from quicoll.numerics.canonical_order import split
from quicoll.numerics.codecs import codec_of
from quicoll.numerics.dtypes import FLOAT32, Array
from quicoll.numerics.reduce import ReduceOp, combine, finish
from quicoll.testing import cluster

SHARDS, SIZE = 8, 70_001  # 274 blocks, so that there are several owners


def leaf(number: int) -> Array:
    rng = np.random.default_rng(number)
    values = (rng.standard_normal(SIZE) * 2.0 ** rng.integers(-3, 3, SIZE)).astype(np.float32)
    values[:8] = [0.0, -0.0, 1e-42, np.inf if number == 3 else 1, -np.inf, np.nan if number == 5 else 2, 3e38, -3e38]
    return values


def passed(name: str, values: Array) -> Array:
    codec = codec_of(name)
    coded = np.empty(codec.wire_bytes(values.size, FLOAT32), np.uint8)
    codec.encode(values, FLOAT32, coded)
    out = np.empty_like(values)
    codec.decode(coded, FLOAT32, out)
    return out


def expected(name: str, op: ReduceOp) -> bytes:
    """Every leaf encoded and decoded, the canonical tree, and the result likewise where leaves are not gathered."""

    def node(a: int, b: int) -> Array:
        if b - a == 1:
            return passed(name, leaf(a))
        out = np.empty(SIZE, np.float32)
        combine(op, FLOAT32, node(a, split(a, b)), node(split(a, b), b), out)
        return out

    out = np.empty(SIZE, np.float32)
    finish(op, node(0, SHARDS), SHARDS, FLOAT32, out)
    return (out if codec_of(name).gathered else passed(name, out)).tobytes()


@pytest.mark.parametrize(
    ("world", "chunk_bytes"),
    deep([(1, 1 << 20), (2, 9999), (3, 1 << 20), (5, 9999)], list(product((1, 2, 3, 5), (1 << 20, 9999)))),
)
async def test_the_bits_are_the_same_on_all_ranks_and_at_all_world_sizes(world: int, chunk_bytes: int) -> None:
    sites = [f"site-{rank % 2}" for rank in range(world)]
    summed = [("sum", "direct"), ("sum", "tree"), ("avg", "hierarchical"), ("sum", "exchange"), ("avg", "auto")]
    gathered = [("sum", "direct"), ("avg", "hierarchical"), ("sum", "auto")]
    cases = [
        (name, op, algorithm)
        for name in ("bfloat16", "int8", "int4", "topk:1/64")
        for op, algorithm in (gathered if codec_of(name).gathered else summed)
    ]

    async def one(job: Any) -> list[bytes]:
        shards = job.group.shards(SHARDS)
        leaves = shards.leaves([leaf(number) for number in shards], like=leaf(0))
        got = []
        for name, op, algorithm in cases:
            result = await job.group.all_reduce(leaves, op=op, algorithm=algorithm, wire=name)
            got.append(result.tobytes())
        return got

    async with cluster(world, chunk_bytes=chunk_bytes, sites=sites, lost_after=20.0) as jobs:
        ranks = await asyncio.gather(*map(one, jobs))
    wanted = {(name, op): expected(name, ReduceOp(op)) for name, op, _ in cases}
    for got in ranks:
        assert [bits == wanted[name, op] for bits, (name, op, _) in zip(got, cases, strict=True)] == [True] * len(cases)


@pytest.mark.skipif(bool(unusable()), reason=unusable() or "usable")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("size", [5_001, SIZE])  # top-k: small calls and large ones
async def test_the_memory_of_one_host_gives_the_same_bits(world: int, size: int) -> None:
    names = ("bfloat16", "int8", "int4", "topk:1/64", "topk:1/2")

    async def one(job: Any) -> list[bytes]:
        shards = job.group.shards(SHARDS)
        leaves = shards.leaves([leaf(number)[:size] for number in shards], like=leaf(0)[:size])
        return [(await job.group.all_reduce(leaves, wire=name)).tobytes() for name in names]

    found = []
    for local in (True, False):
        async with cluster(world, local=local, lost_after=20.0) as jobs:
            found += await asyncio.gather(*map(one, jobs))
    if size == SIZE:
        assert found[0] == [expected(name, ReduceOp("sum")) for name in names]
    assert all(each == found[0] for each in found)


async def test_a_result_is_of_the_kind_and_in_the_place_that_was_asked_for() -> None:
    async with cluster(2) as jobs:

        async def one(job: Any) -> None:
            x = torch.linspace(-1, 1, 600).reshape(20, 30) * (job.rank + 1)
            plain = await job.group.all_reduce(x, wire="int8")
            out = torch.zeros(30, 20).t()
            assert await job.group.all_reduce(x, wire="int8", out=out) is out
            assert torch.equal(out, plain)
            assert plain.shape == x.shape
            pair = await job.group.all_reduce([x, x[0]], wire="int8")
            assert torch.equal(pair[0], plain)
            assert torch.equal(pair[1], await job.group.all_reduce(x[0], wire="int8"))
            waves = np.exp(1j * np.arange(5)).astype(np.complex64)
            for name, off in (("int8", 3 * 2 / 251), ("bfloat16", 3 * 2.0**-7)):
                parts = (await job.group.all_reduce(waves, wire=name)).view(np.float32)
                assert np.abs(parts - 2 * waves.view(np.float32)).max() <= off
            for empty in (np.empty((0, 3), np.float32), np.empty(0, np.complex64)):
                assert (await job.group.all_reduce(empty, wire="int8")).shape == empty.shape
            exactly = await job.group.all_reduce(np.float32([1e30, 1, -1e30]), wire="bfloat16", exact=True)
            assert exactly.shape == (3,)
            assert (await job.group.all_reduce(np.full((), 3, np.float32), wire="int8")).shape == ()

        await asyncio.gather(*map(one, jobs))


async def test_ranks_that_ask_for_different_formats_get_a_mismatch() -> None:
    async with cluster(2) as jobs:
        x = np.ones(5, np.float32)
        failures = await asyncio.gather(
            jobs[0].group.all_reduce(x, wire="bfloat16"),
            jobs[1].group.all_reduce(x),
            return_exceptions=True,
        )
        assert [type(failure) for failure in failures] == [Mismatch, Mismatch]
        assert "wire bfloat16 on rank 0, none on rank 1" in str(failures[0])
        with pytest.raises(LocalError, match="a ring passes on partial sums"):
            jobs[0].group.all_reduce(x, wire="int8", reduce_order="ring")
        with pytest.raises(LocalError, match="wire format 'topk' is not known; use one of bfloat16"):
            jobs[0].group.all_reduce(x, wire="topk")
