"""State of which each rank owns a part, in simulated clusters: ZeRO-1 Adam through growth, shrinking and kills."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll import Sharded
from quicoll.data import Sampler
from quicoll.errors import QuicollError, ShardLost
from quicoll.sim import Settings, Simulation

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim import Outcome

STEPS, SHARDS, SIZE = 40, 8, 61
SAMPLES, BATCH, EPOCHS = 76, 8, 4  # ten steps an epoch, the last of them with four samples
PIECES = {"m": "float32", "v": "float32"}


class Training:
    """One rank of ZeRO-1: parameters on all ranks, the optimizer's moments divided between them, samples used once."""

    def __init__(self, **options: Any) -> None:
        self.held = {"weights": np.zeros(SIZE, np.float32), "used": np.zeros(SAMPLES, np.float32)}
        self.moments = Sharded(SIZE, PIECES, blocks=SHARDS, **options)
        self.sampler = Sampler(SAMPLES, batch_size=BATCH, shards=SHARDS, seed=7)

    def register(self, job: Job) -> None:
        job.register_state(lambda: self.held | {"data": self.sampler.state()}, self._load, sharded={"a": self.moments})

    def _load(self, state: Any) -> None:
        self.held.update(weights=state["weights"].copy(), used=state["used"].copy())
        self.sampler.load_state(state["data"])

    def _gradient(self, samples: Any) -> Any:
        """Of one logical shard: of its samples, which may be none."""
        total = -self.held["weights"] * np.float32(0.01)
        for sample in samples:
            total += np.sin(np.arange(SIZE, dtype=np.float32) * np.float32(sample + 1))
        return total

    async def attempt(self, job: Job) -> None:
        held, moments = self.held, self.moments
        async with job.step() as step:
            if step.number > STEPS:
                return
            shards = job.group.shards(SHARDS)
            parts = self.sampler.take(step, shards)
            counts = [np.bincount(part.indices, minlength=SAMPLES).astype(np.float32) for part in parts]
            used = await job.group.all_reduce(shards.leaves(counts, like=held["used"]))
            leaves = [self._gradient(part.indices) for part in parts]
            own = await job.group.reduce_scatter(
                shards.leaves(leaves, like=held["weights"]), counts=moments.counts, op="avg"
            )
            m = moments["m"] * np.float32(0.9) + own * np.float32(0.1)
            v = moments["v"] * np.float32(0.99) + own * own * np.float32(0.01)
            part = held["weights"][moments.mine] - np.float32(0.05) * m / (np.sqrt(v) + np.float32(1e-6))
            await moments.stage(step, {"m": m, "v": v})
            weights = await job.group.all_gather(part)
            step.on_commit(lambda: held.update(weights=weights, used=held["used"] + used))

    def end(self) -> bytes:
        if self.held["used"].tolist() != [EPOCHS] * SAMPLES:
            raise AssertionError(f"samples were used so often in {EPOCHS} epochs: {self.held['used']}")
        return self.held["weights"].tobytes()


def worker_of(**options: Any) -> Callable[..., Any]:
    async def worker(job: Job, sim: Simulation) -> Any:
        training = Training(**options)
        training.register(job)
        while job.committed_step < STEPS:
            try:
                await training.attempt(job)
            except ShardLost:
                raise
            except QuicollError:
                continue
        return training.end()

    return worker


def run(script: Callable[[Simulation], None], *, seed: int, ranks: int, **options: Any) -> Outcome:
    sim = Simulation(worker_of(**options), seed=seed, settings=Settings(ranks=ranks, limit=120.0), compute=0.1)
    script(sim)
    return sim.run()


@pytest.fixture(scope="module")
def alone() -> bytes:
    """The weights after all steps on one worker."""
    outcome = run(lambda sim: None, seed=1, ranks=1)
    assert outcome.error is None, outcome.error
    weights: bytes = outcome.results[0]
    return weights


def ends(outcome: Outcome) -> list[bytes]:
    assert outcome.error is None, outcome.error
    return [result for result in outcome.results if result is not None]


