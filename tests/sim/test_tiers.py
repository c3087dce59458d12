"""Sets of tiers and shared state in simulated clusters: ranks are killed and come back, networks are cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.errors import Diverged, LocalError, PiecesMissing, QuicollError
from quicoll.sim import Settings, Simulation
from quicoll.tiers import Tiers, TierSet

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim import Outcome

RANKS, STEPS = 4, 24
TIERS = ("embedding", "dense", "expert", "archive")


class Seen:
    """What ranks have seen of tiers, by the number of the step that they entered with it."""

    def __init__(self) -> None:
        self.in_force: dict[int, set[bytes]] = {}
        self.told: dict[str, TierSet] = {}
        self.entered: list[tuple[str, int, int]] = []

    def enter(self, node: str, step: int, current: TierSet) -> None:
        self.in_force.setdefault(step, set()).add(current.digest)
        self.entered.append((node, step, current.version))


async def change_tiers(job: Job, sim: Simulation, seen: Seen) -> int:
    """Every few steps some ranks propose other sets, sometimes several at once; every rank agrees in every step."""
    weights = np.zeros(4)

    def load(state: Mapping[str, Any]) -> None:
        job.tiers.load_state(state["tiers"])
        weights[:] = state["weights"]

    def changed(before: TierSet, after: TierSet) -> None:
        assert before.version < after.version or not before.version
        seen.told[job.node] = after

    job.tiers.on_change(changed)
    job.register_state(lambda: {"weights": weights, "tiers": job.tiers.state()}, load)
    number = int(job.node.removeprefix("worker-"))
    while not sim.everyone_at(STEPS):
        try:
            async with job.step() as step:
                current = job.tiers.current
                seen.enter(job.node, step.number, current)
                if (step.number + number) % 3 == 0:
                    active = TIERS[number : number + 2]
                    placement = {"archive": [job.node], "expert": [f"worker-{step.number % RANKS}"]}
                    job.tiers.propose(current.changed(active=active, placement=placement))
                agreed = await job.tiers.agree(step)
                assert agreed.version in (current.version, current.version + 1)
                await asyncio.sleep(0.05)  # here most faults meet it: agreed, and not committed
                total = await job.group.all_reduce(np.ones(4))
                step.on_commit(lambda total=total: np.add(weights, total, out=weights))
        except (LocalError, Diverged):
            raise
        except QuicollError:
            continue
    return job.tiers.current.version


def run(worker: Callable[..., Any], seed: int, script: Callable[[Simulation], None], **settings: Any) -> Outcome:
    given = Settings(**{"ranks": RANKS, "limit": 90.0, "recovery": 20.0, **settings})
    sim = Simulation(worker, seed=seed, settings=given, compute=0.05)
    script(sim)
    return sim.run()


def killed(sim: Simulation) -> None:
    """Ranks die inside a step and just after a vote, and come back; so does the coordinator."""
    sim.at(0.45).crash(2)
    sim.at(0.9).restart(2)
    sim.at_vote(0, start=1.2, after=0.0005).crash(0)
    sim.at(1.9).restart(0)
    sim.at(2.4).crash("coordinator")
    sim.at(2.8).restart("coordinator")


def cut(sim: Simulation) -> None:
    """A rank is cut off in a step, and later one whose vote is in doubt."""
    sim.at(0.5).partition({0}, {1, 2, 3, "coordinator"})
    sim.at(1.8).repair()
    sim.at_vote(1, start=2.5, after=0.001).partition({1}, {0, 2, 3, "coordinator"})
    sim.at(4.5).repair()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("script", [killed, cut])
def test_all_ranks_enter_each_step_with_one_set_of_tiers(script: Callable[[Simulation], None], seed: int) -> None:
    """S4, S4b: a set changes at the boundary of a committed step, on all ranks, whatever fails."""
    seen = Seen()

    async def worker(job: Job, sim: Simulation) -> int:
        return await change_tiers(job, sim, seen)

    outcome = run(worker, seed, script)
    assert outcome.error is None, outcome.error
    assert {step: len(sets) for step, sets in seen.in_force.items() if len(sets) > 1} == {}
    assert len({digest for sets in seen.in_force.values() for digest in sets}) > 4
    assert len(set(outcome.results)) == 1
    assert len({tier_set.digest for tier_set in seen.told.values()}) == 1
    assert len(seen.entered) > len({(node, step) for node, step, _ in seen.entered})  # some steps were attempted twice


def test_a_set_that_takes_effect_before_the_commit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: what is agreed is in force at once. The test above has to see it."""
    agree = Tiers.agree

    async def hasty(self: Tiers, step: Any) -> TierSet:
        agreed = await agree(self, step)
        self.load_state({"tier_set": agreed.encoded})
        return agreed

    monkeypatch.setattr(Tiers, "agree", hasty)
    seen = Seen()

    async def worker(job: Job, sim: Simulation) -> int:
        return await change_tiers(job, sim, seen)

    outcome = run(worker, 0, cut)
    assert outcome.error is not None or any(len(sets) > 1 for sets in seen.in_force.values())


