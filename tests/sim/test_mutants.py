"""The invariants bite: the code is broken on purpose, one way at a time, and each time the simulator says what broke.

A mutant is a small change of the real code, of the kind that a tired engineer makes. Each has a scenario in which it
matters, which passes without it, and names the one invariant that catches it. docs/internals/simulation.md lists them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from local_mutants import LOCAL_MUTANTS
from takeover_mutants import TAKEOVER_MUTANTS
from tier_mutants import TIER_MUTANTS
from way_mutants import WAY_MUTANTS

import quicoll.collectives.context
import quicoll.collectives.reductions
import quicoll.collectives.split
import quicoll.collectives.subgroups
import quicoll.engine.engine
import quicoll.membership.coordinator.admission
import quicoll.numerics.bundle
import quicoll.plan
import quicoll.plan.schedule
import quicoll.state.transfer
import quicoll.state.version
import quicoll_transport.link.inbox
from quicoll.engine.communicator import Communicator
from quicoll.engine.coordinator_link import CoordinatorLink
from quicoll.errors import QuicollError
from quicoll.membership.coordinator.ballot import Ballot, BallotResult
from quicoll.membership.coordinator.formation import Formation
from quicoll.membership.coordinator.history import Committed
from quicoll.membership.coordinator.ledger import Ledger
from quicoll.membership.coordinator.releases import Releases
from quicoll.membership.journal import Journal
from quicoll.numerics.destinations import Destination
from quicoll.sim import Conditions, Settings, Simulation, workload
from quicoll.sim.checked import CheckedGroup
from quicoll.sim.digests import state_digest
from quicoll.sim.subgroups import Grouping
from quicoll.step.protocol import StepProtocol
from quicoll_transport.endpoint import Endpoint, EndpointConfig
from quicoll_transport.link.outbox import Outbox

if TYPE_CHECKING:
    from quicoll.engine.in_flight import InFlight
    from quicoll.job import Job
    from quicoll.membership.coordinator.roster import Candidate

Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.interpreted
STEPS = 6


def built_in(script: Callable[[Simulation], None], *, settings: Settings | None = None) -> Simulation:
    return of_load(workload.Load(), script, settings or Settings(recovery=20.0, limit=60.0))


def of_load(load: workload.Load, script: Callable[[Simulation], None], settings: Settings) -> Simulation:
    async def worker(job: Job, sim: Simulation) -> int:
        return await workload.worker(job, lambda: sim.everyone_at(STEPS), load=load)

    replay = workload.Reference(load)
    sim = Simulation(worker, settings=settings, replay=replay, compute=workload.COMPUTE_S)
    script(sim)
    return sim


# ---------------------------------------------------------------------------------------------------------------------
# Scenarios


def calm() -> Simulation:
    return built_in(lambda sim: None)


def corrupted_payloads() -> Simulation:
    """By "direct": what an owner reduces wrongly, all ranks get. With "exchange" the vote sees them differ.

    The built-in workload would notice it by itself, by what its ranks tell each other; this one looks at nothing.
    """

    async def worker(job: Job, sim: Simulation) -> None:
        total = np.zeros(64, np.float32)
        job.register_state(lambda: {"total": total.copy()}, lambda state: np.copyto(total, state["total"]))
        while not sim.everyone_at(STEPS):
            with contextlib.suppress(QuicollError):
                async with job.step() as step:
                    await asyncio.sleep(0.05)
                    part = await job.group.all_reduce(np.ones(64, np.float32), op="avg", algorithm="direct")
                    step.on_commit(lambda part=part: np.add(total, part, out=total))

    def reference(step: int) -> bytes:
        return state_digest({"total": np.full(64, step, np.float32)})

    sim = Simulation(worker, settings=Settings(recovery=5.0, limit=60.0), reference=reference)
    sim.at(0.1).corrupt(0, times=3)  # the parts that it is given to reduce
    return sim


def work_in_groups() -> Simulation:
    load = workload.Load(groups=Grouping(every=2, keeps=False))
    return of_load(load, lambda sim: sim.at(0.1).heal() and None, Settings(recovery=2.0, limit=60.0))


def coordinator_restarts() -> Simulation:
    """By a healing: after one, and after nothing else, every rank has to commit again."""
    return built_in(lambda sim: sim.at(0.2).crash("coordinator") and sim.at(0.4).heal() and None)


def minority_with_the_coordinator() -> Simulation:
    def script(sim: Simulation) -> None:
        sim.at(0.1).partition({0, 1, 2}, {3, "coordinator"})
        sim.at(6.0).heal()

    return built_in(script)


def a_late_voter_is_killed() -> Simulation:
    """Rank 3 computes after the others have voted, and dies while it does."""

    async def worker(job: Job, sim: Simulation) -> None:
        total = np.zeros(3, np.float32)
        job.register_state(lambda: {"total": total.copy()}, lambda state: np.copyto(total, state["total"]))
        while not sim.everyone_at(3):
            with contextlib.suppress(QuicollError):
                async with job.step() as step:
                    part = await job.group.all_reduce(np.ones(3, np.float32), op="avg")
                    step.on_commit(lambda part=part: np.add(total, part, out=total))
                    await asyncio.sleep(0.3 if job.node == "worker-3" else 0.02)

    sim = Simulation(worker, settings=Settings(recovery=20.0, limit=60.0))
    sim.at(0.2).crash(3)
    sim.at(0.8).restart(3)
    return sim


def restart_of_a_rank() -> Simulation:
    def script(sim: Simulation) -> None:
        sim.at(0.2).crash(0)
        sim.at(0.6).restart(0)

    return built_in(script)


def a_majority_starts_anew() -> Simulation:
    """And the third, which holds the state, is cut off."""

    def script(sim: Simulation) -> None:
        sim.at(0.3).partition({2}, {0, 1, "coordinator"})
        sim.at(0.3).crash(0).crash(1)
        sim.at(0.4).restart(0).restart(1)
        sim.at(5.0).heal()

    return built_in(script, settings=Settings(ranks=3, recovery=20.0, limit=60.0))


def the_only_holder_is_asked_to_stop() -> Simulation:
    """Its host is slow, so its process is there still when the others begin."""

    def script(sim: Simulation) -> None:
        sim.at(0.0).slow(0, 0.005)
        sim.at(0.2).scale(5)
        sim.at(0.21).terminate(0)
        sim.at(1.0).heal()

    return built_in(script, settings=Settings(ranks=1, recovery=20.0, limit=60.0))


def a_rank_learns() -> Simulation:
    def script(sim: Simulation) -> None:
        sim.at(0.2).crash(2)
        sim.at(0.6).restart(2)
        sim.at(1.0).heal()

    settings = Settings(ranks=3, recovery=4.0, limit=30.0, learn_from_bytes=workload.LEARN_FROM)
    return of_load(workload.Load(table=True), script, settings)


def one_rank_never_calls() -> Simulation:
    async def worker(job: Job) -> None:
        with contextlib.suppress(QuicollError):
            async with job.step():
                if job.rank == 3:
                    await asyncio.sleep(10.0)
                await job.group.all_reduce(np.ones(5, np.float32), timeout=2.0)

    return Simulation(worker, settings=Settings(limit=120.0))


def two_ranks_lose_each_other() -> Simulation:
    def script(sim: Simulation) -> None:
        sim.at(0.1).partition({0}, {1})
        sim.at(3.0).heal()

    return built_in(script)


def out_and_a_power_failure() -> Simulation:
    async def worker(job: Job, sim: Simulation) -> None:
        out = np.zeros(3_000, np.float32)
        job.register_state(lambda: {}, lambda state: None)
        while not sim.everyone_at(2):
            with contextlib.suppress(QuicollError):
                async with job.step():
                    await job.group.all_reduce(np.full(3_000, sim.now, np.float32), out=out, timeout=4.0)

    slow = Conditions(bytes_per_second=30_000)
    sim = Simulation(worker, settings=Settings(conditions=slow, chunk_bytes=1 << 11, limit=120.0))
    sim.at(0.4).crash(2, power=True)
    sim.at(4.0).heal()
    return sim


def one_rank_comes_late() -> Simulation:
    """The others' messages wait at the late one, within its credit."""

    async def worker(job: Job) -> None:
        async with job.step():
            if job.rank == 2:
                await asyncio.sleep(2.0)
            await asyncio.gather(*(job.group.broadcast(np.ones(3000, np.float32), root=0) for _ in range(8)))

    return Simulation(worker, settings=Settings(ranks=3))


