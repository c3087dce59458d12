"""UDP sockets of simulated processes: the `DatagramIO` under every simulated endpoint.

As on a real socket, datagrams that arrive while the process does not run wait in a bounded buffer and are read in
batches; what does not fit is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quicoll_transport.errors import AddressError
from quicoll_transport.net.addresses import canonical, is_numeric
from quicoll_transport.net.runs import apart, joined

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.net.trouble import Trouble
    from quicoll_transport.net.udp import OnRuns, OnUnreachable
    from quicoll_transport.sim.loop import HostLoop

__all__ = ["SimulatedSocket"]

_BUFFER = 4 << 20  # bytes of a socket's receive buffer, as the real socket asks for
_BATCH = 128  # datagrams that a process reads at a time, as the real socket does
_EPHEMERAL = 49152  # the first port that is given to a socket that asks for none (RFC 6335)


class SimulatedSocket:
    """A UDP socket of a simulated process; a `DatagramIO`. It ends with its process, or by `close`.

    Args:
        loop: The event loop of the process.
        port: The port to listen on; 0 for a free one.
        at: At which of the host's addresses; 0 is the first one.
    Raises:
        AddressError: The port is in use or no port, or the process is gone.
    """

    def __init__(self, loop: HostLoop, port: int = 0, *, at: int = 0) -> None:
        self.interface = interface = (loop.interface, *loop.interface.further)[at]
        if loop.dead:
            raise AddressError(f"the process on {interface.name} is gone")
        if not 0 <= port <= 65535:
            raise AddressError(f"{port} is no port")
        if port == 0:
            port = next((free for free in range(_EPHEMERAL, 65536) if free not in interface.sockets), 0)
        if port == 0 or port in interface.sockets:
            raise AddressError(f"cannot listen on {interface.ip}:{port}: the port is in use")
        self.local_address: Address = (interface.ip, port)
        self.lost_backlog = 0
        self._loop = loop
        self._buffer: deque[tuple[bytes, Address]] = deque()
        self._bytes = 0
        self._reads = False
        self._on_runs: OnRuns | None = None
        self._on_unreachable: OnUnreachable | None = None
        interface.sockets[port] = self

    def start(self, on_runs: OnRuns, on_unreachable: OnUnreachable) -> None:
        if self.interface.sockets.get(self.local_address[1]) is not self:
            raise AddressError(f"the socket on {self.local_address[0]}:{self.local_address[1]} is closed")
        self._on_runs = on_runs
        self._on_unreachable = on_unreachable
        self._wake()

    def send(self, runs: Sequence[DatagramRun]) -> None:
        interface = self.interface
        if interface.sockets.get(self.local_address[1]) is not self:
            return
        network = interface.network
        for data, address in apart(runs):
            network.send(self, data, address)

    async def resolve(self, host: str, port: int) -> list[Address]:
        ip = host if is_numeric(host) else self.interface.network.resolve(host)
        if ip is None:
            raise AddressError(f"cannot resolve {host!r}: the simulated world has no such host")
        return [canonical((ip, port))]

    def close(self) -> None:
        if self.interface.sockets.get(self.local_address[1]) is self:
            self.sever()

    def sever(self) -> None:
        """Close at once and drop what was received; no callback is called any more."""
        del self.interface.sockets[self.local_address[1]]
        self._on_runs = self._on_unreachable = None
        self._buffer.clear()

    # -- from the network ----------------------------------------------------------------------------------------

    def receive(self, data: bytes, source: Address) -> None:
        if self._bytes + len(data) > _BUFFER:
            self.lost_backlog += 1
            self.interface.network.count("buffer_full")
            return
        self._bytes += len(data)
        self._buffer.append((data, source))
        self._wake()

    def trouble(self, address: Address, trouble: Trouble) -> None:
        if self._on_unreachable is not None:
            self._loop.call_soon(self._tell, address, trouble)

    def _tell(self, address: Address, trouble: Trouble) -> None:
        if self._on_unreachable is not None:
            self._on_unreachable(address, trouble)

    def _wake(self) -> None:
        if self._buffer and not self._reads and self._on_runs is not None:
            self._reads = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._reads = False
        batch: list[tuple[bytes, Address]] = []
        while self._buffer and len(batch) < _BATCH:
            data, source = self._buffer.popleft()
            self._bytes -= len(data)
            batch.append((data, source))
        if batch and self._on_runs is not None:
            self._on_runs(joined(batch))
        self._wake()
