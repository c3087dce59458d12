"""What the host of the tests has of networks."""

from __future__ import annotations

import socket

import pytest

__all__ = ["has_v6", "needs_v6"]


def has_v6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_v6 = pytest.mark.skipif(not has_v6(), reason="this host has no ::1")