def a_late_rank_and_a_barrier() -> Simulation:
    async def worker(job: Job) -> None:
        with contextlib.suppress(QuicollError):
            async with job.step():
                await asyncio.sleep(0.1 * job.rank)
                await job.group.barrier()

    return Simulation(worker, settings=Settings(ranks=3, limit=20.0))


# ---------------------------------------------------------------------------------------------------------------------
# Mutants


def checksums_are_not_compared(patch: Patch) -> None:
    class Equal(int):
        def __ne__(self, other: object) -> bool:
            return False

    patch.setattr(quicoll_transport.link.inbox, "checksum", lambda data: Equal(0))


def the_order_of_reduction_is_another(patch: Patch) -> None:
    kept = quicoll.plan.schedule._PLANNERS
    patch.setattr(
        quicoll.plan.schedule, "_PLANNERS", {**kept, "all_reduce": quicoll.plan.all_reduce}
    )  # nothing kept of it
    for name in ("quicoll.numerics.canonical_order", "quicoll.plan.canonical", "quicoll.plan.routes"):
        patch.setattr(sys.modules[name], "split", lambda start, stop: start + 1)


def groups_are_told_apart_by_color_alone(patch: Patch) -> None:
    honest = quicoll.collectives.subgroups.derived_id
    patch.setattr(
        quicoll.collectives.subgroups, "derived_id", lambda parent, what, number, color: honest(parent, what, color)
    )
    patch.setattr(quicoll.collectives.context.CallContext, "claim", lambda self, derived, name: None)


