"""Data that is read exactly once, in simulated clusters: ranks are killed and come back, networks are cut.

What was used is counted in the state itself: each shard's leaf counts its samples, the leaves are summed by the same
reduction as gradients would be, and the sum is applied by the commit. So the counts are those of the committed steps,
on whichever ranks they were computed, and go wherever the state goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.data import Position, Sampler
from quicoll.sim import Recording, Settings, Simulation
from quicoll.train import Divide, Part, Worker

if TYPE_CHECKING:
    from quicoll.collectives.shards import Shards
    from quicoll.data.sampler import OpenStep
    from quicoll.job import Job
    from quicoll.sim import Outcome

SAMPLES, BATCH, SHARDS, EPOCHS = 22, 8, 4, 12  # three steps an epoch, the last of them with six samples


class Counts:
    """A task that counts the samples of committed steps."""

    def __init__(self) -> None:
        self.used = np.zeros(SAMPLES, np.float32)

    def architecture(self) -> Mapping[str, Any]:
        return {}

    def parameters(self) -> Mapping[str, Any]:
        return {"used": self.used}

    def forward(self, part: Part) -> Any:
        return part.indices

    def backward(self, loss: Any) -> Sequence[Any]:
        return [np.bincount(loss, minlength=SAMPLES).astype(np.float32)]

    def apply(self, average: Sequence[Any]) -> None:
        self.used += average[0] > 0

    def state(self) -> Mapping[str, Any]:
        return {"used": self.used}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.used[:] = state["used"]


def run(
    make: Callable[..., Sampler], seed: int, script: Callable[[Simulation], None], *, ranks: int = 3
) -> tuple[Outcome, list[list[int]], int]:
    """Train the epochs on every rank; the counts of those that came to the end, and how many attempts were aborted."""
    ends: list[list[int]] = []
    aborted: list[int] = []

    async def worker(job: Job) -> int:
        task = Counts()
        made = Worker(job, task, data=make(SAMPLES, batch_size=BATCH, shards=SHARDS, seed=job.seed))
        try:
            result = await made.run(epochs=EPOCHS)
        finally:
            aborted.append(made.figures.aborted)
        ends.append(task.used.astype(int).tolist())
        return result.steps

    sim = Simulation(worker, seed=seed, settings=Settings(ranks=ranks, limit=90.0, recovery=20.0), compute=0.1)
    script(sim)
    return sim.run(), ends, sum(aborted)


def killed(sim: Simulation) -> None:
    """A rank dies inside a step and comes back, then another one just after its vote."""
    sim.at(0.55).crash(2)
    sim.at(0.9).restart(2)
    sim.at_vote(0, start=1.6).crash(0)
    sim.at(2.3).restart(0)


def cut(sim: Simulation) -> None:
    """A rank is cut off in a step and heard again, and so is one whose vote is in doubt."""
    sim.at(0.5).partition({0}, {1, 2, "coordinator"})
    sim.at(1.8).repair()
    sim.at_vote(1, start=2.5, after=0.001).partition({1}, {0, 2, "coordinator"})
    sim.at(4.5).repair()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("script", [killed, cut])
def test_each_sample_is_used_once_in_an_epoch_by_what_was_committed(
    script: Callable[[Simulation], None], seed: int
) -> None:
    outcome, ends, aborted = run(Sampler, seed, script)
    assert outcome.error is None, outcome.error
    assert aborted > 0  # the faults have met steps
    assert ends
    assert all(used == [EPOCHS] * SAMPLES for used in ends), ends
    assert set(outcome.results) <= {3 * EPOCHS}


class DividedCounts(Counts):
    """The same, of which each rank keeps a part, and another one a copy of that."""

    def divide(self) -> Mapping[str, str]:
        return {"seen": "float32"}

    def update(self, start: int, stop: int, average: Any, moments: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        seen = moments["seen"] + (average > 0)
        return seen, {"seen": seen}

    def advance(self, values: Sequence[Any]) -> None:
        self.used = np.array(values[0])


@pytest.mark.parametrize(
    ("made", "rank", "into_s"),
    [(Counts, 0, 0.05), (Counts, 2, None), *((DividedCounts, 2, into_s) for into_s in (0.0, 0.05, 0.1, None))],
)
def test_a_spare_takes_over_a_killed_rank_within_a_second_and_no_sample_is_lost_or_used_twice(
    made: type[Counts], rank: int, into_s: float | None
) -> None:
    """Killed at the beginning of a step, in the middle, at its end, or just after its vote; never started again."""
    ends: list[list[int]] = []
    divide = Divide(5, backup=1) if made is DividedCounts else None

    async def worker(job: Job) -> None:
        task = made()
        data = Sampler(SAMPLES, batch_size=BATCH, shards=SHARDS, seed=job.seed)
        await Worker(job, task, data=data, divide=divide).run(epochs=EPOCHS)
        ends.append(task.used.astype(int).tolist())

    recording = Recording()
    settings = Settings(ranks=3, spares=1, warm_spares=1, limit=60.0)
    sim = Simulation(worker, seed=7, settings=settings, compute=0.1, recorder=recording.record)
    if into_s is None:
        sim.at_vote(rank, start=1.5).crash(rank)
    else:
        sim.at(1.5 + into_s).crash(rank)
    sim.at(30.0).heal()
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    views = [entry.what["nodes"] for entry in recording.entries if entry.kind == "view_installed"]
    assert "worker-3" in views[-1]
    assert f"worker-{rank}" not in views[-1]
    assert len(ends) == 3
    assert ends == [[EPOCHS] * SAMPLES] * 3
    steps = [e.t_ns for e in recording.entries if e.kind == "step_committed" and e.who == "coordinator"]
    assert len(steps) == 3 * EPOCHS
    assert max(after - before for before, after in pairwise(steps)) < 1_000_000_000


class Hasty(Sampler):
    """A mutant: its position moves when samples are taken, not when the step is committed."""

    def reserve(self, step: OpenStep, shards: Shards) -> Position:
        position = self.position
        self._demand(shards)
        self._move(self.after(position))
        return position


@pytest.mark.parametrize("script", [killed, cut])
def test_a_position_that_moves_before_the_commit_is_found(script: Callable[[Simulation], None]) -> None:
    outcome, _, _ = run(Hasty, 0, script)
    assert outcome.error is not None
    assert "changed 'data', though step" in str(outcome.error)
    assert "was not committed" in str(outcome.error)
