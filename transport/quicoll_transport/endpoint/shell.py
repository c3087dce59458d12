"""The asyncio shell: one UDP socket, its sessions, and the links to peers. Bytes and time in, messages out.

Who owns what. An endpoint has sessions (QUIC connections, found by connection id, table.py) and links (one per peer).
A session belongs to no link until its peer is authenticated and has said Hello. One side of a pair dials; it redials
for as long as the link lives. When a link ends, its session is closed with CLOSE_GONE, so that the other side does
not have to wait for silence.

Everything here runs on one loop. Work is gathered: callers mark links dirty, `_flush` runs once per loop iteration,
asks each dirty link what to do, lets each session write its datagrams, and arms the one timer.

Failure cases: a session that breaks the protocol is closed and its link goes on (it may be redialled); a peer that
cannot be authenticated never gets a link; what aioquic raises on hostile bytes ends that session only; what our own
code raises over one link ends that link only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from quicoll_transport.endpoint.admission import Reception
from quicoll_transport.endpoint.agenda import Agenda
from quicoll_transport.endpoint.connection import Connection, who
from quicoll_transport.endpoint.dialling import Dialler
from quicoll_transport.endpoint.link import Link
from quicoll_transport.endpoint.table import Table
from quicoll_transport.errors import ConfigurationError, EndpointClosed, ProtocolError
from quicoll_transport.events import ConnectionDown, CredentialsRotated, PeerRefused, TransportEvent, TransportObserver
from quicoll_transport.faults.socket import FaultyIO
from quicoll_transport.link.core import LinkState, ResetMessage, SendControl, StartMessage
from quicoll_transport.quic import (
    CLOSE_GONE,
    CLOSE_NORMAL,
    CLOSE_PROTOCOL,
    CLOSE_REFUSED,
    CLOSE_REPLACED,
    Authenticated,
    Closed,
    ControlData,
    QlogDirectory,
    check_foundation,
    error_name,
)
from quicoll_transport.security.policy import Policy

if TYPE_CHECKING:
    from quicoll_transport.endpoint.config import EndpointConfig
    from quicoll_transport.faults.compose import Faults
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.udp import DatagramIO, Trouble
    from quicoll_transport.security.identity import Credentials, Identity

__all__ = ["Endpoint"]

log = logging.getLogger("quicoll.transport")

_MAX_UNPROVED = 256 << 10  # bytes of a stranger until its certificate is there; a chain of certificates takes 10 KiB
_MAX_VIOLATIONS = 8  # connections that a peer may spoil before its link is given up


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
        observer: TransportObserver | None = None,
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
        self.policy = authorize if isinstance(authorize, Policy) else Policy()
        self._wall_clock = wall_clock or (lambda: datetime.now(UTC))
        self._qlog: QlogDirectory | None = None
        if config.qlog_directory is not None:
            self._qlog = QlogDirectory(config.qlog_directory, label=self.identity.node, files=config.qlog_files)
        self._reception = Reception(self, authorize=authorize, on_link=on_link)
        self._dialler = Dialler(self)
        self._connections = Table()
        self._due: Agenda[Link | Connection] = Agenda(loop, self._on_timer)
        self._next_link = 1
        self._dirty: dict[Link, None] = {}
        self._flush_handle: asyncio.Handle | None = None
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
        self._reception.deny(fingerprint)
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
        self._reception.rotate(credentials)
        log.info("new connections show the certificate sha256=%s", credentials.fingerprint, extra=who())
        if self.observer is not None:
            self._emit(CredentialsRotated(self.now_ns(), credentials.fingerprint))

    def set_deadlines(self, *, lost_after_ns: int | None, connect_ns: int) -> None:
        """Make links from now on with other deadlines; those that live keep theirs.

        Args:
            lost_after_ns: As in EndpointConfig.
            connect_ns: As in EndpointConfig.
        Raises:
            ConfigurationError: One of them makes no sense.
        """
        self.config = replace(self.config, lost_after_ns=lost_after_ns, connect_ns=connect_ns)

    async def aclose(self, *, timeout: float = 1.0) -> None:
        """Close every link within `timeout` seconds: what was given to them is delivered first, if that is quick.

        Cancelled, it closes at once. Called again, it waits for the first call. Afterwards no task, timer or file of
        the endpoint is left; a name that the system's resolver is asked for has its daemon thread until that answers.
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
            resolving = list(self._dialler.resolving.values())
            self._shut()
            try:  # they are cancelled; one turn of the loop and they are gone
                await asyncio.gather(*resolving, return_exceptions=True)
            finally:
                self._closing.set_result(None)

    def _undelivered(self) -> bool:
        return any(link.state is LinkState.UP and not link.core.drained for link in self.links.values())

    def _shut(self) -> None:
        for task in self._dialler.resolving.values():
            task.cancel()
        for link in list(self.links.values()):
            self._own(link, link.core.close, "endpoint closed")
        self._flush()
        self._closed = True
        for connection in list(self._connections):
            self._close(connection, CLOSE_NORMAL, "endpoint closed")
        self._due.stop()
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
        self._dialler.cancel(link)
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
            self._own(link, self._serve, link)
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
        if not self._closed:
            self._due.arm()

    def _own(self, link: Link, work: Callable[..., object], *arguments: object) -> None:
        """Run our own work for one link. What goes wrong is our fault; it ends this link by name, and no other."""
        try:
            work(*arguments)
        except Exception as error:
            link.log.exception("%r ends after an unexpected error", link)
            lose = partial(link.core.lose, f"internal error: {error!r}", now_ns=self.now_ns())
            if not self._call(lose):
                self._link_ended(link)  # so broken that it cannot even end in order: nothing asks it anything again
                self._dirty.pop(link, None)
                connection, link.connection = link.connection, None
                if connection is not None:
                    self._close(connection, CLOSE_GONE, "internal error")

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

    def _on_datagrams(self, datagrams: list[tuple[bytes, Address]]) -> None:
        if self._closed:
            return
        now_ns = self.now_ns()
        touched: dict[Connection, None] = {}
        for data, address in datagrams:
            connection = self._reception.find(data, address, now_ns)
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

    def _register(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._schedule(connection)

    def _guard(self, connection: Connection, work: Callable[..., object], *arguments: object) -> bool:
        """Run what hostile bytes can upset; whatever goes wrong ends this connection only."""
        try:
            work(*arguments)
        except ProtocolError as error:
            log.warning("connection of %s closed: %s", connection.identity or "a stranger", error)
            self._fail(connection, CLOSE_PROTOCOL, str(error))
        except Exception:
            # aioquic asserts its way through some malformed input; the peer's bytes must not end our endpoint
            peer = connection.identity or "a stranger"
            log.exception("connection of %s closed after an unexpected error", peer, extra=who(connection))
            self._fail(connection, CLOSE_PROTOCOL, "internal error")
        else:
            return True
        return False

    def _process(self, connection: Connection, now_ns: int) -> None:
        if connection not in self._connections:  # it failed; nothing of it may be registered again
            return
        session = connection.session
        self._connections.refresh(connection)
        if session.resets != connection.resets:
            count, connection.resets = session.resets - connection.resets, session.resets
            self._guard(connection, connection.pace.resets, now_ns, count)
        while connection in self._connections and (event := session.next_event()) is not None:
            match event:
                case Authenticated():
                    self._reception.authenticated(connection, event)
                case ControlData():
                    self._guard(connection, self._reception.control, connection, event.data, now_ns)
                case Closed():
                    self._gone(connection, event.code, event.reason, now_ns)
        link = connection.link
        if link is not None and link.connection is connection and session.heard_ns == now_ns and connection.greeted:
            self._own(link, link.core.heard, now_ns)

    def _transmit(self, connection: Connection) -> None:
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

    # -- ends of connections -------------------------------------------------------------------------------------

    def _fail(self, connection: Connection, code: int, reason: str, *, note: str = "") -> None:
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

    def _gone(self, connection: Connection, code: int, reason: str, now_ns: int) -> None:
        """The connection ended: closed by the peer, or by QUIC itself."""
        self._tell_down(connection, code, reason, by_peer=True)
        self._forget(connection)
        link = connection.link
        if link is None or link.connection is not connection:
            if not connection.dialled and not connection.greeted:
                text = "a connection ended before it was authenticated: %s %s"
                log.info(text, error_name(code), reason, extra=who(connection))
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
        self._dialler.postpone(link, self.now_ns())
        self._touch(link)

    def _close(self, connection: Connection, code: int, reason: str) -> None:
        if connection in self._connections:
            self._tell_down(connection, code, reason, by_peer=False)
            connection.session.close(code, reason[:200])
            with contextlib.suppress(Exception):
                datagrams = connection.session.datagrams_to_send(self.now_ns())
                if datagrams:
                    self._io.send(datagrams)
            self._forget(connection)

    def _tell_down(self, connection: Connection, code: int, reason: str, *, by_peer: bool) -> None:
        link = connection.link
        if self.observer is not None and link is not None and connection in self._connections:
            peer, greeted = str(link.identity), connection.greeted
            self._emit(ConnectionDown(self.now_ns(), peer, link.number, code, reason, by_peer, greeted))

    def _forget(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        connection.session.release()
        self._reception.door.closed(connection)
        self._due.pop(connection, None)
        if self._qlog is not None:
            connection.session.end_trace()

    def _schedule(self, item: Link | Connection) -> None:
        """Note when to look at a link or connection again; called whenever it was touched."""
        known = item in self._connections if isinstance(item, Connection) else self.links.get(item.identity) is item
        self._due.note(item, item.next_timer() if known else None)

    def _on_timer(self) -> None:
        if self._closed:
            return
        now_ns, items = self._due.due(self.now_ns())
        for item in items:
            if isinstance(item, Link):
                self._own(item, item.handle_timer, now_ns)
                if item.wants_dial(now_ns):
                    self._own(item, self._dialler.dial, item, now_ns)
                self._dirty[item] = None
            elif item in self._connections:
                self._connection_timer(item, now_ns)
        self._flush()

    def _connection_timer(self, connection: Connection, now_ns: int) -> None:
        at = connection.session.next_timer()
        if at is not None and now_ns >= at:
            self._guard(connection, connection.session.handle_timer, now_ns)
            self._process(connection, now_ns)
        if connection not in self._connections:
            return
        late = connection.overdue(now_ns)
        if late is None:
            self._transmit(connection)
        else:
            self._fail(connection, *late)
