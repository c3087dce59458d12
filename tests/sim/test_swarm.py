"""Scenarios from seeds, and as text: the same in every process, and what is printed is what is accepted."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from swarm_seeds import chosen, found_in, meeting

from quicoll.errors import LocalError
from quicoll.lanes.memory import LARGEST, LEAST
from quicoll.sim.operations import OPERATIONS
from quicoll.sim.outcome import Settings
from quicoll.sim.scenario import swarm
from quicoll.sim.scenario.events import (
    LANE_FAULTS,
    MEMORY_FAULTS,
    Crash,
    Fault,
    Forge,
    Heal,
    JournalFault,
    LaneFault,
    LieTo,
    MemoryFault,
    Restart,
    ScaleTo,
    ScenarioEvent,
    SetConditions,
    TakeOver,
    kinds_of,
    newcomers,
)
from quicoll.sim.scenario.language import events_source, parse_events, parse_settings, settings_source
from quicoll.sim.scenario.schedule import FaultSchedule
from quicoll.sim.scenario.swarm import FAULT_KINDS, Scenario, generate, parse_kinds
from quicoll.sim.scenario.ways import WAY_KINDS
from quicoll.sim.translators import opens
from quicoll_transport.sim import AccessLink, Conditions, NatKind

SEEDS = range(300)

EVERY_FAULT = """
sim.at(0.1).partition({0, 1}, {"coordinator", 2})
sim.at(0.1).partition({0}, {1}, one_way=True)
sim.at(0.1).unplug(1, 2)
sim.at(0.2).hold({0}, {"other-host"})
sim.at(0.3).repair()
sim.at(0.3).repair({0}, {1, 2})
sim.at(0.4).crash(0)
sim.at(0.4).crash("coordinator", power=True)
sim.at(0.5).restart("coordinator")
sim.at(0.6).pause(1)
sim.at(0.6).pause(1, 0.25)
sim.at(0.7).resume(1)
sim.at(0.8).slow(2, 0.0005)
sim.at(0.9).drift(2, ppm=-200)
sim.at(1.0).leap(3, 1.5)
sim.at(1.1).step_wall(3, 60.0)
sim.at(1.1).step_wall(3, -3600.0)
sim.at(1.2).conditions(Conditions(loss=0.05, burst=8.0, mtu=1300))
sim.at(1.2).conditions(Conditions(latency_ns=1000000, bytes_per_second=20000), {0}, {"coordinator", 1})
sim.at(1.3).corrupt(0)
sim.at(1.3).corrupt(0, times=3)
sim.at(1.3).rebind(2)
sim.at(1.4).disk("coordinator", "fsync")
sim.at(1.4).disk(1, "power")
sim.at(1.4).memory(1, "kill", after=7)
sim.at(1.4).memory(2, "full")
sim.at(1.4).lane(1, "cut")
sim.at(1.4).lane(2, "kill", only=0)
sim.at(1.4).engine(1, "hang")
sim.at(1.5).join(4)
sim.at(1.5).leave(1)
sim.at(1.5).scale(8)
sim.at(1.5).scale(2, leave={0, 3})
sim.at(1.6).terminate("coordinator")
sim.at(1.6).lie(1, 2)
sim.at(1.7).alarm(1, 0.25)
sim.at(1.7).forge(1, "manifest")
sim.at(1.7).take_over("database")
sim.at(1.7).journal("late")
sim.at(1.7).meddle("misdirect")
sim.at_vote(2, start=1.8).crash("coordinator")
sim.at_vote(2, start=0.0, after=0.0005).partition({2}, {"coordinator"}, one_way=True)
sim.at(0.123456789).heal()
"""


def test_every_kind_of_event_is_read_as_it_is_printed() -> None:
    lines = EVERY_FAULT.strip().splitlines()
    events = parse_events(EVERY_FAULT)
    assert [str(event) for event in events] == lines
    assert parse_events(events_source(events)) == events
    assert {type(event.fault) for event in events} == set(Fault.__args__)


def test_every_generated_scenario_is_read_as_it_is_printed() -> None:
    for seed in SEEDS:
        made = generate(seed)
        assert parse_events(str(made)) == made.events
        assert parse_settings(settings_source(made.settings), ranks=made.ranks) == made.settings


def test_statements_are_chained_repeated_and_parted_by_lines_or_semicolons() -> None:
    found = parse_events(
        "sim.every(0.5, start=1, until=2.2).pause(1, 0.1).crash(2)\nsim.at(3).heal(); sim.at(4).repair()"
    )
    assert [str(event) for event in found] == [
        "sim.at(1.0).pause(1, 0.1)",
        "sim.at(1.5).pause(1, 0.1)",
        "sim.at(2.0).pause(1, 0.1)",
        "sim.at(1.0).crash(2)",
        "sim.at(1.5).crash(2)",
        "sim.at(2.0).crash(2)",
        "sim.at(3.0).heal()",
        "sim.at(4.0).repair()",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "sim.at(1.0).hold({0, 1}, {1, 2})",
        "sim.at(1.0).partition(0, 0)",
        "__import__('os').system('true')",
        "sim.at(1.0).crash(__import__('os'))",
        "sim.at(1.0).__class__()",
        "sim.at(1.0).fault(1)",
        "sim.at(1.0)._add(1)",
        "sim.at(1.0).crash(open)",
        "sim.at(1.0).crash(*[1])",
        "sim.at(1.0).crash(**{'node': 1})",
        "sim.at(1.0).crash(1 + 1)",
        "sim.run().crash(1)",
        "other.at(1.0).crash(1)",
        "x = sim.at(1.0).crash(1)",
        "sim.at(1.0).crash",
        "sim.at(1.0).crash()",
        "sim.at('now').crash(1)",
        "sim.at(-1.0).crash(1)",
        "sim.at(1.0).pause(1, 1e400)",
        "sim.at(1.0).step_wall(1, -1e400)",
        "sim.at(1.0).drift(1, ppm=10000000)",
        "sim.at(1.0).conditions(Conditions(loss=2.0))",
        "sim.at(1.0).conditions(Settings())",
        "sim.every(0.001, start=0, until=1000000).heal()",
        "sim.at(1.0).crash(1",
        "sim.at_vote('coordinator').crash(1)",
        "sim.at(1.0).leave('coordinator')",
        "sim.at(1.0).scale(0)",
        "sim.at(1.0).scale(2, leave='coordinator')",
        "sim.at(1.0).lie(1, 1)",
        "sim.at(1.0).alarm(1, 1e-6)",
        "sim.at(1.0).forge(1, 'everything')",
        "sim.at(1.0).forge('coordinator', 'state')",
        "sim.at(1.0).leave('coordinator-2')",
        "sim.at(1.0).take_over('gently')",
        "sim.at(1.0).journal('everything')",
        "sim.at(1.0).meddle('everything')",
        "(" * 5000,
        "import os",
    ],
)
def test_text_that_is_no_scenario_is_refused_and_nothing_of_it_runs(text: str) -> None:
    with pytest.raises(LocalError):
        parse_events(text)


def test_access_links_are_written_and_read_like_other_settings() -> None:
    links = (AccessLink(up=6_250_000, down=25_000_000, up_queue=1 << 20), AccessLink())
    for settings in (Settings(ranks=4, access=links), Settings(ranks=4, access=links[:1])):
        assert parse_settings(settings_source(settings), ranks=4) == settings


@pytest.mark.parametrize(
    "text",
    [
        "Settings(access=(1,))",
        "Settings(access=AccessLink(up=1))",
        "Settings(access=(AccessLink(),) * 3)",
        "Settings(access=(AccessLink(), AccessLink(), AccessLink(), AccessLink(), AccessLink()))",
        "Settings(access=(AccessLink(up=0),))",
    ],
)
def test_access_links_are_a_tuple_of_them_and_no_more_than_workers(text: str) -> None:
    with pytest.raises(LocalError):
        parse_settings(text, ranks=4)


@pytest.mark.parametrize("text", ["Settings(ranks=3)", "Settings(nothing=3)", "dict(a=1)", "Settings(timeout=f())"])
def test_settings_are_settings_and_nothing_else(text: str) -> None:
    with pytest.raises(LocalError):
        parse_settings(text, ranks=4)


def test_a_seed_gives_one_scenario_in_every_process() -> None:
    program = "from quicoll.sim.scenario.swarm import generate\nfor seed in range(40): print(generate(seed).command)"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [generate(seed).command for seed in range(40)]


def test_scenarios_are_in_order_end_with_a_healing_and_keep_to_their_nodes() -> None:
    for ranks in (1, 2, 5):
        for seed in SEEDS:
            made = generate(seed, ranks=ranks)
            assert isinstance(made.events[-1].fault, Heal)
            assert list(made.events) == sorted(made.events, key=lambda event: event.at_ns)
            assert made.events[-1].at_ns < 20_000_000_000
            count = ranks + made.settings.spares
            known = ["coordinator", *(f"worker-{rank}" for rank in range(count)), *newcomers(made.events, count)]
            known += ["relay"] if made.settings.relay == "own" else []
            for event in made.events:
                fault = event.fault
                named = [
                    getattr(fault, "node", "coordinator"),
                    getattr(fault, "to", "coordinator"),
                    event.voter or "coordinator",
                    *getattr(fault, "one", ()),
                    *getattr(fault, "other", ()),
                ]
                assert all(name in known for name in named)


def test_each_seed_enables_about_half_of_the_kinds_and_all_kinds_appear() -> None:
    seen: dict[str, int] = {}
    calm = 0
    for seed in SEEDS:
        made = generate(seed)
        for kind in found_in(made):
            seen[kind] = seen.get(kind, 0) + 1
        calm += made.faults == 0
    assert set(FAULT_KINDS) <= set(seen)
    assert min(seen[kind] for kind in FAULT_KINDS) >= 5
    assert calm < len(SEEDS) // 20


def test_the_seeds_of_make_sim_meet_every_fault_operation_and_algorithm_again_and_again() -> None:
    """What one of them shows by chance the others show as well; which faults meet is more than four pairs of five."""
    counted: Counter[str] = Counter()
    together: set[tuple[str, str]] = set()
    seeds = chosen()
    for found in map(meeting, seeds):
        counted.update(found.things)
        together |= found.pairs
    every = [
        *(f"fault {kind}" for kind in FAULT_KINDS),
        *(f"operation {name}" for name in OPERATIONS),
        *(f"algorithm {name}" for name in ("auto", "direct", "tree", "exchange", "hierarchical")),
        *("sites 0", "sites 2", "sites 3", "groups True", "groups False", "at once True", "at once False"),
        *("nats True", "nats False", "relay own", "relay coordinator"),
        *("lanes 0", "lanes 1", "lanes 2"),
    ]
    assert {name: counted[name] for name in every if counted[name] < 5} == {}
    assert len(together) > 0.8 * math.comb(len(FAULT_KINDS), 2)
    assert len(set(seeds)) == len(seeds) < 60, "make sim takes a minute"


def test_make_sim_takes_these_seeds() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "sim --seeds $$($(BIN)/python tests/helpers/swarm_seeds.py) " in makefile


def test_only_the_kinds_asked_for_are_injected() -> None:
    for kind in FAULT_KINDS:
        ends = {"heal", "repair", "resume", "calm", "restart", "slow", "drift", "alarm"}
        for seed in range(20):
            made = generate(seed, kinds=[kind])
            found = found_in(made)
            begins = {
                "restart": {"crash"},
                "power": {"coordinator_crash"},
                "clock_back": {"crash", "coordinator_crash", "wall"},
                "forge": {"crash"},
            }.get(kind, set())
            assert found <= ends | {kind} | begins
            assert found & {kind} or made.faults == 0 or kind == "power"


def test_settings_that_are_given_are_kept() -> None:
    given = Settings(ranks=9, lost_after=3.0)
    made = generate(7, ranks=3, settings=given)
    assert made.settings == Settings(ranks=3, lost_after=3.0)
    assert generate(7, settings=Settings(coordinators=3)).settings == Settings(coordinators=3)


def test_several_coordinators_change_nothing_else_of_a_seed() -> None:
    others = [kind for kind in FAULT_KINDS if kind not in ("coordinator_takeover", "journal")]
    several = three = 0
    for seed in SEEDS:
        made, without = generate(seed), generate(seed, kinds=others)
        losses = [event for event in made.events if isinstance(event.fault, TakeOver | JournalFault)]
        several += bool(losses)
        three += made.settings.coordinators == 3
        assert (made.settings.coordinators > 1) is bool(losses)
        assert replace(made.settings, coordinators=1, lease=Settings().lease) == without.settings
        assert losses or made == without
        assert [event for event in made.events[:-1] if event not in losses] == list(without.events[:-1])
    assert len(SEEDS) // 5 < several < len(SEEDS) // 3
    assert several // 8 < three < several // 2


def test_a_seventh_of_the_seeds_have_workers_that_stand_by_and_most_of_them_warm_ones() -> None:
    drawn = [generate(seed).settings for seed in range(200)]
    some = [settings for settings in drawn if settings.spares]
    assert 15 < len(some) < 45
    assert {(settings.spares, settings.warm_spares) for settings in some} == {(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)}
    assert generate(3, kinds=()).settings.spares == 0


def test_tiers_change_nothing_else_of_a_seed_and_are_in_none_with_a_forger(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [generate(seed) for seed in SEEDS]
    some = [scenario for scenario in made if scenario.settings.tiers]
    assert len(SEEDS) // 12 < len(some) < len(SEEDS) // 6
    assert not any(isinstance(event.fault, Forge) for scenario in some for event in scenario.events)
    assert not generate(some[0].seed, kinds=()).settings.tiers
    monkeypatch.setattr(swarm, "_tiers", lambda seed, wanted: False)
    for scenario in made:
        assert generate(scenario.seed) == replace(scenario, settings=replace(scenario.settings, tiers=False))


def test_half_of_the_seeds_have_sites_in_several_ways() -> None:
    for ranks in (2, 4, 5):
        drawn = [generate(seed, ranks=ranks).settings.sites for seed in SEEDS]
        some = [sites for sites in drawn if sites]
        assert len(SEEDS) // 3 < len(some) < 2 * len(SEEDS) // 3
        assert all(len(sites) == ranks and len(set(sites)) > 1 for sites in some)
    assert {len(set(sites)) for sites in some} == {2, 3}
    assert ("north", "north", "north", "south", "south") in some
    assert any(sites[0] == sites[2] != sites[1] for sites in some)
    assert generate(3, ranks=1).settings.sites == generate(3, settings=Settings()).settings.sites == ()


def test_sites_change_nothing_else_of_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [generate(seed) for seed in SEEDS]
    monkeypatch.setattr(swarm, "_sites", lambda seed, ranks: ())
    for scenario in made:
        without = generate(scenario.seed)
        assert without.settings.sites == ()
        assert without == replace(scenario, settings=replace(scenario.settings, sites=()))


def test_an_operator_changes_nothing_else_of_a_seed() -> None:
    others = [kind for kind in FAULT_KINDS if kind != "scale"]
    asking = 0
    for seed in SEEDS:
        made, without = generate(seed), generate(seed, kinds=others)
        requests = [event for event in made.events if isinstance(event.fault, ScaleTo)]
        asking += bool(requests)
        assert made.settings == without.settings
        assert requests or made == without
        assert [event for event in made.events[:-1] if event not in requests] == list(without.events[:-1])
    assert len(SEEDS) // 10 < asking < len(SEEDS) // 4


def test_a_forger_changes_nothing_else_of_a_seed_and_is_its_liar_where_it_has_one() -> None:
    """A seed without one, three of four, is what it was before there were any."""
    kinds = [kind for kind in FAULT_KINDS if kind != "scale"]  # which a seed has only where it has no forger
    others = [kind for kind in kinds if kind != "forge"]
    forging = 0
    for seed in SEEDS:
        made, without = generate(seed, kinds=kinds), generate(seed, kinds=others)
        forgers = [event for event in made.events if isinstance(event.fault, Forge)]
        if not forgers:
            assert made == without
            continue
        forging += 1
        assert made.settings == replace(without.settings, tiers=False)  # which no seed with a forger has
        left = list(made.events)
        for event in without.events[:-1]:
            left.remove(event)  # which fails where it is not there
        assert {type(event.fault) for event in left} == {Forge, Crash, Restart, Heal}
        (forger,) = {event.fault.node for event in forgers}
        assert all(event.fault.node != forger for event in left if isinstance(event.fault, Crash | Restart))
        liars = [event.fault.node for event in made.events if isinstance(event.fault, LieTo)]
        assert not liars or forger in liars
    assert len(SEEDS) // 5 < forging < len(SEEDS) // 3
    assert all(
        any(isinstance(event.fault, Forge) for event in generate(seed, kinds=["forge"]).events) for seed in SEEDS
    )


def test_hosts_that_are_shared_change_nothing_else_of_a_seed() -> None:
    others = [kind for kind in FAULT_KINDS if kind != "memory"]
    some: list[Scenario] = []
    for seed in range(400):
        made, without = generate(seed), generate(seed, kinds=others)
        assert without.settings.hosts == ()
        assert replace(made.settings, hosts=()) == without.settings
        if not made.settings.hosts:
            assert made == without
            continue
        some.append(made)
        left = list(made.events[:-1])
        for event in without.events[:-1]:
            left.remove(event)  # which fails where it is not there
        assert {type(event.fault) for event in left} == {MemoryFault}
    assert 400 // 10 < len(some) < 400 // 5
    assert {made.settings.hosts.count("one") for made in some} == {2, 3, 4}
    assert not any(made.settings.nats for made in some)
    faults = [event.fault for made in some for event in made.events if isinstance(event.fault, MemoryFault)]
    assert {fault.what for fault in faults} == set(MEMORY_FAULTS)
    assert (
        generate(3, ranks=1, kinds=["memory"]).settings.hosts == generate(3, settings=Settings()).settings.hosts == ()
    )


def test_lanes_change_nothing_else_of_a_seed() -> None:
    others = [kind for kind in FAULT_KINDS if kind != "lane"]
    usual = {"lanes": 0, "lane_access": (), "long_bytes": 0}
    some: list[Scenario] = []
    for seed in range(400):
        made, without = generate(seed), generate(seed, kinds=others)
        assert without.settings.lanes == without.settings.long_bytes == 0
        if not made.settings.lanes:
            assert made == without
            continue
        some.append(made)
        assert replace(made.settings, chunk_bytes=without.settings.chunk_bytes, **usual) == without.settings
        left = list(made.events[:-1])
        for event in without.events[:-1]:
            left.remove(event)  # which fails where it is not there
        assert {type(event.fault) for event in left} == {LaneFault}
    assert 400 // 7 < len(some) < 400 // 4
    assert {made.settings.lanes for made in some} == {1, 2}
    assert {len(made.settings.lane_access) for made in some} == {0, 1, 2}
    assert any(made.settings.hosts for made in some)
    assert any(made.settings.nats for made in some)
    assert any(isinstance(event.fault, LieTo) for made in some for event in made.events)
    faults = [event.fault for made in some for event in made.events if isinstance(event.fault, LaneFault)]
    assert {fault.what for fault in faults} == set(LANE_FAULTS)
    assert {fault.only for fault in faults} == {None, 0, 1}
    assert generate(3, ranks=1, kinds=["lane"]).settings.lanes == generate(3, settings=Settings()).settings.lanes == 0


def test_messages_of_seeds_with_lanes_are_long_enough_for_them_and_not_longer_than_what_gets_through() -> None:
    made = [generate(seed, kinds=["lane", "loss", "latency"]).settings for seed in range(300)]
    some = [settings for settings in made if settings.lanes]
    assert all(LEAST <= settings.long_bytes <= LARGEST for settings in some)
    assert max(settings.long_bytes for settings in some) > 4 << 20
    assert {settings.long_bytes > settings.chunk_bytes for settings in some} == {True, False}
    for settings in some:
        if settings.conditions.loss or settings.lane_access or settings.timeout < 5:
            assert settings.long_bytes < 200 << 10


def test_translators_and_relays_change_nothing_else_of_a_seed() -> None:
    kinds = [kind for kind in FAULT_KINDS if kind != "memory"]  # ranks share hosts only where there are no translators
    others = [kind for kind in kinds if kind not in WAY_KINDS]
    some: list[Scenario] = []
    for seed in range(600):
        made, without = generate(seed, kinds=kinds), generate(seed, kinds=others)
        assert without.settings.nats == ()
        plain = replace(made.settings, nats=(), relay="", nat_lifetime=Settings().nat_lifetime)
        assert plain == without.settings
        if not made.settings.nats:
            assert made == without
            continue
        some.append(made)
        left = list(made.events[:-1])
        for event in without.events[:-1]:
            left.remove(event)  # which fails where it is not there
        of_ways = {"rebind", "relay", "repair", "restart", "calm"}
        assert all(of_ways.issuperset(kinds_of(event.fault, made.settings.conditions)) for event in left)
    assert 600 // 14 < len(some) < 600 // 8
    assert Counter(len(made.settings.nats) == made.ranks + made.settings.spares for made in some) == {True: len(some)}
    entries = Counter(entry for made in some for entry in made.settings.nats)
    assert {kind.value for kind in NatKind} | {"", "0"} <= set(entries)
    assert {made.settings.relay for made in some} == {"", "own", "none"}
    assert any(made.settings.nat_lifetime < made.settings.lost_after for made in some)


def test_there_is_no_relay_only_where_every_pair_can_do_without() -> None:
    for seed in range(200):
        settings = generate(seed, kinds=WAY_KINDS).settings
        pairs = combinations(range(settings.ranks + settings.spares), 2)
        assert settings.nats
        assert settings.relay != "none" or all(opens(settings.nats, *pair) for pair in pairs)


@pytest.mark.parametrize("sites", [["north", "south"], "ab", ("north", ""), ("north", 3), ("north",)])
def test_sites_are_a_name_for_each_rank(sites: Any) -> None:
    with pytest.raises(LocalError, match=r"sites are a tuple of names|1 sites for 2 ranks"):
        Settings(ranks=2, sites=sites)


def test_paths_let_quic_work_after_the_healing() -> None:
    for seed in SEEDS:
        conditions = generate(seed).settings.conditions
        assert conditions.loss <= 0.01
        assert conditions.latency_ns <= 50_000_000
        assert conditions.bytes_per_second is None


def test_kinds_by_name() -> None:
    assert parse_kinds("all") == FAULT_KINDS
    assert parse_kinds("crash, loss") == ("loss", "crash")
    assert parse_kinds("all,-loss,-crash") == tuple(kind for kind in FAULT_KINDS if kind not in ("loss", "crash"))
    assert parse_kinds("-loss") == parse_kinds("all,-loss")
    assert parse_kinds("-loss,-crash,loss") == parse_kinds("all,-crash")
    for nothing in ("all,-all", "-all", "loss,-loss"):
        with pytest.raises(LocalError, match=f"'{nothing}' leaves no kind of fault"):
            parse_kinds(nothing)
    with pytest.raises(LocalError, match="no kind of fault 'flood'"):
        parse_kinds("loss,flood")


def test_a_fault_knows_its_kinds() -> None:
    usual = Conditions(latency_ns=2_000_000)
    added: list[ScenarioEvent] = []
    schedule = FaultSchedule((0,), added.append)
    schedule.conditions(Conditions(latency_ns=2_000_000, loss=0.1, burst=4.0, mtu=1300))
    schedule.conditions(Conditions(loss=0.1)).conditions(usual).crash("coordinator").crash(1).crash(1, power=True)
    schedule.crash("relay").partition({0, 1}, "relay").conditions(Conditions(loss=0.1), "relay", 0).meddle("lose")
    schedule.conditions(usual, "relay", 0).rebind(2)
    assert [kinds_of(event.fault, usual) for event in added] == [
        ("burst", "mtu"),
        ("latency", "loss"),
        ("calm",),
        ("coordinator_crash",),
        ("crash",),
        ("power",),
        *[("relay",)] * 4,
        ("calm",),
        ("rebind",),
    ]


def test_a_scenario_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(LocalError):
        Scenario(seed=0, steps=0)
    with pytest.raises(LocalError):
        Scenario(seed=0, compute_s=-1.0)
    assert Scenario(seed=0).command == "quicoll sim --seed 0 --ranks 4 --steps 8 --events ''"
    assert SetConditions(Conditions()).source() == "conditions(Conditions())"
