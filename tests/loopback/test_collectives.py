"""Collectives over real QUIC against plain definitions, bit for bit. REQUIREMENTS S6, D1, D2, D4, D8, A1, C3."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from quicoll import Job, LocalError
from quicoll.testing import cluster

NUMPY = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (1000,)]


def tree(leaves: list[Any]) -> Any:
    """The canonical order, as its definition says it: independent of quicoll.numerics.reduce."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1
    while half * 2 < len(leaves):
        half *= 2
    return tree(leaves[:half]) + tree(leaves[half:])


def values(dtype: str, shape: tuple[int, ...], rank: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng([rank, len(shape), 7])
    if dtype.startswith("f"):
        return np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(dtype)
    return rng.integers(0, 100, shape).astype(dtype)


def expected_sum(parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    dtype = parts[0].dtype
    wide = np.float32 if dtype == np.float16 else dtype
    return np.asarray(tree([part.astype(wide) for part in parts])).astype(dtype)


async def everyone(jobs: list[Job], call: Any) -> list[Any]:
    return list(await asyncio.gather(*(call(job) for job in jobs)))


@pytest.mark.parametrize("world", [1, 2, 3])
async def test_all_reduce_equals_the_canonical_tree_for_every_dtype_and_shape(world: int) -> None:
    async with cluster(world) as jobs:
        for dtype in NUMPY:
            for shape in SHAPES:
                parts = [values(dtype, shape, rank) for rank in range(world)]
                want = expected_sum(parts)
                for got in await everyone(jobs, lambda job, parts=parts: job.group.all_reduce(parts[job.rank])):
                    assert got.dtype == want.dtype
                    assert got.shape == shape
                    assert got.tobytes() == want.tobytes(), (dtype, shape)


async def test_torch_and_numpy_give_the_same_bits_and_their_own_kind() -> None:
    async with cluster(2) as jobs:
        parts = [values("float32", (257,), rank) for rank in range(2)]
        arrays = await everyone(jobs, lambda job: job.group.all_reduce(parts[job.rank], op="avg"))
        tensors = await everyone(
            jobs, lambda job: job.group.all_reduce(torch.from_numpy(parts[job.rank].copy()), op="avg")
        )
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        assert arrays[0].tobytes() == tensors[0].numpy().tobytes() == tensors[1].numpy().tobytes()


async def test_bfloat16_accumulates_in_float32_and_rounds_once() -> None:
    async with cluster(3) as jobs:
        parts = [torch.from_numpy(values("float32", (501,), rank)).bfloat16() for rank in range(3)]
        want = ((parts[0].float() + parts[1].float()) + parts[2].float()).bfloat16()
        for got in await everyone(jobs, lambda job: job.group.all_reduce(parts[job.rank])):
            assert got.dtype is torch.bfloat16
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


async def test_the_same_bits_on_1_2_3_5_and_8_ranks_and_with_any_chunk_size() -> None:
    leaves = [values("float32", (1503,), leaf) for leaf in range(8)]
    ops = ["sum", "avg", "min", "max", "product"]
    results: dict[str, set[bytes]] = {op: set() for op in ops}
    for world, chunk_bytes in [(1, 1 << 20), (2, 4096), (3, 1 << 20), (5, 1000), (8, 1 << 20)]:
        async with cluster(world, chunk_bytes=chunk_bytes) as jobs:

            async def reduce(job: Job) -> list[bytes]:
                shards = job.group.shards(8)
                mine = shards.leaves([leaves[s] for s in shards])
                handles = [job.group.all_reduce(mine, op=op) for op in ops]
                return [(await handle).tobytes() for handle in handles]

            for got in await everyone(jobs, reduce):
                for op, bits in zip(ops, got, strict=True):
                    results[op].add(bits)
    assert [len(bits) for bits in results.values()] == [1] * len(ops)


async def test_more_ranks_than_shards_is_fine() -> None:
    async with cluster(3) as jobs:
        leaves = [values("float64", (11,), leaf) for leaf in range(2)]

        async def reduce(job: Job) -> Any:
            shards = job.group.shards(2)
            return await job.group.all_reduce(shards.leaves([leaves[s] for s in shards], like=leaves[0]), op="avg")

        for got in await everyone(jobs, reduce):
            assert got.tobytes() == ((leaves[0] + leaves[1]) / 2).tobytes()


@pytest.mark.parametrize("world", [2, 3])
async def test_the_ring_is_the_same_on_all_ranks_and_in_every_run(world: int) -> None:
    seen = set()
    for chunk_bytes in (512, 1 << 20):
        async with cluster(world, chunk_bytes=chunk_bytes) as jobs:
            parts = [values("float32", (4001,), rank) for rank in range(world)]
            got = await everyone(jobs, lambda job, p=parts: job.group.all_reduce(p[job.rank], reduce_order="ring"))
            seen |= {array.tobytes() for array in got}
            np.testing.assert_allclose(got[0], sum(p.astype(np.float64) for p in parts), rtol=1e-3, atol=1e-3)
    assert len(seen) == 1


@pytest.mark.parametrize("world", [1, 2, 3, 5])
async def test_broadcast_gives_every_rank_the_roots_bits(world: int) -> None:
    async with cluster(world, chunk_bytes=1000) as jobs:
        for root in range(world):
            for shape in SHAPES:
                parts = [values("float64", shape, rank) for rank in range(world)]
                got = await everyone(jobs, lambda job, p=parts, r=root: job.group.broadcast(p[job.rank], root=r))
                assert all(array.tobytes() == parts[root].tobytes() for array in got)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
async def test_all_gather_concatenates_by_rank_even_with_different_and_empty_parts(world: int) -> None:
    async with cluster(world, chunk_bytes=64) as jobs:
        parts = [values("int32", (rank * 3 % 4, 2), rank) for rank in range(world)]
        want = np.concatenate(parts)
        for got in await everyone(jobs, lambda job: job.group.all_gather(parts[job.rank])):
            assert got.tobytes() == want.tobytes()
            assert got.shape == want.shape
        for got in await everyone(jobs, lambda job: job.group.all_gather(np.array(float(job.rank)))):
            assert got.tolist() == [float(rank) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
async def test_what_is_gathered_of_counts_that_all_know_is_what_is_gathered_without_them(world: int) -> None:
    """Of all sizes: in the announcements, as messages, and of ranks without any row."""
    async with cluster(world, chunk_bytes=64) as jobs:
        for scale in (0, 1, 7, 40, 3000):
            counts = [rank * 3 % 4 * scale for rank in range(world)]
            parts = [values("int32", (count, 2), rank) for rank, count in enumerate(counts)]
            want = np.concatenate(parts)
            for algorithm in ("auto", "direct", "hierarchical"):
                options: Any = {"counts": counts, "algorithm": algorithm}
                for got in await everyone(jobs, lambda job, p=parts, o=options: job.group.all_gather(p[job.rank], **o)):
                    assert got.tobytes() == want.tobytes()
                    assert got.shape == want.shape
                root = world - 1
                options = options | {"root": root}
                found = await everyone(jobs, lambda job, p=parts, o=options: job.group.gather(p[job.rank], **o))
                assert found.pop(root).tobytes() == want.tobytes()
                assert found == [None] * (world - 1)
        one = await everyone(jobs, lambda job: job.group.all_gather(np.array(float(job.rank)), counts=[1] * world))
        assert [got.tolist() for got in one] == [[float(rank) for rank in range(world)]] * world


async def test_what_is_gathered_of_known_counts_is_written_to_out_which_is_refused_by_the_call_if_it_does_not_fit() -> (
    None
):
    async with cluster(2) as jobs:
        out = [np.zeros((3, 2)) for _ in jobs]
        x = [np.full((1 + rank, 2), 1.0 + rank) for rank in range(2)]
        got = await everyone(jobs, lambda job: job.group.all_gather(x[job.rank], counts=[1, 2], out=out[job.rank]))
        assert all(each is its for each, its in zip(got, out, strict=True))
        assert out[0].tolist() == out[1].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        with pytest.raises(LocalError, match=r"out"):
            jobs[0].group.all_gather(x[0], counts=[1, 2], out=np.zeros((4, 2)))


async def test_nobody_leaves_a_barrier_before_everybody_is_there() -> None:
    async with cluster(3) as jobs:
        arrived: list[int] = []

        async def meet(job: Job) -> int:
            await asyncio.sleep(0.05 * job.rank)
            arrived.append(job.rank)
            await job.group.barrier()
            return len(arrived)

        assert await everyone(jobs, meet) == [3, 3, 3]


async def test_several_collectives_in_flight_are_told_apart_by_the_order_of_their_calls() -> None:
    async with cluster(2) as jobs:

        async def many(job: Job) -> list[int]:
            calls = [job.group.all_reduce(np.full(50_000, k + job.rank)) for k in range(8)]
            return [int(result[0]) for result in await asyncio.gather(*calls)]

        assert await everyone(jobs, many) == [[2 * k + 1 for k in range(8)]] * 2


async def test_out_is_written_and_may_be_the_input_or_strided() -> None:
    async with cluster(2) as jobs:

        async def in_place(job: Job) -> np.ndarray[Any, Any]:
            x = np.full((4, 3), job.rank + 1.0)
            assert await job.group.all_reduce(x, out=x) is x
            wide = np.zeros((4, 6))
            await job.group.all_reduce(x, out=wide[:, ::2])
            gathered = np.zeros((8, 3))
            await job.group.all_gather(x, out=gathered)
            assert gathered.tolist() == [[3.0] * 3] * 8
            return wide

        for wide in await everyone(jobs, in_place):
            assert wide[:, ::2].tolist() == [[6.0] * 3] * 4
            assert not wide[:, 1::2].any()


async def test_transposed_read_only_and_zero_dimensional_inputs_work() -> None:
    async with cluster(2) as jobs:
        base = values("float64", (5, 4), 0)
        fixed = base.copy()
        fixed.flags.writeable = False
        for x in (base.T, base[::2], fixed, np.array(3.5)):
            for got in await everyone(jobs, lambda job, x=x: job.group.all_reduce(x)):
                assert got.tobytes() == (x + x).tobytes()


@pytest.mark.parametrize(
    ("x", "options", "said"),
    [
        ([1.0, 2.0], {}, "list"),
        (np.array(["a"]), {}, "dtype|not supported"),
        (np.array([1j]), {"op": "max"}, "complex numbers have no order"),
        (np.ones(3), {"op": "median"}, "median"),
        (np.ones(3), {"op": "bxor"}, "bitwise"),
        (np.ones(3), {"precision": "float128"}, "precision"),
        (np.ones(3), {"reduce_order": "random"}, "reduce_order"),
        (np.ones(3), {"out": np.ones(4)}, r"\(4,\)"),
        (np.ones(3), {"out": np.ones(3, np.float32)}, "float32"),
        (np.ones(3), {"out": np.broadcast_to(np.ones(1), (3,))}, "read-only"),
        (torch.ones(3, device="meta"), {}, "meta"),
        (torch.ones(3), {"out": torch.ones(3, requires_grad=True)}, "requires grad"),
    ],
)
async def test_what_cannot_work_is_refused_before_anything_is_sent(x: Any, options: dict[str, Any], said: str) -> None:
    async with cluster(2) as jobs:
        with pytest.raises(LocalError, match=said):
            await jobs[0].group.all_reduce(x, **options)
        # Nothing was sent: the other rank saw no operation, so the next one of both still is their first.
        assert [int(y[0]) for y in await everyone(jobs, lambda job: job.group.all_reduce(np.ones(1)))] == [2, 2]


async def test_roots_and_leaves_out_of_range_are_refused_before_anything_is_sent() -> None:
    async with cluster(2) as jobs:
        with pytest.raises(LocalError, match="root 2"):
            await jobs[0].group.broadcast(np.ones(1), root=2)
        with pytest.raises(LocalError, match="at least one shard"):
            jobs[0].group.shards(0)
        shards = jobs[0].group.shards(4)
        with pytest.raises(LocalError, match="leaves differ"):
            await jobs[0].group.all_reduce(shards.leaves([np.ones(2), np.ones(3)]))
        assert [int(y[0]) for y in await everyone(jobs, lambda job: job.group.all_reduce(np.ones(1)))] == [2, 2]


async def test_an_out_that_turns_out_too_small_for_a_gather_is_refused_and_left_alone() -> None:
    async with cluster(2) as jobs:
        out = np.full(3, -1.0)

        async def gather(job: Job) -> Any:
            return await job.group.all_gather(np.ones(2), out=out if job.rank == 0 else None)

        got = await asyncio.gather(*(gather(job) for job in jobs), return_exceptions=True)
        assert isinstance(got[0], LocalError)
        assert not got[0].usable
        assert out.tolist() == [-1.0, -1.0, -1.0]
        with pytest.raises(LocalError, match=r"dtype|float32"):
            await jobs[1].group.all_gather(np.ones(2), out=np.ones(4, np.float32))
