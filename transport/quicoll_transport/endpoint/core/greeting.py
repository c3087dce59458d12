"""The way from a connection of nobody to a connection of a link: who the peer is, its Hello, and what it says then.

admission.py has the rules; this module carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from quicoll_transport.carrier import CLOSE_GONE, CLOSE_OUTDATED, CLOSE_REFUSED, CLOSE_REPLACED
from quicoll_transport.endpoint.core.admission import check_hello, keeps_previous, newer, outdated, unwanted
from quicoll_transport.endpoint.core.peer import Peer
from quicoll_transport.errors import AuthenticationError, ProtocolError
from quicoll_transport.events import ConnectionUp
from quicoll_transport.link.control_stream import encode_control
from quicoll_transport.link.frames import Hello, InlineMessage, Inquiry, Ping, Sighting

if TYPE_CHECKING:
    from quicoll_transport.carrier import Authenticated
    from quicoll_transport.endpoint.core.admission import Admission
    from quicoll_transport.endpoint.core.connection import Connection
    from quicoll_transport.endpoint.core.table import Table
    from quicoll_transport.endpoint.core.terms import Actions, NodeIdentity
    from quicoll_transport.endpoint.core.traffic import Traffic

__all__ = ["Greeting"]

_MAX_REFUSED = 64  # refusals remembered
_MAX_INQUIRIES = 64  # answered on one connection, whose deadline goes on


class Greeting:
    """See the module's head.

    identity: ours. peers: the living ones. table, traffic, admission, actions: the endpoint's.
    settle(now_ns): finishes what the end of a link asks for, before another link of that peer begins.
    invite(identity) -> a peer that nobody here asked for, or the code and the reason with which it is turned away.
    succeed(connection): a connection that is to take the place of its link's present one is authenticated.
    wall_ns() -> the date, for who asks how this side sees it.

    refused: the last refusals of peers, newest last, for people and tests.
    """

    def __init__(
        self,
        *,
        identity: NodeIdentity,
        peers: Mapping[NodeIdentity, Peer],
        table: Table,
        traffic: Traffic,
        admission: Admission,
        actions: Actions,
        settle: Callable[[int], None],
        invite: Callable[[NodeIdentity], Peer | tuple[int, str]],
        succeed: Callable[[Connection, Peer], None],
        wall_ns: Callable[[], int],
    ) -> None:
        self.refused: list[str] = []
        self._identity = identity
        self._peers = peers
        self._table = table
        self._traffic = traffic
        self._admission = admission
        self._actions = actions
        self._settle = settle
        self._invite = invite
        self._succeed = succeed
        self._wall_ns = wall_ns

    def authenticated(self, connection: Connection, event: Authenticated) -> None:
        """Make a connection's peer somebody, or turn it away."""
        try:
            self._admission.identify(connection, event)
        except AuthenticationError as error:
            address = connection.carrier.peer_address
            text = "refused a peer at %s: %s"
            self._actions.warning(text, address, error, peer=error.peer, link=connection.link_number)
            self.refused = [*self.refused[1 - _MAX_REFUSED :], str(error)]
            self._traffic.fail(connection, CLOSE_REFUSED, "refused", note=f"we refuse the peer: {error}")
            return
        peer = connection.peer
        if peer is not None and connection.succeeds:
            self._succeed(connection, peer)
        elif peer is not None and connection.carries:
            peer.link.connected()

    def control(self, connection: Connection, data: bytes, now_ns: int) -> None:
        """Take bytes of the control stream: Hello first, then what is for the link.

        Raises:
            ProtocolError: The peer said what it may not say.
        """
        if connection.identity is None:
            raise ProtocolError("control messages before authentication")
        messages = connection.reader.feed(data)
        connection.listened(now_ns, began=bool(messages))
        for message in messages:
            if not isinstance(message, InlineMessage):  # these are bounded by the credit, like those with a stream
                connection.pace.control(now_ns, ping=isinstance(message, Ping))
            if not connection.greeted:
                if isinstance(message, Inquiry) and not connection.dialled and connection.answered < _MAX_INQUIRIES:
                    self._answer(connection)
                    continue
                if not isinstance(message, Hello) or connection.answered:
                    raise ProtocolError("the first control message is not Hello")
                if not self._hello(connection, connection.identity, message, now_ns):
                    return
            elif connection.peer is not None and connection.carries:
                connection.peer.link.control(message, now_ns)

    def _answer(self, connection: Connection) -> None:
        """Tell who asks how it is seen from here. It gets no link, and its deadline or its own word ends it."""
        connection.answered += 1
        address = connection.carrier.peer_address or ("", 0)
        sighting = Sighting(str(address[0]), int(address[1]), self._wall_ns())
        connection.carrier.send_control(encode_control(sighting))

    def _hello(self, connection: Connection, identity: NodeIdentity, hello: Hello, now_ns: int) -> bool:
        """Make this the connection of its link; False when it was refused."""
        check_hello(hello)
        peer = self._match(connection, identity, hello, now_ns)
        if peer is None or not self._take_over(connection, peer, identity):
            return False
        self._admission.greeted(connection)
        peer.fingerprint = connection.fingerprint
        if connection.dialled:
            peer.plan.worked()
        peer.link.hello(hello, now_ns)
        connection.carrier.attach(peer.link)
        if self._actions.observed and not peer.link.ended:
            address, count = connection.carrier.peer_address, peer.link.stats.connections
            event = ConnectionUp(now_ns, str(identity), peer.number, address, connection.dialled, count)
            self._actions.tell(event)
        return True

    def _match(self, connection: Connection, identity: NodeIdentity, hello: Hello, now_ns: int) -> Peer | None:
        """Return the peer whose link a Hello means, made if it means none yet; None when it was refused."""
        peer = connection.peer or self._peers.get(identity)
        if peer is not None and (cause := newer(peer, hello)) is not None:
            peer.link.lose(cause, now_ns=now_ns)
            self._settle(now_ns)
            if not connection.listed:
                return None
            peer = self._peers.get(identity)
        if latest := outdated(peer, hello):
            self._traffic.fail(connection, CLOSE_OUTDATED, str(latest))
            return None
        if (reason := unwanted(peer, hello)) is not None:
            self._traffic.fail(connection, CLOSE_GONE, reason)
            return None
        if peer is not None:
            return peer
        invited = self._invite(identity)
        if not isinstance(invited, Peer):
            self._traffic.fail(connection, *invited)
            return None
        return invited

    def _take_over(self, connection: Connection, peer: Peer, identity: NodeIdentity) -> bool:
        """Put this connection in the place of the link's previous one; False when that one stays."""
        previous = self._table.of_link.get(peer)
        if previous is connection:
            return True
        if previous is not None:
            if keeps_previous(previous, ours=self._identity, theirs=identity):
                self._traffic.fail(connection, CLOSE_REPLACED, "both sides dialled")
                return False
            self._table.detach(peer)
            peer.link.disconnected()
            self._traffic.close(previous, CLOSE_REPLACED, "replaced by another connection")
        self._table.attach(connection, peer)
        peer.link.connected()
        return True
