"""Nodes that stand by and are kept warm: they take the place of a rank that is lost, and cost the others no step."""

from __future__ import annotations

import asyncio
import functools
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll import Sharded
from quicoll.errors import Partitioned, StepAborted
from quicoll.sim import Recording, Settings, Simulation
from quicoll.state.pieces import HeldPieces
from quicoll_transport.sim import Conditions

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.job import Job
    from quicoll.sim import Outcome

STEPS = 20
VALUES = 400_000  # four chunks of a state
OWNED = 40_000  # elements that are divided


async def worker(job: Job, sim: Simulation, seen: Callable[[Job], None] = lambda job: None) -> bytes:
    """Steps of which each changes a few values; the sum does not depend on the number of ranks."""
    held = {"weights": np.zeros(VALUES, np.float32)}

    def load(state: Any) -> None:
        held.update({name: value.copy() for name, value in state.items()})

    await asyncio.sleep(0.2)  # what a program takes to make its model
    job.register_state(lambda: held, load)
    while job.committed_step < STEPS:
        try:
            async with job.step() as step:
                seen(job)
                shards = job.group.shards(6)
                leaves = [np.full(100, shard + step.number, np.float32) for shard in shards]
                total = await job.group.all_reduce(shards.leaves(leaves, like=np.zeros(100, np.float32)))
                at = step.number * 100

                def apply(at: int = at, total: Any = total) -> None:
                    held["weights"][at : at + 100] += total

                step.on_commit(apply)
        except (StepAborted, Partitioned):
            continue
    return held["weights"].tobytes()


def run(
    events: Callable[[Simulation], object] = lambda sim: None, *, warm: int = 1, spares: int = 1, seed: int = 3
) -> tuple[Outcome, Recording]:
    recording = Recording()
    settings = Settings(ranks=3, spares=spares, warm_spares=warm, lost_after=0.5, limit=60.0)
    simulation = Simulation(worker, seed=seed, settings=settings, compute=0.1, recorder=recording.record)
    events(simulation)
    return simulation.run(), recording


def ends(outcome: Outcome) -> set[bytes]:
    assert outcome.error is None, outcome.error
    return {result for result in outcome.results if result is not None}


def views(recording: Recording) -> list[tuple[str, ...]]:
    installed = [e for e in recording.entries if e.kind == "view_installed" and e.who == "coordinator"]
    return [tuple(entry.what["nodes"]) for entry in installed]


def told(recording: Recording, who: str, kind: str) -> list[dict[str, Any]]:
    return [entry.what for entry in recording.entries if entry.kind == kind and entry.who == who]


@functools.cache
def undisturbed() -> tuple[Outcome, Recording]:
    return run()


WORKERS = ("worker-0", "worker-1", "worker-2")
SHOWN = [WORKERS, (*WORKERS, "worker-3"), WORKERS]


def test_a_warm_spare_stands_by_with_the_state_and_takes_the_place_of_a_rank_that_is_lost() -> None:
    outcome, recording = undisturbed()
    assert views(recording) == SHOWN
    assert outcome.aborted == 0
    outcome, recording = run(lambda sim: sim.at(1.2).crash(1) and sim.at(2.0).heal())
    assert ends(outcome) == ends(undisturbed()[0])
    assert outcome.aborted == 1
    assert ("worker-0", "worker-2", "worker-3") in views(recording)
    assert told(recording, "worker-3", "standing_by")[0]["from_node"] == "worker-0"
    assert told(recording, "worker-3", "state_received")[0]["step"] > 5
    # From the loss to the next committed step: less than it takes to find the loss, and a step.
    commits = [e.t_ns for e in recording.entries if e.kind == "step_committed" and e.who == "coordinator"]
    assert max(after - before for before, after in itertools.pairwise(commits)) < 1_000_000_000


def test_a_spare_that_is_not_warm_is_shown_to_nobody() -> None:
    outcome, recording = run(warm=0)
    assert ends(outcome)
    assert views(recording) == [WORKERS]


@pytest.mark.parametrize(
    "events",
    [
        pytest.param(lambda sim: sim.at(1.0).crash("worker-0"), id="the teacher is lost"),
        pytest.param(lambda sim: sim.at(0.4).crash("worker-3"), id="the spare is lost while it is shown"),
        pytest.param(lambda sim: sim.at(0.4).crash("worker-1"), id="a rank is lost while the spare is shown"),
        pytest.param(lambda sim: sim.at(1.0).crash("worker-3").restart("worker-3"), id="the spare starts anew"),
        pytest.param(lambda sim: sim.at(1.0).crash("coordinator").heal(), id="the coordinator starts anew"),
        pytest.param(lambda sim: sim.at(1.0).terminate("worker-3"), id="the spare is asked to stop"),
        pytest.param(lambda sim: sim.at(1.0).terminate("worker-0"), id="the teacher is asked to stop"),
        pytest.param(lambda sim: sim.at(1.0).partition({3}, {0, 1, 2, "coordinator"}), id="the spare is cut off"),
    ],
)
def test_nothing_that_happens_to_a_spare_or_its_teacher_costs_a_committed_step(
    events: Callable[[Simulation], object],
) -> None:
    def scheduled(sim: Simulation) -> None:
        events(sim)
        sim.at(2.0).heal()

    outcome, _ = run(scheduled)
    assert ends(outcome) == ends(undisturbed()[0])
    assert outcome.committed == STEPS


