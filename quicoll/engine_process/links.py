"""Links to other ranks, as a program sees them whose engine is in a process of its own: each a `Messenger`.

A message goes to the engine's process with its word, as a whole, and comes from there so: this is the way of lessons,
of blocks for spares and of shared state, which are beside the steps. Who receives has his memory written when all of
the message is here, and not before; of a transfer that is taken back nothing is written.

A link ends here when the engine says so, or with the engine's process.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quicoll.engine_process.words import EngineStop, ReceiveOn, ToLink, TransmitOn
from quicoll_transport.errors import DeadlineExceeded, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.engine_process.words import LinkStands, ProgramWord

__all__ = ["ProxyLink", "ProxyLinks", "ProxyTransfer"]


class ProxyTransfer:
    """A message on its way, as `quicoll_transport.endpoint.Transfer`. future: its end; to cancel it takes the message
    back."""

    def __init__(self, links: ProxyLinks, number: int, peer: str, buffer: memoryview | None = None) -> None:
        """Begin.

        Args:
            links: Of the rank.
            number: Under which it is answered.
            peer: For errors.
            buffer: Where it is received.
        """
        self._links = links
        self._number = number
        self._peer = peer
        self._buffer = buffer
        self.future: asyncio.Future[None] = links.loop.create_future()
        self.future.add_done_callback(self._ended)

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self.future.done()

    def _ended(self, future: asyncio.Future[None]) -> None:
        if future.cancelled():
            self._links.stop(self._number)
        else:
            future.exception()  # a failure that nobody awaits any more is no news to asyncio

    def over(self, error: str, data: bytes = b"") -> None:
        """It has arrived, or failed."""
        if self.future.done():
            return
        buffer = self._buffer
        if not error and buffer is not None and len(data) != buffer.nbytes:
            error = f"{len(data)} bytes have come where {buffer.nbytes} belong"
        if error:
            self.future.set_exception(TransportError(error))
            return
        if buffer is not None:
            buffer.cast("B")[:] = data
        self.future.set_result(None)

    def abort(self) -> None:
        """Take the message back; nothing happens to one that is over."""
        if not self.future.done():
            self.future.cancel()

    async def within(self, timeout: float, *, what: str) -> None:
        """Await it for `timeout` seconds at most; late or cancelled, it is taken back."""
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


class ProxyChannel:
    """A channel of a link, as `quicoll_transport.endpoint.Channel`. limit: bytes of a message that is received."""

    def __init__(self, link: ProxyLink, number: int) -> None:
        """A channel of this link, of this number."""
        self._link = link
        self._number = number
        self.limit = 1 << 30

    def send(self, data: bytes) -> ProxyTransfer:
        """Send a message."""
        return self._link.transmit(b"", self._number, data)

    async def receive(self) -> memoryview:
        """Receive the next message.

        Raises:
            TransportError: The link has ended, or the message is over without having come.
        """
        return await self._link.next_message(self._number, self.limit)


class ProxyLink:
    """See the module's head."""

    def __init__(self, links: ProxyLinks, told: LinkStands) -> None:
        """Make it as it was told."""
        self._links = links
        self.number = told.link
        self.node = told.node
        self.remote_incarnation = told.incarnation
        self.up = told.up
        self.ended = told.ended
        self.cause = told.cause
        self._channels: dict[int, ProxyChannel] = {}

    def stands(self, told: LinkStands) -> None:
        """It is otherwise now."""
        self.remote_incarnation, self.up, self.ended, self.cause = told.incarnation, told.up, told.ended, told.cause

    def end(self, cause: str) -> None:
        """It has ended, and nobody will say so."""
        self.up, self.ended, self.cause = False, True, cause

    def _demand_it(self) -> None:
        if self.ended:
            raise TransportError(f"the link has ended: {self.cause}")

    def send_app(self, data: bytes) -> None:
        """Send a message to the peer's engine. Raises TransportError where the link has ended."""
        self._demand_it()
        self._links.tell(ToLink(self.number, "app", data))

    def send(self, tag: bytes, payload: memoryview) -> ProxyTransfer:
        """Send to the memory of this tag; `payload` is copied. Raises TransportError where the link has ended."""
        return self.transmit(tag, 0, bytes(payload))

    def transmit(self, tag: bytes, channel: int, data: bytes) -> ProxyTransfer:
        """Send to the memory of a tag, or on a channel where that is empty. Raises as `send`."""
        self._demand_it()
        number = self._links.next_number()
        transfer = self._links.transfers[number] = ProxyTransfer(self._links, number, self.node)
        self._links.tell(TransmitOn(number, self.number, tag, channel, data))
        return transfer

    def post(self, tag: bytes, buffer: memoryview) -> ProxyTransfer:
        """Receive the message of this tag. Raises TransportError where the link has ended."""
        self._demand_it()
        number = self._links.next_number()
        transfer = self._links.transfers[number] = ProxyTransfer(self._links, number, self.node, buffer)
        self._links.tell(ReceiveOn(number, self.number, tag, 0, buffer.nbytes))
        return transfer

    async def next_message(self, channel: int, limit: int) -> memoryview:
        """Receive the next message of a channel. Raises as `ProxyChannel.receive`."""
        self._demand_it()
        number = self._links.next_number()
        waited: asyncio.Future[bytes] = self._links.loop.create_future()
        self._links.messages[number] = waited
        self._links.tell(ReceiveOn(number, self.number, b"", channel, limit))
        try:
            return memoryview(bytearray(await waited))
        finally:
            if self._links.messages.pop(number, None) is not None:
                self._links.stop(number)

    def discard(self, prefix: bytes) -> None:
        """Forget messages whose tags begin so."""
        self._links.tell(ToLink(self.number, "discard", prefix))

    def channel(self, number: int) -> ProxyChannel:
        """Return the channel of this number; the same each time."""
        return self._channels.setdefault(number, ProxyChannel(self, number))

    def close(self, reason: str) -> None:
        """End the link."""
        self._links.tell(ToLink(self.number, "close", reason.encode()))


