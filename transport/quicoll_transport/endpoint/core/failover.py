"""A link that is up goes on over another address of its peer when the present one has become silent.

A host with two addresses, each at a provider or network of its own, is there as long as one of them is reached. Its
link has one connection, by one path; when that path is cut, the other side has not failed. Who dialled the connection
watches it, and makes another one, a *successor*, to another address of the same peer. The successor shows the same
certificates in a handshake of its own, and says Hello for the same link; so messages, words and credit go on as after
any connection that died (link.core): nothing is lost, and what has arrived does not travel again.

States, of who dialled the present connection of a link that is up and has another address to dial:

    answered    what is in flight is acknowledged in time, or nothing is in flight
    doubted     the oldest packet in flight has waited for `patience`: a successor is dialled, to the next of the
                addresses that were not tried since the doubt began. The present connection goes on as before
    trying      the successor shakes hands. Nothing of the present connection depends on it

    trying  -> answered    at the end of the handshake something was acknowledged after all: the successor is closed,
                           and there is no doubt for a while, twice as long each time
            -> doubted     no answer from there, or refused: the next address; after the last one a pause
            -> (succeeded) authenticated, and the present connection is silent still: the successor is the link's from
                           here on, the other one is closed. Now the link is DOWN for the round trip of the Hellos
    any     -> (over)      the link ends, or its connection dies by itself, which is dialled again as ever (dialling)

`patience` is three probe timeouts of the present path, `_LEAST_NS` at least, for processes that stand still for a
moment. Where the system says that the address cannot be reached it is nothing at all. Whatever it is, and whatever the
pause, there is doubt when the detector suspects: then more than half of `lost_after` is left for a handshake.

Invariants
    The failure detector hears nothing of a successor before it carries the link: when all paths are cut, the link is
    lost exactly when it is without this.
    Only addresses of `Peer.addresses` are dialled (for a name: what it was last found to stand for), which the layer
    above has set; nothing that a peer says adds one. Who answers there has to be the identity that the link is to.
    One successor of a link at a time; a doubt that was mistaken costs one handshake, and mistakes come more rarely.
    Of a pair only one side makes successors: who dialled. Where both dial they have agreed whose connection is kept.

Failure cases
    Both paths are cut: no successor is answered; the detector decides.
    The peer stands still, and its paths do not: it acknowledges old packets before it answers a handshake, so the
    successor is closed.
    One direction is cut: nothing of ours is acknowledged, or no acknowledgement comes back; both are silence here.
    A restarted process at the other address: its Hello names another link, which ends this one, as after a redial.
    The path that failed comes back: nothing; it is dialled when the present one fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quicoll_transport.endpoint.core.dialling import DialAttempt
from quicoll_transport.errors import AddressError
from quicoll_transport.net.addresses import canonical, is_numeric

if TYPE_CHECKING:
    from quicoll_transport.endpoint.core.peer import Peer
    from quicoll_transport.endpoint.core.table import Table
    from quicoll_transport.net.addresses import Address

__all__ = ["PROBE_TIMEOUTS", "Failover"]

_LEAST_NS = 200_000_000
PROBE_TIMEOUTS = 3  # in which a peer that lives is heard of
_ANSWER_NS = 250_000_000  # the Connection Attempt Delay of RFC 8305 section 5, as for any dialling
_DOUBLINGS = 5  # of the pause after a mistake, at most
_FORGET_NS = 30_000_000_000  # after the last pause, that there were mistakes before


@dataclass(slots=True)
class _Doubt:
    """What is known of a link's paths.

    since_ns: when the oldest packet was sent that had no answer when a successor was dialled last. tried: where
    successors were dialled since. not_before_ns: when the next one may be dialled. vain: of them, that were not needed.
    unreachable: whether the system says so of the present address.
    """

    since_ns: int | None = None
    tried: dict[Address, None] = field(default_factory=dict)
    not_before_ns: int = 0
    vain: int = 0
    unreachable: bool = False


class Failover:
    """Decides; the endpoint's core carries out."""

    def __init__(self, table: Table, *, scope_of: Callable[[str], int]) -> None:
        """Doubt nothing.

        Args:
            table: The endpoint's connections.
            scope_of: The number of an interface's name, see `canonical`.
        """
        self._table = table
        self._scope_of = scope_of
        self._doubts: dict[Peer, _Doubt] = {}

    def forget(self, peer: Peer) -> None:
        """Take in that a peer's link has ended."""
        self._doubts.pop(peer, None)

    def unreachable(self, peer: Peer) -> None:
        """Take in that the system cannot reach the present address of a peer."""
        if peer.several:
            self._doubts.setdefault(peer, _Doubt()).unreachable = True

    def due_ns(self, peer: Peer) -> int | None:
        """Return from when on the present connection of a peer's link is silent for too long; None: no time is known.

        Args:
            peer: It may be reached at several addresses.
        """
        connection = self._table.of_link.get(peer)
        if connection is None or not (connection.dialled and connection.greeted) or peer in self._table.successors:
            return None
        since_ns = connection.carrier.unanswered_ns
        if since_ns is None:
            return None
        patience_ns = max(_LEAST_NS, PROBE_TIMEOUTS * connection.carrier.probe_timeout_ns)
        latest_ns = since_ns + peer.link.detector.suspect_after_ns
        doubt = self._doubts.get(peer)
        if doubt is None:
            return min(since_ns + patience_ns, latest_ns)
        if since_ns == doubt.since_ns:
            return doubt.not_before_ns
        return min(max(since_ns + (0 if doubt.unreachable else patience_ns), doubt.not_before_ns), latest_ns)

    def attempt(self, peer: Peer, now_ns: int) -> DialAttempt | None:
        """Return where a successor is to be dialled now; None: nowhere.

        Args:
            peer: It may be reached at several addresses.
            now_ns: The time.
        """
        due_ns = self.due_ns(peer)
        if due_ns is None or now_ns < due_ns:
            return None
        carrier = self._table.of_link[peer].carrier
        doubt = self._doubts.setdefault(peer, _Doubt())
        if carrier.unanswered_ns != doubt.since_ns:
            doubt.since_ns = carrier.unanswered_ns
            doubt.tried.clear()
        for address in self._addresses(peer):
            if address != carrier.peer_address and address not in doubt.tried:
                doubt.tried[address] = None
                doubt.not_before_ns, doubt.unreachable = now_ns, False
                longest_ns = max(_ANSWER_NS, PROBE_TIMEOUTS * carrier.probe_timeout_ns)
                return DialAttempt(address, now_ns + longest_ns)
        doubt.tried.clear()
        doubt.not_before_ns = now_ns + _LEAST_NS
        return None

    def takes_over(self, peer: Peer, now_ns: int) -> bool:
        """Return whether a successor that has shown who it is takes over: nothing was answered since it was dialled.

        Args:
            peer: Whose successor it is.
            now_ns: The time.
        """
        connection = self._table.of_link.get(peer)
        doubt = self._doubts.setdefault(peer, _Doubt())
        if connection is not None and connection.greeted and connection.carrier.unanswered_ns != doubt.since_ns:
            doubt.vain = doubt.vain + 1 if now_ns - doubt.not_before_ns < _FORGET_NS else 1
            doubt.not_before_ns = now_ns + (_LEAST_NS << min(doubt.vain, _DOUBLINGS))
            return False
        del self._doubts[peer]
        return True

    def _addresses(self, peer: Peer) -> list[Address]:
        """Return the canonical addresses of a peer, in their order; names give way to what they last stood for."""
        found: list[Address] = []
        for address in peer.addresses:
            if is_numeric(str(address[0])):
                try:
                    found.append(canonical(address, self._scope_of))
                except AddressError:
                    continue  # its interface is gone
        if len(found) < len(peer.addresses):
            found += peer.plan.found
        return list(dict.fromkeys(found))
