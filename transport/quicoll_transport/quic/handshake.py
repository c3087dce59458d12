"""The handshake, by aioquic, and what the data plane takes over from it.

aioquic does Initial and Handshake packets, TLS 1.3 with certificates of both sides, Retry and the exchange of transport
parameters, and nothing else: it never sees a 1-RTT packet and never has a key for one. Datagrams are split at their
first short header, and the application traffic secrets go past it to the `Handover`. So there is nothing to be taken
away from it: its 1-RTT space is empty, and the plane's packet numbers begin at 0.

States: under way; done (`handover` is there); failed (`failed` is there, before or after done); over. A server's
handshake is over when it is done: that confirms it (RFC 9001 section 4.1.2), and its Handshake keys are gone. A
client's Finished may have been lost, so its handshake is kept, and repeats it by its own timers, until the plane has
read HANDSHAKE_DONE and says `confirm`. A server that refuses a client says so in Handshake packets, after the client
was done.

Invariants:

- The server asks for the client's certificate, which aioquic has behind a private test flag only. aioquic checks the
  signature but never the chain, and lets a client without a certificate pass: a connection is worth nothing until the
  endpoint has verified chain and name itself (`Authenticated`). No session ticket is ever issued, because a resumed
  handshake asks for no certificate; a resumed one is a ProtocolError.
- An Initial counts only in a datagram of 1200 bytes (RFC 9000 section 14.1), and the limit on unvalidated addresses
  counts whole datagrams (section 8.1). So what was cut off is filled up again with zeros, which are no packet.
- A client offers X25519 alone, which RFC 8446 section 9.1 recommends and every server of ours has: aioquic makes a key
  of each group that it offers, four of them and again after a Retry. A server takes every group that aioquic knows.
- Of packets that came before their keys (RFC 9001 section 5.7), and of packets in a datagram, there are only so many.
- Our transport parameters are the plane's, not aioquic's: it has no use for them.
- Handshake datagrams are of 1200 bytes, which every path carries; larger ones are the plane's to find out.

Failure cases: an alert, a close of the peer's, idleness: `failed`, with the code. Malformed datagrams are dropped.

Private names of aioquic used: QuicConnection._initialize, where the TLS context is made, again after a Retry;
QuicConnection._state, that the peer has closed, which aioquic says three probe timeouts later (RFC 9000 section
10.2.2); tls.Context._request_client_certificate, ._supported_groups, ._peer_certificate, ._peer_certificate_chain;
aioquic._buffer, whose two names aioquic.buffer has too, but not for type checkers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from aioquic import tls
from aioquic._buffer import Buffer, BufferReadError
from aioquic.quic import events
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.quic.connection import QuicConnection, QuicConnectionState
from aioquic.quic.logger import QuicLogger
from aioquic.quic.packet import (
    QuicProtocolVersion,
    pull_quic_header,
)

from quicoll_transport.carrier import Closed
from quicoll_transport.errors import ProtocolError
from quicoll_transport.quic.parameters import TransportParameters, pull_parameters, replace_parameters
from quicoll_transport.quic.terms import ALPN, CID_LENGTH, SessionConfig, error_name

if TYPE_CHECKING:
    from aioquic.quic.logger import QuicLoggerTrace
    from cryptography.x509 import Certificate

    from quicoll_transport.net.addresses import Address
    from quicoll_transport.security.credentials import Credentials

__all__ = [
    "Handover",
    "Handshake",
    "handshake_configuration",
    "short_packet",
]

_EARLY_PACKETS = 32  # short-header packets kept until there are keys for them
_EARLY_BYTES = 64 * 1024
_MOST_PACKETS = 8  # with long headers, in a datagram; there are three kinds


@dataclass(frozen=True, slots=True)
class Handover:
    """What a handshake has agreed on, for the plane that takes over.

    Attributes:
        is_client: Which side we are.
        suite: Cipher suite, for `keys.KeyPhases`.
        send_secret: Our application traffic secret.
        receive_secret: The peer's.
        cid: Our connection id, of sequence number 0.
        peer_cid: The peer's, of sequence number 0.
        local: What we have told the peer.
        remote: What the peer has told us.
        address: Where the peer is.
        rtt_ns: A first sample of the round trip; None: none was unambiguous.
        certificate: The peer's, as it was shown and signed with; its chain and name are not verified.
        chain: What it showed with it.
        early: Short-header packets that came before their keys, in order.
        trace: Of qlog; None: nobody traces.
    """

    is_client: bool
    suite: int
    send_secret: bytes = field(repr=False)
    receive_secret: bytes = field(repr=False)
    cid: bytes
    peer_cid: bytes
    local: TransportParameters
    remote: TransportParameters
    address: Address
    rtt_ns: int | None
    certificate: Certificate | None
    chain: tuple[Certificate, ...]
    early: tuple[bytes, ...]
    trace: QuicLoggerTrace | None


def handshake_configuration(
    credentials: Credentials | None, config: SessionConfig, *, is_client: bool
) -> QuicConfiguration:
    """Return aioquic's settings of a handshake.

    Args:
        credentials: Ours; None: none are shown (tests).
        config: Of the connection.
        is_client: Which side we are.
    """
    quic = QuicConfiguration(
        alpn_protocols=[ALPN],
        is_client=is_client,
        connection_id_length=CID_LENGTH,
        idle_timeout=config.idle_ns / 1e9,
        max_datagram_size=SMALLEST_MAX_DATAGRAM_SIZE,
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


class Handshake:
    """One handshake, sans-IO; see the module's head.

    Attributes:
        is_client: Which side we are.
        cid: Our connection id.
        handover: What was agreed on, once it is done.
        failed: Why it has failed, or why the peer has ended the connection in a Handshake packet.
        trace: Of qlog, for whoever ends the connection to end; None: nobody traces.
    """

    def __init__(
        self,
        quic: QuicConfiguration,
        parameters: TransportParameters,
        *,
        reset_token: Callable[[bytes], bytes] | None = None,
        original_cid: bytes | None = None,
        retry_cid: bytes | None = None,
    ) -> None:
        """Make a client's handshake, to be begun by `connect`, or a server's.

        Args:
            quic: What `handshake_configuration` gave; its logger makes the trace.
            parameters: What we tell the peer, but for the reset token.
            reset_token: For a server: the stateless reset token of a connection id of ours; None: none is told.
            original_cid: For a server: destination of the client's first Initial.
            retry_cid: For a server: source of the Retry that was sent, None: none was.
        """
        tracer = None if quic.quic_logger is None else _Tracer(quic.quic_logger)
        self._quic = _Connection(
            parameters,
            reset_token,
            configuration=replace(quic, quic_logger=tracer),
            original_destination_connection_id=original_cid,
            retry_source_connection_id=retry_cid,
        )
        self.is_client = quic.is_client
        self.cid: bytes = self._quic.host_cid
        self.handover: Handover | None = None
        self.failed: Closed | None = None
        self.trace = None if tracer is None else tracer.trace
        self._confirmed = False
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._rtt = _FirstRoundTrip()
        self._validated = quic.is_client or retry_cid is not None
        self._received = self._sent = 0  # bytes of datagrams, for the limit of three times

    @property
    def peer_address(self) -> Address | None:
        """Where datagrams go; None before a server has heard anything."""
        return self._quic.get_peer_address()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do: drop it."""
        return self.failed is not None or (self.handover is not None and (self._confirmed or not self.is_client))

    def connect(self, address: Address, now_ns: int) -> None:
        """Begin a client's handshake; the first datagram is ready at once."""
        self._quic.connect(address, now_ns / 1e9)
        self._rtt.on_progress(self._quic.progress, now_ns)

    def confirm(self) -> None:
        """Note that HANDSHAKE_DONE has come: nothing needs to be repeated any more."""
        self._confirmed = True

    def close(self, code: int, reason: str) -> None:
        """Give up; `datagrams_to_send` has the last words, and `failed` comes when they have had their time."""
        self._quic.close(error_code=code, reason_phrase=reason)

    def receive(self, data: bytes | memoryview, address: Address, now_ns: int) -> bytes | None:
        """Take the long-header packets of a datagram.

        Args:
            data: The datagram.
            address: Where it came from.
            now_ns: The present time.

        Returns:
            The short-header packet at its end, for the plane; None: there is none, or it is kept for the handover.

        Raises:
            ProtocolError: The handshake was resumed, for which nobody can have had a ticket.
        """
        data = bytes(data)
        split = _short_header_at(data)
        if split is None:
            return None
        self._received += len(data)
        if split and not self.is_over:
            self._quic.receive_datagram(data[:split].ljust(len(data), b"\0"), address, now_ns / 1e9)
            self._drain(now_ns)
        if split == len(data):
            return None
        short = data[split:]
        if self.handover is not None:
            return short
        if len(self._early) < _EARLY_PACKETS and self._early_bytes + len(short) <= _EARLY_BYTES:
            self._early.append(short)
            self._early_bytes += len(short)
        return None

    def datagrams_to_send(self, now_ns: int) -> list[tuple[bytes, Address]]:
        """Return what is to be sent; once it is done only a client has anything to say, that it is finished."""
        if self.is_over or self._quic.get_peer_address() is None:
            return []
        out = self._quic.datagrams_to_send(now_ns / 1e9)
        if out:
            self._rtt.on_sent(now_ns)
        size = sum(len(data) for data, _ in out)
        if not self._validated and self._quic.is_closing and self._sent + size > 3 * self._received:
            return []  # aioquic leaves its last words out of the limit (RFC 9000 section 8.1)
        self._sent += size
        return out

    def next_timer(self) -> int | None:
        """Return when `handle_timer` is to be called next."""
        at = None if self.is_over else self._quic.get_timer()
        return None if at is None else _after(at)

    def handle_timer(self, now_ns: int) -> None:
        """Do what is due: repeat what was lost, or give up."""
        if not self.is_over and (at := self._quic.get_timer()) is not None and at * 1e9 <= now_ns:
            self._quic.handle_timer(now_ns / 1e9)
            self._drain(now_ns)

    # -- inside --------------------------------------------------------------------------------------------------

    def _drain(self, now_ns: int) -> None:
        quic = self._quic
        self._rtt.on_progress(quic.progress, now_ns)
        if quic.is_draining and (end := quic.get_timer()) is not None:
            quic.handle_timer(end)  # nothing may be sent any more, so there is nothing to wait for
        while (event := quic.next_event()) is not None:
            if isinstance(event, events.HandshakeCompleted):
                if event.session_resumed or event.early_data_accepted:
                    raise ProtocolError("a resumed handshake, though no ticket was ever issued")
                self._validated = True
                self._hand_over()
            elif isinstance(event, events.ConnectionTerminated):
                self.failed = Closed(event.error_code, event.reason_phrase, error_name(event.error_code))

    def _hand_over(self) -> None:
        quic, context = self._quic, self._quic.tls
        if len(quic.secrets) != 2:
            raise AssertionError("aioquic has finished a handshake and shown no application secrets")
        send, receive = quic.secrets[tls.Direction.ENCRYPT], quic.secrets[tls.Direction.DECRYPT]
        remote, theirs = pull_parameters(context.received_extensions or [])
        if send[0] is not receive[0] or remote.initial_source_connection_id is None:
            raise AssertionError("aioquic has agreed on two cipher suites, or on no connection id")
        address = quic.get_peer_address()
        if address is None:
            raise AssertionError("aioquic has finished a handshake with nobody")
        self.handover = Handover(
            is_client=self.is_client,
            suite=int(send[0]),
            send_secret=send[1],
            receive_secret=receive[1],
            cid=self.cid,
            peer_cid=remote.initial_source_connection_id,
            local=quic.parameters,
            remote=theirs,
            address=address,
            rtt_ns=self._rtt.sample_ns,
            certificate=context._peer_certificate,
            chain=tuple(context._peer_certificate_chain),
            early=tuple(self._early),
            trace=self.trace,
        )
        quic.secrets.clear()
        self._early.clear()


