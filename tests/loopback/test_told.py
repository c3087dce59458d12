"""What the ranks are told of one failure: the same on all of them, whenever they come to hear of it; and what is said
at once, before anything is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from quicoll import Event, Job, LocalError, Mismatch, PeerError, StepAborted, plan
from quicoll.engine.calls import Call, Work
from quicoll.numerics.dtypes import DType
from quicoll.numerics.reduce import ReduceOp
from quicoll.testing import cluster, disturb_network
from quicoll_transport.faults.compose import Drop

WORLD = 3
FLOAT64 = DType.parse("float64")


def following() -> tuple[asyncio.Event, Callable[[Event], None]]:
    """Set once rank 1 is in a second view; and the observer who sees to it."""
    loop, followed = asyncio.get_running_loop(), asyncio.Event()

    def observer(event: Event) -> None:
        if (event.kind, event.node) == ("view_installed", "worker-1") and event.fields["view"] > 1:
            loop.call_soon_threadsafe(followed.set)

    return followed, observer


async def late(
    jobs: list[Job], followed: asyncio.Event, fail: Callable[[Job], Awaitable[Any]]
) -> tuple[list[Any], list[Any]]:
    """What the operations and the steps raised of ranks 0 and 1, where rank 2 does as `fail` says, rank 0 waits in an
    operation, and rank 1 computes until long after the next view is at work."""
    await asyncio.gather(*(job.ready() for job in jobs))
    raised: list[Any] = [None] * WORLD
    inside = asyncio.Barrier(WORLD)

    async def step(job: Job) -> None:
        async with job.step() as step:
            step.on_commit(lambda: pytest.fail("nothing may be committed"))
            await job.group.barrier()
            await inside.wait()
            try:
                if job.rank == 2:
                    await fail(job)
                    return
                if job.rank == 1:
                    await followed.wait()
                await job.group.all_reduce(np.ones(3))
            except BaseException as error:
                raised[job.rank] = error
                raise

    steps = await asyncio.wait_for(asyncio.gather(*(step(job) for job in jobs), return_exceptions=True), 100)
    return raised, steps


async def test_a_rank_that_was_computing_is_told_who_left_the_step() -> None:
    async def leave(job: Job) -> None:
        raise ZeroDivisionError("by zero")

    followed, observer = following()
    async with cluster(WORLD, observer=observer) as jobs:
        raised, steps = await late(jobs, followed, leave)
        for rank in (0, 1):
            assert type(raised[rank]) is PeerError, raised
            assert (raised[rank].rank, raised[rank].node, raised[rank].step) == (2, "worker-2", 1)
            assert raised[rank].op.startswith("all_reduce")
            assert "left its step: ZeroDivisionError: by zero" in raised[rank].message
            assert type(steps[rank]) is StepAborted
            assert (steps[rank].rank, steps[rank].node) == (2, "worker-2")
        assert isinstance(steps[2], ZeroDivisionError)


async def test_a_rank_that_was_computing_is_told_who_was_lost() -> None:
    followed, observer = following()
    async with cluster(WORLD, lost_after=0.6, observer=observer) as jobs:

        async def vanish(job: Job) -> None:
            async with disturb_network(job, Drop(1.0)):
                await job.group.all_reduce(np.ones(3))

        raised, steps = await late(jobs, followed, vanish)
        for rank in (0, 1):
            assert type(raised[rank]) is PeerError, raised
            assert (raised[rank].rank, raised[rank].node, raised[rank].lost) == (2, "worker-2", ("worker-2",))
            assert type(steps[rank]) is StepAborted
            assert (steps[rank].node, steps[rank].lost) == ("worker-2", ("worker-2",))


async def test_a_rank_that_was_computing_is_told_of_a_mismatch() -> None:
    async def differ(job: Job) -> None:
        await job.group.all_reduce(np.ones(4))

    followed, observer = following()
    async with cluster(WORLD, observer=observer) as jobs:
        raised, steps = await late(jobs, followed, differ)
        assert [type(error) for error in raised] == [Mismatch] * WORLD, raised
        assert [type(error) for error in steps] == [Mismatch] * WORLD
        assert len({error.message for error in raised}) == 1
        # Two calls are known, and nothing says which is the right one: each end names the other.
        assert [(error.rank, error.node) for error in (raised[0], raised[2])] == [(2, "worker-2"), (0, "worker-0")]


async def test_an_error_of_the_librarys_own_ends_the_view_and_names_the_rank_that_met_it() -> None:
    async with cluster(2) as jobs:
        await asyncio.gather(*(job.ready() for job in jobs))

        def work(rank: int) -> Work:
            if rank:
                raise MemoryError("no room")
            schedule = plan.broadcast(rank=0, world=2, root=1, elements=4, itemsize=8, chunk_bytes=1 << 20)
            memory = np.zeros(4)
            return Work(schedule, FLOAT64, FLOAT64, ReduceOp.SUM, [memory], memory)

        async def one(job: Job) -> None:
            call = Call("broadcast", "the same on both", lambda _: work(job.rank))
            await job._runtime.begin(
                partial(job._engine.collective, job.view.view_id, call, group=0, timeout=20.0, step=None),
                job._engine.endpoint,
            )

        got = await asyncio.wait_for(asyncio.gather(*map(one, jobs), return_exceptions=True), 15)
        assert isinstance(got[1], MemoryError)
        assert type(got[0]) is PeerError
        assert (got[0].rank, got[0].node) == (1, "worker-1")
        assert "failed: MemoryError: no room" in got[0].message


async def test_an_out_of_the_wrong_size_is_its_owners_error_and_the_others_hear_whose() -> None:
    async with cluster(2) as jobs:
        out = np.full(9, -1.0)

        async def gather(job: Job) -> Any:
            return await job.group.all_gather(np.ones(2), out=out if job.rank else None)

        got = await asyncio.wait_for(asyncio.gather(*map(gather, jobs), return_exceptions=True), 100)
        assert isinstance(got[1], LocalError)
        assert type(got[0]) is PeerError
        assert (got[0].rank, got[0].node) == (1, "worker-1")
        assert "out is (9,)" in got[0].message
        assert (out == -1).all()


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), 0, -1, 1e6, "soon", [1]])
async def test_a_timeout_that_is_none_is_refused_before_anything_is_sent(timeout: Any) -> None:
    async with cluster(2, timeout=20.0) as jobs:
        with pytest.raises(LocalError, match="timeout"):
            jobs[0].group.all_reduce(np.ones(2), timeout=timeout)
        with pytest.raises(LocalError, match="timeout"):
            await jobs[0].ready(timeout=timeout)
        results = await asyncio.gather(*(job.group.all_reduce(np.ones(2)) for job in jobs))
        assert [result.tolist() for result in results] == [[2.0, 2.0]] * 2


async def test_the_ring_is_an_order_and_no_algorithm_of_the_canonical_order() -> None:
    async with cluster(1) as (job,):
        with pytest.raises(LocalError, match="algorithm 'ring' is not known"):
            job.group.all_reduce(np.ones(2), algorithm="ring")
        with pytest.raises(LocalError, match="the number of shards must be an integer"):
            job.group.shards(2.5)
        for counts in ([1.5], ["a"], 3):
            with pytest.raises(LocalError, match="count"):
                job.group.reduce_scatter(np.ones(1), counts=counts)


async def test_a_rank_may_be_any_integer_and_nothing_else() -> None:
    async with cluster(2) as jobs:
        root = np.int64(1)

        async def move(job: Job) -> Any:
            x = np.full(2, float(job.rank))
            handles = [
                job.group.broadcast(x, root=root),
                job.group.reduce(x, root=root),
                job.group.scatter(x, root=root),
                job.group.gather(x, root=root),
                job.group.broadcast_object(job.rank, root=root),
                job.group.recv(x, source=root) if job.rank == 0 else job.group.send(x, to=np.uint8(0)),
            ]
            return [await handle for handle in handles]

        got = await asyncio.wait_for(asyncio.gather(*map(move, jobs)), 100)
        assert got[0][0].tolist() == got[0][5].tolist() == [1.0, 1.0]
        assert got[1][1].tolist() == [1.0, 1.0]
        group = jobs[0].group
        for bad in ("1", 1.0, True, None):
            for call in (group.broadcast, group.reduce, group.scatter, group.gather, group.broadcast_object):
                with pytest.raises(LocalError, match="root must be an integer"):
                    call(np.ones(2), root=bad)
            with pytest.raises(LocalError, match="to must be an integer"):
                group.send(np.ones(2), to=bad)
        await asyncio.gather(*(job.group.barrier() for job in jobs))


async def test_a_rank_that_cannot_take_the_state_is_named_to_those_who_wait_for_it() -> None:
    async with cluster(2) as jobs:
        for job in jobs:
            job.register_state(lambda: {"x": np.ones(3)}, lambda state: {}["missing"])
        jobs[0].resume_from(5)
        got = await asyncio.wait_for(asyncio.gather(*(enter(job) for job in jobs), return_exceptions=True), 100)
        assert isinstance(got[1], KeyError)
        assert type(got[0]) is StepAborted
        assert got[0].node == "worker-1"
        assert "KeyError: 'missing'" in got[0].message


async def enter(job: Job) -> None:
    async with job.step():
        await job.group.barrier()
