"""A vote whose answer this rank does not wait for to the end: the step is neither applied nor forgotten.

The view may be at work all the while, when it is another rank that has not voted yet. Callbacks run exactly if the
step is committed, whoever waited how long for it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
import pytest

from quicoll import Job, LocalError, Partitioned, StepAborted
from quicoll.testing import Cluster, cluster


class Run:
    """Steps of two ranks; in the first, rank 1 votes when `gate` is set."""

    def __init__(self, jobs: Cluster) -> None:
        self.jobs = jobs
        self.gate = asyncio.Event()
        self.ending = asyncio.Event()  # rank 0 is about to leave a step
        self.applied: list[tuple[int, int]] = []
        self.first = [asyncio.create_task(self.step(job, wait=job.rank == 1)) for job in jobs]

    async def step(self, job: Job, *, wait: bool = False) -> int:
        async with job.step() as step:
            await job.group.all_reduce(np.ones(3))
            step.on_commit(lambda: self.applied.append((job.rank, step.number)))
            if wait:
                await self.gate.wait()
            if job.rank == 0:
                self.ending.set()
        return step.number

    async def voted(self) -> None:
        """Until rank 0 has voted."""
        engine = self.jobs[0]._engine
        while engine.steps.cast is None:  # noqa: ASYNC110 - the vote is no event
            await asyncio.sleep(0)

    async def both(self) -> list[int]:
        return list(await asyncio.gather(*(self.step(job) for job in self.jobs)))


async def test_a_vote_given_up_at_its_deadline_in_a_view_that_goes_on_is_applied_when_it_is_committed() -> None:
    async with cluster(2, hold_timeout=1.0) as jobs:
        run = Run(jobs)
        with pytest.raises(Partitioned, match="not known yet"):
            await run.first[0]
        for _ in range(2):  # while nothing is decided, nothing is forgotten
            with pytest.raises(Partitioned, match="not known yet"):
                await jobs[0].ready()
        assert (jobs[0].committed_step, run.applied) == (0, [])
        run.gate.set()
        assert await run.first[1] == 1
        assert await run.both() == [2, 2]
        assert sorted(run.applied) == [(0, 1), (0, 2), (1, 1), (1, 2)]


async def test_a_vote_whose_wait_is_cancelled_is_applied_when_it_is_committed() -> None:
    async with cluster(2) as jobs:
        run = Run(jobs)
        await run.voted()
        run.first[0].cancel()
        with suppress(asyncio.CancelledError):
            await run.first[0]
        assert run.first[0].cancelled()
        run.gate.set()
        assert await run.first[1] == 1
        assert await run.both() == [2, 2]
        assert sorted(run.applied) == [(0, 1), (0, 2), (1, 1), (1, 2)]


async def test_a_vote_whose_wait_is_cancelled_is_dropped_when_the_step_is_aborted() -> None:
    async with cluster(2) as jobs:
        run = Run(jobs)
        await run.voted()
        run.first[0].cancel()
        with suppress(asyncio.CancelledError):
            await run.first[0]
        run.first[1].cancel()
        with suppress(asyncio.CancelledError):
            await run.first[1]
        while True:
            with suppress(StepAborted):
                assert await run.both() == [1, 1]
                break
        assert sorted(run.applied) == [(0, 1), (1, 1)]


@pytest.mark.parametrize("turns", range(12))
async def test_leaving_a_step_may_be_cancelled_at_any_turn(turns: int) -> None:
    """Before the vote, in the middle, when the answer is there: all ranks have the same steps behind them."""
    async with cluster(2) as jobs:
        run = Run(jobs)
        run.gate.set()
        await run.ending.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        run.first[0].cancel()
        await asyncio.wait(run.first)

        async def second(job: Job) -> None:
            while job.committed_step < 2:
                with suppress(StepAborted):
                    await run.step(job)

        await asyncio.gather(*(second(job) for job in jobs))
        assert sorted(run.applied) == [(0, 1), (0, 2), (1, 1), (1, 2)]


async def test_a_view_that_ends_before_the_vote_leaves_no_doubt_about_the_step() -> None:
    """However the end is called: a rank that was cut off before it voted knows that the step is committed nowhere."""
    async with cluster(1) as jobs:
        (job,) = jobs
        applied: list[int] = []

        async def cut() -> None:
            job._engine._views.communicator.end(Partitioned("cut off"))

        with pytest.raises(StepAborted, match="cut off"):  # noqa: PT012 - the end of the step raises
            async with job.step() as step:
                step.on_commit(lambda: applied.append(1))
                await job._runtime.call(cut())
        assert not job._steps.in_doubt
        assert not applied


async def test_a_job_is_entered_by_one_task_at_a_time() -> None:
    async with cluster(2) as jobs:
        first = asyncio.ensure_future(jobs[0].ready())
        await asyncio.sleep(0)
        for other in (jobs[0].ready(), jobs[0].step().__aenter__()):
            with pytest.raises(LocalError, match="another task"):
                await other
        await asyncio.gather(first, jobs[1].ready())
        run = Run(jobs)
        await run.voted()
        with pytest.raises(LocalError, match="another task"):
            await run.step(jobs[0])
        with pytest.raises(LocalError, match="already open"):
            await jobs[1].ready()
        run.gate.set()
        assert list(await asyncio.gather(*run.first)) == [1, 1]
        assert await run.both() == [2, 2]


async def test_a_step_is_one_attempt() -> None:
    async with cluster(1) as jobs:
        (job,) = jobs
        applied: list[str] = []
        attempt = job.step()
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - a step of two lines
            async with attempt:
                attempt.on_commit(lambda: applied.append("of the attempt that failed"))
                raise ZeroDivisionError
        with pytest.raises(LocalError, match="one attempt"):
            async with attempt:
                pass
        with pytest.raises(LocalError, match="has been left"):
            attempt.on_commit(lambda: None)
        while not job.committed_step:
            with suppress(StepAborted):
                async with job.step() as step:
                    step.on_commit(lambda: applied.append("of the one that went well"))
        assert applied == ["of the one that went well"]


async def test_what_would_be_awaited_by_nobody_is_refused() -> None:
    async def later(*_: object) -> dict[str, np.ndarray]:
        return {}

    async with cluster(1) as jobs:
        (job,) = jobs
        for save, load in ((later, lambda state: None), (lambda: {}, later)):
            with pytest.raises(LocalError, match="a plain function"):
                job.register_state(save, load)
        async with job.step() as step:
            with pytest.raises(LocalError, match="a plain function"):
                step.on_commit(later)
            with pytest.raises(LocalError, match="is a function, not None"):
                step.on_commit(None)
        with pytest.raises(LocalError, match="its work is not done"):
            async with job.step() as step:
                step.on_commit(lambda: later())