class _Connection(QuicConnection):
    """aioquic's connection, without 1-RTT."""

    def __init__(
        self, parameters: TransportParameters, reset_token: Callable[[bytes], bytes] | None, **options: Any
    ) -> None:
        super().__init__(**options)
        is_server = not self.configuration.is_client  # a client may not send a token (RFC 9000 section 18.2)
        token = reset_token(self.host_cid) if reset_token is not None and is_server else None
        self.parameters = replace(parameters, stateless_reset_token=token)
        self.secrets: dict[tls.Direction, tuple[tls.CipherSuite, bytes]] = {}
        self._begun = 0

    @property
    def progress(self) -> tuple[int, tls.State | None]:
        """What changes with each answer of the peer's that carries the handshake on: how often it was begun, and how
        far it is."""
        return self._begun, self.tls.state if self._begun else None

    @property
    def is_closing(self) -> bool:
        return self._state is QuicConnectionState.CLOSING

    @property
    def is_draining(self) -> bool:
        return self._state is QuicConnectionState.DRAINING

    def _initialize(self, peer_cid: bytes) -> None:
        """Make the TLS context: a client's once more after a Retry."""
        super()._initialize(peer_cid)
        self._begun += 1
        context = self.tls
        if self.configuration.is_client:
            context._supported_groups = [tls.Group.X25519]
        else:
            context._request_client_certificate = True
        kind, written = context.handshake_extensions[0]
        context.handshake_extensions = [(kind, replace_parameters(written, self.parameters))]
        install = context.update_traffic_key_cb

        def update_traffic_key(
            direction: tls.Direction, epoch: tls.Epoch, suite: tls.CipherSuite, secret: bytes
        ) -> None:
            if epoch is tls.Epoch.ONE_RTT:
                self.secrets[direction] = (suite, secret)
            else:
                install(direction, epoch, suite, secret)

        context.update_traffic_key_cb = update_traffic_key


