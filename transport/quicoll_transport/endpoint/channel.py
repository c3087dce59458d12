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
from collections.abc import Callable
from typing import TYPE_CHECKING

from quicoll_transport.errors import ConfigurationError, DeadlineExceeded, TransportError

if TYPE_CHECKING:
    from quicoll_transport.endpoint.transfer import Transfer
    from quicoll_transport.link.posted import Posted

__all__ = ["Channel"]

_LIMIT = 1 << 30


class Channel:
    """One channel of a link, made by `Link.channel`.

    limit: bytes above which a message of the peer is refused (MessageRefused at both ends; the next one is not
    affected). May be changed at any time; a `receive` that waits already keeps the one it began with.
    """

    def __init__(
        self,
        number: int,
        *,
        loop: asyncio.AbstractEventLoop,
        peer: str,
        send: Callable[[memoryview], Transfer],
        take: Callable[[int, Callable[[Posted], None]], Posted],
    ) -> None:
        """Make the channel; see `Link.channel`.

        Args:
            number: Of the channel.
            loop: Where `receive` waits.
            peer: Its name, for people.
            send: Sends a message on this channel.
            take: Waits for this channel's next message of so many bytes at most, see `LinkCore.channel_take`.
        """
        self.number = number
        self.limit = _LIMIT
        self._loop = loop
        self._peer = peer
        self._send = send
        self._take = take
        self._expected: Posted | None = None  # what the core waits for, or has brought and nobody has taken yet
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        return f"<Channel {self.number} of {self._peer}>"

    def send(self, data: bytes | bytearray | memoryview) -> Transfer:
        """Send a message from the caller's memory, which must not change until the transfer is done.

        Messages are received in the order of these calls. Done means: arrived at the peer's host and its checksum holds
        there.

        Args:
            data: The message, one run of bytes; may be empty.
        Returns:
            The transfer; await its `future`.
        Raises:
            ConfigurationError: The memory is not one run of bytes.
            LinkLost: The link has ended.
        """
        return self._send(memoryview(data))

    async def receive(self, *, timeout: float | None = None) -> memoryview:
        """Receive the next message, in writable memory that is the caller's from here on.

        Several may wait at once; they are served in turn.

        Args:
            timeout: Seconds; None waits as long as the link lives.
        Raises:
            DeadlineExceeded: No message came in time. It is not lost; the next call gets it.
            LinkLost: The link has ended.
            MessageRefused: The message is larger than `limit`. It is over; the next call takes the one after it.
            MessageCorrupted: The message stayed corrupt. Likewise.
            ConfigurationError: The timeout is negative.
        """
        if timeout is not None and timeout < 0:
            raise ConfigurationError(f"a timeout is not negative: {timeout}")
        waiter: asyncio.Future[None] = self._loop.create_future()
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
            raise DeadlineExceeded(text, peer=self._peer, what=what, seconds=seconds) from None
        finally:
            self._waiters.remove(waiter)
            self._advance()
        if posted.error is not None:
            raise posted.error
        return posted.buffer

    def _next(self) -> Posted:
        """Return what the core brings next, asked for when it is not yet."""
        if self._expected is None:
            self._expected = self._take(self.limit, self._come)
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
