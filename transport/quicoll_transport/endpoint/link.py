"""The link to one peer as callers see it: futures and callbacks over the core's Peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from quicoll_transport.endpoint.channel import Channel
from quicoll_transport.endpoint.transfer import Transfer
from quicoll_transport.errors import DeadlineExceeded, LinkLost
from quicoll_transport.events import LinkSnapshot
from quicoll_transport.link.core import LinkState, LinkStats, Outgoing, Posted

if TYPE_CHECKING:
    from quicoll_transport.carrier import PathStats
    from quicoll_transport.endpoint.core.peer import Peer
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.security.identity import Identity

__all__ = ["Link", "LinkHost"]

log = logging.getLogger("quicoll.transport")

T = TypeVar("T")

_MAX_WAITING_APP = 8 << 20  # bytes of application messages that wait for `Link.listen`, _APP_COST for each added
_APP_COST = 64


class LinkHost(Protocol):
    """What a link asks of its endpoint."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def now_ns(self) -> int: ...

    def touch(self, peer: Peer) -> None:
        """Look at this peer before the loop's next iteration: something was asked of its link."""
        ...

    def later(self, callback: Callable[[T], None], argument: T) -> None:
        """Call the layer above when what is being taken in now has been taken in: in this turn or the next."""
        ...

    def call(self, callback: Callable[..., object], *arguments: object) -> bool:
        """Call the layer above; False when it raised, which has been reported."""
        ...

    def close(self, peer: Peer, reason: str) -> None:
        """End the peer's link in order."""
        ...

    def lose(self, peer: Peer, cause: str) -> None:
        """End the peer's link as lost."""
        ...

    def path_stats(self, peer: Peer) -> PathStats | None:
        """Return what the present connection knows of its path; None without one."""
        ...

    def proved_address(self, peer: Peer) -> Address | None:
        """Return where the peer is, as far as it has shown that it is there."""
        ...


