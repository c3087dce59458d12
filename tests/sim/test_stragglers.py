"""Who comes late is seen by all ranks. Simulated, because lateness is time: a busy host makes others late as well."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from quicoll.sim import Recording, Settings, Simulation

if TYPE_CHECKING:
    from quicoll import Job
    from quicoll.observability.stragglers import Straggler

LATE_S = 1.0


def test_who_comes_late_is_told_to_all_and_kept_by_the_job() -> None:
    async def work(job: Job) -> tuple[Straggler, ...]:
        pair = await job.group.split(0 if job.rank < 2 else None)
        if job.rank == 1:
            await asyncio.sleep(LATE_S)
        await asyncio.gather(*(job.group.all_reduce(np.ones(3)) for _ in range(5)))
        # Waiting for a message is no lateness, and a sub-group's operations are named after it.
        received = job.group.recv(np.ones(3), source=2) if job.rank == 0 else None
        if job.rank != 1:
            await asyncio.sleep(LATE_S)
        if job.rank == 2:
            await job.group.send(np.ones(3), to=0)
        if pair is not None:
            await pair.barrier()
        if received is not None:
            await received
        await job.group.barrier()
        return tuple(job.stragglers())

    recording = Recording()
    outcome = Simulation(work, settings=Settings(ranks=3), recorder=recording.record).run()
    assert outcome.ok, outcome.error
    second = (1, "worker-1", 1, "all_reduce#1")
    first = (0, "worker-0", 1, "barrier#0@0:0")
    kept = [sorted((row.rank, row.node, row.times, row.worst_op) for row in rows) for rows in outcome.results]
    assert kept == [[first, second], [first, second], [second]]
    for rows in outcome.results:
        for row in rows:
            assert row.total_s == row.worst_s == pytest.approx(LATE_S, abs=0.1), "its pause, and the network's delay"
    told = [entry for entry in recording.entries if entry.kind == "straggler"]
    assert sorted((entry.who, entry.field("rank"), entry.field("peer"), entry.field("op")) for entry in told) == [
        ("worker-0", *first[:2], first[3]),
        ("worker-0", *second[:2], second[3]),
        ("worker-1", *first[:2], first[3]),
        ("worker-1", *second[:2], second[3]),
        ("worker-2", *second[:2], second[3]),
    ]
