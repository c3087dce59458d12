"""A collective under way.

Every operation of a group starts when it is called and gives a handle. Awaiting it gives the result:

    total = await group.all_reduce(x)              # one after the other
    handles = [group.all_reduce(g) for g in gs]    # all under way at once
    totals = [await handle for handle in handles]  # in any order

The order of the calls is what tells operations apart on all ranks, not the order in which they are awaited or end. As
with an asyncio task, an await that is cancelled cancels the operation, hence the view; whoever awaits the same handle
at that time or later gets a PeerError that says so, because nobody has cancelled him.

A handle that nobody awaits neither leaks nor hangs: its operation runs to its end or its deadline on the engine, its
failure breaks the view as any does, and its `out` is left as it was, because results are handed over by the await. A
step that is left while one of its operations has not ended is not committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from quicoll.errors import LocalError, QuicollError

__all__ = ["Handle"]

T = TypeVar("T")


class Handle(Generic[T]):
    """Await it for the result; more than once gives the same. Belongs to the loop on which it was made; LocalError when
    it is awaited on another one.

    It is an awaitable and not a coroutine: `asyncio.gather`, `wait_for`, `shield` and `ensure_future` take it as it is;
    for `asyncio.wait` and `TaskGroup` make a task of it, `asyncio.ensure_future(handle)`.
    """

    __slots__ = ("_cancelled", "_deliver", "_future", "_record", "_recorded", "_result")

    def __init__(
        self,
        future: asyncio.Future[int],
        deliver: Callable[[], T],
        record: Callable[[int], None],
        cancelled: Callable[[], QuicollError],
    ) -> None:
        """future: gives the operation's number. deliver: hands the result over. record: notes its digest. cancelled:
        the error for those who await what another one has cancelled."""
        self._cancelled = cancelled
        self._future = future
        self._deliver = deliver
        self._record = record
        self._recorded = False
        self._result: list[T] = []
        future.add_done_callback(_seen)

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    def done(self) -> bool:
        """Whether the operation has ended, well or not."""
        return self._future.done()

    def add_done_callback(self, callback: Callable[[asyncio.Future[int]], object]) -> None:
        """Call with the future of the operation's number when it has ended, before anybody who awaits it goes on."""
        self._future.add_done_callback(callback)

    async def _wait(self) -> T:
        if self._future.get_loop() is not asyncio.get_running_loop():
            raise LocalError("this operation was issued on another event loop: await it there")
        try:
            await self._future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._cancelled() from None
        if not self._result:
            self.settle()
            self._result.append(self._deliver())
        return self._result[0]

    def settle(self) -> bool:
        """Note the digest of a result that is there; whether the operation has ended. For the vote of a step."""
        if not self._future.done():
            return False
        if not self._recorded and not self._future.cancelled() and self._future.exception() is None:
            self._recorded = True
            self._record(self._future.result())
        return True


def _seen(future: asyncio.Future[int]) -> None:
    """A failure that nobody awaits is no news to asyncio: it broke the view, and the next operation tells."""
    if not future.cancelled():
        future.exception()