class _Tracer(QuicLogger):
    """Gives aioquic a trace that it does not end: the plane goes on writing it."""

    def __init__(self, logger: QuicLogger) -> None:
        super().__init__()
        self._logger = logger
        self.trace: QuicLoggerTrace | None = None

    def start_trace(self, is_client: bool, odcid: bytes) -> QuicLoggerTrace:
        self.trace = self._logger.start_trace(is_client, odcid)
        return self.trace

    def end_trace(self, trace: QuicLoggerTrace) -> None: ...


class _FirstRoundTrip:
    """The time from what was first sent to the first answer to it, where it was sent at one time only.

    What was sent twice may have been answered either time (Karn and Partridge, "Improving Round-Trip Time Estimates in
    Reliable Transport Protocols"), so there is no sample then. A Retry is an answer, and a new beginning. What comes
    behind the first answer is no answer to what we said last, but maybe the rest of what the peer had to say.
    """

    def __init__(self) -> None:
        self.sample_ns: int | None = None
        self._seen: tuple[int, tls.State | None] | None = None
        self._sent_ns: int | None = None
        self._is_ambiguous = False
        self._is_over = False

    def on_sent(self, now_ns: int) -> None:
        if self._sent_ns is None:
            self._sent_ns = now_ns
        elif self._sent_ns != now_ns:
            self._is_ambiguous = True

    def on_progress(self, progress: tuple[int, tls.State | None], now_ns: int) -> None:
        if progress == self._seen or self._is_over:
            return
        if self._sent_ns is not None and self._seen is not None:
            if not self._is_ambiguous:
                self.sample_ns = now_ns - self._sent_ns
            self._is_over = progress[0] == self._seen[0]
            self._sent_ns, self._is_ambiguous = None, False
        self._seen = progress


