"""QUIC: above it there are messages, not packets. The one package that touches aioquic, its private parts included.

aioquic does the handshake. Everything after it is ours, in runs of packets: plain RFC 9000, 9001 and 9002 on the wire,
so that either side may be any QUIC. From the top:

    gate              how a stranger becomes a session: a Listener
    session           one connection as messages, sans-IO: a Carrier; first its handshake, then its plane
    handshake         aioquic's handshake, and what is handed over at its end; `parameters` what both sides tell
    plane             the connection after the handshake, tied together
    receiving         from datagrams to frames to the parts that they are for
    sending           what goes into the next packet, and which packets go now
    inbound           the peer's streams; `outbound` ours; `streams` one of them, `flow` what they may hold
    protection        parity behind the tail of what is sent; `repairs` what is made of the peer's; `segments` how both
                      count, `erasure` the code
    recovery          what is in flight, acknowledged, lost: over runs; `records` what they carried; `rtt`; `peer_clock`
                      when acknowledgements were sent
    controller        how much may be in flight: `bbr` with its `path_model` and `limits`, `cubic`, `newreno`;
                      `path_memory` what is remembered of that; `pacer` when it leaves; `mtu` how large
    access_line       how much all of a host's connections may send together; `arrival_line` what a receiver allots each
                      of its senders, `fair_rate_trial` what one makes of that; `fairness`, `sliding_rate`, `peak_rate`
    acknowledgements  what has arrived, and when the peer is told
    connection_ids, paths, closing, control
    packets           protection of packets, one and many; `keys` what protects them
    frames            what they are, and how they are written; `frame_reader` reads them; `varint`
    terms             settings, names of close codes, what a datagram says without a key
    selfcheck         refuses to run on an aioquic that is not built as expected
    seeded            every source of chance and of wall-clock time in here, from a seed: for simulations
    qlog, tracing     traces
    logs              aioquic's log, one level down

Supported: aioquic >=1.7.2, <1.8. Of its private names `handshake` lists those that are used (`gate` and
`parameters` share one, and `seeded` replaces module names); canaries are in tests/transport/quic/test_handshake.py,
test_selfcheck.py and test_seeded.py. Connection ids and keys come from the operating system's randomness unless
`entropy` says otherwise.
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
