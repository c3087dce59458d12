"""Connections at work: datagrams into their carriers and out of them, and their ends.

Everything that a peer's bytes can upset is run here, under a guard: what goes wrong ends that connection only. A
connection ends once. It is closed from here (`fail`, `close`), or it closed by itself (`ended`); then it leaves the
table, its carrier lets go of all memory, and the endpoint's core hears of it if it carried a link. What its peer should
hear still is kept for a while (closed.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from quicoll_transport.carrier import CLOSE_PROTOCOL, CLOSE_REFUSED, CLOSE_REPLACED
from quicoll_transport.errors import ProtocolError
from quicoll_transport.events import ConnectionDown, PeerRefused

if TYPE_CHECKING:
    from quicoll_transport.carrier import Closed
    from quicoll_transport.endpoint.core.agenda import Agenda
    from quicoll_transport.endpoint.core.closed import ClosedConnections
    from quicoll_transport.endpoint.core.connection import Connection
    from quicoll_transport.endpoint.core.peer import Peer
    from quicoll_transport.endpoint.core.table import Table
    from quicoll_transport.endpoint.core.terms import Actions
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.security.limits import Guard

__all__ = ["Traffic"]

_MAX_UNPROVED = 256 << 10  # bytes of a stranger until its certificate is there; a chain of certificates takes 10 KiB


class Traffic:
    """See the module's head.

    table, closed, agenda, door, actions: the endpoint's.
    on_failed(peer, code, reason): the connection that carried this peer's link was closed from here, for this reason.
    """

    def __init__(
        self,
        *,
        table: Table,
        closed: ClosedConnections,
        agenda: Agenda[Peer | Connection],
        door: Guard[Connection],
        actions: Actions,
        on_failed: Callable[[Peer, int, str], None],
    ) -> None:
        self._table = table
        self._closed = closed
        self._agenda = agenda
        self._door = door
        self._actions = actions
        self._on_failed = on_failed

    def register(self, connection: Connection) -> None:
        """Enter a new connection into the table and the agenda."""
        self._table.add(connection)
        self.schedule(connection)

    def schedule(self, connection: Connection) -> None:
        """Note when to look at a connection again; called whenever it was touched."""
        self._agenda.note(connection, connection.next_timer() if connection.listed else None)

    def receive(self, connection: Connection, run: DatagramRun, now_ns: int) -> None:
        """Give a run of datagrams to a connection."""
        connection.answer_ns = None
        if connection.identity is None:
            connection.unproved += len(run.memory)
            if connection.unproved > _MAX_UNPROVED:
                self.fail(connection, CLOSE_REFUSED, "handshake too long")
                return
        self.guard(connection, connection.carrier.receive, run, now_ns)

    def transmit(self, connection: Connection) -> None:
        """Send what a connection has to send."""
        try:
            self._collect(connection)
        except Exception as error:
            self._spoilt(connection, error)
        self.schedule(connection)

    def _collect(self, connection: Connection) -> None:
        """Queue what a carrier has to send."""
        self._keep(connection)
        connection.sending = self._actions.send(connection.carrier.datagrams_to_send(self._actions.now_ns))

    def _keep(self, connection: Connection) -> None:
        """Copy what a carrier gave before and still waits to be sent: its memory is about to be the carrier's again.

        Mostly nothing waits: the shell sends after each call of the core.
        """
        before, queue = connection.sending, self._actions.queue
        if before is not None and queue and any(action is before for action in queue):
            before.runs = [run.kept() for run in before.runs]

    def guard(self, connection: Connection, work: Callable[..., object], *arguments: object) -> bool:
        """Run what hostile bytes can upset; whatever goes wrong ends this connection only."""
        try:
            work(*arguments)
        except Exception as error:
            self._spoilt(connection, error)
            return False
        return True

    def _spoilt(self, connection: Connection, error: Exception) -> None:
        """End a connection over what its carrier or its peer's words raised."""
        who, name, number = connection.identity or "a stranger", connection.peer_name, connection.link_number
        if isinstance(error, ProtocolError):
            self._actions.warning("connection of %s closed: %s", who, error, peer=name, link=number)
            self.fail(connection, CLOSE_PROTOCOL, str(error))
        else:
            # aioquic asserts its way through some malformed input; the peer's bytes must not end our endpoint
            text = "connection of %s closed after an unexpected error"
            self._actions.error(error, text, who, peer=name, link=number)
            self.fail(connection, CLOSE_PROTOCOL, "internal error")

    def fail(self, connection: Connection, code: int, reason: str, *, note: str = "") -> None:
        """Close a connection from here; its link, if it lives, may be redialled.

        Args:
            connection: It may have ended already.
            code: CLOSE_*; the peer hears it, and `reason` too.
            reason: For people.
            note: What only we may know, in place of `reason`.
        """
        peer = connection.peer
        turned_away = not connection.greeted and code != CLOSE_REPLACED and (note or not connection.dialled)
        if self._actions.observed and turned_away and connection.listed:
            name = "" if connection.identity is None else str(connection.identity)
            address = connection.carrier.peer_address
            self._actions.tell(PeerRefused(self._actions.now_ns, name, address, note or reason))
        self.close(connection, code, reason)
        if peer is not None and connection.carries:
            self._table.detach(peer)
            self._on_failed(peer, code, note or reason)

    def ended(self, connection: Connection, end: Closed) -> Peer | None:
        """Forget a connection that closed by itself; return the peer whose link it carried, None if it carried none."""
        self._tell_down(connection, end.code, end.reason, by_peer=True)
        self._forget(connection)
        peer = connection.peer
        if peer is not None and connection.carries:
            self._table.detach(peer)
            return peer
        if not connection.dialled and not connection.greeted:
            text = "a connection ended before it was authenticated: %s %s"
            self._actions.info(text, end.name, end.reason, peer=connection.peer_name, link=connection.link_number)
        return None

    def close(self, connection: Connection, code: int, reason: str) -> None:
        """Close a connection from here, whatever becomes of its link; one that has ended is left alone."""
        if connection.listed:
            self._tell_down(connection, code, reason, by_peer=False)
            connection.carrier.close(code, reason[:200])
            with contextlib.suppress(Exception):
                self._collect(connection)
            self._forget(connection)

    def _tell_down(self, connection: Connection, code: int, reason: str, *, by_peer: bool) -> None:
        peer = connection.peer
        if self._actions.observed and peer is not None and connection.listed:
            name, now_ns = str(peer.identity), self._actions.now_ns
            event = ConnectionDown(now_ns, name, peer.number, code, reason, by_peer, connection.greeted)
            self._actions.tell(event)

    def _forget(self, connection: Connection) -> None:
        if connection.listed:
            self._table.remove(connection)
            self._keep(connection)
            now_ns = self._actions.now_ns
            if (last := connection.carrier.last_words(now_ns)) is not None:
                self._closed.add(connection.cids, last, now_ns)
            connection.carrier.release()
            self._door.closed(connection)
            self._agenda.pop(connection, None)
