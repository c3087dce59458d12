"""The asyncio shell: one UDP socket, its sessions, and the links to peers. Bytes and time in, messages out.

Who owns what. An endpoint has sessions (QUIC connections, found by connection id) and links (one per peer node).
A session belongs to no link until its peer is authenticated and has said Hello. One side of a pair dials; it redials
for as long as the link lives. When a link ends, its session is closed with CLOSE_GONE, so that the other side does
not have to wait for silence.

Everything here runs on one loop. Work is gathered: callers mark links dirty, `_flush` runs once per loop iteration,
asks each dirty link what to do, lets each session write its datagrams, and arms the one timer.

Failure cases: a session that breaks the protocol is closed and its link goes on (it may be redialled); a peer that
cannot be authenticated never gets a link; anything aioquic raises on hostile bytes ends that session only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.hashes import SHA256

from .addresses import DialPlan, is_numeric
from .channel import Channel
from .detector import DetectorConfig
from .errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceeded,
    EndpointClosed,
    LinkLost,
    ProtocolError,
    TransportError,
)
from .faulty import FaultyIO
from .frames import ControlReader, Hello, Ping
from .guard import Guard, GuardConfig, Pace, PaceConfig
from .identity import Credentials, Identity, verify_peer
from .link import (
    LinkConfig,
    LinkCore,
    LinkId,
    LinkState,
    LinkStats,
    Outgoing,
    Posted,
    ResetMessage,
    SendControl,
    StartMessage,
)
from .observe import (
    ConnectionDown,
    ConnectionUp,
    Corrupted,
    CredentialsRotated,
    DialStarted,
    LinkChanged,
    LinkSnapshot,
    Observer,
    PeerRefused,
    Resent,
    Stalled,
    SuspicionChanged,
    TransportEvent,
)
from .policy import Policy
from .quic import (
    CLOSE_GONE,
    CLOSE_NORMAL,
    CLOSE_PROTOCOL,
    CLOSE_REFUSED,
    CLOSE_REPLACED,
    Address,
    Authenticated,
    Closed,
    ControlData,
    Gate,
    QlogDirectory,
    Session,
    SessionConfig,
    check_foundation,
    destination_cid,
    error_name,
    is_unauthenticated_initial,
)
from .udp import DatagramIO, Trouble, numeric, resolve_all

if TYPE_CHECKING:
    from .faults import Faults

__all__ = ["Endpoint", "EndpointConfig", "Link", "Transfer"]

log = logging.getLogger("quicoll.transport")

_FIRST_BACKOFF_NS = 50_000_000
_LAST_BACKOFF_NS = 1_000_000_000
_MAX_WAITING_APP = 8 << 20  # bytes of application messages that wait for `Link.listen`, _APP_COST for each added
_APP_COST = 64
_MAX_UNPROVED = 256 << 10  # bytes of a stranger until its certificate is there; a chain of certificates takes 10 KiB
_WORD_NS = 30_000_000_000  # for a control message to arrive, from its first byte on,
_WORD_BYTE_NS = 61_035  # and more for each byte: 16 KiB a second
_MAX_VIOLATIONS = 8  # connections that a peer may spoil before its link is given up
_INTERNET_DATAGRAM = 1452  # a path of 1500 bytes less IPv6 and UDP headers; smaller paths need the setting
_LOOPBACK_DATAGRAM = 8900  # loopback carries 64 KiB; larger packets cost pure Python less per byte


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """Settings of an endpoint.

    lost_after_ns: silence after which a peer is lost, exactly. None: it follows the measured round trips, between one
        second and ten (see detector).
    connect_ns: how long a link may take to come up. handshake_ns: how long one attempt may take.
    credit_bytes, max_resends: see LinkConfig. session: see SessionConfig.
    max_handshakes: unauthenticated sessions that strangers may keep open here at once; each takes up to 100 KiB.
    guard: how often strangers may try. pace: how fast a peer may make us work. See guard.
    max_links: peers; worst-case memory is max_links * credit_bytes.
    qlog_directory: where each connection leaves a qlog trace when it ends; None: no traces. qlog_files: how many of
        them stay. What that costs stands in qlog.
    """

    lost_after_ns: int | None = None
    connect_ns: int = 10_000_000_000
    handshake_ns: int = 3_000_000_000
    credit_bytes: int = 32 << 20
    max_resends: int = 3
    max_handshakes: int = 512
    guard: GuardConfig = field(default_factory=GuardConfig)
    pace: PaceConfig = field(default_factory=PaceConfig)
    max_links: int = 4096
    retry: bool = True
    session: SessionConfig = field(default_factory=SessionConfig)
    qlog_directory: str | os.PathLike[str] | None = None
    qlog_files: int = 64

    def link(self) -> LinkConfig:
        return LinkConfig(
            detector=DetectorConfig.from_lost_after(self.lost_after_ns),
            connect_ns=self.connect_ns,
            credit_bytes=self.credit_bytes,
            max_resends=self.max_resends,
        )


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
        self.connection: _Connection | None = None
        self.violations = 0  # connections closed here because the peer broke the protocol
        self.next_dial_ns = now_ns
        self.backoff_ns = _FIRST_BACKOFF_NS
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
            self.backoff_ns = _FIRST_BACKOFF_NS
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

    def _tell_state(self, observer: Observer) -> None:
        core, now_ns, peer = self.core, self._endpoint.now_ns(), str(self.identity)
        if core.suspect is not self._told_suspect and not core.ended:
            self._told_suspect = core.suspect
            silent_ns = round(core.detector.silent_for(now_ns) * 1e9)
            self._endpoint._call(observer, SuspicionChanged(now_ns, peer, self.number, core.suspect, silent_ns))
        if core.state is not self._told_state:
            self._told_state = core.state
            self._endpoint._call(observer, LinkChanged(now_ns, peer, self.number, core.state, core.cause))

    def tell_counts(self, observer: Observer) -> None:
        """Counters are the core's; what they gained since the last look is an event."""
        stats, stalls = self.core.stats, self.core.detector.stalls
        now_ns, peer, call = self._endpoint.now_ns(), str(self.identity), self._endpoint._call
        if (more := stats.resends - self._told_resends) > 0:
            self._told_resends = stats.resends
            call(observer, Resent(now_ns, peer, self.number, more, stats.resends))
        if (more := stats.corrupt - self._told_corrupt) > 0:
            self._told_corrupt = stats.corrupt
            call(observer, Corrupted(now_ns, peer, self.number, more, stats.corrupt))
        if stalls > self._told_stalls:
            call(observer, Stalled(now_ns, peer, self.number, stalls))
        self._told_stalls = stalls  # a link that comes up starts with a new detector

    def next_timer(self) -> int | None:
        """When the endpoint must look at this link again."""
        at = self.core.next_timer()
        if self.dial and self.connection is None and at is not None:
            at = min(at, self.next_dial_ns)
        return at