# -- shared state --------------------------------------------------------------------------------------------------------


class Used:
    """What ranks have used of a shared state, by the view and the step in which they did."""

    def __init__(self) -> None:
        self.strong: dict[tuple[int, int], set[str]] = {}
        self.written: dict[str, int] = {}  # by node: the last number that it wrote in its piece, in any life
        self.missing: list[PiecesMissing] = []


def shown(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={values[name].tolist()}" for name in values)


async def use_pieces(job: Job, sim: Simulation, used: Used, *, size: int = 3, timeout: float | None = None) -> str:
    """Each rank writes a piece of its own and one that all write, and makes them strong in every third step."""
    weights = np.zeros(4)

    def load(state: Mapping[str, Any]) -> None:
        weights[:] = state["weights"]

    job.register_state(lambda: {"weights": weights}, load)
    cold = job.shared_state("cold", consistency="eventual", max_bytes=4 << 20)
    mine = f"of {job.node}"
    life = 0  # what this process has written
    while not sim.everyone_at(STEPS):
        try:
            async with job.step() as step:
                if step.number < STEPS:
                    used.written[job.node] = life = used.written.get(job.node, 0) + 1
                    await cold.write({mine: np.full(size, life), "all": np.array([job.rank, step.number])})
                await asyncio.sleep(0.05)
                if step.number % 3 == 0:
                    values = await cold.strong(timeout=timeout)
                    assert job.view is not None
                    used.strong.setdefault((job.view.view_id, step.number), set()).add(shown(values))
                    if life:  # nothing stale: at the least what this process wrote before it asked
                        assert values[mine][0] == life
                total = await job.group.all_reduce(np.ones(4))
                step.on_commit(lambda total=total: np.add(weights, total, out=weights))
        except PiecesMissing as error:
            used.missing.append(error)
        except (LocalError, Diverged):
            raise
        except QuicollError:
            continue
    await asyncio.sleep(0.6 * RANKS + 5.5)  # a round with each rank, after one that ran into its time
    return shown(await cold.read())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("script", [killed, cut])
def test_pieces_converge_and_what_is_made_strong_is_one_and_new(
    script: Callable[[Simulation], None], seed: int
) -> None:
    """S9, S10: eventual pieces spread by themselves; what a step uses of them is strong, whatever fails."""
    used = Used()

    async def worker(job: Job, sim: Simulation) -> str:
        return await use_pieces(job, sim, used)

    outcome = run(worker, seed, script)
    assert outcome.error is None, outcome.error
    assert {at: said for at, said in used.strong.items() if len(said) > 1} == {}
    assert len(used.strong) >= STEPS // 3
    assert used.missing == []
    (end,) = set(outcome.results)  # all ranks came to hold the same
    for node in used.written:
        assert f"of {node}=" in end
