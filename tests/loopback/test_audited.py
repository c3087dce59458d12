"""`job.audit`: what two runs of the real thing leave behind is compared, and the first difference is the one made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quicoll.audit.diff import Difference, diff
from quicoll.audit.log import load_run, read_log
from quicoll.audit.verify import verify_run
from quicoll.cli.main import main
from quicoll.errors import AuditError, LocalError, StepAborted
from quicoll.testing import cluster

SHARDS, STEPS = 8, 3


def shard(step: int, number: int) -> Any:
    return np.random.default_rng([step, number]).standard_normal(300).astype(np.float32)


async def train(path: Path, world: int, *, change: tuple[int, int] | None = None, **how: Any) -> Path:
    """Three steps with two reductions each, issued together and awaited in the other order. change: (step, rank)."""

    async def one(job: Any) -> None:
        job.audit(path)
        for _ in range(STEPS):
            async with job.step() as step:
                mine = job.group.shards(SHARDS)
                values = [shard(step.number, number) for number in mine]
                if change == (step.number, job.rank):
                    values[-1][7] += 1
                mean = job.group.all_reduce(mine.leaves(values), op="avg", **how)
                count = job.group.all_reduce(mine.leaves([[value, value[:3]] for value in values]), op="max")
                await count
                await mean

    async with cluster(world) as jobs:
        await asyncio.gather(*map(one, jobs))
    return path


async def test_the_call_that_got_another_input_is_named_with_its_step_and_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = await train(tmp_path / "a", 3)
    b = await train(tmp_path / "b", 3, change=(2, 1))
    found = diff(load_run(a), load_run(b)).difference
    assert isinstance(found, Difference)
    # Of eight shards on three ranks, rank 1 holds 2, 3 and 4.
    assert (found.kind, found.place.step, found.index, found.rank, found.leaf) == ("inputs", 2, 0, (1, 1), 4)
    assert found.op == "all_reduce float32 (300) avg default"
    with pytest.raises(SystemExit) as status:
        main(["audit", "diff", str(a), str(b)])
    assert status.value.code == 1
    assert "step 2, call 0, rank 1: leaf 4 has other bits" in capsys.readouterr().out


async def test_equal_runs_of_different_world_sizes_and_algorithms_do_not_differ(tmp_path: Path) -> None:
    a = await train(tmp_path / "a", 1)
    b = await train(tmp_path / "b", 3, algorithm="tree")
    c = await train(tmp_path / "c", 3)
    assert load_run(a).operations == 2 * STEPS
    assert diff(load_run(a), load_run(b)).verdict == "equal"
    assert diff(load_run(b), load_run(c)).verdict == "equal"
    for rank in range(3):  # files of equal runs are equal, in whatever order the operations ended
        name = f"worker-{rank}.audit"
        assert (b / name).read_bytes() == (c / name).read_bytes()


async def test_what_ranks_of_a_run_wrote_is_proved_by_their_certificates_up_to_the_end(tmp_path: Path) -> None:
    trust: list[Any] = []

    async def one(job: Any) -> None:
        trust[:] = job.internals.engine.endpoint.credentials.trust
        job.resume_from(20, source="checkpoints/step-20")
        job.audit(tmp_path, code="abc123")
        for _ in range(STEPS):
            async with job.step():
                await job.group.all_reduce(np.float32(job.rank), op="sum")

    async with cluster(2) as jobs:
        await asyncio.gather(*map(one, jobs))
    found = verify_run(tmp_path, trust)
    assert (found.faults, found.gaps) == ((), ())
    for file in found.files:
        (stretch,) = file.stretches
        assert (stretch.steps, stretch.calls, stretch.code, stretch.closed) == ((21, 23), STEPS, "abc123", True)
        assert (stretch.from_step, stretch.source) == (20, "checkpoints/step-20")


async def audited(path: Path, world: int, program: Callable[[Any], Awaitable[None]]) -> Path:
    """A run of one step, in which each rank does what `program` says."""

    async def one(job: Any) -> None:
        job.audit(path)
        async with job.step():
            await program(job)

    async with cluster(world) as jobs:
        await asyncio.gather(*map(one, jobs))
    return path


def compare(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Status and first line of `quicoll audit diff`."""
    with pytest.raises(SystemExit) as status:
        main(["audit", "diff", str(a), str(b)])
    assert isinstance(status.value.code, int)
    return status.value.code, capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("name", ["reduce_scatter", "scatter", "all_to_all", "split"])
