"""Channels: ordered streams of whole messages whose receiver posts no memory. The asyncio side; order is the core's.

A link has as many channels as are used, numbered from 0 to 2**32 - 1, each with its own order; none waits for another.
Nobody opens or closes one: it lives as long as its link, and costs a counter at each end.

A message is an ordinary message of the link. Within the credit it goes at once and waits at the receiver; above it, it
is offered, and travels when `receive` is called. So what a peer can make us hold stays the link's credit, plus the one
message per channel for which somebody has asked.

Cancellation. A `receive` that is cancelled or reaches its deadline loses nothing: the message that it waited for is
the next `receive`'s. A `send` that is aborted is skipped at the receiver, unless it had arrived.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from quicoll_transport.errors import ConfigurationError, DeadlineExceeded, TransportError

if TYPE_CHECKING:
    from quicoll_transport.endpoint.link import Link
    from quicoll_transport.endpoint.transfer import Transfer
    from quicoll_transport.link.posted import Posted

__all__ = ["Channel"]

_LIMIT = 1 << 30


class Channel:
    """One channel of a link, made by `Link.channel`.

    limit: bytes above which a message of the peer is refused (MessageRefused at both ends; the next one is not
    affected). May be changed at any time; a `receive` that waits already keeps the one it began with.
    """

    def __init__(self, link: Link, number: int) -> None:
        self.number = number
        self.limit = _LIMIT
        self._link = link
        self._expected: Posted | None = None  # what the core waits for, or has brought and nobody has taken yet
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        return f"<Channel {self.number} of {self._link!r}>"

    def send(self, data: bytes | bytearray | memoryview) -> Transfer:
        """Send a message from the caller's memory, which must not change until the transfer is done.

        Messages are received in the order of these calls. Done means: arrived at the peer's host and its checksum holds
        there. Raises ConfigurationError for memory that is not one run of bytes.
        """
        return self._link._channel_send(self.number, memoryview(data))

    async def receive(self, *, timeout: float | None = None) -> memoryview:
        """The next message, in writable memory that is the caller's from here on.

        timeout: seconds; None waits as long as the link lives. Several may wait at once, they are served in turn.
        Raises DeadlineExceeded at the deadline (the message is not lost), LinkLost when the link has ended,
        MessageRefused for a message above `limit` and MessageCorrupted for one that stayed corrupt; the message that
        one of these two names is over, the next call takes the one after it.
        """
        if timeout is not None and timeout < 0:
            raise ConfigurationError(f"a timeout is not negative: {timeout}")
        waiter: asyncio.Future[None] = self._link.loop.create_future()
        self._waiters.append(waiter)
        try:
            self._advance()
            # The future only wakes; the message is taken after the last await, so that no cancellation can lose it.
            async with asyncio.timeout(timeout):
                await waiter
            posted = self._next()
            self._expected = None
        except TimeoutError as error:
            if isinstance(error, TransportError):
                raise
            what, seconds = f"a message on channel {self.number}", timeout or 0.0
            text = f"{what} did not come within {seconds:g} s"
            raise DeadlineExceeded(text, peer=str(self._link.identity), what=what, seconds=seconds) from None
        finally:
            self._waiters.remove(waiter)
            self._advance()
        if posted.error is not None:
            raise posted.error
        return posted.buffer

    def _next(self) -> Posted:
        """What the core brings next, asked for when it is not yet."""
        if self._expected is None:
            self._expected = self._link._channel_take(self.number, self.limit, self._come)
        return self._expected

    def _advance(self) -> None:
        """Ask the core for the next message while anybody waits; wake the first of them when it has come."""
        while self._waiters:
            expected = self._next()
            if not expected.done:
                return
            if not expected.void:
                if not self._waiters[0].done():
                    self._waiters[0].set_result(None)
                return
            self._expected = None

    def _come(self, posted: Posted) -> None:
        # Also called from inside channel_take, before the object is ours; then _advance sees it by itself.
        if posted is self._expected:
            self._advance()
