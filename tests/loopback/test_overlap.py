"""Steps that are left before they are decided, over real sockets: on an event loop and in blocking code, in one job."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import quicoll
import quicoll.blocking
from quicoll.errors import LocalError, StepAborted
from quicoll.membership.serving import serve
from quicoll.testing import cluster
from quicoll_transport.security.authority import create_authority, issue

if TYPE_CHECKING:
    from quicoll.membership.service import CoordinatorService

STEPS = 8


class Held:
    """A state, and what it was when each step was entered."""

    def __init__(self) -> None:
        self.total = np.zeros(3)
        self.seen: list[tuple[int, int]] = []  # the step that was entered, and what was committed then

    def apply(self, sums: np.ndarray) -> None:
        self.total = self.total * 0.5 + sums


async def on_a_loop(job: quicoll.Job) -> Held:
    held = Held()
    while job.committed_step < STEPS:
        async with job.step(overlap=job.committed_step < STEPS - 2) as step:
            held.seen.append((step.number, job.committed_step))
            if step.number > job.committed_step + 1:
                with pytest.raises(LocalError, match="not decided"):
                    job.group.barrier()
                with pytest.raises(LocalError, match="has not begun"):
                    step.on_commit(print)
            await step.ready()
            sums = await job.group.all_reduce(np.full(3, float(step.number)))
            step.on_commit(lambda sums=sums: held.apply(sums))
    return held


def in_blocking_code(job: quicoll.blocking.Job) -> Held:
    held = Held()
    while job.committed_step < STEPS:
        with job.step(overlap=job.committed_step < STEPS - 2) as step:
            held.seen.append((step.number, job.committed_step))
            if step.number > job.committed_step + 1:
                with pytest.raises(LocalError, match="not decided"):
                    job.group.barrier()
            step.ready()
            sums = job.group.all_reduce(np.full(3, float(step.number)))
            step.on_commit(lambda sums=sums: held.apply(sums))
    return held


async def test_both_faces_compute_ahead_of_the_decision_and_apply_behind_it(tmp_path: Path) -> None:
    create_authority(tmp_path, job="alpha")
    issue(tmp_path, role="coordinator", node="coordinator")
    for node in ("a", "b"):
        issue(tmp_path, role="worker", node=node)
    listening: asyncio.Future[CoordinatorService] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(
            listen="127.0.0.1:0", job="alpha", certs=tmp_path, journal=tmp_path / "journal", world_size=2,
            ready=listening.set_result,
        )
    )  # fmt: skip
    address = (await listening).address
    settings = {"coordinator": address, "job": "alpha", "certs": str(tmp_path), "listen": "127.0.0.1:0"}

    def blocking() -> Held:
        with quicoll.blocking.join(node="b", **settings) as job:
            return in_blocking_code(job)

    async def awaiting() -> Held:
        async with quicoll.join(node="a", **settings) as job:
            return await on_a_loop(job)

    found = await asyncio.gather(awaiting(), asyncio.to_thread(blocking))
    expected = Held()
    for number in range(1, STEPS + 1):
        expected.apply(np.full(3, 2.0 * number))
    for held in found:
        assert held.total.tobytes() == expected.total.tobytes()
        assert held.seen == [(1, 0), *((number, number - 2) for number in range(2, STEPS + 1))]
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_a_rank_that_fails_ahead_of_a_decision_ends_the_step_of_the_others_and_all_go_on() -> None:
    applied: dict[int, list[int]] = {0: [], 1: []}

    async def one(job: quicoll.Job, *, overlap: bool, fails: bool = False) -> None:
        async with job.step(overlap=overlap) as step:
            if fails:
                raise ZeroDivisionError
            await step.ready()
            await job.group.barrier()
            step.on_commit(lambda: applied[job.rank].append(step.number))

    async with cluster(2) as jobs:
        await asyncio.gather(*(one(job, overlap=True) for job in jobs))
        assert applied == {0: [], 1: []}
        first, second = await asyncio.gather(
            one(jobs[0], overlap=False, fails=True), one(jobs[1], overlap=False), return_exceptions=True
        )
        assert isinstance(first, ZeroDivisionError)
        assert isinstance(second, StepAborted)
        assert "worker-0" in str(second)
        assert "ZeroDivisionError" in str(second)
        assert applied == {0: [1], 1: [1]}
        await asyncio.gather(*(one(job, overlap=False) for job in jobs))
        assert applied == {0: [1, 2], 1: [1, 2]}


async def test_the_end_of_the_job_waits_for_the_decision_on_its_last_step() -> None:
    applied = []
    async with cluster(2) as jobs:

        async def last(job: quicoll.Job) -> None:
            async with job.step(overlap=True) as step:
                await job.group.barrier()
                step.on_commit(lambda: applied.append(job.rank))

        await asyncio.gather(*(last(job) for job in jobs))
        assert applied == []
        await asyncio.gather(*(job.aclose() for job in jobs))
        assert sorted(applied) == [0, 1]
        assert [job.committed_step for job in jobs] == [1, 1]
