"""QUIC: above it there are messages, not packets. The one package that touches aioquic, its private parts included.

    terms        settings, events, close codes: what the layers above talk about
    connection   aioquic's connection with what it lacks: client certificates, bounded windows, an order of streams
    session      one connection as messages, sans-IO
    gate         how a stranger becomes a session
    foundation   the self-check: refuses to run on an aioquic that is not built as expected
    chance       every source of chance and of wall-clock time in here, from a seed: for simulations
    qlog         traces

Supported: aioquic >=1.7.2, <1.8. Each module lists the private names that it uses; the canaries are in
tests/transport/quic/test_session.py and test_chance.py. Connection ids and keys come from the operating system's
randomness unless `entropy` says otherwise.
"""

from __future__ import annotations

from quicoll_transport.quic.gate import Gate
from quicoll_transport.quic.qlog import QlogDirectory
from quicoll_transport.quic.seeded import entropy
from quicoll_transport.quic.selfcheck import check_foundation, handshake_in_memory
from quicoll_transport.quic.session import Session
from quicoll_transport.quic.terms import (
    ALPN,
    CLOSE_GONE,
    CLOSE_NORMAL,
    CLOSE_PROTOCOL,
    CLOSE_REFUSED,
    CLOSE_REPLACED,
    Authenticated,
    Closed,
    ControlData,
    MessageSink,
    PathStats,
    SessionConfig,
    destination_cid,
    error_name,
    is_unauthenticated_initial,
)

__all__ = [
    "ALPN",
    "CLOSE_GONE",
    "CLOSE_NORMAL",
    "CLOSE_PROTOCOL",
    "CLOSE_REFUSED",
    "CLOSE_REPLACED",
    "Authenticated",
    "Closed",
    "ControlData",
    "Gate",
    "MessageSink",
    "PathStats",
    "QlogDirectory",
    "Session",
    "SessionConfig",
    "check_foundation",
    "destination_cid",
    "entropy",
    "error_name",
    "handshake_in_memory",
    "is_unauthenticated_initial",
]
