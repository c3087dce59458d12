"""What is concluded from files of flight recorders that contradict each other, are of several runs, or lie."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quicoll.cli.main import main
from quicoll.errors import Corrupted, Mismatch, Partitioned, PeerError
from quicoll.observability.flight import FlightRecorder, UnderWay
from quicoll.observability.flight_clocks import ClockOffset, clock_offsets
from quicoll.observability.flight_files import flight_file, write_flight
from quicoll.observability.flight_record import FlightFile
from quicoll.observability.post_mortem import EndOfView, conclude, told_in_sentences

S = 1_000_000_000
NODES = ("a", "b", "c")


class Rank:
    """A recorder whose clock a test sets, in seconds."""

    def __init__(
        self, node: str, *, mark: str = "m1", clock: str = "here", job: str = "job", role: str = "rank"
    ) -> None:
        self.now = 10.0
        self.flight = FlightRecorder(
            job=job,
            node=node,
            process="1",
            clock=clock,
            host=f"host of {clock}",
            now_ns=lambda: round(self.now * S),
            wall_ns=lambda: round(self.now * S) + 1_700_000_000 * S,
            role=role,
        )
        self.view = self.flight.in_view(1, NODES, mark)

    def call(self, name: str, at: float, end: float = 0.0, **heard: float) -> None:
        entry = self.view.called(name, "barrier", 4, "quic", at)
        if end:
            times = {NODES.index(node): round(when * S) for node, when in heard.items()}
            self.view.ended(entry, end, finished=True, algorithm="ring", heard_ns=times)

    def saw(self, error: Exception, *absent: str, at: float = 11.0, seen: bool = True) -> Rank:
        self.now = at
        way = [UnderWay("barrier#1", "barrier", 4, 10.5, {NODES.index(node): "" for node in absent})] if absent else []
        self.view.broke(error, way, seen=seen)
        return self

    def told(self, error: Exception, at: float = 12.0) -> Rank:
        return self.saw(error, at=at, seen=False)

    @property
    def file(self) -> FlightFile:
        return self.flight.snapshot()


def ends(*ranks: Rank) -> Sequence[EndOfView]:
    return conclude(rank.file for rank in ranks).ends


def lost(node: str) -> PeerError:
    return PeerError(f"{node} was lost", node=node, lost=(node,))


def test_what_the_coordinator_told_counts_and_not_what_one_rank_saw() -> None:
    a, b = Rank("a").saw(lost("b")).told(lost("c")), Rank("b").saw(lost("a")).told(lost("c"))
    (end,) = ends(a, b)
    assert (end.kind, end.culprits, end.gave_up) == ("lost", ("c",), ("a", "b"))
    assert end.seen == {"a": "b was lost", "b": "a was lost"}


def test_a_rank_that_is_cut_off_does_not_outvote_those_with_a_quorum() -> None:
    cut = [Rank(node).told(Partitioned("the coordinator was lost")) for node in "ab"]
    (end,) = ends(*cut, Rank("c").told(lost("a")))
    assert (end.kind, end.culprits, end.cut_off) == ("lost", ("a",), ("a", "b"))
    (alone,) = ends(*cut)
    assert (alone.kind, alone.culprits, alone.gave_up) == ("cut off", ("a", "b"), ())


def test_without_a_word_of_the_coordinator_what_most_saw_counts_and_that_is_said() -> None:
    ranks = [Rank("a").saw(lost("c")), Rank("b").saw(lost("c")), Rank("c").saw(lost("a"))]
    found = conclude(rank.file for rank in ranks)
    assert (found.ends[0].kind, found.ends[0].culprits) == ("lost", ("c",))
    assert "    nothing was heard from the coordinator: this is what most ranks saw" in told_in_sentences(found)


@pytest.mark.parametrize(
    ("error", "absent", "kind"),
    [
        (PeerError("did not call", node="b"), "b", "late"),
        (PeerError("failed", node="b"), "", "failed"),
        (Mismatch("differ", node="b"), "", "mismatch"),
        (Corrupted("bits", node="b"), "", "corrupted"),
        (PeerError("a view with more ranks follows"), "", "changed"),
    ],
)
def test_each_kind_of_end_is_told_as_such(error: Exception, absent: str, kind: str) -> None:
    (end,) = ends(Rank("a").saw(error, *absent).told(error))
    assert end.kind == kind
    assert end.culprits == (() if kind == "changed" else ("b",))


def test_a_rank_that_left_by_an_error_of_its_own_is_no_lost_one_and_one_that_was_done_no_failure() -> None:
    left, done = Rank("b"), Rank("b")
    left.flight.left("ValueError")
    done.flight.left("done")
    (end,) = ends(Rank("a").told(lost("b")), left)
    assert (end.kind, end.last["b"].left) == ("left", "ValueError")
    assert ends(Rank("a").told(lost("b")), done)[0].kind == "changed"


def test_who_left_after_it_had_heard_that_the_view_was_over_was_lost_before() -> None:
    back = Rank("b").told(Partitioned("the coordinator was lost"), at=20.0)
    back.flight.left("JobDone")
    (end,) = ends(Rank("a").told(lost("b")), back)
    assert (end.kind, end.culprits) == ("lost", ("b",))
    assert end.last["b"].left == ""
    assert end.last["b"].heard == "the coordinator was lost"


def test_views_of_the_same_number_in_several_runs_are_kept_apart() -> None:
    found = ends(Rank("a").told(lost("b")), Rank("a", mark="m2").told(lost("c"), at=30.0))
    assert [end.culprits for end in found] == [("b",), ("c",)]


def test_of_a_rank_without_a_file_the_last_call_is_told_that_others_know_of() -> None:
    a, b = Rank("a"), Rank("b")
    a.call("barrier#0", 1.0, 2.0, a=1.0, b=1.1, c=1.2)
    a.call("barrier#1", 3.0, 4.0, a=3.0, b=3.1)
    b.call("barrier#0", 1.1, 2.1, a=1.2, b=1.1, c=1.3)
    a.told(lost("c"))
    (end,) = ends(a, b)
    last = end.last["c"]
    assert not last.written
    assert last.operation is not None
    # It was not heard to call the second one; but that is of all ranks, and has ended.
    assert last.operation.name == "barrier#1"


def test_files_of_another_job_are_left_out_and_missing_and_torn_ones_are_named() -> None:
    torn = Rank("b").told(lost("c")).file
    files = [Rank("a").told(lost("c")).file, Rank("x", job="other").file]
    found = conclude([*files, FlightFile(header=torn.header, records=torn.records, trouble=("it is torn",))])
    assert found.job == "job"
    assert found.remarks == (
        "1 files are of other jobs and are left out",
        "no file of c: what is said of it is from others",
        "the file of b: it is torn",
    )


def test_clocks_that_heard_each_other_are_related_and_others_by_their_walls() -> None:
    a, b, c = Rank("a", clock="one"), Rank("b", clock="two"), Rank("c", clock="three")
    # b's clock is 100 s ahead; a call takes 0.1 s to b and 0.3 s back.
    a.call("barrier#0", 1.0, 2.0, a=1.0, b=1.4)
    b.call("barrier#0", 101.1, 102.0, b=101.1, a=101.1)
    b.now += 100
    c.now += 7
    offsets = clock_offsets([a.file, b.file, c.file, Rank("a", clock="one").file])
    assert offsets["one"] == ClockOffset(0, 0)
    assert offsets["two"] == ClockOffset(round(-99.9 * S), round(0.2 * S))
    assert offsets["three"].bound_ns is None


def test_a_clock_that_lies_is_not_related_by_what_it_says() -> None:
    a, b = Rank("a", clock="one"), Rank("b", clock="two")
    a.call("barrier#0", 1.0, 2.0, a=1.0, b=0.1)
    b.call("barrier#0", 1.0, 2.0, b=1.0, a=0.1)  # each heard of the other's call before it was made
    assert {offset.bound_ns for offset in clock_offsets([a.file, b.file]).values()} == {0, None}


def told(directory: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[Any, str]:
    with pytest.raises(SystemExit) as ended:
        main(["post-mortem", str(directory), *options])
    return ended.value.code, capsys.readouterr().out


def test_the_command_tells_in_sentences_and_in_json_and_its_status_says_whether_there_was_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = Rank("a")
    write_flight(flight_file(tmp_path, "a", "1"), rank.file)
    assert told(tmp_path, capsys)[0] == 1
    write_flight(flight_file(tmp_path, "a", "1"), rank.told(lost("c\x1b[2J")).file)
    (tmp_path / "b.1.flight").write_text("nothing of ours")
    status, text = told(tmp_path, capsys)
    assert status in (0, None)
    assert "view 1 of 3 ranks ended: c [2J was lost\n" in text
    assert "b.1.flight: it does not begin as the file of a flight recorder does\n" in text
    assert "\x1b" not in text
    status, text = told(tmp_path, capsys, "--json")
    assert json.loads(text)["ends"][0]["kind"] == "lost"
    assert json.loads(text)["unread"] == ["b.1.flight: it does not begin as the file of a flight recorder does"]
    (tmp_path / "a.1.flight").unlink()
    assert told(tmp_path, capsys)[0] == 2
    (tmp_path / "b.1.flight").unlink()
    assert told(tmp_path, capsys)[0] == 2
