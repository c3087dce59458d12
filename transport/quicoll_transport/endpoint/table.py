"""Which connections an endpoint has, and by which connection ids their datagrams find them.

A connection is in the table from the moment it is dialled or admitted to its end, whether or not it belongs to a link.
QUIC gives it ids of its own while it lives and retires others (RFC 9000, section 5.1); `refresh` follows that after
everything that a session may have done.

Invariants: an id leads to one connection, which is in the table; what is not in the table is found by no datagram and
asked by no timer, and nothing enters it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quicoll_transport.endpoint.connection import Connection

__all__ = ["Table"]


class Table:
    """Iterated in the order of registration. by_cid: where the ids lead, for `find`, people and tests."""

    def __init__(self) -> None:
        self.by_cid: dict[bytes, Connection] = {}
        self._connections: dict[Connection, None] = {}  # an ordered set

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._connections)

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._connections

    @property
    def strangers(self) -> int:
        """Accepted connections that have not said a valid Hello."""
        return sum(not connection.dialled and not connection.greeted for connection in self._connections)

    def find(self, cid: bytes) -> Connection | None:
        return self.by_cid.get(cid)

    def add(self, connection: Connection) -> None:
        self._connections[connection] = None
        self.refresh(connection)

    def refresh(self, connection: Connection) -> None:
        """Enter the ids that the session has got, and take those out that it has given up."""
        session = connection.session
        while session.cids:
            cid = session.cids.pop()
            if self.by_cid.get(cid) is not connection:  # QUIC announces an id again when the announcement was lost
                self.by_cid[cid] = connection
                connection.cids.append(cid)
        while session.retired_cids:
            cid = session.retired_cids.pop()
            if self.by_cid.get(cid) is connection:
                del self.by_cid[cid]
                connection.cids.remove(cid)

    def remove(self, connection: Connection) -> None:
        del self._connections[connection]
        for cid in connection.cids:
            if self.by_cid.get(cid) is connection:
                del self.by_cid[cid]
