"""Both ends of a link over which a state is learned, on one loop, without a network."""

from __future__ import annotations

import asyncio
from typing import Any

from quicoll.engine.messages import decode_message
from quicoll_transport.errors import DeadlineExceeded, LinkLost

__all__ = ["Link", "Transfer"]


class Transfer:
    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.aborted = False

    async def within(self, timeout: float, *, what: str) -> None:
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self.future)
        except TimeoutError:
            raise DeadlineExceeded("late", peer="b", what=what, seconds=timeout) from None

    def abort(self) -> None:
        self.aborted = True


class Link:
    """One end of a link. What is sent arrives in the next turn of the loop; payloads when both sides have them."""

    def __init__(self, node: str, remote_incarnation: int) -> None:
        self.node, self.remote_incarnation, self.ended, self.cause = node, remote_incarnation, False, ""
        self.other: Link
        self.to: Any  # LessonTraffic or BlockTraffic
        self.heard: list[Any] = []
        self.sent: dict[bytes, tuple[bytes, Transfer]] = {}
        self.posted: dict[bytes, tuple[memoryview, Transfer]] = {}
        self.discarded: list[bytes] = []
        self.deaf = False

    def send_app(self, data: bytes) -> None:
        if self.ended:
            raise LinkLost("ended", peer=self.node)
        message = decode_message(data, node="x")
        self.heard.append(message)
        if not self.deaf:
            asyncio.get_running_loop().call_soon(self.other.to.receive, self.other, message)

    def send(self, tag: bytes, payload: memoryview) -> Transfer:
        assert len(tag) == 24
        self.sent[tag] = bytes(payload), Transfer()
        self._meet(tag, self, self.other)
        return self.sent[tag][1]

    def post(self, tag: bytes, buffer: memoryview) -> Transfer:
        self.posted[tag] = buffer, Transfer()
        self._meet(tag, self.other, self)
        return self.posted[tag][1]

    def _meet(self, tag: bytes, source: Link, target: Link) -> None:
        if tag in source.sent and tag in target.posted:
            target.posted[tag][0][:] = source.sent[tag][0]
            source.sent[tag][1].future.set_result(None)
            target.posted[tag][1].future.set_result(None)

    def discard(self, prefix: bytes) -> None:
        self.discarded.append(prefix)
