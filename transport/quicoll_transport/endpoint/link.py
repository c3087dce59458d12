"""The link to one peer as callers see it: LinkCore with futures, callbacks and addresses to dial."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quicoll_transport.endpoint.channel import Channel
from quicoll_transport.endpoint.transfer import Transfer
from quicoll_transport.errors import DeadlineExceeded, LinkLost
from quicoll_transport.events import (
    LinkChanged,
    LinkSnapshot,
    PayloadCorrupted,
    Resent,
    Stalled,
    SuspicionChanged,
    TransportObserver,
)
from quicoll_transport.link.core import LinkCore, LinkId, LinkState, LinkStats, Posted
from quicoll_transport.net.addresses import DialPlan

if TYPE_CHECKING:
    from quicoll_transport.endpoint.connection import Connection
    from quicoll_transport.endpoint.shell import Endpoint
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.security.identity import Identity

__all__ = ["FIRST_BACKOFF_NS", "Link"]

log = logging.getLogger("quicoll.transport")

FIRST_BACKOFF_NS = 50_000_000
_MAX_WAITING_APP = 8 << 20  # bytes of application messages that wait for `Link.listen`, _APP_COST for each added
_APP_COST = 64


class Link:
    """The link to one peer. Its memory and order rules are LinkCore's; this class adds futures and dialling.

    on_app(link, data): a small message of the peer. on_state(link): state or suspicion changed; see `state`, `cause`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        identity: Identity,
        *,
        addresses: Sequence[Address],
        dial: bool,
        number: int,
        now_ns: int,
    ) -> None:
        self._endpoint = endpoint
        self.loop = endpoint.loop
        self.identity = identity
        self.addresses = list(addresses)
        self.dial = dial
        self.on_app: Callable[[Link, bytes], None] | None = None
        self.on_state: Callable[[Link], None] | None = None
        self._waiting_app: list[bytes] = []
        self._waiting_bytes = 0
        self._channels: dict[int, Channel] = {}
        self.connection: Connection | None = None
        self.violations = 0  # connections closed here because the peer broke the protocol
        self.next_dial_ns = now_ns
        self.backoff_ns = FIRST_BACKOFF_NS
        self.attempts = 0
        self.plan = DialPlan()
        self._up: asyncio.Future[None] | None = None
        self.number = number
        self.log = logging.LoggerAdapter(log, {"peer": str(identity), "link": number})
        self.fingerprint = ""  # of the certificate that its last connection showed
        self._told_state = LinkState.CONNECTING
        self._told_suspect = False
        self._told_resends = self._told_corrupt = self._told_stalls = 0
        faults = endpoint.faults
        self.core = LinkCore(
            peer=str(identity),
            local=LinkId(endpoint.incarnation, number),
            config=endpoint.config.link(),
            now_ns=now_ns,
            on_app=self._app,
            on_state=self._state,
            payload_fault=faults.apply_payload if faults is not None else None,
        )

    def __repr__(self) -> str:
        return f"<Link {self.identity} {self.state.value}{' suspect' if self.core.suspect else ''}>"

    @property
    def node(self) -> str:
        return self.identity.node

    @property
    def state(self) -> LinkState:
        return self.core.state

    @property
    def ended(self) -> bool:
        return self.core.ended

    @property
    def cause(self) -> str:
        """Why the link is as it is, for people; "" while there is nothing to say."""
        return self.core.cause

    @property
    def suspect(self) -> bool:
        """Whether the peer has been silent for longer than it should."""
        return self.core.suspect

    @property
    def error(self) -> LinkLost | None:
        """Why the link ended; None while it lives."""
        return self.core.error

    @property
    def refusal(self) -> str:
        """Why the last attempt to connect failed; "" once the link is up."""
        return self.core.refusal

    @property
    def stats(self) -> LinkStats:
        return self.core.stats

    @property
    def rtt_ns(self) -> int | None:
        return self.core.detector.rtt_ns

    def snapshot(self) -> LinkSnapshot:
        """All figures of this moment, in one frozen piece."""
        core, detector, stats = self.core, self.core.detector, self.core.stats
        path = None if self.connection is None else self.connection.session.path_stats()
        return LinkSnapshot(
            t_ns=self._endpoint.now_ns(),
            peer=str(self.identity),
            link=self.number,
            state=core.state,
            suspect=core.suspect,
            cause=core.cause,
            suspect_after_ns=detector.suspect_after_ns,
            lost_after_ns=detector.lost_after_ns,
            bytes_sent=stats.bytes_sent,
            bytes_received=stats.bytes_received,
            messages_sent=stats.messages_sent,
            messages_received=stats.messages_received,
            resends=stats.resends,
            corrupt=stats.corrupt,
            stalls=detector.stalls,
            connections=stats.connections,
            rtt_ns=detector.rtt_ns,
            rttvar_ns=None if detector.rtt_ns is None else detector.rtt.rttvar_ns,
            path_rtt_ns=None if path is None else path.rtt_ns,
            path_rttvar_ns=None if path is None else path.rttvar_ns,
            path_min_rtt_ns=None if path is None else path.min_rtt_ns,
            cwnd=0 if path is None else path.cwnd,
            bytes_in_flight=0 if path is None else path.bytes_in_flight,
            lost_packets=0 if path is None else path.lost_packets,
            delivery_rate=None if path is None else path.delivery_rate,
            credit_used=core.credit_used,
            credit_held=stats.held_bytes,
            credit_peak=stats.held_peak,
        )

    @property
    def remote_incarnation(self) -> int:
        return self.core.remote.incarnation if self.core.remote is not None else 0

    def listen(self, on_app: Callable[[Link, bytes], None], on_state: Callable[[Link], None]) -> None:
        """Take this link over: callbacks from now on, and the messages that came before there were any."""
        self.on_app = on_app
        self.on_state = on_state
        waiting, self._waiting_app, self._waiting_bytes = self._waiting_app, [], 0
        for data in waiting:
            self._endpoint._call(on_app, self, data)

    def send_app(self, data: bytes) -> None:
        """A small message: in order, exactly once. Raises LinkLost when the link has ended."""
        self.core.send_app(data)
        self.touch()

    def send(self, tag: bytes, payload: memoryview) -> Transfer:
        """Send flat bytes from the caller's memory, which must not change until the transfer is done.

        Done means: arrived at the peer's host and its checksum holds there.
        """
        transfer = Transfer(self)
        transfer._keep(self.core.send(tag, payload, transfer._done))
        self.touch()
        return transfer

    def post(self, tag: bytes, buffer: memoryview) -> Transfer:
        """Receive the message with this tag straight into `buffer` (flat, writable, exactly its size)."""
        transfer = Transfer(self)
        transfer._keep(self.core.post(tag, buffer, transfer._done))
        self.touch()
        return transfer

    def channel(self, number: int) -> Channel:
        """The channel with this number, 0 to 2**32 - 1: whole messages in order, for which nobody posts memory.

        The same object each time. Raises ConfigurationError for another number.
        """
        channel = self._channels.get(number)
        if channel is None:
            self.core.check_channel(number)
            channel = self._channels[number] = Channel(self, number)
        return channel

    def _channel_send(self, number: int, payload: memoryview) -> Transfer:
        transfer = Transfer(self)
        transfer._keep(self.core.channel_send(number, payload, transfer._done))
        self.touch()
        return transfer

    def _channel_take(self, number: int, limit: int, on_done: Callable[[Posted], None]) -> Posted:
        posted = self.core.channel_take(number, limit, on_done)
        self.touch()
        return posted

    def discard(self, prefix: bytes) -> None:
        """Forget all unclaimed messages with tags that start with `prefix`, now and later."""
        self.core.discard(prefix)
        self.touch()

    async def wait_up(self, *, timeout: float | None = None) -> None:
        """Wait until the link is up; raises LinkLost when it ends instead (its connect deadline bounds the wait).

        timeout: seconds for this wait alone, after which DeadlineExceeded is raised and the link goes on connecting.
        """
        if self.core.error is not None:
            raise self.core.error
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
            raise DeadlineExceeded(text, peer=str(self.identity), what="connecting", seconds=seconds) from None

    def close(self, reason: str) -> None:
        """End the link; the peer is told. Pending transfers fail with LinkLost."""
        self.core.close(reason)
        self.touch()

    def touch(self) -> None:
        self._endpoint._touch(self)

    def _app(self, data: bytes) -> None:
        if self.on_app is not None:
            self._endpoint._call(self.on_app, self, data)
            return
        self._waiting_app.append(data)
        self._waiting_bytes += len(data) + _APP_COST
        if self._waiting_bytes > _MAX_WAITING_APP:
            self.core.lose("nobody here takes its application messages", now_ns=self._endpoint.now_ns())

    def _state(self, state: LinkState) -> None:
        if state is LinkState.UP:
            self.backoff_ns = FIRST_BACKOFF_NS
            self.core.refusal = ""
            if self._up is not None and not self._up.done():
                self._up.set_result(None)
            self._up = None
        elif self.core.ended:
            if self._up is not None and not self._up.done():
                self._up.set_exception(self.core.error or LinkLost("ended", peer=str(self.identity)))
            self._endpoint._link_ended(self)
        self.log.debug("%r: %s", self, self.core.cause or state.value)
        if self._endpoint.observer is not None:
            self._tell_state(self._endpoint.observer)
        if self.on_state is not None:
            self._endpoint._call(self.on_state, self)

    def _tell_state(self, observer: TransportObserver) -> None:
        core, now_ns, peer = self.core, self._endpoint.now_ns(), str(self.identity)
        if core.suspect is not self._told_suspect and not core.ended:
            self._told_suspect = core.suspect
            silent_ns = round(core.detector.silent_for(now_ns) * 1e9)
            self._endpoint._call(observer, SuspicionChanged(now_ns, peer, self.number, core.suspect, silent_ns))
        if core.state is not self._told_state:
            self._told_state = core.state
            self._endpoint._call(observer, LinkChanged(now_ns, peer, self.number, core.state, core.cause))

    def tell_counts(self, observer: TransportObserver) -> None:
        """Counters are the core's; what they gained since the last look is an event."""
        stats, stalls = self.core.stats, self.core.detector.stalls
        now_ns, peer, call = self._endpoint.now_ns(), str(self.identity), self._endpoint._call
        if (more := stats.resends - self._told_resends) > 0:
            self._told_resends = stats.resends
            call(observer, Resent(now_ns, peer, self.number, more, stats.resends))
        if (more := stats.corrupt - self._told_corrupt) > 0:
            self._told_corrupt = stats.corrupt
            call(observer, PayloadCorrupted(now_ns, peer, self.number, more, stats.corrupt))
        if stalls > self._told_stalls:
            call(observer, Stalled(now_ns, peer, self.number, stalls))
        self._told_stalls = stalls  # a link that comes up starts with a new detector

    def next_timer(self) -> int | None:
        """When the endpoint must look at this link again."""
        at = self.core.next_timer()
        if self.dial and self.connection is None and at is not None:
            at = min(at, self.next_dial_ns)
        return at

    def handle_timer(self, now_ns: int) -> None:
        """The core's timers, when they are due; a detector that adapts learns first what QUIC knows of the path."""
        at = self.core.next_timer()
        if at is None or now_ns < at:
            return
        detector, connection = self.core.detector, self.connection
        if detector.adapts and connection is not None and connection.greeted:
            path = connection.session.path_stats()
            if path.rtt_ns is not None and path.rttvar_ns is not None:
                detector.path(path.rtt_ns, path.rttvar_ns)
        self.core.handle_timer(now_ns)

    def wants_dial(self, now_ns: int) -> bool:
        return self.dial and self.connection is None and now_ns >= self.next_dial_ns and not self.ended
