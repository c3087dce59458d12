"""The engine on its caller's own loop: no thread, no copy of time. For simulated time and for tests.

It has the ways in and out that a thread's runtime has (quicoll.engine.runtime), but for a thread that waits: here
nothing may block.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

from quicoll.errors import LocalError

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Coroutine

    from quicoll.engine.answers import Begin, Cancellable, Gathering, Start

__all__ = ["HeldInline", "InlineRuntime"]

T = TypeVar("T")


class _InlineAnswer(asyncio.Future[T]):
    """Of an operation on the caller's own loop: cancelled before the caller goes on.

    starting: an operation that is over at once is so from the next turn of the loop on. By then its caller may have
    asked to be called back, and nobody goes on before that.
    """

    begun: Cancellable | None = None
    starting = True

    def cancel(self, msg: Any | None = None) -> bool:
        if not super().cancel(msg):
            return False
        if self.begun is not None:
            self.begun.cancel()
        return True

    def settle(self, value: T, error: BaseException | None) -> None:
        if self.done():
            return
        if self.starting:
            self.get_loop().call_soon(self.settle, value, error)
            return
        if isinstance(error, asyncio.CancelledError):
            super().cancel()
        elif error is not None:
            self.set_exception(error)
            self.exception()  # as of an _OperationAnswer
        else:
            self.set_result(value)


class HeldInline:
    """As `HeldAnswer`, where the engine is on its caller's loop."""

    __slots__ = ("_loop", "future")

    def __init__(self, loop: asyncio.AbstractEventLoop, begun: Cancellable) -> None:
        """Make a future; `begun` is cancelled with it."""
        self._loop = loop
        self.future: _InlineAnswer[int] = _InlineAnswer(loop=loop)
        self.future.begun = begun
        self.future.starting = False

    def settle(self, value: int | None, error: BaseException | None, idle: bool) -> None:
        """Settle it, once, on its loop. What the caller is in the middle of goes on before, unless it is idle."""
        if idle:
            self.future.settle(value or 0, error)
        else:
            self._loop.call_soon(self.future.settle, value or 0, error)


class _Begun(asyncio.Task[T]):
    """A task that has taken its first step before it can be cancelled, as those of another thread have.

    What a call does in its first step makes its place among the others: the number of an operation, for one. A call
    that was cancelled before would leave no trace, and this rank's next operation would meet the one that the others
    have called before.
    """

    def cancel(self, msg: Any | None = None) -> bool:
        work = self.get_coro()
        if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            self.get_loop().call_soon(super().cancel, msg)
            return True
        return super().cancel(msg)


class InlineRuntime:
    """The caller's own loop: no thread, no copy of time. For virtual clocks and tests."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def call(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        factory = self.loop.get_task_factory()
        self.loop.set_task_factory(lambda loop, work, **settings: _Begun(work, loop=loop, **settings))
        try:
            return self.loop.create_task(work)  # by the loop, which may keep a list of its tasks
        finally:
            self.loop.set_task_factory(factory)

    def begin(
        self, start: Begin[T], sender: Gathering, loop: asyncio.AbstractEventLoop | None = None
    ) -> asyncio.Future[T]:
        answer: _InlineAnswer[Any] = _InlineAnswer(loop=self.loop)
        answer.begun = start(answer.settle)
        answer.starting = False
        return answer

    def post(self, work: Callable[[], None]) -> None:
        work()

    def submit(self, start: Start, sender: Gathering) -> concurrent.futures.Future[int]:
        raise LocalError("the engine shares the loop of its caller: there is no thread to wait for")

    def wait(
        self,
        answer: concurrent.futures.Future[Any],
        timeout: float | None,
        attended: Callable[[float | None], None] | None = None,
    ) -> bool:
        raise LocalError("the engine shares the loop of its caller: there is no thread to wait for")

    def hold(self, begun: Cancellable, *, in_loop: bool) -> HeldInline:
        """As a runtime with a thread has it, for a caller on its loop."""
        if not in_loop:
            raise LocalError("the engine shares the loop of its caller: there is no thread to wait for")
        return HeldInline(self.loop, begun)

    def let_go(self, answer: Any) -> bool:
        return False

    async def aclose(self) -> None:
        return None
