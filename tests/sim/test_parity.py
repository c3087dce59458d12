"""Parity of the real plane under a cluster, on a simulated path that loses packets."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pytest

from quicoll.errors import LocalError
from quicoll.sim import Conditions, Settings, Simulation

BADWAN = Conditions(latency_ns=50_000_000, loss=0.01, bytes_per_second=12_500_000, queue_bytes=1 << 20)


class Run(NamedTuple):
    """What a cluster did. digests: each rank's results. seconds: of each operation but the first, the last rank's."""

    digests: dict[int, list[bytes]]
    seconds: list[float]
    parity_bytes: int
    repaired_bytes: int


def all_reduces(parity: str, *, seed: int, ranks: int = 2) -> Run:
    """Reduce some values of all magnitudes five times, 2 MiB each."""
    digests: dict[int, list[bytes]] = {}
    times: list[list[float]] = []
    counted = [0, 0]

    async def worker(job: Any, sim: Any) -> None:
        rng = np.random.default_rng(job.rank)
        results, taken = [], []
        for _ in range(5):
            values = (rng.standard_normal(1 << 19) * 10.0 ** rng.integers(-6, 6, 1 << 19)).astype(np.float32)
            await job.group.barrier(timeout=200)
            begin = sim.now
            result = await job.group.all_reduce(values, timeout=200)
            taken.append(sim.now - begin)
            results.append(result.tobytes())
        digests[job.rank] = results
        times.append(taken[1:])
        for link in await job.links():
            counted[0] += link.parity_bytes
            counted[1] += link.repaired_bytes
        await job.group.barrier(timeout=200)

    settings = Settings(
        ranks=ranks, conditions=BADWAN, congestion="bbr", parity=parity, lost_after=5.0, timeout=200.0, limit=600.0
    )
    outcome = Simulation(worker, seed=seed, settings=settings).run()
    assert outcome.error is None
    return Run(digests, [max(one) for one in zip(*times, strict=True)], *counted)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_cluster_has_the_same_bits_with_parity_and_without(ranks: int) -> None:
    with_it, without = (all_reduces(parity, seed=3, ranks=ranks) for parity in ("auto", "off"))
    assert with_it.digests == without.digests
    assert len({tuple(results) for results in with_it.digests.values()}) == 1
    assert with_it.repaired_bytes > 0
    assert (without.parity_bytes, without.repaired_bytes) == (0, 0)


@pytest.mark.slow
def test_operations_take_less_time_with_parity() -> None:
    runs = [[all_reduces(parity, seed=seed) for seed in (1, 2)] for parity in ("auto", "off")]
    with_it, without = (median(second for run in some for second in run.seconds) for some in runs)
    assert with_it < 0.95 * without
    assert sum(run.parity_bytes for run in runs[0]) < 0.06 * 2 * 2 * 5 * (2 << 20)


def test_a_cluster_with_parity_of_another_kind_is_refused() -> None:
    with pytest.raises(LocalError, match="parity is auto or off"):
        Settings(parity="on")
