"""Rounds of DiLoCo that begin ahead of the decision on the one before: no wait for it, and not another bit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from diloco_jobs import EVERY, WORKERS, adam, loss_of, nesterov, of_indices, of_layers, trained

from quicoll.data import Sampler
from quicoll.sim import Conditions, Settings, Simulation
from quicoll.train import DiLoCo

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.job import Job

ROUNDS, PACE_S, FAR = 6, 0.02, Conditions(latency_ns=25_000_000)


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Seen:
    """What the ranks of a job have done.

    Attributes:
        ahead: Inner steps that were done while the round before was not decided, by rank: their numbers.
        inner: The numbers of all.
        told: What `on_step` was called with, by rank, and how many rounds were committed then.
        digests: Of the ranks that came to the end.
        aborted: Attempts, in the figures of all ranks.
    """

    ahead: dict[int, list[int]] = field(default_factory=dict)
    inner: dict[int, list[int]] = field(default_factory=dict)
    told: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    digests: set[str] = field(default_factory=set)
    aborted: int = 0


def run(
    events: Callable[[Simulation], object] = lambda sim: None, *, ranks: int = 3, epochs: int = 0, **options: object
) -> Seen:
    seen = Seen()

    async def worker(job: Job, _: Simulation) -> None:
        number, model = job.rank, of_layers()
        for each in (seen.ahead, seen.inner):
            each.setdefault(number, [])
        told = seen.told.setdefault(number, [])

        async def inner(done: int) -> None:
            seen.inner[number].append(done)
            if (done - 1) // EVERY > job.committed_step:
                seen.ahead[number].append(done)
            await asyncio.sleep(PACE_S)

        data = Sampler(56, batch_size=2 * WORKERS, shards=WORKERS, seed=3) if epochs else None
        diloco = DiLoCo(
            job, model, adam(model), nesterov(model), of_indices if epochs else loss_of, data=data,
            shards=WORKERS, backup=1, on_inner_step=inner,
            on_step=lambda done: told.append((done, job.committed_step)),
            **({"every": EVERY, "fragments": 1, "delay": 0} | options),
        )  # fmt: skip
        try:
            result = await (diloco.run(epochs=epochs) if epochs else diloco.run(steps=ROUNDS))
        finally:
            seen.aborted += diloco.figures.aborted
        seen.digests.add(result.digest)

    settings = Settings(ranks=ranks, limit=200.0, conditions=FAR, lost_after=0.5)
    simulation = Simulation(worker, seed=3, settings=settings)
    events(simulation)
    outcome = simulation.run()
    if outcome.error is not None:
        raise outcome.error
    return seen


@pytest.fixture(scope="module")
def alone() -> set[str]:
    return trained(1, rounds=ROUNDS).digests


def test_inner_steps_go_on_while_a_round_is_decided_and_the_bits_are_those_of_one_rank(alone: set[str]) -> None:
    seen = run()
    assert seen.digests == alone
    assert seen.aborted == 0
    for rank in range(3):
        assert seen.inner[rank] == list(range(1, ROUNDS * EVERY + 1))
        of_rounds = {(number - 1) // EVERY for number in seen.ahead[rank]}
        assert of_rounds == set(range(1, ROUNDS))  # of all but the first
        assert len(seen.ahead[rank]) >= 2 * (ROUNDS - 1)  # 50 ms to the coordinator and back are two and a half
        assert seen.told[rank] == [(number, number) for number in range(1, ROUNDS + 1)]


@pytest.mark.parametrize("options", [{"delay": 2}, {"fragments": 2, "delay": 2}, {"quorum": 3, "grace": 5.0}])
def test_with_delays_fragments_and_a_quorum_as_well(options: dict[str, object]) -> None:
    seen = run(**options)
    assert seen.digests == trained(1, rounds=ROUNDS, **options).digests
    assert all(seen.ahead.values())


def test_where_an_exchange_begins_with_the_round_nothing_can_be_done_ahead_of_it() -> None:
    options: dict[str, object] = {"fragments": 3, "delay": 2}
    seen = run(**options)
    assert seen.digests == trained(1, rounds=ROUNDS, **options).digests
    assert not any(seen.ahead.values())


@pytest.mark.parametrize(
    "fault",
    [
        "the coordinator is cut off while it decides",
        "a rank is cut off in its vote",
        "a rank is killed in its vote",
        "a rank joins",
    ],
)
def test_what_fails_while_a_round_is_begun_ahead_costs_that_attempt_and_no_bit(fault: str, alone: set[str]) -> None:
    def events(sim: Simulation) -> None:
        if fault == "the coordinator is cut off while it decides":
            sim.at_vote(1, start=0.5, after=0.001).partition({"coordinator"}, {0, 1, 2})
            sim.at(3.0).repair()
        elif fault == "a rank is cut off in its vote":
            sim.at_vote(1, start=0.5, after=0.001).partition({1}, {0, 2, "coordinator"})
            sim.at(3.0).repair()
        elif fault == "a rank is killed in its vote":
            sim.at_vote(1, start=0.5, after=0.001).crash(1)
            sim.at(3.0).restart(1)
        else:
            sim.at(0.4).scale(4)

    seen = run(events)
    assert seen.digests == alone
    assert seen.aborted > 0
    for told in seen.told.values():
        assert all(number <= committed for number, committed in told)


def test_a_rank_that_is_asked_to_stop_says_that_its_last_round_was_committed(alone: set[str]) -> None:
    def events(sim: Simulation) -> None:
        sim.at_vote(1, start=0.5, after=0.001).terminate(1)
        sim.at(20.0).restart(1)  # when the job is done

    seen = run(events)
    assert seen.digests == alone
    numbers = [number for number, _ in seen.told[1]]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 1 < len(numbers) < ROUNDS


def test_the_last_round_of_the_last_epoch_has_none_after_it() -> None:
    seen = run(epochs=2)
    rounds = max(seen.inner[0]) // EVERY
    assert rounds == 3  # of six steps; an epoch has seven
    for rank in range(3):
        assert seen.inner[rank] == list(range(1, rounds * EVERY + 1))
        assert seen.ahead[rank]
        assert [number for number, _ in seen.told[rank]] == list(range(1, rounds + 1))
    assert len(seen.digests) == 1
    assert seen.digests == run(epochs=2, ranks=1).digests
