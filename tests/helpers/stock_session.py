"""A Carrier on aioquic alone: the peer that our own data plane is compared with, and that hostile members are made of.

It is no part of the product. Whatever stock aioquic would send, a member may send.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioquic import tls
from aioquic.quic import events as quic_events
from aioquic.quic.connection import QuicConnection, QuicConnectionState
from aioquic.quic.packet import QuicErrorCode
from stock_connection import StockConnection, stock_configuration

from quicoll_transport.carrier import (
    CLOSE_NORMAL,
    Authenticated,
    CarrierEvent,
    Closed,
    ControlData,
    MessageSink,
    PathStats,
)
from quicoll_transport.errors import ProtocolError
from quicoll_transport.link.frames import HEADER_SIZE, Header
from quicoll_transport.net.runs import joined
from quicoll_transport.quic.gate import Gate
from quicoll_transport.quic.terms import SessionConfig, error_name

if TYPE_CHECKING:
    from aioquic.quic.logger import QuicLogger

    from quicoll_transport.link.posted import Inflow
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.security.credentials import Credentials

_CONTROL_STREAM = 0
_FEED_BYTES = 64 * 1024  # slice given to QUIC at a time, so that several messages share the path
_FEED_STREAMS = 8  # messages fed at the same time
_FEED_FLOOR = 256 * 1024  # unacknowledged bytes that QUIC may hold however small its window is
_FEED_CEILING = 64 << 20  # and however large
_EARLY_BYTES = 4 << 20  # message bytes that may overtake the peer's Hello, 64 for each piece added
_CONTROL_BYTES = 32 << 20  # control messages that the peer has not acknowledged


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


def _after(at: float) -> int:
    """Return the nanosecond after a time of the QUIC library's, which counts in floats.

    Late rather than early, and late enough: it declares a packet lost where `sent <= now - delay`, and wakes for that
    at `sent + delay`. The difference may be a rounding error short of what was added (with delays of 9/8 of a round
    trip, RFC 9002 section 6.1.2, halves to be rounded are common); then nothing is lost, and the same time is due
    again, for as long as the clock stands still.
    """
    return int((at + 4 * math.ulp(at)) * 1e9) + 1


def _closed(code: int, reason: str) -> Closed:
    return Closed(code, reason, error_name(code))


class StockSession:
    """One QUIC connection: a Carrier. Create with `client`, or through a Gate for the server side."""

    def __init__(
        self,
        connection: QuicConnection,
        *,
        is_client: bool,
        cids: Sequence[bytes],
        config: SessionConfig,
    ) -> None:
        self._quic = connection
        self.is_client = is_client
        self.cids: list[bytes] = list(cids)  # connection ids whose datagrams are for this session
        self.retired_cids: list[bytes] = []
        self.reset_token: bytes | None = None
        self.heard_ns: int | None = None  # when the last authenticated packet arrived
        self.closed = False
        self._events: deque[CarrierEvent] = deque()
        self._sink: MessageSink | None = None
        self._early: list[tuple[int, bytes, bool]] = []
        self._early_bytes = 0
        self._control_ready = is_client
        self._control_waiting = bytearray()
        self._inbound: dict[int, _Inbound] = {}
        self._waiting: deque[_Feed] = deque()
        self._feeding: deque[_Feed] = deque()
        self._open: dict[int, _Feed] = {}
        self._acknowledged = 0  # bytes of messages, when slices were last given to QUIC
        self.bytes_fed = 0  # payload bytes given to QUIC, to measure what was sent again
        self._last_received: float | None = None
        self.key_updates = 0  # of both sides together
        self._key_packets = config.key_packets
        self._key_phase = 0
        self._key_asked = False
        self._key_since = 0  # number of the first packet that may be under the present key
        self.resets = 0  # message streams that the peer gave up
        self._forged_packets = config.forged_packets
        self._header_ns = config.header_ns
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
        reset_key: bytes | None = None,
    ) -> StockSession:
        """Dial `address`; the first datagrams are ready at once. No credentials means none are shown (tests)."""
        quic = stock_configuration(credentials, config, is_client=True)
        quic.quic_logger = qlog
        connection = StockConnection(configuration=quic)
        connection.connect(address, now_ns / 1e9)
        return cls(connection, is_client=True, cids=[connection.host_cid], config=config)

    # -- datagrams and time --------------------------------------------------------------------------------------

    def receive(self, run: DatagramRun, now_ns: int) -> None:
        """Take a run of datagrams; see Carrier."""
        self._now_ns = now_ns
        for data in run.datagrams():
            self._receive(bytes(data), run.address, now_ns)

    def _receive(self, data: bytes, address: Address, now_ns: int) -> None:
        self._quic.receive_datagram(data, address, now_ns / 1e9)
        if isinstance(self._quic, StockConnection) and self._quic.forged_packets >= self._forged_packets:
            # No fault of the peer: somebody else forges, so the link may be resumed.
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
                self._events.append(_closed(end.error_code, end.reason_phrase))

    def handle_timer(self, now_ns: int) -> None:
        """Do what is due; see Carrier. Raises ProtocolError when the peer has taken too long over a header."""
        self._now_ns = now_ns
        if (due := self._quic.get_timer()) is not None and due * 1e9 <= now_ns:
            self._quic.handle_timer(now_ns / 1e9)
            self._drain()
        if self._headers and now_ns >= next(iter(self._headers.values())):
            raise ProtocolError(f"the header of a message took more than {self._header_ns / 1e9:g} s")

    def next_timer(self) -> int | None:
        at = self._quic.get_timer()
        due = None if at is None else _after(at)
        if self._headers:  # they begin in the order of time, so the first is the earliest
            header = next(iter(self._headers.values()))
            due = header if due is None else min(due, header)
        return due

    def datagrams_to_send(self, now_ns: int) -> list[DatagramRun]:
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
        return joined(out)

    def path_stats(self) -> PathStats:
        loss = self._quic._loss
        known = loss._rtt_initialized
        return PathStats(
            rtt_ns=int(loss._rtt_smoothed * 1e9) if known else None,
            rttvar_ns=int(loss._rtt_variance * 1e9) if known else None,
            min_rtt_ns=int(loss._rtt_min * 1e9) if known else None,
            cwnd=loss.congestion_window,
            bytes_in_flight=loss.bytes_in_flight,
            lost_packets=self._quic.lost_packets if isinstance(self._quic, StockConnection) else 0,
            delivery_rate=None,
        )

    @property
    def min_rtt_ns(self) -> int | None:
        return self.path_stats().min_rtt_ns

    def limit_datagrams(self, most: int) -> None:
        """Send datagrams of `most` bytes at most from now on (never below what QUIC needs); what was lost for its size
        is sent again in smaller ones, as after any loss (RFC 9000 section 14.2.1)."""
        self._quic._max_datagram_size = max(1200, min(most, self._quic._max_datagram_size))

    @property
    def unanswered_ns(self) -> int | None:
        return None  # so that no path is doubted

    @property
    def probe_timeout_ns(self) -> int:
        return round(self._quic._loss.get_probe_timeout() * 1e9)

    @property
    def peer_address(self) -> Address | None:
        return self._quic.get_peer_address()

    @property
    def proved_address(self) -> Address | None:
        return self.peer_address

    def next_event(self) -> CarrierEvent | None:
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

    def forget_message(self, key: object) -> None:
        """Nothing of the caller's is held: aioquic has its own copy."""

    def close(self, code: int, reason: str) -> None:
        if not self.closed:
            self._quic.close(error_code=code, reason_phrase=reason)

    def last_words(self, now_ns: int) -> None:
        """Nothing is kept of it."""

    def release(self) -> None:
        """Let go of everything that is the caller's, and hand the qlog trace, if there is one, to its directory."""
        self._sink = None
        self._early.clear()
        for table in (self._waiting, self._feeding, self._open, self._inbound, self._headers):
            table.clear()
        trace, self._quic._quic_logger = self._quic._quic_logger, None
        logger = self._quic.configuration.quic_logger
        if trace is not None and logger is not None:
            logger.end_trace(trace)

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
        self._acknowledged = self.bytes_fed - held
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
            self._quic.send_stream_data(feed.stream_id, piece, end_stream=fin)
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
                    self._events.append(_closed(event.error_code, event.reason_phrase))
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


class StockGate(Gate):
    """A Gate that lets stock sessions in."""

    def rotate(self, credentials: Credentials) -> None:
        super().rotate(credentials)
        self._stock = stock_configuration(credentials, self._config, is_client=False)

    def _open(self, cid: bytes, original: bytes, retried: bytes | None) -> StockSession:
        connection = StockConnection(
            configuration=self._stock,
            original_destination_connection_id=original,
            retry_source_connection_id=retried,
        )
        cids = [cid, connection.host_cid]
        return StockSession(connection, is_client=False, cids=cids, config=self._config)
