"""QUIC: above it there are messages, not packets. The one package that touches aioquic, its private parts included.

    terms               settings, names of close codes, what a datagram says without a key
    session             one connection as messages, sans-IO: a Carrier
    gate                how a stranger becomes a session: a Listener
    handshake           aioquic's handshake, and only that; what it agrees on goes to the plane
    plane               the connection after it, tied together from:
      receiving         from datagrams to frames to parts
      sending           what goes into the next packets, and which go now
      closing           how it ends
      keys, packets     protection of packets, one by one and in runs
      frames, varint    what packets say
      control           frames that wait, but for ACK and STREAM
      acknowledgements  what has arrived, and who is told when
      recovery, rtt     what is in flight, and what was lost; records says what it carried
      controller        what congestion control is; cubic and newreno are two; pacer: when packets may leave
      mtu               how large datagrams may be
      streams           one in one direction; inbound and outbound: all of them, and in which order
      flow              how much may be sent
      connection_ids    ours, and the peer's
      paths             where the peer is
    selfcheck           refuses to run on an aioquic that is not built as expected
    seeded              every source of chance and of wall-clock time in here, from a seed: for simulations
    qlog, tracing       traces
    logs                aioquic's log, one level down

Supported: aioquic >=1.7.2, <1.8. Each module lists the private names that it uses; the canaries are in
tests/transport/quic/test_handshake.py and test_seeded.py. Connection ids and keys come from the operating system's
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
