"""A message under way: what callers of a link hold.

    under way    `done` is false
    over         it has arrived (`error` is None), failed (`error`) or was aborted (`aborted`)

Who waits in a coroutine awaits `future`, which is made when it is first asked for; who needs none is called back. Both
hear of the end after the endpoint has taken in everything that came with it, a callback still in the same turn of the
loop. Of one that was aborted no callback hears.
"""

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

    done, error, aborted: see the module's head.
    """

    __slots__ = ("_future", "_heard", "_item", "_loop", "_peer", "_take_back", "aborted", "done", "error")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        peer: str,
        start: Callable[[Callable[[Outgoing | Posted], None]], Outgoing | Posted],
        take_back: Callable[[Outgoing | Posted], None],
        heard: Callable[[Transfer], None] | None = None,
    ) -> None:
        """Begin a transfer.

        Args:
            loop: Of the future.
            peer: Its name, for errors.
            start: Gives the message to the link, and gets what is to be called when it is done.
            take_back: Withdraws a message that is not done.
            heard: Called with the transfer when it has arrived or failed, inside the link's own work.
        Raises:
            TransportError: What `start` raises.
        """
        self._loop = loop
        self._peer = peer
        self._take_back = take_back
        self._heard = heard
        self._item: Outgoing | Posted | None = None
        self._future: asyncio.Future[None] | None = None
        self.done = False
        self.aborted = False
        self.error: TransportError | None = None
        item = start(self._done)
        if not item.done:
            self._item = item

    @property
    def future(self) -> asyncio.Future[None]:
        """The end of the transfer, to be awaited; the same each time."""
        future = self._future
        if future is None:
            future = self._future = self._loop.create_future()
            # The first callback, so it runs before any waiter: cancelling a task cancels the future that it awaits.
            future.add_done_callback(self._ended)
            if self.done:
                self._tell(future)
        return future

    def _ended(self, future: asyncio.Future[None]) -> None:
        if future.cancelled():
            self.abort()
        else:
            future.exception()  # a failure that nobody awaits any more is no news to asyncio

    def _tell(self, future: asyncio.Future[None]) -> None:
        if self.aborted:
            future.cancel()
        elif self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(None)

    def _done(self, item: Outgoing | Posted) -> None:
        self._item = None  # with it goes our hold on the caller's memory
        heard, self._heard = self._heard, None
        if self.done or (self._future is not None and self._future.done()):
            return
        self.done = True
        self.error = item.error
        if self._future is not None:
            self._tell(self._future)
        if heard is not None:
            heard(self)

    def abort(self) -> None:
        """Take the message back; afterwards its memory is the caller's again. Nothing happens to one that is done."""
        if self.done:
            return
        self.done = self.aborted = True
        self._heard = None
        if self._future is not None and not self._future.done():
            self._future.cancel()
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
