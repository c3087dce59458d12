"""The one module that touches aioquic (but for qlog's traces), its private parts included.

Above it there are messages, not packets.

What aioquic 1.7 lacks and this module supplies:

- Server-side client authentication. It is behind a private test flag of its TLS context, checks the client's
  signature but never its chain, and lets a client without a certificate pass. We set the flag, and a session is
  worth nothing until the endpoint has verified the chain and the name itself (`Authenticated`). No session ticket
  is ever issued, because a resumed handshake asks for no certificate.
- Back-pressure. `send_stream_data` takes everything. Messages are fed from the caller's memory in slices, so that
  QUIC's own buffers hold at most about two congestion windows.
- Placement. Bytes of a message stream are written straight into the buffer that its header asks for.

- Bounded windows. Its flow control doubles every window, counted from what was sent and not from what was taken, so
  a peer that has sent 1 GiB may leave a hole and make us hold the next 1 GiB. Here windows slide with what was taken.

Private names used: aioquic._buffer, ._crypto; QuicConnection._initialize, ._streams, ._spaces, ._loss,
._local_max_data, ._state, ._close_event, ._close_pending, ._network_paths, ._quic_logger, ._cryptos, ._packet_number,
._handshake_confirmed, ._write_connection_limits, ._write_stream_limits; CryptoPair.decrypt_packet;
QuicPacketRecovery._rtt_*, ._on_packets_lost; tls.Context._request_client_certificate, ._peer_certificate,
._peer_certificate_chain; QuicStreamSender._buffer.

`check_foundation` proves once per process that those which security rests on still mean what we think, by handshakes
in memory, and refuses to run otherwise; the canary tests say the same of all of them to whoever upgrades. Supported:
aioquic >=1.7.2, <1.8.

The session is sans-IO: datagrams and `now_ns` in, datagrams and events out. Connection ids and keys come from the
operating system's randomness.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Any, Protocol

from aioquic import tls
from aioquic._buffer import Buffer, BufferReadError
from aioquic._crypto import CryptoError
from aioquic.quic import events as quic_events
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.quic.connection import QuicConnection, QuicConnectionState
from aioquic.quic.crypto import KeyUnavailableError
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicPacketType,
    QuicProtocolVersion,
    encode_quic_retry,
    pull_quic_header,
)
from aioquic.quic.retry import TOKEN_LIFETIME, QuicRetryTokenHandler

from .errors import ConfigurationError, ProtocolError
from .frames import HEADER_SIZE, Header
from .identity import COORDINATOR, WORKER, Credentials, Identity

if TYPE_CHECKING:
    from aioquic.quic.logger import QuicLogger
    from cryptography.x509 import Certificate

    from .link import Inflow

__all__ = [
    "ALPN",
    "CLOSE_GONE",
    "CLOSE_NORMAL",
    "CLOSE_PROTOCOL",
    "CLOSE_REFUSED",
    "CLOSE_REPLACED",
    "Address",
    "Authenticated",
    "Closed",
    "ControlData",
    "Gate",
    "MessageSink",
    "PathStats",
    "Session",
    "SessionConfig",
    "check_foundation",
    "is_unauthenticated_initial",
]

Address = tuple[Any, ...]  # (host, port) or (host, port, flow, scope), as the socket gives it

ALPN = "quicoll/1"
CLOSE_NORMAL = 0x7100  # above TLS alerts (0x100-0x1ff), below two bytes of varint
CLOSE_REFUSED = 0x7101
CLOSE_PROTOCOL = 0x7102
CLOSE_GONE = 0x7103  # the link that this connection belongs to has ended, or was never known here
CLOSE_REPLACED = 0x7104  # the link goes on over another connection

_CID_LENGTH = 8
_DATAGRAM_BYTES = 1452  # a path of 1500 bytes less IPv6 and UDP headers
_CONTROL_STREAM = 0
_FEED_BYTES = 64 * 1024  # slice given to QUIC at a time, so that several messages share the path
_FEED_STREAMS = 8  # messages fed at the same time
_FEED_FLOOR = 256 * 1024  # unacknowledged bytes that QUIC may hold however small its window is
_FEED_CEILING = 64 << 20  # and however large
_EARLY_BYTES = 4 << 20  # message bytes that may overtake the peer's Hello, 64 for each piece added
_CONTROL_BYTES = 32 << 20  # control messages that the peer has not acknowledged
_MOST_KEY_PACKETS = 1 << 22  # half of what AES-GCM may protect with one key (RFC 9001 section 6.6)
_HEADER_NS = 30_000_000_000
_MOST_FORGED = 1 << 52  # packets that may fail their authentication, for AES-GCM (the same section)
_MOST_USED = 65536  # tokens remembered as used; a guard lets far fewer handshakes begin while one is valid
_SUPPORTED = ((1, 7, 2), (1, 8))


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Settings of one QUIC connection.

    datagram_bytes: UDP payload to send, at most what the path carries (no discovery yet). 0: 1452, or 8900 on the
        loopback interface.
    idle_ns: QUIC's own idle timeout; a backstop, failures are noticed by the link's detector long before.
    window_bytes: QUIC flow-control window, per stream and per connection: what a peer can make us hold of streams
        with holes, and an upper limit on the rate, window_bytes per RTT.
    key_packets: packets that this side protects with one key before it asks for the next, 1 to 2**22. An update costs
        what the peer has under way, which is sent again.
    forged_packets: packets that fail their authentication, 1 to 2**52, until the connection is closed; with so many
        tries a forgery is no longer next to impossible.
    header_ns: how long the header of a message may take to arrive from its first byte on. Many times what a path needs
        to repair a loss, since a connection that is resumed is the price of a mistake.
    Raises ConfigurationError.
    """

    datagram_bytes: int = 0
    idle_ns: int = 30_000_000_000
    window_bytes: int = 16 << 20
    congestion: str = "cubic"
    initial_rtt_ns: int = 50_000_000
    key_packets: int = _MOST_KEY_PACKETS
    forged_packets: int = _MOST_FORGED
    header_ns: int = _HEADER_NS

    def __post_init__(self) -> None:
        if not 1 <= self.forged_packets <= _MOST_FORGED:
            raise ConfigurationError(f"forged_packets must be 1 to {_MOST_FORGED}, is {self.forged_packets}")
        if self.header_ns <= 0:
            raise ConfigurationError(f"header_ns must be positive, is {self.header_ns}")
        if not 1 <= self.key_packets <= _MOST_KEY_PACKETS:
            raise ConfigurationError(f"key_packets must be 1 to {_MOST_KEY_PACKETS}, is {self.key_packets}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStats:
    """What QUIC knows of a connection's path. Times are None before the first acknowledgement.

    lost_packets: declared lost since the connection began; what is sent again as a probe counts too.
    """

    rtt_ns: int | None
    rttvar_ns: int | None
    min_rtt_ns: int | None
    cwnd: int
    bytes_in_flight: int
    lost_packets: int


class MessageSink(Protocol):
    """Where a session puts messages: a LinkCore."""

    def message_begin(self, header: Header) -> Inflow | None: ...
    def message_end(self, inflow: Inflow) -> None: ...
    def message_reset(self, inflow: Inflow) -> None: ...


@dataclass(frozen=True, slots=True)
class Authenticated:
    """The handshake is complete and the peer proved that it holds the key of `certificate` (None: it sent none).

    Nothing more is proved: chain, dates and name are the endpoint's to verify before it uses the session.
    """

    certificate: Certificate | None
    chain: tuple[Certificate, ...]


@dataclass(frozen=True, slots=True)
class ControlData:
    data: bytes


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection is over. `code` is ours (CLOSE_*) or QUIC's; `reason` is a text for people."""

    code: int
    reason: str


SessionEvent = Authenticated | ControlData | Closed


class _Connection(QuicConnection):
    """QuicConnection that asks clients for a certificate, whose receive windows are bounded, and that counts losses."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lost_packets = 0
        self.forged_packets = 0
        declare_lost = self._loss._on_packets_lost

        def counted(*, packets: Any, **more: Any) -> None:
            self.lost_packets += len(packets)
            declare_lost(packets=packets, **more)

        self._loss._on_packets_lost = counted  # type: ignore[method-assign]

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        if not self._is_client:
            self.tls._request_client_certificate = True
        for pair in self._cryptos.values():
            pair.decrypt_packet = self._counting(pair.decrypt_packet)  # type: ignore[method-assign, assignment]

    def _counting(
        self, decrypt: Callable[[bytes, int, int], tuple[bytes, bytes, int]]
    ) -> Callable[[bytes, int, int], tuple[bytes, bytes, int]]:
        """aioquic drops what fails its authentication and says so to its trace only."""

        def decrypt_packet(
            packet: bytes, encrypted_offset: int, expected_packet_number: int
        ) -> tuple[bytes, bytes, int]:
            try:
                return decrypt(packet, encrypted_offset, expected_packet_number)
            except CryptoError as error:
                self.forged_packets += not isinstance(error, KeyUnavailableError)
                raise

        return decrypt_packet

    def _write_connection_limits(self, builder: Any, space: Any) -> None:
        limit, window = self._local_max_data, self._configuration.max_data
        if limit.used + window // 2 > limit.value:
            streams = self._streams.values()
            gaps = sum(s.receiver.highest_offset - s.receiver.starting_offset() for s in streams)
            limit.value = max(limit.value, limit.used - gaps + window)
        used, limit.used = limit.used, 0  # out of sight of the code that would double the window
        try:
            super()._write_connection_limits(builder, space)
        finally:
            limit.used = used

    def _write_stream_limits(self, builder: Any, space: Any, stream: Any) -> None:
        receiver, window = stream.receiver, self._configuration.max_stream_data
        highest = receiver.highest_offset
        if highest + window // 2 > stream.max_stream_data_local > 0 and not receiver.is_finished:
            grown = receiver.starting_offset() + window
            stream.max_stream_data_local = max(stream.max_stream_data_local, grown)
        receiver.highest_offset = 0
        try:
            super()._write_stream_limits(builder, space, stream)
        finally:
            receiver.highest_offset = highest


def _configuration(credentials: Credentials | None, config: SessionConfig, *, is_client: bool) -> QuicConfiguration:
    quic = QuicConfiguration(
        alpn_protocols=[ALPN],
        is_client=is_client,
        congestion_control_algorithm=config.congestion,
        connection_id_length=_CID_LENGTH,
        idle_timeout=config.idle_ns / 1e9,
        max_data=config.window_bytes,
        max_stream_data=config.window_bytes,
        max_datagram_size=config.datagram_bytes or _DATAGRAM_BYTES,
        cipher_suites=[tls.CipherSuite.AES_128_GCM_SHA256, tls.CipherSuite.AES_256_GCM_SHA384],
        initial_rtt=config.initial_rtt_ns / 1e9,
        supported_versions=[QuicProtocolVersion.VERSION_1],
    )
    if credentials is not None:
        quic.certificate = credentials.certificate
        quic.certificate_chain = list(credentials.chain)
        quic.private_key = credentials.private_key
        quic.cadata = credentials.authority_pem
    return quic


def _limits(config: SessionConfig) -> dict[str, int]:
    """What a session watches itself."""
    return {
        "key_packets": config.key_packets,
        "forged_packets": config.forged_packets,
        "header_ns": config.header_ns,
    }


@dataclass(slots=True, eq=False)
class _Feed:
    """A message being sent: header first, then the payload from the caller's memory."""

    key: object
    header: bytes
    payload: memoryview
    stream_id: int = -1
    offset: int = 0


@dataclass(slots=True, eq=False)
class _Inbound:
    """A message stream of the peer: header bytes until they are complete, then the flow that takes the payload."""

    header: bytearray
    inflow: Inflow | None = None
    refused: bool = False


class Session:
    """One QUIC connection. Create with `client`, or through a Gate for the server side."""

    def __init__(
        self,
        connection: QuicConnection,
        *,
        is_client: bool,
        cids: Sequence[bytes],
        key_packets: int = _MOST_KEY_PACKETS,
        forged_packets: int = _MOST_FORGED,
        header_ns: int = _HEADER_NS,
    ) -> None:
        self._quic = connection
        self.is_client = is_client
        self.cids: list[bytes] = list(cids)  # connection ids whose datagrams are for this session
        self.retired_cids: list[bytes] = []
        self.heard_ns: int | None = None  # when the last authenticated packet arrived
        self.authenticated = False
        self.closed = False
        self._events: deque[SessionEvent] = deque()
        self._sink: MessageSink | None = None
        self._early: list[tuple[int, bytes, bool]] = []
        self._early_bytes = 0
        self._control_ready = is_client
        self._control_waiting = bytearray()
        self._inbound: dict[int, _Inbound] = {}
        self._waiting: deque[_Feed] = deque()
        self._feeding: deque[_Feed] = deque()
        self._open: dict[int, _Feed] = {}
        self.bytes_fed = 0  # payload bytes given to QUIC, for whoever measures what was sent again
        self._last_received: float | None = None
        self.key_updates = 0  # of both sides together
        self._key_packets = key_packets
        self._key_phase = 0
        self._key_asked = False
        self._key_since = 0  # number of the first packet that may be under the present key
        self.resets = 0  # message streams that the peer gave up
        self._forged_packets = forged_packets
        self._header_ns = header_ns
        self._headers: dict[int, int] = {}  # streams whose header has begun, and until when it has to be whole
        self._now_ns = 0

    @classmethod
    def client(
        cls,
        *,
        credentials: Credentials | None,
        config: SessionConfig,
        address: Address,
        now_ns: int,
        qlog: QuicLogger | None = None,
    ) -> Session:
        """Dial `address`; the first datagrams are ready at once. No credentials means none are shown (tests)."""
        quic = _configuration(credentials, config, is_client=True)
        quic.quic_logger = qlog
        connection = _Connection(configuration=quic)
        connection.connect(address, now_ns / 1e9)
        return cls(connection, is_client=True, cids=[connection.host_cid], **_limits(config))

    # -- datagrams and time --------------------------------------------------------------------------------------

    def receive(self, data: bytes, address: Address, now_ns: int) -> None:
        """Take one datagram; afterwards drain `next_event`. Raises ProtocolError, upon which the caller closes."""
        self._now_ns = now_ns
        self._quic.receive_datagram(data, address, now_ns / 1e9)
        if isinstance(self._quic, _Connection) and self._quic.forged_packets >= self._forged_packets:
            # No fault of the peer: whoever forges is somebody else, so the link may be resumed.
            self._quic.close(error_code=QuicErrorCode.AEAD_LIMIT_REACHED, reason_phrase="too many forged packets")
        self._watch_keys(self._quic._packet_number)
        received = self._quic._spaces[tls.Epoch.ONE_RTT].largest_received_time if self._quic._spaces else None
        if received is not None and received != self._last_received:
            self._last_received = received
            self.heard_ns = now_ns
        self._drain()
        if not self.closed and self._quic._state is QuicConnectionState.DRAINING:
            # The peer has closed; aioquic would say so three probe timeouts later (RFC 9000 section 10.2.2).
            self.closed = True
            end = self._quic._close_event
            if end is not None:
                self._events.append(Closed(end.error_code, end.reason_phrase))

    def handle_timer(self, now_ns: int) -> None:
        """Raises ProtocolError when the peer has taken too long over a header."""
        self._now_ns = now_ns
        if (due := self._quic.get_timer()) is not None and due * 1e9 <= now_ns:
            self._quic.handle_timer(now_ns / 1e9)
            self._drain()
        if self._headers and now_ns >= next(iter(self._headers.values())):
            raise ProtocolError(f"the header of a message took more than {self._header_ns / 1e9:g} s")

    def next_timer(self) -> int | None:
        at = self._quic.get_timer()
        # One nanosecond late rather than early: an early timer would be armed again for the same time, for ever.
        due = None if at is None else int(at * 1e9) + 1
        if self._headers:  # they begin in the order of time, so the first is the earliest
            header = next(iter(self._headers.values()))
            due = header if due is None else min(due, header)
        return due

    def datagrams_to_send(self, now_ns: int) -> list[tuple[bytes, Address]]:
        self._feed()
        closing = self._quic._close_pending
        self._renew_keys()
        first = self._quic._packet_number
        out = self._quic.datagrams_to_send(now_ns / 1e9)
        self._watch_keys(first)
        if closing and self._quic._network_paths:
            # aioquic leaves its last words out of the limit on unvalidated addresses (RFC 9000 section 8.1).
            path = self._quic._network_paths[0]
            if not path.is_validated and path.bytes_sent > 3 * path.bytes_received:
                return []
        return out

    def path_stats(self) -> PathStats:
        loss = self._quic._loss
        known = loss._rtt_initialized
        return PathStats(
            rtt_ns=int(loss._rtt_smoothed * 1e9) if known else None,
            rttvar_ns=int(loss._rtt_variance * 1e9) if known else None,
            min_rtt_ns=int(loss._rtt_min * 1e9) if known else None,
            cwnd=loss.congestion_window,
            bytes_in_flight=loss.bytes_in_flight,
            lost_packets=self._quic.lost_packets if isinstance(self._quic, _Connection) else 0,
        )

    def end_trace(self) -> None:
        """Nothing more will happen here: hand the qlog trace, if there is one, to whoever writes it."""
        trace, self._quic._quic_logger = self._quic._quic_logger, None
        logger = self._quic.configuration.quic_logger
        if trace is not None and logger is not None:
            logger.end_trace(trace)

    def limit_datagrams(self, most: int) -> None:
        """Send datagrams of `most` bytes at most from now on (never below what QUIC needs); what was lost for its size
        is sent again in smaller ones, as after any loss (RFC 9000 section 14.2.1)."""
        self._quic._max_datagram_size = max(1200, min(most, self._quic._max_datagram_size))

    @property
    def peer_address(self) -> Address | None:
        return self._quic.get_peer_address()

    def next_event(self) -> SessionEvent | None:
        return self._events.popleft() if self._events else None

    # -- what the link asks for ----------------------------------------------------------------------------------

    def attach(self, sink: MessageSink) -> None:
        """From now on messages go to `sink`; those that overtook the Hello first."""
        self._sink = sink
        early, self._early = self._early, []
        for stream_id, data, fin in early:
            self._message_data(sink, stream_id, data, fin)

    def send_control(self, data: bytes) -> None:
        """Queue words for the control stream. Raises ProtocolError when the peer lets too many of them wait."""
        if self._control_ready:
            self._quic.send_stream_data(_CONTROL_STREAM, data)
            if len(self._quic._streams[_CONTROL_STREAM].sender._buffer) > _CONTROL_BYTES:
                raise ProtocolError("the peer does not take our control messages")
        else:  # the client opens the control stream; until then our words wait
            self._control_waiting += data

    def start_message(self, key: object, header: bytes, payload: memoryview) -> None:
        """Queue a message; it is fed as the path takes it. `key` names it for `reset_message`."""
        self._waiting.append(_Feed(key, header, payload))

    def reset_message(self, key: object) -> None:
        """Stop sending a message at once; unknown keys (already sent) are fine."""
        self._waiting = deque(feed for feed in self._waiting if feed.key is not key)
        self._feeding = deque(feed for feed in self._feeding if feed.key is not key)
        for stream_id in [stream_id for stream_id, feed in self._open.items() if feed.key is key]:
            self._reset_stream(stream_id)

    def close(self, code: int, reason: str) -> None:
        if not self.closed:
            self._quic.close(error_code=code, reason_phrase=reason)

    def release(self) -> None:
        """Let go of everything that is the caller's; nothing is fed or delivered any more."""
        self._sink = None
        self._early.clear()
        for table in (self._waiting, self._feeding, self._open, self._inbound, self._headers):
            table.clear()

    # -- inside --------------------------------------------------------------------------------------------------

    def _watch_keys(self, first: int) -> None:
        """Notice that the keys have changed, by either side; a datagram holds one short header, so at most one change.

        first: number of the first packet that can be under the new ones.
        """
        crypto = self._quic._cryptos.get(tls.Epoch.ONE_RTT)
        if crypto is not None and crypto.send.key_phase != self._key_phase:
            self._key_phase = crypto.send.key_phase
            self._key_since = first
            self._key_asked = False
            self.key_updates += 1

    def _renew_keys(self) -> None:
        """Ask for the next keys in time (RFC 9001 section 6.6), never before the peer has acknowledged a packet under
        the present ones (section 6.1): two steps ahead of the peer, the phase bit would look like no step at all."""
        connection, since = self._quic, self._key_since
        if connection._packet_number - since < self._key_packets or self._key_asked:
            return
        if connection._handshake_confirmed and connection._spaces[tls.Epoch.ONE_RTT].largest_acked_packet >= since:
            self._key_asked = True
            connection.request_key_update()

    def _reset_stream(self, stream_id: int) -> None:
        self._open.pop(stream_id, None)
        self._feeding = deque(feed for feed in self._feeding if feed.stream_id != stream_id)
        if stream_id in self._quic._streams:
            self._quic.reset_stream(stream_id, CLOSE_NORMAL)

    def _stop_stream(self, stream_id: int) -> None:
        if stream_id in self._quic._streams:
            self._quic.stop_stream(stream_id, CLOSE_NORMAL)

    def _feed(self) -> None:
        """Give QUIC the next slices: round robin over a few messages, within a bound on what it holds."""
        if not (self._waiting or self._feeding or self._open):
            return
        held = 0
        for stream_id in list(self._open):
            stream = self._quic._streams.get(stream_id)
            if stream is None or stream.sender.is_finished:
                del self._open[stream_id]
            else:
                held += len(stream.sender._buffer)
        # More than the peer's window (taken to be as wide as ours) could not be under way, only lie here.
        ceiling = min(_FEED_CEILING, self._quic.configuration.max_data + _FEED_FLOOR)
        room = min(max(_FEED_FLOOR, 2 * self._quic._loss.congestion_window), ceiling) - held
        while room > 0:
            while self._waiting and len(self._feeding) < _FEED_STREAMS:
                feed = self._waiting.popleft()
                feed.stream_id = self._quic.get_next_available_stream_id(is_unidirectional=True)
                fin = not feed.payload
                self._quic.send_stream_data(feed.stream_id, feed.header, end_stream=fin)
                self._open[feed.stream_id] = feed
                room -= len(feed.header)
                if not fin:
                    self._feeding.append(feed)
            if not self._feeding:
                return
            feed = self._feeding.popleft()
            piece = feed.payload[feed.offset : feed.offset + _FEED_BYTES]
            feed.offset += len(piece)
            fin = feed.offset >= len(feed.payload)
            # aioquic appends to a bytearray, for which a memoryview does as well as the bytes it asks for
            self._quic.send_stream_data(feed.stream_id, piece, end_stream=fin)  # type: ignore[arg-type]
            room -= len(piece)
            self.bytes_fed += len(piece)
            if fin:
                feed.payload = memoryview(b"")
            else:
                self._feeding.append(feed)

    def _drain(self) -> None:
        while (event := self._quic.next_event()) is not None:
            match event:
                case quic_events.StreamDataReceived():
                    self._stream_data(event.stream_id, event.data, event.end_stream)
                case quic_events.StreamReset(stream_id=0) | quic_events.StopSendingReceived(stream_id=0):
                    raise ProtocolError("the peer gave up the control stream")
                case quic_events.StreamReset():
                    self.resets += 1
                    self._headers.pop(event.stream_id, None)
                    inbound = self._inbound.pop(event.stream_id, None)
                    self._early = [piece for piece in self._early if piece[0] != event.stream_id]
                    if inbound is not None and inbound.inflow is not None and self._sink is not None:
                        self._sink.message_reset(inbound.inflow)
                case quic_events.StopSendingReceived():
                    self._reset_stream(event.stream_id)
                case quic_events.HandshakeCompleted():
                    if event.session_resumed or event.early_data_accepted:
                        raise ProtocolError("a resumed handshake, though no ticket was ever issued")
                    self._events.append(
                        Authenticated(self._quic.tls._peer_certificate, tuple(self._quic.tls._peer_certificate_chain))
                    )
                case quic_events.ConnectionTerminated() if not self.closed:
                    self.closed = True
                    self._events.append(Closed(event.error_code, event.reason_phrase))
                case quic_events.ConnectionIdIssued():
                    self.cids.append(event.connection_id)
                case quic_events.ConnectionIdRetired():
                    self.retired_cids.append(event.connection_id)

    def _stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        if stream_id == _CONTROL_STREAM:
            if fin:
                raise ProtocolError("the peer ended the control stream")
            if not self._control_ready:
                self._control_ready = True
                if self._control_waiting:
                    self._quic.send_stream_data(_CONTROL_STREAM, bytes(self._control_waiting))
                    self._control_waiting.clear()
            self._events.append(ControlData(data))
        elif not stream_id & 2:
            raise ProtocolError("the peer opened a second bidirectional stream")
        elif self._sink is None:
            self._early_bytes += len(data) + 64
            if self._early_bytes > _EARLY_BYTES:
                raise ProtocolError("the peer sends messages without saying Hello")
            self._early.append((stream_id, data, fin))
        else:
            self._message_data(self._sink, stream_id, data, fin)

    def _message_data(self, sink: MessageSink, stream_id: int, data: bytes, fin: bool) -> None:
        inbound = self._inbound.get(stream_id)
        if inbound is None:
            inbound = self._inbound[stream_id] = _Inbound(bytearray())
        view = memoryview(data)
        if inbound.inflow is None and not inbound.refused:
            need = HEADER_SIZE - len(inbound.header)
            inbound.header += view[:need]
            view = view[need:]
            if len(inbound.header) < HEADER_SIZE:
                self._headers.setdefault(stream_id, self._now_ns + self._header_ns)
            else:
                self._headers.pop(stream_id, None)
                inbound.inflow = sink.message_begin(Header.decode(inbound.header))
                inbound.refused = inbound.inflow is None
                if inbound.refused and not fin:
                    self._stop_stream(stream_id)
        inflow = inbound.inflow
        if inflow is not None:
            if view and inflow.alive:
                end = inflow.filled + len(view)
                if end > inflow.header.length:
                    raise ProtocolError(f"message {inflow.header.sequence} is longer than its header says")
                inflow.view[inflow.filled : end] = view
                inflow.filled = end
            elif view and not inbound.refused:
                inbound.refused = True
                if not fin:
                    self._stop_stream(stream_id)
        if fin:
            self._inbound.pop(stream_id, None)
            if inflow is not None:
                sink.message_end(inflow)
            elif not inbound.refused:
                raise ProtocolError(f"a message stream ends inside its header ({len(inbound.header)} bytes)")


class Gate:
    """The server side's door: address validation by Retry (RFC 9000 section 8.1.2), then a Session.

    Nothing is kept for a source before it has shown that it receives at its address.
    """

    def __init__(
        self, *, credentials: Credentials, config: SessionConfig, retry: bool = True, qlog: QuicLogger | None = None
    ) -> None:
        self._config = config
        self._qlog = qlog
        self._used: dict[bytes, int] = {}  # connection ids of tokens that were used, and until when they are valid
        self.rotate(credentials)
        self._tokens = QuicRetryTokenHandler() if retry else None

    def rotate(self, credentials: Credentials) -> None:
        """Show these from the next session on. Tokens stay good: whoever has one has shown its address, no more."""
        self._quic = _configuration(credentials, self._config, is_client=False)
        self._quic.quic_logger = self._qlog

    def admit(
        self, data: bytes, address: Address, now_ns: int, allow: Callable[[], bool] = lambda: True
    ) -> Session | bytes | None:
        """For a datagram of no known session: a new Session (not yet fed with it), a reply to send, or None.

        allow: asked last, when the source has shown its address (or need not): whether to begin a handshake now. A
        token is good for one handshake: what repeats it later, from the same address, is somebody on the path, who
        would have us sign and answer again and again (RFC 9000 section 8.1.4).
        """
        if len(data) < SMALLEST_MAX_DATAGRAM_SIZE:
            return None
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=_CID_LENGTH)
        except (ValueError, BufferReadError):
            return None
        if header.packet_type != QuicPacketType.INITIAL or header.version != QuicProtocolVersion.VERSION_1:
            return None
        original, retried = header.destination_cid, None
        if self._tokens is not None:
            if not header.token:
                source = os.urandom(_CID_LENGTH)
                token = self._tokens.create_token(
                    address=address,
                    original_destination_connection_id=header.destination_cid,
                    retry_source_connection_id=source,
                    now=now_ns / 1e9,
                )
                return encode_quic_retry(
                    version=header.version,
                    source_cid=source,
                    destination_cid=header.source_cid,
                    original_destination_cid=header.destination_cid,
                    retry_token=token,
                )
            try:
                original = self._tokens.validate_token(
                    address=address, destination_cid=header.destination_cid, token=header.token, now=now_ns / 1e9
                )
            except (ValueError, BufferReadError):
                return None
            retried = header.destination_cid
            if retried in self._used:
                return None
        if not allow():
            return None
        if retried is not None:
            self._use(retried, now_ns)
        connection = _Connection(
            configuration=self._quic,
            original_destination_connection_id=original,
            retry_source_connection_id=retried,
        )
        cids = [header.destination_cid, connection.host_cid]
        return Session(connection, is_client=False, cids=cids, **_limits(self._config))

    def _use(self, cid: bytes, now_ns: int) -> None:
        """Remember that the token for this connection id was used, for as long as it would be good."""
        while self._used and (next(iter(self._used.values())) < now_ns or len(self._used) >= _MOST_USED):
            del self._used[next(iter(self._used))]
        self._used[cid] = now_ns + int((TOKEN_LIFETIME + 1) * 1e9)