async def test_the_same_tensors_on_other_terms_are_other_calls_and_nobody_elses_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    async def ask(job: Any, turned: bool) -> None:
        if name == "split":
            part = await job.group.split(job.rank if turned else 0)
            await part.all_reduce(np.arange(4))
        else:
            await getattr(job.group, name)(np.arange(4), counts=(3, 1) if turned else None)

    a, b = [await audited(tmp_path / str(turned), 2, partial(ask, turned=turned)) for turned in (False, True)]
    rank = 1 if name == "split" else 0
    assert compare(a, b, capsys) == (1, f"step 1, call 0, rank {rank}: the calls differ")
    calls = 4 if name == "split" else 2
    assert compare(b, b, capsys) == (0, f"equal: 1 steps, {calls} calls in A, {calls} in B")


@pytest.mark.parametrize("changed", [False, True])
async def test_what_belongs_to_a_world_size_hides_no_difference_and_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: bool
) -> None:
    async def program(job: Any, last: int) -> None:
        group = job.group
        mine = np.arange(3, dtype=np.float32) / (1 + job.rank)
        await group.all_gather(mine)
        await group.all_gather_object({"loss": float(mine[1])})
        await (await group.split(job.rank % 2)).all_reduce(mine)
        await group.all_reduce(mine)
        shards = group.shards(4)
        values = [shard(1, number + (last if number == 3 else 0)) for number in shards]
        like = np.zeros(300, np.float32)
        await group.all_reduce(shards.leaves(values, like=like), reduce_order="ring")
        await group.reduce_scatter(shards.leaves(values, like=like), counts=[300] + [0] * (job.world_size - 1))
        await group.all_reduce(shards.leaves([value[:9] for value in values], like=like[:9]))

    a = await audited(tmp_path / "a", 2, partial(program, last=0))
    b = await audited(tmp_path / "b", 3, partial(program, last=int(changed)))
    if changed:
        assert compare(a, b, capsys) == (1, "step 1, call 5, rank 1 of A, 2 of B: leaf 3 has other bits")
    else:
        assert compare(a, b, capsys) == (0, "no difference: 1 steps, 16 calls in A, 24 in B")


