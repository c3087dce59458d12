"""Shrinking, with failures that are made up: what is needed is known beforehand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quicoll.sim.outcome import Settings
from quicoll.sim.scenario.events import (
    Crash,
    Heal,
    LaneFault,
    MemoryFault,
    PartitionPath,
    Pause,
    Rebind,
    ScenarioEvent,
    SetConditions,
)
from quicoll.sim.scenario.language import parse_events
from quicoll.sim.scenario.shrink import shrink
from quicoll.sim.scenario.swarm import Scenario, generate
from quicoll_transport.sim import AccessLink, Conditions


def has(scenario: Scenario, kind: type) -> bool:
    return any(isinstance(event.fault, kind) for event in scenario.events)


def crash_and_pause(scenario: Scenario) -> str | None:
    return "bug" if has(scenario, Crash) and has(scenario, Pause) else None


def big() -> Scenario:
    text = """
        sim.at(0.1234).partition({0, 1}, {2, 3})
        sim.at(0.2345).conditions(Conditions(loss=0.5, mtu=1300, latency_ns=7000000), {0}, {1, 2, 3})
        sim.at(0.3456).crash(2)
        sim.at(0.4567).hold({0}, {3})
        sim.at(0.5678).pause(1, 0.2345)
        sim.at(0.6789).drift(0, ppm=50)
        sim.at(0.7891).corrupt(3)
        sim.at(1.9876).heal()
    """
    settings = Settings(lost_after=0.5, timeout=5.0, conditions=Conditions(latency_ns=100_000))
    return Scenario(seed=5, steps=10, compute_s=0.0123, settings=settings, events=parse_events(text))


def test_only_what_the_failure_needs_is_left() -> None:
    found = shrink(big(), "bug", crash_and_pause)
    assert found.whole
    assert str(found.scenario) == "sim.at(0.0).crash(2)\nsim.at(0.0).pause(1, 0.2)\nsim.at(1.0).heal()"
    assert found.scenario.steps == 1
    assert found.scenario.ranks == 3  # rank 2 is named
    assert found.scenario.settings == Settings(ranks=3)


def test_the_same_failure_counts_and_no_other() -> None:
    def verdict(scenario: Scenario) -> str | None:
        if scenario.ranks < 4:
            return "other bug"
        return "bug" if has(scenario, PartitionPath) else None

    found = shrink(big(), "bug", verdict)
    assert found.scenario.ranks == 4
    assert found.scenario.faults == 1


def test_fewer_ranks_keep_their_sites_where_the_failure_needs_them() -> None:
    def verdict(scenario: Scenario) -> str | None:
        return "bug" if "south" in scenario.settings.sites else None

    given = big()
    sites = ("north", "south", "north", "south")
    found = shrink(replace(given, settings=replace(given.settings, sites=sites)), "bug", verdict)
    assert found.scenario.settings == Settings(ranks=2, sites=("north", "south"))


def test_hosts_are_shared_where_the_failure_needs_it_and_their_faults_go_with_them() -> None:
    given = big()
    hosts = replace(given.settings, hosts=("one",) * given.ranks)
    events = (ScenarioEvent(0, MemoryFault("worker-0", "full")), *given.events)
    shared = replace(given, settings=hosts, events=events)
    found = shrink(shared, "bug", lambda scenario: "bug" if scenario.settings.hosts else None).scenario
    assert found.settings == Settings(ranks=1, hosts=("one",))
    found = shrink(shared, "bug", lambda scenario: "bug").scenario
    assert not any(isinstance(event.fault, MemoryFault) for event in found.events)
    assert found.settings == Settings(ranks=1)


def test_there_are_as_few_lanes_as_the_failure_needs_and_their_faults_and_providers_go_with_them() -> None:
    given = big()
    lines = 'sim.at(0.1).lane(1, "cut"); sim.at(0.2).lane(2, "kill", only=1)'
    two = replace(given.settings, lanes=2, lane_access=(AccessLink(up=1_000_000),) * 2, long_bytes=70_000)
    given = replace(given, settings=two, events=(*parse_events(lines), *given.events))
    assert shrink(given, "bug", crash_and_pause).scenario.settings == Settings(ranks=3)

    def verdict(scenario: Scenario) -> str | None:
        cut = [event.fault for event in scenario.events if isinstance(event.fault, LaneFault)]
        return "bug" if any(fault.what == "cut" for fault in cut) and scenario.settings.long_bytes else None

    found = shrink(given, "bug", verdict).scenario
    assert found.settings == Settings(ranks=2, lanes=1, long_bytes=70_000)
    assert [str(event) for event in found.events[:-1]] == ['sim.at(0.0).lane(1, "cut")']

    def by_number(scenario: Scenario) -> str | None:
        return "bug" if any(event.fault == LaneFault("worker-2", "kill", 1) for event in scenario.events) else None

    assert shrink(given, "bug", by_number).scenario.settings == Settings(ranks=3, lanes=2)


def test_tiers_and_shared_state_are_left_out_where_the_failure_does_not_need_them() -> None:
    given = big()
    with_tiers = replace(given, settings=replace(given.settings, tiers=True))
    assert shrink(with_tiers, "bug", crash_and_pause).scenario.settings == Settings(ranks=3)

    def verdict(scenario: Scenario) -> str | None:
        return "bug" if scenario.settings.tiers else None

    assert shrink(with_tiers, "bug", verdict).scenario.settings == Settings(ranks=1, tiers=True)


def test_fewer_ranks_are_behind_translators_where_the_failure_needs_them() -> None:
    nats, events = ("symmetric", "full-cone", "1", "0"), "sim.at(0.1).rebind(3); sim.at(0.2).crash('relay')"
    given = replace(big(), settings=replace(big().settings, nats=nats, relay="own", nat_lifetime=2.0))
    given = replace(given, events=(*parse_events(events), *given.events))

    def shared(scenario: Scenario) -> str | None:
        return "bug" if "0" in scenario.settings.nats else None

    assert shrink(given, "bug", shared).scenario.settings == Settings(nats=("symmetric", "", "", "0"))

    def of_relay(scenario: Scenario) -> str | None:
        return "bug" if any(event.fault == Crash("relay") for event in scenario.events) else None

    found = shrink(given, "bug", of_relay).scenario
    assert found.settings == Settings(ranks=1, relay="own")
    assert [event.fault for event in found.events[:-1]] == [Crash("relay")]

    def of_router(scenario: Scenario) -> str | None:
        return "bug" if has(scenario, Rebind) else None

    found = shrink(given, "bug", of_router).scenario
    assert found.settings == Settings(nats=("", "", "", "symmetric"))
    assert shrink(given, "bug", crash_and_pause).scenario.settings == Settings(ranks=3)


def test_the_last_healing_stays() -> None:
    found = shrink(big(), "bug", lambda scenario: "bug")
    assert [type(event.fault) for event in found.scenario.events] == [Heal]
    assert found.scenario.ranks == 1


def test_conditions_and_sides_are_made_plain() -> None:
    def verdict(scenario: Scenario) -> str | None:
        changed = [event.fault for event in scenario.events if isinstance(event.fault, SetConditions)]
        return "bug" if any(fault.conditions.loss and "worker-2" in fault.other for fault in changed) else None

    found = shrink(big(), "bug", verdict).scenario
    assert [event.fault for event in found.events[:-1]] == [
        SetConditions(Conditions(loss=0.5), ("worker-0",), ("worker-2",))
    ]


def test_runs_are_bounded_and_none_is_made_twice() -> None:
    seen: list[Scenario] = []

    def verdict(scenario: Scenario) -> str | None:
        assert scenario not in seen
        seen.append(scenario)
        return crash_and_pause(scenario)

    short = shrink(big(), "bug", verdict, runs=5)
    assert short.runs == len(seen) == 5
    assert not short.whole
    assert crash_and_pause(short.scenario) == "bug"
    seen.clear()
    assert shrink(big(), "bug", verdict).runs == len(seen) < 100


def test_nothing_smaller_fails_and_the_scenario_itself_is_the_answer() -> None:
    scenario = big()
    found = shrink(scenario, "bug", lambda smaller: None)
    assert found.scenario == scenario


@pytest.mark.parametrize("seed", range(10))
def test_one_guilty_event_among_many_is_found(seed: int) -> None:
    scenario = generate(seed)
    extra = ScenarioEvent(50_000_000, Crash("worker-1"))
    events = tuple(sorted((extra, *scenario.events), key=lambda event: event.at_ns))

    def verdict(smaller: Scenario) -> str | None:
        return "bug" if any(event.fault == extra.fault for event in smaller.events) else None

    found = shrink(replace(scenario, events=events), "bug", verdict)
    assert [event.fault for event in found.scenario.events] == [extra.fault, Heal()]
    assert found.scenario.ranks == 2
