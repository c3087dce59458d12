"""Ports that a test names before somebody binds them.

A port that the system has given (bind to 0) and that is closed again may be given to the next who asks, before the one
it is for has it. So these are below the ports that systems give by themselves (from 32768 on Linux, 49152 elsewhere),
and each process of the tests goes through them from a place of its own.
"""

from __future__ import annotations

import itertools
import os
import socket

__all__ = ["named_port"]

_FIRST, _END = 20_000, 32_000
_APART = 16  # of the places of two processes that were started one after the other
_places = itertools.count(os.getpid() * _APART)


def named_port(kind: socket.SocketKind = socket.SOCK_DGRAM) -> int:
    """Return a port of the loopback interface that nobody has."""
    for place in itertools.islice(_places, _END - _FIRST):
        port = _FIRST + place % (_END - _FIRST)
        with socket.socket(socket.AF_INET, kind) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no port from {_FIRST} to {_END} is free")
