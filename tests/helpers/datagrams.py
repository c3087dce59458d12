"""Runs of one datagram, for tests that carry datagrams one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll_transport.net.runs import DatagramRun

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address


def one(data: bytes | bytearray, address: Address) -> DatagramRun:
    """Return a run of this datagram, in memory of its own; it must not be empty."""
    assert data
    return DatagramRun(memoryview(bytearray(data)), len(data), address)