def test_a_spare_whose_teacher_is_gone_is_shown_again_and_learns_from_another_one() -> None:
    outcome, recording = run(lambda sim: sim.at(1.0).crash("worker-0") and sim.at(1.2).heal(), spares=2)
    assert ends(outcome)
    teachers = [entry["from_node"] for who in ("worker-3", "worker-4") for entry in told(recording, who, "standing_by")]
    assert len(teachers) >= 2
    assert teachers[0] == "worker-0"


def test_two_spares_are_shown_one_after_the_other_and_both_take_places() -> None:
    outcome, recording = run(
        lambda sim: sim.at(1.0).crash(0) and sim.at(1.7).crash(1) and sim.at(2.5).heal(), spares=2, warm=2
    )
    assert ends(outcome)
    assert max(len(nodes) for nodes in views(recording)) == 4
    assert ("worker-2", "worker-3", "worker-4") in views(recording)


@pytest.mark.parametrize("seed", range(2))
def test_spares_in_a_network_that_loses_much_change_no_bit(seed: int) -> None:
    def scheduled(sim: Simulation) -> None:
        sim.at(0.3).conditions(Conditions(loss=0.05, duplicate=0.05))
        sim.at(1.0 + seed / 5).crash(seed % 3)
        sim.at(3.0).heal()

    outcome, _ = run(scheduled, spares=2, warm=2, seed=seed)
    assert ends(outcome) == ends(undisturbed()[0])


async def sharded_worker(job: Job, sim: Simulation, *, backup: int, steps: int) -> Any:
    """Steps that change all of a state of which each rank owns a part, and the next ones keep copies."""
    moments = Sharded(OWNED, {"m": "float32"}, blocks=12, backup=backup)
    held = {"count": np.zeros(1)}
    job.register_state(lambda: held, lambda state: held.update(count=state["count"].copy()), sharded={"a": moments})
    while job.committed_step < steps:
        try:
            async with job.step() as step:
                await moments.stage(step, {"m": moments["m"] + np.float32(step.number)})
                step.on_commit(lambda: held.update(count=held["count"] + 1))
        except (StepAborted, Partitioned):
            continue
    return float(held["count"][0]), moments["m"].tobytes(), moments.mine


def run_sharded(
    events: Callable[[Simulation], object], *, backup: int = 1, spares: int = 1, seed: int = 11, steps: int = STEPS
) -> tuple[Outcome, Recording]:
    recording = Recording()
    settings = Settings(ranks=3, spares=spares, warm_spares=spares, lost_after=0.5, limit=60.0)
    program = functools.partial(sharded_worker, backup=backup, steps=steps)
    simulation = Simulation(program, seed=seed, settings=settings, compute=0.1, recorder=recording.record)
    events(simulation)
    return simulation.run(), recording


def demand_all_of_it(outcome: Outcome, steps: int = STEPS) -> None:
    """Each element was given its value in every step, once, and has one owner."""
    assert outcome.error is None, outcome.error
    assert outcome.committed == steps
    total = np.float32(sum(range(1, steps + 1)))
    covered = 0
    for result in outcome.results:
        if result is None:
            continue
        count, values, mine = result
        assert count == steps
        assert np.frombuffer(values, np.float32).tolist() == [total] * (mine.stop - mine.start)
        covered += mine.stop - mine.start
    assert covered == OWNED


def longest_pause_s(recording: Recording) -> float:
    commits = [e.t_ns for e in recording.entries if e.kind == "step_committed" and e.who == "coordinator"]
    return max(after - before for before, after in itertools.pairwise(commits)) / 1e9


@pytest.mark.parametrize("rank", range(3))
def test_a_warm_spare_has_the_blocks_of_the_place_of_an_owner_that_is_killed_and_gets_none_of_them(rank: int) -> None:
    """T5: the next step is committed within a second."""
    outcome, recording = run_sharded(lambda sim: sim.at(1.2).crash(rank) and sim.at(4.0).heal())
    demand_all_of_it(outcome)
    assert longest_pause_s(recording) < 1
    assert told(recording, "worker-3", "state_received")
    assert told(recording, "worker-3", "shards_received") == []
    for each in range(3):  # whoever has another number now is given no more than what it is to keep a copy of
        assert sum(event["blocks"] for event in told(recording, f"worker-{each}", "shards_received")) <= 4


