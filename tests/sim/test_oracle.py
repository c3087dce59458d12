"""Reductions against their slow definition, bit for bit, on networks that lose, double, delay, spoil and split.

Every step is one reduction: another operation, type, algorithm and length each. A step that the faults abort is tried
again, in whatever view comes next.
"""

from __future__ import annotations

import asyncio
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from slow_reference import FLOATS, INTEGERS, OPS, is_defined, reduced

from quicoll.errors import LocalError, QuicollError
from quicoll.sim import Conditions, Settings, Simulation

if TYPE_CHECKING:
    from quicoll.job import Job

DTYPES = ("float16", "float32", "float64", "int8", "int64", "uint16", "uint32")
ALGORITHMS = ("direct", "tree", "hierarchical", "exchange", "auto")
LENGTHS = (1, 3, 67, 130)
SHARDS = 8


def leaf(number: int, shard: int, dtype: str, length: int) -> np.ndarray[Any, Any]:
    """Patterns of any kind for integers; for floats sums whose bits hang on their order, zeros, infinities and NaN."""
    rng = np.random.default_rng((number, shard))
    if dtype in INTEGERS:
        return np.frombuffer(rng.bytes(length * np.dtype(dtype).itemsize), dtype)
    values = np.ldexp(rng.standard_normal(length), rng.integers(-6, 6, length))
    drawn = rng.choice(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324]), length)
    return np.where(rng.random(length) < 0.1, drawn, values).astype(dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8])
def test_reductions_under_faults_have_the_bits_of_their_definition(ranks: int) -> None:
    assert set(DTYPES) <= {*FLOATS, *INTEGERS}
    every = [(op, dtype) for op, dtype in product(OPS, DTYPES) if is_defined(op, dtype)]
    cases = every[ranks % 3 :: 3]

    async def worker(job: Job, sim: Simulation) -> None:
        job.register_state(lambda: {}, lambda state: None)
        while not sim.everyone_at(len(cases)):
            try:
                async with job.step() as step:
                    number = (step.number - 1) % len(cases)
                    op, dtype = cases[number]
                    length = LENGTHS[(number + ranks) % len(LENGTHS)]
                    algorithm: Any = ALGORITHMS[(number + ranks) % len(ALGORITHMS)]
                    leaves = [leaf(number, shard, dtype, length) for shard in range(SHARDS)]
                    shards = job.group.shards(SHARDS)
                    mine = shards.leaves([leaves[shard] for shard in shards], like=leaves[0])
                    result = await job.group.all_reduce(mine, op=op, algorithm=algorithm)
                    bits = f"u{result.itemsize}"
                    wanted = reduced(op, dtype, [each.view(bits).tolist() for each in leaves])
                    assert result.view(bits).tolist() == wanted, (op, dtype, algorithm)
                    await asyncio.sleep(0.02)
            except LocalError:
                raise
            except QuicollError:
                continue

    bad = Conditions(latency_ns=2_000_000, jitter_ns=5_000_000, loss=0.02, duplicate=0.05, reorder=0.05, corrupt=0.01)
    sim = Simulation(worker, seed=ranks, settings=Settings(ranks=ranks, conditions=bad, timeout=5.0))
    sim.every(0.2, start=0.1, until=1.0).corrupt(0)
    if ranks > 2:
        sim.at(0.3).partition({0}, {1}, one_way=True)
        sim.at(0.6).crash(ranks - 1)
    sim.at(2.0).heal()
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert outcome.committed >= len(cases)
