"""Settings of a QUIC connection, names of its close codes, and what a datagram says without a key.

Nothing here has state. What a datagram is for can be read from its first bytes without a key (RFC 8999), so that stands
here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from aioquic.quic.packet import QuicErrorCode

from quicoll_transport.carrier import (
    CLOSE_FORGOTTEN,
    CLOSE_GONE,
    CLOSE_NORMAL,
    CLOSE_OUTDATED,
    CLOSE_PROTOCOL,
    CLOSE_REFUSED,
    CLOSE_REPLACED,
)
from quicoll_transport.errors import ConfigurationError
from quicoll_transport.quic.bbr import Bbr
from quicoll_transport.quic.cubic import Cubic
from quicoll_transport.quic.newreno import NewReno

if TYPE_CHECKING:
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.quic.access_line import AccessShare
    from quicoll_transport.quic.controller import Controller
    from quicoll_transport.quic.path_memory import RememberedPath

__all__ = [
    "ALPN",
    "CID_LENGTH",
    "CONTROLLERS",
    "DATAGRAM_BYTES",
    "PARITY_MODES",
    "SessionConfig",
    "controller_of",
    "destination_cid",
    "destinations",
    "error_name",
    "is_unauthenticated_initial",
]

CONTROLLERS = ("bbr", "cubic", "reno")
"""Names of congestion controls."""

PARITY_MODES = ("auto", "off")
"""Whether parity may follow what is sent."""

ALPN = "quicoll/1"
CID_LENGTH = 8
DATAGRAM_BYTES = 1452  # a path of 1500 bytes less IPv6 and UDP headers
_LEAST_DATAGRAM = 1200  # of UDP payload, which every path of QUIC carries (RFC 9000 section 14)
_MOST_DATAGRAM = 65507  # an IPv4 packet of 65535 bytes less its headers
_MOST_KEY_PACKETS = 1 << 22  # half of what AES-GCM may protect with one key (RFC 9001 section 6.6)
_FEW = 32  # datagrams that are cheaper to look at one by one
_HEADER_NS = 30_000_000_000
_MOST_FORGED = 1 << 52  # packets that may fail their authentication, for AES-GCM (the same section)


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Settings of one QUIC connection.

    datagram_bytes: UDP payload to send, at most what the path carries. 0: from 1452 up to what is found to pass, 8952
        at the most, or 65000 on the loopback interface.
    idle_ns: QUIC's own idle timeout; a backstop, failures are noticed by the link's detector long before.
    window_bytes: QUIC flow-control window, per stream and per connection: what a peer can make us hold of streams
        with holes, and an upper limit on the rate, window_bytes per RTT.
    key_packets: packets that this side protects with one key before it asks for the next, 1 to 2**22. An update costs
        what the peer has under way, which is sent again.
    forged_packets: packets that fail their authentication, 1 to 2**52, until the connection is closed; with so many
        tries a forgery is no longer next to impossible.
    congestion: which congestion control, of CONTROLLERS.
    parity: "auto": where both sides say so, parity may follow what is sent over a long path that loses packets, from a
        side whose congestion control is bbr; and it is taken from the peer. "off": neither.
    header_ns: how long the header of a message may take to arrive from its first byte on. Many times what a path needs
        to repair a loss, since a connection that is resumed is the price of a mistake.
    Raises ConfigurationError.
    """

    datagram_bytes: int = 0
    idle_ns: int = 30_000_000_000
    window_bytes: int = 16 << 20
    congestion: str = "cubic"
    parity: str = "auto"
    initial_rtt_ns: int = 50_000_000
    key_packets: int = _MOST_KEY_PACKETS
    forged_packets: int = _MOST_FORGED
    header_ns: int = _HEADER_NS

    def __post_init__(self) -> None:
        if self.datagram_bytes != 0 and not _LEAST_DATAGRAM <= self.datagram_bytes <= _MOST_DATAGRAM:
            raise ConfigurationError(
                f"datagram_bytes must be 0 or {_LEAST_DATAGRAM} to {_MOST_DATAGRAM}, is {self.datagram_bytes}"
            )
        for name in ("idle_ns", "window_bytes", "initial_rtt_ns"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be positive, is {getattr(self, name)}")
        if self.congestion not in CONTROLLERS:
            known = " or ".join(CONTROLLERS)
            raise ConfigurationError(f"congestion {self.congestion!r} is not known; take {known}")
        if self.parity not in PARITY_MODES:
            raise ConfigurationError(f"parity {self.parity!r} is not known; take {' or '.join(PARITY_MODES)}")
        if not 1 <= self.forged_packets <= _MOST_FORGED:
            raise ConfigurationError(f"forged_packets must be 1 to {_MOST_FORGED}, is {self.forged_packets}")
        if self.header_ns <= 0:
            raise ConfigurationError(f"header_ns must be positive, is {self.header_ns}")
        if not 1 <= self.key_packets <= _MOST_KEY_PACKETS:
            raise ConfigurationError(f"key_packets must be 1 to {_MOST_KEY_PACKETS}, is {self.key_packets}")


def controller_of(
    name: str,
    datagram: int,
    draw: Callable[[int], bytes],
    remembered: RememberedPath | None = None,
    share: AccessShare | None = None,
) -> Controller:
    """Return congestion control for a path.

    Args:
        name: Of CONTROLLERS.
        datagram: Bytes of a datagram on it.
        draw: Returns so many bytes of chance.
        remembered: What is known of the path; None: nothing.
        share: Of the line by which the host's connections leave; None: it leaves alone.
    """
    if name == "bbr":
        return Bbr(datagram, draw, remembered, share)
    return Cubic(datagram) if name == "cubic" else NewReno(datagram)


def destination_cid(data: bytes | memoryview) -> bytes | None:
    """Return the connection id that a datagram is for, or None when it is no QUIC packet of ours (RFC 8999)."""
    if not data:
        return None
    if data[0] & 0x80:
        if len(data) < 6 or len(data) < 6 + data[5]:
            return None
        return bytes(data[6 : 6 + data[5]])
    return bytes(data[1 : 1 + CID_LENGTH]) if len(data) > CID_LENGTH else None


def destinations(run: DatagramRun) -> list[tuple[bytes | None, DatagramRun]]:
    """Return a run in parts, in order, each of one header form (RFC 8999) and with the connection id that it is for."""
    memory, size = run.memory, run.size
    if len(memory) <= size:
        return [(destination_cid(memory), run)]
    count = len(run)
    cid = destination_cid(memory[:size])
    whole = len(memory) // size
    if cid is not None and not memory[0] & 0x80 and count <= _FEW:
        others = range(size, len(memory), size)
        if all(memory[at] < 0x80 and memory[at + 1 : at + 1 + CID_LENGTH] == cid for at in others):
            return [(cid, run)]
    elif cid is not None and whole > 1:
        # The usual case, seen at once: all have the first one's head, up to the end of its id.
        head = 6 + len(cid) if memory[0] & 0x80 else 1 + CID_LENGTH
        rows = np.frombuffer(memory, np.uint8, whole * size).reshape(whole, size)[:, :head]
        alike = ((rows[:, 0] ^ rows[0, 0]) < 0x80).all() and (rows[:, 1:] == rows[0, 1:]).all()
        if alike and (whole == count or _leads(memory[whole * size :]) == _leads(memory[:size])):
            return [(cid, run)]
    leads = [_leads(datagram) for datagram in run.datagrams()]
    starts = [i for i in range(count) if i == 0 or leads[i] != leads[i - 1]]
    return [(leads[start][1], run.part(start, stop)) for start, stop in pairwise([*starts, count])]


def _leads(data: memoryview) -> tuple[int, bytes | None]:
    """Return the header form of a datagram and where it leads."""
    return data[0] & 0x80, destination_cid(data)


def is_unauthenticated_initial(data: bytes | memoryview) -> bool:
    """Return whether a datagram starts with a QUIC v1 Initial packet: the only kind that may make us keep anything."""
    return len(data) > 4 and data[0] & 0xF0 == 0xC0 and data[1:5] == b"\x00\x00\x00\x01"


def error_name(code: int) -> str:
    """Return a readable name of a close code."""
    ours = {
        CLOSE_NORMAL: "closed",
        CLOSE_REFUSED: "refused",
        CLOSE_PROTOCOL: "protocol error",
        CLOSE_GONE: "link gone",
        CLOSE_REPLACED: "replaced",
        CLOSE_OUTDATED: "outdated",
        CLOSE_FORGOTTEN: "stateless reset",
    }
    if code in ours:
        return ours[code]
    try:
        return QuicErrorCode(code).name.lower()
    except ValueError:
        return f"TLS alert {code - 0x100}" if 0x100 <= code < 0x200 else f"code {code:#x}"