class ProxyLinks:
    """All links of a rank. On one loop.

    transfers, messages: those under way, by the number under which they are answered.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[ProgramWord], None],
        next_number: Callable[[], int],
        on_end: Callable[[ProxyLink], None],
    ) -> None:
        """Begin without a link.

        Args:
            loop: Of the futures.
            tell: Sends a word to the engine.
            next_number: Gives a number that nothing before had.
            on_end: Called with a link that has ended.
        """
        self.loop = loop
        self.tell = tell
        self.next_number = next_number
        self._on_end = on_end
        self._links: dict[int, ProxyLink] = {}
        self.transfers: dict[int, ProxyTransfer] = {}
        self.messages: dict[int, asyncio.Future[bytes]] = {}

    def stop(self, number: int) -> None:
        """Nobody waits for a transfer any more."""
        self.transfers.pop(number, None)
        self.tell(EngineStop(number))

    def stands(self, told: LinkStands) -> None:
        """A link is otherwise than before, or new."""
        link = self._links.get(told.link)
        if link is None:
            link = self._links[told.link] = ProxyLink(self, told)
        else:
            link.stands(told)
        if told.ended:
            del self._links[told.link]
            self._on_end(link)

    def of(self, number: int) -> ProxyLink | None:
        """Return the link of a number that has not ended."""
        return self._links.get(number)

    def up(self) -> dict[str, ProxyLink]:
        """Return the links that are up, by node."""
        return {link.node: link for link in self._links.values() if link.up}

    def to(self, node: str) -> ProxyLink | None:
        """Return the latest link to a node that has not ended; None where there is none."""
        found = [link for link in self._links.values() if link.node == node]
        return max(found, key=lambda link: link.number, default=None)

    def transferred(self, number: int, error: str) -> None:
        """A message was sent, or was not."""
        transfer = self.transfers.pop(number, None)
        if transfer is not None:
            transfer.over(error)

    def received(self, number: int, data: bytes, error: str) -> None:
        """A message was received, or was not."""
        transfer = self.transfers.pop(number, None)
        if transfer is not None:
            transfer.over(error, data)
        waited = self.messages.pop(number, None)
        if waited is not None and not waited.done():
            if error:
                waited.set_exception(TransportError(error))
            else:
                waited.set_result(data)

    def end(self, cause: str) -> None:
        """The engine is gone, and with it all links."""
        for number in list(self.transfers):
            self.transferred(number, cause)
        for number in list(self.messages):
            self.received(number, b"", cause)
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.end(cause)
            self._on_end(link)