async def test_a_run_that_lost_a_rank_on_the_way_equals_one_that_did_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 2 gets as far as a result in step 2, fails, and is gone; the others do step 2 again, and step 3."""

    class Lost(Exception):
        pass

    async def one(job: Any) -> None:
        job.audit(tmp_path / "b")
        while job.committed_step < STEPS:
            with suppress(StepAborted):
                async with job.step() as step:
                    shards = job.group.shards(SHARDS)
                    values = [shard(step.number, number) for number in shards]
                    await job.group.all_reduce(shards.leaves(values), op="avg")
                    count = job.group.all_reduce(shards.leaves([[value, value[:3]] for value in values]), op="max")
                    if (step.number, job.rank) == (2, 2):
                        raise Lost
                    await count

    async def ending(job: Any) -> None:
        try:
            await one(job)
        except Lost:
            await job._runtime.call(job._engine.aclose("lost"))

    a = await train(tmp_path / "a", 3)
    async with cluster(3) as jobs:
        await asyncio.gather(*map(ending, jobs))
        assert [job.world_size for job in jobs[:2]] == [2, 2]
    b = tmp_path / "b"
    assert len(load_run(b).places) == STEPS
    assert compare(a, b, capsys) == (0, "equal: 3 steps, 18 calls in A, 14 in B")
    assert compare(b, a, capsys)[0] == 0


async def test_every_operation_is_told_with_what_this_rank_gave_and_got(tmp_path: Path) -> None:
    async def one(job: Any) -> None:
        job.audit(tmp_path)
        group, x = job.group, np.arange(4, dtype=np.int32) + job.rank
        await group.barrier()
        async with job.step():
            handles = [
                group.reduce(x, root=1),
                group.reduce_scatter(x, op="max"),
                group.broadcast(x, root=1),
                group.all_gather(x),
                group.gather(torch.from_numpy(x)),
                group.scatter(x, root=1),
                group.all_to_all(x),
                group.broadcast_object({"rank": job.rank}),
                group.all_gather_object(job.rank),
                group.send(x, to=1) if job.rank == 0 else group.recv(x, source=0),
                group.all_reduce(x, reduce_order="ring"),
                group.barrier(),
            ]
            # The last two are left to the step: they are over when it ends, and nobody has asked for their results.
            over = [asyncio.get_running_loop().create_future() for _ in handles[-2:]]
            for handle, future in zip(handles[-2:], over, strict=True):
                handle.add_done_callback(lambda _, future=future: future.set_result(None))
            for handle in reversed(handles[:-2]):
                await handle
            await asyncio.gather(*over)

    async with cluster(2) as jobs:
        await asyncio.gather(*map(one, jobs))
    run = load_run(tmp_path)
    before, inside = (attempt.ranks for attempt in run.places.values())
    assert [record.op for record in before[0]] == ["barrier"]
    first, second = inside[0], inside[1]
    assert [record.op for record in first] == [record.op for record in second]
    assert [record.op for record in first] == [
        "reduce int32 (4) sum default root=1",
        "reduce_scatter int32 (4) max default",
        "broadcast int32 (4) root=1",
        "all_gather int32 (n)",
        "gather int32 (n) root=0",
        "scatter int32 (n) root=1",
        "all_to_all int32 (n)",
        "broadcast_object root=0",
        "all_gather_object",
        "send int32 (4) from 0 to 1",
        "all_reduce int32 (4) sum default ring",
        "barrier",
    ]
    assert [record.agreed for record in first] == [0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0]
    assert [record.terms for record in first] == [*[""] * 10, "world=2", ""]
    assert [record.members for record in first] == [*[0] * 9, 2, 0, 0]
    assert all(a.result == b.result for a, b in zip(first, second, strict=True) if a.agreed)
    gave = [
        ([leaf for leaf, _ in a.inputs], [leaf for leaf, _ in b.inputs]) for a, b in zip(first, second, strict=True)
    ]
    both, neither, root = ([0], [1]), ([], []), ([], [1])
    assert gave == [both, both, root, both, both, root, both, ([0], []), both, ([0], []), both, neither]
    nothing = [(a.result == "", b.result == "") for a, b in zip(first, second, strict=True)]
    assert [at for at, got in enumerate(nothing) if got == (True, False)] == [0, 9]
    assert [at for at, got in enumerate(nothing) if got == (False, True)] == [4]


async def test_an_attempt_that_is_given_up_is_superseded(tmp_path: Path) -> None:
    async with cluster(1) as (job,):
        file = job.audit(tmp_path)

        async def attempt(divisor: int) -> None:
            async with job.step():
                await job.group.all_reduce(np.full(3, 1 // divisor))
                1 // (divisor - 1)

        with pytest.raises(ZeroDivisionError):
            await attempt(1)
        await attempt(2)
    assert len(read_log(file).lines) == 4
    ((place, attempt),) = load_run(tmp_path).places.items()
    assert (place.step, len(attempt.ranks[0])) == (1, 1)


async def test_a_step_whose_audit_cannot_be_written_is_not_committed(tmp_path: Path) -> None:
    async with cluster(2) as jobs:

        async def one(job: Any) -> None:
            job.audit(tmp_path)
            async with job.step():
                handle = job.group.all_reduce(np.ones(3))
                if job.rank == 1:
                    job._context.auditor.close()
                await handle

        failures = await asyncio.gather(*map(one, jobs), return_exceptions=True)
        assert [type(failure) for failure in failures] == [StepAborted, AuditError]
        assert [job.committed_step for job in jobs] == [0, 0]


async def test_a_job_is_audited_once_and_not_from_inside_a_step(tmp_path: Path) -> None:
    async with cluster(1) as (job,):
        async with job.step():
            with pytest.raises(LocalError, match="not inside"):
                job.audit(tmp_path)
        assert job.audit(tmp_path) == tmp_path / "worker-0.audit"
        with pytest.raises(LocalError, match="already"):
            job.audit(tmp_path)
        await job.group.barrier()
    assert load_run(tmp_path).operations == 1
