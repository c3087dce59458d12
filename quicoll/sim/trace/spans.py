"""Spans of a run's trace: from when to when, on which nodes, and what ended it.

A recorded run is a list of entries, each of one moment. Slices of a timeline and "until 2.4 s" in a story need both
ends. They are found here, by following the entries in order:

    begins                              ends
    fault partition, hold               all its paths were repaired, healed, or taken by another partition or hold
    fault conditions                    conditions for one of its paths, or for all; heal
    fault slow, drift                   the same fault with 0; heal. slow also with the process
    host kill, power_off                host start
    host pause                          host resume, kill, power_off
    host start                          host kill, power_off
    view_installed                      view_ended, the next one installed, the process's end
    step_began                          step_committed, step_aborted, the next one begun, the process's end
    collective_began                    collective_ended, the process's end

What is open at the end of the run has `end_ns` None.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from quicoll.sim.scenario import events

__all__ = ["Entry", "TraceSpan", "fault_spans", "node_spans"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One moment of a run. t_ns: since its beginning. what: fields by name, a Fault, or text, by the kind."""

    t_ns: int
    kind: str
    who: str
    what: Any

    def field(self, name: str, default: Any = None) -> Any:
        return self.what.get(name, default) if isinstance(self.what, dict) else default

    def __str__(self) -> str:
        if isinstance(self.what, dict):
            text = " ".join(f"{name}={value}" for name, value in self.what.items())
        elif hasattr(self.what, "source"):
            text = self.what.source()
        else:
            text = str(self.what)
        return f"{self.t_ns / 1e9:.6f} s  {self.who}: {self.kind} {text}".rstrip()


@dataclass(slots=True)
class TraceSpan:
    """lane: what kind of thing it is. node: "" for what concerns several. ended_by: for people."""

    lane: str
    node: str
    name: str
    start_ns: int
    end_ns: int | None = None
    ended_by: str = ""
    cause: Any = None  # the entry that began it

    @property
    def open(self) -> bool:
        return self.end_ns is None

    def end(self, t_ns: int, ended_by: str) -> None:
        if self.end_ns is None:
            self.end_ns, self.ended_by = t_ns, ended_by

    def covers(self, t_ns: int) -> bool:
        return self.start_ns <= t_ns and (self.end_ns is None or t_ns < self.end_ns)


_Path = tuple[str, str]
_ANY: _Path = ("", "")  # all paths


def _paths(one: Iterable[str], other: Iterable[str]) -> Iterator[_Path]:
    others = list(other)
    yield from ((a, b) for a in one for b in others if a != b)


def fault_spans(entries: Iterable[Entry]) -> list[TraceSpan]:
    """Of scheduled faults that last, in the order of their beginning."""
    spans: list[TraceSpan] = []
    cut: list[tuple[TraceSpan, dict[_Path, None]]] = []  # with the paths that they still hold
    weather: list[tuple[TraceSpan, dict[_Path, None]]] = []
    clocks: dict[tuple[str, str], TraceSpan] = {}

    def begin(entry: Entry, lane: str, node: str = "") -> TraceSpan:
        spans.append(TraceSpan(lane, node, entry.what.source(), entry.t_ns, cause=entry))
        return spans[-1]

    def free(held: list[tuple[TraceSpan, dict[_Path, None]]], paths: Iterable[_Path], entry: Entry) -> None:
        freed = dict.fromkeys(paths)
        for span, left in held:
            for path in list(left):
                if path in freed or _ANY in freed:
                    del left[path]
            if not left:
                span.end(entry.t_ns, entry.what.source())
        held[:] = [pair for pair in held if pair[1]]

    for entry in entries:
        fault = entry.what
        if entry.kind == "host" and fault in ("kill", "power_off"):
            slow = clocks.pop(("slow", entry.who), None)
            if slow is not None:
                slow.end(entry.t_ns, "the process ended")
        if entry.kind != "fault":
            continue
        match fault:
            case events.PartitionPath() | events.HoldPath():
                paths = dict.fromkeys(_paths(fault.one, fault.other))
                if isinstance(fault, events.PartitionPath) and not fault.one_way:
                    paths |= dict.fromkeys(_paths(fault.other, fault.one))
                free(cut, paths, entry)
                cut.append((begin(entry, "network"), paths))
            case events.Repair():
                both = [*_paths(fault.one, fault.other), *_paths(fault.other, fault.one)]
                free(cut, both if fault.one and fault.other else [_ANY], entry)
            case events.SetConditions():
                paths = dict.fromkeys(_paths(fault.one, fault.other)) if fault.one and fault.other else {_ANY: None}
                free(weather, paths, entry)
                weather.append((begin(entry, "network"), paths))
            case events.Slow() | events.Drift():
                kind = type(fault).__name__.lower()
                before = clocks.pop((kind, fault.node), None)
                if before is not None:
                    before.end(entry.t_ns, fault.source())
                if (fault.ns if isinstance(fault, events.Slow) else fault.ppm) != 0:
                    clocks[kind, fault.node] = begin(entry, "clock", fault.node)
            case events.Heal():
                free(cut, [_ANY], entry)
                free(weather, [_ANY], entry)
                for span in clocks.values():
                    span.end(entry.t_ns, "heal()")
                clocks.clear()
    return spans


