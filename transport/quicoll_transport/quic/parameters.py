"""Transport parameters: what either side tells the other in the handshake (RFC 9000 section 18).

aioquic writes and reads them. Ours are the plane's, though, not aioquic's, which has no use for them: they replace what
it has written, all but its connection ids and version.

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

if TYPE_CHECKING:
    from quicoll_transport.quic.terms import SessionConfig

__all__ = ["TransportParameters", "local_parameters", "pull_parameters", "read_parameters", "replace_parameters"]

_PARAMETERS_BYTES = 1024
_STREAMS = 128  # that a peer may open at once, before the plane allows more


@dataclass(frozen=True, slots=True)
class TransportParameters:
    """Transport parameters of one side (RFC 9000 section 18.2); the defaults are those of the RFC.

    Attributes:
        max_idle_timeout: Milliseconds; 0: none.
        stateless_reset_token: Of a server's first connection id; None for a client.
        max_ack_delay: Milliseconds.
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


def local_parameters(config: SessionConfig) -> TransportParameters:
    """Return what we tell a peer, but for the reset token of a server."""
    window = config.window_bytes
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
    )


def pull_parameters(extensions: list[tuple[int, bytes]]) -> QuicTransportParameters:
    """Return the peer's parameters among the extensions of its TLS messages, as aioquic has them."""
    for kind, data in extensions:
        if kind == tls.ExtensionType.QUIC_TRANSPORT_PARAMETERS:
            return pull_quic_transport_parameters(Buffer(data=data))
    raise AssertionError("aioquic has finished a handshake without transport parameters")


def read_parameters(quic: QuicTransportParameters) -> TransportParameters:
    """Return what aioquic's parameters say; those that are missing have the values of the RFC."""
    names = [name for name in TransportParameters.__dataclass_fields__ if getattr(quic, name) is not None]
    return TransportParameters(**{name: getattr(quic, name) for name in names})


def replace_parameters(written: bytes, parameters: TransportParameters) -> bytes:
    """Return aioquic's parameters with ours in their place; its connection ids and version stay."""
    quic = pull_quic_transport_parameters(Buffer(data=written))
    for name in TransportParameters.__dataclass_fields__:
        setattr(quic, name, getattr(parameters, name))
    buffer = Buffer(capacity=_PARAMETERS_BYTES)
    push_quic_transport_parameters(buffer, quic)
    return buffer.data
