"""Where the engine runs: a loop in a thread of its own, so that a training loop that computes for seconds is not
taken for dead; or the caller's own loop, for simulated time and for tests.

Calls cross here and nowhere else: a coroutine goes in, an awaitable on the caller's loop comes out. Cancelling the
awaitable cancels the coroutine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from quicoll.errors import LocalError

__all__ = ["InlineRuntime", "Runtime", "ThreadRuntime"]

T = TypeVar("T")


class Runtime(Protocol):
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    def call(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]: ...
    async def aclose(self) -> None: ...


class ThreadRuntime:
    """An event loop in a daemon thread. Starts at once; `aclose` stops it and joins the thread."""

    def __init__(
        self,
        name: str,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        self.loop = loop_factory()
        self._thread = threading.Thread(target=self._run, name=f"quicoll-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            leftover = asyncio.all_tasks(self.loop)
            for task in leftover:
                task.cancel()
            if leftover:
                self.loop.run_until_complete(asyncio.gather(*leftover, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            self.loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        if self.loop.is_closed() or threading.current_thread() is self._thread:
            work.close()
            raise LocalError("the engine is closed" if self.loop.is_closed() else "called from the engine's own thread")
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def aclose(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)


class InlineRuntime:
    """The caller's own loop: no thread, no copy of time. For virtual clocks and tests."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def call(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        return self.loop.create_task(work)

    async def aclose(self) -> None:
        return None