@dataclass(slots=True, eq=False)
class _Connection:
    """A session and what the endpoint knows of it."""

    session: Session
    dialled: bool
    deadline_ns: int  # until which authentication and Hello must be through
    pace: Pace
    link: Link | None = None
    identity: Identity | None = None
    fingerprint: str = ""  # of the peer's certificate, once it is verified
    reader: ControlReader = field(default_factory=ControlReader)
    word_since_ns: int | None = None  # when the control message began that has not ended
    word_ns: int | None = None  # until when it must be there
    resets: int = 0  # of the session, as far as they were judged
    unproved: int = 0  # bytes received before the peer was authenticated
    greeted: bool = False
    answer_ns: int | None = None  # until which a dialled peer must have sent anything at all; None once it has
    cids: list[bytes] = field(default_factory=list)  # under which it is registered

    def listened(self, now_ns: int, *, began: bool) -> None:
        """Bytes of the control stream came; began: what waits now, if anything, is another message than before."""
        waiting = self.reader.waiting
        if waiting == 0:
            self.word_since_ns = self.word_ns = None
            return
        if began or self.word_since_ns is None:
            self.word_since_ns = now_ns
        self.word_ns = self.word_since_ns + _WORD_NS + waiting * _WORD_BYTE_NS

    def next_timer(self) -> int | None:
        at = self.session.next_timer()
        if self.word_ns is not None:
            at = self.word_ns if at is None else min(at, self.word_ns)
        if self.greeted:
            return at
        deadline = self.deadline_ns if self.answer_ns is None else min(self.deadline_ns, self.answer_ns)
        return deadline if at is None else min(at, deadline)


