"""Many datagrams in one system call, where the system can: UDP_SEGMENT to send, UDP_GRO to receive (Linux, udp(7)).

To send, a run goes down as one piece with the size of its datagrams beside it (GSO); the kernel, or the network card,
cuts it. To receive, the kernel gives consecutive datagrams of one sender and one size as one piece, with their size
beside it (GRO). Both are the run of `runs`, so nothing has to be rearranged.

What a system can do is found out once in a process, with sockets that are thrown away: a kernel without UDP_SEGMENT
refuses the option, but would send a piece with the size beside it as one long datagram. Whether a network card can do
what the kernel accepted shows only when sending: EIO or EINVAL for a piece whose datagrams then go one by one. The
socket remembers that (udp.py).
"""

from __future__ import annotations

import functools
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "MOST_BYTES",
    "MOST_SEGMENTS",
    "Offload",
    "coalesce",
    "coalesced_size",
    "segment_size",
    "supported",
]

MOST_SEGMENTS = 64  # in one call; UDP_MAX_SEGMENTS of every kernel that has UDP_SEGMENT (later ones take 128)
MOST_BYTES = 65507  # in one call: a piece has the length of one IPv4 packet at most, headers included

_SOL_UDP = 17
_UDP_SEGMENT = 103
_UDP_GRO = 104
_SIZE_TO_SEND = struct.Struct("=H")
_SIZE_RECEIVED = struct.Struct("=i")

ANCILLARY = socket.CMSG_SPACE(_SIZE_RECEIVED.size) if hasattr(socket, "CMSG_SPACE") else 0


@dataclass(frozen=True, slots=True)
class Offload:
    """What can go in one system call: sends, several datagrams to one address; receives, several from one."""

    sends: bool
    receives: bool


@functools.cache
def supported() -> Offload:
    """Return what this system can do, as tried on its loopback interface."""
    if sys.platform != "linux":
        return Offload(sends=False, receives=False)
    return Offload(sends=_try_to_send(), receives=_try_to_receive())


def _try_to_send() -> bool:
    try:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        ):
            receiver.bind(("127.0.0.1", 0))
            sender.setsockopt(_SOL_UDP, _UDP_SEGMENT, 2)
            sender.sendmsg([b"aabbc"], segment_size(2), 0, receiver.getsockname())
    except OSError:
        return False
    return True


def _try_to_receive() -> bool:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
            coalesce(receiver)
    except OSError:
        return False
    return True


def segment_size(size: int) -> list[tuple[int, int, bytes]]:
    """Return what sendmsg takes beside a piece of memory to send it as datagrams of `size` bytes."""
    return [(_SOL_UDP, _UDP_SEGMENT, _SIZE_TO_SEND.pack(size))]


def coalesce(opened: socket.socket) -> None:
    """Have the kernel give datagrams together; read them with `ANCILLARY` bytes for `coalesced_size`.

    Raises:
        OSError: This system cannot.
    """
    opened.setsockopt(_SOL_UDP, _UDP_GRO, 1)


def coalesced_size(ancillary: Iterable[tuple[int, int, bytes]], length: int) -> int:
    """Return the size of each datagram (the last may be shorter) in `length` bytes that recvmsg gave."""
    for level, kind, data in ancillary:
        if level == _SOL_UDP and kind == _UDP_GRO and len(data) >= _SIZE_RECEIVED.size:
            (size,) = _SIZE_RECEIVED.unpack_from(data)
            if 0 < size < length:
                return int(size)
    return length
