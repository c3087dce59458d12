"""The swarm bites where ranks are behind address translators: what is broken on purpose is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from way_mutants import WAY_MUTANTS

from quicoll.sim.runner import run_scenario

if TYPE_CHECKING:
    from quicoll.sim.scenario.swarm import Scenario

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize(
    ("change", "scenario", "caught_by"), WAY_MUTANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_mutant_of_the_ways_is_caught(
    change: Callable[[pytest.MonkeyPatch], None], scenario: Scenario, caught_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    outcome = run_scenario(scenario)
    assert outcome.error is not None, "the mutant lives"
    assert outcome.error.kind == caught_by, outcome.error


@pytest.mark.parametrize("scenario", [*dict.fromkeys(scenario for _, scenario, _ in WAY_MUTANTS)], ids=str)
def test_a_scenario_with_translators_passes_without_a_mutant(scenario: Scenario) -> None:
    outcome = run_scenario(scenario)
    assert outcome.error is None, outcome.error
