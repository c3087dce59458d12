"""Which connections an endpoint has, by which ids their datagrams find them, and which one carries each link.

A connection is in the table from the moment it is dialled or admitted to its end, whether or not it belongs to a link.
A carrier gets ids while it lives and gives others up (in QUIC: RFC 9000, section 5.1); `refresh` follows that after
everything that a carrier may have done. So it does with the token by which the peer says that it knows nothing of the
connection: such a datagram has no id, and is found by its end (section 10.3.1).

Invariants: an id leads to one connection, which is in the table; what is not in the table is found by no datagram and
asked by no timer, and nothing enters it again. A peer has at most one connection of its link at a time, and that is
one of its own (`Connection.peer`). So it has at most one that is to take that one's place.

What is asked for each datagram is read without a call and written here alone: `Connection.listed` (it is in the table),
`Connection.carries` (it is the present connection of its peer's link), `Connection.succeeds` (it is to take that one's
place), `Table.of_link`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quicoll_transport.endpoint.core.connection import Connection
    from quicoll_transport.endpoint.core.peer import Peer

__all__ = ["Table"]

_TOKEN_BYTES = 16


class Table:
    """Iterated in the order of registration.

    by_cid: where the ids lead. of_link: the present connection of each peer's link, a dialled one that is not up yet
    included. successors: those that are to take their places.
    """

    def __init__(self) -> None:
        self.by_cid: dict[bytes, Connection] = {}
        self.of_link: dict[Peer, Connection] = {}
        self.successors: dict[Peer, Connection] = {}
        self._by_token: dict[bytes, Connection] = {}
        self._connections: dict[Connection, None] = {}  # an ordered set

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._connections)

    @property
    def strangers(self) -> int:
        """Accepted connections that have not said a valid Hello."""
        return sum(not connection.dialled and not connection.greeted for connection in self._connections)

    def find(self, cid: bytes) -> Connection | None:
        """Return the connection that an id leads to."""
        return self.by_cid.get(cid)

    def disowned(self, data: memoryview) -> Connection | None:
        """Return the connection of which a datagram may say that the peer knows nothing of it; None: it says nothing.

        That it is found here is no proof; its carrier looks at it.
        """
        return self._by_token.get(bytes(data[-_TOKEN_BYTES:]))

    def add(self, connection: Connection) -> None:
        """Register a connection with the ids that it has."""
        self._connections[connection] = None
        connection.listed = True
        self.refresh(connection)

    def refresh(self, connection: Connection) -> None:
        """Enter the ids that the carrier has got, and take those out that it has given up."""
        carrier = connection.carrier
        while carrier.cids:
            cid = carrier.cids.pop()
            if self.by_cid.get(cid) is not connection:  # QUIC announces an id again when the announcement was lost
                self.by_cid[cid] = connection
                connection.cids.append(cid)
        while carrier.retired_cids:
            cid = carrier.retired_cids.pop()
            if self.by_cid.get(cid) is connection:
                del self.by_cid[cid]
                connection.cids.remove(cid)
        if carrier.reset_token is not connection.reset_token:
            self._forget_token(connection)
            if carrier.reset_token is not None:
                self._by_token[carrier.reset_token] = connection
            connection.reset_token = carrier.reset_token

    def remove(self, connection: Connection) -> None:
        """Forget a connection and its ids."""
        del self._connections[connection]
        connection.listed = False
        for cid in connection.cids:
            if self.by_cid.get(cid) is connection:
                del self.by_cid[cid]
        self._forget_token(connection)
        self._succeeds_no_more(connection)

    def _forget_token(self, connection: Connection) -> None:
        if connection.reset_token is not None and self._by_token.get(connection.reset_token) is connection:
            del self._by_token[connection.reset_token]

    # -- links ---------------------------------------------------------------------------------------------------

    def attach(self, connection: Connection, peer: Peer) -> None:
        """Make this the connection of the peer's link."""
        self.detach(peer)
        self._succeeds_no_more(connection)
        connection.peer, connection.carries = peer, True
        self.of_link[peer] = connection

    def detach(self, peer: Peer) -> Connection | None:
        """Leave the peer's link without a connection; return the one that it had."""
        connection = self.of_link.pop(peer, None)
        if connection is not None:
            connection.carries = False
        return connection

    def put_forward(self, connection: Connection, peer: Peer) -> None:
        """Make this the connection that is to take the place of the one of the peer's link; there is none yet."""
        connection.peer, connection.succeeds = peer, True
        self.successors[peer] = connection

    def _succeeds_no_more(self, connection: Connection) -> None:
        if connection.succeeds and connection.peer is not None:
            connection.succeeds = False
            del self.successors[connection.peer]
