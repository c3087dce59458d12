"""Sites in a simulated cluster: what is hierarchical goes other ways than what is direct, and the bits are the same."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.engine.calls import site_numbers
from quicoll.sim import Settings, Simulation
from quicoll.sim.runner import run_scenario
from quicoll.sim.scenario.swarm import generate

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.plan.schedule import AlgorithmName

RANKS = 4
ELEMENTS = 100_000  # of 4 bytes, so that datagrams of payload are nearly all there are
SITES = ("north", "north", "south", "south")  # neighbours, whose leaves make one sum


def crossing(algorithm: AlgorithmName, sites: tuple[str, ...]) -> tuple[int, list[bytes]]:
    """Datagrams between the ranks of SITES that are not in one place, in one all_reduce; what each rank got."""

    async def worker(job: Job) -> bytes:
        assert site_numbers(job.view) == ((0, 0, 1, 1) if sites else (0, 0, 0, 0))
        mine = np.random.default_rng(job.rank).standard_normal(ELEMENTS).astype(np.float32)
        async with job.step():  # which nobody leaves before all have their result
            total: Any = await job.group.all_reduce(mine, algorithm=algorithm)
        return bytes(total.tobytes())

    sent: dict[tuple[str, str], int] = {}

    def record(t_ns: int, kind: str, who: str, what: object) -> None:
        if kind == "send":
            _, to = str(what).split()
            path = who, to.rpartition(":")[0]
            sent[path] = sent.get(path, 0) + 1

    outcome = Simulation(worker, settings=Settings(ranks=RANKS, sites=sites), recorder=record).run()
    assert outcome.error is None, outcome.error
    count = 0
    for one, other in combinations(range(RANKS), 2):
        if SITES[one] != SITES[other]:
            # The world numbers its machines from 1, the coordinator first.
            count += sent.get((f"worker-{one}", f"10.0.0.{other + 2}"), 0)
            count += sent.get((f"worker-{other}", f"10.0.0.{one + 2}"), 0)
    return count, list(outcome.results)


def test_hierarchical_crosses_between_sites_half_as_much_as_direct_and_only_where_there_are_sites() -> None:
    direct, bits = crossing("direct", SITES)
    hierarchical, same = crossing("hierarchical", SITES)
    payload = 4 * ELEMENTS / 1452  # datagrams of one tensor, were they full
    assert direct > 4 * payload  # each rank's quarters to two ranks beyond, and the results back
    assert 2 * payload < hierarchical < 0.6 * direct  # the sum of a site once, and the result
    assert bits == same == [bits[0]] * RANKS
    placeless, same = crossing("hierarchical", ())
    assert placeless == pytest.approx(direct, rel=0.1)
    assert same == bits


def test_a_generated_scenario_with_sites_runs_hierarchically_and_ends_well() -> None:
    seed = next(seed for seed in range(4, 100, 5) if generate(seed, ranks=3, steps=3).settings.sites)
    scenario = generate(seed, ranks=3, steps=3)
    assert "sites=(" in scenario.command
    outcome = run_scenario(scenario)
    assert outcome.error is None, outcome.error
    assert outcome.committed >= 3
