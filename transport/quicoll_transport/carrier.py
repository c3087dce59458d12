"""What carries a link between two endpoints: the protocol, and the plain data that it and the layers above exchange.

A carrier is one authenticated connection to one peer. It moves three kinds of things: a stream of control bytes in
each direction, messages (a header and a payload, from the sender's memory into the receiver's), and, on its other side,
runs of datagrams. QUIC is one (`quic.Session`); a data plane of our own and shared memory are others. Nothing here
names a packet, a stream or another library's event.

A carrier is sans-IO: it never reads a clock, and it sends nothing by itself. Its driver does this:

    receive(run) or handle_timer()  ->  next_event() until None  ->  datagrams_to_send()  ->  next_timer()

Units: times are nanoseconds of one monotonic clock, the same for all calls; sizes are bytes.

Memory. The payload of a message stays the caller's. A carrier may read it from `start_message` until the peer's link
has acknowledged the message (`forget_message`), `reset_message` was called, or the carrier was released. It writes into
`Inflow.view`, and only there and only while `Inflow.alive`; it keeps no reference to it after `release`. Memory of
datagrams: net/runs.py.

Failures. `receive`, `handle_timer` and `send_control` raise ProtocolError when the peer breaks the protocol; the caller
closes the carrier then. Everything else that ends a carrier is a Closed event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from quicoll_transport.link.frames import Header
    from quicoll_transport.link.posted import Inflow
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun

__all__ = [
    "CLOSE_FORGOTTEN",
    "CLOSE_GONE",
    "CLOSE_NORMAL",
    "CLOSE_OUTDATED",
    "CLOSE_PROTOCOL",
    "CLOSE_REFUSED",
    "CLOSE_REPLACED",
    "Authenticated",
    "Carrier",
    "CarrierEvent",
    "Closed",
    "ControlData",
    "Dial",
    "LastWords",
    "Listener",
    "MessageSink",
    "PathStats",
    "PeerMoved",
]

CLOSE_NORMAL = 0x7100  # above TLS alerts (0x100-0x1ff), below two bytes of QUIC's varint
CLOSE_REFUSED = 0x7101
CLOSE_PROTOCOL = 0x7102
CLOSE_GONE = 0x7103  # the link that this connection belongs to has ended, or was never known here
CLOSE_REPLACED = 0x7104  # the link goes on over another connection
CLOSE_OUTDATED = 0x7105  # a later process of this node has a link here; the reason is its incarnation, in digits
CLOSE_FORGOTTEN = 0x7106  # told without a connection: the peer's process knows nothing of it (any more)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStats:
    """What a carrier knows of its path. Times are None before the first acknowledgement.

    sent_packets: that ask for an acknowledgement, since the connection began.
    lost_packets: declared lost since then; what is sent again as a probe counts too. spurious_packets: of these, that
        were acknowledged all the same.
    parity_bytes: sent so that what is lost can be made from them; repaired_bytes: of streams, made from the peer's.
    delivery_rate: bytes a second that were acknowledged while more was waiting; None while that has not been measured.
    """

    rtt_ns: int | None
    rttvar_ns: int | None
    min_rtt_ns: int | None
    cwnd: int
    bytes_in_flight: int
    lost_packets: int
    sent_packets: int = 0
    spurious_packets: int = 0
    parity_bytes: int = 0
    repaired_bytes: int = 0
    delivery_rate: int | None


class MessageSink(Protocol):
    """Where a carrier puts messages: a LinkCore."""

    def message_begin(self, header: Header) -> Inflow | None:
        """Take the header of a message; return where its payload goes, or None when nobody wants it."""
        ...

    def message_end(self, inflow: Inflow) -> None:
        """Take note that all bytes of the message have arrived."""
        ...

    def message_reset(self, inflow: Inflow) -> None:
        """Take note that the peer gave the message up before its end."""
        ...


@dataclass(frozen=True, slots=True)
class Authenticated:
    """The handshake is complete and the peer proved that it holds the key of `certificate` (None: it sent none).

    Nothing more is proved: chain, dates and name are the endpoint's to verify before it uses the carrier.
    """

    certificate: Certificate | None
    chain: tuple[Certificate, ...]


class ControlData:
    """Bytes of the peer's control stream, in order. Pieces end anywhere."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


@dataclass(frozen=True, slots=True)
class PeerMoved:
    """The peer has shown that it is at another address than before: `Carrier.proved_address` says where."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The carrier is over; no event follows.

    code: CLOSE_*, or a number of the carrier's own. reason: the peer's text, for people. name: of the code, for people.
    """

    code: int
    reason: str
    name: str = field(default="", compare=False)


CarrierEvent = Authenticated | ControlData | PeerMoved | Closed


@dataclass(frozen=True, slots=True)
class LastWords:
    """What is left of a carrier that has ended, for a peer that may not know it yet and still sends.

    words: the last datagrams, which may be said again as they are; none: nothing may be said any more.
    until_ns: how long to keep it.
    """

    words: tuple[tuple[bytes, Address], ...]
    until_ns: int


