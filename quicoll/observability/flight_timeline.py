"""All that the ranks of a real run did, on one clock, as a timeline for Perfetto.

Made of the files that `quicoll.observability.flight_trace` writes, one for each process. Their clocks are related as
those of flight recorders are (`clock_offsets`): processes of one host share one, and between hosts the calls that they
heard of each other say how far they are apart, to half of the fastest round trip; what is known of each clock stands in
the file's `otherData`.

A process row is a node; of one that was started again each life is a slice of its own. Operations that overlap take
several lanes. An operation says how long it waited for the last rank to call it, and which rank that was.

A pure function of the files, which may be torn: what has no end ends with its view, or with its file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quicoll.observability.chrome_trace import (
    EVENTS_ROW,
    ROW_NAMES,
    ROWS,
    TraceEvent,
    moment,
    name_rows,
    node_order,
    time_slice,
)
from quicoll.observability.flight_clocks import ClockOffset, clock_offsets
from quicoll.observability.flight_record import (
    FlightEvent,
    FlightFile,
    FlightOperation,
    FlightStep,
    FlightView,
    printable,
)

__all__ = ["draw_timeline"]

_MORE_LANES = 10
"""Number of the second lane of operations."""


def draw_timeline(files: Sequence[FlightFile]) -> tuple[list[TraceEvent], dict[str, object]]:
    """Put the files of a run on one clock.

    Args:
        files: Of one job.
    Returns:
        What `write_chrome_trace` takes: the events, and what is said of the whole.
    """
    clocks = clock_offsets(files)
    moments = [_shifted(time, file, clocks) for file in files for time in _times(file)]
    zero = min(moments, default=0)
    nodes = sorted({file.header.node: None for file in files}, key=node_order)
    found: list[TraceEvent] = []
    for pid, node in enumerate(nodes, start=1):
        lives = sorted((file for file in files if file.header.node == node), key=lambda file: file.header.wall)
        lanes = dict(ROW_NAMES)
        for life in lives:
            drawn = _Life(life, clocks[life.header.clock].offset_ns - zero, pid)
            found += drawn.events
            lanes |= drawn.lanes
        found += name_rows(pid, printable(node, 128), lanes)
    first = min(files, key=lambda file: file.header.wall, default=None)
    about: dict[str, object] = {
        "job": "" if first is None else first.header.job,
        "clocks": {clock: _told(offset) for clock, offset in clocks.items()},
        "hosts": {file.header.node: f"{file.header.host}, clock {file.header.clock}" for file in files},
    }
    if first is not None:
        about["began"] = first.header.wall / 1e9
    return found, about


def _told(offset: ClockOffset) -> str:
    if offset.bound_ns is None:
        return f"{offset.offset_ns / 1e6:+.3f} ms, by the walls of the hosts: nobody knows how well"
    return f"{offset.offset_ns / 1e6:+.3f} ms, to {offset.bound_ns / 1e6:.3f} ms"


def _shifted(time: int, file: FlightFile, clocks: dict[str, ClockOffset]) -> int:
    return time + clocks[file.header.clock].offset_ns


def _times(file: FlightFile) -> Iterable[int]:
    yield file.header.t
    for each in file.records:
        if isinstance(each, FlightOperation):
            yield from (time for time in (each.called, each.ended) if time)
        elif isinstance(each, FlightStep):
            yield from (time for time in (each.began, each.ended) if time)
        elif isinstance(each, FlightView | FlightEvent) and each.t:
            yield each.t


class _Life:
    """What one process did. lanes: names of those it needs besides."""

    def __init__(self, file: FlightFile, shift: int, pid: int) -> None:
        self.events: list[TraceEvent] = []
        self.lanes: dict[int, str] = {}
        self._shift = shift
        self._pid = pid
        times = list(_times(file))
        self._end = max(times)
        self._slice("process", f"process {printable(file.header.process, 64)}", file.header.t, self._end, {})
        self._views(file.of(FlightView), file.of(FlightEvent))
        for step in file.of(FlightStep):
            told = {"view": step.view, "ended by": step.outcome or "nothing that is known"}
            self._slice("step", f"step {step.step}", step.began, step.ended or self._over(step.view), told)
        self._operations(file.of(FlightOperation))
        for event in file.of(FlightEvent):
            told = {"text": printable(event.text), "view": event.view}
            name = printable(event.what, 128)
            self.events.append(
                moment(name, name, pid=pid, row=EVENTS_ROW, at_ns=(event.t or self._end) + shift, told=told)
            )

    def _views(self, views: Sequence[FlightView], events: Sequence[FlightEvent]) -> None:
        ended = {event.view: event.t for event in events if event.what == "view_ended"}
        self._ends: dict[int, int] = {}
        for number, view in enumerate(views):
            next_one = views[number + 1].t if number + 1 < len(views) else self._end
            over = self._ends[view.view] = max(min(ended.get(view.view, next_one), next_one), view.t)
            nodes = ", ".join(printable(node, 64) for node in view.nodes)
            self._slice("view", f"view {view.view} of {len(view.nodes)}", view.t, over, {"nodes": nodes})

    def _over(self, view: int) -> int:
        return self._ends.get(view, self._end)

    def _operations(self, operations: Sequence[FlightOperation]) -> None:
        free: list[int] = []  # by lane, until when it is taken
        for each in sorted(operations, key=lambda each: (each.called, each.name)):
            end = max(each.ended or self._over(each.view), each.called)
            lane = next((number for number, until in enumerate(free) if until <= each.called), len(free))
            free[lane : lane + 1] = [end]
            row = ROWS["collective"] if lane == 0 else _MORE_LANES + lane - 1
            if lane:
                self.lanes[row] = f"collectives {lane + 1}"
            told: dict[str, object] = {
                "called": printable(each.what, 256),
                "view": each.view,
                "step": each.step,
                "carrier": each.carrier,
                "algorithm": each.algorithm,
                "bytes given": each.given,
                "ended by": each.outcome or "the end of its view",
            }
            if each.heard and each.settled:
                last = max(each.heard, key=lambda node: (each.heard[node], node))
                told["waited ms"] = max(each.settled - each.called, 0) / 1e6
                told["last to call"] = printable(last, 64)
            self._slice("collective", printable(each.name, 128), each.called, end, told, row=row)

    def _slice(
        self, about: str, name: str, start: int, end: int, told: dict[str, object], *, row: int | None = None
    ) -> None:
        self.events.append(
            time_slice(
                about,
                name,
                pid=self._pid,
                row=ROWS[about] if row is None else row,
                start_ns=start + self._shift,
                end_ns=max(end, start) + self._shift,
                told=told,
            )
        )
