"""Steps that overlap with the decision on the one before: the same bits, and no wait for a coordinator that is far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.errors import JobDone, LocalError, QuicollError
from quicoll.sim import Conditions, Recording, Settings, Simulation

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.job import Job
    from quicoll.sim import Outcome

STEPS, SHARDS, COMPUTE_S = 40, 8, 0.05
FAR_S = 0.02  # from each rank to the coordinator, one way


def run(
    overlap: bool, script: Callable[[Simulation], object] = lambda sim: None, *, seed: int = 3, ranks: int = 3
) -> tuple[Outcome, Recording]:
    recording = Recording()
    refused: list[int] = []

    async def worker(job: Job, sim: Simulation) -> Any:
        held = {"weights": np.zeros(40, np.float32)}

        def load(state: Any) -> None:
            held.update(weights=state["weights"].copy())

        job.register_state(lambda: held, load)
        while job.committed_step < STEPS:
            try:
                async with job.step(overlap=overlap and job.committed_step < STEPS - 2) as step:
                    before = held["weights"]
                    if overlap and job.committed_step + 1 < step.number:
                        with pytest.raises(LocalError, match="not decided"):
                            job.group.barrier()
                        refused.append(step.number)
                    assert held["weights"] is before
                    await step.ready()
                    assert job.committed_step + 1 == step.number
                    shards, now = job.group.shards(SHARDS), held["weights"]
                    index = np.arange(now.size, dtype=np.float32)
                    leaves = [np.sin(index * (shard + 1) + step.number) - now * np.float32(0.01) for shard in shards]
                    mean = await job.group.all_reduce(shards.leaves(leaves, like=now), op="avg")
                    step.on_commit(lambda now=now, mean=mean: held.update(weights=now + mean))
            except QuicollError as error:
                if isinstance(error, LocalError | JobDone):
                    raise
        return held["weights"].tobytes()

    settings = Settings(ranks=ranks, lost_after=0.5, limit=60.0)
    sim = Simulation(worker, seed=seed, settings=settings, compute=COMPUTE_S, recorder=recording.record)
    script(sim)
    outcome = sim.run()
    assert overlap == (len(refused) > STEPS / 2)  # as many steps were computed ahead
    return outcome, recording


def ends(outcome: Outcome) -> set[bytes]:
    assert outcome.error is None, outcome.error
    return {result for result in outcome.results if result is not None}


@pytest.fixture(scope="module")
def alone() -> set[bytes]:
    return ends(run(False, ranks=1)[0])


def test_overlapping_steps_have_the_bits_of_others(alone: set[bytes]) -> None:
    outcome, _ = run(True)
    assert (ends(outcome), outcome.committed, outcome.aborted) == (alone, STEPS, 0)


FAULTS: dict[str, Callable[[Simulation], object]] = {
    "killed ahead": lambda sim: [sim.at(0.4).crash(1), sim.at(1.2).restart(1)],
    "killed at its vote": lambda sim: [sim.at_vote(2, start=0.3).crash(2), sim.at(1.2).restart(2)],
    "cut off from all at its vote": lambda sim: [
        sim.at_vote(1, start=0.3).partition({1}, {0, 2, "coordinator"}),
        sim.at(1.3).repair(),
    ],
    "the decision is lost": lambda sim: [
        sim.at_vote(0, start=0.3, after=0.001).partition({0}, {"coordinator"}),
        sim.at(1.3).repair(),
    ],
    "the coordinator is killed": lambda sim: [
        sim.at_vote(0, start=0.3).crash("coordinator"),
        sim.at(0.9).restart("coordinator"),
    ],
    "asked to stop ahead": lambda sim: [sim.at(0.41).terminate(1), sim.at(1.0).restart(1)],
    "more ranks": lambda sim: [sim.at(0.4).scale(5), sim.at(0.9).scale(2)],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_while_a_step_is_computed_ahead_changes_no_bit(fault: str, alone: set[bytes]) -> None:
    for seed in (3, 4):
        outcome, _ = run(True, FAULTS[fault], seed=seed)
        assert ends(outcome) == alone


def seconds_a_step(overlap: bool) -> float:
    """Of simulated time, from one commit to the next, with a coordinator that is far."""
    far = Conditions(latency_ns=round(FAR_S * 1e9))

    def script(sim: Simulation) -> None:
        sim.at(0.0).conditions(far, {0, 1, 2}, "coordinator").conditions(far, "coordinator", {0, 1, 2})

    outcome, recording = run(overlap, script)
    assert (outcome.error, outcome.committed) == (None, STEPS)
    at = [each.t_ns for each in recording.entries if each.kind == "step_committed" and each.who == "coordinator"]
    return (at[-1] - at[3]) / (len(at) - 4) / 1e9


def test_the_round_trip_to_a_far_coordinator_goes_where_the_next_step_computes_as_long() -> None:
    apart, beside = seconds_a_step(False), seconds_a_step(True)
    assert apart - beside >= 2 * FAR_S * 0.9, (apart, beside)
    assert beside < COMPUTE_S + FAR_S / 2
