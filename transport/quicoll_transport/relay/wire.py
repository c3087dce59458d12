"""What a datagram to and from a relay looks like, and the addresses that stand for ways through relays.

    1 byte    0x01, which begins no QUIC packet: QUIC sets 0x40 (RFC 9000 section 17), and so both share a port
    8 bytes   the label
    then      the datagram that is passed on

An endpoint knows addresses only. So a way through a relay has one as well, of 240.0.0.0/8, which is reserved (RFC 1112
section 4): nothing on any network has it, and it never leaves the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

__all__ = ["HEAD_BYTES", "LABEL_BYTES", "MOST_PASSED", "PASSED_ON", "detour_address", "head", "label_of"]

PASSED_ON = 0x01
LABEL_BYTES = 8
HEAD_BYTES = 1 + LABEL_BYTES
MOST_PASSED = 1452 - HEAD_BYTES
"""Bytes of the largest datagram that is passed on: with the head it fits a path of 1500 bytes, by IPv6 too."""
_MOST_WAYS = 1 << 24


def head(label: bytes) -> bytes:
    """Return what stands before a datagram that is to be passed on under this label."""
    return bytes([PASSED_ON]) + label


def label_of(data: memoryview) -> bytes | None:
    """Return the label of a datagram; None: it is none to be passed on, but the endpoint's own."""
    return bytes(data[1:HEAD_BYTES]) if data[0] == PASSED_ON and len(data) > HEAD_BYTES else None


def detour_address(number: int) -> Address:
    """Return the address that stands for a way through a relay. number: of the way; they repeat after 2^24."""
    number %= _MOST_WAYS
    return (f"240.{number >> 16}.{number >> 8 & 255}.{number & 255}", 1)
