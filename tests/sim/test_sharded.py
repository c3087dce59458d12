"""State of which each rank owns a part, in simulated clusters: ZeRO-1 Adam through growth, shrinking and kills."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll import Sharded
from quicoll.errors import QuicollError, ShardLost
from quicoll.sim import Settings, Simulation

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim import Outcome

STEPS, SHARDS, SIZE = 40, 8, 61
PIECES = {"m": "float32", "v": "float32"}


def gradient(weights: Any, shard: int, step: int) -> Any:
    index = np.arange(SIZE, dtype=np.float32)
    return (np.sin(index * (shard + 1) + step) - weights * np.float32(0.01)).astype(np.float32)


async def attempt(job: Job, held: dict[str, Any], moments: Sharded, steps: int) -> None:
    """One attempt at a step of ZeRO-1: parameters on all ranks, the optimizer's moments divided between them."""
    async with job.step() as step:
        if step.number > steps:
            return
        shards = job.group.shards(SHARDS)
        leaves = [gradient(held["weights"], shard, step.number) for shard in shards]
        own = await job.group.reduce_scatter(
            shards.leaves(leaves, like=held["weights"]), counts=moments.counts, op="avg"
        )
        m = moments["m"] * np.float32(0.9) + own * np.float32(0.1)
        v = moments["v"] * np.float32(0.99) + own * own * np.float32(0.01)
        part = held["weights"][moments.mine] - np.float32(0.05) * m / (np.sqrt(v) + np.float32(1e-6))
        await moments.stage(step, {"m": m, "v": v})
        weights = await job.group.all_gather(part)
        step.on_commit(lambda: held.update(weights=weights))


def worker_of(**options: Any) -> Callable[..., Any]:
    async def worker(job: Job, sim: Simulation) -> Any:
        held = {"weights": np.zeros(SIZE, np.float32)}
        moments = Sharded(SIZE, PIECES, blocks=SHARDS, **options)
        job.register_state(lambda: held, lambda new: held.update(weights=new["weights"].copy()), sharded={"a": moments})
        while job.committed_step < STEPS:
            try:
                await attempt(job, held, moments, STEPS)
            except ShardLost:
                raise
            except QuicollError:
                continue
        return held["weights"].tobytes()

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
    """S2, S8: without a backup; whoever leaves hands over what it owns, and no step is aborted."""

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
        held = {"weights": np.zeros(SIZE, np.float32)}
        moments = Sharded(SIZE, PIECES, blocks=SHARDS, read=read)
        job.register_state(lambda: held, lambda new: held.update(weights=new["weights"].copy()), sharded={"a": moments})
        while job.committed_step < STEPS:
            try:
                await attempt(job, held, moments, STEPS)
            except QuicollError:
                continue
            whole = saved.setdefault(job.committed_step, {name: np.zeros(SIZE, np.float32) for name in PIECES})
            for name in PIECES:  # a checkpoint of every step, on a disk that all share
                whole[name][moments.mine] = moments[name]
        return held["weights"].tobytes()

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
