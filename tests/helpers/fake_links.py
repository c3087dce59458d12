"""Links without a network: what is sent stays in a list, what is posted for is filled by hand."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from quicoll.engine import executor
from quicoll.engine.executor import Execution

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quicoll.engine.calls import Work

__all__ = ["FakeLink", "FakeTransfer", "execute", "nothing_copied"]


@pytest.fixture
def nothing_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message is so short that it is copied: so the arrays of a test can be as short as people read them."""
    monkeypatch.setattr(executor, "INLINE_BYTES", -1)


async def execute(work: Work, *, links: Any, ranks: Sequence[int], prefix: bytes) -> None:
    """Run a plan to its end, as a communicator does."""
    woken = asyncio.Event()
    execution = Execution(work, ways=links, ranks=ranks, prefix=prefix, wake=woken.set)
    try:
        while not execution.finished():
            await woken.wait()
            woken.clear()
    finally:
        execution.close()


class FakeTransfer:
    """A message under way; `arrive`, `go` and `fail` end it."""

    def __init__(self, kind: str, rank: int, tag: bytes, memory: memoryview) -> None:
        self.kind, self.rank, self.index, self.memory = kind, rank, int.from_bytes(tag[-4:], "big"), memory
        self.tag = tag
        self.data = bytes(memory)  # as it was when it was sent
        self.heard: Callable[[FakeTransfer], None] | None = None
        self.done = self.aborted = False
        self.error: Exception | None = None

    def __repr__(self) -> str:
        return f"{self.kind} {self.index} rank {self.rank}"

    def arrive(self, data: bytes) -> None:
        self.memory[:] = data
        self.go()

    def go(self) -> None:
        assert not self.done
        self.done = True
        if self.heard is not None:
            self.heard(self)

    def fail(self, error: Exception) -> None:
        self.error = error
        self.go()

    def abort(self) -> None:
        if not self.done:
            self.done = self.aborted = True


class FakeLink:
    """The way to `rank`. log: of all transfers, shared by the links of a test. error: what every send raises."""

    def __init__(self, rank: int, log: list[FakeTransfer], *, min_rtt_ns: int | None = None) -> None:
        self.rank, self.log = rank, log
        self.node = f"worker-{rank}"
        self.messages: list[bytes] = []
        self.discarded: list[bytes] = []
        self.stats = SimpleNamespace(corrupt=0)
        self.ended = False
        self.error: Exception | None = None
        self.rtt_ns, self.path_min_rtt_ns, self.delivery_rate = 2_000_000, None, 1 << 20
        self.min_rtt_ns = min_rtt_ns

    def snapshot(self) -> Any:
        return self

    def send_app(self, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.messages.append(data)

    def later(self, callback: Callable[[Any], None], argument: Any) -> None:
        callback(argument)

    def send(
        self, tag: bytes, memory: memoryview, on_done: Callable[[FakeTransfer], None] | None = None
    ) -> FakeTransfer:
        return self._transfer("send", tag, memory, on_done)

    def send_copy(self, tag: bytes, memory: memoryview) -> None:
        self.log.append(FakeTransfer("copy", self.rank, tag, memory))

    def post(
        self, tag: bytes, memory: memoryview, on_done: Callable[[FakeTransfer], None] | None = None
    ) -> FakeTransfer:
        return self._transfer("post", tag, memory, on_done)

    def _transfer(
        self, kind: str, tag: bytes, memory: memoryview, on_done: Callable[[FakeTransfer], None] | None
    ) -> FakeTransfer:
        transfer = FakeTransfer(kind, self.rank, tag, memory)
        transfer.heard = on_done
        self.log.append(transfer)
        return transfer

    def discard(self, prefix: bytes) -> None:
        self.discarded.append(prefix)
