"""Operations from threads without an event loop: the same bits, overlapping, and with an end each."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quicoll import Job, LocalError, Mismatch, PeerError, StepAborted
from quicoll.audit.log import OperationRecord, read_log
from quicoll.blocking import BlockingHandle, Group
from quicoll.testing import cluster


async def on_threads(jobs: list[Job], work: Callable[[Group, int], Any]) -> list[Any]:
    """Run `work` for each job on a thread of its own; gives results and errors by rank."""
    calls = (asyncio.to_thread(work, Group(job.group), job.rank) for job in jobs)
    return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 200)


async def test_a_plain_thread_gets_the_same_bits_as_the_event_loop() -> None:
    inputs = [np.random.default_rng(rank).standard_normal(3000).astype(np.float32) for rank in range(3)]
    async with cluster(3) as jobs:

        async def awaited(job: Job) -> tuple[bytes, bytes]:
            total = await job.group.all_reduce(inputs[job.rank], op="avg")
            return total.tobytes(), (await job.group.broadcast(inputs[job.rank], root=1)).tobytes()

        def blocked(group: Group, rank: int) -> tuple[bytes, bytes]:
            total = group.all_reduce(inputs[rank], op="avg")
            return total.tobytes(), group.broadcast(inputs[rank], root=1).tobytes()

        expected = await asyncio.gather(*map(awaited, jobs))
        assert await on_threads(jobs, blocked) == expected
        # Both at once, each rank in a way of its own: what meets is the operation and not the way it was called.
        mixed = await asyncio.gather(awaited(jobs[0]), on_threads(jobs[1:], blocked))
        assert [mixed[0], *mixed[1]] == expected


async def test_operations_overlap_and_are_waited_for_in_any_order() -> None:
    def overlapped(group: Group, rank: int) -> list[float]:
        out = np.zeros(1000)
        handles = [
            group.all_reduce(np.full(1000, float(rank + 1)), out=out, async_op=True),
            group.broadcast(np.full(5, float(rank)), root=1, async_op=True),
            group.barrier(async_op=True),
        ]
        handles[2].wait()
        results = [handle.wait(10.0) for handle in reversed(handles[:2])]
        assert all(handle.done() for handle in handles)
        assert handles[0].wait() is out
        return [float(result[0]) for result in results]

    async with cluster(2) as jobs:
        assert await on_threads(jobs, overlapped) == [[1.0, 3.0]] * 2


async def test_a_result_reaches_its_out_by_the_wait_and_not_before() -> None:
    def waited(group: Group, rank: int) -> list[float]:
        out = np.zeros(1)
        handle = group.all_reduce(np.ones(1), out=out, async_op=True)
        group.barrier()
        assert out[0] == 0.0
        handle.wait()
        return out.tolist()

    async with cluster(2) as jobs:
        assert await on_threads(jobs, waited) == [[2.0]] * 2


async def test_a_wait_that_is_too_short_raises_and_can_be_repeated() -> None:
    late = threading.Event()

    def early(group: Group, rank: int) -> float:
        if rank:
            late.wait()
            return float(group.all_reduce(np.ones(1))[0])
        handle = group.all_reduce(np.ones(1), async_op=True)
        with pytest.raises(TimeoutError, match=r"all_reduce has not ended within 0\.05 s"):
            handle.wait(0.05)
        assert not handle.done()
        with pytest.raises(LocalError, match="must be above 0"):
            handle.wait(0)
        late.set()
        return float(handle.wait()[0])

    async with cluster(2) as jobs:
        assert await on_threads(jobs, early) == [2.0, 2.0]


async def test_parameters_are_taken_where_autograd_records_nothing_and_refused_elsewhere() -> None:
    """Autograd has a mode for each thread: that of the caller counts, not the engine's."""

    def shared(group: Group, rank: int) -> list[list[float]]:
        first, both = torch.nn.Parameter(torch.full((1,), float(rank))), torch.nn.Parameter(torch.zeros(2))
        for refused in (lambda: group.broadcast(first), lambda: group.all_gather(first.detach(), out=both)):
            with pytest.raises(LocalError, match="requires grad"):
                refused()
        with torch.no_grad():
            assert group.all_gather(first, out=both) is both
            assert group.broadcast(first, root=1, out=first) is first
        return [first.tolist(), both.tolist()]

    async with cluster(2) as jobs:
        assert await on_threads(jobs, shared) == [[[1.0], [0.0, 1.0]]] * 2


async def test_errors_are_raised_by_the_call_or_by_the_wait() -> None:
    def different(group: Group, rank: int) -> None:
        with pytest.raises(LocalError, match="root 9"):
            group.broadcast(np.ones(1), root=9, async_op=True)
        handle = group.all_reduce(np.ones(3 + rank), async_op=True)
        for _ in range(2):
            with pytest.raises(Mismatch):
                handle.wait()
        assert handle.done()

    async with cluster(2) as jobs:
        assert await on_threads(jobs, different) == [None, None]


async def test_a_rank_that_never_calls_ends_the_wait_by_the_deadline() -> None:
    async with cluster(2) as jobs:
        (got,) = await on_threads(jobs[:1], lambda group, _: group.barrier(timeout=0.2))
        assert isinstance(got, PeerError)
        assert got.rank == 1