def _after(at: float) -> int:
    """Return the nanosecond after a time of aioquic's, which counts in floats.

    Late rather than early, and late enough: it declares a packet lost where `sent <= now - delay`, and wakes for that
    at `sent + delay`. The difference may be a rounding error short of what was added (with delays of 9/8 of a round
    trip, RFC 9002 section 6.1.2, halves to be rounded are common); then nothing is lost, and the same time is due
    again, for as long as the clock stands still.
    """
    return int((at + 4 * math.ulp(at)) * 1e9) + 1


def short_packet(data: bytes | memoryview) -> bytes | None:
    """Return the short-header packet at the end of a datagram; None: there is none."""
    data = bytes(data)
    split = _short_header_at(data)
    return data[split:] or None if split is not None else None


def _short_header_at(data: bytes) -> int | None:
    """Return where the long-header packets of a datagram end; None: it has more of them than anybody sends."""
    buffer = Buffer(data=data)
    at = 0
    for _ in range(_MOST_PACKETS):
        if at >= len(data) or not data[at] & 0x80:
            # What is neither fills the datagram up, as zeros behind an Initial may.
            return at if at < len(data) and data[at] & 0x40 else len(data)
        try:
            header = pull_quic_header(buffer, host_cid_length=CID_LENGTH)
        except (ValueError, BufferReadError):
            return len(data)
        at += header.packet_length
        buffer.seek(at)
    return at if at == len(data) else None
