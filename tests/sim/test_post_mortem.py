"""What a post-mortem concludes from the files of a run is what was done to the run, over seeds: simulated, so that the
truth is known, and the times too."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from quicoll.errors import Mismatch, StepAborted
from quicoll.observability.flight_clocks import clock_offsets
from quicoll.observability.flight_record import FlightFile, decode_flight, encode_flight
from quicoll.observability.post_mortem import EndOfView, PostMortem, conclude, told_in_sentences
from quicoll.sim import Settings, Simulation

if TYPE_CHECKING:
    from quicoll import Job

RANKS = 4
STEPS = 30
MIDDLE = 15
SEEDS = range(3)


class Loop:
    """A training loop in which one rank does something wrong, once, in the middle."""

    def __init__(self, wrong: str, victim: str) -> None:
        self.wrong = wrong
        self.victim = victim
        self.done = False

    async def __call__(self, job: Job) -> None:
        for _ in range(STEPS):
            try:
                async with job.step() as step:
                    if step.number == MIDDLE and job.node == self.victim and not self.done:
                        self.done = True
                        await self.go_wrong(job)
                    await job.group.all_reduce(np.ones(3))
                    await asyncio.sleep(0.05)
            except (StepAborted, Mismatch, ZeroDivisionError):
                pass

    async def go_wrong(self, job: Job) -> None:
        match self.wrong:
            case "late":
                await asyncio.sleep(8.0)
            case "mismatch":
                await job.group.all_reduce(np.ones(4))
            case "failed":
                raise ZeroDivisionError


def run(wrong: str, seed: int, hosts: tuple[str, ...] = ()) -> tuple[str, Simulation]:
    chance = random.Random(f"{wrong} {seed}")
    victim = f"worker-{chance.randrange(RANKS)}"
    rank = int(victim[-1])
    simulation = Simulation(
        Loop(wrong, victim), seed=seed, settings=Settings(ranks=RANKS, timeout=5.0, hosts=hosts), flights=True
    )
    at = chance.uniform(0.6, 1.4)
    match wrong:
        case "killed":
            simulation.at(at).crash(rank)
            simulation.at(at + 4).restart(rank)
        case "stopped":
            simulation.at(at).pause(rank, 3.0)
        case "cut":
            simulation.at(at).partition({rank}, {"coordinator", *(each for each in range(RANKS) if each != rank)})
            simulation.at(at + 3).heal()
    outcome = simulation.run()
    assert outcome.ok, outcome.error
    return victim, simulation


def over_the_disk(simulation: Simulation) -> list[FlightFile]:
    files = [decode_flight(encode_flight(file)) for file in simulation.flights_written]
    return [file for file in files if isinstance(file, FlightFile)]


def first_failure(found: PostMortem) -> EndOfView:
    return next(end for end in found.ends if end.kind != "changed")


KINDS = {
    "killed": "lost",
    "stopped": "lost",
    "cut": "lost",
    "late": "late",
    "mismatch": "mismatch",
    "failed": "failed",
}


@pytest.mark.parametrize("wrong", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_who_was_at_fault_is_found_and_the_others_only_gave_up(wrong: str, seed: int) -> None:
    hosts = ("h",) * RANKS if seed % 2 and wrong != "cut" else ()
    victim, simulation = run(wrong, seed, hosts)
    found = conclude(over_the_disk(simulation))
    end = first_failure(found)
    assert (end.kind, end.culprits) == (KINDS[wrong], (victim,)), told_in_sentences(found)
    others = tuple(f"worker-{rank}" for rank in range(RANKS) if f"worker-{rank}" != victim)
    assert end.gave_up == others
    assert set(end.nodes) == {victim, *others}
    text = "\n".join(told_in_sentences(found))
    assert victim in text.split("\n")[2]
    last = end.last[victim]
    assert last.written == (wrong != "killed"), "who is killed writes nothing"
    assert last.operation is not None
    if wrong in ("late", "failed"):
        # Steps and operations are one to one here, and it did not come to its own of the step.
        assert last.operation.name == f"all_reduce#{MIDDLE - 2}"
        assert last.step is not None
        assert (last.step.step, last.step.outcome) == (MIDDLE, "aborted")
    if wrong == "late":
        assert [(call.name, call.step, call.absent) for call in end.awaited] == [
            (f"all_reduce#{MIDDLE - 1}", MIDDLE, (victim,))
        ]


@pytest.mark.parametrize("seed", SEEDS)
def test_without_the_files_of_some_the_same_is_found_from_the_others(seed: int) -> None:
    victim, simulation = run("killed", seed)
    chance = random.Random(seed)
    files = over_the_disk(simulation)
    kept = [
        file for file in files if chance.random() < 0.5 or file.header.node == f"worker-{(int(victim[-1]) + 1) % RANKS}"
    ]
    end = first_failure(conclude(kept))
    assert (end.kind, end.culprits) == ("lost", (victim,))


@pytest.mark.parametrize("seed", SEEDS)
def test_clocks_of_hosts_are_related_to_within_the_bound_that_is_said(seed: int) -> None:
    chance = random.Random(seed)
    simulation = Simulation(
        Loop("late", f"worker-{chance.randrange(RANKS)}"),
        seed=seed,
        settings=Settings(ranks=RANKS, timeout=5.0),
        flights=True,
    )
    outcome = simulation.run()
    assert outcome.ok, outcome.error
    offsets = clock_offsets(over_the_disk(simulation))
    assert sorted(offsets) == [f"worker-{rank}" for rank in range(RANKS)]
    clocks = {name: simulation._fleet.machines[name].host.clock.local(0) for name in offsets}
    assert len(set(clocks.values())) == RANKS, "each host's clock begins at a time of its own"
    reference = next(clock for clock, offset in offsets.items() if offset.bound_ns == 0)
    for clock, offset in offsets.items():
        assert offset.bound_ns is not None
        assert offset.bound_ns < 5_000_000
        assert abs(offset.offset_ns - (clocks[reference] - clocks[clock])) <= offset.bound_ns, clock
