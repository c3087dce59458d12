"""How a session becomes a link's connection: the gate and its guard, authentication, Hello. Both sides go through here.

    stranger --Retry, handshake--> authenticated: chain, dates, name, policy --Hello--> greeted: a link's connection

A session belongs to no link until its peer is authenticated and has said Hello. Until then it costs a place among
`max_handshakes` (accepted ones) and has a deadline (all). Reasons for a refusal stay in our log; the peer hears
"refused". What is refused for its Hello hears why, since only authenticated peers get that far.

Hello matches two sides by (incarnation, link): a later one of the peer ends the link that we still have; an earlier one
is stale; one that names another link of ours is for a link that has ended. Where both sides dial, both keep the one
connection that the lesser node dialled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.hashes import SHA256

from quicoll_transport.endpoint.connection import Connection, who
from quicoll_transport.errors import AuthenticationError, ProtocolError
from quicoll_transport.events import ConnectionUp
from quicoll_transport.link.core import LinkId
from quicoll_transport.link.frames import Hello, Ping
from quicoll_transport.quic import (
    CLOSE_GONE,
    CLOSE_REFUSED,
    CLOSE_REPLACED,
    Authenticated,
    Gate,
    destination_cid,
    is_unauthenticated_initial,
)
from quicoll_transport.security.identity import Credentials, Identity, verify_peer
from quicoll_transport.security.limits import Guard, Pace

if TYPE_CHECKING:
    from quicoll_transport.endpoint.link import Link
    from quicoll_transport.endpoint.shell import Endpoint
    from quicoll_transport.net.addresses import Address

__all__ = ["Reception"]

log = logging.getLogger("quicoll.transport")


class Reception:
    """Part of an endpoint. `door`: how often strangers may try, and who gives way when they are too many."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        authorize: Callable[[Identity], str | None],
        on_link: Callable[[Link], None],
    ) -> None:
        config = endpoint.config
        self.door: Guard[Connection] = Guard(config.guard, slots=config.max_handshakes)
        self._endpoint = endpoint
        self._authorize = authorize
        self._on_link = on_link
        self._gate = Gate(
            credentials=endpoint.credentials,
            config=config.session_for(endpoint.address),
            retry=config.retry,
            qlog=endpoint._qlog,
        )

    def rotate(self, credentials: Credentials) -> None:
        """Show these to whoever comes from now on."""
        self._gate.rotate(credentials)

    def deny(self, fingerprint: str) -> None:
        """Shut a certificate out, now and later; see Endpoint.deny."""
        endpoint = self._endpoint
        denied = endpoint.policy.deny(fingerprint)
        log.warning("certificate sha256=%s is denied from now on", denied, extra=who())
        for connection in [one for one in endpoint._connections if one.fingerprint == denied]:
            link = connection.link
            if link is not None and link.connection is connection:
                link.connection, link.fingerprint = None, denied
            # "gone" as a code: an honest peer need not dial again and again until its deadline
            endpoint._close(connection, CLOSE_GONE, "refused")
        for link in [one for one in endpoint.links.values() if one.fingerprint == denied]:
            link.core.lose("its certificate is denied", now_ns=endpoint.now_ns())

    def find(self, data: bytes, address: Address, now_ns: int) -> Connection | None:
        """The connection that a datagram is for; a stranger's first one may make one."""
        cid = destination_cid(data)
        if cid is None:
            return None
        connection = self._endpoint._connections.find(cid)
        if connection is not None or not is_unauthenticated_initial(data):
            return connection
        if self._endpoint._closing is not None or not self.door.initial(address, now_ns):
            return None
        try:
            admitted = self._gate.admit(data, address, now_ns, lambda: self.door.handshake(address, now_ns))
        except Exception:
            log.exception("a first datagram could not be judged", extra=who())
            return None
        if isinstance(admitted, bytes):
            self._endpoint._io.send([(admitted, address)])
            return None
        if admitted is None:
            return None
        deadline_ns = now_ns + self._endpoint.config.handshake_ns
        connection = Connection(admitted, dialled=False, deadline_ns=deadline_ns, pace=Pace(self._endpoint.config.pace))
        self._endpoint._register(connection)
        displaced = self.door.opened(connection, address)
        if displaced is not None:
            self._endpoint._fail(displaced, CLOSE_REFUSED, "too many handshakes")
        return connection

    def authenticated(self, connection: Connection, event: Authenticated) -> None:
        """The single place where a peer becomes somebody. Reasons stay in our log; the peer hears "refused"."""
        try:
            identity = verify_peer(
                event.certificate,
                event.chain,
                trust=self._endpoint.credentials.trust,
                job=self._endpoint.identity.job,
                now=self._endpoint._wall_clock(),
            )
            fingerprint = "" if event.certificate is None else event.certificate.fingerprint(SHA256()).hex()
            if (reason := self._endpoint.policy.judge_certificate(fingerprint)) is not None:
                raise AuthenticationError(reason, peer=str(identity))
            expected = connection.link.identity if connection.link is not None else None
            if expected is not None and identity != expected:
                raise AuthenticationError(f"dialled {expected}, found {identity}", peer=str(identity))
            if expected is None and (reason := self._judge(identity)) is not None:
                raise AuthenticationError(reason, peer=str(identity))
        except AuthenticationError as error:
            address = connection.session.peer_address
            log.warning("refused a peer at %s: %s", address, error, extra={**who(connection), "peer": error.peer})
            self._endpoint.refused = [*self._endpoint.refused[-63:], str(error)]
            self._endpoint._fail(connection, CLOSE_REFUSED, "refused", note=f"we refuse the peer: {error}")
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
            log.exception("authorization of %s failed", identity, extra={**who(), "peer": str(identity)})
            return "its authorization failed"

    def control(self, connection: Connection, data: bytes, now_ns: int) -> None:
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

    def _hello(self, connection: Connection, identity: Identity, hello: Hello, now_ns: int) -> bool:
        """Make this the connection of its link; False when it was refused."""
        endpoint = self._endpoint
        link = self._match(connection, identity, hello, now_ns)
        if link is None or not self._take_over(connection, link, identity):
            return False
        connection.greeted = True
        link.fingerprint = connection.fingerprint
        if connection.dialled:
            link.plan.worked()
        self.door.closed(connection)
        if connection.session.peer_address is not None:
            self.door.proved(connection.session.peer_address)
        link.core.hello(hello, now_ns)
        connection.session.attach(link.core)
        if endpoint.observer is not None and not link.ended:
            address, count = connection.session.peer_address, link.stats.connections
            event = ConnectionUp(endpoint.now_ns(), str(identity), link.number, address, connection.dialled, count)
            endpoint._emit(event)
        return True

    def _match(self, connection: Connection, identity: Identity, hello: Hello, now_ns: int) -> Link | None:
        """The link that the peer's Hello means, made if it means none yet; None when the connection was refused."""
        endpoint = self._endpoint
        theirs = LinkId(hello.incarnation, hello.link)
        if hello.incarnation <= 0 or hello.link <= 0:
            raise ProtocolError("Hello without an identity")
        ours = LinkId(hello.peer_incarnation, hello.peer_link)
        link = connection.link or endpoint.links.get(identity)
        if link is not None and link.core.remote is not None and theirs > link.core.remote:
            again = "restarted" if hello.incarnation > link.core.remote.incarnation else "gave this link up"
            link.core.lose(f"the peer {again}", now_ns=now_ns)
            endpoint._flush()
            if connection not in endpoint._connections:
                return None
            link = endpoint.links.get(identity)
        if link is not None and link.core.remote is not None and theirs < link.core.remote:
            endpoint._fail(connection, CLOSE_GONE, "a later process of this node is here")
            return None
        known = ours != LinkId(0, 0)
        if known and (link is None or ours != link.core.local):
            endpoint._fail(connection, CLOSE_GONE, "unknown link")
            return None
        if link is None:
            if endpoint._closing is not None or len(endpoint.links) >= endpoint.config.max_links:
                endpoint._fail(connection, CLOSE_REFUSED, "no room for another link")
                return None
            link = endpoint._new_link(identity)
            if not endpoint._call(self._on_link, link):
                link.core.close("it could not be taken over")
            if link.ended:
                endpoint._fail(connection, CLOSE_GONE, link.core.cause)
                return None
        return link

    def _take_over(self, connection: Connection, link: Link, identity: Identity) -> bool:
        """Put this connection in the place of the link's previous one; False when that one stays."""
        previous = link.connection
        if previous is connection:
            return True
        if previous is not None:
            # Where both sides dial, both must keep the same one of the two: the one that the lesser node dialled.
            if previous.dialled and self._endpoint.identity < identity:
                self._endpoint._fail(connection, CLOSE_REPLACED, "both sides dialled")
                return False
            link.connection = None
            link.core.disconnected()
            self._endpoint._close(previous, CLOSE_REPLACED, "replaced by another connection")
        link.connection = connection
        connection.link = link
        link.core.connected()
        return True
