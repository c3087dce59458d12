"""What `quicoll coordinator` says while there is no view."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quicoll.cli import coordinator
from quicoll.observability.events import Event

if TYPE_CHECKING:
    import pytest


async def test_why_there_is_no_view_is_said_after_a_while_again_later_and_no_more_once_one_is_formed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator, "_TELL_AFTER_S", 0.001)
    said: asyncio.Queue[str] = asyncio.Queue()
    waiting = coordinator._Waiting(said.put_nowait)
    waiting.take(Event(0, "coordinator", "held", {"cause": "0 of 2 nodes are here"}))
    waiting.take(Event(0, "coordinator", "held", {"cause": "1 of 2 nodes are here: worker-0"}))
    assert [await said.get() for _ in range(2)] == ["1 of 2 nodes are here: worker-0"] * 2
    waiting.take(Event(0, "coordinator", "view_proposed", {"view": 1, "nodes": []}))
    while not said.empty():
        said.get_nowait()
    assert waiting._timer is None
    waiting.take(Event(0, "coordinator", "held", {"cause": "no quorum"}))
    assert await said.get() == "no quorum"
    waiting.take(Event(0, "coordinator", "job_done", {"step": 3}))
    assert waiting._timer is None