def test_a_spare_whose_place_is_in_the_middle_has_the_blocks_of_that_one() -> None:
    """worker-1 comes back when its place is taken; then worker-2 is lost, and worker-1 is the second again."""

    def twice(sim: Simulation) -> None:
        sim.at(0.5).crash("worker-1")
        sim.at(0.7).restart("worker-1")
        sim.at(1.6).crash("worker-2")
        sim.at(4.0).heal()

    outcome, recording = run_sharded(twice)
    demand_all_of_it(outcome)
    assert ("worker-0", "worker-1", "worker-3") in views(recording)
    assert told(recording, "worker-1", "standing_by")
    last = [entry for entry in recording.entries if entry.kind == "shards_received" and entry.t_ns > 1_600_000_000]
    assert [entry.who for entry in last if entry.who == "worker-1"] == []
    assert longest_pause_s(recording) < 1


def test_a_spare_whose_place_is_neither_by_its_name_nor_by_its_number_has_the_blocks_of_the_one_that_it_gets() -> None:
    """The ranks are worker-4, worker-5 and "extra", and worker-3 stands by: the first in order, whatever it can see."""

    def replaced(sim: Simulation) -> None:
        for at, rank in enumerate(range(3)):
            sim.at(0.8 + at).crash(rank)
        sim.at(3.8).join("extra")
        sim.at(4.4).crash(3)
        sim.at(5.2).restart(3)
        sim.at(6.4).crash("extra")
        sim.at(12.0).heal()

    outcome, recording = run_sharded(replaced, spares=3, steps=60)
    demand_all_of_it(outcome, steps=60)
    found = views(recording)
    at = found.index(("worker-3", "worker-4", "worker-5"), found.index(("worker-4", "worker-5", "extra")))
    assert found[at - 1] == ("worker-4", "worker-5", "extra")
    assert told(recording, "worker-3", "standing_by")[-1]
    took = [e.t_ns for e in recording.entries if e.kind == "view_installed" and e.who == "coordinator"][at]
    assert took > 6_400_000_000
    came = [e.t_ns for e in recording.entries if e.kind == "shards_received" and e.who == "worker-3"]
    assert [t_ns for t_ns in came if 5_200_000_000 < t_ns < took + 1_000_000_000] == []


def test_a_spare_has_no_blocks_of_a_state_that_nobody_else_has_a_copy_of() -> None:
    """Who leaves gives them to whoever takes its place, in the view in which it parts."""
    outcome, recording = run_sharded(lambda sim: sim.at(1.2).terminate("worker-1") and sim.at(4.0).heal(), backup=0)
    demand_all_of_it(outcome)
    assert sum(event["blocks"] for event in told(recording, "worker-3", "shards_received")) == 4


@pytest.mark.parametrize(
    "events",
    [
        pytest.param(lambda sim: sim.at(1.0).crash("worker-2"), id="who gave it blocks is lost"),
        pytest.param(lambda sim: sim.at(1.0).crash("worker-3"), id="the spare is lost"),
        pytest.param(lambda sim: sim.at(1.0).terminate("worker-1"), id="who gave it blocks is asked to stop"),
        pytest.param(lambda sim: sim.at(1.0).partition({3}, {0, 1, 2, "coordinator"}), id="the spare is cut off"),
        pytest.param(lambda sim: sim.at(1.0).crash("worker-1") and sim.at(1.1).crash("worker-2"), id="two are lost"),
        pytest.param(lambda sim: sim.at(0.5).conditions(Conditions(loss=0.1)) and sim.at(1.2).crash(1), id="loss"),
    ],
)
def test_whatever_becomes_of_a_spare_s_copies_each_element_has_its_value_and_one_owner(
    events: Callable[[Simulation], object],
) -> None:
    def scheduled(sim: Simulation) -> None:
        events(sim)
        sim.at(2.0).heal()

    outcome, _ = run_sharded(scheduled, spares=2, seed=12)
    demand_all_of_it(outcome)


@pytest.mark.interpreted
def test_copies_with_other_bits_are_fetched_again_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = HeldPieces.offer

    def spoilt(self: HeldPieces, block: int, piece: int, data: Any) -> None:
        data[0] ^= 1
        offer(self, block, piece, data)

    monkeypatch.setattr(HeldPieces, "offer", spoilt)
    outcome, recording = run_sharded(lambda sim: sim.at(1.2).crash(1) and sim.at(4.0).heal())
    demand_all_of_it(outcome)
    assert sum(event["blocks"] for event in told(recording, "worker-3", "shards_received")) == 8
