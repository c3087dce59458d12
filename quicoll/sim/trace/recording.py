"""A run written down: what the world's recorder is told, and the two ways to read it, a timeline and a story.

The timeline is a Chrome trace (the Trace Event Format of the Catapult project; Perfetto and chrome://tracing open it):
one process row for each node with lanes for its life, views, steps and collectives; partitions and other faults that
last as slices of a row of their own, each fault as a flag across all rows. Times are virtual microseconds.

Recording changes nothing in a run: it has the same digest with it as without.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError
from quicoll.observability.chrome_trace import (
    EVENTS_ROW,
    ROW_NAMES,
    ROWS,
    TraceEvent,
    moment,
    name_rows,
    node_order,
    time_slice,
    write_chrome_trace,
)
from quicoll.sim.trace.spans import Entry, TraceSpan, fault_spans, node_spans
from quicoll.sim.trace.story import tell

if TYPE_CHECKING:
    from quicoll.sim.outcome import Outcome

__all__ = ["Recording"]

_FAULTS_PID = 1
_STATES = (
    "state_received",
    "state_handed",
    "state_differs",
    "state_torn",
    "state_learning",
    "state_learned",
    "standing_by",
)
_MOMENTS = ("peer_lost", "held", *_STATES, "node_joined", "refused", "process_ended", "view_proposed")


class Recording:
    """Give `record` to `Simulation(recorder=...)`. entries: what happened, in order.

    datagrams: how many sent datagrams to keep, from the first; each is a mark in the timeline. They are by far the most
    of what happens, so none is kept unless it is asked for.
    """

    def __init__(self, *, datagrams: int = 0) -> None:
        if datagrams < 0:
            raise LocalError(f"a number of datagrams is not negative: {datagrams}")
        self.entries: list[Entry] = []
        self._datagrams_left = datagrams

    def record(self, t_ns: int, kind: str, who: str, what: Any) -> None:
        """The world's recorder."""
        if kind == "send":
            if self._datagrams_left == 0:
                return
            self._datagrams_left -= 1
        self.entries.append(Entry(t_ns, kind, who, what))

    def explain(self, outcome: Outcome, *, of: str = "") -> str:
        """The run as a story for a person: see quicoll.sim.trace.story. of: which run, where a seed has several."""
        return tell(self.entries, outcome, of)

    def write_chrome(self, path: str | Path, outcome: Outcome) -> None:
        """Write the timeline. Raises LocalError where the file cannot be written."""
        about = {"seed": outcome.seed, "digest": outcome.digest, "error": str(outcome.error or "")}
        write_chrome_trace(path, _chrome_events(self.entries, outcome), about)


def _chrome_events(entries: list[Entry], outcome: Outcome) -> list[TraceEvent]:
    found: list[TraceEvent] = []
    nodes = sorted({entry.who: None for entry in entries if entry.who != "sim"}, key=node_order)
    pids = {node: number for number, node in enumerate(nodes, start=_FAULTS_PID + 1)}
    found += name_rows(_FAULTS_PID, "faults", {1: "events"})
    for node in nodes:
        found += name_rows(pids[node], node, ROW_NAMES)
    end_ns = round(outcome.virtual_s * 1e9)
    for number, span in enumerate(fault_spans(entries)):
        # Faults overlap in any way, so each is a track of its own ("async" slices), not a slice in a stack.
        head = {"cat": span.lane, "id": number, "pid": _FAULTS_PID, "tid": 1, "name": span.name}
        found.append({**head, "ph": "b", "ts": span.start_ns / 1e3, "args": {"ended by": span.ended_by}})
        found.append({**head, "ph": "e", "ts": (end_ns if span.end_ns is None else span.end_ns) / 1e3})
    found += [_slice(span, pids[span.node], end_ns) for span in node_spans(entries)]
    found += [marked for entry in entries if (marked := _moment(entry, pids)) is not None]
    if outcome.error is not None:
        found.append(_flag(f"FAILED: {outcome.error}", round(outcome.error.at * 1e9), pid=_FAULTS_PID))
    return found


def _slice(span: TraceSpan, pid: int, end_ns: int) -> TraceEvent:
    end = end_ns if span.end_ns is None else span.end_ns
    told = {"ended by": span.ended_by or "the run's end"}
    return time_slice(span.lane, span.name, pid=pid, row=ROWS[span.lane], start_ns=span.start_ns, end_ns=end, told=told)


def _flag(name: str, t_ns: int, *, pid: int) -> TraceEvent:
    return {"ph": "i", "s": "g", "cat": "fault", "name": name, "pid": pid, "tid": 1, "ts": t_ns / 1e3}


def _moment(entry: Entry, pids: dict[str, int]) -> TraceEvent | None:
    if entry.kind == "fault":
        return _flag(entry.what.source(), entry.t_ns, pid=_FAULTS_PID)
    if entry.kind not in _MOMENTS and entry.kind != "send":
        return None
    told = entry.what if isinstance(entry.what, dict) else {"what": str(entry.what)}
    return moment(entry.kind, entry.kind, pid=pids[entry.who], row=EVENTS_ROW, at_ns=entry.t_ns, told=told)
