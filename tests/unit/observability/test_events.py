"""Events reach every observer; a bad observer harms no other."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from quicoll import Event, JsonLines, LocalError
from quicoll.observability.events import Observers
from quicoll_transport.sim import World


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


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()]


def on_virtual_time(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work` on a simulated clock: `asyncio.sleep` in it takes no time."""
    with World(1) as world:
        task = world.host("a").start().create_task(work())
        world.run(limit_ns=1_000_000_000)
        task.result()


def test_that_steps_were_committed_is_written_soon_and_together(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    lines = JsonLines(path)

    async def told() -> None:
        for step in range(1, 5):
            lines(Event(step, "worker-0", "step_committed", {"step": step}))
            await asyncio.sleep(0.0045)
        assert kinds(path) == []
        await asyncio.sleep(0.003)
        assert kinds(path) == ["step_committed"] * 4
        lines(Event(5, "worker-0", "step_committed", {"step": 5}))
        await asyncio.sleep(0.021)
        assert kinds(path) == ["step_committed"] * 5

    on_virtual_time(told)
    lines.close()


def test_what_is_written_at_once_comes_after_what_waits(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    lines = JsonLines(path)

    async def lost() -> None:
        lines(Event(1, "worker-0", "step_committed", {"step": 1}))
        lines(Event(2, "worker-0", "peer_lost", {"peer": "worker-1"}))
        assert kinds(path) == ["step_committed", "peer_lost"]
        lines(Event(3, "worker-0", "step_committed", {"step": 2}))
        lines.close()
        assert kinds(path) == ["step_committed", "peer_lost", "step_committed"]

    on_virtual_time(lost)


def test_without_a_loop_every_line_is_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    lines = JsonLines(path)
    lines(Event(1, "worker-0", "step_committed", {"step": 1}))
    assert kinds(path) == ["step_committed"]
    lines.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full, a disk that is full, is Linux's")
def test_a_line_that_cannot_be_written_late_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = JsonLines(Path("/dev/full"))

    async def told() -> None:
        lines(Event(1, "worker-0", "step_committed", {"step": 1}))
        await asyncio.sleep(0.021)

    on_virtual_time(told)
    assert "an event was not written" in caplog.text
    lines.close()


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
