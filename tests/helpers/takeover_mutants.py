"""Scenarios with two coordinators, and mutants of the rules by which they take over from each other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pytest

from quicoll.engine.coordinator_choice import CoordinatorChoice
from quicoll.membership import term
from quicoll.sim import Settings, fleet
from quicoll.sim.database import DatabaseCalls, SimDatabase, SimStore
from quicoll.sim.scenario.language import parse_events
from quicoll.sim.scenario.swarm import Scenario

if TYPE_CHECKING:
    from quicoll.membership.coordinator.history import History
    from quicoll.membership.coordinator.lease import Following, HeldBy, Taken

__all__ = [
    "AN_APPEND_COMES_AFTER_ITS_TERM",
    "A_LEADER_WAKES_UP_WITH_ALL_VOTES",
    "LEASE",
    "LOST_AFTER",
    "RANKS_COME_TO_A_LEADER_OF_THE_PAST",
    "SETTINGS",
    "TAKEOVER_MUTANTS",
    "THE_FIRST_LEADS_AGAIN",
    "answers_are_not_confirmed",
    "scenario",
    "the_old_memory_is_kept",
]

Patch = pytest.MonkeyPatch

LEASE = 0.5
LOST_AFTER = 0.5
SETTINGS = Settings(ranks=3, coordinators=2, lease=LEASE, lost_after=LOST_AFTER, recovery=20.0, limit=60.0)


def scenario(text: str, *, settings: Settings = SETTINGS, steps: int = 4) -> Scenario:
    return Scenario(seed=5, steps=steps, compute_s=0.2, settings=settings, events=parse_events(text))


def the_fence_is_gone(patch: Patch) -> None:
    """An append is taken by whatever leader it comes from."""
    honest = SimDatabase.append

    def generous(self: SimDatabase, token: int, number: int, record: Any) -> HeldBy | None:
        with patch.context() as inside:
            inside.setattr(SimDatabase, "leads", lambda self, token: True)
            return honest(self, token, number, record)

    patch.setattr(SimDatabase, "append", generous)


def answers_are_not_confirmed(patch: Patch) -> None:
    """What rests on the whole journal is told without asking whether another has appended to it."""
    patch.setattr(term, "rests_on_journal", lambda action: False)


def the_coordinator_is_never_changed(patch: Patch) -> None:
    patch.setattr(CoordinatorChoice, "failed", lambda self, *, now_ns: None)
    patch.setattr(CoordinatorChoice, "named", lambda self, leader, *, now_ns: False)


def the_fence_goes_by_name(patch: Patch) -> None:
    """An append is taken from whoever has the lease, by its address: so one of an earlier leadership of it, too."""
    take, append = SimDatabase.take, SimDatabase.append
    holders: dict[tuple[int, int], str] = {}

    def noted(self: SimDatabase, holder: str, following: Following) -> Taken | HeldBy:
        answer = take(self, holder, following)
        holders[id(self), self._token] = self._holder
        return answer

    def by_name(self: SimDatabase, token: int, number: int, record: Any) -> HeldBy | None:
        if holders.get((id(self), token)) == self._holder:
            token = self._token
        return append(self, token, number, record)

    patch.setattr(SimDatabase, "take", noted)
    patch.setattr(SimDatabase, "append", by_name)


def the_old_memory_is_kept(patch: Patch) -> None:
    """A process that leads again goes on from what it knew when it led before, and does not read the journal."""
    reach, load = fleet._reach, SimStore.load
    last: WeakKeyDictionary[Any, SimStore] = WeakKeyDictionary()  # by the loop of the process
    before: WeakKeyDictionary[SimStore, SimStore] = WeakKeyDictionary()

    def noted(database: SimDatabase, host: str) -> tuple[SimStore, DatabaseCalls]:
        store, calls = reach(database, host)
        loop = asyncio.get_running_loop()
        if loop in last:
            before[store] = last[loop]
        last[loop] = store
        return store, calls

    def remembered(self: SimStore) -> History:
        known = before.get(self)
        if self._history is None and known is not None and known._history is not None:
            self._number, self._history = known._number, known._history
        return load(self)

    patch.setattr(fleet, "_reach", noted)
    patch.setattr(SimStore, "load", remembered)


A_LEADER_WAKES_UP_WITH_ALL_VOTES = scenario(
    # The pause is longer than the lease and shorter than what its ranks need to give it up: the votes are waiting.
    'sim.at_vote(2, start=0.3).take_over("pause"); sim.at(4.0).heal()',
    settings=replace(SETTINGS, lost_after=4.0),
)
# Cut off from all, it gives up one lease after it has last tried to renew its own, which another has taken before that.
# In between it is reached again, by ranks that have done steps with the other.
RANKS_COME_TO_A_LEADER_OF_THE_PAST = replace(
    scenario(
        'sim.at(0.47).partition({"coordinator"}, {0, 1, 2}); sim.at(1.2).partition({"coordinator"}, {"database"});'
        'sim.at(5.2).repair({"coordinator"}, {0, 1, 2}); sim.at(5.4).crash("coordinator-2"); sim.at(7.0).heal()',
        settings=replace(SETTINGS, lease=4.0),
        steps=12,
    ),
    compute_s=0.05,
)
# Nobody else could lead, so it leads again itself, as soon as it has given up; its append arrives after that. By then
# one of the ranks is back, and has heard that the step which it voted for is not committed.
AN_APPEND_COMES_AFTER_ITS_TERM = scenario(
    'sim.at(0.2).crash("coordinator-2"); sim.at(0.9).journal("late"); sim.at(3.0).partition({"coordinator"}, {1, 2});'
    "sim.at(12.0).heal()",
    settings=replace(SETTINGS, lease=6.0),
)
# It stands by while another leads, and is the only one left then. Nothing that it knew is true any more.
THE_FIRST_LEADS_AGAIN = scenario(
    'sim.at(0.5).partition({"coordinator"}, {0, 1, 2, "database"}); sim.at(3.0).repair();'
    'sim.at(4.0).crash("coordinator-2"); sim.at(9.0).heal()',
)
THE_LEADER_IS_GONE = scenario(
    # Those that never change stay with who has come back, which takes the lead from the other, but a lease later.
    'sim.at(0.5).take_over("crash"); sim.at(6.0).heal()',
    settings=replace(SETTINGS, lease=4.0, recovery=2.0),
)

TAKEOVER_MUTANTS = (
    (the_fence_is_gone, A_LEADER_WAKES_UP_WITH_ALL_VOTES, "one-leader"),
    (the_coordinator_is_never_changed, THE_LEADER_IS_GONE, "progress"),
    (the_fence_goes_by_name, AN_APPEND_COMES_AFTER_ITS_TERM, "one-decision"),
)