class Endpoint:
    """See the module's head.

    authorize(identity) -> reason or None: whether an authenticated peer may have a link here. A Policy also has a list
        of denied certificates, which `deny` adds to.
    on_link(link): a peer that we did not ask for has made a link; `link.listen` takes it over.
    incarnation: grows with every start of this node's process; peers refuse what an older one sends.
    observer: gets every event of the transport, see observe; None costs nothing.
    wall_clock: the date that certificates are judged by, aware; None: the system's.
    io: belongs to the endpoint from here on, which closes it, also when it cannot be made (ConfigurationError).
    """

    def __init__(
        self,
        *,
        credentials: Credentials,
        config: EndpointConfig,
        io: DatagramIO,
        loop: asyncio.AbstractEventLoop,
        incarnation: int,
        authorize: Callable[[Identity], str | None],
        on_link: Callable[[Link], None],
        faults: Faults | None = None,
        observer: Observer | None = None,
        wall_clock: Callable[[], datetime] | None = None,
    ) -> None:
        try:
            if incarnation <= 0:
                raise ConfigurationError(f"an incarnation is a positive integer, not {incarnation}")
            check_foundation()
        except ConfigurationError:
            io.close()  # given to us, so nobody else will
            raise
        self.credentials = credentials
        self.identity = credentials.identity
        self.config = config
        self.loop = loop
        self.incarnation = incarnation
        self.faults = faults
        self.observer = observer
        self.links: dict[Identity, Link] = {}
        self._io: DatagramIO = FaultyIO(io, faults, loop=loop) if faults is not None else io
        self._authorize = authorize
        self.policy = authorize if isinstance(authorize, Policy) else Policy()
        self._on_link = on_link
        self._wall_clock = wall_clock or _utc_now
        self._qlog: QlogDirectory | None = None
        if config.qlog_directory is not None:
            self._qlog = QlogDirectory(config.qlog_directory, label=self.identity.node, files=config.qlog_files)
        self._gate = Gate(
            credentials=credentials,
            config=self._session_config(io.local_address),
            retry=config.retry,
            qlog=self._qlog,
        )
        self._connections: dict[_Connection, None] = {}
        self._door: Guard[_Connection] = Guard(config.guard, slots=config.max_handshakes)
        self._strangers = 0  # accepted connections that have not said a valid Hello
        self._resolving: dict[Link, asyncio.Task[None]] = {}
        self._due: dict[Link | _Connection, int] = {}  # when to look at it again; early is harmless, late is not
        self._by_cid: dict[bytes, _Connection] = {}
        self._next_link = 1
        self._dirty: dict[Link, None] = {}
        self._flush_handle: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._closing: asyncio.Future[None] | None = None
        self._settled: asyncio.Future[None] | None = None
        self._closed = False
        self.refused: list[str] = []  # the last refusals of peers, newest last; for people and tests
        self._io.start(self._on_datagrams, self._on_unreachable)

    @property
    def address(self) -> Address:
        return self._io.local_address

    def now_ns(self) -> int:
        return round(self.loop.time() * 1e9)

    def link(self, identity: Identity, *, addresses: Sequence[Address] = (), dial: bool = False) -> Link:
        """The living link to a peer, made if there is none. `dial`: we connect; otherwise the peer does."""
        if self._closing is not None:
            raise EndpointClosed("the endpoint is closed")
        if dial and not addresses:
            raise ConfigurationError(f"no address to dial {identity}")
        link = self.links.get(identity)
        if link is None:
            link = self._new_link(identity, addresses=addresses, dial=dial)
        else:
            link.addresses = list(addresses) or link.addresses
            link.dial = link.dial or dial
        self._touch(link)
        return link

    def deny(self, fingerprint: str) -> None:
        """Shut a certificate out (SHA-256, hexadecimal): its links end at once, new connections of it are refused.

        A link counts as that certificate's when its last connection showed it, also while it is being resumed. The
        node may come back with another certificate. Raises ConfigurationError for what is no fingerprint.
        """
        denied = self.policy.deny(fingerprint)
        log.warning("certificate sha256=%s is denied from now on", denied, extra=_who())
        for connection in [one for one in self._connections if one.fingerprint == denied]:
            link = connection.link
            if link is not None and link.connection is connection:
                link.connection, link.fingerprint = None, denied
            # "gone" as a code: an honest peer need not dial again and again until its deadline
            self._close(connection, CLOSE_GONE, "refused")
        for link in [one for one in self.links.values() if one.fingerprint == denied]:
            link.core.lose("its certificate is denied", now_ns=self.now_ns())
        self._flush()

    def rotate(self, credentials: Credentials) -> None:
        """Use another certificate, key and trust for every handshake from now on; links that live go on as they are.

        Raises ConfigurationError for another identity, EndpointClosed.
        """
        if self._closing is not None:
            raise EndpointClosed("the endpoint is closed")
        if credentials.identity != self.identity:
            raise ConfigurationError(f"the new certificate is for {credentials.identity.uri}, not {self.identity.uri}")
        self.credentials = credentials
        self._gate.rotate(credentials)
        log.info("new connections show the certificate sha256=%s", credentials.fingerprint, extra=_who())
        if self.observer is not None:
            self._emit(CredentialsRotated(self.now_ns(), credentials.fingerprint))

    async def aclose(self, *, timeout: float = 1.0) -> None:
        """Close every link within `timeout` seconds: what was given to them is delivered first, if that is quick.

        Cancelled, it closes at once. Called again, it waits for the first call. Afterwards no task, timer or file of
        the endpoint is left.
        """
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        self._closing = self.loop.create_future()
        try:
            if self._undelivered():
                self._settled = self.loop.create_future()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await self._settled
        finally:
            resolving = list(self._resolving.values())
            self._shut()
            try:  # they are cancelled; one turn of the loop and they are gone
                await asyncio.gather(*resolving, return_exceptions=True)
            finally:
                self._closing.set_result(None)

    def _undelivered(self) -> bool:
        return any(link.state is LinkState.UP and not link.core.drained for link in self.links.values())

    def _shut(self) -> None:
        for task in self._resolving.values():
            task.cancel()
        for link in list(self.links.values()):
            link.core.close("endpoint closed")
        self._flush()
        self._closed = True
        for connection in list(self._connections):
            self._close(connection, CLOSE_NORMAL, "endpoint closed")
        if self._timer is not None:
            self._timer.cancel()
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        self._io.close()

    def _call(self, callback: Callable[..., object], *arguments: object) -> bool:
        """Call the layer above. What it raises is its own fault, never the peer's, and must not stop our work."""
        try:
            callback(*arguments)
        except Exception as error:
            message = f"{callback!r} raised; callbacks of an endpoint must not"
            self.loop.call_exception_handler({"message": message, "exception": error})
            return False
        return True

    # -- links ---------------------------------------------------------------------------------------------------

    def _new_link(self, identity: Identity, *, addresses: Sequence[Address] = (), dial: bool = False) -> Link:
        if len(self.links) >= self.config.max_links:
            raise ConfigurationError(f"more than {self.config.max_links} links")
        link = Link(self, identity, addresses=addresses, dial=dial, number=self._next_link, now_ns=self.now_ns())
        self._next_link += 1
        self.links[identity] = link
        return link

    def _link_ended(self, link: Link) -> None:
        if self.links.get(link.identity) is link:
            del self.links[link.identity]
        task = self._resolving.get(link)
        if task is not None:
            task.cancel()
        self._touch(link)

    def _emit(self, event: TransportEvent) -> None:
        """Only where `observer` is set; callers look, so that nothing is built for nobody."""
        if self.observer is not None:
            self._call(self.observer, event)

    def _touch(self, link: Link) -> None:
        if self._closed:
            return
        self._dirty[link] = None
        if self._flush_handle is None:
            self._flush_handle = self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        while self._dirty:
            link = next(iter(self._dirty))
            del self._dirty[link]
            self._serve(link)
            if self.observer is not None:
                link.tell_counts(self.observer)
            if link.connection is not None:
                self._transmit(link.connection)
            if link.ended and link.connection is not None:
                connection, link.connection = link.connection, None
                code = CLOSE_NORMAL if link.state is LinkState.CLOSED else CLOSE_GONE
                self._close(connection, code, link.core.cause)
            self._schedule(link)
        if self._settled is not None and not self._settled.done() and not self._undelivered():
            self._settled.set_result(None)
        self._arm()

    def _serve(self, link: Link) -> None:
        """Carry out what the link asks for."""
        connection = link.connection
        while (action := link.core.poll()) is not None:
            if connection is None:
                continue
            match action:
                case SendControl():
                    if not self._guard(connection, connection.session.send_control, action.data):
                        connection = None
                case StartMessage():
                    message = action.message
                    if not message.done:
                        connection.session.start_message(message, message.header(), message.rest())
                case ResetMessage():
                    connection.session.reset_message(action.message)

    # -- datagrams -----------------------------------------------------------------------------------------------

    def _on_datagrams(self, datagrams: list[tuple[bytes, Address]]) -> None:
        if self._closed:
            return
        now_ns = self.now_ns()
        touched: dict[_Connection, None] = {}
        for data, address in datagrams:
            connection = self._find(data, address, now_ns)
            if connection is None:
                continue
            touched[connection] = None
            connection.answer_ns = None
            if connection.identity is None:
                connection.unproved += len(data)
                if connection.unproved > _MAX_UNPROVED:
                    self._fail(connection, CLOSE_REFUSED, "handshake too long")
                    continue
            self._guard(connection, connection.session.receive, data, address, now_ns)
        for connection in touched:
            self._process(connection, now_ns)
            if connection.link is not None:
                self._dirty[connection.link] = None
            else:
                self._transmit(connection)
        self._flush()

    def _find(self, data: bytes, address: Address, now_ns: int) -> _Connection | None:
        cid = destination_cid(data)
        if cid is None:
            return None
        connection = self._by_cid.get(cid)
        if connection is not None or not is_unauthenticated_initial(data):
            return connection
        if self._closing is not None or not self._door.initial(address, now_ns):
            return None
        try:
            admitted = self._gate.admit(data, address, now_ns, lambda: self._door.handshake(address, now_ns))
        except Exception:
            log.exception("a first datagram could not be judged", extra=_who())
            return None
        if isinstance(admitted, bytes):
            self._io.send([(admitted, address)])
            return None
        if admitted is None:
            return None
        deadline_ns = now_ns + self.config.handshake_ns
        connection = _Connection(admitted, dialled=False, deadline_ns=deadline_ns, pace=Pace(self.config.pace))
        self._register(connection)
        displaced = self._door.opened(connection, address)
        if displaced is not None:
            self._fail(displaced, CLOSE_REFUSED, "too many handshakes")
        return connection

    def _register(self, connection: _Connection) -> None:
        self._connections[connection] = None
        self._strangers += not connection.dialled
        self._take_cids(connection)
        self._schedule(connection)

    def _take_cids(self, connection: _Connection) -> None:
        session = connection.session
        while session.cids:
            cid = session.cids.pop()
            if self._by_cid.get(cid) is not connection:  # QUIC announces an id again when the announcement was lost
                self._by_cid[cid] = connection
                connection.cids.append(cid)
        while session.retired_cids:
            cid = session.retired_cids.pop()
            if self._by_cid.get(cid) is connection:
                del self._by_cid[cid]
                connection.cids.remove(cid)

    def _guard(self, connection: _Connection, work: Callable[..., object], *arguments: object) -> bool:
        """Run what hostile bytes can upset; whatever goes wrong ends this connection only."""
        try:
            work(*arguments)
        except ProtocolError as error:
            log.warning("connection of %s closed: %s", connection.identity or "a stranger", error)
            self._fail(connection, CLOSE_PROTOCOL, str(error))
        except Exception:
            # aioquic asserts its way through some malformed input; the peer's bytes must not end our endpoint
            who = connection.identity or "a stranger"
            log.exception("connection of %s closed after an unexpected error", who, extra=_who(connection))
            self._fail(connection, CLOSE_PROTOCOL, "internal error")
        else:
            return True
        return False

    def _process(self, connection: _Connection, now_ns: int) -> None:
        if connection not in self._connections:  # it failed; nothing of it may be registered again
            return
        session = connection.session
        self._take_cids(connection)
        if session.resets != connection.resets:
            count, connection.resets = session.resets - connection.resets, session.resets
            self._guard(connection, connection.pace.resets, now_ns, count)
        while connection in self._connections and (event := session.next_event()) is not None:
            match event:
                case Authenticated():
                    self._authenticated(connection, event)
                case ControlData():
                    self._guard(connection, self._control, connection, event.data, now_ns)
                case Closed():
                    self._gone(connection, event.code, event.reason, now_ns)
        link = connection.link
        if link is not None and link.connection is connection and session.heard_ns == now_ns and connection.greeted:
            link.core.heard(now_ns)

    def _transmit(self, connection: _Connection) -> None:
        datagrams: list[tuple[bytes, Address]] = []
        now_ns = self.now_ns()
        self._guard(connection, lambda: datagrams.extend(connection.session.datagrams_to_send(now_ns)))
        if datagrams:
            self._io.send(datagrams)
        self._schedule(connection)

    def _on_unreachable(self, address: Address, trouble: Trouble) -> None:
        """While dialling, any trouble ends the attempt. A link that is up only counts what says that the host lives and
        its process does not: a route or an interface may come back within the link's deadline."""
        now_ns = self.now_ns()
        for connection in list(self._connections):
            peer = connection.session.peer_address
            if peer is None or peer[:2] != address[:2]:
                continue
            if trouble.limit:
                connection.session.limit_datagrams(trouble.limit)
            elif connection.link is None:
                continue
            elif connection.dialled and not connection.greeted:
                self._fail(connection, CLOSE_NORMAL, trouble.cause)
            elif trouble.refused:
                connection.link.core.unreachable(now_ns)
            if connection.link is not None:
                self._touch(connection.link)

    # -- authentication ------------------------------------------------------------------------------------------

    def _authenticated(self, connection: _Connection, event: Authenticated) -> None:
        """The single place where a peer becomes somebody. Reasons stay in our log; the peer hears "refused"."""
        try:
            identity = verify_peer(
                event.certificate,
                event.chain,
                trust=self.credentials.trust,
                job=self.identity.job,
                now=self._wall_clock(),
            )
            fingerprint = "" if event.certificate is None else event.certificate.fingerprint(SHA256()).hex()
            if (reason := self.policy.judge_certificate(fingerprint)) is not None:
                raise AuthenticationError(reason, peer=str(identity))
            expected = connection.link.identity if connection.link is not None else None
            if expected is not None and identity != expected:
                raise AuthenticationError(f"dialled {expected}, found {identity}", peer=str(identity))
            if expected is None and (reason := self._judge(identity)) is not None:
                raise AuthenticationError(reason, peer=str(identity))
        except AuthenticationError as error:
            address = connection.session.peer_address
            log.warning("refused a peer at %s: %s", address, error, extra={**_who(connection), "peer": error.peer})
            self.refused = [*self.refused[-63:], str(error)]
            self._fail(connection, CLOSE_REFUSED, "refused", note=f"we refuse the peer: {error}")
            return
        connection.identity = identity
        connection.fingerprint = fingerprint
        connection.session.authenticated = True
        if connection.link is not None and connection.link.connection is connection:
            connection.link.core.connected()

    def _judge(self, identity: Identity) -> str | None:
        """Why an authenticated peer may have no link here; None: it may."""
        try:
            return self._authorize(identity)
        except Exception:
            log.exception("authorization of %s failed", identity, extra={**_who(), "peer": str(identity)})
            return "its authorization failed"

    def _control(self, connection: _Connection, data: bytes, now_ns: int) -> None:
        if connection.identity is None:
            raise ProtocolError("control messages before authentication")
        messages = connection.reader.feed(data)
        connection.listened(now_ns, began=bool(messages))
        for message in messages:
            connection.pace.control(now_ns, ping=isinstance(message, Ping))
            if not connection.greeted:
                if not isinstance(message, Hello):
                    raise ProtocolError("the first control message is not Hello")
                if not self._hello(connection, connection.identity, message, now_ns):
                    return
            elif connection.link is not None and connection.link.connection is connection:
                connection.link.core.control(message, now_ns)

    def _hello(self, connection: _Connection, identity: Identity, hello: Hello, now_ns: int) -> bool:
        """Match the peer's Hello with a link; False when the connection was refused."""
        theirs = LinkId(hello.incarnation, hello.link)
        if hello.incarnation <= 0 or hello.link <= 0:
            raise ProtocolError("Hello without an identity")
        ours = LinkId(hello.peer_incarnation, hello.peer_link)
        link = connection.link or self.links.get(identity)
        if link is not None and link.core.remote is not None and theirs > link.core.remote:
            again = "restarted" if hello.incarnation > link.core.remote.incarnation else "gave this link up"
            link.core.lose(f"the peer {again}", now_ns=now_ns)
            self._flush()
            if connection not in self._connections:
                return False
            link = self.links.get(identity)
        if link is not None and link.core.remote is not None and theirs < link.core.remote:
            self._fail(connection, CLOSE_GONE, "stale incarnation")
            return False
        known = ours != LinkId(0, 0)
        if known and (link is None or ours != link.core.local):
            self._fail(connection, CLOSE_GONE, "unknown link")
            return False
        if link is None:
            if self._closing is not None or len(self.links) >= self.config.max_links:
                self._fail(connection, CLOSE_REFUSED, "no room for another link")
                return False
            link = self._new_link(identity)
            if not self._call(self._on_link, link):
                link.core.close("it could not be taken over")
            if link.ended:
                self._fail(connection, CLOSE_GONE, link.core.cause)
                return False
        if link.connection is not connection:
            previous = link.connection
            if previous is not None:
                # Where both sides dial, both must keep the same one of the two: the one that the lesser node dialled.
                if previous.dialled and self.identity < identity:
                    self._fail(connection, CLOSE_REPLACED, "both sides dialled")
                    return False
                link.connection = None
                link.core.disconnected()
                self._close(previous, CLOSE_REPLACED, "replaced by another connection")
            link.connection = connection
            connection.link = link
            link.core.connected()
        connection.greeted = True
        link.fingerprint = connection.fingerprint
        if connection.dialled:
            link.plan.worked()
        self._strangers -= not connection.dialled
        self._door.closed(connection)
        if connection.session.peer_address is not None:
            self._door.proved(connection.session.peer_address)
        link.core.hello(hello, now_ns)
        connection.session.attach(link.core)
        if self.observer is not None and not link.ended:
            address, count = connection.session.peer_address, link.stats.connections
            event = ConnectionUp(self.now_ns(), str(identity), link.number, address, connection.dialled, count)
            self._emit(event)
        return True

    # -- ends of connections -------------------------------------------------------------------------------------

    def _fail(self, connection: _Connection, code: int, reason: str, *, note: str = "") -> None:
        """Close a connection from here; its link, if it lives, may be redialled. `note`: what only we may know."""
        link = connection.link
        turned_away = not connection.greeted and code != CLOSE_REPLACED and (note or not connection.dialled)
        if self.observer is not None and turned_away and connection in self._connections:
            peer = "" if connection.identity is None else str(connection.identity)
            address = connection.session.peer_address
            self._emit(PeerRefused(self.now_ns(), peer, address, note or reason))
        self._close(connection, code, reason)
        if link is None or link.connection is not connection:
            return
        link.connection = None
        link.violations += code == CLOSE_PROTOCOL
        if link.violations > _MAX_VIOLATIONS:
            link.core.lose(f"it breaks the protocol again and again: {reason}", now_ns=self.now_ns())
        else:
            self._detached(link, note or reason)

    def _gone(self, connection: _Connection, code: int, reason: str, now_ns: int) -> None:
        """The connection ended: closed by the peer, or by QUIC itself."""
        self._tell_down(connection, code, reason, by_peer=True)
        self._forget(connection)
        link = connection.link
        if link is None or link.connection is not connection:
            if not connection.dialled and not connection.greeted:
                text = "a connection ended before it was authenticated: %s %s"
                log.info(text, error_name(code), reason, extra=_who(connection))
            return
        link.connection = None
        text = f"{error_name(code)}{': ' + reason if reason else ''}"
        # Whoever is authenticated may say that it does not know the link (any more); only on a connection that was
        # part of the link does an orderly end mean the link.
        if (code == CLOSE_GONE and connection.identity is not None) or (code == CLOSE_NORMAL and connection.greeted):
            link.core.lose(f"closed by the peer ({reason or error_name(code)})", now_ns=now_ns)
            self._touch(link)
        else:
            self._detached(link, text)

    def _detached(self, link: Link, reason: str) -> None:
        link.core.refusal = link.plan.failed(reason)
        link.core.disconnected()
        link.next_dial_ns = self.now_ns()
        if not link.plan.more:  # all addresses were tried: now one has to wait
            link.next_dial_ns += link.backoff_ns
            link.backoff_ns = min(2 * link.backoff_ns, _LAST_BACKOFF_NS)
        self._touch(link)

    def _close(self, connection: _Connection, code: int, reason: str) -> None:
        if connection in self._connections:
            self._tell_down(connection, code, reason, by_peer=False)
            connection.session.close(code, reason[:200])
            with contextlib.suppress(Exception):
                datagrams = connection.session.datagrams_to_send(self.now_ns())
                if datagrams:
                    self._io.send(datagrams)
            self._forget(connection)

    def _tell_down(self, connection: _Connection, code: int, reason: str, *, by_peer: bool) -> None:
        link = connection.link
        if self.observer is not None and link is not None and connection in self._connections:
            peer, greeted = str(link.identity), connection.greeted
            self._emit(ConnectionDown(self.now_ns(), peer, link.number, code, reason, by_peer, greeted))

    def _forget(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        del self._connections[connection]
        connection.session.release()
        self._door.closed(connection)
        self._due.pop(connection, None)
        self._strangers -= not connection.dialled and not connection.greeted
        for cid in connection.cids:
            if self._by_cid.get(cid) is connection:
                del self._by_cid[cid]
        if self._qlog is not None:
            connection.session.end_trace()

    # -- time ----------------------------------------------------------------------------------------------------

    def _session_config(self, address: Address) -> SessionConfig:
        base = self.config.session
        if base.datagram_bytes == 0:
            loopback = str(address[0]) == "::1" or str(address[0]).startswith("127.")
            return replace(base, datagram_bytes=_LOOPBACK_DATAGRAM if loopback else _INTERNET_DATAGRAM)
        return base

    def _dial(self, link: Link, now_ns: int) -> None:
        """Try the next address of this round, or begin another round; names are looked up each time, as a node that
        comes back may have moved."""
        address = link.plan.next()
        if address is not None:
            self._connect(link, address, now_ns)
        elif all(is_numeric(str(address[0])) for address in link.addresses):
            self._begin_round(link, *numeric(link.addresses))
        elif link not in self._resolving:
            link.next_dial_ns = now_ns + 2 * self.config.handshake_ns  # the task is quicker and sets it
            task = self._resolving[link] = self.loop.create_task(self._resolve(link, list(link.addresses)))
            task.add_done_callback(lambda _: self._resolving.pop(link, None))

    async def _resolve(self, link: Link, addresses: Sequence[Address]) -> None:
        """Look all names up at once; those that do not answer in the time of a handshake are left out."""
        found, failed = await resolve_all(
            addresses, timeout=self.config.handshake_ns / 1e9, loop=self.loop, like=self.address
        )
        if not link.ended and link.connection is None:
            self._begin_round(link, found, failed)
            self._touch(link)

    def _begin_round(self, link: Link, addresses: Sequence[Address], failed: Sequence[str]) -> None:
        link.plan.begin(addresses)
        address = link.plan.next()
        if address is None:
            self._detached(link, "; ".join(failed))
        else:
            self._connect(link, address, self.now_ns())

    def _connect(self, link: Link, address: Address, now_ns: int) -> None:
        session = Session.client(
            credentials=self.credentials,
            config=self._session_config(address),
            address=address,
            now_ns=now_ns,
            qlog=self._qlog,
        )
        deadline_ns, pace = now_ns + self.config.handshake_ns, Pace(self.config.pace)
        connection = _Connection(session, dialled=True, deadline_ns=deadline_ns, pace=pace, link=link)
        connection.answer_ns = now_ns + link.plan.patience_ns(self.config.handshake_ns)
        link.attempts += 1
        link.connection = connection
        if self.observer is not None:
            self._emit(DialStarted(self.now_ns(), str(link.identity), link.number, address, link.attempts))
        self._register(connection)
        self._transmit(connection)

    def _schedule(self, item: Link | _Connection) -> None:
        """Note when to look at a link or connection again; called whenever it was touched."""
        at = None if isinstance(item, _Connection) and item not in self._connections else item.next_timer()
        if at is None:
            self._due.pop(item, None)
        else:
            self._due[item] = at

    def _arm(self) -> None:
        if self._closed:
            return
        at = min(self._due.values(), default=None)
        if self._timer is not None:
            if self._timer_ns == at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer_ns = at
            self._timer = self.loop.call_at(at / 1e9, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._closed:
            return
        # A loop's clock is a float and may wake us a little before the time; then nothing would ever be due.
        now_ns = max(self.now_ns(), self._timer_ns)
        for item in [item for item, at in self._due.items() if at <= now_ns]:
            if isinstance(item, Link):
                self._link_timer(item, now_ns)
            elif item in self._connections:
                self._connection_timer(item, now_ns)
        self._flush()

    def _link_timer(self, link: Link, now_ns: int) -> None:
        at = link.core.next_timer()
        if at is not None and now_ns >= at:
            detector, connection = link.core.detector, link.connection
            if detector.adapts and connection is not None and connection.greeted:
                path = connection.session.path_stats()
                if path.rtt_ns is not None and path.rttvar_ns is not None:
                    detector.path(path.rtt_ns, path.rttvar_ns)
            link.core.handle_timer(now_ns)
        if link.dial and link.connection is None and now_ns >= link.next_dial_ns and not link.ended:
            self._dial(link, now_ns)
        self._dirty[link] = None

    def _connection_timer(self, connection: _Connection, now_ns: int) -> None:
        at = connection.session.next_timer()
        if at is not None and now_ns >= at:
            self._guard(connection, connection.session.handle_timer, now_ns)
            self._process(connection, now_ns)
        if connection not in self._connections:
            return
        if connection.word_ns is not None and now_ns >= connection.word_ns:
            self._fail(connection, CLOSE_PROTOCOL, "a control message takes too long")
        elif not connection.greeted and now_ns >= connection.deadline_ns:
            self._fail(connection, CLOSE_REFUSED, "handshake too slow")
        elif not connection.greeted and connection.answer_ns is not None and now_ns >= connection.answer_ns:
            self._fail(connection, CLOSE_REFUSED, "no answer")
        else:
            self._transmit(connection)


def _who(connection: _Connection | None = None) -> dict[str, object]:
    """Fields of a log record; always both, so that a format may use them."""
    if connection is None:
        return {"peer": "", "link": 0}
    link = connection.link
    peer = connection.identity or (None if link is None else link.identity)
    return {"peer": "" if peer is None else str(peer), "link": 0 if link is None else link.number}