def keys_order_nothing(patch: Patch) -> None:
    honest = quicoll.collectives.split.divide
    patch.setattr(quicoll.collectives.split, "divide", lambda given: honest([(color, 0) for color, _ in given]))


def groups_of_two_round_otherwise(patch: Patch) -> None:
    """All their members alike, so that their votes agree."""
    honest = CheckedGroup.all_reduce

    def rounded(self: CheckedGroup, *args: Any, **settings: Any) -> Any:
        handle = honest(self, *args, **settings)
        operation = handle.pending.operation
        deliver = operation.result
        if self.world_size == 2:
            operation.result = lambda: np.nextafter(deliver(), np.float32(0))
        return handle

    patch.setattr(CheckedGroup, "all_reduce", rounded)


def the_journal_forgets_commits(patch: Patch) -> None:
    append = Journal.append

    def forgetful(self: Journal, record: Any) -> None:
        if not isinstance(record, Committed):
            append(self, record)

    patch.setattr(Journal, "append", forgetful)


def commits_are_announced_but_not_recorded(patch: Patch) -> None:
    record = Ledger.record

    def careless(self: Ledger, entry: Any) -> None:
        if not isinstance(entry, Committed):
            record(self, entry)

    patch.setattr(Ledger, "record", careless)


def anybody_is_a_quorum(patch: Patch) -> None:
    patch.setattr(quicoll.membership.coordinator.admission, "has_quorum", lambda nodes, base: True)


def a_quorum_needs_no_state(patch: Patch) -> None:
    patch.setattr(Formation, "_state_absent", lambda self, chosen, history: "")


def the_last_holder_is_let_go(patch: Patch) -> None:
    def all_who_ask(self: Releases) -> list[Candidate]:
        going = [each for each in self._roster if self._told.get(each.node) is False]
        self._told.update(dict.fromkeys((each.node for each in going), True))
        return going

    patch.setattr(Releases, "may_go", all_who_ask)


def aborted_steps_are_applied(patch: Patch) -> None:
    async def eager(self: StepProtocol, attempt: Any, decision: Any) -> None:
        await self.apply(attempt, decision.index)

    # Below the checks, which stand where the decision arrives.
    patch.setattr(StepProtocol, "decided", eager)


