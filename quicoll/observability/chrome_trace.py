"""The file of a timeline, as Perfetto and chrome://tracing open it: the Trace Event Format of the Catapult project.

One process row for each node, with lanes for its life, its views, its steps, its operations, and what happened at one
moment. Of a simulated run (quicoll.sim.trace) and of a real one (quicoll.observability.flight_timeline) alike.

Slices of one lane may lie within each other and must not cross: a viewer makes a stack of them. Operations overlap in
any way, so those of a real run are put in as many lanes as that takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from quicoll.errors import LocalError

__all__ = [
    "EVENTS_ROW",
    "ROWS",
    "ROW_NAMES",
    "TraceEvent",
    "moment",
    "name_rows",
    "node_order",
    "time_slice",
    "write_chrome_trace",
]

TraceEvent: TypeAlias = dict[str, Any]
"""One object of the format."""

ROWS = {"process": 1, "down": 1, "paused": 1, "view": 2, "step": 3, "collective": 4}
"""By what a slice is about, its lane."""
ROW_NAMES = {1: "process", 2: "view", 3: "step", 4: "collectives", 5: "events"}
EVENTS_ROW = 5


def node_order(name: str) -> tuple[bool, str, int]:
    """Return the key by which nodes are put in order: the coordinator, then workers by number, not by letters."""
    prefix, _, number = name.rpartition("-")
    return (prefix != "", prefix, int(number)) if number.isdigit() else (False, name, 0)


def name_rows(pid: int, name: str, rows: Mapping[int, str]) -> list[TraceEvent]:
    """Return the names of a process row and its lanes.

    Args:
        pid: Its number, by which they are put in order.
        name: Its name.
        rows: Names of the lanes, by number.
    """
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
        *(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": {"name": title}}
            for row, title in rows.items()
        ),
    ]


def time_slice(
    about: str, name: str, *, pid: int, row: int, start_ns: int, end_ns: int, told: Mapping[str, object]
) -> TraceEvent:
    """Return what lasted from one time to another.

    Args:
        about: Its category.
        name: What stands on it.
        pid: Of the process row.
        row: The lane.
        start_ns: When it began.
        end_ns: When it ended.
        told: What is shown of it besides.
    """
    return {
        "ph": "X",
        "cat": about,
        "name": name,
        "pid": pid,
        "tid": row,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": dict(told),
    }


def moment(about: str, name: str, *, pid: int, row: int, at_ns: int, told: Mapping[str, object]) -> TraceEvent:
    """Return what happened at one moment; the rest as in `time_slice`."""
    head = {"ph": "i", "s": "t", "cat": about, "name": name, "pid": pid, "tid": row}
    return {**head, "ts": at_ns / 1e3, "args": dict(told)}


def write_chrome_trace(path: str | Path, events: Sequence[TraceEvent], about: Mapping[str, object]) -> None:
    """Write the file.

    Args:
        path: Where.
        events: What it shows.
        about: What is said of the whole.
    Raises:
        LocalError: It cannot be written.
    """
    trace = {"displayTimeUnit": "ms", "traceEvents": events, "otherData": dict(about)}
    try:
        Path(path).write_text(json.dumps(trace, default=str) + "\n")
    except OSError as error:
        raise LocalError(f"cannot write the trace to {path}: {error.strerror or error}") from error
