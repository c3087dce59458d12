"""A flight recorder keeps what was last, in bounds, and says what was under way when a view broke."""

from __future__ import annotations

import pytest

from quicoll.errors import PeerError
from quicoll.observability.events import Observers
from quicoll.observability.flight import ENDED, EVENTS, OPERATIONS, STEPS, FlightRecorder, UnderWay
from quicoll.observability.flight_record import (
    MAX_FILE,
    AwaitedCall,
    BrokenView,
    FlightEvent,
    FlightFile,
    FlightOperation,
    FlightStep,
    FlightView,
    LateStack,
    ProcessEnd,
    decode_flight,
    encode_flight,
    printable,
)

S = 1_000_000_000
NODES = ("a", "b", "c")


class Bench:
    """A recorder on a clock that a test sets. kept: how often there was something to write down."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.kept = 0
        self.recorder = FlightRecorder(
            job="job",
            node="a",
            process="1",
            clock="here",
            host="host",
            now_ns=lambda: self.now_ns,
            wall_ns=lambda: self.now_ns + 1000 * S,
        )
        self.recorder.keep = self.keep
        self.observers = Observers("a", lambda: self.now_ns, flight=self.recorder)
        self.view = self.recorder.in_view(1, NODES, "mark")

    def keep(self) -> None:
        self.kept += 1

    def read(self) -> FlightFile:
        """What is kept, once over the disk."""
        read = decode_flight(encode_flight(self.recorder.snapshot()))
        assert isinstance(read, FlightFile), read
        assert read.trouble == ()
        return read


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_operations_are_kept_with_their_times_and_how_they_ended(bench: Bench) -> None:
    first = bench.view.called("all_reduce#0", "all_reduce float32 (1)", 7, "quic", 1.0)
    bench.view.ended(first, 1.5, finished=True, algorithm="ring", heard_ns={0: S, 1: S + 5, 2: S + 9})
    second = bench.view.called("all_reduce#1", "all_reduce float32 (1)", 7, "memory", 2.0)
    second[ENDED] = 2.25
    third = bench.view.called("barrier#2", "barrier", None, "quic", 3.0)
    bench.view.ended(third, 4.0, finished=False, algorithm="", heard_ns={0: 3 * S})
    bench.view.called("barrier#3", "barrier", None, "memory", 5.0)
    told = [
        (each.name, each.called, each.settled, each.ended, each.outcome) for each in bench.read().of(FlightOperation)
    ]
    assert told == [
        ("all_reduce#0", S, S + 9, 3 * S // 2, "finished"),
        ("all_reduce#1", 2 * S, 0, 9 * S // 4, "finished"),
        ("barrier#2", 3 * S, 0, 4 * S, "aborted"),
        ("barrier#3", 5 * S, 0, 0, ""),
    ]
    one = bench.read().of(FlightOperation)[0]
    assert (one.step, one.carrier, one.algorithm, one.view) == (7, "quic", "ring", 1)
    assert one.heard == {"a": S, "b": S + 5, "c": S + 9}
    assert bench.kept == 0, "nothing has failed"


def test_only_the_last_of_everything_is_kept(bench: Bench) -> None:
    for number in range(2 * OPERATIONS):
        bench.view.called(f"barrier#{number}", "barrier", number, "quic", float(number))
        bench.recorder.began(number, 1)
        bench.observers.emit("held", cause=str(number))
    read = bench.read()
    assert next(each.name for each in read.of(FlightOperation)) == f"barrier#{OPERATIONS}"
    assert len(read.of(FlightOperation)) == OPERATIONS
    assert len(read.of(FlightStep)) == STEPS
    assert len(read.of(FlightEvent)) == EVENTS


def test_a_step_has_its_beginning_and_what_became_of_it(bench: Bench) -> None:
    bench.now_ns = S
    bench.recorder.began(4, 1)
    bench.now_ns = 2 * S
    bench.observers.emit("step_aborted", step=4, view=1, cause="x", lost=[])
    bench.recorder.began(4, 2)
    bench.now_ns = 3 * S
    bench.observers.emit("step_committed", step=4, view=2)
    bench.recorder.began(5, 2)
    told = [(each.step, each.view, each.began, each.ended, each.outcome) for each in bench.read().of(FlightStep)]
    assert told == [(4, 1, S, 2 * S, "aborted"), (4, 2, 2 * S, 3 * S, "committed"), (5, 2, 3 * S, 0, "")]
    assert bench.kept == 1, "the abort alone"


def test_a_view_that_breaks_tells_what_was_under_way_and_who_was_waited_for(bench: Bench) -> None:
    bench.now_ns = 6 * S
    error = PeerError("lost: silent", rank=1, node="b", view=1, lost=("b",))
    way = UnderWay("all_reduce#3", "all_reduce float32 (1)", 9, 5.0, {1: "", 2: "barrier"})
    bench.view.broke(error, [way], seen=True)
    assert bench.kept == 1
    read = bench.read()
    assert read.header.why == "view 1 is over: lost: silent"
    assert read.of(FlightView) == [FlightView(t=0, view=1, mark="mark", nodes=NODES)]
    awaited = AwaitedCall(
        name="all_reduce#3",
        what="all_reduce float32 (1)",
        step=9,
        called=5 * S,
        absent=("b", "c"),
        instead={"c": "barrier"},
    )
    assert read.of(BrokenView) == [
        BrokenView(
            t=6 * S,
            view=1,
            seen=True,
            error="PeerError",
            text="lost: silent",
            node="b",
            lost=("b",),
            awaited=(awaited,),
        )
    ]


def test_a_rank_that_leaves_says_why_once_and_its_own_end_is_no_view_that_breaks(bench: Bench) -> None:
    bench.recorder.left("ValueError")
    bench.recorder.left("done")
    bench.view.broke(PeerError("the job is closed"), [], seen=False)
    read = bench.read()
    assert read.header.left == "ValueError"
    assert read.of(BrokenView) == []
    assert bench.kept == 2


def test_stacks_and_ends_of_processes_are_kept(bench: Bench) -> None:
    bench.recorder.stack("b", "x" * 100_000)
    bench.recorder.process_ended("b", "17", -9, "SIGKILL")
    read = bench.read()
    assert read.of(ProcessEnd) == [ProcessEnd(t=0, node="b", process="17", status=-9, text="SIGKILL")]
    assert len(read.of(LateStack)[0].text) == 16 << 10


def test_what_is_too_long_is_cut_and_a_snapshot_can_always_be_read(bench: Bench) -> None:
    for number in range(OPERATIONS):
        bench.view.called("n" * 5000, "w" * 50_000, number, "quic", 1.0)
    bench.view.broke(
        PeerError("e" * 50_000, node="n" * 5000), [UnderWay("n" * 999, "w" * 9999, 1, 0.0, {})] * 99, seen=True
    )
    assert len(bench.read().of(FlightOperation)) == OPERATIONS


def test_of_a_file_that_would_be_too_large_the_older_records_go() -> None:
    bench = Bench()
    nodes = [f"{number:0256}" for number in range(60)]
    view = bench.recorder.in_view(2, nodes, "m")
    heard = dict.fromkeys(range(60), S)
    for number in range(OPERATIONS):
        entry = view.called(f"barrier#{number}", "w" * 2048, number, "quic", 1.0)
        view.ended(entry, 2.0, finished=True, algorithm="ring", heard_ns=heard)
    data = encode_flight(bench.recorder.snapshot())
    assert len(data) <= MAX_FILE
    read = decode_flight(data)
    assert isinstance(read, FlightFile)
    kept = read.of(FlightOperation)
    assert 0 < len(kept) < OPERATIONS
    assert kept[-1].name == f"barrier#{OPERATIONS - 1}"
    assert read.of(FlightView)[-1].view == 2


# ---------------------------------------------------------------------------------------------------------------------
# Files that are not what they should be


def whole() -> bytes:
    bench = Bench()
    for number in range(20):
        bench.view.called(f"barrier#{number}", "barrier", number, "quic", 1.0)
    return encode_flight(bench.recorder.snapshot())


def test_a_torn_file_is_read_as_far_as_it_goes_and_is_said_to_be_torn() -> None:
    data = whole()
    for end in range(1, len(data) - 1):
        read = decode_flight(data[:end])
        assert isinstance(read, str) or any("torn" in each for each in read.trouble), end


def test_no_bytes_make_the_reader_fail() -> None:
    import random

    data, chance = whole(), random.Random(7)
    for _ in range(2000):
        spoiled = bytearray(data)
        for _ in range(chance.randrange(1, 6)):
            spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
        assert isinstance(decode_flight(bytes(spoiled)), FlightFile | str)
    for hostile in (
        b"",
        b"\n" * 100_000,
        b"[" * 100_000,
        b"{}",
        b"\xff\xfe",
        b'{"kind":"flight"}',
        b"0" * (MAX_FILE + 1),
    ):
        assert isinstance(decode_flight(hostile), str), hostile[:20]


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind":"operation","view":1e400,"name":"x","what":"y"}',
        b'{"kind":"operation","view":' + b"9" * 5000 + b',"name":"x","what":"y"}',
        b'{"kind":"operation","view":1,"name":"' + b"x" * 300 + b'","what":"y"}',
        b'{"kind":"view","t":1,"view":1,"mark":"m","nodes":[' + b'"a",' * 5000 + b'"a"]}',
        b'{"kind":"stack","t":1,"node":"a","text":"' + b"x" * 20_000 + b'"}',
        b'{"kind":"flight"}',
        b'{"kind":"nothing of ours"}',
        b"\x00",
    ],
    ids=lambda line: line[:24].decode(errors="replace") if isinstance(line, bytes) else None,
)
def test_a_line_that_is_out_of_bounds_is_left_out_and_counted(line: bytes) -> None:
    head, *rest = whole().split(b"\n")
    read = decode_flight(b"\n".join([head, line, *rest]))
    assert isinstance(read, FlightFile)
    assert read.trouble == ("1 of its lines are no records and are left out",)
    assert len(read.of(FlightOperation)) == 20


def test_text_for_a_terminal_has_nothing_that_steers_it_and_an_end() -> None:
    assert printable("a\x1b[2Jb\r\nc\u202e") == "a [2Jb  c "
    assert printable("x" * 100, 10) == "xxxxxxx..."
