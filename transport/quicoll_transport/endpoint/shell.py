"""The asyncio shell of an endpoint: one UDP socket, one timer, look-ups, futures, the log. EndpointCore decides.

Everything runs on one loop. Work is gathered: callers touch peers, `_flush` runs once per iteration of the loop, serves
each touched peer and arms the one timer. Where datagrams or the timer begin it, it ends the same iteration, with what
was said by those who were called back on the way; who waits as a task has his say in the next one. What the core asks
for is carried out after every call of it and before every callback of the layer above, so that effects happen in the
order in which they were decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

from cryptography.hazmat.primitives.hashes import SHA256

from quicoll_transport.endpoint.core.endpoint import EndpointCore
from quicoll_transport.endpoint.core.terms import (
    Action,
    CancelLookUp,
    LookUp,
    NodeIdentity,
    Record,
    ReportError,
    SendRuns,
    Tell,
    Verified,
)
from quicoll_transport.endpoint.link import Link
from quicoll_transport.errors import AuthenticationError, ConfigurationError, EndpointClosed
from quicoll_transport.events import CredentialsRotated, TransportObserver
from quicoll_transport.faults.socket import FaultyIO
from quicoll_transport.net.addresses import canonical, is_numeric
from quicoll_transport.net.resolver import resolve_all, scope_of
from quicoll_transport.quic import Gate, QlogDirectory, Session, check_foundation
from quicoll_transport.security.policy import Policy
from quicoll_transport.security.verification import verify_peer

if TYPE_CHECKING:
    from quicoll_transport.carrier import Authenticated, Carrier, PathStats
    from quicoll_transport.endpoint.config import EndpointConfig
    from quicoll_transport.endpoint.core.peer import Peer
    from quicoll_transport.faults.compose import Faults
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.net.trouble import Trouble
    from quicoll_transport.net.udp import DatagramIO
    from quicoll_transport.security.credentials import Credentials
    from quicoll_transport.security.identity import Identity

__all__ = ["Endpoint"]

log = logging.getLogger("quicoll.transport")

T = TypeVar("T")

_NOBODY = {"peer": "", "link": 0}  # fields of a log record that is about no peer


class Endpoint:
    """A node's place on the network: one socket, and a link to each of its peers.

    credentials, identity, incarnation, config, faults, observer: as given. policy: which certificates are denied.
    links: the living ones. wall_clock: the date that certificates are checked against, aware. heard: called when the
    layer above has heard what arrived, before that is acknowledged, unless it has sent something: what is sent by then
    goes with the acknowledgement. None: nobody wants to know.
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
        observer: TransportObserver | None = None,
        wall_clock: Callable[[], datetime] | None = None,
    ) -> None:
        """Start an endpoint.

        Args:
            credentials: Certificate, key and trust for every handshake, until `rotate`.
            config: See EndpointConfig.
            io: The socket. It belongs to the endpoint from here on, which closes it, also when it cannot be made.
            loop: Everything here runs on it.
            incarnation: Grows with every start of this node's process; peers refuse what an older one sends.
            authorize: Called with the identity of a peer that was not dialled here; returns why it may have no link, or
                None. A Policy is one, and brings its list of denied certificates, which `deny` adds to.
            on_link: Called with a link that a peer has made; `Link.listen` takes it over.
            faults: Rules for what is sent and received, for tests.
            observer: Gets every event of the transport, see quicoll_transport.events; None costs nothing.
            wall_clock: The date that certificates are checked against, aware; None: the system's.
        Raises:
            ConfigurationError: The incarnation is not positive, or the QUIC library is not as it has to be.
        """
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
        self.policy = authorize if isinstance(authorize, Policy) else Policy()
        self._authorize = authorize
        self._on_link = on_link
        self.wall_clock = wall_clock or (lambda: datetime.now(UTC))
        self._io: DatagramIO = FaultyIO(io, faults, loop=loop) if faults is not None else io
        self._qlog: QlogDirectory | None = None
        if config.qlog_directory is not None:
            self._qlog = QlogDirectory(config.qlog_directory, label=self.identity.node, files=config.qlog_files)
        self._gate = Gate(
            credentials=credentials,
            config=config.session,
            retry=config.retry,
            qlog=self._qlog,
            port=io.local_address[1],
        )
        self._core = EndpointCore(
            identity=self.identity,
            incarnation=incarnation,
            settings=config,
            listener=self._gate,
            dial=self._dial,
            verify=self._verify,
            authorize=self._may_come_in,
            on_peer=self._take_in,
            on_end=self._link_ended,
            scope_of=scope_of,
            payload_fault=faults.apply_payload if faults is not None else None,
            observed=observer is not None,
            wall_ns=lambda: round(self.wall_clock().timestamp() * 1e9),
        )
        self.links: dict[Identity, Link] = {}
        self._lookups: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._flush_handle: asyncio.Handle | None = None
        # What the layer above hears after the core's present work, to which it may add.
        self._to_hear: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._inside = False  # the core is at work, and `_hear` and `_flush` follow
        self._gathering = False  # `send_gathered` follows
        self._asked = False  # a link has asked to be served since something last arrived
        self._flushed = False  # all has been sent since `heard` was called
        self.heard: Callable[[], object] | None = None
        self._closing: asyncio.Future[None] | None = None
        self._settled: asyncio.Future[None] | None = None
        self._closed = False
        self._io.start(self._on_runs, self._on_unreachable)

    @property
    def address(self) -> Address:
        """Where the socket listens."""
        return self._io.local_address

    def now_ns(self) -> int:
        """Return the loop's time."""
        return round(self.loop.time() * 1e9)

    @property
    def refused(self) -> list[str]:
        """The last refusals of peers, newest last, with reasons that the peers did not hear."""
        return self._core.refused

    def link(self, identity: Identity, *, addresses: Sequence[Address] = (), dial: bool = False) -> Link:
        """Return the living link to a peer, made if there is none.

        Args:
            identity: Whom the peer's certificate has to name.
            addresses: Where to dial it; names are looked up for each round. Empty: those that are known.
            dial: We connect; otherwise the peer does.
        Raises:
            EndpointClosed: `aclose` was called.
            ConfigurationError: There is no address to dial, or there are `max_links` already.
        """
        if self._closing is not None:
            raise EndpointClosed("the endpoint is closed")
        if dial and not addresses:
            raise ConfigurationError(f"no address to dial {identity}")
        peer = self._core.peer(identity, addresses=addresses, dial=dial, now_ns=self.now_ns())
        link = self.links.get(identity)
        if link is None:
            link = self._new_link(peer, identity)
        self._wake()
        return link

    def knock(self, address: Address) -> None:
        """Send one byte that says nothing: what comes from there later passes the address translator on this side.

        Args:
            address: Where to; a name is not looked up, and nothing is sent.
        Raises:
            AddressError: There is no interface of its zone.
        """
        if self._closing is None and is_numeric(str(address[0])):
            self._core.knock(canonical(address, scope_of), self.now_ns())
            self._act()

    def deny(self, fingerprint: str) -> None:
        """Shut a certificate out: its links end at once, new connections of it are refused.

        A link counts as that certificate's when its last connection showed it, also while it is being resumed. The
        node may come back with another certificate.

        Args:
            fingerprint: SHA-256, hexadecimal.
        Raises:
            ConfigurationError: It is no fingerprint.
        """
        self._core.deny(self.policy.deny(fingerprint), self.now_ns())
        self._flush()

    def rotate(self, credentials: Credentials) -> None:
        """Use another certificate, key and trust for every handshake from now on; links that live go on as they are.

        Args:
            credentials: Of the same identity.
        Raises:
            ConfigurationError: They are of another identity.
            EndpointClosed: `aclose` was called.
        """
        if self._closing is not None:
            raise EndpointClosed("the endpoint is closed")
        if credentials.identity != self.identity:
            raise ConfigurationError(f"the new certificate is for {credentials.identity.uri}, not {self.identity.uri}")
        self.credentials = credentials
        self._gate.rotate(credentials)
        log.info("new connections show the certificate sha256=%s", credentials.fingerprint, extra=_NOBODY)
        if self.observer is not None:
            self.call(self.observer, CredentialsRotated(self.now_ns(), credentials.fingerprint))

    def set_deadlines(self, *, lost_after_ns: int | None, connect_ns: int) -> None:
        """Make links from now on with other deadlines; those that live keep theirs.

        Args:
            lost_after_ns: As in EndpointConfig.
            connect_ns: As in EndpointConfig.
        Raises:
            ConfigurationError: One of them makes no sense.
        """
        self.config = replace(self.config, lost_after_ns=lost_after_ns, connect_ns=connect_ns)
        self._core.use_settings(self.config)

    def start_over(self, incarnation: int) -> None:
        """Make links from now on as a later process of this node; those that live keep what they were made with.

        Args:
            incarnation: Of this process from now on, above the one it had.
        Raises:
            ConfigurationError: It is not above.
        """
        if incarnation <= self.incarnation:
            raise ConfigurationError(f"incarnation {incarnation} is not above {self.incarnation}")
        self.incarnation = incarnation
        self._core.start_over(incarnation)

    def gather(self) -> None:
        """Send nothing of what links are asked for until `send_gathered`, which follows in this turn of the loop."""
        self._gathering = True

    def send_gathered(self) -> None:
        """Send what links have been asked for since `gather`, together, and without waiting for the next turn."""
        try:
            self._hear()
        finally:
            self._gathering = False
        if self._core.waiting:
            self._flush()

    async def aclose(self, *, timeout: float = 1.0, reason: str = "endpoint closed") -> None:
        """Close every link. What was given to them is delivered first, if that is quick.

        Cancelled, it closes at once. Called again, it waits for the first call. Afterwards no task, timer or file of
        the endpoint is left; a name that the system's resolver is asked for has its daemon thread until that answers.

        Args:
            timeout: Seconds for the delivery.
            reason: What the peers hear.
        """
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        self._closing = self.loop.create_future()
        self._core.begin_close()
        try:
            if self._core.undelivered:
                self._settled = self.loop.create_future()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await self._settled
        finally:
            resolving = list(self._lookups.values())
            self._shut(reason)
            try:  # they are cancelled; one turn of the loop and they are gone
                await asyncio.gather(*resolving, return_exceptions=True)
            finally:
                self._closing.set_result(None)

    def _shut(self, reason: str) -> None:
        for task in self._lookups.values():
            task.cancel()
        self._core.shut(reason, self.now_ns())
        self._act()
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        self._io.close()

    # -- for links (LinkHost) ------------------------------------------------------------------------------------

    def touch(self, peer: Peer) -> None:
        """Serve this peer before the loop's next iteration."""
        self._asked = True
        self._core.touch(peer)
        if self._flush_handle is None and not (self._inside or self._gathering):  # else `_flush` comes by itself
            self._wake()

    def later(self, callback: Callable[[T], None], argument: T) -> None:
        """Call the layer above when the core has done its present work."""
        if not self._inside and not self._gathering and not self._to_hear:
            self.loop.call_soon(self._hear)
        self._to_hear.append((callback, argument))

    def _hear(self) -> None:
        self._inside = False
        while self._to_hear:
            callback, argument = self._to_hear.popleft()
            self.call(callback, argument)

    def call(self, callback: Callable[..., object], *arguments: object) -> bool:
        """Call the layer above, when what was decided before has been done. As `_safely`, without a call more."""
        if self._core.actions:
            self._act()
        try:
            callback(*arguments)
        except Exception as error:
            self._raised(callback, error)
            return False
        return True

    def path_stats(self, peer: Peer) -> PathStats | None:
        """Return what the present connection of a peer knows of its path."""
        return self._core.path_stats(peer)

    def proved_address(self, peer: Peer) -> Address | None:
        """Return where the peer is, as far as it has shown that it is there."""
        return self._core.proved_address(peer)

    def _safely(self, callback: Callable[..., object], *arguments: object) -> bool:
        """Call the layer above. What it raises is its own fault, never the peer's, and must not stop our work."""
        try:
            callback(*arguments)
        except Exception as error:
            self._raised(callback, error)
            return False
        return True

    def _raised(self, callback: Callable[..., object], error: Exception) -> None:
        self._report(f"{callback!r} raised; callbacks of an endpoint must not", error)

    def close(self, peer: Peer, reason: str) -> None:
        """End a peer's link in order."""
        self._core.close(peer, reason, self.now_ns())
        self._act()
        self._wake()

    def lose(self, peer: Peer, cause: str) -> None:
        """End a peer's link as lost."""
        self._core.lose(peer, cause, self.now_ns())
        self._act()
        self._wake()

    # -- for the core --------------------------------------------------------------------------------------------

    def _dial(self, address: Address, now_ns: int) -> Carrier:
        return Session.client(
            credentials=self.credentials,
            config=self.config.session,
            address=address,
            now_ns=now_ns,
            qlog=self._qlog,
            reset_key=self._gate.reset_key,
            memory=self._gate.memory,
            line=self._gate.line,
            arrivals=self._gate.arrivals,
        )

    def _verify(self, event: Authenticated) -> Verified:
        identity = verify_peer(
            event.certificate,
            event.chain,
            trust=self.credentials.trust,
            job=self.identity.job,
            now=self.wall_clock(),
        )
        fingerprint = "" if event.certificate is None else event.certificate.fingerprint(SHA256()).hex()
        if (reason := self.policy.judge_certificate(fingerprint)) is not None:
            raise AuthenticationError(reason, peer=str(identity))
        return Verified(identity, fingerprint)

    def _may_come_in(self, identity: NodeIdentity) -> str | None:
        self._act()
        try:
            return self._authorize(cast("Identity", identity))  # `_verify` made it
        except Exception:
            log.exception("authorization of %s failed", identity, extra={"peer": str(identity), "link": 0})
            return "its authorization failed"

    def _take_in(self, peer: Peer) -> bool:
        return self.call(self._on_link, self._new_link(peer, cast("Identity", peer.identity)))

    def _new_link(self, peer: Peer, identity: Identity) -> Link:
        link = self.links[identity] = Link(peer, identity, self)
        return link

    def _link_ended(self, peer: Peer) -> None:
        self.links.pop(cast("Identity", peer.identity), None)

    # -- turns of the loop ---------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """See to it that peers which wait to be served are, soon."""
        if self._flush_handle is None and not self._gathering and not self._closed and self._core.waiting:
            self._flush_handle = self.loop.call_soon(self._on_turn)

    def _on_turn(self) -> None:
        self._flush_handle = None
        self._flush()

    def _flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        core = self._core
        if core.actions:
            self._act()
        while core.waiting:
            core.serve(self.now_ns())
            self._act()
        if self._settled is not None and not self._settled.done() and not core.undelivered:
            self._settled.set_result(None)
        if not self._closed:
            self._arm()
        self._flushed = True

    def _arm(self) -> None:
        """See to it that the core's next deadline is met. A timer that is set for an earlier time stays: nearly each
        datagram puts the deadline off, and to look once too often costs less than to set the timer each time."""
        at = self._core.next_timer()
        if self._timer is not None:
            if at is None or self._timer_ns <= at:
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
        at = self._core.next_timer()
        if at is None or at > now_ns:  # it has been put off meanwhile
            self._arm()
            return
        self._inside = True
        try:
            self._core.handle_timer(now_ns)
        finally:
            self._hear()
            self._flush()

    def _on_runs(self, runs: list[DatagramRun]) -> float | None:
        if self._closed:
            return None
        self._inside, self._asked, flushed = True, False, False
        try:
            self._core.receive(runs, self.now_ns())
        finally:
            self._hear()
            if self.heard is not None and not self._asked:
                self._flushed = False
                try:  # as `_safely` does, whose own call each datagram would pay for: what it raises is its own fault
                    self.heard()
                except Exception as error:
                    self._raised(self.heard, error)
                flushed = self._flushed
            if not flushed or self._core.waiting or self._core.actions:
                self._flush()
        return self._core.patience_ns / 1e9

    def _on_unreachable(self, address: Address, trouble: Trouble) -> None:
        if trouble.limit:
            self._core.limit_datagrams(address, trouble.limit, self.now_ns())
        else:
            self._core.unreachable(address, trouble.cause, self.now_ns(), refused=trouble.refused)
        self._act()
        self._wake()

    # -- actions -------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        """Carry out what the core asks for."""
        actions = self._core.actions
        while actions:
            action = actions.popleft()
            if isinstance(action, SendRuns):
                self._io.send(action.runs)
            else:
                self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case LookUp():
                task = self._lookups[action.peer] = self.loop.create_task(self._look_up(action))
                task.add_done_callback(lambda _: self._lookups.pop(action.peer, None))
            case CancelLookUp():
                if (running := self._lookups.get(action.peer)) is not None:
                    running.cancel()
            case Tell():
                if self.observer is not None:
                    self._safely(self.observer, action.event)
            case Record():
                extra = {"peer": action.peer, "link": action.link}
                log.log(action.level, action.text, *action.arguments, exc_info=action.error, extra=extra)
            case ReportError():
                self._report(action.text, action.error)

    async def _look_up(self, action: LookUp) -> None:
        """Look all names up at once; those that do not answer in time are left out."""
        found, failed = await resolve_all(action.addresses, self._io.resolve, timeout=action.timeout_ns / 1e9)
        self._core.looked_up(action.peer, found, failed, self.now_ns())
        self._act()
        self._wake()

    def _report(self, text: str, error: Exception) -> None:
        self.loop.call_exception_handler({"message": text, "exception": error})
