"""What is said of a job to a person and to a program: sentences, rows, exit statuses, how they stand on a terminal."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from quicoll.cli.quantity_words import duration_words, rate_words, share_words, size_words
from quicoll.cli.status_words import facts_of, picture_of
from quicoll.cli.top import drawn
from quicoll.membership.status import EventStatus, JobStatus, MemberStatus
from quicoll.membership.status_client import Glance

if TYPE_CHECKING:
    from quicoll.cli.status_words import Picture
    from quicoll.membership.status import MemberState

S = 10**9


def glance(*members: MemberStatus, **fields: Any) -> Glance:
    whole: dict[str, Any] = {
        "led_ns": 192 * S,
        "stage": "installed",
        "world_size": 2,
        "view_id": 7,
        "stage_ns": 60 * S,
        "committed_step": 512,
        "committed_ns": S // 10,
        "step_ns": S // 2,
        "recent": (60, 30 * S),
        **fields,
    }
    return Glance(job="train", coordinator="10.0.0.1:4433", status=JobStatus(**whole, members=members))


def node(name: str, state: MemberState = "at work", rank: int | None = None, **fields: Any) -> MemberStatus:
    return MemberStatus(node=name, state=state, rank=rank, **{"for_ns": 60 * S, **fields})


AT_WORK = (node("a", rank=0, step=512, rtt_ns=1_540_000), node("b", rank=1, step=512, rtt_ns=240_000_000))


def sentence(*members: MemberStatus, **fields: Any) -> str:
    return picture_of(glance(*members, **fields)).sentence


def test_a_job_at_work_says_its_step_its_rate_and_its_view() -> None:
    picture = picture_of(glance(*AT_WORK))
    assert picture.sentence == "job train: at work at step 512 (2 steps/s), view 7 of 2 ranks"
    assert (picture.condition, picture.exit_status) == ("at work", 0)
    assert [row.rtt for row in picture.rows] == ["1.5 ms", "240 ms"]
    slow = sentence(*AT_WORK, recent=(3, 75 * S), step_ns=25 * S)
    assert slow == "job train: at work at step 512 (one in 25 s), view 7 of 2 ranks"


def test_who_is_waited_for_and_who_is_silent_and_lost_is_in_the_sentence_and_first_in_the_rows() -> None:
    members = (
        node("a", "voted", 0),
        node("b", "computing", 1),
        node("c", "outside", 2, doubted=True, silent_ns=3 * S),
        node("d", "lost", for_ns=12 * S, why="d was lost: silent for 2 s"),
        node("e", "left out", out_ns=8 * S, why="e declined"),
    )
    seen = glance(*members, open_step=513, open_ns=4 * S, voting_ns=3 * S, votes=1, world_size=3)
    picture = picture_of(seen)
    assert picture.sentence == (
        "job train: at work at step 512 (2 steps/s), view 7 of 3 ranks; c has not begun, b has not voted; "
        "silent: c (3.0 s); lost: d (12 s ago); left out: e"
    )
    assert [row.node for row in picture.rows] == ["b", "c", "d", "e", "a"]
    assert {row.node: row.note for row in picture.rows} == {
        "a": "",
        "b": "the others wait for it",
        "c": "the others wait for it; silent for 3.0 s",
        "d": "12 s ago: silent for 2 s",
        "e": "for 8.0 s more: e declined",
    }
    assert "step 513 is open for 4.0 s, 1 of 3 ranks voted" in picture.lines[3]
    assert facts_of(seen)["late"] == ["b", "c"]


@pytest.mark.parametrize(
    ("fields", "said", "exit_status"),
    [
        (
            {"stage": "forming", "held": "1 of 3 nodes are here: a", "without_ns": 72 * S},
            "held for 1 min 12 s: 1 of 3 nodes are here: a",
            1,
        ),
        (
            {"stage": "forming", "held": "1 of 3 nodes are here: a", "without_ns": 12 * S},
            "forming: 1 of 3 nodes are here: a",
            0,
        ),
        ({"open_step": 513, "open_ns": 45 * S}, "stalled: step 513 has been open for 45 s; nobody has voted", 1),
        ({"journal_ns": 40 * S}, "stalled: the journal has not answered for 40 s", 1),
        ({"stage": "proposed", "without_ns": 99 * S}, "stalled: no view for 1 min 39 s", 1),
        ({"stage": "proposed", "without_ns": S}, "forming a view", 0),
        (
            {"committed_ns": 300 * S, "stage_ns": 400 * S},
            "idle: view 7 of 2 ranks, no step is open; step 512 was committed 5 min ago",
            0,
        ),
        (
            {"committed_ns": None, "committed_step": 0, "world_size": 1},
            "idle: view 7 of 1 rank, no step is open; no step was committed yet",
            0,
        ),
        ({"stage": "forming", "done": True, "final_step": 1000, "held": "x"}, "done at step 1000", 0),
    ],
    ids=str,
)
def test_each_condition_has_its_sentence_and_its_exit_status(
    fields: dict[str, Any], said: str, exit_status: int
) -> None:
    picture = picture_of(glance(**fields))
    assert picture.sentence == f"job train: {said}"
    assert picture.exit_status == exit_status


def test_who_is_late_in_a_stalled_step_is_said_once() -> None:
    members = (node("a", "voted", 0), node("b", "computing", 1))
    stalled = sentence(*members, open_step=513, open_ns=45 * S, voting_ns=44 * S, votes=1)
    assert stalled == "job train: stalled: step 513 has been open for 45 s; b has not voted"


def test_a_view_that_is_formed_says_who_has_not_answered() -> None:
    said = sentence(node("a", "confirmed", 0), node("b", "asked", 1), stage="proposed", without_ns=S)
    assert said == "job train: forming a view; not answered: b"


def test_where_nobody_has_answered_that_is_said_and_is_an_error() -> None:
    unseen = Glance(job="train", coordinator="a:1", trouble="the coordinator at a:1 gives no answer: nothing listens")
    picture = picture_of(unseen)
    assert (picture.condition, picture.exit_status) == ("unknown", 2)
    assert picture.sentence.endswith("nothing is known of it: the coordinator at a:1 gives no answer: nothing listens")
    facts = facts_of(unseen)
    assert (facts["status"], facts["trouble"]) == (None, unseen.trouble)


def test_a_patience_of_ones_own_decides_what_is_stalled() -> None:
    seen = glance(*AT_WORK, open_step=513, open_ns=4 * S)
    assert picture_of(seen).exit_status == 0
    assert picture_of(seen, patience_ns=3 * S).exit_status == 1
    assert facts_of(seen, patience_ns=3 * S)["condition"] == "stalled"


def test_a_program_gets_all_fields_with_durations_in_seconds() -> None:
    seen = glance(*AT_WORK, events=(EventStatus(ago_ns=S // 2, kind="held", said="waits"),))
    status = facts_of(seen)["status"]
    assert (status["led_s"], status["committed_s"]) == (192.0, 0.1)
    assert (status["recent_steps"], status["recent_s"]) == (60, 30.0)
    assert status["members"][0]["rtt_s"] == 0.00154
    assert status["members"][0]["doubted"] is False
    assert status["events"] == [{"ago_s": 0.5, "kind": "held", "said": "waits"}]
    assert not [name for name in (*status, *status["members"][0]) if name.endswith("_ns")]


@pytest.mark.parametrize(
    ("nanoseconds", "said"),
    [
        (0, "0.0 s"),
        (9_940_000_000, "9.9 s"),
        (9_960_000_000, "10 s"),
        (59 * S, "59 s"),
        (59_600_000_000, "1 min"),
        (200 * S, "3 min 20 s"),
        (7500 * S, "2 h 5 min"),
        (86400 * S, "1 d"),
        (100 * 3600 * S, "4 d 4 h"),
    ],
)
def test_a_duration_has_two_units_at_most(nanoseconds: int, said: str) -> None:
    assert duration_words(nanoseconds) == said


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (12_340_000_000, "12.3 GB"),
        (2**62, "4.612e+06 TB"),
    ],
)
def test_a_size_has_the_largest_unit_that_leaves_a_whole_one(nbytes: int, said: str) -> None:
    assert size_words(nbytes) == said
    assert rate_words(nbytes) == f"{said}/s"


@pytest.mark.parametrize(
    ("share", "said"), [(0.0, "0 %"), (1e-9, "< 0.1 %"), (0.0125, "1.2 %"), (0.0994, "9.9 %"), (0.5, "50 %")]
)
def test_a_share_that_is_not_nothing_is_not_said_to_be(share: float, said: str) -> None:
    assert share_words(share) == said


def on_terminal(picture: Picture, *, width: int, height: int | None = None, color: bool = True) -> str:
    written = io.StringIO()
    console = Console(
        file=written, width=width, height=height or 100, force_terminal=True, no_color=not color, highlight=False
    )
    console.print(drawn(picture, room=None if height is None else console.size))
    return written.getvalue()


def without_styles(text: str) -> str:
    return re.sub("\x1b\\[[0-9;]*m", "", text)


CROWD = [node(f"gpu-{number:04}", "voted", number) for number in range(1000)]


@pytest.mark.parametrize("width", [80, 120])
def test_a_picture_keeps_to_the_terminal_and_shows_trouble_first(width: int) -> None:
    events = tuple(EventStatus(ago_ns=9 * S, kind="peer_lost", said="lost gpu: " + "why " * 40) for _ in range(20))
    lost = node("gpu-1000", "lost", for_ns=9 * S, why="silent " * 20)
    picture = picture_of(glance(*CROWD, lost, world_size=1000, events=events))
    text = without_styles(on_terminal(picture, width=width, height=24))
    lines = text.splitlines()
    assert 20 <= len(lines) < 24
    assert max(map(len, lines)) <= width
    nodes = [line.split() for line in lines if "voted " in line or " lost  " in line]
    assert nodes[0][:3] == ["!", "gpu-1000", "lost"]
    assert nodes[1][:3] == ["0", "gpu-0000", "voted"]
    assert f"  and {1001 - len(nodes)} more nodes" in lines
    assert sum("lost gpu" in line for line in lines) == 3


def test_where_it_need_not_fit_everything_is_shown_with_whole_notes() -> None:
    lost = node("gpu-1000", "lost", for_ns=9 * S, why="silent " * 20)
    text = without_styles(on_terminal(picture_of(glance(*CROWD, lost, world_size=1000)), width=80))
    assert "more nodes" not in text
    assert text.count("silent") == 20
    assert text.count("gpu-0") == 1000


def test_what_a_peer_has_written_is_shown_and_never_a_style() -> None:
    picture = picture_of(glance(node("a", "lost", for_ns=S, why="[bold]x[/bold] [red]")))
    assert "[bold]x[/bold] [red]" in on_terminal(picture, width=120)


@pytest.mark.parametrize(
    ("members", "fields", "grade"),
    [
        (AT_WORK, {}, "good"),
        ((*AT_WORK, node("c", "lost")), {}, "wait"),
        (AT_WORK, {"open_step": 513, "open_ns": 45 * S}, "bad"),
        ((), {"stage": "proposed"}, "wait"),
        ((node("a", "lost"),), {"stage": "forming", "done": True}, "good"),
    ],
)
def test_what_needs_somebody_is_not_coloured_as_what_does_not(
    members: tuple[MemberStatus, ...], fields: dict[str, Any], grade: str
) -> None:
    assert picture_of(glance(*members, **fields)).grade == grade


def test_what_a_terminal_would_obey_is_not_shown() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\r\nquicoll: all is well\N{RIGHT-TO-LEFT OVERRIDE}"
    seen = glance(
        node(f"a{evil}", "lost", for_ns=S, why=evil),
        stage="forming",
        held=evil,
        waiting_for=evil,
        wanted=3,
        events=(EventStatus(ago_ns=0, kind="held", said=evil),),
    )
    picture = picture_of(seen)
    unseen = Glance(job="train", coordinator="a:1", trouble=evil)
    rows = [text for row in picture.rows for text in (row.node, row.note)]
    events = [said for _, said in picture.events]
    for text in (picture.sentence, *picture.lines, *rows, *events, picture_of(unseen).sentence):
        assert text.isprintable(), text
    assert "owned" in picture.sentence


def test_without_colour_the_words_say_it_all() -> None:
    text = on_terminal(picture_of(glance(stage="forming", held="1 of 2", without_ns=99 * S)), width=80, color=False)
    assert "HELD" in text
    assert "\x1b[31" not in text