class _Node:
    """Open spans of one node: one span of each lane, collectives by their name as well."""

    def __init__(self, name: str, spans: list[TraceSpan]) -> None:
        self._name = name
        self._spans = spans
        self._open: dict[tuple[str, str], TraceSpan] = {}

    def begin(self, lane: str, name: str, entry: Entry, *, key: str = "") -> None:
        self.end(lane, entry.t_ns, "", key=key)
        self._open[lane, key] = span = TraceSpan(lane, self._name, name, entry.t_ns, cause=entry)
        self._spans.append(span)

    def end(self, lane: str, t_ns: int, ended_by: str, *, key: str = "") -> None:
        span = self._open.pop((lane, key), None)
        if span is not None:
            span.end(t_ns, ended_by)

    def end_all(self, t_ns: int, ended_by: str) -> None:
        for span in self._open.values():
            span.end(t_ns, ended_by)
        self._open.clear()


def node_spans(entries: Iterable[Entry]) -> list[TraceSpan]:
    """Of every node: lanes process, view, step and collective, in the order of their beginning."""
    spans: list[TraceSpan] = []
    nodes: dict[str, _Node] = {}
    for entry in entries:
        node = nodes.get(entry.who)
        if node is None:
            node = nodes[entry.who] = _Node(entry.who, spans)
        t_ns = entry.t_ns
        match entry.kind:
            case "host":
                _follow_host(node, entry)
            case "view_installed":
                size = len(entry.field("nodes", ()))
                node.begin("view", f"view {entry.field('view')} of {size}", entry)
            case "view_ended":
                node.end("view", t_ns, str(entry.field("cause", "")))
            case "step_began":
                node.begin("step", f"step {entry.field('step')}", entry)
            case "step_committed":
                node.end("step", t_ns, "committed")
            case "step_aborted":
                node.end("step", t_ns, f"aborted: {entry.field('cause', '')}")
            case "collective_began":
                node.begin("collective", str(entry.field("op")), entry, key=str(entry.field("op")))
            case "collective_ended":
                fine = "done" if entry.field("fine") else "failed"
                node.end("collective", t_ns, fine, key=str(entry.field("op")))
    return spans


def _follow_host(node: _Node, entry: Entry) -> None:
    match entry.what:
        case "start":
            node.end("down", entry.t_ns, "started")
            node.begin("process", "runs", entry)
        case "pause":
            node.begin("paused", "paused", entry)
        case "resume":
            node.end("paused", entry.t_ns, "resumed")
        case "kill" | "power_off":
            node.end_all(entry.t_ns, "the process ended")
            node.begin("down", "down" if entry.what == "kill" else "off", entry)