def a_majority_of_votes_is_enough(patch: Patch) -> None:
    vote = Ballot.vote

    def hasty(self: Ballot, node: str, vote_: Any) -> BallotResult | None:
        outcome = vote(self, node, vote_)
        if outcome is None and 2 * len(self._votes) > self.view.world_size:
            return BallotResult(commit=True, digest=vote_.digest)
        return outcome

    patch.setattr(Ballot, "vote", hasty)


def the_oldest_state_is_handed_over(patch: Patch) -> None:
    patch.setattr(quicoll.state.version, "max", min, raising=False)


def chunks_that_were_learned_count_as_current(patch: Patch) -> None:
    async def trusting(self: Any) -> list[int]:
        count = len(self._state.table)
        self._offer = await self._group.recv(np.empty(count * 16, np.uint8), source=self._source)
        self._holding.known(self._offer, np.ones(count, bool))
        await self._group.send(np.zeros(-(-count // 8), np.uint8), to=self._source)
        return []

    patch.setattr(quicoll.state.transfer._Fetch, "_ask", trusting)


def the_coordinator_is_dialled_once(patch: Patch) -> None:
    dial = CoordinatorLink.dial

    def once(self: Any) -> None:
        if self._link is None:
            dial(self)

    patch.setattr(CoordinatorLink, "dial", once)


def a_collective_has_no_deadline(patch: Patch) -> None:
    start = Communicator.start

    def patient(self: Communicator, call: Any, *, timeout: float, **settings: Any) -> InFlight | None:
        return start(self, call, timeout=1e6, **settings)

    patch.setattr(Communicator, "start", patient)


def callers_are_told_what_their_own_end_saw(patch: Patch) -> None:
    async def seen(self: Communicator, deadline: float | None = None) -> QuicollError | None:
        return self.error

    patch.setattr(Communicator, "end_of_view", seen)


def results_are_written_as_they_arrive(patch: Patch) -> None:
    honest = quicoll.numerics.bundle.destination

    def direct(out: Any, like: Any, shape: Any = None, **_: Any) -> Destination:
        place = honest(out, like, shape)
        return Destination(out, place.place, out.reshape(-1), place.dtype, place.shape, place.kind)

    for module in (quicoll.numerics.bundle, quicoll.collectives.reductions):
        patch.setattr(module, "destination", direct)


def the_credit_is_not_kept(patch: Patch) -> None:
    def pump(self: Any) -> None:
        kept, self._peer_credit = self._peer_credit, 1 << 40
        try:
            original(self)
        finally:
            self._peer_credit = kept

    def hold(self: Any, header: Any) -> None:
        self.held_bytes += header.length + 64

    original = Outbox.pump
    patch.setattr(Outbox, "pump", pump)
    patch.setattr(quicoll_transport.link.inbox, "MESSAGE_COST", 64)
    patch.setattr(quicoll_transport.link.inbox.Inbox, "_hold", hold)


def closing_leaves_a_timer(patch: Patch) -> None:
    aclose = Endpoint.aclose

    async def untidy(self: Endpoint, **settings: Any) -> None:
        await aclose(self, **settings)
        asyncio.get_running_loop().call_later(1000.0, lambda: None)

    patch.setattr(Endpoint, "aclose", untidy)


def a_callback_raises(patch: Patch) -> None:
    announced = Communicator.announced

    def clumsy(self: Communicator, rank: int, announce: Any) -> None:
        if announce.seq == 3:
            raise KeyError(announce.seq)
        announced(self, rank, announce)

    patch.setattr(Communicator, "announced", clumsy)


def a_barrier_is_early_on_one_rank(patch: Patch) -> None:
    announce, gone_on = Communicator._announce, Communicator._gone_on

    def is_early(self: Communicator, operation: InFlight) -> bool:
        return operation.call.name == "barrier" and self.rank == 1

    def silent(self: Communicator, operation: InFlight, now_ns: int) -> None:
        if is_early(self, operation):
            operation.slot.settled = True
        else:
            announce(self, operation, now_ns)

    def hasty(self: Communicator, operation: InFlight) -> bool:
        return is_early(self, operation) or gone_on(self, operation)

    patch.setattr(Communicator, "_announce", silent)
    patch.setattr(Communicator, "_gone_on", hasty)


@dataclass(frozen=True)
class Mutant:
    change: Callable[[Patch], None]
    scenario: Callable[[], Simulation]
    caught_by: str
    beside: Callable[[Patch], None] | None = None  # settings that the scenario needs, without the mutant too


def small_credit(patch: Patch) -> None:
    patch.setattr(quicoll.engine.engine, "EndpointConfig", functools.partial(EndpointConfig, credit_bytes=32_000))


MUTANTS = (
    Mutant(checksums_are_not_compared, corrupted_payloads, "same-bits"),
    Mutant(the_order_of_reduction_is_another, calm, "same-bits"),
    Mutant(groups_are_told_apart_by_color_alone, work_in_groups, "worker"),
    Mutant(keys_order_nothing, work_in_groups, "worker"),
    Mutant(groups_of_two_round_otherwise, work_in_groups, "same-bits"),
    Mutant(the_journal_forgets_commits, coordinator_restarts, "durable"),
    Mutant(commits_are_announced_but_not_recorded, calm, "one-decision"),
    Mutant(anybody_is_a_quorum, minority_with_the_coordinator, "quorum"),
    Mutant(a_quorum_needs_no_state, a_majority_starts_anew, "durable"),
    Mutant(the_last_holder_is_let_go, the_only_holder_is_asked_to_stop, "durable"),
    Mutant(aborted_steps_are_applied, a_late_voter_is_killed, "all-or-none"),
    Mutant(a_majority_of_votes_is_enough, a_late_voter_is_killed, "all-or-none"),
    Mutant(the_oldest_state_is_handed_over, restart_of_a_rank, "durable"),
    Mutant(chunks_that_were_learned_count_as_current, a_rank_learns, "progress"),
    Mutant(the_coordinator_is_dialled_once, coordinator_restarts, "progress"),
    Mutant(a_collective_has_no_deadline, one_rank_never_calls, "deadline"),
    Mutant(callers_are_told_what_their_own_end_saw, two_ranks_lose_each_other, "one-verdict"),
    Mutant(a_barrier_is_early_on_one_rank, a_late_rank_and_a_barrier, "together"),
    Mutant(results_are_written_as_they_arrive, out_and_a_power_failure, "untouched"),
    Mutant(the_credit_is_not_kept, one_rank_comes_late, "memory", small_credit),
    Mutant(closing_leaves_a_timer, calm, "no-leftover"),
    Mutant(a_callback_raises, calm, "no-surprise"),
)


def _name(mutant: Mutant) -> str:
    return mutant.change.__name__


@pytest.mark.parametrize("mutant", MUTANTS, ids=_name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: Patch) -> None:
    if mutant.beside is not None:
        mutant.beside(monkeypatch)
    mutant.change(monkeypatch)
    outcome = mutant.scenario().run()
    assert outcome.error is not None, "the mutant lives"
    assert outcome.error.kind == mutant.caught_by, outcome.error


@pytest.mark.parametrize(
    ("scenario", "beside"),
    [*{(mutant.scenario, mutant.beside): None for mutant in MUTANTS}],
    ids=lambda value: value.__name__ if value is not None else "",
)
def test_scenario_passes_without_mutant(
    scenario: Callable[[], Simulation], beside: Callable[[Patch], None] | None, monkeypatch: Patch
) -> None:
    if beside is not None:
        beside(monkeypatch)
    outcome = scenario().run()
    assert outcome.error is None, outcome.error


def test_every_invariant_has_a_mutant_that_it_catches() -> None:
    from quicoll.sim.invariants import INVARIANTS

    caught = {mutant.caught_by for mutant in MUTANTS}
    caught |= {kind for _, _, kind in (*LOCAL_MUTANTS, *TAKEOVER_MUTANTS, *TIER_MUTANTS, *WAY_MUTANTS)}
    assert [kind for kind in INVARIANTS if kind not in caught] == []
