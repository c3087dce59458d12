"""`residual=`: what a wire format loses of a leaf is sent with its next values, the same bits at every world size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from wire_oracle import Fed, reduced

import quicoll.blocking
from quicoll.audit.log import OperationRecord, read_log
from quicoll.errors import LocalError, StepAborted
from quicoll.local.sealing import unusable
from quicoll.testing import cluster

if TYPE_CHECKING:
    from quicoll.numerics.dtypes import Array

pytestmark = pytest.mark.loopback

SHARDS, SIZE, STEPS = 4, 4_501, 3
WIRES = ("int8", "bfloat16", "int4", "topk:1/64")


def values(shard: int, step: int) -> Array:
    rng = np.random.default_rng([shard, step])
    return (rng.standard_normal(SIZE) * 2.0 ** rng.integers(-8, 2, SIZE)).astype(np.float32)


@cache
def expected(wire: str, op: str) -> tuple[list[bytes], list[bytes]]:
    """The results of all steps, and the residuals of all shards after the last."""
    fed = [Fed((SIZE,)) for _ in range(SHARDS)]
    results = []
    for step in range(STEPS):
        results.append(reduced(wire, [fed[s].given(values(s, step)) for s in range(SHARDS)], op).tobytes())
        for shard in range(SHARDS):
            fed[shard].follow(wire, values(shard, step))
    return results, [each.residual.tobytes() for each in fed]


CARRIERS = [False] if unusable() else [False, True]


async def everyone(jobs: Any, call: Callable[[Any], Any]) -> list[Any]:
    return list(await asyncio.gather(*map(call, jobs)))


@pytest.mark.parametrize("local", CARRIERS, ids=lambda local: "memory" if local else "QUIC")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
async def test_results_and_residuals_are_those_of_a_reference_at_every_world_size(world: int, local: bool) -> None:
    wanted = {wire: expected(wire, "avg") for wire in WIRES}

    async def one(job: Any) -> None:
        shards = job.group.shards(SHARDS)
        for wire in WIRES:
            residuals = [np.zeros(SIZE, np.float32) for _ in shards]
            results, lost = wanted[wire]
            for step in range(STEPS):
                x = shards.leaves([values(s, step) for s in shards], like=values(0, 0))
                kept = shards.leaves(residuals, like=values(0, 0))
                found = await job.group.all_reduce(x, op="avg", wire=wire, residual=kept)
                assert found.tobytes() == results[step]
            assert [each.tobytes() for each in residuals] == [lost[s] for s in shards]

    async with cluster(world, local=local, lost_after=20.0) as jobs:
        await everyone(jobs, one)


async def test_lists_of_torch_from_a_thread_leave_the_residuals_of_a_loop() -> None:
    def given(rank: int) -> list[Any]:
        flat = torch.from_numpy(values(rank, 0))
        return [flat[:600].reshape(20, 30), flat[600:1000]]

    async with cluster(2, lost_after=20.0) as jobs:

        async def one(job: Any) -> None:
            x = given(job.rank)
            kept, same = [torch.zeros(20, 30), torch.zeros(400)], [torch.zeros(20, 30), torch.zeros(400)]
            found = await job.group.all_reduce(x, wire="int8", residual=kept)
            group = quicoll.blocking.Group(job.group)
            again = await asyncio.to_thread(lambda: group.all_reduce(x, wire="int8", residual=same))
            for ours, theirs in zip([*found, *kept], [*again, *same], strict=True):
                assert torch.equal(ours, theirs)
            for each, left in zip(x, kept, strict=True):
                fed = Fed(tuple(each.shape))
                fed.follow("int8", each.numpy())
                assert left.numpy().tobytes() == fed.residual.tobytes()

        await everyone(jobs, one)


async def test_a_committed_step_writes_residuals_and_an_aborted_one_leaves_them() -> None:
    async with cluster(2, lost_after=20.0) as jobs:
        kept = [np.zeros(SIZE, np.float32) for _ in jobs]

        async def attempt(job: Any, *, fail: bool) -> None:
            async with job.step() as step:
                mine = kept[job.rank]
                before = mine.tobytes()
                await job.group.all_reduce(values(job.rank, 0), wire="int8", residual=mine)
                assert mine.tobytes() == before
                step.on_commit(lambda: order.append(mine.tobytes() != before))
                with pytest.raises(LocalError, match="use a residual once in a step"):
                    job.group.all_reduce(values(job.rank, 1), wire="int8", residual=mine)
                with pytest.raises(LocalError, match="use a residual once in a step"):
                    job.group.all_reduce(values(job.rank, 1), out=mine)
                if fail and job.rank == 0:
                    raise ValueError("of our own")

        order: list[bool] = []
        failures = await asyncio.gather(*(attempt(job, fail=True) for job in jobs), return_exceptions=True)
        assert [type(failure) for failure in failures] == [ValueError, StepAborted]
        assert not any(each.any() for each in kept)

        async def until_committed(job: Any) -> None:
            while not job.committed_step:
                with suppress(StepAborted):
                    await attempt(job, fail=False)

        await everyone(jobs, until_committed)
        assert order == [True, True]
        for rank, each in enumerate(kept):
            fed = Fed((SIZE,))
            fed.follow("int8", values(rank, 0))
            assert each.tobytes() == fed.residual.tobytes()


async def test_what_an_operation_under_way_uses_is_no_residual_of_another() -> None:
    async with cluster(1, lost_after=20.0) as (job,):
        group, x, kept = job.group, values(0, 0), np.zeros(SIZE, np.float32)
        handle = group.all_reduce(x, wire="int8", residual=kept)
        with pytest.raises(LocalError, match="under way writes, its out or its residual"):
            group.all_reduce(values(0, 1), wire="int8", residual=kept)
        with pytest.raises(LocalError, match="under way writes, its out or its residual"):
            group.all_reduce(kept)
        with pytest.raises(LocalError, match="residual shares memory with what an operation under way was given"):
            group.all_reduce(values(0, 1), wire="int8", residual=x)
        assert not kept.any()
        await handle
        assert kept.any()
        first = kept.copy()
        await group.all_reduce(values(0, 1), wire="int8", residual=kept)
        assert kept.tobytes() != first.tobytes()


async def test_a_residual_without_a_wire_format_or_of_other_shards_is_refused() -> None:
    async with cluster(1, lost_after=20.0) as (job,):
        group, x = job.group, np.ones(4, np.float32)
        shards, kept = group.shards(2), np.zeros(4, np.float32)
        with pytest.raises(LocalError, match="give wire too, or leave residual out"):
            group.all_reduce(x, residual=kept)
        with pytest.raises(LocalError, match="Leaves of the same shards where x is"):
            group.all_reduce(shards.leaves([x, x]), wire="int8", residual=kept)
        with pytest.raises(LocalError, match="residual is of shards 0 to 0 of 1, x of 0 to 1 of 2"):
            group.all_reduce(shards.leaves([x, x]), wire="int8", residual=group.shards(1).leaves([kept]))
        with pytest.raises(LocalError, match="two tensors of residual share memory"):
            group.all_reduce(shards.leaves([x, x]), wire="int8", residual=shards.leaves([kept, kept]))
        await group.all_reduce(shards.leaves([x, x]), wire="int8", residual=shards.leaves([kept, kept.copy()]))


async def test_an_audit_sees_what_was_encoded(tmp_path: Path) -> None:
    """The leaf as it was given would tell of equal inputs with unequal results."""
    async with cluster(1, lost_after=20.0) as (job,):
        job.audit(tmp_path)
        kept = np.zeros(SIZE, np.float32)
        for _ in range(2):
            await job.group.all_reduce(values(0, 0), wire="int8", residual=kept)
    (file,) = tmp_path.glob("*.audit")  # noqa: ASYNC240 - the job is over
    digests = [line.inputs for line in read_log(file).lines if isinstance(line, OperationRecord)]
    assert len(digests) == 2
    assert digests[0] != digests[1]
