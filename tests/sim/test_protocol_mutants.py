"""Mutants of the rules by which views, votes and doubts are told apart: each is found, most by the smallest scenario.

What no honest peer ever sends, no simulated cluster shows: a coordinator's links are in order, so a vote never meets
the view after its own. Such mutants are found at the lowest level, by a test that is named here; it is run with the
mutant, and has to fail.

QUICOLL_TEST_MUTANT_SEEDS=60 runs the swarm on every mutant as well, until a seed finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from named_tests import Below, run_named

import quicoll.collectives.context
import quicoll.numerics.destinations
import quicoll.plan
import quicoll.plan.reductions
import quicoll.plan.schedule
import quicoll.state.synchronisation
import quicoll.state.transfer
from quicoll.engine.early import EarlyAnnouncements
from quicoll.engine.views import Views
from quicoll.errors import QuicollError
from quicoll.membership.coordinator.core import CoordinatorCore
from quicoll.membership.coordinator.history import History
from quicoll.membership.member.core import MemberCore
from quicoll.membership.messages import BeginStep, Install, Vote
from quicoll.sim import Settings, Simulation, workload
from quicoll.sim.runner import run_seed
from quicoll.state.comparison import read
from quicoll.step.protocol import StepProtocol
from quicoll_transport.link.receipts import Receipts

if TYPE_CHECKING:
    from quicoll.job import Job

Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.interpreted
SEEDS = int(os.environ.get("QUICOLL_TEST_MUTANT_SEEDS", "0"))


# ---------------------------------------------------------------------------------------------------------------------
# Scenarios


def built_in(
    script: Callable[[Simulation], object],
    *,
    load: workload.Load | None = None,
    steps: int = 4,
    settings: Settings | None = None,
) -> Simulation:
    load = load or workload.Load(whole_every=100, operations=("barrier",))

    async def worker(job: Job, sim: Simulation) -> int:
        return await workload.worker(job, lambda: sim.everyone_at(steps), load=load)

    sim = Simulation(
        worker,
        settings=settings or Settings(ranks=3, lost_after=0.5, recovery=10.0, limit=30.0),
        replay=workload.Reference(load),
        compute=workload.COMPUTE_S,
    )
    script(sim)
    return sim


def a_vote_that_is_cut_off() -> Simulation:
    """Rank 2 is in doubt of a step that the others commit in the next view, without it."""

    def script(sim: Simulation) -> None:
        sim.at_vote(2, start=0.1).partition({2}, {0, 1, "coordinator"})
        sim.at(1.5).heal()

    return built_in(script)


def a_decision_that_comes_late() -> Simulation:
    """Rank 2 gives up waiting before the decision comes, and settles it where it enters the next step."""

    def script(sim: Simulation) -> None:
        sim.at_vote(2, start=0.1).hold({"coordinator"}, {2})
        sim.at(0.6).heal()

    return built_in(script, settings=Settings(ranks=3, lost_after=2.0, hold_timeout=0.3, recovery=10.0, limit=30.0))


def a_voter_is_killed_while_the_others_compute_ahead() -> Simulation:
    """So that a step is aborted which all ranks have left."""

    def script(sim: Simulation) -> None:
        sim.at_vote(2, start=0.1).crash(2)
        sim.at(0.9).heal()

    return built_in(script, load=workload.Load(whole_every=100, operations=("barrier",), overlap=True))


def a_late_voter_is_lost() -> Simulation:
    """By the coordinator alone, which the others tell nothing: they hear it still."""

    async def worker(job: Job, sim: Simulation) -> None:
        job.register_state(lambda: {}, lambda state: None)
        while not sim.everyone_at(2):
            with contextlib.suppress(QuicollError):
                async with job.step():
                    await job.group.barrier()
                    await asyncio.sleep(1.0 if job.node == "worker-2" and sim.now < 1.0 else 0.05)

    sim = Simulation(worker, settings=Settings(ranks=3, lost_after=0.5, recovery=10.0, limit=30.0))
    sim.at(0.1).partition({2}, {"coordinator"}, one_way=True)
    sim.at(1.0).heal()
    return sim


def a_call_arrives_in_the_next_view() -> Simulation:
    """What rank 1 called in the first view is kept on its way, and comes when rank 0 works in the second.

    By a broadcast, as its root needs nothing of the other rank but the word that it has called.
    """

    def here(job: Job) -> tuple[int, int]:
        return job.view.view_id, job.rank

    async def worker(job: Job, sim: Simulation) -> None:
        job.register_state(lambda: {}, lambda state: None)
        while not sim.everyone_at(1):
            with contextlib.suppress(QuicollError):
                async with job.step():
                    await asyncio.sleep({(1, 0): 0.4, (1, 1): 0.1, (2, 0): 0.0, (2, 1): 0.4}.get(here(job), 0.05))
                    await job.group.broadcast(np.zeros(3), root=0)

    sim = Simulation(worker, settings=Settings(ranks=2, recovery=10.0, limit=30.0))
    sim.at(0.08).hold({1}, {0})
    sim.at(0.15).alarm(1, 0.05)
    sim.at(0.22).alarm(1, 0.0)
    sim.at(0.55).heal()
    return sim


def shares_of_three() -> Simulation:
    return built_in(
        lambda sim: None,
        load=workload.Load(algorithm="direct", elements=workload.SIZES[1], whole_every=1, operations=("barrier",)),
        steps=1,
        settings=Settings(ranks=3, limit=0.5),
    )


def a_liar() -> Simulation:
    """Who is left out for it comes back in its time. Steps are long, so that few are done until then."""
    load = workload.Load(algorithm="exchange", whole_every=100, operations=("barrier",))
    settings = Settings(ranks=3, lost_after=0.5, recovery=60.0, limit=120.0)
    sim = built_in(lambda sim: sim.at(0.3).lie(0, 1) and sim.at(2.0).heal(), load=load, settings=settings)
    sim.compute = 0.4
    return sim


# ---------------------------------------------------------------------------------------------------------------------
# Mutants


def a_doubt_is_answered_by_the_step_alone(patch: Patch) -> None:
    patch.setattr(History, "committed", lambda self, view_id, step: step <= self.committed_step)


def callbacks_are_lost_after_a_doubt(patch: Patch) -> None:
    settle = StepProtocol._settle

    async def forgetful(self: StepProtocol, doubt: Any, timeout: float) -> None:
        doubt.attempt.callbacks.clear()
        await settle(self, doubt, timeout)

    patch.setattr(StepProtocol, "_settle", forgetful)


def a_lost_member_s_vote_is_not_needed(patch: Patch) -> None:
    lost = CoordinatorCore.member_lost

    def generous(self: CoordinatorCore, node: str, cause: str, *, now_ns: int, incarnation: int | None = None) -> None:
        active = self._stage.active
        if active is not None and active.ballot is not None and active.ballot.silent == (node,):
            vote = next(iter(active.ballot._votes.values()))
            self._steps.commit(active, active.ballot.step, vote.digest, now_ns)
        lost(self, node, cause, now_ns=now_ns, incarnation=incarnation)

    patch.setattr(CoordinatorCore, "member_lost", generous)


def a_share_of_three_ends_early(patch: Patch) -> None:
    honest = quicoll.plan.reductions.shares

    kept = quicoll.plan.schedule._PLANNERS
    # Ones that keep no plan, for an honest run has made some, and shall not find this one's.
    patch.setattr(quicoll.plan.schedule, "_PLANNERS", {**kept, "all_reduce": quicoll.plan.all_reduce})

    def short(elements: int, parts: int, grain: int) -> list[tuple[int, int]]:
        found = honest(elements, parts, grain)
        return [*found[:-1], (found[-1][0], found[-1][1] - 1)] if len(found) == 3 else found

    patch.setattr(quicoll.plan.reductions, "shares", short)
    # What is not written holds what was in the memory before: by chance the same on two ranks, or on all.
    room, garbage = quicoll.numerics.destinations.room, itertools.count(1)

    def used(*arguments: Any) -> Any:
        memory = room(*arguments)
        memory.view(np.uint8)[:] = next(garbage) % 256
        return memory

    patch.setattr(quicoll.numerics.destinations, "room", used)


def every_vote_has_one_digest(patch: Patch) -> None:
    patch.setattr(quicoll.collectives.context.CallContext, "digests", lambda self, step: (bytes(16), ()))


def words_of_another_view_are_taken(patch: Patch) -> None:
    receive = Views.receive

    def credulous(self: Views, link: Any, message: Any) -> None:
        communicator = self.communicator
        if communicator is not None:
            message = msgspec.structs.replace(message, view_id=communicator.view.view_id)
        receive(self, link, message)

    patch.setattr(Views, "receive", credulous)


def an_install_of_any_view_is_taken(patch: Patch) -> None:
    receive = MemberCore.receive

    def credulous(self: MemberCore, message: Any, *, now_ns: int) -> None:
        if isinstance(message, Install) and self.view is not None:
            message = Install(view_id=self.view.view_id)
        receive(self, message, now_ns=now_ns)

    patch.setattr(MemberCore, "receive", credulous)


def a_vote_of_an_old_view_counts(patch: Patch) -> None:
    dispatch = CoordinatorCore._dispatch

    def generous(self: CoordinatorCore, candidate: Any, message: Any, now_ns: int) -> None:
        active = self._stage.active
        if isinstance(message, Vote | BeginStep) and active is not None and message.view_id < active.view.view_id:
            message = msgspec.structs.replace(message, view_id=active.view.view_id)
        dispatch(self, candidate, message, now_ns)

    patch.setattr(CoordinatorCore, "_dispatch", generous)


def a_control_message_counts_twice(patch: Patch) -> None:
    """Hello asks for the last one again, and it is taken again."""
    app, told = Receipts.app, Receipts.acknowledge_all

    def forgetful(self: Receipts) -> Any:
        count, ranges, released = told(self)
        return max(0, count - 1), ranges, released

    patch.setattr(Receipts, "acknowledge_all", forgetful)
    patch.setattr(Receipts, "app", lambda self, message: message.number < self._app_received or app(self, message))


def a_payload_counts_twice(patch: Patch) -> None:
    """Hello tells of none that has arrived, and what is sent again is taken again."""
    told = Receipts.acknowledge_all

    def forgetful(self: Receipts) -> Any:
        count, _, released = told(self)
        return count, (), released

    patch.setattr(Receipts, "acknowledge_all", forgetful)
    patch.setattr(Receipts, "__contains__", lambda self, sequence: False)


def the_digest_of_a_state_is_not_checked(patch: Patch) -> None:
    async def trusting(self: Any, records: Any) -> None:
        """Nothing."""

    patch.setattr(quicoll.state.transfer._Fetch, "_check", trusting)


def what_ranks_have_heard_is_not_compared(patch: Patch) -> None:
    async def credulous(group: Any, gathered: Any, **_: Any) -> Any:
        return read(gathered)

    patch.setattr(quicoll.state.synchronisation, "heard", credulous)


def a_step_is_applied_when_it_is_left(patch: Patch) -> None:
    commit = StepProtocol.commit

    async def hasty(self: StepProtocol, attempt: Any, view_id: int, unfinished: int) -> None:
        await commit(self, attempt, view_id, unfinished)
        if attempt.overlap:
            attempt.run_callbacks()

    patch.setattr(StepProtocol, "commit", hasty)


def the_digest_that_holders_told_is_not_that_of_the_manifest(patch: Patch) -> None:
    patch.setattr(quicoll.state.synchronisation, "_check_manifest", lambda *_: None)


def any_version_is_taken_for_committed(patch: Patch) -> None:
    patch.setattr(quicoll.state.synchronisation, "_check_versions", lambda *_: None)


def the_bound_on_early_announcements_is_removed(patch: Patch) -> None:
    """As to the peer, who hears no end of its link; the memory for it is not taken here."""
    keep = EarlyAnnouncements.keep

    def patient(self: EarlyAnnouncements, link: int, node: str, announce: Any) -> None:
        with contextlib.suppress(QuicollError):
            keep(self, link, node, announce)

    patch.setattr(EarlyAnnouncements, "keep", patient)


# ---------------------------------------------------------------------------------------------------------------------
# What finds them


@dataclass(frozen=True)
class Mutant:
    """Found by an invariant, where the scenario runs with it."""

    change: Callable[[Patch], None]
    scenario: Callable[[], Simulation]
    caught_by: str


MUTANTS = (
    Mutant(a_doubt_is_answered_by_the_step_alone, a_vote_that_is_cut_off, "one-decision"),
    Mutant(callbacks_are_lost_after_a_doubt, a_decision_that_comes_late, "same-bits"),
    Mutant(a_step_is_applied_when_it_is_left, a_voter_is_killed_while_the_others_compute_ahead, "all-or-none"),
    Mutant(a_lost_member_s_vote_is_not_needed, a_late_voter_is_lost, "all-or-none"),
    Mutant(a_share_of_three_ends_early, shares_of_three, "OutOfTime"),  # no two ranks have the same there
    Mutant(every_vote_has_one_digest, a_liar, "same-bits"),
    Mutant(words_of_another_view_are_taken, a_call_arrives_in_the_next_view, "together"),
)

BELOW = (
    Below(
        an_install_of_any_view_is_taken,
        "unit/membership/member/test_core.py",
        "test_an_install_of_another_view_installs_nothing",
    ),
    Below(
        a_vote_of_an_old_view_counts,
        "unit/membership/coordinator/test_active_view.py",
        "test_votes_of_a_view_that_is_over_do_not_count",
    ),
    Below(
        a_control_message_counts_twice,
        "transport/link/test_reconnection.py",
        "test_application_messages_stay_in_order_and_single_over_any_number_of_connections",
    ),
    Below(
        a_payload_counts_twice,
        "transport/link/test_reconnection.py",
        "test_a_message_whose_acknowledgement_was_lost_is_not_sent_again",
    ),
    Below(
        the_digest_of_a_state_is_not_checked,
        "unit/state/test_synchronisation.py",
        "test_a_tensor_with_other_bits_than_the_manifest_says_is_corrupted_and_nothing_is_loaded",
    ),
    Below(
        what_ranks_have_heard_is_not_compared,
        "unit/state/test_synchronisation.py",
        "test_a_rank_that_is_told_something_else_than_the_others_takes_part_in_nothing",
    ),
    Below(
        the_digest_that_holders_told_is_not_that_of_the_manifest,
        "unit/state/test_synchronisation.py",
        "test_a_state_that_is_announced_other_than_its_holders_have_told_is_refused_before_a_byte_of_it_is_taken",
    ),
    Below(
        any_version_is_taken_for_committed,
        "unit/state/test_synchronisation.py",
        "test_who_says_that_it_holds_what_was_never_committed_is_refused_by_all_others",
    ),
    Below(
        the_bound_on_early_announcements_is_removed,
        "unit/engine/test_early.py",
        "test_what_a_peer_may_have_kept_is_bounded_in_bytes_and_goes_with_its_link",
    ),
)


def _name(mutant: Mutant | Below) -> str:
    return mutant.change.__name__


@pytest.mark.parametrize("mutant", MUTANTS, ids=_name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: Patch) -> None:
    mutant.change(monkeypatch)
    error = mutant.scenario().run().error
    assert error is not None, "the mutant lives"
    assert error.kind == mutant.caught_by, error
    if SEEDS:
        found = (seed for seed in range(SEEDS) if not run_seed(seed).ok)
        assert next(found, None) is not None, f"none of {SEEDS} seeds of the swarm has found it"


@pytest.mark.parametrize("mutant", MUTANTS, ids=_name)
def test_scenario_passes_without_mutant(mutant: Mutant) -> None:
    error = mutant.scenario().run().error
    assert error is None, error


@pytest.mark.parametrize("mutant", BELOW, ids=_name)
def test_the_named_test_fails_with_the_mutant_and_passes_without(mutant: Below, monkeypatch: Patch) -> None:
    run_named(mutant)
    mutant.change(monkeypatch)
    with pytest.raises((AssertionError, QuicollError, pytest.fail.Exception)):
        run_named(mutant)