async def test_sub_groups_are_made_and_used_on_threads() -> None:
    def halves(group: Group, rank: int) -> tuple[Any, ...]:
        handle: BlockingHandle[Group | None] = group.split(rank % 2, async_op=True)
        mine = handle.wait()
        assert mine is not None
        assert group.split(None) is None
        return type(mine), mine.ranks, mine.all_gather_object(rank)

    async with cluster(4) as jobs:
        got = await on_threads(jobs, halves)
        assert got == [(Group, (rank % 2, rank % 2 + 2), [rank % 2, rank % 2 + 2]) for rank in range(4)]


async def test_what_a_thread_issues_in_a_step_is_part_of_its_vote() -> None:
    async with cluster(2) as jobs:

        async def step(job: Job, work: Callable[[Group], Any]) -> int:
            async with job.step() as step:
                await asyncio.to_thread(work, Group(job.group))
            return step.number

        assert await asyncio.gather(*(step(job, lambda g: g.all_reduce(np.ones(1)).tolist()) for job in jobs)) == [1, 1]
        left = (step(job, lambda g: g.barrier(async_op=True)) for job in jobs[:1])
        left_and_absent = await asyncio.gather(*left, step(jobs[1], lambda g: None), return_exceptions=True)
        assert [type(error) for error in left_and_absent] == [StepAborted] * 2


async def test_threads_that_issue_at_once_are_served_one_after_the_other() -> None:
    def many(group: Group, rank: int) -> list[float]:
        return [float(group.all_reduce(np.full(1, float(number)), timeout=100)[0]) for number in range(30)]

    async with cluster(1) as jobs:
        expected = [float(number) for number in range(30)]
        assert await on_threads(jobs * 4, many) == [expected] * 4


async def test_an_audit_has_what_threads_issued_whether_or_not_they_waited(tmp_path: Path) -> None:
    def work(group: Group, rank: int) -> None:
        handles = [group.all_reduce(np.full(2, float(number)), async_op=True) for number in range(3)]
        handles[2].wait()
        handles[1].wait()
        group.barrier()

    async with cluster(2) as jobs:
        files = [job.audit(tmp_path) for job in jobs]
        assert await on_threads(jobs, work) == [None, None]
    lines = [[line for line in read_log(file).lines if isinstance(line, OperationRecord)] for file in files]
    for rank, written in enumerate(lines):
        assert [(line.seq, line.op.split()[0], line.rank) for line in written] == [
            (0, "all_reduce", rank),
            (1, "all_reduce", rank),
            (2, "all_reduce", rank),
            (3, "barrier", rank),
        ]
    assert [line.result for line in lines[0]] == [line.result for line in lines[1]]


async def test_a_thread_whose_event_loop_runs_is_refused_before_anything_is_sent() -> None:
    async with cluster(2) as jobs:
        for async_op in (False, True):
            with pytest.raises(LocalError, match="an event loop is running on this thread"):
                Group(jobs[0].group).barrier(async_op=async_op)
        (handle,) = await on_threads(jobs[:1], lambda group, _: group.barrier(async_op=True))
        with pytest.raises(LocalError, match="there nothing may block"):
            handle.wait()
        await on_threads(jobs[1:], lambda group, _: group.barrier())
        await asyncio.to_thread(handle.wait)
        handle.wait()  # it has ended: nothing blocks


async def test_an_operation_of_the_event_loop_is_not_waited_for_by_a_thread() -> None:
    async with cluster(1) as jobs:
        handle = jobs[0].group.barrier()
        with pytest.raises(LocalError, match="issued on an event loop"):
            BlockingHandle(handle.pending).wait()
        await handle


async def test_a_job_that_is_left_ends_the_waits_of_its_threads() -> None:
    async with cluster(2) as jobs:
        (handle,) = await on_threads(jobs[:1], lambda group, _: group.barrier(timeout=50, async_op=True))
        waiting = asyncio.ensure_future(asyncio.to_thread(handle.wait))
        await jobs[0].aclose()
        with pytest.raises((LocalError, PeerError)):
            await asyncio.wait_for(waiting, 40)
        with pytest.raises(LocalError, match="closed"):
            await asyncio.to_thread(Group(jobs[0].group).barrier)


class Alarm(Exception):
    pass


def test_a_signal_handler_that_raises_ends_a_wait_and_cancels_its_operation() -> None:
    def alarm(*_: object) -> None:
        raise Alarm

    def interrupt() -> None:
        """Once this test's thread waits: what a signal raised before that would not be raised in the wait."""
        main = threading.main_thread().ident or 0
        while "block" not in [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])]:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGUSR1)

    jobs: list[Job] = []
    ready, over = threading.Event(), threading.Event()

    async def host() -> None:
        async with cluster(2) as made:
            jobs.extend(made)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(host(),))
    thread.start()
    ready.wait()
    before = signal.signal(signal.SIGUSR1, alarm)
    try:
        group = Group(jobs[0].group)
        handle = group.barrier(timeout=50, async_op=True)
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(Alarm):
            handle.wait()
        with pytest.raises(PeerError, match="cancelled by another"):
            handle.wait()
        began = time.monotonic()
        with pytest.raises(PeerError, match="was cancelled"):
            group.barrier()
        assert time.monotonic() - began < 200  # its deadline is 300
    finally:
        signal.signal(signal.SIGUSR1, before)
        over.set()
        thread.join()
