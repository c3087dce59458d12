"""Element types and precisions over real sockets: what `quicoll.numerics.reduce` promises is what a group gives."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch

from quicoll.collectives.shards import Leaves, Shards
from quicoll.errors import LocalError
from quicoll.numerics.dtypes import DTYPES, FLOAT32, FLOAT64, Array, DType, narrow
from quicoll.testing import cluster

pytestmark = pytest.mark.loopback

SIZE, LEAVES = 1001, 5


def drawn(dtype: DType, seed: int) -> Array:
    """Numbers that no order but the exact one adds up alike."""
    rng = np.random.default_rng(seed)
    values = np.empty(SIZE, dtype.storage)
    narrow(rng.standard_normal(SIZE) * 2.0 ** rng.integers(-12, 12, SIZE), FLOAT64, dtype, values)
    return values


async def all_reduced(world: int, leaves: list[Any], **how: Any) -> list[Any]:
    async with cluster(world) as jobs:

        async def one(job: Any) -> Any:
            shards = job.group.shards(len(leaves))
            mine = [leaves[index] for index in shards]
            return await job.group.all_reduce(shards.leaves(mine, like=leaves[0]), **how)

        return list(await asyncio.gather(*(one(job) for job in jobs)))


@pytest.mark.parametrize("count", [LEAVES, 29])  # 29: a rank of two holds more than the eleven that outweigh a partial
@pytest.mark.parametrize("world", [1, 2, 3])
async def test_exact_sums_are_the_rounded_real_number_in_any_order_of_leaves(world: int, count: int) -> None:
    leaves = [drawn(FLOAT32, seed) for seed in range(count)]
    with np.errstate(all="ignore"):
        expected = np.array([math.fsum(map(float, column)) for column in zip(*leaves, strict=True)]).astype(np.float32)
    shuffled = np.random.default_rng(count).permutation(count)
    for order, how in ((range(count), {"exact": True}), (shuffled, {"precision": "exact"})):
        ranks = await all_reduced(world, [leaves[index] for index in order], **how)
        assert {result.tobytes() for result in ranks} == {expected.tobytes()}


async def test_what_cannot_be_exact_is_refused_before_anything_is_sent() -> None:
    x = np.ones(3, np.float32)
    async with cluster(1) as (job,):
        group = job.group
        with pytest.raises(LocalError, match="an exact sum has no order"):
            group.all_reduce(x, exact=True, reduce_order="ring")
        with pytest.raises(LocalError, match="leave precision='float64' out"):
            group.all_reduce(x, exact=True, precision="float64")
        with pytest.raises(LocalError, match="no exact form"):
            group.reduce(x, exact=True, op="product")
        with pytest.raises(LocalError, match="at most 268435456 leaves"):
            group.reduce_scatter(Leaves(Shards((1 << 28) + 1, 0, 1, job.view.view_id), (x,)), exact=True)
        for op in ("max", "sum", "band"):
            assert (await group.all_reduce(np.arange(4), exact=True, op=op)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "complex64", "complex128"])
async def test_the_other_types_are_the_same_at_any_world_size(name: str) -> None:
    dtype = DTYPES[name]
    leaves = []
    for seed in range(LEAVES):
        if dtype.part is None:
            leaves.append(torch.from_numpy(drawn(dtype, seed)).view(getattr(torch, name)))
        else:
            leaves.append(
                torch.from_numpy(np.stack([drawn(dtype.part, seed), drawn(dtype.part, seed + 50)], 1).view(name)[:, 0])
            )
    seen = set()
    for world in (1, 2, 3):
        for result in await all_reduced(world, leaves, op="avg"):
            assert result.dtype is getattr(torch, name)
            seen.add(result.view(torch.uint8).numpy().tobytes())
    assert len(seen) == 1
