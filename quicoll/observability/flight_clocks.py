"""One clock for the files of several processes, as far as it can be known.

Processes of one host share a monotonic clock, and their headers say so. Between hosts nothing is known but what was
seen: one process called an operation at a time of its clock, another heard of that call at a time of its own. So the
difference of the two clocks is at most the least of all these ways, and by the ways back at least the least of those:

    -min(heard there and called here, back)  <=  their clock - ours  <=  min(heard by them - called by us)

The middle is taken, and half of the width is the bound of its error: half of the fastest round trip that was seen. It
is as of the time of these operations; clocks that drift by 50 ppm are half a millisecond apart after ten seconds more.

Clocks are related along the pairs whose bounds are the narrowest, from one that most files have. Where no calls went
both ways the walls of the hosts are compared, and nobody knows how good that is: `bound_ns` is None then.

A pure function of the files. Files may lie: a pair whose bounds contradict each other is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quicoll.observability.flight_record import FlightFile, FlightOperation, FlightView

__all__ = ["ClockOffset", "clock_offsets"]


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How a clock is related to that of reference.

    Attributes:
        offset_ns: What is added to its times.
        bound_ns: By how much that may be wrong; None where it comes of the walls of two hosts.
    """

    offset_ns: int
    bound_ns: int | None


def clock_offsets(files: Sequence[FlightFile]) -> dict[str, ClockOffset]:
    """Relate the clocks of files.

    Args:
        files: Of one job.
    Returns:
        By clock, how it is related to the first one, which most of them have.
    """
    count: dict[str, int] = {}
    for file in files:
        count[file.header.clock] = count.get(file.header.clock, 0) + 1
    if not count:
        return {}
    first = min(count, key=lambda clock: (-count[clock], clock))
    ways = _ways(files)
    found = {first: ClockOffset(0, 0)}
    while True:
        best: tuple[int, str, int] | None = None
        for known, at in sorted(found.items()):
            for clock in sorted(count):
                there, back = ways.get((known, clock)), ways.get((clock, known))
                if clock in found or there is None or back is None or there + back < 0 or at.bound_ns is None:
                    continue
                bound = at.bound_ns + (there + back + 1) // 2
                if best is None or bound < best[0]:
                    best = bound, clock, at.offset_ns - (there - back) // 2
        if best is None:
            break
        found[best[1]] = ClockOffset(best[2], best[0])
    walls = {file.header.clock: file.header.wall - file.header.t for file in files}
    for clock in sorted(count):
        if clock not in found:
            found[clock] = ClockOffset(walls[clock] - walls[first], None)
    return found


def _ways(files: Sequence[FlightFile]) -> dict[tuple[str, str], int]:
    """By (clock of who called, clock of who heard it), the least of what was heard there less what was called here."""
    called: dict[tuple[str, str, str], tuple[str, int]] = {}  # by mark, name and node: clock and time
    marks = [{view.view: view.mark for view in file.of(FlightView)} for file in files]
    for file, mark in zip(files, marks, strict=True):
        for each in file.of(FlightOperation):
            if each.view in mark:
                called[mark[each.view], each.name, file.header.node] = file.header.clock, each.called
    ways: dict[tuple[str, str], int] = {}
    for file, mark in zip(files, marks, strict=True):
        here = file.header.clock
        for each in file.of(FlightOperation):
            for node, heard in _heard(each, mark, called, here):
                way = (node, here)
                ways[way] = min(ways.get(way, heard), heard)
    return ways


def _heard(
    operation: FlightOperation,
    mark: Mapping[int, str],
    called: Mapping[tuple[str, str, str], tuple[str, int]],
    here: str,
) -> list[tuple[str, int]]:
    found = []
    for node, at in operation.heard.items():
        known = called.get((mark.get(operation.view, ""), operation.name, node))
        if known is not None and known[0] != here:
            found.append((known[0], at - known[1]))
    return found
