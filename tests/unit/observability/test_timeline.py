"""Timelines of real runs: everything is in them, on one clock, as a viewer takes it, whatever the files are like."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from trace_rules import check_trace, read_trace

from quicoll import Event, LocalError
from quicoll.cli.main import main
from quicoll.observability import flight_trace
from quicoll.observability.flight import ENDED, FlightRecorder, FlightStream
from quicoll.observability.flight_record import (
    FLIGHT_FORMAT,
    FlightEvent,
    FlightFile,
    FlightHeader,
    FlightOperation,
    FlightStep,
    FlightView,
)
from quicoll.observability.flight_timeline import draw_timeline
from quicoll.observability.flight_trace import TraceFile, read_traces
from quicoll.observability.recording import record_rank

MS = 1_000_000


def header(node: str, *, clock: str = "c", t: int = 0, wall: int = 0) -> FlightHeader:
    return FlightHeader(
        format=FLIGHT_FORMAT,
        role="rank",
        job="j",
        node=node,
        process="1",
        clock=clock,
        host="h",
        t=t,
        wall=wall,
        why="",
    )


def operation(name: str, called: int, ended: int, **fields: Any) -> FlightOperation:
    told = {"view": 1, "what": "all_reduce", "step": 1, "carrier": "quic", "outcome": "finished", **fields}
    return FlightOperation(name=name, called=called, ended=ended, **told)


def flight(node: str, *records: Any, **how: Any) -> FlightFile:
    return FlightFile(header=header(node, **how), records=records)


def drawn(*files: FlightFile) -> dict[str, Any]:
    events, about = draw_timeline(files)
    trace = {"displayTimeUnit": "ms", "traceEvents": events, "otherData": about}
    check_trace(trace)
    return trace


def slices(trace: dict[str, Any], about: str) -> list[tuple[str, float, float]]:
    return [
        (each["name"], each["ts"], each["ts"] + each["dur"])
        for each in trace["traceEvents"]
        if each.get("cat") == about
    ]


VIEW = FlightView(t=1 * MS, view=1, mark="m", nodes=("a", "b"))


def test_views_steps_and_operations_are_where_they_were_from_the_first_time_on() -> None:
    trace = drawn(
        flight(
            "a",
            VIEW,
            FlightStep(step=1, view=1, began=2 * MS, ended=9 * MS, outcome="committed"),
            operation("all_reduce#0", 3 * MS, 5 * MS, given=400, heard={"b": 4 * MS}, settled=4 * MS, algorithm="ring"),
            FlightEvent(t=7 * MS, what="straggler", text="b was late"),
            t=1 * MS,
        )
    )
    assert slices(trace, "process") == [("process 1", 0.0, 8000.0)]
    assert slices(trace, "view") == [("view 1 of 2", 0.0, 8000.0)]
    assert slices(trace, "step") == [("step 1", 1000.0, 8000.0)]
    assert slices(trace, "collective") == [("all_reduce#0", 2000.0, 4000.0)]
    (told,) = (each["args"] for each in trace["traceEvents"] if each.get("cat") == "collective")
    assert (told["bytes given"], told["algorithm"], told["waited ms"], told["last to call"]) == (400, "ring", 1.0, "b")
    assert [each["ts"] for each in trace["traceEvents"] if each["ph"] == "i"] == [6000.0]


def test_operations_that_overlap_take_lanes_of_their_own_and_give_them_back() -> None:
    times = [(2, 8), (3, 5), (4, 9), (5, 6), (9, 10)]
    trace = drawn(flight("a", VIEW, *(operation(f"x#{i}", a * MS, b * MS) for i, (a, b) in enumerate(times))))
    lanes = {each["name"]: each["tid"] for each in trace["traceEvents"] if each.get("cat") == "collective"}
    assert lanes == {"x#0": 4, "x#1": 10, "x#2": 11, "x#3": 10, "x#4": 4}


def test_clocks_of_two_hosts_are_put_on_one_by_what_their_ranks_heard() -> None:
    """The clock of b is 1000 s ahead; each call takes 1 ms to be heard."""
    ahead = 1000 * 1000 * MS
    a = flight("a", VIEW, operation("x#0", 3 * MS, 9 * MS, heard={"b": 5 * MS}), t=1 * MS)
    b = flight(
        "b",
        FlightView(t=1 * MS + ahead, view=1, mark="m", nodes=("a", "b")),
        operation("x#0", 4 * MS + ahead, 9 * MS + ahead, heard={"a": 4 * MS + ahead}),
        clock="d",
        t=1 * MS + ahead,
    )
    trace = drawn(a, b)
    assert slices(trace, "collective") == [("x#0", 2000.0, 8000.0), ("x#0", 3000.0, 8000.0)]
    assert trace["otherData"]["clocks"]["d"] == "-1000000.000 ms, to 1.000 ms"


def test_what_has_no_end_ends_with_its_view_or_its_file() -> None:
    trace = drawn(
        flight(
            "a",
            VIEW,
            FlightStep(step=1, view=1, began=2 * MS),
            operation("x#0", 3 * MS, 0, outcome=""),
            FlightView(t=6 * MS, view=2, mark="n", nodes=("a",)),
            FlightStep(step=1, view=2, began=7 * MS),
            operation("x#0", 8 * MS, 0, view=2, outcome=""),
            FlightEvent(t=9 * MS, what="held", text="waits"),
        )
    )
    assert slices(trace, "step") == [("step 1", 2000.0, 6000.0), ("step 1", 7000.0, 9000.0)]
    assert slices(trace, "collective") == [("x#0", 3000.0, 6000.0), ("x#0", 8000.0, 9000.0)]


def test_each_life_of_a_node_is_a_slice_of_its_row_and_nodes_are_in_the_order_of_their_numbers() -> None:
    trace = drawn(
        flight("worker-10", VIEW),
        flight("worker-2", VIEW, t=5 * MS, wall=5),
        flight("worker-2", VIEW, t=1 * MS, wall=1),
    )
    names = {each["pid"]: each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "process_name"}
    assert names == {1: "worker-2", 2: "worker-10"}
    assert len([each for each in trace["traceEvents"] if each.get("cat") == "process" and each["pid"] == 1]) == 2


class Moving:
    """A recorder with a stream, on a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0
        self.stream = FlightStream()
        self.recorder = FlightRecorder(
            job="j",
            node="a",
            process="1",
            clock="c",
            host="h",
            now_ns=lambda: self.now,
            wall_ns=lambda: self.now,
            stream=self.stream,
        )

    def drained(self) -> list[Any]:
        return [each.name if isinstance(each, FlightOperation) else each for each in self.stream.drain()]