def destination_cid(data: bytes) -> bytes | None:
    """The connection id that a datagram is for, or None when it is no QUIC packet of ours (RFC 8999)."""
    if not data:
        return None
    if data[0] & 0x80:
        if len(data) < 6 or len(data) < 6 + data[5]:
            return None
        return data[6 : 6 + data[5]]
    return data[1 : 1 + _CID_LENGTH] if len(data) > _CID_LENGTH else None


def is_unauthenticated_initial(data: bytes) -> bool:
    """Whether a datagram starts with a QUIC v1 Initial packet: the only kind that may make us keep anything."""
    return len(data) > 4 and data[0] & 0xF0 == 0xC0 and data[1:5] == b"\x00\x00\x00\x01"


# -- the self-check --------------------------------------------------------------------------------------------------


def handshake_in_memory(client: Session, gate: Gate, *, now_ns: int = 10**18) -> tuple[Session, list[Any], list[Any]]:
    """Drive a client session against a gate without any IO; the server's session and both sides' events."""
    addresses: dict[bool, Address] = {True: ("127.0.0.1", 1), False: ("127.0.0.1", 2)}
    server: Session | None = None
    collected: dict[bool, list[Any]] = {True: [], False: []}
    for _ in range(20):
        now_ns += 1_000_000
        for data, _address in client.datagrams_to_send(now_ns):
            if server is None:
                admitted = gate.admit(data, addresses[True], now_ns)
                if isinstance(admitted, bytes):
                    client.receive(admitted, addresses[False], now_ns)
                    continue
                server = admitted
            if server is not None:
                server.receive(data, addresses[True], now_ns)
        if server is not None:
            for data, _address in server.datagrams_to_send(now_ns):
                client.receive(data, addresses[False], now_ns)
        for session in (client, server):
            while session is not None and (event := session.next_event()) is not None:
                collected[session.is_client].append(event)
    if server is None:
        raise ConfigurationError("aioquic: a server session could not be made in memory")
    return server, collected[True], collected[False]


