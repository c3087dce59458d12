"""Who comes in: the gate and its guard, authentication, and what a Hello means. Both sides go through here.

    stranger --Retry, handshake--> authenticated: chain, dates, name, policy --Hello--> greeted: a link's connection

A connection belongs to no link until its peer is authenticated and has said Hello. Until then it costs a place among
`max_handshakes` (accepted ones) and has a deadline (all). Reasons for a refusal stay in our log; the peer hears
"refused". A peer that is refused for its Hello hears why, since only authenticated peers get that far.

Hello matches two sides by (incarnation, link): a later one of the peer ends the link that we still have; an earlier one
is stale; one that names another link of ours is for a link that has ended. A process that is not its node's latest
hears the latest one's incarnation (CLOSE_OUTDATED), so that it can start over above it, or end, as the layer above
decides. Where both sides dial, both keep the one connection that the lesser node dialled.

This module has the rules; greeting.py and the core carry them out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quicoll_transport.endpoint.core.connection import Connection
from quicoll_transport.errors import AuthenticationError, ProtocolError
from quicoll_transport.link.core import LinkId
from quicoll_transport.security.limits import Guard, Pace

if TYPE_CHECKING:
    from quicoll_transport.carrier import Authenticated, Listener
    from quicoll_transport.endpoint.core.peer import Peer
    from quicoll_transport.endpoint.core.terms import EndpointSettings, NodeIdentity, Verify
    from quicoll_transport.link.frames import Hello
    from quicoll_transport.net.addresses import Address

__all__ = ["Admission", "as_incarnation", "check_hello", "keeps_previous", "newer", "outdated", "unwanted"]


class Admission:
    """See the module's head. door: how often strangers may try, and which one gives way when there are too many."""

    def __init__(
        self,
        *,
        settings: EndpointSettings,
        listener: Listener,
        verify: Verify,
        authorize: Callable[[NodeIdentity], str | None],
    ) -> None:
        self.door: Guard[Connection] = Guard(settings.guard, slots=settings.max_handshakes)
        self._settings = settings
        self._listener = listener
        self._verify = verify
        self._authorize = authorize

    def admit(self, data: bytes, address: Address, now_ns: int) -> Connection | bytes | None:
        """Look at a stranger's first datagram.

        Returns:
            A connection that was not fed with it yet, a datagram to answer, or None.
        Raises:
            Exception: What a carrier raises on malformed bytes.
        """
        if not self.door.initial(address, now_ns):
            return None
        admitted = self._listener.admit(data, address, now_ns, lambda: self.door.handshake(address, now_ns))
        if admitted is None or isinstance(admitted, bytes):
            return admitted
        deadline_ns = now_ns + self._settings.handshake_ns
        return Connection(admitted, dialled=False, deadline_ns=deadline_ns, pace=Pace(self._settings.pace))

    def disown(self, data: bytes | memoryview, now_ns: int) -> bytes | None:
        """Return what to answer to a datagram for a connection that there is not; None: nothing."""
        answer = self._listener.disown(data)
        return answer if answer is not None and self.door.unknown(now_ns) else None

    def identify(self, connection: Connection, event: Authenticated) -> None:
        """Make a connection's peer somebody: the single place where that happens.

        Raises:
            AuthenticationError: It is not who it has to be, or may have no link here. The connection is unchanged.
        """
        verified = self._verify(event)
        identity = verified.identity
        expected = None if connection.peer is None else connection.peer.identity
        if expected is not None and identity != expected:
            raise AuthenticationError(f"dialled {expected}, found {identity}", peer=str(identity))
        if expected is None and (reason := self._authorize(identity)) is not None:
            raise AuthenticationError(reason, peer=str(identity))
        connection.identity = identity
        connection.fingerprint = verified.fingerprint

    def greeted(self, connection: Connection) -> None:
        """Note that a connection has become a link's: it gives its place among the strangers back."""
        connection.greeted = True
        self.door.closed(connection)
        if connection.carrier.peer_address is not None:
            self.door.proved(connection.carrier.peer_address)


def newer(peer: Peer, hello: Hello) -> str | None:
    """Return why a Hello ends the link that we have; None: it does not."""
    remote = peer.link.remote
    if remote is None or LinkId(hello.incarnation, hello.link) <= remote:
        return None
    return "the peer restarted" if hello.incarnation > remote.incarnation else "the peer gave this link up"


def outdated(peer: Peer | None, hello: Hello) -> int:
    """Return the incarnation of the later process of this node that has a link here; 0: there is none."""
    remote = None if peer is None else peer.link.remote
    return remote.incarnation if remote is not None and remote.incarnation > hello.incarnation else 0


def as_incarnation(text: str) -> int:
    """Return the incarnation that a peer closed with (CLOSE_OUTDATED); 0: it is none."""
    return int(text) if len(text) <= 19 and text.isascii() and text.isdigit() else 0


def unwanted(peer: Peer | None, hello: Hello) -> str | None:
    """Return why a Hello is refused, in words for the peer; None: it is not. `peer`: that it would be for."""
    remote = None if peer is None else peer.link.remote
    if remote is not None and LinkId(hello.incarnation, hello.link) < remote:
        return "a later link of this node is here"
    ours = LinkId(hello.peer_incarnation, hello.peer_link)
    if ours != LinkId(0, 0) and (peer is None or ours != peer.link.local):
        return "unknown link"
    return None


def check_hello(hello: Hello) -> None:
    """Raise ProtocolError for a Hello that names no sender."""
    if hello.incarnation <= 0 or hello.link <= 0:
        raise ProtocolError("Hello without an identity")


def keeps_previous(previous: Connection, *, ours: NodeIdentity, theirs: NodeIdentity) -> bool:
    """Return whether the connection that a link has stays when another comes.

    Where both sides dial, both must keep the same one of the two: the one that the lesser node dialled, if anything
    has come back on it. One that nobody answers may go where nobody is, or no router lets it in, and would keep out the
    only one that gets through. The two sides agree all the same: the greater node learns of the lesser one's connection
    by its Hello, which that one says when it has had an answer.
    """
    return previous.dialled and previous.answer_ns is None and ours < theirs
