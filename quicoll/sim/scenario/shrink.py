"""Make a failing scenario small: what is left is what the failure needs.

Delta debugging (Zeller, Hildebrandt 2002, "Simplifying and Isolating Failure-Inducing Input", IEEE TSE 28(2)): ddmin
takes away ever smaller parts of the events, keeps what still fails, and ends where no single event can go. Then fewer
spares, fewer ranks, fewer steps, settings and conditions as they are by default, and rounder times; and all again as
long as anything helps.

A smaller scenario counts only if it fails in the same way, by the kind of its failure; a run that breaks another
promise is another bug. The last healing stays, as a cluster that is never healed fails to end, which explains nothing.

Runs are counted and bounded; the same scenario is never run twice. Everything is deterministic, so what is printed
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from quicoll.sim.outcome import Settings
from quicoll.sim.scenario.events import (
    DATABASE_HOST,
    RELAY_HOST,
    EngineFault,
    Fault,
    Heal,
    JournalFault,
    LaneFault,
    Meddle,
    MemoryFault,
    Rebind,
    ScenarioEvent,
    SetConditions,
    TakeOver,
    Unplug,
    coordinator_names,
    newcomers,
    node_name,
)
from quicoll.sim.scenario.swarm import Scenario
from quicoll.sim.translators import translators
from quicoll.sim.workload import COMPUTE_S
from quicoll_transport.sim import Conditions

__all__ = ["Shrunk", "shrink"]

FailureTest = Callable[[Scenario], "str | None"]

_ROUND_NS = (1_000_000_000, 100_000_000, 10_000_000, 1_000_000)
_COUNTS = ("ranks", "spares", "warm_spares", "lanes", "engine_processes")  # which are made smaller one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """scenario: the smallest found. kind: of its failure. runs: as many were made; whole: not ended by their limit."""

    scenario: Scenario
    kind: str
    runs: int
    whole: bool


class _Spent(Exception):
    """No runs are left."""


@dataclass(slots=True)
class _Search:
    verdict: FailureTest
    kind: str
    limit: int
    best: Scenario
    runs: int = 0
    known: dict[Scenario, bool] = field(default_factory=dict)

    def take(self, scenario: Scenario) -> bool:
        """Return whether it fails as the first one did; it is the best one from now on if so."""
        found = self.known.get(scenario)
        if found is None:
            if self.runs >= self.limit:
                raise _Spent
            self.runs += 1
            found = self.known[scenario] = self.verdict(scenario) == self.kind
        if found:
            self.best = scenario
        return found


def shrink(scenario: Scenario, kind: str, verdict: FailureTest, *, runs: int = 200) -> Shrunk:
    """Return a smaller scenario that fails with the same `kind`. verdict: runs one, returns its failure or None.

    The scenario itself is taken to fail, and is the answer where nothing smaller does. runs: at most.
    """
    search = _Search(verdict, kind, runs, scenario, known={scenario: True})
    whole = True
    try:
        before = None
        while before != search.best:
            before = search.best
            _fewer_events(search)
            for smaller in (
                _fewer_spares,
                _fewer_ranks,
                _fewer_steps,
                _plainer_settings,
                _plainer_events,
                _rounder_times,
            ):
                # Each success changes what the next candidate is made of, so begin anew.
                while any(search.take(each) for each in smaller(search.best)):
                    pass
    except _Spent:
        whole = False
    return Shrunk(scenario=search.best, kind=kind, runs=search.runs, whole=whole)


def _fewer_events(search: _Search) -> None:
    """ddmin by complements: the events without one of n parts, n growing until the parts are single events."""
    parts = 2
    while True:
        events, last = _split(search.best)
        if not events:
            return
        size = -(-len(events) // parts)
        starts = range(0, len(events), size)
        if any(
            search.take(replace(search.best, events=(*events[:start], *events[start + size :], *last)))
            for start in starts
        ):
            parts = max(2, parts - 1)
        elif size == 1:
            return
        else:
            parts = min(len(events), 2 * parts)


def _split(scenario: Scenario) -> tuple[tuple[ScenarioEvent, ...], tuple[ScenarioEvent, ...]]:
    """Return the events that may go, and the last healing."""
    events = scenario.events
    if events and isinstance(events[-1].fault, Heal):
        return events[:-1], events[-1:]
    return events, ()


def _fewer_spares(scenario: Scenario) -> Iterator[Scenario]:
    """Before there are fewer ranks, or spares would take their places."""
    settings = scenario.settings
    if settings.spares:
        yield _among(scenario, replace(settings, spares=0, warm_spares=0, nats=settings.nats[: settings.ranks]))
    if settings.warm_spares:
        yield replace(scenario, settings=replace(settings, warm_spares=0))


def _fewer_ranks(scenario: Scenario) -> Iterator[Scenario]:
    settings = scenario.settings
    for ranks in range(1, scenario.ranks):
        nats = settings.nats[: ranks + settings.spares]
        sites, hosts = settings.sites[:ranks], settings.hosts[:ranks]
        yield _among(scenario, replace(settings, ranks=ranks, sites=sites, hosts=hosts, nats=nats))


def _among(scenario: Scenario, settings: Settings) -> Scenario:
    """The scenario with these settings, and with its events as far as they concern the nodes that there are then."""
    workers = settings.ranks + settings.spares
    names = [*coordinator_names(settings.coordinators), *(node_name(rank) for rank in range(workers))]
    names += newcomers(scenario.events, workers)
    if settings.coordinators > 1:
        names.append(DATABASE_HOST)
    if settings.relay == "own":
        names.append(RELAY_HOST)
    behind = [node_name(worker) for worker in translators(settings.nats)]
    events = [
        (event, _left(event.fault, names, behind, passes_on=bool(behind) and settings.relay != "none"))
        for event in scenario.events
        if event.voter in ("", *names)
        and (settings.hosts or not isinstance(event.fault, MemoryFault))
        and (not isinstance(event.fault, Unplug) or event.fault.number <= settings.paths)
        and (not isinstance(event.fault, EngineFault) or settings.engine_processes)
        and (not isinstance(event.fault, LaneFault) or (event.fault.only or 0) < settings.lanes)
    ]
    kept = tuple(replace(event, fault=fault) for event, fault in events if fault is not None)
    return replace(scenario, settings=settings, events=kept)


def _left(fault: Fault, names: list[str], behind: list[str], *, passes_on: bool) -> Fault | None:
    """The fault where only these nodes are; None if nothing of it is left.

    Args:
        fault: It.
        names: Of all nodes.
        behind: Of those that are behind address translators.
        passes_on: Whether there is a relay, for somebody.
    """
    if isinstance(fault, Rebind):
        return fault if fault.node in behind else None
    if isinstance(fault, Meddle):
        return fault if passes_on else None
    node = getattr(fault, "node", None)
    if node is not None:
        return fault if node in names and getattr(fault, "to", node) in names else None
    if isinstance(fault, TakeOver | JournalFault):
        return fault if DATABASE_HOST in names else None
    one, other = getattr(fault, "one", ()), getattr(fault, "other", ())
    if not one and not other:
        return fault
    left = tuple(name for name in one if name in names)
    right = tuple(name for name in other if name in names)
    if bool(left) != bool(one) or bool(right) != bool(other):
        return None
    changed: Fault = _changed(fault, one=left, other=right)
    return changed


def _fewer_steps(scenario: Scenario) -> Iterator[Scenario]:
    for steps in dict.fromkeys((1, scenario.steps // 2, scenario.steps - 1)):
        if 1 <= steps < scenario.steps:
            yield replace(scenario, steps=steps)


def _plainer_settings(scenario: Scenario) -> Iterator[Scenario]:
    settings, usual = scenario.settings, Settings()
    if scenario.compute_s != COMPUTE_S:
        yield replace(scenario, compute_s=COMPUTE_S)
    for each in fields(Settings):
        value = getattr(usual, each.name)
        if (
            each.name not in ("ranks", "spares", "warm_spares", "lanes", "engine_processes")
            and getattr(settings, each.name) != value
        ):
            yield _among(scenario, replace(settings, **{each.name: value}))
    for count in range(settings.engine_processes):
        yield _among(scenario, replace(settings, engine_processes=count))
    for lanes in range(settings.lanes):
        yield _among(scenario, replace(settings, lanes=lanes, lane_access=settings.lane_access[:lanes]))
    for nats in _fewer_nats(settings.nats):
        yield _among(scenario, replace(settings, nats=nats))
    for conditions in _plainer_conditions(settings.conditions, usual.conditions):
        yield replace(scenario, settings=replace(settings, conditions=conditions))


def _fewer_nats(nats: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """One worker less behind a translator, or one behind its own and not another's."""
    behind = translators(nats)
    for worker, (owner, kind) in behind.items():
        if worker != owner:
            yield (*nats[:worker], kind.value, *nats[worker + 1 :])
        if str(worker) not in nats:
            fewer = (*nats[:worker], "", *nats[worker + 1 :])
            yield fewer if any(fewer) else ()


