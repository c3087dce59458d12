"""A node of a simulated network for tests: a host whose process keeps what it receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll_transport.net.runs import apart, joined
from quicoll_transport.sim import Host, SimulatedSocket, World

if TYPE_CHECKING:
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.net.trouble import Trouble

SECOND = 1_000_000_000


class Node:
    """A host with a process that keeps what it receives, with the time of its arrival."""

    def __init__(self, world: World, name: str, port: int = 7) -> None:
        self.world = world
        self.host: Host = world.host(name)
        self.socket = SimulatedSocket(self.host.start(), port)
        self.got: list[tuple[int, bytes]] = []
        self.troubles: list[tuple[int, object, Trouble]] = []
        self.batches: list[int] = []
        self.socket.start(self._runs, self._unreachable)

    def _runs(self, runs: list[DatagramRun]) -> None:
        datagrams = list(apart(runs))
        self.batches.append(len(datagrams))
        self.got += [(self.world.elapsed_ns, data) for data, _ in datagrams]

    def _unreachable(self, address: object, trouble: Trouble) -> None:
        self.troubles.append((self.world.elapsed_ns, address, trouble))

    def send(self, other: Node, *payloads: bytes) -> None:
        self.socket.send(joined((data, other.socket.local_address) for data in payloads))

    @property
    def data(self) -> list[bytes]:
        return [data for _, data in self.got]


def pass_time(world: World, ns: int = SECOND) -> None:
    world.run(limit_ns=ns)


def numbers(count: int, size: int = 100) -> list[bytes]:
    return [n.to_bytes(4, "big") + bytes(size - 4) for n in range(count)]
