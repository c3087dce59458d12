"""Residuals through aborted steps: what an attempt that was not committed has lost is in none of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
from wire_oracle import Fed

from quicoll.errors import QuicollError
from quicoll.sim import Conditions, Settings, Simulation

if TYPE_CHECKING:
    from quicoll import Job
    from quicoll.numerics.dtypes import Array

ELEMENTS = 6_000
SETTINGS = Settings(ranks=3, conditions=Conditions(bytes_per_second=100_000), limit=120.0)


def leaf(node: str, step: int) -> Array:
    return np.random.default_rng([int(node[-1]), step]).standard_normal(ELEMENTS).astype(np.float32)


@pytest.mark.parametrize("wire", ["int4", "topk:1/64"])
@pytest.mark.parametrize("vote", [False, True], ids=["before its operation", "with its vote"])
def test_a_rank_that_is_lost_leaves_the_residuals_of_the_others_where_the_last_commit_put_them(
    wire: str, vote: bool
) -> None:
    """Before its operation has ended; and with its vote, when that has succeeded on every rank and the step has not."""
    committed: dict[str, list[int]] = {}
    residuals: dict[str, Array] = {}
    aborted: list[bool] = []  # of each attempt: whether its operation had succeeded

    async def worker(job: Job, sim: Simulation) -> None:
        kept = residuals[job.node] = np.zeros(ELEMENTS, np.float32)
        steps = committed[job.node] = []
        job.register_state(lambda: {}, lambda state: None)
        while not sim.everyone_at(3):
            reduced = False
            try:
                async with job.step() as step:
                    number = step.number
                    await asyncio.sleep(0.4)
                    await job.group.all_reduce(leaf(job.node, number), wire=wire, residual=kept)
                    reduced = True
                    await job.group.barrier()  # nobody votes before it is so on all ranks
            except QuicollError:
                aborted.append(reduced)
            else:
                steps.append(number)

    sim = Simulation(worker, settings=SETTINGS)
    if vote:
        sim.at_vote(2, start=0.7).partition({2}, {0, 1, "coordinator"})
    else:
        sim.at(0.9).crash(2, power=True)
    sim.at(4.0).heal()
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert vote in aborted
    for node in ("worker-0", "worker-1"):
        assert committed[node][:3] == [1, 2, 3]
        fed = Fed((ELEMENTS,))
        for number in committed[node]:
            fed.follow(wire, leaf(node, number))
        assert residuals[node].tobytes() == fed.residual.tobytes()
