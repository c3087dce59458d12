"""The side that dials: which address is tried next, and when again.

One attempt is one connection to one address. A round tries all addresses of a peer in turn; names are looked up for
each round anew, because a node that comes back may have moved. After a round without success the peer waits, twice as
long each time (`_LAST_BACKOFF_NS` at most), until its link's connect deadline or the detector ends it.

Failure cases: a name that is not found or not in time is left out of the round, and its reason is part of the link's
`refusal`; an address that refuses, or says nothing for its share of the handshake's time, gives way to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll_transport.endpoint.core.terms import LookUp
from quicoll_transport.errors import AddressError
from quicoll_transport.net.addresses import Address, canonical, is_numeric

if TYPE_CHECKING:
    from quicoll_transport.endpoint.core.peer import Peer

__all__ = ["DialAttempt", "Dialler", "NoAddress"]

_LAST_BACKOFF_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class DialAttempt:
    """Connect to this address. answer_ns: until when anything at all must have come from there."""

    address: Address
    answer_ns: int


@dataclass(frozen=True, slots=True)
class NoAddress:
    """The round has nothing to try. reason: for people."""

    reason: str


class Dialler:
    """Decides; the core carries out. scope_of: the number of an interface's name, see `canonical`."""

    def __init__(self, *, handshake_ns: int, scope_of: Callable[[str], int]) -> None:
        self._handshake_ns = handshake_ns
        self._scope_of = scope_of

    def next(self, peer: Peer, now_ns: int) -> DialAttempt | NoAddress | LookUp | None:
        """Return what is to be done for a peer that wants to be dialled; None while its look-up is under way."""
        if (address := peer.plan.next()) is not None:
            return self._attempt(peer, address, now_ns)
        if all(is_numeric(str(address[0])) for address in peer.addresses):
            return self.begin_round(peer, *self._numeric(peer.addresses), now_ns)
        if peer.looking_up:
            return None
        peer.looking_up = True
        peer.next_dial_ns = now_ns + 2 * self._handshake_ns  # the look-up ends before, and sets it
        return LookUp(peer.number, tuple(peer.addresses), self._handshake_ns)

    def begin_round(
        self, peer: Peer, found: Sequence[Address], failed: Sequence[str], now_ns: int
    ) -> DialAttempt | NoAddress:
        """Return the first attempt of a round.

        Args:
            peer: Who is dialled.
            found: Canonical addresses to try.
            failed: Why others are missing.
            now_ns: The time.
        """
        peer.plan.begin(found)
        address = peer.plan.next()
        return NoAddress("; ".join(failed)) if address is None else self._attempt(peer, address, now_ns)

    def postpone(self, peer: Peer, now_ns: int) -> None:
        """Note that an attempt failed: the next address at once, or, when all were tried, after a pause."""
        peer.next_dial_ns = now_ns
        if not peer.plan.more:
            peer.next_dial_ns += peer.backoff_ns
            peer.backoff_ns = min(2 * peer.backoff_ns, _LAST_BACKOFF_NS)

    def _attempt(self, peer: Peer, address: Address, now_ns: int) -> DialAttempt:
        return DialAttempt(address, now_ns + peer.plan.patience_ns(self._handshake_ns))

    def _numeric(self, addresses: Sequence[Address]) -> tuple[list[Address], list[str]]:
        """Return the canonical forms of addresses without names, and why others have none."""
        found: list[Address] = []
        failed: list[str] = []
        for address in addresses:
            try:
                found.append(canonical(address, self._scope_of))
            except AddressError as error:
                failed.append(str(error))
        return found, failed
