"""The endpoint's account of itself: events for one observer, and a link's figures on request.

There is one interface, `TransportObserver`: a callable that takes an event. Events are frozen and come in the order
in which things happen, on the endpoint's loop, before the callbacks of the layer above; an observer must be quick. What
it raises goes to the loop's exception handler and changes nothing. Without an observer no event is built: the cost is
one comparison with None (benchmarks/detector.py measures both).

The events:

    LinkChanged          a link's state is another one; `cause` says why it ended
    SuspicionChanged     the peer has become suspect, or was heard again
    DialStarted          a connection attempt goes out
    ConnectionUp         Hello exchanged
    ConnectionDown       a connection of a link ended, attempts that never came up included
    PeerRefused          an authenticated or unauthenticated peer was turned away, with the reason that it does not hear
    Resent               messages of a link were sent again
    PayloadCorrupted     payloads of its peer failed their checksum
    Stalled              our own loop was late by more than the detector's `stall_after`
    CredentialsRotated   new connections use another certificate from now on

No event holds a key, a payload or a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quicoll_transport.link.core import LinkStats

if TYPE_CHECKING:
    from quicoll_transport.link.core import LinkState
    from quicoll_transport.net.addresses import Address

__all__ = [
    "ConnectionDown",
    "ConnectionUp",
    "CredentialsRotated",
    "DialStarted",
    "LinkChanged",
    "LinkSnapshot",
    "PayloadCorrupted",
    "PeerRefused",
    "Resent",
    "Stalled",
    "SuspicionChanged",
    "TransportEvent",
    "TransportObserver",
]


@dataclass(frozen=True, slots=True)
class _Event:
    """t_ns: the loop's monotonic clock when it happened."""

    t_ns: int


@dataclass(frozen=True, slots=True)
class _LinkEvent(_Event):
    """peer: "role/node", as in errors. link: our number of the link, which only grows; a new link has a new one."""

    peer: str
    link: int


@dataclass(frozen=True, slots=True)
class LinkChanged(_LinkEvent):
    state: LinkState
    cause: str  # why it ended; "" while it lives


@dataclass(frozen=True, slots=True)
class SuspicionChanged(_LinkEvent):
    suspect: bool
    silent_for_ns: int


@dataclass(frozen=True, slots=True)
class DialStarted(_LinkEvent):
    address: Address
    attempt: int  # of this link, from 1


@dataclass(frozen=True, slots=True)
class ConnectionUp(_LinkEvent):
    address: Address | None
    dialled: bool
    connections: int  # of this link so far, this one included


@dataclass(frozen=True, slots=True)
class ConnectionDown(_LinkEvent):
    code: int  # CLOSE_* or QUIC's
    reason: str
    by_peer: bool  # closed by the peer or by QUIC; otherwise by us
    was_up: bool  # Hello had been exchanged


@dataclass(frozen=True, slots=True)
class PeerRefused(_Event):
    peer: str  # "" where it did not say, or could not prove, who it is
    address: Address | None
    reason: str


@dataclass(frozen=True, slots=True)
class Resent(_LinkEvent):
    count: int  # since the last such event
    total: int


@dataclass(frozen=True, slots=True)
class PayloadCorrupted(_LinkEvent):
    count: int  # since the last such event
    total: int


@dataclass(frozen=True, slots=True)
class Stalled(_LinkEvent):
    count: int  # of this link's detector


@dataclass(frozen=True, slots=True)
class CredentialsRotated(_Event):
    fingerprint: str  # SHA-256 of the new certificate, hexadecimal


TransportEvent = (
    LinkChanged
    | SuspicionChanged
    | DialStarted
    | ConnectionUp
    | ConnectionDown
    | PeerRefused
    | Resent
    | PayloadCorrupted
    | Stalled
    | CredentialsRotated
)


class TransportObserver(Protocol):
    """The one interface. A plain function is one."""

    def __call__(self, event: TransportEvent, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSnapshot(LinkStats):
    """A link's figures at one moment: its counters, see LinkStats, and these.

    The figures of the path are those of the present connection: None or 0 while there is none.

    suspect: whether the detector has doubts. suspect_after_ns, lost_after_ns: its deadlines now; they move where they
        follow the round trips.
    stalls: of our own loop.
    rtt_ns, rttvar_ns: of heartbeats, smoothed; both processes' delays are in it. None before the first answer.
    path_rtt_ns, path_rttvar_ns, path_min_rtt_ns: QUIC's estimate of the same, less the peer's stated delay.
    cwnd, bytes_in_flight: QUIC's, bytes. sent_packets: that ask for an acknowledgement. lost_packets: that it declared
        lost, those sent again as probes included. spurious_packets: of these, that were acknowledged all the same.
    parity_bytes: sent behind the tail of messages; repaired_bytes: that were lost and made from the peer's parity.
    delivery_rate: payload bytes a second that the peer acknowledged while more was waiting to be sent, the median of
        the last few measurements; None until that has been so for a round trip. cwnd for each round trip may be far
        more than path and processors can do.
    credit_used: bytes of the peer's credit taken by our eager messages.
    """

    t_ns: int
    peer: str
    link: int
    state: LinkState
    suspect: bool
    cause: str
    suspect_after_ns: int
    lost_after_ns: int
    stalls: int
    rtt_ns: int | None
    rttvar_ns: int | None
    path_rtt_ns: int | None
    path_rttvar_ns: int | None
    path_min_rtt_ns: int | None
    cwnd: int
    bytes_in_flight: int
    sent_packets: int
    lost_packets: int
    spurious_packets: int
    parity_bytes: int
    repaired_bytes: int
    delivery_rate: int | None
    credit_used: int
