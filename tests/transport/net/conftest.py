"""Sockets that are closed when their test is over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from inbox import Inbox

OpenInbox = Callable[..., Inbox]


@pytest.fixture
async def open_inbox() -> AsyncIterator[OpenInbox]:
    """open_inbox(host, v6only=False, port=0): a socket that was started."""
    opened: list[Inbox] = []

    def make(host: str, **settings: bool | int) -> Inbox:
        opened.append(Inbox(host, **settings))
        return opened[-1]

    yield make
    for inbox in opened:
        inbox.socket.close()
