"""A message under way, as a future: what callers of a link hold."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quicoll_transport.errors import DeadlineExceeded, TransportError
from quicoll_transport.link.core import Outgoing, Posted

if TYPE_CHECKING:
    from quicoll_transport.endpoint.link import Link

__all__ = ["Transfer"]


class Transfer:
    """A message being sent or awaited. Await `future`, or `within` for a deadline; `abort` takes it back at once.

    Awaiting raises a TransportError when it failed: LinkLost, MessageCorrupted, MessageRefused. Whoever is cancelled
    while awaiting `future` has cancelled the transfer: before the caller runs again, the message is withdrawn and
    nobody reads or writes its memory any more. `asyncio.shield(transfer.future)` waits without that.
    """

    __slots__ = ("_item", "_link", "future")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._item: Outgoing | Posted | None = None
        self.future: asyncio.Future[None] = link.loop.create_future()
        # The first callback, so it runs before whoever awaits: cancelling a task cancels the future that it awaits.
        self.future.add_done_callback(self._ended)

    def _ended(self, future: asyncio.Future[None]) -> None:
        if future.cancelled():
            self._take_back()
        else:
            future.exception()  # a failure that nobody awaits any more is no news to asyncio

    def _keep(self, item: Outgoing | Posted) -> None:
        if not item.done:
            self._item = item

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
            self._take_back()

    def _take_back(self) -> None:
        item, self._item = self._item, None
        if item is None:
            return
        if isinstance(item, Outgoing):
            self._link.core.cancel(item)
        else:
            self._link.core.withdraw(item)
        self._link.touch()

    async def within(self, timeout: float, *, what: str) -> None:
        """Await the transfer for at most `timeout` seconds; late or cancelled, it is taken back.

        what: for people, in DeadlineExceeded, which also names the peer and the time. Raises what `future` raises.
        """
        try:
            async with asyncio.timeout(timeout):
                await self.future
        except TimeoutError as error:
            if isinstance(error, TransportError):
                raise
            text = f"{what} did not end within {timeout:g} s"
            raise DeadlineExceeded(text, peer=str(self._link.identity), what=what, seconds=timeout) from None
        finally:
            self.abort()
