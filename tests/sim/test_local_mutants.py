"""Mutants of the carrier in shared memory: each is found by a scenario of ranks on one host, or by a named test."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from local_mutants import LOCAL_MUTANTS
from named_tests import Below, run_named

import quicoll.local.small
from quicoll.engine.rows import CallRow
from quicoll.local.layout import PUBLISHED

if TYPE_CHECKING:
    from quicoll.local.small import SmallCall
    from quicoll.sim.outcome import Outcome

Patch = pytest.MonkeyPatch


def a_call_is_counted_before_it_is_written(patch: Patch) -> None:
    """As where stores are seen in another order than they were made."""
    publish = quicoll.local.small.SmallCalls._publish

    def hasty(self: Any) -> None:
        memory = self._memory
        if self._waiting and self._has_room(self.published):
            memory.store(PUBLISHED, self.published + 1)
        publish(self)

    patch.setattr(quicoll.local.small.SmallCalls, "_publish", hasty)


def a_room_changes_hands_before_the_others_are_through(patch: Patch) -> None:
    patch.setattr(CallRow, "_at_rest", lambda self: not self.under_way)


def who_publishes_looks_at_the_others_before_the_fence(patch: Patch) -> None:
    take, publish = CallRow.take, CallRow.publish
    seen: list[SmallCall] = []

    def hasty(self: CallRow) -> bool:
        is_open = publish(self)
        if is_open:
            seen.extend(take(self))
        return is_open

    def late(self: CallRow) -> list[SmallCall]:
        found, seen[:] = list(seen), []
        return found

    patch.setattr(CallRow, "publish", hasty)
    patch.setattr(CallRow, "take", late)


BELOW = (
    Below(
        a_room_changes_hands_before_the_others_are_through,
        "unit/local/test_rooms.py",
        "test_a_room_that_a_late_rank_still_reads_is_not_given_away",
    ),
    Below(
        who_publishes_looks_at_the_others_before_the_fence,
        "unit/engine/test_neighbourhood.py",
        "test_the_last_two_that_publish_in_one_moment_both_see_that_all_have",
    ),
    Below(
        a_call_is_counted_before_it_is_written,
        "unit/local/test_small.py",
        "test_every_rank_gets_what_all_gave_in_whatever_order_the_stores_are_seen",
    ),
)


@pytest.mark.parametrize(
    ("change", "scenario", "caught_by"), LOCAL_MUTANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_mutant_of_the_carrier_is_caught(
    change: Callable[[Patch], None], scenario: Callable[[], Outcome], caught_by: str, monkeypatch: Patch
) -> None:
    change(monkeypatch)
    error = scenario().error
    assert error is not None, "the mutant lives"
    assert error.kind == caught_by, error


@pytest.mark.parametrize("scenario", [scenario for _, scenario, _ in LOCAL_MUTANTS], ids=lambda value: value.__name__)
def test_a_scenario_of_one_host_passes_without_a_mutant(scenario: Callable[[], Outcome]) -> None:
    error = scenario().error
    assert error is None, error


@pytest.mark.parametrize("mutant", BELOW, ids=lambda mutant: mutant.change.__name__)
def test_the_named_test_of_memory_fails_with_the_mutant_and_passes_without(mutant: Below, monkeypatch: Patch) -> None:
    run_named(mutant)
    mutant.change(monkeypatch)
    with pytest.raises(AssertionError):
        run_named(mutant)
