"""A large `out` of a reduction is written as the result comes: what that means where ranks fail or cancel."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import numpy as np

from quicoll.errors import QuicollError
from quicoll.numerics.destinations import IN_PLACE_BYTES
from quicoll.sim import Conditions, Settings, Simulation

if TYPE_CHECKING:
    from quicoll import Job

ELEMENTS = IN_PLACE_BYTES // 4
SETTINGS = Settings(
    ranks=3, conditions=Conditions(bytes_per_second=600_000, mtu=8900), chunk_bytes=1 << 14, limit=120.0
)


def leaf(node: str) -> np.ndarray:
    return np.random.default_rng(int(node[-1])).standard_normal(ELEMENTS).astype(np.float32)


def test_a_step_that_was_aborted_half_way_is_repeated_with_the_right_bits() -> None:
    """The inputs are as they were, whatever has come to lie in `out`."""
    torn: list[str] = []
    results: dict[str, bytes] = {}

    async def worker(job: Job, sim: Simulation) -> None:
        x, out = leaf(job.node), np.full(ELEMENTS, np.nan, np.float32)
        given = x.tobytes()
        job.register_state(lambda: {}, lambda state: None)
        while not sim.everyone_at(1):
            try:
                async with job.step():
                    await job.group.all_reduce(x, out=out, algorithm="direct")
            except QuicollError:
                if 0 < int(np.isnan(out).sum()) < ELEMENTS:
                    torn.append(job.node)
            else:
                results[job.node] = out.tobytes()
            assert x.tobytes() == given

    sim = Simulation(worker, settings=SETTINGS)
    sim.at(0.5).crash(2, power=True)
    sim.at(4.0).heal()
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert torn, "no rank was in the middle of it"
    leaves = [leaf(f"worker-{rank}") for rank in range(3)]
    assert results
    assert set(results.values()) <= {((leaves[0] + leaves[1]) + leaves[2]).tobytes(), (leaves[0] + leaves[1]).tobytes()}


def test_after_a_cancelled_await_nothing_is_written_any_more() -> None:
    seen: list[bool] = []

    async def worker(job: Job) -> None:
        out = np.full(ELEMENTS, np.nan, np.float32)
        with contextlib.suppress(QuicollError, TimeoutError):
            async with asyncio.timeout(0.5 if job.rank == 0 else None):
                await job.group.all_reduce(leaf(job.node), out=out, algorithm="direct")
        before = out.tobytes()
        assert 0 < int(np.isnan(out).sum()) < ELEMENTS
        await asyncio.sleep(1.0)
        seen.append(out.tobytes() == before)

    outcome = Simulation(worker, settings=SETTINGS).run()
    assert outcome.error is None, outcome.error
    assert seen == [True] * 3
