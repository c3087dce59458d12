"""The rules of the Trace Event Format, as far as quicoll uses it: what a viewer would drop or draw wrong is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

_NAMES = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}


def read_trace(path: Path) -> dict[str, Any]:
    """A trace as it was written: strict JSON, without NaN, and by the rules."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    trace: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    check_trace(trace)
    return trace


def check_trace(trace: dict[str, Any]) -> None:
    """Phases, required fields, finite times that are not negative, named lanes, slices that do not cross."""
    assert set(trace) == {"displayTimeUnit", "traceEvents", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named: set[tuple[int, int]] = set()
    used: set[tuple[int, int]] = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        if event["ph"] == "M":
            assert list(event["args"]) == [_NAMES[event["name"]]]
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        assert event["cat"]
        assert type(event["tid"]) is int
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        lane = event["pid"], event["tid"]
        used.add(lane)
        if event["ph"] == "X":
            assert math.isfinite(event["dur"])
            assert event["dur"] >= 0
            # Whole nanoseconds, as a viewer has them: sums of floats in microseconds are off by less.
            lanes.setdefault(lane, []).append((round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)))
        else:
            assert event["ph"] in ("i", "b", "e"), event["ph"]
            assert event["ph"] != "i" or event["s"] in ("g", "p", "t")
            assert event["ph"] == "i" or "id" in event
    assert used <= named
    for lane, slices in lanes.items():
        open_until: list[float] = []
        for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"slices of lane {lane} cross at {start}"
            open_until.append(end)
