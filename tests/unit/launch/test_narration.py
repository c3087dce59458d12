"""What who watches a run hears of a loss: each thing once, and nothing of what is as it should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quicoll.launch.following import WorkerEvents
from quicoll.launch.narration import Narrator


def event(kind: str, node: str = "worker-0", **fields: Any) -> dict[str, Any]:
    return {"t": 1.0, "node": node, "kind": kind, **fields}


def test_an_abort_the_next_view_and_a_state_that_came_are_told_once() -> None:
    narrator = Narrator()
    told = [
        event("view_installed", view=1, nodes=["worker-0", "worker-1"]),
        event("view_installed", "worker-1", view=1, nodes=["worker-0", "worker-1"]),
        event("step_aborted", step=7, view=1, cause="worker-1 was lost"),
        event("view_installed", view=2, nodes=["worker-0"]),
        event("step_aborted", "worker-2", step=7, view=1, cause="worker-1 was lost"),
        event("view_installed", view=3, nodes=["worker-0", "worker-1"]),
        event("view_installed", "worker-1", view=3, nodes=["worker-0", "worker-1"]),
        event("state_received", "worker-1", from_rank=0, step=9),
    ]
    assert [line for each in told if (line := narrator.line(each))] == [
        "step 7 aborted in view 1: worker-1 was lost",
        "view 2: 1 member, worker-0",
        "view 3: 2 members, worker-0, worker-1",
        "worker-1 has received the state of step 9",
    ]


def test_what_is_handed_over_at_the_start_and_other_events_are_not_told() -> None:
    narrator = Narrator()
    assert narrator.line(event("state_received", from_rank=0, step=0)) == ""
    assert narrator.line(event("straggler", rank=1)) == ""


def test_events_of_earlier_runs_are_not_read_and_half_a_line_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    path.write_text(json.dumps(event("step_committed", step=1, view=1)) + "\n")
    events = WorkerEvents(path)
    events.look()
    assert not events.committed
    line = json.dumps(event("state_received", step=9))
    with open(path, "a") as file:
        file.write(json.dumps(event("step_committed", step=2, view=1)) + "\n" + line[:20])
        file.flush()
        assert events.read() == []
        assert events.committed
        file.write(line[20:] + "\n")
    assert [each["step"] for each in events.read()] == [9]
    assert events.read() == []
    events.begin()
    assert not events.committed, "the next process has committed nothing yet"


def test_a_worker_that_writes_no_events_has_told_nothing(tmp_path: Path) -> None:
    events = WorkerEvents(tmp_path / "worker-0.jsonl")
    assert events.read() == []
    assert not events.committed
