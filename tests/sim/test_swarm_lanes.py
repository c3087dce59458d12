"""Lanes in the seeds of the swarm: messages really go by them, what befalls them costs nothing else, mutants show."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from lane_mutants import COSTLY, spoilt_bits_are_taken

from quicoll.cli.main import main
from quicoll.engine.lane import OwnLane
from quicoll.sim.runner import run_scenario
from quicoll.sim.scenario.events import LaneFault
from quicoll.sim.scenario.language import parse_events, parse_settings
from quicoll.sim.scenario.shrink import shrink
from quicoll.sim.scenario.swarm import Scenario, generate

if TYPE_CHECKING:
    from quicoll.sim.outcome import Outcome

pytestmark = pytest.mark.interpreted

WITHIN = 12
"""Seeds in which a mutant shows, of those with faults of lanes alone."""


class Costs:
    """What a run has lost of views and steps before its ranks leave it."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self._leaving = False

    def __call__(self, t_ns: int, kind: str, who: str, what: Any) -> None:
        if kind in ("view_ended", "step_aborted") and not self._leaving:
            self._leaving = what["cause"] == "this node left"
            if not self._leaving:
                self.lost.append(f"{t_ns / 1e9:.4f} s, {who}: {kind}: {what['cause']}")


def lane_seeds() -> Iterator[Scenario]:
    """Seeds in which nothing fails but lanes; but for those in which a lane is slow, and time short.

    Such a lane carries what it is given, and an operation that has two seconds in all does not wait for it.
    """
    for seed in range(1000):
        made = generate(seed, kinds=["lane"])
        slow = any(isinstance(event.fault, LaneFault) and event.fault.what == "slow" for event in made.events)
        if not slow or made.settings.timeout >= 20:
            yield made


def looked_at(scenario: Scenario) -> tuple[Outcome, list[str]]:
    costs = Costs()
    return run_scenario(scenario, recorder=costs), costs.lost


def test_messages_go_by_lanes_in_the_seeds_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    carried: list[int] = []
    send = OwnLane.send

    def counted(self: OwnLane, number: int, view_id: int, node: str, payload: memoryview) -> bool:
        found = send(self, number, view_id, node, payload)
        carried.append(len(payload) if found else 0)
        return found

    monkeypatch.setattr(OwnLane, "send", counted)
    by_seed = []
    for scenario in islice((made for made in map(generate, range(1000)) if made.settings.lanes), 8):
        carried.clear()
        outcome = run_scenario(scenario)
        assert outcome.error is None, outcome.error
        by_seed.append(sum(map(bool, carried)))
    assert sum(map(bool, by_seed)) > len(by_seed) // 2
    assert max(by_seed) > 20


def test_lanes_that_fail_alone_cost_no_view_and_no_step() -> None:
    for scenario in islice(lane_seeds(), WITHIN):
        outcome, lost = looked_at(scenario)
        assert outcome.error is None, (scenario.command, outcome.error)
        assert lost == [], scenario.command


def test_the_swarm_finds_spoilt_bits_of_lanes_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt_bits_are_taken(monkeypatch)
    errors = (run_scenario(scenario).error for scenario in islice(lane_seeds(), WITHIN))
    found = next((error for error in errors if error is not None), None)
    assert found is not None, f"none of {WITHIN} seeds has found it"
    assert found.kind == "worker", found  # it compares what it gets with plain numpy


@pytest.mark.parametrize("change", COSTLY, ids=lambda change: change.__name__)
def test_the_swarm_finds_messages_that_a_lane_takes_along(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what they cost: an operation waits for them until its deadline, and its view ends."""
    change(monkeypatch)
    costs = (looked_at(scenario)[1] for scenario in islice(lane_seeds(), WITHIN))
    assert any(costs), f"none of {WITHIN} seeds has found it"


def test_a_failing_seed_with_lanes_prints_a_command_that_fails_alike(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt_bits_are_taken(monkeypatch)
    failing = next(made for made in lane_seeds() if run_scenario(made).error is not None)
    words = shlex.split(failing.command)
    assert parse_events(words[words.index("--events") + 1]) == failing.events
    assert parse_settings(words[words.index("--settings") + 1], ranks=4) == failing.settings

    def verdict(scenario: Scenario) -> str | None:
        error = run_scenario(scenario).error
        return None if error is None else error.kind

    kind = verdict(failing)
    assert kind is not None
    small = shrink(failing, kind, verdict, runs=12).scenario
    assert small.settings.lanes
    assert any(isinstance(event.fault, LaneFault) for event in small.events)
    for scenario in (failing, small):
        with pytest.raises(SystemExit) as ended:
            main([*shlex.split(scenario.command)[1:], "--shrink-runs", "0"])
        assert ended.value.code == 1
        assert run_scenario(scenario).digest in capsys.readouterr().out