def _plainer_conditions(conditions: Conditions, usual: Conditions) -> Iterator[Conditions]:
    for each in fields(Conditions):
        value = getattr(usual, each.name)
        if getattr(conditions, each.name) != value:
            yield replace(conditions, **{each.name: value})


def _plainer_events(scenario: Scenario) -> Iterator[Scenario]:
    for i, event in enumerate(scenario.events):
        fault = event.fault
        if event.voter:
            yield _with(scenario, i, replace(event, voter="", after_ns=0))
        if event.after_ns:
            yield _with(scenario, i, replace(event, after_ns=0))
        plainer: list[Fault] = []
        if isinstance(fault, SetConditions):
            found = _plainer_conditions(fault.conditions, scenario.settings.conditions)
            plainer = [replace(fault, conditions=each) for each in found]
        elif isinstance(fault, LaneFault) and fault.only is not None:
            plainer = [replace(fault, only=None)]
        for side in ("one", "other"):
            names = getattr(fault, side, ())
            if len(names) > 1:
                without = [names[:j] + names[j + 1 :] for j in range(len(names))]
                plainer += [_changed(fault, **{side: each}) for each in without]
        for each in plainer:
            yield _with(scenario, i, replace(event, fault=each))


def _rounder_times(scenario: Scenario) -> Iterator[Scenario]:
    """Times, and lengths: to whole seconds where that does, or tenths, hundredths, thousandths."""
    for i, event in enumerate(scenario.events):
        fault = event.fault
        for unit in _ROUND_NS:
            if event.at_ns % unit == 0:
                break
            for at_ns in dict.fromkeys((event.at_ns // unit * unit, -(-event.at_ns // unit) * unit)):
                yield _with(scenario, i, replace(event, at_ns=at_ns))
        ns = getattr(fault, "ns", 0)
        for unit in _ROUND_NS:
            if ns % unit == 0:
                break
            if (rounded := round(ns / unit) * unit) > 0:
                yield _with(scenario, i, replace(event, fault=_changed(fault, ns=rounded)))


def _changed(fault: Any, **fields: Any) -> Any:
    """dataclasses.replace, for faults that were found to have these fields."""
    return replace(fault, **fields)


def _with(scenario: Scenario, i: int, event: ScenarioEvent) -> Scenario:
    """With this event in the place of the i-th; in the order of times, equal ones as they were."""
    events = [*scenario.events[:i], event, *scenario.events[i + 1 :]]
    return replace(scenario, events=tuple(sorted(events, key=lambda each: each.at_ns)))
