"""The endpoint without IO: datagrams, time and answers to look-ups in, actions and callbacks out.

Who owns what. An endpoint has connections (table.py finds them, traffic.py runs them) and peers, one per link
(peer.py). A connection belongs to no link until its peer is authenticated and has said Hello (admission.py has the
rules, greeting.py carries them out). One side of a pair dials (dialling.py); it redials for as long as the link lives,
and dials another address of the peer when the present one has become silent (failover.py).
When a link ends, its connection is closed with CLOSE_GONE, so that the other side does not have to wait for silence.

How it is driven. Every call takes `now_ns`. What is to be done comes out of `actions`, in order. Peers that were
touched wait (`waiting`) until `serve`, which writes what their links ask for, one peer at a time: so work of many
callers is gathered. `next_timer` says when `handle_timer` is due; ask it after the last `serve`.

    receive, handle_timer, unreachable, looked_up, peer, touch, deny, shut
        -> serve while peers wait, after each: actions until there are none -> next_timer

Callbacks of the layer above (`on_peer`, `Peer.on_app`, `Peer.on_state`) are made from within these calls, when the
state that they show is settled. They may call everything here, and must not raise.

Failure cases: a connection that breaks the protocol is closed and its link goes on (it may be redialled); a peer that
cannot be authenticated never gets a link; what a carrier raises on hostile bytes ends that connection only; what our
own code raises over one link ends that link only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from quicoll_transport.carrier import (
    CLOSE_GONE,
    CLOSE_NORMAL,
    CLOSE_OUTDATED,
    CLOSE_PROTOCOL,
    CLOSE_REFUSED,
    CLOSE_REPLACED,
    Authenticated,
    Closed,
    ControlData,
    PeerMoved,
)
from quicoll_transport.endpoint.core.admission import Admission, as_incarnation
from quicoll_transport.endpoint.core.agenda import Agenda
from quicoll_transport.endpoint.core.closed import ClosedConnections
from quicoll_transport.endpoint.core.connection import Connection
from quicoll_transport.endpoint.core.dialling import DialAttempt, Dialler, NoAddress
from quicoll_transport.endpoint.core.failover import PROBE_TIMEOUTS, Failover
from quicoll_transport.endpoint.core.greeting import Greeting
from quicoll_transport.endpoint.core.peer import Peer
from quicoll_transport.endpoint.core.table import Table
from quicoll_transport.endpoint.core.terms import (
    Actions,
    CancelLookUp,
    EndpointSettings,
    NodeIdentity,
    ReportError,
    Verify,
)
from quicoll_transport.endpoint.core.traffic import Traffic
from quicoll_transport.errors import ConfigurationError
from quicoll_transport.events import DialStarted
from quicoll_transport.link.core import ForgetMessage, LinkState, ResetMessage, SendControl, StartMessage
from quicoll_transport.net.addresses import canonical, is_numeric
from quicoll_transport.net.runs import joined
from quicoll_transport.security.limits import Pace

if TYPE_CHECKING:
    from quicoll_transport.carrier import Dial, Listener, PathStats
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun

__all__ = ["EndpointCore"]

_KNOCK = b"\x00"
_MAX_VIOLATIONS = 8  # connections that a peer may spoil before its link is given up
_MANY = 8  # datagrams at once: they come one after the other for a while
_PATIENCE_NS = 1_000_000
_PATIENCE_PART = 20  # of the round trip, at most: acknowledgements and answers wait for as long


class EndpointCore:
    """See the module's head.

    identity, incarnation: ours. listener, dial: how connections are made. verify: who a peer is.
    authorize(identity) -> reason or None: whether an authenticated peer that was not dialled may have a link here.
    on_peer(peer) -> whether it was taken over: a peer that nobody here asked for has made a link.
    on_end(peer): its link has ended; it is no longer among `peers`.
    scope_of: the number of a network interface's name. payload_fault: damages received payloads, for tests.
    observed: whether events are to be built. wall_ns() -> the date, since 1970; for answers to an Inquiry.

    actions: what is to be done, the oldest first; who does it takes it out.
    waiting: peers that were touched since they were last served.
    patience_ns: for how long what arrives next may wait for more, by what arrived last.
    peers: the living ones. connections: all; traffic: runs them. closed_connections: what is left.
    """

    def __init__(
        self,
        *,
        identity: NodeIdentity,
        incarnation: int,
        settings: EndpointSettings,
        listener: Listener,
        dial: Dial,
        verify: Verify,
        authorize: Callable[[NodeIdentity], str | None],
        on_peer: Callable[[Peer], bool],
        on_end: Callable[[Peer], None],
        scope_of: Callable[[str], int],
        payload_fault: Callable[[memoryview], None] | None = None,
        observed: bool = False,
        wall_ns: Callable[[], int],
    ) -> None:
        self.identity = identity
        self.peers: dict[NodeIdentity, Peer] = {}
        self.connections = Table()
        self.closed_connections = ClosedConnections()
        self.agenda: Agenda[Peer | Connection] = Agenda()
        self.admission = Admission(settings=settings, listener=listener, verify=verify, authorize=authorize)
        self._incarnation = incarnation
        self._settings = settings
        self._listener = listener
        self._dial_address = dial
        self._on_peer = on_peer
        self._on_end = on_end
        self._payload_fault = payload_fault
        self._dialler = Dialler(handshake_ns=settings.handshake_ns, scope_of=scope_of)
        self._failover = Failover(self.connections, scope_of=scope_of)
        self._actions = Actions(observed=observed)
        self.actions = self._actions.queue
        self.patience_ns = 0
        self.traffic = Traffic(
            table=self.connections,
            closed=self.closed_connections,
            agenda=self.agenda,
            door=self.admission.door,
            actions=self._actions,
            on_failed=self._failed,
        )
        self._greeting = Greeting(
            identity=identity,
            peers=self.peers,
            table=self.connections,
            traffic=self.traffic,
            admission=self.admission,
            actions=self._actions,
            settle=self._settle,
            invite=self._invite,
            succeed=self._succeed,
            wall_ns=wall_ns,
        )
        self._next_number = 1
        self.waiting: dict[Peer, None] = {}  # an ordered set
        self._closing = False
        self._closed = False

    # -- what is to be done --------------------------------------------------------------------------------------

    def serve(self, now_ns: int) -> None:
        """Do what the link of the first of the peers in `waiting` asks for; there has to be one."""
        self._actions.now_ns = now_ns
        peer = next(iter(self.waiting))
        del self.waiting[peer]
        self._own(peer, self._carry_out, peer)
        if self._actions.observed:
            peer.tell_counts()
        of_link = self.connections.of_link
        if (connection := of_link.get(peer)) is not None:
            self.traffic.transmit(connection)
        if peer.link.ended and (connection := self.connections.detach(peer)) is not None:
            code = CLOSE_NORMAL if peer.link.state is LinkState.CLOSED else CLOSE_GONE
            self.traffic.close(connection, code, peer.link.cause)
        at = peer.next_timer(connected=peer in of_link) if peer.living else None
        if at is not None and peer.several and (doubt_ns := self._failover.due_ns(peer)) is not None:
            at = min(at, doubt_ns)
        self.agenda.note(peer, at)

    def next_timer(self) -> int | None:
        """Return when `handle_timer` is due; None: never, as things are."""
        return min(self.agenda.values(), default=None)

    @property
    def refused(self) -> list[str]:
        """The last refusals of peers, newest last, for people and tests."""
        return self._greeting.refused

    @property
    def undelivered(self) -> bool:
        """Whether something that was given to a link which is up has not been acknowledged."""
        return any(peer.link.state is LinkState.UP and not peer.link.drained for peer in self.peers.values())

    # -- what happens --------------------------------------------------------------------------------------------

    def peer(self, identity: NodeIdentity, *, addresses: Sequence[Address], dial: bool, now_ns: int) -> Peer:
        """Return the peer with this identity, with a living link, made if there is none.

        Args:
            identity: Whom its certificate has to name.
            addresses: Where to dial it; empty: those that are known.
            dial: We connect; otherwise the peer does.
            now_ns: The time.
        Raises:
            ConfigurationError: There are `max_links` already.
        """
        self._actions.now_ns = now_ns
        peer = self.peers.get(identity)
        if peer is None:
            peer = self._new_peer(identity, addresses=addresses, dial=dial)
        else:
            self._extend_round(peer, addresses, now_ns)
            peer.reached_at(addresses)
            peer.dial = peer.dial or dial
        self.touch(peer)
        return peer

    def _extend_round(self, peer: Peer, addresses: Sequence[Address], now_ns: int) -> None:
        """Have addresses that are new tried in the round that is under way; what is being tried may be silent for as
        long as it may where there are others."""
        connection = self.connections.of_link.get(peer)
        if connection is None or connection.greeted or not connection.dialled:
            return
        new = [address for address in addresses if address not in peer.addresses and is_numeric(str(address[0]))]
        added = [peer.plan.add(canonical(address)) for address in new]
        if any(added) and connection.answer_ns is not None:
            patience_ns = peer.plan.patience_ns(self._settings.handshake_ns)
            connection.answer_ns = min(connection.answer_ns, now_ns + patience_ns)
            self.traffic.schedule(connection)

    def touch(self, peer: Peer) -> None:
        """Look at this peer in the next `serve`: something was asked of its link."""
        if not self._closed:
            self.waiting[peer] = None

    def path_stats(self, peer: Peer) -> PathStats | None:
        """Return what the present connection of a peer knows of its path; None without one."""
        connection = self.connections.of_link.get(peer)
        return None if connection is None else connection.carrier.path_stats()

    def proved_address(self, peer: Peer) -> Address | None:
        """Return where the present connection of a peer sends to, if the peer has shown that it is there."""
        connection = self.connections.of_link.get(peer)
        return None if connection is None or not connection.greeted else connection.carrier.proved_address

    def knock(self, address: Address, now_ns: int) -> None:
        """Send a datagram that says nothing, and that nobody answers.

        It makes an address translator or firewall on this side pass what comes from there later. One byte, which is no
        QUIC packet: it costs whoever gets it nothing, and amplifies nothing.

        Args:
            address: A canonical one, no name.
            now_ns: The time.
        """
        self._actions.now_ns = now_ns
        if not self._closed:
            self._actions.send(joined([(_KNOCK, address)]))

    def close(self, peer: Peer, reason: str, now_ns: int) -> None:
        """End a peer's link in order; the next `serve` says so to the peer."""
        self._actions.now_ns = now_ns
        peer.link.close(reason)
        self.touch(peer)

    def lose(self, peer: Peer, cause: str, now_ns: int) -> None:
        """End a peer's link as lost."""
        self._actions.now_ns = now_ns
        peer.link.lose(cause, now_ns=now_ns)

    def deny(self, fingerprint: str, now_ns: int) -> None:
        """End all connections and links of a certificate. fingerprint: SHA-256, as `Verified` has it."""
        self._actions.now_ns = now_ns
        self._actions.warning("certificate sha256=%s is denied from now on", fingerprint)
        for connection in [one for one in self.connections if one.fingerprint == fingerprint]:
            if connection.peer is not None and connection.carries:
                self.connections.detach(connection.peer)
                connection.peer.fingerprint = fingerprint
            # "gone" as a code: an honest peer need not dial again and again until its deadline
            self.traffic.close(connection, CLOSE_GONE, "refused")
        for peer in [one for one in self.peers.values() if one.fingerprint == fingerprint]:
            peer.link.lose("its certificate is denied", now_ns=now_ns)

    def receive(self, runs: Sequence[DatagramRun], now_ns: int) -> None:
        """Take datagrams that arrived, in order."""
        if self._closed:
            return
        self._actions.now_ns = now_ns
        touched: dict[Connection, None] = {}
        many = 0
        for run in runs:
            many += len(run)
            for cid, part in self._listener.destinations(run):
                if cid is None:
                    continue
                connection = self.connections.find(cid)
                connection, theirs = (connection, part) if connection is not None else self._place(cid, part, now_ns)
                if connection is not None:
                    touched[connection] = None
                    self.traffic.receive(connection, theirs, now_ns)
        for connection in touched:
            self._process(connection, now_ns)
            self._stirred(connection)
        self.patience_ns = _patience_ns(touched) if many >= _MANY else 0

    def _stirred(self, connection: Connection) -> None:
        """See that what a connection has to send goes out, and that its link's wishes are looked at."""
        if connection.peer is not None and not connection.succeeds:
            self.touch(connection.peer)
        else:
            self.traffic.transmit(connection)

    def handle_timer(self, now_ns: int) -> None:
        """Do what is due."""
        if self._closed:
            return
        self._actions.now_ns = now_ns
        self.closed_connections.expire(now_ns)
        for item in self.agenda.due(now_ns):
            if isinstance(item, Peer):
                self._peer_timer(item, now_ns)
            elif item.listed:
                self._connection_timer(item, now_ns)

    def looked_up(self, number: int, found: Sequence[Address], failed: Sequence[str], now_ns: int) -> None:
        """Take the answer to a LookUp.

        Args:
            number: Of the peer that it was for.
            found: Canonical addresses.
            failed: Why others are missing, for people.
            now_ns: The time.
        """
        self._actions.now_ns = now_ns
        peer = next((one for one in self.peers.values() if one.number == number), None)
        if peer is None or self._closed:
            return
        peer.looking_up = False
        if peer not in self.connections.of_link:
            self._own(peer, self._follow, peer, self._dialler.begin_round(peer, found, failed, now_ns), now_ns)
            self.touch(peer)

    def limit_datagrams(self, address: Address, most: int, now_ns: int) -> None:
        """Take the news that the path to an address carries datagrams of `most` bytes only."""
        self._actions.now_ns = now_ns
        for connection in self._towards(address):
            connection.carrier.limit_datagrams(most)
            if connection.peer is not None:
                self._stirred(connection)

    def unreachable(self, address: Address, cause: str, now_ns: int, *, refused: bool) -> None:
        """Take the news that datagrams do not reach an address.

        While dialling, this ends the attempt. A link that is up only counts what says that the host lives and its
        process does not: a route or an interface may come back within the link's deadline.

        Args:
            address: Where they were sent.
            cause: For people.
            now_ns: The time.
            refused: Whether the host is there and says that nothing listens.
        """
        self._actions.now_ns = now_ns
        for connection in self._towards(address):
            peer = connection.peer
            if peer is None:
                continue
            if connection.dialled and not connection.greeted:
                self.traffic.fail(connection, CLOSE_NORMAL, cause)
            elif refused:
                peer.link.unreachable(now_ns, PROBE_TIMEOUTS * connection.carrier.probe_timeout_ns)
            elif connection.carries:
                self._failover.unreachable(peer)
            self.touch(peer)

    def start_over(self, incarnation: int) -> None:
        """Make links from now on as this incarnation, above the present one; those that live keep theirs."""
        self._incarnation = incarnation

    def use_settings(self, settings: EndpointSettings) -> None:
        """Make links from now on with these settings; those that live keep theirs."""
        self._settings = settings

    def begin_close(self) -> None:
        """Let no stranger in and make no link for a peer any more."""
        self._closing = True

    def shut(self, reason: str, now_ns: int) -> None:
        """Close all links and connections; the peers hear `reason`. Nothing happens here afterwards but `actions`."""
        self._closing = True
        self._actions.now_ns = now_ns
        for peer in list(self.peers.values()):
            self._own(peer, peer.link.close, reason)
        self._settle(now_ns)
        self._closed = True
        for connection in list(self.connections):
            self.traffic.close(connection, CLOSE_NORMAL, reason)
        self.agenda.clear()

    # -- links ---------------------------------------------------------------------------------------------------

    def _new_peer(self, identity: NodeIdentity, *, addresses: Sequence[Address] = (), dial: bool = False) -> Peer:
        if len(self.peers) >= self._settings.max_links:
            raise ConfigurationError(f"more than {self._settings.max_links} links")
        peer = Peer(
            identity,
            number=self._next_number,
            incarnation=self._incarnation,
            config=self._settings.link(),
            addresses=addresses,
            dial=dial,
            actions=self._actions,
            on_end=self._link_ended,
            payload_fault=self._payload_fault,
        )
        self._next_number += 1
        self.peers[identity] = peer
        return peer

    def _invite(self, identity: NodeIdentity) -> Peer | tuple[int, str]:
        """Return a peer that nobody here asked for, or the code and the reason with which it is turned away."""
        if self._closing or len(self.peers) >= self._settings.max_links:
            return CLOSE_REFUSED, "no room for another link"
        peer = self._new_peer(identity)
        if not self._on_peer(peer):
            peer.link.close("it could not be taken over")
        return (CLOSE_GONE, peer.link.cause) if peer.link.ended else peer

    def _settle(self, now_ns: int) -> None:
        while self.waiting:
            self.serve(now_ns)

    def _link_ended(self, peer: Peer) -> None:
        peer.living = False
        if self.peers.get(peer.identity) is peer:
            del self.peers[peer.identity]
            self._on_end(peer)
        if peer.looking_up:
            peer.looking_up = False
            self._actions.put(CancelLookUp(peer.number))
        self._failover.forget(peer)
        if (successor := self.connections.successors.get(peer)) is not None:
            self.traffic.close(successor, CLOSE_NORMAL, "its link has ended")
        self.touch(peer)

    def _own(self, peer: Peer, work: Callable[..., object], *arguments: object) -> None:
        """Run our own work for one peer. What goes wrong is our fault; it ends this link by name, and no other."""
        try:
            work(*arguments)
        except Exception as error:
            name, number = str(peer.identity), peer.number
            self._actions.error(error, "%s ends after an unexpected error", repr(peer), peer=name, link=number)
            try:
                peer.link.lose(f"internal error: {error!r}", now_ns=self._actions.now_ns)
            except Exception as another:
                self._actions.put(ReportError(f"{peer!r} cannot even end in order", another))
                self._link_ended(peer)  # nothing asks it anything again
                self.waiting.pop(peer, None)
                connection = self.connections.detach(peer)
                if connection is not None:
                    self.traffic.close(connection, CLOSE_GONE, "internal error")

    def _carry_out(self, peer: Peer) -> None:
        """Give the carrier what the link asks for; without a connection it is dropped, and asked for again later."""
        connection = self.connections.of_link.get(peer)
        words: list[bytes] = []
        while (action := peer.link.poll(self._actions.now_ns)) is not None:
            if connection is None:
                continue
            carrier = connection.carrier
            match action:
                case SendControl():
                    words.append(action.data)
                case StartMessage():
                    message = action.message
                    if not message.done:
                        carrier.start_message(message, message.header(), message.rest())
                case ResetMessage():
                    carrier.reset_message(action.message)
                case ForgetMessage():
                    carrier.forget_message(action.message)
        if words and connection is not None:
            self.traffic.guard(connection, connection.carrier.send_control, b"".join(words))

    def _peer_timer(self, peer: Peer, now_ns: int) -> None:
        connection = self.connections.of_link.get(peer)
        path = connection.carrier.path_stats if connection is not None and connection.greeted else None
        self._own(peer, peer.handle_timer, now_ns, path)
        if peer.wants_dial(now_ns, connected=peer in self.connections.of_link):
            self._own(peer, self._dial, peer, now_ns)
        elif peer.living and peer.several and (attempt := self._failover.attempt(peer, now_ns)) is not None:
            self._own(peer, self._connect, peer, attempt, now_ns, self.connections.put_forward)
        self.touch(peer)

    # -- dialling ------------------------------------------------------------------------------------------------

    def _dial(self, peer: Peer, now_ns: int) -> None:
        step = self._dialler.next(peer, now_ns)
        if isinstance(step, DialAttempt | NoAddress):
            self._follow(peer, step, now_ns)
        elif step is not None:
            self._actions.put(step)

    def _follow(self, peer: Peer, step: DialAttempt | NoAddress, now_ns: int) -> None:
        if isinstance(step, NoAddress):
            self._detached(peer, step.reason)
        else:
            self._connect(peer, step, now_ns, self.connections.attach)

    def _connect(
        self, peer: Peer, attempt: DialAttempt, now_ns: int, enter: Callable[[Connection, Peer], None]
    ) -> None:
        connection = Connection(
            self._dial_address(attempt.address, now_ns),
            dialled=True,
            deadline_ns=now_ns + self._settings.handshake_ns,
            pace=Pace(self._settings.pace),
            answer_ns=attempt.answer_ns,
        )
        peer.attempts += 1
        enter(connection, peer)
        if self._actions.observed:
            self._actions.tell(DialStarted(now_ns, str(peer.identity), peer.number, attempt.address, peer.attempts))
        self.traffic.register(connection)
        self.traffic.transmit(connection)

    def _succeed(self, connection: Connection, peer: Peer) -> None:
        """Put an authenticated successor in the place of the connection of its link, if that one is silent still."""
        if not self._failover.takes_over(peer, self._actions.now_ns):
            self.traffic.close(connection, CLOSE_REPLACED, "the path before it answers again")
            self.touch(peer)
            return
        previous = self.connections.detach(peer)
        if previous is not None:
            peer.link.disconnected()
            self.traffic.close(previous, CLOSE_REPLACED, "its path is silent")
        self.connections.attach(connection, peer)
        if connection.carrier.peer_address is not None:
            peer.plan.use(connection.carrier.peer_address)
        peer.link.connected()

    # -- datagrams -----------------------------------------------------------------------------------------------

    def _place(self, cid: bytes, run: DatagramRun, now_ns: int) -> tuple[Connection | None, DatagramRun]:
        """Look at datagrams for an id that leads to no connection.

        Returns:
            The connection that they are for all the same, or that they have made, and those that are for it.
        """
        if (said := self.closed_connections.answer(cid, run, now_ns)) is not None:
            self._actions.send(joined(said))
            return None, run
        if run.memory[0] & 0x80:
            return self._open_to(run, now_ns)
        for i, data in enumerate(run.datagrams()):
            if (connection := self.connections.disowned(data)) is not None:
                return connection, run.part(i, i + 1)
        answer = self.admission.disown(run.memory[: run.size], now_ns)
        if answer is not None:
            self._actions.send(joined([(answer, run.address)]))
        return None, run

    def _open_to(self, run: DatagramRun, now_ns: int) -> tuple[Connection | None, DatagramRun]:
        """Look at datagrams for a carrier that there is not, one by one; a first one may make one.

        Returns:
            The new connection, if there is one, and the datagrams from the one that made it on.
        """
        for i, data in enumerate(run.datagrams()):
            if self._closing or not self._listener.is_first(data):
                continue
            admitted = self._admit(bytes(data), run.address, now_ns)
            if admitted is not None:
                return admitted, run.part(i, len(run))
        return None, run

    def _admit(self, data: bytes, address: Address, now_ns: int) -> Connection | None:
        """Look at the first datagram of a stranger; return its new connection, if it gets one."""
        try:
            admitted = self.admission.admit(data, address, now_ns)
        except Exception as error:
            self._actions.error(error, "a first datagram could not be read")
            return None
        if isinstance(admitted, bytes):
            self._actions.send(joined([(admitted, address)]))
            return None
        if admitted is not None:
            self.traffic.register(admitted)
            displaced = self.admission.door.opened(admitted, address)
            if displaced is not None:
                self.traffic.fail(displaced, CLOSE_REFUSED, "too many handshakes")
        return admitted

    def _process(self, connection: Connection, now_ns: int) -> None:
        carrier = connection.carrier
        if connection.listed:  # otherwise it failed; nothing of it may be registered again
            self.connections.refresh(connection)
            if carrier.resets != connection.resets:
                count, connection.resets = carrier.resets - connection.resets, carrier.resets
                self.traffic.guard(connection, connection.pace.resets, now_ns, count)
        while connection.listed and (event := carrier.next_event()) is not None:
            match event:
                case Authenticated():
                    self._greeting.authenticated(connection, event)
                case ControlData():
                    self.traffic.guard(connection, self._greeting.control, connection, event.data, now_ns)
                case PeerMoved():
                    if connection.peer is not None and connection.carries and connection.greeted:
                        connection.peer.moved()
                case Closed():
                    self._ended(connection, event, now_ns)
        peer = connection.peer
        heard = carrier.heard_ns == now_ns and connection.greeted
        if heard and peer is not None and connection.carries:
            self._own(peer, peer.link.heard, now_ns)

    def _connection_timer(self, connection: Connection, now_ns: int) -> None:
        at = connection.carrier.next_timer()
        if at is not None and now_ns >= at:
            self.traffic.guard(connection, connection.carrier.handle_timer, now_ns)
            self._process(connection, now_ns)
        if connection.listed and (late := connection.overdue(now_ns)) is not None:
            self.traffic.fail(connection, *late)
        if connection.listed or connection.peer is not None:
            self._stirred(connection)

    def _towards(self, address: Address) -> list[Connection]:
        """Return the connections with a peer at this address, whatever its scope."""
        return [
            connection
            for connection in self.connections
            if (at := connection.carrier.peer_address) is not None and at[:2] == address[:2]
        ]

    # -- ends of connections -------------------------------------------------------------------------------------

    def _failed(self, peer: Peer, code: int, reason: str) -> None:
        """Go on without the connection of a peer's link, which was closed from here."""
        peer.violations += code == CLOSE_PROTOCOL
        if peer.violations > _MAX_VIOLATIONS:
            peer.link.lose(f"it breaks the protocol again and again: {reason}", now_ns=self._actions.now_ns)
        else:
            self._detached(peer, reason)

    def _ended(self, connection: Connection, end: Closed, now_ns: int) -> None:
        """Go on without a connection that was closed by the peer, or by the carrier itself."""
        peer = self.traffic.ended(connection, end)
        if peer is None:
            return  # it carried no link; one that was to take another's place is stirred by whoever asked it
        code, reason = end.code, end.reason
        if code == CLOSE_OUTDATED and connection.identity is not None and (latest := as_incarnation(reason)):
            peer.link.outdated_by = latest
            peer.link.lose("a later process of this node is here", now_ns=now_ns)
            self.touch(peer)
            return
        # An authenticated peer may say that it does not know the link (any more); only on a connection that was part
        # of the link does an orderly end mean the link.
        if (code == CLOSE_GONE and connection.identity is not None) or (code == CLOSE_NORMAL and connection.greeted):
            peer.link.lose(f"closed by the peer ({reason or end.name})", now_ns=now_ns)
            self.touch(peer)
        else:
            self._detached(peer, f"{end.name}{': ' + reason if reason else ''}")

    def _detached(self, peer: Peer, reason: str) -> None:
        peer.link.refusal = peer.plan.failed(reason)
        peer.link.disconnected()
        self._dialler.postpone(peer, self._actions.now_ns)
        self.touch(peer)


def _patience_ns(connections: Iterable[Connection]) -> int:
    """Return how long what comes next may wait for more, where many datagrams of these have come at once."""
    patience_ns = 0
    for connection in connections:
        rtt_ns = connection.carrier.min_rtt_ns
        if rtt_ns is None or rtt_ns < _PATIENCE_PART * _PATIENCE_NS:
            return 0
        patience_ns = _PATIENCE_NS
    return patience_ns
