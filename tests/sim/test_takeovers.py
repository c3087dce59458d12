"""Coordinators that take over from each other, over a simulated database: each loss alone, and mutants of the rules.

The lease core, its shell, the service and the ranks' choice of a coordinator are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from takeover_mutants import (
    A_LEADER_WAKES_UP_WITH_ALL_VOTES,
    AN_APPEND_COMES_AFTER_ITS_TERM,
    LEASE,
    LOST_AFTER,
    RANKS_COME_TO_A_LEADER_OF_THE_PAST,
    SETTINGS,
    TAKEOVER_MUTANTS,
    THE_FIRST_LEADS_AGAIN,
    answers_are_not_confirmed,
    scenario,
    the_old_memory_is_kept,
)

from quicoll.errors import JournalError, LocalError
from quicoll.membership.coordinator.history import Proposed, Seeded
from quicoll.membership.coordinator.lease import TURN
from quicoll.sim.database import SimDatabase
from quicoll.sim.runner import run_scenario, run_seed
from quicoll.sim.scenario.events import JOURNAL_FAULTS, TAKEOVERS
from quicoll.sim.trace.recording import Recording
from quicoll_transport.sim import World

Patch = pytest.MonkeyPatch

if TYPE_CHECKING:
    from quicoll.membership.coordinator.lease import HeldBy
    from quicoll.sim import Settings
    from quicoll.sim.scenario.swarm import Scenario


def ran(text: str, *, settings: Settings = SETTINGS, steps: int = 4, seed: int = 5) -> Recording:
    """Run it; every invariant has to hold."""
    return ran_as_it_is(replace(scenario(text, settings=settings, steps=steps), seed=seed))


def ran_as_it_is(found: Scenario) -> Recording:
    recording = Recording()
    outcome = run_scenario(found, recorder=recording.record)
    assert outcome.error is None, recording.explain(outcome)
    return recording


def ended_coordinators(recording: Recording) -> list[str]:
    """Return which processes of coordinators ended by themselves before the run was over."""
    ended = [entry for entry in recording.entries if entry.kind == "process_ended" and "coordinator" in entry.who]
    return [entry.who for entry in ended if entry.what != "well"]


def stood_by_again(recording: Recording) -> list[str]:
    return [entry.who for entry in recording.entries if entry.kind == "stands_by"]


def leaders(recording: Recording) -> list[str]:
    return [entry.who for entry in recording.entries if entry.kind == "leads"]


def commits(recording: Recording) -> list[float]:
    """Return when a step was committed by anybody, in seconds."""
    return [entry.t_ns / 1e9 for entry in recording.entries if entry.kind == "step_committed"]


def gaps(recording: Recording) -> list[float]:
    """Return the times between commits, in seconds."""
    at = sorted(commits(recording))
    return [later - sooner for sooner, later in pairwise(at)]


@pytest.mark.parametrize("how", TAKEOVERS)
def test_another_leads_within_a_lease_and_the_steps_go_on(how: str) -> None:
    recording = ran(f'sim.at(0.5).take_over("{how}"); sim.at(3.0).heal()')
    assert leaders(recording)[0] == "coordinator"
    meanwhile = [at for at in commits(recording) if 0.6 < at < 3.0]
    assert leaders(recording)[1] == "coordinator-2"
    # A lease, a fifth of it until it is asked for, what ranks need to dial, a view, and a step. One that reaches the
    # database and no rank has to find that out before (lost_after), and says so with its next renewal.
    unlinked = LOST_AFTER + LEASE / 4 if how == "workers" else 0.0
    assert meanwhile[0] < 0.5 + unlinked + 1.2 * LEASE + 0.5 + 0.5


def test_of_a_network_that_is_cut_in_two_the_side_with_the_view_goes_on() -> None:
    recording = ran(
        'sim.at(0.5).partition({"coordinator"}, {2}); sim.at(0.5).partition({2}, {0, 1}); sim.at(6.0).heal()', steps=20
    )
    assert leaders(recording) == ["coordinator"]
    assert max(gap for gap in gaps(recording) if gap) < 2.0


def test_a_leader_with_fewer_nodes_than_another_and_no_view_is_taken_from() -> None:
    recording = ran(
        'sim.at(0.5).partition({"coordinator"}, {0, 1}); sim.at(0.5).partition({"coordinator-2"}, {2});'
        "sim.at(6.0).heal()",
        steps=20,
    )
    assert leaders(recording)[:2] == ["coordinator", "coordinator-2"]
    assert max(gap for gap in gaps(recording) if gap) < LOST_AFTER + 1.45 * LEASE + 1.0


def test_where_neither_side_has_a_quorum_they_take_turns_and_nothing_is_decided() -> None:
    recording = ran(
        'sim.at(0.5).partition({"coordinator"}, {0, 1}); sim.at(0.5).partition({"coordinator-2"}, {2, 3});'
        "sim.at(12.0).heal()",
        settings=replace(SETTINGS, ranks=4),
    )
    before = [entry.t_ns / 1e9 for entry in recording.entries if entry.kind == "leads" and entry.t_ns < 12e9]
    assert 2 <= len(before) <= 2 + 11.5 / (TURN * LEASE)
    assert [at for at in commits(recording) if 1.5 < at < 12.0] == []


@pytest.mark.parametrize("others", ["", 'sim.at(0.5).partition({"coordinator-2"}, {0, 1, 2});'])
def test_a_job_whose_nodes_reach_nobody_or_that_has_none_changes_no_leader(others: str) -> None:
    cut = f'sim.at(0.5).partition({{"coordinator"}}, {{0, 1, 2}}); {others}'
    gone = "".join(f"sim.at(0.5).crash({rank});" for rank in range(3))
    recording = ran(f"{cut if others else gone} sim.at(8.0).heal()")
    assert [entry.who for entry in recording.entries if entry.kind == "leads" and entry.t_ns < 8e9] == ["coordinator"]


THREE = replace(SETTINGS, coordinators=3)


@pytest.mark.parametrize("second", ["crash", "workers", "database"])
def test_a_third_leads_where_the_second_is_lost_as_well(second: str) -> None:
    recording = ran(
        f'sim.at(0.5).take_over("crash"); sim.at(4.0).take_over("{second}"); sim.at(12.0).heal()',
        settings=THREE,
        steps=45,
    )
    assert len(set(leaders(recording)[:3])) == 3, leaders(recording)
    # The ranks dial the one that is gone for good in between, which takes as long as a link is tried.
    assert any(4.2 < at < 4.0 + LOST_AFTER + 1.45 * LEASE + 2 * 2.1 + 1.0 for at in commits(recording))


def test_ranks_that_reach_only_the_last_of_three_are_found_there() -> None:
    recording = ran(
        'sim.at(0.5).partition({"coordinator", "coordinator-2"}, {0, 1, 2}); sim.at(10.0).heal()',
        settings=THREE,
        steps=20,
    )
    assert leaders(recording)[:2] == ["coordinator", "coordinator-3"]
    assert max(gap for gap in gaps(recording) if gap) < LOST_AFTER + 1.45 * LEASE + 2 * 2.1 + 1.0


ALL = "all"


@pytest.mark.parametrize("seed", range(5, 8))
@pytest.mark.parametrize("how", [ALL, "workers", "database", "pause"])
def test_a_leader_that_is_deposed_stands_by_and_leads_again_in_the_same_process(how: str, seed: int) -> None:
    lost = 'partition({"coordinator"}, {0, 1, 2, "database"})' if how == ALL else f'take_over("{how}")'
    recording = ran(
        f'sim.at(0.5).{lost}; sim.at(3.0).repair(); sim.at(4.0).crash("coordinator-2"); sim.at(7.0).heal()',
        steps=20,
        seed=seed,
    )
    assert leaders(recording)[:3] == ["coordinator", "coordinator-2", "coordinator"]
    assert stood_by_again(recording)[:1] == ["coordinator"]
    assert ended_coordinators(recording) == []
    # Of the three it was the leader for some time each, and steps were committed under it.
    assert all(any(begin < at < end for at in commits(recording)) for begin, end in ((0, 0.5), (2, 4), (5, 7)))


@pytest.mark.parametrize("seed", range(5, 9))
def test_three_coordinators_lead_in_turns_each_in_one_process(seed: int) -> None:
    cuts = "".join(f'sim.at({at}).take_over("database"); sim.at({at + 2.5}).repair();' for at in (0.5, 4.0, 7.5, 11.0))
    recording = ran(f"{cuts} sim.at(15.0).heal()", settings=THREE, steps=60, seed=seed)
    led = leaders(recording)
    assert len(led) >= 5
    assert len(set(led)) < len(led), "somebody has led twice"
    assert stood_by_again(recording) == led[:-1]
    assert ended_coordinators(recording) == []
    assert max(gap for gap in gaps(recording) if gap) < 1.45 * LEASE + 2 * 2.1 + 1.0


def heard(recording: Recording) -> set[str]:
    """Return what ranks were told when their links to a coordinator ended, as far as it says who leads."""
    lost = [entry for entry in recording.entries if entry.kind == "peer_lost" and entry.who.startswith("worker")]
    words = [str(entry.what) for entry in lost]
    return {each.partition("(")[2].partition(")")[0] for each in words if "does not lead" in each}


def test_its_former_members_hear_that_it_leads_no_more_and_who_does() -> None:
    nobody = ran('sim.at(0.5).take_over("database"); sim.at(3.0).heal()')
    assert heard(nobody) == {"this coordinator does not lead any more: it does not know who does"}
    known = ran_as_it_is(A_LEADER_WAKES_UP_WITH_ALL_VOTES)
    assert heard(known) == {"this coordinator does not lead any more: 10.0.0.5:4433 leads"}


def test_an_append_that_arrives_when_its_coordinator_leads_again_is_refused(monkeypatch: Patch) -> None:
    """Of the same process, and by the token alone: nobody else has appended anything."""
    arrived: list[tuple[int, str]] = []
    honest = SimDatabase.append

    def watched(self: SimDatabase, token: int, number: int, record: Any) -> HeldBy | None:
        held = honest(self, token, number, record)
        if held is not None:
            arrived.append((token, self.holder))
        return held

    monkeypatch.setattr(SimDatabase, "append", watched)
    recording = ran_as_it_is(AN_APPEND_COMES_AFTER_ITS_TERM)
    assert leaders(recording)[:2] == ["coordinator", "coordinator"]
    assert arrived == [(1, "10.0.0.1:4433")]


HOURS = 3 * 3600
CLOCKS = {
    "forth": f'sim.at(0.6).step_wall("WHO", {HOURS})',
    "back": f'sim.at(0.6).step_wall("WHO", -{HOURS})',
    "leap": f'sim.at(0.6).leap("WHO", {HOURS})',
    "fast": 'sim.at(0.6).drift("WHO", ppm=9000000)',
    "slow": 'sim.at(0.6).drift("WHO", ppm=-900000)',
}
"""Times of day that are set by hours, and clocks that leap, or go ten times as fast or at a tenth of the pace."""

WRONG_CLOCKS = [
    ("coordinator", ("forth", "back"), ""),
    ("coordinator", ("leap",), ""),
    ("coordinator", ("fast",), ""),
    ("coordinator", ("slow",), ""),
    ("coordinator-2", ("back", "fast"), "crash"),
    ("coordinator-2", ("forth", "slow"), "crash"),
    ("database", ("forth",), ""),
    ("database", ("back",), ""),
    ("database", ("back",), "crash"),
    ("database", ("fast",), "pause"),
    ("database", ("slow",), ""),
]


@pytest.mark.parametrize(("who", "clocks", "lost"), WRONG_CLOCKS)
def test_a_clock_that_is_wrong_costs_time_and_no_step(who: str, clocks: tuple[str, ...], lost: str) -> None:
    text = "; ".join(CLOCKS[clock].replace("WHO", who) for clock in clocks)
    lost = f'; sim.at(1.1).take_over("{lost}")' if lost else ""
    recording = ran(f"{text}{lost}; sim.at(6.0).heal()")
    assert any(1.2 < at < 6.0 for at in commits(recording)), "nothing was committed while the clock was wrong"


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


@pytest.mark.interpreted
def test_a_leader_that_leads_again_refuses_nobody_for_good_as_it_reads_the_journal_anew(monkeypatch: Patch) -> None:
    def refused() -> list[str]:
        recording = ran_as_it_is(THE_FIRST_LEADS_AGAIN)
        assert leaders(recording)[:3] == ["coordinator", "coordinator-2", "coordinator"]
        return [entry.who for entry in recording.entries if entry.kind == "refused"]

    assert refused() == []
    the_old_memory_is_kept(monkeypatch)
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
