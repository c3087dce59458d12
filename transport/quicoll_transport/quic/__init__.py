"""QUIC: above it there are messages, not packets. The one package that touches aioquic, its private parts included.

    terms        settings, names of close codes, what a datagram says without a key
    patched      aioquic's connection with what it lacks: client certificates, bounded windows, an order of streams
    session      one connection as messages, sans-IO: a Carrier
    gate         how a stranger becomes a session: a Listener
    delivery     the rate at which the peer acknowledges
    selfcheck    refuses to run on an aioquic that is not built as expected
    seeded       every source of chance and of wall-clock time in here, from a seed: for simulations
    qlog         traces
    logs         aioquic's log, one level down

Supported: aioquic >=1.7.2, <1.8. Each module lists the private names that it uses; the canaries are in
tests/transport/quic/test_session.py and test_seeded.py. Connection ids and keys come from the operating system's
randomness unless `entropy` says otherwise.
"""

from __future__ import annotations

from quicoll_transport.quic.gate import Gate
from quicoll_transport.quic.logs import lower
from quicoll_transport.quic.qlog import QlogDirectory
from quicoll_transport.quic.seeded import entropy
from quicoll_transport.quic.selfcheck import check_foundation, handshake_in_memory
from quicoll_transport.quic.session import Session
from quicoll_transport.quic.terms import (
    ALPN,
    SessionConfig,
    destination_cid,
    error_name,
    is_unauthenticated_initial,
)

__all__ = [
    "ALPN",
    "Gate",
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

lower()
