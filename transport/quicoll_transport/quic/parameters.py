"""Transport parameters: what either side tells the other in the handshake (RFC 9000 section 18).

aioquic writes and reads them. Ours are the plane's, though, not aioquic's, which has no use for them: they replace what
it has written, all but its connection ids and version. One of ours no RFC has, and aioquic does not know: which of
our frames this side takes, and whether it sends parity (`frames`); it stands behind the others. A bit of it that is not
known says nothing.

Private name used: aioquic._buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aioquic import tls
from aioquic._buffer import Buffer
from aioquic.quic.packet import (
    QuicTransportParameters,
    pull_quic_transport_parameters,
    push_quic_transport_parameters,
)

from quicoll_transport.quic.acknowledgements import MAX_ACK_DELAY_MS
from quicoll_transport.quic.varint import pull, varint

if TYPE_CHECKING:
    from quicoll_transport.quic.terms import SessionConfig

__all__ = [
    "SENDS_PARITY",
    "TAKES_FAIR_RATES",
    "TAKES_PARITY",
    "TAKES_STAMPS",
    "TransportParameters",
    "local_parameters",
    "pull_parameters",
    "replace_parameters",
]

_PARAMETERS_BYTES = 1024
_OURS = 0x2A50B6E3  # the parameter's id, of those for private use (RFC 9000 section 22.1); its value is one byte
TAKES_PARITY, SENDS_PARITY, TAKES_STAMPS, TAKES_FAIR_RATES = 1, 2, 4, 8
_STREAMS = 128  # that a peer may open at once, before the plane allows more


@dataclass(frozen=True, slots=True)
class TransportParameters:
    """Transport parameters of one side (RFC 9000 section 18.2); the defaults are those of the RFC.

    Attributes:
        max_idle_timeout: Milliseconds; 0: none.
        stateless_reset_token: Of a server's first connection id; None for a client.
        max_ack_delay: Milliseconds.
        ours: The sum of TAKES_PARITY, SENDS_PARITY, TAKES_STAMPS, TAKES_FAIR_RATES, as far as they hold; it is our own.
    """

    max_idle_timeout: int = 0
    stateless_reset_token: bytes | None = field(default=None, repr=False)
    max_udp_payload_size: int = 65527
    initial_max_data: int = 0
    initial_max_stream_data_bidi_local: int = 0
    initial_max_stream_data_bidi_remote: int = 0
    initial_max_stream_data_uni: int = 0
    initial_max_streams_bidi: int = 0
    initial_max_streams_uni: int = 0
    ack_delay_exponent: int = 3
    max_ack_delay: int = 25
    disable_active_migration: bool = False
    active_connection_id_limit: int = 2
    ours: int = 0


def local_parameters(config: SessionConfig) -> TransportParameters:
    """Return what we tell a peer, but for the reset token of a server."""
    window, is_bbr = config.window_bytes, config.congestion == "bbr"
    ours = TAKES_STAMPS | TAKES_FAIR_RATES if is_bbr else 0
    if config.parity != "off":
        ours |= TAKES_PARITY | (SENDS_PARITY if is_bbr else 0)
    return TransportParameters(
        max_idle_timeout=config.idle_ns // 1_000_000,
        initial_max_data=window,
        initial_max_stream_data_bidi_local=window,
        initial_max_stream_data_bidi_remote=window,
        initial_max_stream_data_uni=window,
        initial_max_streams_bidi=1,
        initial_max_streams_uni=_STREAMS,
        max_ack_delay=MAX_ACK_DELAY_MS,
        active_connection_id_limit=8,
        ours=ours,
    )


def pull_parameters(extensions: list[tuple[int, bytes]]) -> tuple[QuicTransportParameters, TransportParameters]:
    """Return the peer's parameters among the extensions of its TLS messages: as aioquic has them, and as we do.

    Those that are missing have the values of the RFC.
    """
    for kind, data in extensions:
        if kind == tls.ExtensionType.QUIC_TRANSPORT_PARAMETERS:
            quic = pull_quic_transport_parameters(Buffer(data=data))
            names = [name for name in _OF_QUIC if getattr(quic, name) is not None]
            return quic, TransportParameters(**{name: getattr(quic, name) for name in names}, ours=_ours(data))
    raise AssertionError("aioquic has finished a handshake without transport parameters")


def _ours(data: bytes) -> int:
    """Look for the parameter in what aioquic has read before: every length is right."""
    at = 0
    while at < len(data):
        kind, at = pull(data, at)
        size, at = pull(data, at)
        if kind == _OURS:
            return data[at] if size == 1 else 0
        at += size
    return 0


def replace_parameters(written: bytes, parameters: TransportParameters) -> bytes:
    """Return aioquic's parameters with ours in their place; its connection ids and version stay."""
    quic = pull_quic_transport_parameters(Buffer(data=written))
    for name in _OF_QUIC:
        setattr(quic, name, getattr(parameters, name))
    buffer = Buffer(capacity=_PARAMETERS_BYTES)
    push_quic_transport_parameters(buffer, quic)
    return buffer.data + (varint(_OURS) + bytes((1, parameters.ours)) if parameters.ours else b"")


_OF_QUIC = [name for name in TransportParameters.__dataclass_fields__ if name != "ours"]
