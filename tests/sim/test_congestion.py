"""Congestion control of the real plane, on simulated paths that lose packets."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from quicoll.errors import LocalError
from quicoll.sim import Conditions, Settings, Simulation

BADWAN = Conditions(latency_ns=50_000_000, loss=0.01, bytes_per_second=12_500_000, queue_bytes=1 << 20)


def seconds_of_an_all_reduce(congestion: str, *, seed: int = 1, idle_s: float = 0.0) -> list[float]:
    """Three of 1 MiB after so long a silence, of the rank that was last; 184 ms each at best."""
    taken: list[list[float]] = []

    async def worker(job: Any, sim: Any) -> None:
        values = np.full(1 << 18, job.rank + 1.0, np.float32)
        times = []
        await asyncio.sleep(idle_s)
        for _ in range(3):
            await job.group.barrier(timeout=200)
            begin = sim.now
            result = await job.group.all_reduce(values, timeout=200)
            times.append(sim.now - begin)
            assert (result == 3.0).all()
        taken.append(times)

    settings = Settings(ranks=2, conditions=BADWAN, congestion=congestion, lost_after=5.0, timeout=200.0, limit=600.0)
    outcome = Simulation(worker, seed=seed, settings=settings).run()
    assert outcome.error is None
    return [max(times) for times in zip(*taken, strict=True)]


def test_an_all_reduce_over_a_long_path_that_loses_packets_takes_a_fraction_with_bbr() -> None:
    bbr, cubic = seconds_of_an_all_reduce("bbr")[1:], seconds_of_an_all_reduce("cubic")[1:]
    assert max(bbr) < min(cubic) / 4
    assert max(bbr) < 0.8


def test_a_connection_that_was_idle_for_seconds_is_as_good_as_a_new_one_with_bbr() -> None:
    """What comes of the heartbeats of a silence says nothing of the path."""
    idle, new = seconds_of_an_all_reduce("bbr", idle_s=8.0), seconds_of_an_all_reduce("bbr")
    assert idle[0] < 1.2 * new[0]
    assert max(idle[1:]) < 0.8


def test_a_seed_leads_to_the_same_times_with_bbr() -> None:
    assert seconds_of_an_all_reduce("bbr", seed=2) == seconds_of_an_all_reduce("bbr", seed=2)


def test_a_cluster_with_an_unknown_congestion_control_is_refused() -> None:
    with pytest.raises(LocalError, match="congestion"):
        Settings(congestion="bbr9")


@pytest.mark.parametrize("seed", range(3))
def test_memory_may_be_used_again_and_the_job_left_while_the_last_messages_are_under_way(seed: int) -> None:
    """Over a path that loses one packet in twenty, much of a result is repaired after its sender has its own."""
    ranks = 3
    ended: dict[int, list[tuple[float, float]]] = {}

    async def worker(job: Any, sim: Any) -> None:
        results = []
        values = np.empty(1 << 16, np.float32)
        for number in range(4):
            values[:] = 100.0 * number + job.rank
            result = await job.group.all_reduce(values, timeout=200)
            results.append((float(result.min()), float(result.max())))
            values[:] = result[:] = -1.0
        ended[job.rank] = results

    conditions = Conditions(latency_ns=25_000_000, loss=0.05, bytes_per_second=12_500_000, queue_bytes=1 << 20)
    settings = Settings(
        ranks=ranks, conditions=conditions, congestion="bbr", lost_after=5.0, timeout=200.0, limit=600.0
    )
    outcome = Simulation(worker, seed=seed, settings=settings).run()
    assert outcome.error is None
    sums = [ranks * 100.0 * number + 3.0 for number in range(4)]
    assert ended == {rank: [(value, value) for value in sums] for rank in range(ranks)}
