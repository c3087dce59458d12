"""Events reach every observer; a bad observer harms no other."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import UTC, datetime
from pathlib import Path

import pytest

from quicoll import Event, JsonLines, LocalError
from quicoll.observability.events import Observers


def test_events_are_one_json_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "worker-0.jsonl"
    lines = JsonLines(path, now=lambda: datetime(2026, 11, 24, 0, 30, tzinfo=UTC))
    observers = Observers("worker-0", lambda: 1_500_000_000, lines)
    observers.emit("view_installed", view=3, nodes=["a", "b"])
    observers.emit("held", cause='a "reason"')
    observers.close()
    observers.emit("held", cause="after the end")  # is dropped, not an error
    got = [json.loads(line) for line in path.read_text().splitlines()]
    assert got == [
        {
            "t": 1.5,
            "time": "2026-11-24T00:30:00.000+00:00",
            "node": "worker-0",
            "kind": "view_installed",
            "view": 3,
            "nodes": ["a", "b"],
        },
        {"t": 1.5, "time": "2026-11-24T00:30:00.000+00:00", "node": "worker-0", "kind": "held", "cause": 'a "reason"'},
    ]


@pytest.mark.parametrize("error", [ValueError("broken observer"), SystemExit(3), asyncio.CancelledError()])
def test_an_observer_that_raises_is_logged_and_the_others_still_hear(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    heard: list[Event] = []

    def bad(event: Event) -> None:
        raise error

    observers = Observers("n", lambda: 7, bad, None, heard.append)
    with caplog.at_level(logging.ERROR, logger="quicoll"):
        observers.emit("fault", what="x")
    assert heard == [Event(7, "n", "fault", {"what": "x"})]
    assert "an observer failed on fault" in caplog.text


def test_a_path_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="cannot write events"):
        JsonLines(tmp_path / "file" / "x.jsonl")
