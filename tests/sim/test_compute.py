"""What a loop computes takes simulated time: a loop that never sleeps does about as many steps as its test says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from quicoll.errors import LocalError, QuicollError
from quicoll.sim import Settings, Simulation, cluster, scenario
from quicoll.sim.trace.recording import Recording

if TYPE_CHECKING:
    from quicoll.job import Job


async def unchanged(job: Job, sim: Simulation) -> int:
    """As a user has it: no sleep, and an aborted step is tried again at once."""
    total = np.zeros(3, np.float32)
    job.register_state(lambda: {"total": total.copy()}, lambda state: np.copyto(total, state["total"]))
    tries = 0
    while not sim.everyone_at(5):
        tries += 1
        try:
            async with job.step() as step:
                mean = await job.group.all_reduce(np.ones(3, np.float32), op="avg")
                step.on_commit(lambda mean=mean: np.add(total, mean, out=total))
        except QuicollError:
            continue
    return tries


def split(sim: Simulation) -> None:
    sim.at(0.5).partition({0}, {1, 2, "coordinator"})
    sim.at(4.0).heal()


def test_a_script_s_faults_last_about_as_many_steps_as_the_test_says() -> None:
    outcome = scenario(ranks=3, steps=5, script=split)(unchanged).run()
    assert outcome.error is None, outcome.error
    assert 3 <= outcome.committed <= 12
    assert outcome.injected["partition"] == 1


@pytest.mark.parametrize("seed", range(3))
def test_generated_faults_meet_the_steps_of_a_loop_that_never_sleeps(seed: int) -> None:
    outcome = scenario(ranks=3, steps=5)(unchanged).run(seed)
    assert outcome.error is None, outcome.error
    assert outcome.committed <= 60


def test_the_seconds_that_are_given_are_taken() -> None:
    def calm(sim: Simulation) -> None:
        sim.at(1.0).heal()

    fast = scenario(ranks=1, steps=5, script=calm, compute=0.1)(unchanged).run()
    slow = scenario(ranks=1, steps=5, script=calm, compute=0.5)(unchanged).run()
    assert 0.9 < fast.committed * 0.1 < 1.3
    assert slow.committed == 5
    assert slow.virtual_s > 2.5


def test_who_is_ended_while_it_computes_leaves_after_that_and_the_other_gives_up_the_step_it_has_begun() -> None:
    recording = Recording()
    sim = Simulation(unchanged, settings=Settings(ranks=2, limit=30.0), compute=0.5, recorder=recording.record)
    sim.at(0.3).terminate(1)
    sim.at(1.0).heal()
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    gave_up = [entry.who for entry in recording.entries if entry.kind == "step_aborted"]
    assert sorted(gave_up[:2]) == ["coordinator", "worker-0"]  # who is left with a step at the end of the job is chance
    assert outcome.virtual_s < 10.0


def test_a_run_that_takes_long_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_TELL_S", 0.0)
    told: list[str] = []
    quiet = Simulation(unchanged, seed=4, settings=Settings(ranks=1), compute=0.2)
    outcome = quiet.run()
    again = Simulation(unchanged, seed=4, settings=Settings(ranks=1), compute=0.2, progress=told.append).run()
    assert told[0] == "seed 4: 0.5 s simulated, 2 steps committed, 1 views"
    assert again.digest == outcome.digest


@pytest.mark.parametrize("compute", [-0.1, 3600.0, float("nan")])
def test_a_time_that_cannot_be_is_refused(compute: float) -> None:
    with pytest.raises(LocalError, match="a step computes for less than an hour"):
        Simulation(unchanged, compute=compute)