def test_four_three_eight_two_four_workers_with_divided_moments_give_the_bits_of_one(alone: bytes) -> None:
    """S2, S8: without a backup. Whoever leaves hands over what it owns, no step is aborted, no sample is used twice."""

    def script(sim: Simulation) -> None:
        sim.at(0.6).scale(3)
        sim.at(1.4).scale(8)
        sim.at(2.4).scale(2)
        sim.at(3.2).scale(4)

    outcome = run(script, seed=3, ranks=4)
    assert ends(outcome) == [alone] * 4
    assert outcome.aborted == 0
    assert outcome.committed == STEPS


def test_a_killed_owner_is_replaced_by_its_backup_with_no_step_lost(alone: bytes) -> None:
    def script(sim: Simulation) -> None:
        sim.at(0.83).crash(1)
        sim.at(9.0).restart(1)  # when the job is done

    outcome = run(script, seed=5, ranks=4, backup=1)
    assert ends(outcome) == [alone] * 3
    assert outcome.committed == STEPS


def test_copies_are_made_anew_so_that_one_loss_after_another_loses_nothing(alone: bytes) -> None:
    def script(sim: Simulation) -> None:
        sim.at(0.8).crash(3)
        sim.at(1.8).crash(2)
        sim.at(2.8).restart(3)
        sim.at(9.0).restart(2)

    outcome = run(script, seed=6, ranks=5, backup=1)
    assert ends(outcome) == [alone] * 4


def test_without_backup_and_checkpoint_the_job_stops_and_says_what_is_lost() -> None:
    outcome = run(lambda sim: [sim.at(0.83).crash(1)], seed=5, ranks=3)
    assert isinstance(outcome.error, QuicollError)
    said = str(outcome.error)
    assert "elements 15 to 38 of 'a' (m, v) as after step" in said
    assert "worker-1, which owned them, is not here" in said


def test_what_is_lost_comes_from_a_checkpoint_of_the_last_committed_step(alone: bytes) -> None:
    saved: dict[int, dict[str, Any]] = {}
    asked: list[int] = []

    def read(step: int, name: str, start: int, stop: int) -> Any:
        if not step:
            return np.zeros(stop - start, np.float32)
        asked.append(step)
        return saved[step][name][start:stop]

    async def worker(job: Job) -> Any:
        training = Training(read=read)
        training.register(job)
        while job.committed_step < STEPS:
            try:
                await training.attempt(job)
            except QuicollError:
                continue
            whole = saved.setdefault(job.committed_step, {name: np.zeros(SIZE, np.float32) for name in PIECES})
            for name in PIECES:  # a checkpoint of every step, on a disk that all share
                whole[name][training.moments.mine] = training.moments[name]
        return training.end()

    sim = Simulation(worker, seed=5, settings=Settings(ranks=3, limit=120.0), compute=0.1)
    sim.at(0.83).crash(1)
    sim.at(9.0).restart(1)
    outcome = sim.run()
    assert ends(outcome) == [alone] * 2
    assert len(set(asked)) == 1


def test_ranks_that_are_asked_to_stop_hand_over_what_they_own_before_they_go(alone: bytes) -> None:
    """Without a backup, and two at once who stand next to each other."""

    def script(sim: Simulation) -> None:
        sim.at(0.83).terminate(1).terminate(2)
        sim.at(9.0).restart(1).restart(2)

    outcome = run(script, seed=7, ranks=4)
    assert ends(outcome) == [alone] * 2
    assert outcome.committed == STEPS


@pytest.mark.parametrize("seed", [0, 3])
def test_ranks_that_are_killed_while_pieces_move_cost_no_committed_step(seed: int, alone: bytes) -> None:
    """The view changes, and within the next 200 ms a rank dies: before, while and after what is owned goes round."""

    def script(sim: Simulation) -> None:
        sim.at(0.6).scale(5)
        sim.at(0.65 + 0.03 * seed).crash(seed % 4)
        sim.at(1.4).restart(seed % 4)
        sim.at(2.0).scale(3)
        sim.at(2.02 + 0.03 * seed).crash((seed + 1) % 3)
        sim.at(2.9).restart((seed + 1) % 3)

    outcome = run(script, seed=seed, ranks=4, backup=1)
    assert set(ends(outcome)) == {alone}
    assert outcome.committed == STEPS