def test_a_stream_gives_each_operation_once_and_when_it_has_its_end() -> None:
    at = Moving()
    view = at.recorder.in_view(1, ("a", "b"), "m")
    one, two = (view.called(name, "what", 1, "memory", 1.0, 40) for name in ("one", "two"))
    assert isinstance(at.drained()[0], FlightView)
    two[ENDED] = 2.0
    assert at.drained() == ["two"]
    view.ended(one, 3.0, finished=True, algorithm="ring", heard_ns={})
    (told,) = at.stream.drain()
    assert (told.name, told.given, told.algorithm, told.ended) == ("one", 40, "ring", 3 * 10**9)
    assert at.drained() == []
    assert len(at.recorder.operations) == 2, "the recorder has them all the same"


def test_a_stream_gives_what_a_view_left_behind_once_the_next_is_there() -> None:
    at = Moving()
    at.recorder.in_view(1, ("a",), "m").called("left", "what", 1, "memory", 1.0)
    at.recorder.began(1, 1)
    at.stream.drain()
    at.recorder.in_view(2, ("a",), "n")
    told = at.stream.drain()
    assert [type(each).__name__ for each in told] == ["FlightView", "FlightStep", "FlightOperation"]


def test_a_stream_gives_a_step_when_it_is_decided_and_events_as_they_were_told() -> None:
    at = Moving()
    at.recorder.began(7, 1)
    at.recorder.began(8, 1)
    assert at.drained() == []
    event = Event(5, "a", "step_committed", {"step": 7, "view": 1})
    at.recorder(event)
    assert at.drained() == [FlightStep(step=7, view=1, began=0, ended=5, outcome="committed"), event]
    assert [each.step for each in at.stream.drain(last=True)] == [8]


def test_a_stream_that_nobody_empties_takes_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quicoll.observability.flight._STREAMED", 3)
    at = Moving()
    view = at.recorder.in_view(1, ("a",), "m")
    for number in range(5):
        view.called(f"x#{number}", "what", 1, "memory", 1.0)[ENDED] = 2.0
    assert at.stream.dropped == 2
    assert at.drained()[1:] == ["x#0", "x#1", "x#2"]


def test_what_is_recorded_can_be_read_and_drawn(tmp_path: Path) -> None:
    kept = record_rank(job="j", node="worker-0", chance=1, flight_dir=None, trace_dir=tmp_path / "traces")
    assert kept is not None
    view = kept.recorder.in_view(1, ("worker-0",), "m")
    for number in range(1000):
        view.called(f"x#{number}", "what", None, "memory", 1.0 + number)[ENDED] = 1.5 + number
    kept.recorder.close()
    assert all(thread.name != "quicoll-stream" for thread in threading.enumerate())
    (path,) = (tmp_path / "traces").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    (found,), unread = read_traces(tmp_path / "traces")
    assert (len(found.of(FlightOperation)), unread) == (1000, {})
    with pytest.raises(SystemExit) as ended:
        main(["trace", str(tmp_path / "traces"), str(tmp_path / "out.json")])
    assert not ended.value.code
    assert len(slices(read_trace(tmp_path / "out.json"), "collective")) == 1000


def test_where_nothing_is_asked_for_nothing_is_kept() -> None:
    assert record_rank(job="j", node="a", chance=1, flight_dir=None, trace_dir=None) is None


def test_a_torn_file_is_named_and_what_it_says_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "a.1.trace"
    file = TraceFile(path, header("a"))
    file.take([VIEW, *(operation(f"x#{number}", 2 * MS, 3 * MS) for number in range(3))])
    file.close(0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-60])
    (tmp_path / "b.1.trace").write_bytes(b"\xff no trace")
    files, unread = read_traces(tmp_path)
    assert sorted(unread) == ["a.1.trace", "b.1.trace"]
    assert "torn" in unread["a.1.trace"]
    assert len(slices(drawn(*files), "collective")) >= 2


def test_a_trace_ends_at_its_bound_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_trace, "MAX_TRACE", 4000)
    file = TraceFile(tmp_path / "a.1.trace", header("a"))
    for number in range(100):
        file.take([operation(f"x#{number}", 2 * MS, 3 * MS)])
    file.close(0)
    assert (tmp_path / "a.1.trace").stat().st_size < 5000
    (found,), unread = read_traces(tmp_path)
    assert unread == {}
    assert [event.what for event in found.of(FlightEvent)] == ["trace_incomplete"]
    assert slices(drawn(found), "collective")


def test_operations_that_were_left_out_are_counted(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "a.1.trace", header("a"))
    file.close(7)
    (found,), _ = read_traces(tmp_path)
    assert found.of(FlightEvent)[0].text.startswith("7 operations were left out")


def test_a_directory_without_traces_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="QUICOLL_TRACE_DIR"):
        read_traces(tmp_path)
