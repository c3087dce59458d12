"""Faults of their own: around a vote, nodes that come and go, SIGTERM, and bad members."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from quicoll.errors import LocalError
from quicoll.sim import Recording, Settings, Simulation, workload
from quicoll.sim.scenario.language import parse_events

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim import Outcome


LOST_AFTER = 0.5
COMMITTED = "step_committed", "coordinator"


def run(script: str, *, ranks: int = 3, steps: int = 6, load: workload.Load | None = None) -> tuple[Outcome, Recording]:
    load = load or workload.Load(elements=300, whole_every=1, operations=("barrier",))

    async def life(job: Job, sim: Simulation) -> int:
        return await workload.worker(job, lambda: sim.everyone_at(steps), load=load)

    recording = Recording()
    outcome = Simulation(
        life,
        settings=Settings(ranks=ranks, lost_after=LOST_AFTER, recovery=20.0, limit=60.0),
        events=parse_events(script),
        replay=workload.Reference(load),
        compute=workload.COMPUTE_S,
        recorder=recording.record,
    ).run()
    return outcome, recording


def held(script: str, **settings: int) -> tuple[Outcome, Recording]:
    outcome, recording = run(script, **settings)
    assert outcome.error is None, outcome.error
    return outcome, recording


def sizes(recording: Recording) -> list[int]:
    """Of the views, as the coordinator installed them."""
    installed = [entry for entry in recording.entries if entry.kind == "view_installed" and entry.who == "coordinator"]
    return [len(entry.what["nodes"]) for entry in installed]


def ends(recording: Recording, node: str) -> list[str]:
    """How the processes of a node have ended by themselves."""
    return [str(entry.what) for entry in recording.entries if entry.kind == "process_ended" and entry.who == node]


@pytest.mark.parametrize(
    "script",
    [
        "sim.at(0.4).crash(2)",
        "sim.at(0.4).partition({2}, {0, 1, 'coordinator'})",
        pytest.param("sim.at(0.4).pause(2)", marks=pytest.mark.slow),
        pytest.param("sim.at(0.4).partition({2}, {0, 1})", marks=pytest.mark.slow),
    ],
)
def test_a_loss_stops_the_others_for_two_deadlines_and_a_moment(script: str) -> None:
    """One in which it is found, one in which it may come back; and what docs/faults.md says of the rest."""
    _, recording = held(f"{script}; sim.at(2.5).heal()", steps=20)
    commits = [entry.t_ns / 1e9 for entry in recording.entries if (entry.kind, entry.who) == COMMITTED]
    gaps = [after - before for before, after in pairwise(at for at in commits if at < 2.5)]
    assert len(gaps) > 10
    assert 0.05 < max(gaps) < 2 * LOST_AFTER + LOST_AFTER / 6 + 0.3


def test_nodes_of_new_names_come_into_the_job_and_do_its_steps() -> None:
    outcome, recording = held("sim.at(0.1).join(3); sim.at(0.2).join('late')")
    assert sizes(recording)[0] == 3
    assert max(sizes(recording)) == 5
    assert len(outcome.results) == 5
    assert len(set(outcome.results)) == 1
    assert outcome.injected == {"join": 2}


def test_workers_leave_one_after_the_other_and_the_last_one_goes_on_alone() -> None:
    outcome, recording = held("sim.at(0.1).leave(0); sim.at(0.3).leave(2); sim.at(0.5).leave(1)", steps=12)
    assert sizes(recording)[-1] == 1
    assert outcome.results == (None, outcome.committed, None), "nobody leaves who would leave nobody behind"
    assert outcome.injected == {"leave": 2}
    assert outcome.aborted == 0 or outcome.committed >= 12


@pytest.mark.parametrize("again", ["sim.at(1.0).restart(1); sim.at(1.1).heal()", "sim.at(1.0).heal()"])
def test_a_process_that_gets_sigterm_leaves_in_order_and_may_come_again(again: str) -> None:
    outcome, recording = held(f"sim.at(0.2).terminate(1); {again}")
    assert sizes(recording)[:2] == [3, 2]
    assert sizes(recording)[-1] == 3
    assert ends(recording, "worker-1") == ["well", "well"]
    assert outcome.injected["terminate"] == 1


def test_a_coordinator_that_gets_sigterm_is_started_again_by_the_healing() -> None:
    _, recording = held("sim.at(0.2).terminate('coordinator'); sim.at(0.6).heal()")
    assert ends(recording, "coordinator") == ["well", "well"]


def test_sigterm_that_meets_a_stopped_process_ends_it_when_it_goes_on() -> None:
    _, recording = held("sim.at(0.2).pause(1); sim.at(0.3).terminate(1); sim.at(0.4).heal()")
    assert ends(recording, "worker-1")[0] == "well"
    assert sizes(recording)[-1] == 3


def test_a_fault_for_a_vote_comes_with_it_and_not_before() -> None:
    _, recording = held("sim.at_vote(2, start=0.2).crash(2); sim.at(1.5).heal()")
    armed = next(entry.t_ns for entry in recording.entries if entry.kind == "armed")
    struck = next(entry for entry in recording.entries if entry.kind == "fault")
    assert armed == 200_000_000 < struck.t_ns < 300_000_000
    assert struck.what.source() == "crash(2)"


def test_a_path_that_breaks_at_a_vote_keeps_it_from_the_coordinator() -> None:
    """Then nobody knows of it, and the step is aborted; where it breaks later, the step is committed."""
    for after, committed in ((0.0, False), (0.002, True)):
        cut = f"sim.at_vote(2, start=0.2, after={after}).partition({{2}}, {{'coordinator'}}, one_way=True)"
        _, recording = held(f"{cut}; sim.at(1.5).heal()")
        struck = next(entry.t_ns for entry in recording.entries if entry.kind == "fault")
        told = [entry for entry in recording.entries if entry.who == "coordinator" and entry.t_ns > struck - 2_000_000]
        first = next(entry for entry in told if entry.kind in ("step_committed", "step_aborted"))
        assert (first.kind == "step_committed") is committed


def test_a_fault_that_waits_for_a_vote_is_taken_back_by_a_healing() -> None:
    outcome, _ = held("sim.at(0.1).crash(2); sim.at_vote(2, start=0.2).crash(1); sim.at(0.5).heal()")
    assert outcome.injected == {"crash": 1}


def test_a_liar_spoils_what_one_peer_gets_and_nothing_wrong_is_committed() -> None:
    load = workload.Load(elements=300, algorithm="exchange", whole_every=1, operations=("barrier",))
    outcome, recording = run("sim.at(0.2).lie(0, 1); sim.at(0.6).heal()", load=load)
    assert outcome.error is None, outcome.error
    assert outcome.injected == {"lie": 1}
    causes = [str(entry.what["cause"]) for entry in recording.entries if entry.kind == "step_aborted"]
    assert any("worker-1" in cause for cause in causes), causes


def test_an_alarm_for_nothing_ends_views_until_the_healing() -> None:
    outcome, recording = held("sim.at(0.2).alarm(1, 0.1); sim.at(0.6).heal()")
    causes = [str(entry.what["cause"]) for entry in recording.entries if entry.kind == "view_ended"]
    assert sum("an alarm for nothing" in cause for cause in causes) > 2
    assert outcome.views >= 3


@pytest.mark.parametrize("script", ["sim.at(0.1).join(1)", "sim.at_vote(7).crash(1)", "sim.at(0.1).lie(0, 9)"])
def test_faults_of_nodes_that_cannot_be_are_refused(script: str) -> None:
    with pytest.raises(LocalError):
        run(script)


def test_a_run_ends_though_its_coordinator_is_down_when_all_are_done() -> None:
    async def worker(job: Job) -> None:
        await asyncio.sleep(0.5)

    sim = Simulation(worker, settings=Settings(ranks=2, limit=30.0))
    sim.at(0.3).terminate("coordinator")
    outcome = sim.run()
    assert outcome.error is None, outcome.error
