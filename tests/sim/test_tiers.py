"""Sets of tiers and shared state in simulated clusters: ranks are killed and come back, networks are cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.errors import Diverged, LocalError, PiecesMissing, QuicollError
from quicoll.sim import Recording, Settings, Simulation
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


async def change_tiers(job: Job, sim: Simulation, seen: Seen) -> tuple[int, int]:
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
    return job.committed_step, job.tiers.current.version


def run(
    worker: Callable[..., Any], seed: int, script: Callable[[Simulation], None], *, recording: Recording | None = None
) -> Outcome:
    settings = Settings(ranks=RANKS, limit=90.0, recovery=20.0)
    recorder = None if recording is None else recording.record
    sim = Simulation(worker, seed=seed, settings=settings, compute=0.05, recorder=recorder)
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


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("script", [killed, cut])
def test_all_ranks_enter_each_step_with_one_set_of_tiers(script: Callable[[Simulation], None], seed: int) -> None:
    """S4, S4b: a set changes at the boundary of a committed step, on all ranks, whatever fails."""
    seen = Seen()

    async def worker(job: Job, sim: Simulation) -> tuple[int, int]:
        return await change_tiers(job, sim, seen)

    outcome = run(worker, seed, script)
    assert outcome.error is None, outcome.error
    assert {step: len(sets) for step, sets in seen.in_force.items() if len(sets) > 1} == {}
    assert len({digest for sets in seen.in_force.values() for digest in sets}) > 4
    ends = set(outcome.results)  # a rank may have committed a step more than another, and gone over with it
    assert len({step for step, _ in ends}) == len(ends)
    assert {tier_set.version for tier_set in seen.told.values()} == {version for _, version in ends}
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

    async def worker(job: Job, sim: Simulation) -> tuple[int, int]:
        return await change_tiers(job, sim, seen)

    outcome = run(worker, 0, cut)
    assert outcome.error is not None or any(len(sets) > 1 for sets in seen.in_force.values())


# -- shared state ----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("seed", [0, 1])
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


def quiet(sim: Simulation) -> None:
    """No faults."""


def test_a_rank_that_cannot_take_a_piece_is_named_on_all_ranks_and_the_group_goes_on() -> None:
    said: dict[str, PiecesMissing] = {}

    async def worker(job: Job, sim: Simulation) -> str:
        room = 100 if job.node == "worker-2" else 1 << 20
        cold = job.shared_state("cold", consistency="eventual", max_bytes=room)
        if job.rank == 0:
            await cold.write({"small": b"x", "large": bytes(200)})
        with pytest.raises(PiecesMissing) as caught:
            await cold.strong(timeout=2.0)
        said[job.node] = caught.value
        await job.group.barrier()
        if job.rank == 0:
            await cold.write({"large": b"less"})
        async with job.step():
            values = await cold.strong()
        return str(values)

    outcome = run(worker, 0, quiet)
    assert outcome.error is None, outcome.error
    assert len(said) == RANKS
    for error in said.values():
        assert error.usable
        assert (error.state, error.lacking) == ("cold", {"worker-2": ("large",)})
        assert "worker-2 lacks 'large' (piece 'large' of 200 bytes does not fit" in error.message
    assert set(outcome.results) == {"{'large': b'less', 'small': b'x'}"}


def test_a_holder_that_falls_silent_while_a_piece_is_pulled_ends_the_wait_within_its_time() -> None:
    """The only rank with a piece is cut off as the others begin to pull: nobody waits for ever."""
    ends: list[tuple[str, float]] = []

    async def worker(job: Job, sim: Simulation) -> list[str]:
        job.register_state(lambda: {"n": 0}, lambda state: None)
        cold = job.shared_state("cold", consistency="eventual")
        await job.ready()
        if job.node == "worker-3":
            await cold.write({"piece": np.arange(1 << 20)})
        await asyncio.sleep(1.0 - sim.now)
        began = sim.now
        while not sim.everyone_at(3):
            try:
                async with job.step():
                    values = await cold.strong(timeout=4.0)
                    ends.append((",".join(values), sim.now - began))
            except QuicollError as error:
                ends.append((type(error).__name__, sim.now - began))
        return sorted(await cold.read())

    def script(sim: Simulation) -> None:
        sim.at(1.03).partition({3}, {0, 1, 2, "coordinator"})
        sim.at(6.0).repair()

    outcome = run(worker, 1, script)
    assert outcome.error is None, outcome.error
    assert any(name in ("StepAborted", "Partitioned") for name, _ in ends), ends
    assert {name for name, _ in ends} <= {"StepAborted", "Partitioned", "PiecesMissing", "piece", ""}
    assert list(outcome.results) == [["piece"]] * RANKS


def test_strong_pieces_change_by_committed_steps_and_are_handed_over() -> None:
    """S9: what differs between ranks is committed nowhere; a rank that comes back has what was committed."""
    refused: list[str] = []

    async def worker(job: Job, sim: Simulation) -> str:
        hot = job.shared_state("hot")
        job.register_state(lambda: {"hot": hot.state()}, lambda state: hot.load_state(state["hot"]))
        while not sim.everyone_at(12):
            try:
                async with job.step() as step:
                    before = shown(await hot.read())
                    odd = step.number == 5 and job.node == "worker-1" and not refused
                    hot.stage(step, {f"p{step.number % 3}": np.array([step.number + odd])})
                    await asyncio.sleep(0.05)
                    await job.group.barrier()
                    assert shown(await hot.strong()) == before  # not before the commit
            except (LocalError, Diverged):
                raise
            except QuicollError as error:
                if "digests of step 5 differ; wrong: worker-1" in error.message:
                    refused.append(job.node)
                    assert shown(await hot.read()) == before
        return shown(await hot.read())

    outcome = run(worker, 0, killed)
    assert outcome.error is None, outcome.error
    assert {"worker-0", "worker-1", "worker-3"} <= set(refused)
    assert len(set(outcome.results)) == 1
    assert outcome.results[0].startswith("p0=[")


def test_a_set_that_one_rank_cannot_take_is_refused_on_all_and_its_reason_is_told() -> None:
    async def worker(job: Job, sim: Simulation) -> list[int]:
        job.register_state(job.tiers.state, job.tiers.load_state)
        job.tiers.weigh(
            lambda proposed: "no room for it" if "dense" in proposed.active and job.node == "worker-3" else ""
        )
        versions = []
        for active in (["dense"], ["expert"], ["expert", "dense"], ["archive"]):
            if job.rank == 1:
                job.tiers.propose(job.tiers.current.changed(active=active))
            async with job.step() as step:
                await job.tiers.agree(step)
            versions.append(job.tiers.current.version)
        assert job.tiers.pending is None
        return versions

    recording = Recording()
    outcome = run(worker, 0, quiet, recording=recording)
    assert outcome.error is None, outcome.error
    assert list(outcome.results) == [[0, 1, 1, 2]] * RANKS
    refused = [entry.what for entry in recording.entries if entry.kind == "tiers_refused"]
    assert [fields["reason"] for fields in refused] == ["worker-3: no room for it"] * 2 * RANKS
    assert {tuple(fields["nodes"]) for fields in refused} == {("worker-1",)}
    changed = [entry.what for entry in recording.entries if entry.kind == "tiers_changed"]
    assert [(fields["version"], *fields["active"]) for fields in changed] == [(1, "expert")] * 4 + [(2, "archive")] * 4


def test_ranks_whose_state_does_not_carry_the_set_agree_on_nothing_and_say_what_is_missing() -> None:
    said: list[str] = []

    async def worker(job: Job, sim: Simulation) -> int:
        held = {"n": 0}
        job.register_state(lambda: held, held.update)
        if job.committed_step == 0:
            job.tiers.propose(TierSet(["hot"], version=1))
        while not sim.everyone_at(8):
            try:
                async with job.step() as step:
                    await asyncio.sleep(0.05)
                    try:
                        await job.tiers.agree(step)
                    except LocalError as error:
                        said.append(error.message)
                        job.tiers.load_state({"tier_set": TierSet(["hot"], version=1).encoded})
                        raise
            except QuicollError:
                continue
        return job.tiers.current.version

    def script(sim: Simulation) -> None:
        sim.at(0.45).crash(2)
        sim.at(0.6).restart(2)

    outcome = run(worker, 0, script)
    assert outcome.error is None, outcome.error
    assert said
    assert all("the ranks hold different sets of tiers" in each and "job.tiers.state()" in each for each in said), said
    assert set(outcome.results) == {1}