class Link:
    """The link to one peer. `Endpoint.link` makes it, or the peer does and `on_link` hears of it.

    It ends once, and for good: see `state`, `cause` and `error`. Until then connections come and go under it, and what
    was given to it is delivered exactly once. quicoll_transport.link.core has the rules of memory and order.

    identity: of the peer. node: its name within its job. number: of the link; a later link of this endpoint has a
    greater one.
    """

    def __init__(self, peer: Peer, identity: Identity, host: LinkHost) -> None:
        self.identity = identity
        self.node = identity.node
        self.number = peer.number
        self._peer = peer
        self._core = peer.link
        self._host = host
        self._name = str(identity)
        self._on_app: Callable[[Link, bytes], None] | None = None
        self._on_state: Callable[[Link], None] | None = None
        self._waiting_app: list[bytes] = []
        self._waiting_bytes = 0
        self._channels: dict[int, Channel] = {}
        self._up: asyncio.Future[None] | None = None
        self._log = logging.LoggerAdapter(log, {"peer": self._name, "link": peer.number})
        peer.on_app, peer.on_state = self._app, self._state

    def __repr__(self) -> str:
        return repr(self._peer)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The endpoint's loop."""
        return self._host.loop

    @property
    def addresses(self) -> Sequence[Address]:
        """Where the peer is dialled."""
        return tuple(self._peer.addresses)

    @property
    def proved_address(self) -> Address | None:
        """Where the peer's datagrams come from at present, and what is sent there reaches it: shown by an answer.

        Behind NAT it is another address than the peer's own. None while there is no connection, or it has just moved.
        """
        return self._host.proved_address(self._peer)

    @property
    def dial(self) -> bool:
        """Whether this side dials."""
        return self._peer.dial

    @property
    def attempts(self) -> int:
        """Connections that were dialled so far."""
        return self._peer.attempts

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate that the last connection showed, hexadecimal; "" before there was one."""
        return self._peer.fingerprint

    @property
    def state(self) -> LinkState:
        """The link's state; LOST and CLOSED are final."""
        return self._core.state

    @property
    def ended(self) -> bool:
        """Whether the link is over."""
        return self._core.ended

    @property
    def drained(self) -> bool:
        """Whether the peer has acknowledged everything that was given to this link."""
        return self._core.drained

    @property
    def cause(self) -> str:
        """Why the link is as it is, for people; "" while there is nothing to say."""
        return self._core.cause

    @property
    def suspect(self) -> bool:
        """Whether the peer has been silent for longer than it should."""
        return self._core.suspect

    @property
    def error(self) -> LinkLost | None:
        """Why the link ended; None while it lives."""
        return self._core.error

    @property
    def refusal(self) -> str:
        """Why the last attempt to connect failed; "" once the link is up."""
        return self._core.refusal

    @property
    def stats(self) -> LinkStats:
        """Counters since the link began."""
        return self._core.stats

    @property
    def rtt_ns(self) -> int | None:
        """The smoothed round trip of heartbeats; None before the first answer."""
        return self._core.detector.rtt_ns

    @property
    def min_rtt_ns(self) -> int | None:
        """The shortest round trip of the present connection, whatever queues or processors add; None if not known."""
        path = self._host.path_stats(self._peer)
        return None if path is None else path.min_rtt_ns

    @property
    def silent_for(self) -> float:
        """Seconds since the peer was heard last."""
        return self._core.detector.silent_for(self._host.now_ns())

    @property
    def remote_incarnation(self) -> int:
        """The incarnation of the peer's process; 0 before the link was up."""
        return self._core.remote.incarnation if self._core.remote is not None else 0

    @property
    def outdated_by(self) -> int:
        """The incarnation of a later process of this node that the peer has a link to; 0 where it named none."""
        return self._core.outdated_by

    def snapshot(self) -> LinkSnapshot:
        """Return all figures of this moment, in one frozen piece."""
        core, detector = self._core, self._core.detector
        path = self._host.path_stats(self._peer)
        return LinkSnapshot(
            **core.stats.as_dict(),
            t_ns=self._host.now_ns(),
            peer=self._name,
            link=self.number,
            state=core.state,
            suspect=core.suspect,
            cause=core.cause,
            suspect_after_ns=detector.suspect_after_ns,
            lost_after_ns=detector.lost_after_ns,
            stalls=detector.stalls,
            rtt_ns=detector.rtt_ns,
            rttvar_ns=None if detector.rtt_ns is None else detector.rtt.rttvar_ns,
            path_rtt_ns=None if path is None else path.rtt_ns,
            path_rttvar_ns=None if path is None else path.rttvar_ns,
            path_min_rtt_ns=None if path is None else path.min_rtt_ns,
            cwnd=0 if path is None else path.cwnd,
            bytes_in_flight=0 if path is None else path.bytes_in_flight,
            sent_packets=0 if path is None else path.sent_packets,
            lost_packets=0 if path is None else path.lost_packets,
            spurious_packets=0 if path is None else path.spurious_packets,
            parity_bytes=0 if path is None else path.parity_bytes,
            repaired_bytes=0 if path is None else path.repaired_bytes,
            delivery_rate=None if path is None else path.delivery_rate,
            credit_used=core.credit_used,
        )

    def listen(self, on_app: Callable[[Link, bytes], None], on_state: Callable[[Link], None]) -> None:
        """Take this link over; messages that came before are given to `on_app` at once.

        Args:
            on_app: Called with the link and a small message of the peer, in order.
            on_state: Called with the link when its state or suspicion changed, or `proved_address` while it is up.
        """
        self._on_app = on_app
        self._on_state = on_state
        waiting, self._waiting_app, self._waiting_bytes = self._waiting_app, [], 0
        for data in waiting:
            self._host.call(on_app, self, data)

    def send_app(self, data: bytes) -> None:
        """Send a small message: in order, exactly once.

        Args:
            data: The message.
        Raises:
            LinkLost: The link has ended.
            MessageRefused: It is too large, or too many wait for the peer.
        """
        self._core.send_app(data)
        self._host.touch(self._peer)  # not by `_touch`: one call less for each message

    def send(self, tag: bytes, payload: memoryview, on_done: Callable[[Transfer], None] | None = None) -> Transfer:
        """Send bytes from the caller's memory. Done means: arrived at the peer's host, and its checksum holds there.

        Args:
            tag: TAG_SIZE bytes that name the buffer it is for; each tag once in the life of the link.
            payload: Flat bytes; they must not change until the transfer is done or aborted.
            on_done: Called with the transfer when it has arrived or failed.
        Returns:
            The transfer; await its `future`, or be called.
        Raises:
            ConfigurationError: The tag has another size, or the memory is not flat bytes.
            LinkLost: The link has ended.
        """
        return self._transfer(lambda done: self._core.send(tag, payload, done), on_done)

    def send_copy(self, tag: bytes, payload: memoryview) -> None:
        """Send a few bytes, which are the caller's again at once.

        Nobody hears what becomes of the message here: the peer does, and a link that ends says so itself.

        Args:
            tag: As in `send`.
            payload: Flat bytes, INLINE_BYTES at most.
        Raises:
            ConfigurationError: The tag has another size, or the payload is larger.
        """
        self._core.send_copy(tag, bytes(payload))
        self._touch()

    def post(self, tag: bytes, buffer: memoryview, on_done: Callable[[Transfer], None] | None = None) -> Transfer:
        """Receive the message with this tag straight into `buffer`.

        Args:
            tag: As the sender has it.
            buffer: Flat, writable, of exactly the message's size; the transfer's until it is done or aborted.
            on_done: Called with the transfer when the message is there or has failed.
        Returns:
            The transfer; await its `future`, or be called.
        Raises:
            ConfigurationError: The tag or the buffer is not as it has to be.
            LinkLost: The link has ended.
        """
        return self._transfer(lambda done: self._core.post(tag, buffer, done), on_done)

    def later(self, callback: Callable[[T], None], argument: T) -> None:
        """Call back when what is being taken in now has been taken in: in this turn of the loop, or in the next.

        Args:
            callback: Called with the argument. It may use links as it likes, which `on_app` may not.
            argument: Of the callback.
        """
        self._host.later(callback, argument)

    def channel(self, number: int) -> Channel:
        """Return a channel: whole messages in order, for which nobody posts memory. The same object each time.

        Args:
            number: 0 to 2**32 - 1.
        Raises:
            ConfigurationError: The number is another one.
        """
        channel = self._channels.get(number)
        if channel is None:
            self._core.check_channel(number)
            channel = self._channels[number] = Channel(
                number,
                loop=self.loop,
                peer=self._name,
                send=lambda payload: self._transfer(lambda done: self._core.channel_send(number, payload, done)),
                take=lambda limit, done: self._channel_take(number, limit, done),
            )
        return channel

    def discard(self, prefix: bytes) -> None:
        """Forget all unclaimed messages with tags that start with `prefix`, now and later."""
        self._core.discard(prefix)
        self._touch()

    async def wait_up(self, *, timeout: float | None = None) -> None:
        """Wait until the link is up.

        Args:
            timeout: Seconds for this wait alone; the link goes on connecting. None: its connect deadline bounds it.
        Raises:
            LinkLost: It ended instead.
            DeadlineExceeded: It was not up in time.
        """
        if self._core.error is not None:
            raise self._core.error
        if self.state is LinkState.UP:
            return
        if self._up is None:
            self._up = self.loop.create_future()
            self._up.add_done_callback(lambda future: future.cancelled() or future.exception())
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._up)
        except TimeoutError:
            seconds = timeout or 0.0
            text = f"the link did not come up within {seconds:g} s"
            raise DeadlineExceeded(text, peer=self._name, what="connecting", seconds=seconds) from None

    def close(self, reason: str) -> None:
        """End the link. The peer hears `reason`; pending transfers fail with LinkLost."""
        self._host.close(self._peer, reason)

    def _touch(self) -> None:
        self._host.touch(self._peer)

    def _transfer(
        self,
        start: Callable[[Callable[[Outgoing | Posted], None]], Outgoing | Posted],
        on_done: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        heard = None if on_done is None else partial(self._host.later, on_done)
        transfer = Transfer(self.loop, peer=self._name, start=start, take_back=self._take_back, heard=heard)
        self._touch()
        return transfer

    def _take_back(self, item: Outgoing | Posted) -> None:
        if isinstance(item, Outgoing):
            self._core.cancel(item)
        else:
            self._core.withdraw(item)
        self._touch()

    def _channel_take(self, number: int, limit: int, on_done: Callable[[Posted], None]) -> Posted:
        posted = self._core.channel_take(number, limit, on_done)
        self._touch()
        return posted

    def _app(self, data: bytes) -> None:
        if self._on_app is not None:
            self._host.call(self._on_app, self, data)
            return
        self._waiting_app.append(data)
        self._waiting_bytes += len(data) + _APP_COST
        if self._waiting_bytes > _MAX_WAITING_APP:
            self._host.lose(self._peer, "nobody here takes its application messages")

    def _state(self, state: LinkState) -> None:
        if state is LinkState.UP:
            if self._up is not None and not self._up.done():
                self._up.set_result(None)
            self._up = None
        elif self._core.ended and self._up is not None and not self._up.done():
            self._up.set_exception(self._core.error or LinkLost("ended", peer=self._name))
        self._log.debug("%r: %s", self, self._core.cause or state.value)
        if self._on_state is not None:
            self._host.call(self._on_state, self)
