"""Large tensors and a world of eight. REQUIREMENTS A1, C3."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
from depth import deep

from quicoll.testing import cluster

if TYPE_CHECKING:
    from quicoll import Job


@pytest.mark.slow
async def test_a_tensor_much_larger_than_the_credit_is_reduced_bit_for_bit() -> None:
    """96 MiB; 256 in a deep run."""
    elements = deep(24, 64) << 20
    x = [np.arange(elements, dtype=np.float32) / (rank + 3) for rank in range(2)]
    async with cluster(2) as jobs:
        got = await asyncio.gather(*(job.group.all_reduce(x[job.rank]) for job in jobs))
        held = [link.stats.credit_peak for job in jobs for link in job._engine.endpoint.links.values()]
        credit = jobs[0]._engine.endpoint.config.credit_bytes
    want = x[0] + x[1]
    for result in got:
        np.testing.assert_array_equal(result.view(np.uint32), want.view(np.uint32))
    assert x[0].nbytes >= 3 * credit
    assert max(held) <= credit  # memory for what is not yet asked for is bounded, whatever the tensor's size


async def test_a_world_of_eight_reduces_gathers_and_commits() -> None:
    async with cluster(8) as jobs:
        x = [np.arange(100_000, dtype=np.int64) * rank for rank in range(8)]
        for result in await asyncio.gather(*(job.group.all_reduce(x[job.rank]) for job in jobs)):
            assert result.tolist() == (np.arange(100_000) * 28).tolist()
        for result in await asyncio.gather(*(job.group.all_gather(np.array([job.rank])) for job in jobs)):
            assert result.tolist() == list(range(8))

        async def step(job: Job) -> int:
            async with job.step() as step:
                await job.group.barrier()
            return step.number

        assert await asyncio.gather(*(step(job) for job in jobs)) == [1] * 8
