"""When a datagram came to this host, which may be long before anybody reads it: SO_TIMESTAMPNS (Linux, socket(7)).

A loop that is busy for ten milliseconds reads everything that came meanwhile at once. To whoever takes the time of
reading for that of arrival, the path has held it back: a queue where there is none, and then a burst that is faster
than the path. A controller that believes that gives way to nobody, or fills a queue (`quic.recovery`). So the kernel is
asked for the time at which its network had each datagram.

It says so by the wall's clock, and all else here goes by one that is never set. So what is passed on is how long a
datagram has waited; a clock that was set meanwhile shows as a wait below nothing or longer than `MOST_NS`, and then
nothing is known of it. A step that is smaller passes for a wait, once.
"""

from __future__ import annotations

import functools
import socket
import struct
import sys
from collections.abc import Iterable

__all__ = ["ANCILLARY", "MOST_NS", "can_stamp", "stamp", "stamp_of", "waited"]

MOST_NS = 250_000_000
"""The longest wait that is believed."""

_SO_TIMESTAMPNS = 35  # and SCM_TIMESTAMPNS; Linux, but for a few processors, on which the trial fails
_TIME = struct.Struct("=qq")  # struct timespec of a 64-bit system
_NS = 1_000_000_000
_PATIENCE_S = 0.2

ANCILLARY = socket.CMSG_SPACE(_TIME.size) if hasattr(socket, "CMSG_SPACE") else 0


def stamp(opened: socket.socket) -> None:
    """Have the kernel say when each datagram came; read them with `ANCILLARY` bytes for `stamp_of`.

    Raises:
        OSError: This system cannot.
    """
    opened.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def stamp_of(ancillary: Iterable[tuple[int, int, bytes]]) -> int:
    """Return when something came, in nanoseconds of the wall's clock; 0 where recvmsg gave no such time."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) == _TIME.size:
            seconds, nanoseconds = _TIME.unpack(data)
            return int(seconds * _NS + nanoseconds)
    return 0


def waited(came_ns: int, wall_ns: int) -> int:
    """Return the nanoseconds from when something came to the present, both by the wall's clock; 0 if not known."""
    wait_ns = wall_ns - came_ns
    return wait_ns if came_ns and 0 < wait_ns <= MOST_NS else 0


@functools.cache
def can_stamp() -> bool:
    """Return whether this system stamps datagrams, as tried on its loopback interface."""
    if sys.platform != "linux":
        return False
    try:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        ):
            receiver.bind(("127.0.0.1", 0))
            stamp(receiver)
            receiver.settimeout(_PATIENCE_S)
            sender.sendto(b"a", receiver.getsockname())
            _, ancillary, _, _ = receiver.recvmsg(1, ANCILLARY)
    except OSError:
        return False
    return stamp_of(ancillary) > 0
