"""Real sockets for tests: what one was told, awaitable, and system calls that fail as told."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from networks import needs_v6

from quicoll_transport.net.addresses import canonical
from quicoll_transport.net.runs import DatagramRun, apart, joined
from quicoll_transport.net.udp import UdpSocket

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.trouble import Trouble

needs_recverr = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells an unconnected socket of ICMP")
FAMILIES = [pytest.param("127.0.0.1", id="v4"), pytest.param("::1", id="v6", marks=needs_v6)]


class Inbox:
    """A socket and what it was told, awaitable."""

    def __init__(self, host: str, *, v6only: bool = False, port: int = 0) -> None:
        self.socket = UdpSocket(host, port, loop=asyncio.get_running_loop(), v6only=v6only)
        self.address = self.socket.local_address
        self.got: asyncio.Queue[tuple[bytes, Address]] = asyncio.Queue()
        self.runs: list[int] = []  # the number of datagrams in each
        self.troubles: asyncio.Queue[tuple[Address, Trouble]] = asyncio.Queue()
        self.socket.start(self._arrived, lambda address, trouble: self.troubles.put_nowait((address, trouble)))

    def send(self, *datagrams: tuple[bytes, Address]) -> None:
        """Send these, equal ones as runs."""
        self.socket.send(joined(datagrams))

    async def receive(self, count: int) -> list[bytes]:
        """Wait for so many datagrams."""
        return [(await self.got.get())[0] for _ in range(count)]

    def _arrived(self, runs: list[DatagramRun]) -> None:
        for each in apart(runs):
            self.got.put_nowait(each)
        self.runs += [len(run) for run in runs]


class Failing:
    """A socket whose next calls that send fail as told: for what a test cannot do to the host it runs on.

    codes: an errno for each call, 0 for one that works; later ones work. together, alone: the codes of those calls only
    that send a piece of several datagrams, or a single one. calls: (bytes, datagrams) of each piece that was sent.
    """

    def __init__(
        self, real: socket.socket, codes: Iterable[int] = (), *, together: Iterable[int] = (), alone: Iterable[int] = ()
    ) -> None:
        self.real = real
        self.codes, self.together, self.alone = iter(codes), iter(together), iter(alone)
        self.calls: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def sendto(self, data: memoryview, address: Address) -> int:
        self._fail(self.alone)
        self.calls.append((len(data), 1))
        return self.real.sendto(data, address)

    def sendmsg(self, pieces: list[memoryview], ancillary: Any, flags: int, address: Address) -> int:
        self._fail(self.together)
        size = int.from_bytes(ancillary[0][2], sys.byteorder)
        self.calls.append((len(pieces[0]), -(-len(pieces[0]) // size)))
        return self.real.sendmsg(pieces, ancillary, flags, address)

    def _fail(self, own: Iterator[int]) -> None:
        code = next(self.codes, 0) or next(own, 0)
        if code:
            raise OSError(code, "told to fail")


def unused(host: str) -> Address:
    """An address where nothing listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as closed:
        closed.bind((host, 0))
        return canonical(closed.getsockname())
