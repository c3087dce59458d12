"""Steps commit on all ranks or on none; faults abort them and the job goes on. REQUIREMENTS S8, S9, S11-S13, A7, C4."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import numpy as np
import pytest

from quicoll import Event, Job, LocalError, Mismatch, Partitioned, PeerError, QuicollError, StepAborted
from quicoll.numerics.buffers import tensor_digest
from quicoll.numerics.dtypes import DTYPES
from quicoll.testing import cluster, disturb_network
from quicoll_transport.faults.compose import Cut, Datagram, Delivery, Hold, Installed, Rng


async def outcomes(jobs: list[Job], work: Callable[[Job], Any]) -> list[Any]:
    return list(await asyncio.gather(*(work(job) for job in jobs), return_exceptions=True))


async def one_step(job: Job) -> int:
    async with job.step() as step:
        await job.group.all_reduce(np.ones(3))
    return step.number


async def go_on(jobs: list[Job]) -> list[int]:
    """Every rank begins again until a step is committed, as a training loop does: the step that each commits first.

    After a failure one rank may still be in the old view when another is in the next; whoever is early is aborted.
    """

    async def again(job: Job) -> int:
        while True:
            with suppress(StepAborted):
                return await one_step(job)

    return list(await asyncio.gather(*(again(job) for job in jobs)))


async def test_steps_are_numbered_from_one_and_commit_on_all_ranks() -> None:
    async with cluster(3) as jobs:
        for number in (1, 2, 3):
            assert await outcomes(jobs, one_step) == [number] * 3
        assert {job.committed_step for job in jobs} == {3}
        assert all(job.view == jobs[0].view for job in jobs)


async def test_callbacks_run_at_the_commit_in_order_and_never_after_an_abort() -> None:
    async with cluster(2) as jobs:
        ran: list[tuple[int, str]] = []

        async def step(job: Job, *, fail: bool) -> None:
            async with job.step() as step:
                step.on_commit(lambda: ran.append((job.rank, "first")))
                step.on_commit(lambda: ran.append((job.rank, "second")))
                await job.group.barrier()
                if fail and job.rank == 0:
                    raise ValueError("my own mistake")

        got = await outcomes(jobs, lambda job: step(job, fail=True))
        assert isinstance(got[0], ValueError)
        assert isinstance(got[1], StepAborted)
        assert "worker-0" in str(got[1])
        assert "my own mistake" in str(got[1])
        assert ran == []

        async def again(job: Job) -> None:
            while not job.committed_step:
                with suppress(StepAborted):
                    await step(job, fail=False)

        assert await outcomes(jobs, again) == [None, None]
        assert sorted(ran) == [(0, "first"), (0, "second"), (1, "first"), (1, "second")]
        assert [kind for rank, kind in ran if rank == 1] == ["first", "second"]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce(np.ones(4)), "(4,) on rank 2"),
        (lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce(np.ones(3, np.float32)), "float32 on rank 2"),
        (lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce(np.ones(3), op="max"), "max on rank 2"),
        (lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce(np.ones(3), reduce_order="ring"), "ring"),
        (lambda g: g.all_reduce(np.ones(3)), lambda g: g.barrier(), "barrier"),
        (lambda g: g.broadcast(np.ones(3)), lambda g: g.broadcast(np.ones(3), root=1), "1 on rank 2"),
        (lambda g: g.all_gather(np.ones((3, 2))), lambda g: g.all_gather(np.ones((3, 4))), "(4,) on rank 2"),
        (lambda g: g.all_reduce(np.ones((2, 3))), lambda g: g.all_reduce(np.ones((3, 2))), "(3, 2) on rank 2"),
    ],
)
async def test_ranks_that_call_different_things_all_get_mismatch_and_nobody_hangs(
    first: Callable[[Any], Any], second: Callable[[Any], Any], said: str
) -> None:
    async with cluster(3) as jobs:
        before = np.ones(3)

        async def call(job: Job) -> Any:
            await (second if job.rank == 2 else first)(job.group)

        for inside in (False, True):

            async def attempt(job: Job, inside: bool = inside) -> None:
                await job.ready()
                if not inside:
                    await call(job)
                    return
                async with job.step():
                    await call(job)

            got = await outcomes(jobs, attempt)
            assert [type(error) for error in got] == [Mismatch] * 3, got
            assert any(said in str(error) for error in got)
            assert any("worker-2" in str(error) for error in got[:2])
            assert all(error.view is not None and not error.usable for error in got)
        assert before.tolist() == [1.0, 1.0, 1.0]
        # The job goes on in a new view.
        assert await go_on(jobs) == [1] * 3


async def test_a_rank_that_never_calls_is_named_at_the_deadline() -> None:
    async with cluster(3) as jobs:
        x, out = np.ones(3), np.zeros(3)

        async def attempt(job: Job) -> None:
            if job.rank != 1:
                await job.group.all_reduce(x, out=out, timeout=0.4)

        got = await outcomes(jobs, attempt)
        assert [type(error) for error in (got[0], got[2])] == [PeerError, PeerError]
        assert any("rank 1 (worker-1) did not call all_reduce#0" in str(error) for error in got if error)
        assert not out.any()
        assert await go_on(jobs) == [1] * 3


async def test_cancelling_one_ranks_collective_ends_it_for_all_and_leaves_buffers_alone() -> None:
    async with cluster(2) as jobs:
        x = [np.full(400_000, float(rank)) for rank in range(2)]
        out = [np.full(400_000, -1.0) for _ in range(2)]

        async def attempt(job: Job) -> None:
            if job.rank:
                await job.group.all_reduce(x[1], out=out[1])
                return
            async with disturb_network(job, Hold()):  # so that it cannot have ended before its time is over
                async with asyncio.timeout(0.002):
                    await job.group.all_reduce(x[0], out=out[0])

        got = await outcomes(jobs, attempt)
        assert isinstance(got[0], TimeoutError)
        assert isinstance(got[1], PeerError)
        assert "cancelled" in str(got[1])
        for rank in range(2):
            assert (x[rank] == rank).all()
            assert (out[rank] == -1.0).all()
        assert await go_on(jobs) == [1, 1]


async def test_ranks_with_different_results_do_not_commit() -> None:
    async with cluster(2) as jobs:

        async def step(job: Job) -> None:
            async with job.step() as step:
                result = await job.group.all_reduce(np.ones(3))
                if job.rank == 1:
                    job._context.record(0, 99, b"x" * 16)  # as if memory had changed under one result
                step.on_commit(lambda: result.fill(0))

        got = await outcomes(jobs, step)
        assert all(isinstance(error, StepAborted) for error in got)
        assert all("digests of step 1 differ" in str(error) for error in got)
        assert await go_on(jobs) == [1, 1]


async def test_a_cut_rank_is_left_out_while_its_cut_lasts_and_comes_back_with_the_others_state() -> None:
    events: list[Event] = []
    async with cluster(3, lost_after=0.6, observer=events.append) as jobs:
        state = [np.zeros(4) for _ in jobs]

        def register(job: Job) -> None:
            mine = state[job.rank]
            job.register_state(lambda: {"w": mine}, lambda new: mine.__setitem__(slice(None), new["w"]))

        for job in jobs:
            register(job)
        ranks = {job.node: index for index, job in enumerate(jobs)}
        aborted: dict[str, StepAborted] = {}
        cut = AsyncExitStack()
        begun = False
        last = 1 << 30  # until the cut rank is back: then all are at the same step, and go on for ten more

        async def train(job: Job) -> None:
            nonlocal begun, last
            mine = state[ranks[job.node]]
            while job.committed_step < last:
                if job.node == "worker-1" and job.committed_step == 5 and not begun:
                    begun = True
                    await cut.enter_async_context(disturb_network(job, Cut()))
                if job.node == "worker-0" and job.committed_step == 8:  # after three steps without the cut rank
                    await cut.aclose()
                try:
                    async with job.step() as step:
                        total = await job.group.all_reduce(np.full(4, float(step.number)), op="avg")
                        step.on_commit(lambda total=total: np.add(mine, total, out=mine))
                except StepAborted as error:
                    aborted.setdefault(job.node, error)
                else:
                    if job.node == "worker-1" and "worker-1" in aborted:
                        last = min(last, job.committed_step + 10)

        await asyncio.gather(*(train(job) for job in jobs))
        # 1 + 2 + ... + last, on every rank: no step was applied twice, none was missed
        assert [mine.tolist() for mine in state] == [[last * (last + 1) / 2.0] * 4] * 3
        assert set(aborted) == {"worker-0", "worker-1", "worker-2"}
        for node in ("worker-0", "worker-2"):
            assert aborted[node].lost == ("worker-1",)
            assert aborted[node].step == 6
        views = [event.fields["nodes"] for event in events if event.kind == "view_installed"]
        assert ["worker-0", "worker-2"] in views
        assert any(event.kind == "state_received" and event.node == "worker-1" for event in events)
        assert jobs[1].world_size == 3


async def test_corruption_on_the_way_is_mended_by_resending_from_the_source() -> None:
    async with cluster(2) as jobs:
        flips = [True]

        def flip(view: memoryview) -> None:
            if flips and len(view) > 1000:
                flips.pop()
                view[17] ^= 4

        jobs[1]._engine.faults.payload_fault = flip
        x = [np.arange(60_000.0) * (rank + 1) for rank in range(2)]
        got = await outcomes(jobs, lambda job: job.group.all_reduce(x[job.rank]))
        assert not flips
        assert all(result.tobytes() == (x[0] + x[1]).tobytes() for result in got)


async def test_corruption_that_does_not_stop_aborts_the_step_and_nothing_is_applied() -> None:
    async with cluster(2) as jobs:

        def flip(view: memoryview) -> None:
            if len(view) > 1000:
                view[0] ^= 1

        jobs[1]._engine.faults.payload_fault = flip
        out = np.zeros(60_000)

        async def step(job: Job) -> None:
            async with job.step() as step:
                await job.group.all_reduce(np.ones(60_000), out=out)
                step.on_commit(lambda: pytest.fail("nothing may be committed"))

        got = await outcomes(jobs, step)
        assert all(isinstance(error, StepAborted) for error in got), got
        assert any("checksum" in str(error) for error in got)
        assert not out.any()
        jobs[1]._engine.faults.payload_fault = None
        assert await go_on(jobs) == [1, 1]


async def test_steps_do_not_nest_and_resuming_comes_first() -> None:
    async with cluster(1) as jobs:
        job = jobs[0]
        with pytest.raises(LocalError, match="not negative"):
            job.resume_from(-1)
        job.resume_from(41)
        async with job.step() as step:
            assert step.number == 42
            with pytest.raises(LocalError, match="do not nest"):
                async with job.step():
                    pass
        assert job.committed_step == 42
        with pytest.raises(LocalError, match="before the first step"):
            job.resume_from(7)


async def test_leaving_a_step_with_collectives_still_running_aborts_it() -> None:
    async with cluster(2) as jobs:
        left = asyncio.Event()
        forgotten: list[asyncio.Future[Any]] = []

        async def step(job: Job) -> None:
            if job.rank:
                async with job.step():
                    await left.wait()
                    await job.group.all_reduce(np.ones(3))
                return
            try:
                async with job.step():
                    forgotten.append(asyncio.ensure_future(job.group.all_reduce(np.ones(3))))
                    await asyncio.sleep(0)
            finally:
                left.set()

        # rank 1 calls after rank 0 has left, so rank 0's operation cannot have ended
        got = await outcomes(jobs, step)
        assert isinstance(got[0], StepAborted)
        assert "the step was left with all_reduce still running: await it inside of the step" in str(got[0])
        assert isinstance(got[1], QuicollError)
        await asyncio.gather(*forgotten, return_exceptions=True)


async def test_states_are_handed_over_bit_for_bit_from_the_newest_rank() -> None:
    import torch

    async with cluster(3) as jobs:
        kinds = {
            "half": torch.arange(7, dtype=torch.bfloat16) / 3,
            "count": torch.tensor(5, dtype=torch.int64),
            "empty": torch.zeros(0, 3),
            "flags": np.array([True, False]),
            "weights": np.random.default_rng(1).standard_normal((40, 50)),
        }
        loaded: dict[int, Any] = {}
        for job in jobs:
            held = loaded.setdefault(job.rank, dict(kinds) if job.rank == 1 else {})
            job.register_state(lambda held=held: held, held.update)
        jobs[1].resume_from(10)
        jobs[2].resume_from(4)
        assert await outcomes(jobs, one_step) == [11, 11, 11]
        for got in loaded.values():
            assert sorted(got) == sorted(kinds)
            for name, value in kinds.items():
                assert type(got[name]) is type(value)
                assert got[name].dtype == value.dtype
                assert got[name].shape == value.shape
                assert bytes(memoryview(np.asarray(torch.as_tensor(got[name]).reshape(-1).view(torch.uint8)))) == bytes(
                    memoryview(np.asarray(torch.as_tensor(value).reshape(-1).view(torch.uint8)))
                )


@pytest.mark.parametrize("torch_too", [False, True])
async def test_states_of_every_type_are_handed_over_as_the_kind_they_were(torch_too: bool) -> None:
    """Of both kinds where both have it: numpy has bfloat16 and float8 by ml_dtypes, torch has them by itself."""
    import ml_dtypes
    import torch

    state: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        below = 2 if name == "bool" else 256
        bits = np.random.default_rng(len(name)).integers(0, below, (3, 5, dtype.itemsize), np.uint8)
        array = bits.view(np.dtype(getattr(ml_dtypes, name, name)))[..., 0]
        state[name] = array
        state[f"{name}, of no dimension"] = array[:1, 0].reshape(())
        state[f"{name}, empty"] = array[:0]
        if torch_too:
            state[f"{name}, torch"] = torch.from_numpy(bits).view(getattr(torch, name))[..., 0]
    async with cluster(2) as jobs:
        got: dict[str, Any] = {}
        jobs[0].register_state(lambda: state, lambda new: None)
        jobs[1].register_state(lambda: got, got.update)
        jobs[0].resume_from(10)
        assert await outcomes(jobs, one_step) == [11, 11]
    assert sorted(got) == sorted(state)
    for name, value in state.items():
        assert (type(got[name]), got[name].dtype, got[name].shape) == (type(value), value.dtype, value.shape), name
        assert tensor_digest(got[name]) == tensor_digest(value), name


async def test_what_is_no_state_any_more_is_the_error_of_the_rank_that_gave_it() -> None:
    async with cluster(2) as jobs:
        state: dict[str, Any] = {"a": 3.0}
        for job in jobs:
            job.register_state(lambda job=job: state if job.rank == 0 else {}, lambda new: pytest.fail("nothing came"))
        jobs[0].resume_from(5)
        state["a"] = object()
        own, other = await outcomes(jobs, one_step)
        assert isinstance(own, LocalError)
        assert "the state's 'a' is a builtins.object" in str(own)
        assert isinstance(other, StepAborted)
        assert (other.rank, "the state's 'a'" in str(other)) == (0, True)


async def test_a_rank_behind_without_registered_state_is_told_what_to_do() -> None:
    async with cluster(2) as jobs:
        jobs[0].resume_from(10)
        got = await outcomes(jobs, one_step)
        assert isinstance(got[1], LocalError)
        assert "register_state" in str(got[1])
        assert isinstance(got[0], StepAborted)


async def test_a_rank_whose_callback_fails_counts_as_behind_and_gets_the_state_again() -> None:
    async with cluster(2) as jobs:
        state = [np.zeros(2) for _ in jobs]
        for job in jobs:
            mine = state[job.rank]
            job.register_state(
                lambda mine=mine: {"w": mine}, lambda new, mine=mine: mine.__setitem__(slice(None), new["w"])
            )

        async def step(job: Job, fail: bool) -> None:
            async with job.step() as step:
                await job.group.barrier()

                def apply() -> None:
                    state[job.rank][0] += 1
                    if fail and job.rank == 1:
                        raise ValueError("out of memory, say")
                    state[job.rank][1] += 1

                step.on_commit(apply)

        got = await outcomes(jobs, lambda job: step(job, fail=True))
        assert got[0] is None
        assert isinstance(got[1], ValueError)
        assert [job.committed_step for job in jobs] == [1, 0]

        async def again(job: Job) -> None:
            while job.committed_step < 2:
                with suppress(StepAborted):
                    await step(job, fail=False)

        assert await outcomes(jobs, again) == [None, None]
        assert [mine.tolist() for mine in state] == [[2.0, 2.0]] * 2
        assert [job.committed_step for job in jobs] == [2, 2]


async def test_a_loop_that_computes_for_longer_than_the_deadline_is_not_taken_for_dead() -> None:
    events: list[Event] = []
    async with cluster(2, lost_after=0.5, observer=events.append) as jobs:
        assert await outcomes(jobs, one_step) == [1, 1]
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            sum(range(1000))  # pure Python, so that it also holds the interpreter lock
        assert await outcomes(jobs, one_step) == [2, 2]
        ended = [event for event in events if event.kind in ("peer_lost", "view_ended")]
    assert not ended


async def test_a_rank_without_a_quorum_raises_partitioned_and_goes_on_when_it_is_heard_again() -> None:
    async with cluster(2, lost_after=0.5, hold_timeout=1.0) as jobs:
        assert await outcomes(jobs, one_step) == [1, 1]
        for job in jobs:
            job.register_state(lambda: {}, lambda new: None)
        cut, inside = AsyncExitStack(), asyncio.Barrier(2)

        async def cut_step(job: Job) -> None:
            async with job.step():
                await inside.wait()  # who is not inside when the view ends waits for the next one
                if job.rank == 1:
                    await cut.enter_async_context(disturb_network(job, Cut()))
                await job.group.barrier()

        async with cut:
            # one of two nodes is no majority: both hold, the one with the coordinator too
            assert [type(error) for error in await outcomes(jobs, cut_step)] == [StepAborted, StepAborted]
            held = await outcomes(jobs, one_step)
        assert [type(error) for error in held] == [Partitioned, Partitioned], held
        assert all("no view within 1 s" in str(error) for error in held)

        async def until_heard(job: Job) -> int:
            while True:
                with suppress(StepAborted, Partitioned):
                    return await one_step(job)

        assert await outcomes(jobs, until_heard) == [2, 2]


@pytest.mark.parametrize("patience", [30.0, 1.0])
async def test_a_vote_without_an_answer_is_neither_applied_nor_discarded_until_the_journal_says(
    patience: float,
) -> None:
    async with cluster(2, lost_after=0.5, hold_timeout=patience) as jobs:
        applied: list[tuple[int, int]] = []

        for job in jobs:
            job.register_state(lambda: {}, lambda new: pytest.fail("both ranks have the step: nothing to hand over"))
        engines = [job._engine for job in jobs]
        deaf = Cut(outgoing=True, addresses=(engines[1].endpoint.address[:2],))

        class Silence:
            """From when both have voted, and nobody has the answer, rank 1 does not hear the coordinator, which still
            hears it. All of them are on one thread."""

            begun = False

            def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
                self.begun = self.begun or all(engine.steps.cast is not None for engine in engines)
                return deaf.decide(datagram, now_ns, rng) if self.begun else None

        async def silence() -> Installed:
            return jobs.coordinator.faults.add(Silence())

        async def step(job: Job) -> None:
            async with job.step() as step:
                await job.group.barrier()
                step.on_commit(lambda: applied.append((job.rank, step.number)))

        silenced = await jobs[1]._runtime.call(silence())
        first = asyncio.create_task(step(jobs[0]))
        second = asyncio.create_task(step(jobs[1]))
        await first
        assert applied == [(0, 1)]
        if patience == 1.0:
            with pytest.raises(Partitioned, match="not known yet"):
                await second
            assert applied == [(0, 1)]
            assert jobs[1].committed_step == 0
        jobs[1]._runtime.loop.call_soon_threadsafe(silenced.remove)
        if patience == 30.0:
            await second
            assert applied == [(0, 1), (1, 1)]

        async def until_heard(job: Job) -> int:
            while True:
                with suppress(StepAborted, Partitioned):
                    return await one_step(job)

        assert await outcomes(jobs, until_heard) == [2, 2]
        assert sorted(applied) == [(0, 1), (1, 1)]