@functools.cache
def check_foundation() -> None:
    """Prove once per process that this aioquic asks for client certificates and shows us what the client sent.

    Raises ConfigurationError when it does not, or when its version is outside the range that was examined.
    """
    from .authority import ephemeral

    found = installed_version("aioquic")
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not _SUPPORTED[0] <= numbers < _SUPPORTED[1]:
        raise ConfigurationError(f"aioquic {found} has not been examined; >=1.7.2,<1.8 is needed")
    server_id = Identity(job="self-check", role=COORDINATOR, node="server")
    client_id = Identity(job="self-check", role=WORKER, node="client")
    made = ephemeral("self-check", [(COORDINATOR, "server"), (WORKER, "client")])
    config = SessionConfig()
    address: Address = ("127.0.0.1", 2)
    seen: list[Certificate | None] = []
    try:
        for credentials in (made[client_id], None):
            client = Session.client(credentials=credentials, config=config, address=address, now_ns=10**18)
            if credentials is None:
                client._quic.configuration.cadata = made[server_id].authority_pem
                client._quic.tls._cadata = made[server_id].authority_pem
            gate = Gate(credentials=made[server_id], config=config)
            _server, _, server_events = handshake_in_memory(client, gate)
            seen += [event.certificate for event in server_events if isinstance(event, Authenticated)]
    except (AttributeError, TypeError, AssertionError) as error:
        raise ConfigurationError(f"aioquic {found} is not built as expected: {error}") from error
    if len(seen) != 2 or seen[0] != made[client_id].certificate or seen[1] is not None:
        raise ConfigurationError(f"aioquic {found} does not show the certificate of clients; refusing to run")


def error_name(code: int) -> str:
    """A readable name of a close code."""
    ours = {
        CLOSE_NORMAL: "closed",
        CLOSE_REFUSED: "refused",
        CLOSE_PROTOCOL: "protocol error",
        CLOSE_GONE: "link gone",
        CLOSE_REPLACED: "replaced",
    }
    if code in ours:
        return ours[code]
    try:
        return QuicErrorCode(code).name.lower()
    except ValueError:
        return f"TLS alert {code - 0x100}" if 0x100 <= code < 0x200 else f"code {code:#x}"
