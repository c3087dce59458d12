"""Recovery times from events, and the reader of files that are still being written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quicoll.demo.timeline import EventReader, FaultMark, Moment, measure_recovery

NODES = ["a", "b", "c"]


def event(t: float, node: str, kind: str, **fields: object) -> Moment:
    return Moment(t, node, kind, dict(fields))


def history() -> list[Moment]:
    """c is killed at 10.0; b notices at 11.5 and a at 11.75; view 2 without c; step 7 at 12.0; c is back at 15.0."""
    return [
        *(event(1.0, node, "view_installed", view=1, nodes=NODES) for node in NODES),
        *(event(9.0, node, "step_committed", step=6, view=1) for node in NODES),
        event(11.5, "b", "step_aborted", step=7, view=1, cause="c is lost", lost=["c"]),
        event(11.5, "b", "view_ended", view=1, cause="c is lost", lost=["c"]),
        event(11.75, "a", "view_ended", view=1, cause="c is lost", lost=["c"]),
        *(event(11.875, node, "view_installed", view=2, nodes=["a", "b"]) for node in ("a", "b")),
        *(event(12.0, node, "step_committed", step=7, view=2) for node in ("a", "b")),
        *(event(14.5, node, "view_ended", view=2, cause="c joins", lost=[]) for node in ("a", "b")),
        *(event(15.0, node, "view_installed", view=3, nodes=NODES) for node in NODES),
        *(event(15.5, node, "step_committed", step=8, view=3) for node in NODES),
    ]


FAULT = FaultMark(t=10.0, node="c", cause="killed")


def test_each_phase_of_a_recovery_is_measured_from_the_slowest_of_the_others() -> None:
    recovery = measure_recovery(history(), FAULT, nodes=NODES)
    assert (recovery.cause, recovery.node, recovery.rank) == ("killed", "c", 2)
    assert (recovery.abort_s, recovery.resume_s, recovery.rejoined_s) == (1.75, 0.25, 5.0)
    assert recovery.complete


def test_the_order_of_the_events_in_the_files_does_not_matter() -> None:
    assert measure_recovery(reversed(history()), FAULT, nodes=NODES) == measure_recovery(history(), FAULT, nodes=NODES)


def test_a_fault_that_somebody_has_not_noticed_is_not_recovered_from() -> None:
    unnoticed = [moment for moment in history() if moment.node != "a" or moment.t < 10]
    assert measure_recovery(unnoticed, FAULT, nodes=NODES).abort_s is None


def test_who_was_not_in_the_view_need_not_notice() -> None:
    assert measure_recovery(history(), FAULT, nodes=[*NODES, "d"]) == measure_recovery(history(), FAULT, nodes=NODES)


@pytest.mark.parametrize(("until", "missing"), [(11.9, "resume_s"), (14.0, "rejoined_s")])
def test_what_did_not_happen_is_none(until: float, missing: str) -> None:
    recovery = measure_recovery([moment for moment in history() if moment.t <= until], FAULT, nodes=NODES)
    assert getattr(recovery, missing) is None
    assert not recovery.complete


def test_the_lost_nodes_own_events_are_not_taken_for_the_others() -> None:
    own = [event(10.5, "c", "step_aborted", step=7, view=1, cause="held", lost=[])]
    own += [event(10.75, "c", "step_committed", step=7, view=1)]
    assert measure_recovery(history() + own, FAULT, nodes=NODES) == measure_recovery(history(), FAULT, nodes=NODES)


def test_the_feed_gives_each_event_once_and_leaves_a_half_written_line(tmp_path: Path) -> None:
    feed = EventReader(tmp_path)
    assert feed.read() == []
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(json.dumps({"t": 2.0, "node": "a", "kind": "held"}) + '\n{"t": 3.0, "no')
    second.write_text(json.dumps({"t": 1.0, "node": "b", "kind": "fault", "what": "cut"}) + "\n")
    assert feed.read() == [event(1.0, "b", "fault", what="cut"), event(2.0, "a", "held")]
    with open(first, "a") as file:
        file.write('de": "a", "kind": "held"}\n')
    assert feed.read() == [event(3.0, "a", "held")]
    assert feed.read() == []


def test_the_feed_of_a_directory_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert EventReader(tmp_path / "later").read() == []