class Carrier(Protocol):
    """One connection to one peer. See the module's head for the order of calls, for memory and for failures.

    cids: ids by which datagrams find this carrier, added as they come up; the endpoint takes them out.
    retired_cids: ids that no longer stand for it; likewise.
    reset_token: the end of a datagram by which the peer says that it knows nothing of this carrier; None: it has none.
    heard_ns: when the last authenticated datagram arrived; None before the first.
    resets: messages of the peer that it gave up after they had begun.
    """

    cids: list[bytes]
    retired_cids: list[bytes]
    reset_token: bytes | None
    heard_ns: int | None
    resets: int

    @property
    def peer_address(self) -> Address | None:
        """The address that datagrams go to at present; None before there is one."""
        ...

    @property
    def proved_address(self) -> Address | None:
        """The same, where the peer has shown that it gets what is sent there; None where it has not (yet)."""
        ...

    @property
    def unanswered_ns(self) -> int | None:
        """When the oldest packet was sent that asks for an acknowledgement and has none; None: there is none.

        One that is declared lost is none either. So while anything at all is acknowledged this moves on.
        """
        ...

    @property
    def probe_timeout_ns(self) -> int:
        """How long an acknowledgement may take at most, as far as the path is known."""
        ...

    def receive(self, run: DatagramRun, now_ns: int) -> None:
        """Take datagrams that arrived together; all of them are for this carrier, as `Listener.destinations` says.

        Args:
            run: Its memory may be overwritten until this returns, and is somebody else's after that.
            now_ns: The time.
        Raises:
            ProtocolError: the peer broke the protocol. What follows in the run is not looked at.
        """
        ...

    def datagrams_to_send(self, now_ns: int) -> list[DatagramRun]:
        """Return what is to be sent now, in order. Call it after everything that may have given rise to it.

        Memory of the runs is good until the next call, or `release`.
        """
        ...

    def next_timer(self) -> int | None:
        """Return when `handle_timer` is to be called; None while nothing is pending."""
        ...

    def handle_timer(self, now_ns: int) -> None:
        """Do what is due. Early calls do nothing.

        Raises:
            ProtocolError: the peer took too long over something.
        """
        ...

    def next_event(self) -> CarrierEvent | None:
        """Return what has happened, one thing at a time and in order; None when there is no more."""
        ...

    def attach(self, sink: MessageSink) -> None:
        """Give messages to `sink` from now on, first those that came before there was one."""
        ...

    def send_control(self, data: bytes) -> None:
        """Queue bytes for the control stream: they arrive in order and once, or the carrier ends.

        Raises:
            ProtocolError: the peer lets too many of them wait.
        """
        ...

    def start_message(self, key: object, header: bytes, payload: memoryview) -> None:
        """Queue a message; it is read and sent as the path takes it, together with others that have begun.

        Args:
            key: Names the message for `reset_message`; compared by identity.
            header: Arrives first, as `Header.decode` reads it.
            payload: Flat bytes of the caller's, read in place. See the module's head for how long.
        """
        ...

    def reset_message(self, key: object) -> None:
        """Stop sending a message; its payload is not read after this call. Unknown keys are ignored."""
        ...

    def forget_message(self, key: object) -> None:
        """Take note that the peer's link has all of a message; its payload is not read after this call.

        Unknown keys are ignored.
        """
        ...

    def limit_datagrams(self, most: int) -> None:
        """Send datagrams of `most` bytes at most from now on; what was lost for its size is sent again, smaller."""
        ...

    def path_stats(self) -> PathStats:
        """Return what is known of the path now."""
        ...

    @property
    def min_rtt_ns(self) -> int | None:
        """As of PathStats; asked for with each datagram."""
        ...

    def close(self, code: int, reason: str) -> None:
        """End the carrier and say so to the peer: `datagrams_to_send` has the last words. Closed twice is fine."""
        ...

    def last_words(self, now_ns: int) -> LastWords | None:
        """Return what is to be kept of it; None: nothing. Asked once, when it has ended and said its last words."""
        ...

    def release(self) -> None:
        """Let go of all memory of the caller's. Nothing is sent, delivered or told any more; the last call."""
        ...


class Listener(Protocol):
    """How datagrams of strangers become carriers."""

    def destinations(self, run: DatagramRun) -> list[tuple[bytes | None, DatagramRun]]:
        """Return a run in parts, in order, each with the id of the carrier that it is for; None: it is none of ours."""
        ...

    def is_first(self, data: bytes | memoryview) -> bool:
        """Return whether a datagram is the first of a connection: the only kind for which anything may be kept."""
        ...

    def admit(self, data: bytes, address: Address, now_ns: int, allow: Callable[[], bool]) -> Carrier | bytes | None:
        """Look at the first datagram of a stranger.

        Args:
            data: The datagram.
            address: Where it says that it comes from.
            now_ns: The time.
            allow: Asked last, once the source has shown its address: whether a handshake may begin now.
        Returns:
            A new carrier that was not fed with the datagram yet, one datagram to answer with, or None.
        """
        ...

    def disown(self, data: bytes | memoryview) -> bytes | None:
        """Return what tells the sender of a datagram that its carrier is unknown here, which is shorter; None: nothing.

        Args:
            data: A datagram for an id that leads nowhere, and that begins nothing.
        """
        ...


Dial = Callable[["Address", int], Carrier]
"""(address, now_ns) -> a carrier that connects to that address; its first datagrams are ready at once."""
