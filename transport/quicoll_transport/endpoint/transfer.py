"""A message under way, as a future: what callers of a link hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from quicoll_transport.errors import DeadlineExceeded, TransportError

if TYPE_CHECKING:
    from quicoll_transport.link.core import Outgoing, Posted

__all__ = ["Transfer"]


class Transfer:
    """A message being sent or awaited. Await `future`, or `within` for a deadline; `abort` takes it back at once.

    Awaiting raises a TransportError when it failed: LinkLost, MessageCorrupted, MessageRefused. Cancelling a task that
    awaits `future` cancels the transfer: before the task runs again, the message is withdrawn and nobody reads or
    writes its memory any more. `asyncio.shield(transfer.future)` waits without that.
    """

    __slots__ = ("_item", "_peer", "_take_back", "future")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        peer: str,
        start: Callable[[Callable[[Outgoing | Posted], None]], Outgoing | Posted],
        take_back: Callable[[Outgoing | Posted], None],
    ) -> None:
        """Begin a transfer.

        Args:
            loop: Of the future.
            peer: Its name, for errors.
            start: Gives the message to the link, and gets what is to be called when it is done.
            take_back: Withdraws a message that is not done.
        Raises:
            TransportError: What `start` raises.
        """
        self._peer = peer
        self._take_back = take_back
        self._item: Outgoing | Posted | None = None
        self.future: asyncio.Future[None] = loop.create_future()
        # The first callback, so it runs before any waiter: cancelling a task cancels the future that it awaits.
        self.future.add_done_callback(self._ended)
        item = start(self._done)
        if not item.done:
            self._item = item

    def _ended(self, future: asyncio.Future[None]) -> None:
        if future.cancelled():
            self._withdraw()
        else:
            future.exception()  # a failure that nobody awaits any more is no news to asyncio

    def _done(self, item: Outgoing | Posted) -> None:
        self._item = None  # with it goes our hold on the caller's memory
        if self.future.done():
            return
        if item.error is not None:
            self.future.set_exception(item.error)
        else:
            self.future.set_result(None)

    def abort(self) -> None:
        """Take the message back; afterwards its memory is the caller's again. Nothing happens to one that is done."""
        if not self.future.done():
            self.future.cancel()
        if self.future.cancelled():
            self._withdraw()

    def _withdraw(self) -> None:
        item, self._item = self._item, None
        if item is not None:
            self._take_back(item)

    async def within(self, timeout: float, *, what: str) -> None:
        """Await the transfer for at most `timeout` seconds; late or cancelled, it is taken back.

        Args:
            timeout: Seconds.
            what: Names the transfer in the error, for people.
        Raises:
            DeadlineExceeded: It was not done in time; nothing else happened to the link.
            TransportError: What `future` raises.
        """
        try:
            async with asyncio.timeout(timeout):
                await self.future
        except TimeoutError as error:
            if isinstance(error, TransportError):
                raise
            text = f"{what} did not end within {timeout:g} s"
            raise DeadlineExceeded(text, peer=self._peer, what=what, seconds=timeout) from None
        finally:
            self.abort()
