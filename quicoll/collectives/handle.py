"""Two ways to wait for an operation: awaiting it on an event loop, and blocking a thread.

    total = await group.all_reduce(x)              # one after the other
    handles = [group.all_reduce(g) for g in gs]    # all under way at once
    totals = [await handle for handle in handles]  # in any order

An operation starts when it is called. The order of the calls tells operations apart on all ranks, not the order in
which they end or are waited for.

A handle that nobody waits for neither leaks nor hangs: its operation runs to its end or its deadline on the engine, its
failure breaks the view as any does, and its `out` is left as it was, because results are handed over by the wait (but
for a large one of a reduction, which is written as the result comes: docs/collectives.md). A step that is left while
one of its operations has not ended is not committed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from quicoll.checks import seconds
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.collectives.context import Pending

__all__ = ["BlockingHandle", "Handle"]

T = TypeVar("T")

# For the engine to let go of a caller's tensors. It does so in its loop's next turn.
_RELEASE_S = 10.0


class Handle(Generic[T]):
    """An operation under way, for asyncio: await it for the result. Awaiting it again gives the same.

    It is an awaitable and not a coroutine: `asyncio.gather`, `wait_for`, `shield` and `ensure_future` take it as it is;
    for `asyncio.wait` and `TaskGroup` make a task of it, `asyncio.ensure_future(handle)`. It belongs to the loop on
    which the operation was called: LocalError when it is awaited on another one. One that a thread without a loop has
    called can be awaited on any. As with an asyncio task, an await that
    is cancelled cancels the operation, and with it the view; other awaits of the handle then raise PeerError.
    """

    __slots__ = ("pending",)

    def __init__(self, pending: Pending[T]) -> None:
        self.pending = pending

    def __repr__(self) -> str:
        return _described(self, self.pending, "awaited")

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    def done(self) -> bool:
        """Return whether the operation has ended, well or not."""
        return self.pending.future.done()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` when the operation has ended, before any await of the handle goes on.

        Args:
            callback: Takes one argument, the future of the operation's number in its group.
        """
        self.pending.future.add_done_callback(callback)

    async def _wait(self) -> T:
        pending = self.pending
        future: asyncio.Future[int]
        if isinstance(pending.future, concurrent.futures.Future):
            future = asyncio.wrap_future(pending.future)
        else:
            future = pending.future
        if future.get_loop() is not asyncio.get_running_loop():
            raise LocalError("this operation was issued on another event loop: await it there")
        pending.attend()
        try:
            await future
        except asyncio.CancelledError:
            if pending.released is not None and not pending.released.done():
                await asyncio.wait({asyncio.wrap_future(pending.released)}, timeout=_RELEASE_S)
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise pending.cancelled() from None
        return pending.take()


class BlockingHandle(Generic[T]):
    """An operation under way, for code without an event loop. Any thread may wait for it."""

    __slots__ = ("_pending",)

    def __init__(self, pending: Pending[T]) -> None:
        self._pending = pending

    def __repr__(self) -> str:
        return _described(self, self._pending, "waited for")

    def done(self) -> bool:
        """Return whether the operation has ended, well or not."""
        return self._pending.future.done()

    def wait(self, timeout: float | None = None) -> T:
        """Block this thread until the operation has ended, and return its result; each time the same.

        A wait that an exception of a signal handler ends (Ctrl-C) cancels the operation, and with it the view.

        Args:
            timeout: Seconds to wait; None: as long as the operation takes, which its own timeout bounds.
        Returns:
            The operation's result.
        Raises:
            TimeoutError: The operation has not ended within `timeout`. It goes on, and can be waited for again.
            LocalError: An event loop runs on this thread, which nothing may block.
            QuicollError: The operation failed; see `quicoll.Group`.
        """
        pending = self._pending
        within = None if timeout is None else seconds(timeout, "how long an operation is waited for")
        try:
            ended = pending.block(within)
        except LocalError:
            raise
        except BaseException:
            pending.future.cancel()
            if pending.released is not None:
                concurrent.futures.wait({pending.released}, _RELEASE_S)
            raise
        if not ended:
            raise TimeoutError(f"{pending.operation.name} has not ended within {within:g} s; it goes on")
        return pending.take_or_raise()


def _described(handle: object, pending: Pending[Any], waited: str) -> str:
    outcome = {"taken": waited, "failed": "failed", "open": f"not {waited}"}[pending.outcome]
    future = pending.future  # of the operation's number, which the engine gives
    number = f"#{future.result()}" if pending.outcome != "failed" and future.done() else ""
    return f"<{type(handle).__name__} {pending.operation.name}{number}: {outcome}>"


def _is_no_result(handle: object, *_: object) -> NoReturn:
    """What a handle answers that is used as if it were the result."""
    if isinstance(handle, BlockingHandle):
        raise TypeError(f"{handle!r} is not the result of the operation: call its wait()")
    raise TypeError(
        f"{handle!r} is not the result of the operation: write `await` before the call, or await the handle"
    )


# Given to the classes here and not written in them, where a type checker would take a handle for a number.
for _each in (Handle, BlockingHandle):
    for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"):
        setattr(_each, f"__{_name}__", _is_no_result)
        setattr(_each, f"__r{_name}__", _is_no_result)
    for _name in ("neg", "float", "int", "getitem", "array", "lt", "le", "gt", "ge"):
        setattr(_each, f"__{_name}__", _is_no_result)
