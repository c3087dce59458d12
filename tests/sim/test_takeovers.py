"""Coordinators that take over from each other, over a simulated database: each loss alone, and mutants of the rules.

The lease core, its shell, the service and the ranks' choice of a coordinator are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from takeover_mutants import (
    A_LEADER_WAKES_UP_WITH_ALL_VOTES,
    LEASE,
    RANKS_COME_TO_A_LEADER_OF_THE_PAST,
    SETTINGS,
    TAKEOVER_MUTANTS,
    answers_are_not_confirmed,
    scenario,
)

from quicoll.errors import JournalError, LocalError
from quicoll.membership.coordinator.history import Proposed, Seeded
from quicoll.sim.database import SimDatabase
from quicoll.sim.runner import run_scenario, run_seed
from quicoll.sim.scenario.events import JOURNAL_FAULTS, TAKEOVERS
from quicoll.sim.trace.recording import Recording
from quicoll_transport.sim import World

Patch = pytest.MonkeyPatch

if TYPE_CHECKING:
    from quicoll.membership.coordinator.lease import HeldBy
    from quicoll.sim.scenario.swarm import Scenario


def ran(text: str) -> Recording:
    """Run it; every invariant has to hold."""
    recording = Recording()
    outcome = run_scenario(scenario(text), recorder=recording.record)
    assert outcome.error is None, recording.explain(outcome)
    return recording


def leaders(recording: Recording) -> list[str]:
    return [entry.who for entry in recording.entries if entry.kind == "leads"]


def commits(recording: Recording) -> list[float]:
    """Return when a step was committed by anybody, in seconds."""
    return [entry.t_ns / 1e9 for entry in recording.entries if entry.kind == "step_committed"]


@pytest.mark.parametrize("how", TAKEOVERS)
def test_another_leads_within_a_lease_and_the_steps_go_on(how: str) -> None:
    recording = ran(f'sim.at(0.5).take_over("{how}"); sim.at(3.0).heal()')
    assert leaders(recording)[0] == "coordinator"
    meanwhile = [at for at in commits(recording) if 0.6 < at < 3.0]
    if how == "workers":  # it keeps its lease, leads nobody, and is not replaced: nothing goes on until the healing
        assert leaders(recording) == ["coordinator"]
        assert meanwhile == []
        return
    assert leaders(recording)[1] == "coordinator-2"
    # A lease, a fifth of it until it is asked for, what ranks need to dial, a view, and a step.
    assert meanwhile[0] < 0.5 + 1.2 * LEASE + 0.5 + 0.5


@pytest.mark.parametrize("what", [each for each in JOURNAL_FAULTS if each != "back"])
def test_a_journal_that_fails_costs_no_step(what: str) -> None:
    recording = ran(f'sim.at(0.5).journal("{what}"); sim.at(2.0).journal("back"); sim.at(3.0).heal()')
    assert len(leaders(recording)) > 1
    assert any(at > 2.5 for at in commits(recording))


def test_a_short_absence_of_the_database_deposes_nobody() -> None:
    recording = ran('sim.at(0.5).journal("away"); sim.at(0.7).journal("back"); sim.at(1.5).heal()')
    assert leaders(recording) == ["coordinator"]


def test_paths_to_the_database_are_paths_like_others() -> None:
    recording = ran('sim.at(0.5).partition({"coordinator"}, {"database"}); sim.at(3.0).heal()')
    assert leaders(recording)[:2] == ["coordinator", "coordinator-2"]


@pytest.mark.parametrize("text", ['sim.at(1.0).take_over("crash")', 'sim.at(1.0).journal("late")'])
def test_one_coordinator_alone_is_not_taken_over_from(text: str) -> None:
    with pytest.raises(LocalError, match="there is one coordinator"):
        run_scenario(scenario(text, settings=replace(SETTINGS, coordinators=1)))


def test_the_same_seed_gives_the_same_run() -> None:
    one, other = (run_seed(1, ranks=3, steps=3, kinds=["coordinator_takeover", "journal"]) for _ in range(2))
    assert one.ok, one.error
    assert one.digest == other.digest


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("change", "found_by", "kind"), TAKEOVER_MUTANTS, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_mutant_is_caught_where_the_rules_pass(
    change: Callable[[Patch], None], found_by: Scenario, kind: str, monkeypatch: Patch
) -> None:
    honest = run_scenario(found_by).error
    assert honest is None, honest
    change(monkeypatch)
    error = run_scenario(found_by).error
    assert error is not None, "the mutant lives"
    assert error.kind == kind, error


@pytest.mark.interpreted
def test_a_leader_of_the_past_refuses_nobody_for_good_as_its_answers_are_confirmed(monkeypatch: Patch) -> None:
    """Without that it would refuse ranks that hold more than the journal as it knows it."""

    def refused() -> list[str]:
        recording = Recording()
        assert run_scenario(RANKS_COME_TO_A_LEADER_OF_THE_PAST, recorder=recording.record).ok
        return [entry.who for entry in recording.entries if entry.kind == "refused"]

    assert refused() == []
    answers_are_not_confirmed(monkeypatch)
    assert refused() == ["worker-0", "worker-1", "worker-2"]


def test_the_database_refuses_what_a_deposed_leader_appends(monkeypatch: Patch) -> None:
    """The scenario that finds the missing fence does bring an append of the past, and it is refused."""
    refused: list[HeldBy] = []
    honest = SimDatabase.append

    def watched(self: SimDatabase, token: int, number: int, record: Any) -> HeldBy | None:
        held = honest(self, token, number, record)
        if held is not None:
            refused.append(held)
        return held

    monkeypatch.setattr(SimDatabase, "append", watched)
    assert run_scenario(A_LEADER_WAKES_UP_WITH_ALL_VOTES).ok
    assert [held.token for held in refused] == [2]


def test_a_record_is_written_once_however_often_it_is_asked_for() -> None:
    class Checker:
        def appended_by(self, token: int, last: int, record: Any) -> None:
            """Nothing is followed here."""

    checker: Any = Checker()
    with World(1) as world:
        database = SimDatabase(world, lease_ns=1_000_000_000, checker=checker)
        database.take("10.0.0.1:4433")
        for _ in range(2):
            assert database.append(1, 1, Seeded(5)) is None
        with pytest.raises(JournalError, match="there is a record 1 already"):
            database.append(1, 1, Proposed(1))
        assert database.read()[0] == 1
