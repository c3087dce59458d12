"""Paths between simulated hosts: the `DatagramIO` of a simulated process, and what becomes of each datagram.

Every ordered pair of hosts has a path of its own, with `Conditions` and a state. A datagram passes, in this order:

    size       more than the path's MTU: lost at once, and the sender is told how much passes (ICMP, RFC 1191)
    state      OPEN: on; CUT: lost; HELD: kept until the path is released or repaired, then sent on in order
    rules      the same as on a real socket (quicoll_transport.faults.compose): those of the path's conditions, then,
               if none of them dropped it, those that were added
    arrival    the host is off: lost; nothing listens on the port: the sender is told (ICMP, RFC 792) one latency later;
               the socket's buffer is full: lost; else the process reads it when it runs

    state     cut     hold    repair
    OPEN      CUT     HELD    OPEN
    CUT       CUT     HELD    OPEN
    HELD      CUT     HELD    OPEN     what was held is sent on; by a cut it is lost

What is under way when a path is cut still arrives; it had left. `injected` counts what was done to datagrams, by kind.
Hosts are named in any of these calls; nothing depends on the order of names.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll_transport.errors import AddressError, ConfigurationError
from quicoll_transport.faults.compose import (
    BurstLoss,
    Chain,
    Corrupt,
    Datagram,
    Delay,
    Delivery,
    Drop,
    Duplicate,
    Faults,
    Installed,
    Rate,
    Reorder,
    Rule,
)
from quicoll_transport.net.addresses import canonical, is_numeric
from quicoll_transport.net.udp import Trouble

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.udp import OnDatagrams, OnUnreachable
    from quicoll_transport.sim.host import Host
    from quicoll_transport.sim.loop import HostLoop
    from quicoll_transport.sim.world import World

__all__ = ["Conditions", "Network", "PathState", "SimulatedSocket"]

_BUFFER = 4 << 20  # bytes of a socket's receive buffer, as the real socket asks for
_BATCH = 128  # datagrams that a process reads at a time, as the real socket does
_HELD = 65536  # datagrams that a held path keeps
_EPHEMERAL = 49152  # the first port that is given to who asks for none (RFC 6335)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a path is like, in one direction.

    latency_ns, jitter_ns: each datagram takes latency and up to so much more, in order. loss: probability of each;
    burst: mean length of a burst of losses, 1 for independent ones. duplicate, reorder, corrupt: probability of each;
    reorder_ns: how much later a reordered one comes. bytes_per_second, queue_bytes: a bottleneck with its queue, None
    for none. mtu: bytes of UDP payload.
    """

    latency_ns: int = 500_000
    jitter_ns: int = 0
    loss: float = 0.0
    burst: float = 1.0
    duplicate: float = 0.0
    reorder: float = 0.0
    reorder_ns: int = 5_000_000
    corrupt: float = 0.0
    bytes_per_second: int | None = None
    queue_bytes: int = 256 << 10
    mtu: int = 1472

    def __post_init__(self) -> None:
        if self.mtu < 1200:
            raise ConfigurationError(f"QUIC needs an MTU of 1200 bytes (RFC 9000 section 14), not {self.mtu}")
        self.rule()

    def rule(self) -> Chain:
        """The rules of one path, with a memory of their own: what keeps order first, what breaks it last."""
        rules: list[Rule] = []
        if self.loss:
            rules.append(Drop(self.loss) if self.burst == 1.0 else BurstLoss.mean(self.loss, burst=self.burst))
        if self.corrupt:
            rules.append(Corrupt(self.corrupt))
        if self.bytes_per_second is not None:
            rules.append(Rate(self.bytes_per_second, queue_bytes=self.queue_bytes, overhead_bytes=28))
        rules.append(Delay(self.latency_ns, self.jitter_ns))
        if self.reorder:
            rules.append(Reorder(self.reorder, self.reorder_ns))
        if self.duplicate:
            rules.append(Duplicate(self.duplicate))
        return Chain(*rules)


class PathState(enum.Enum):
    OPEN = "open"
    CUT = "cut"
    HELD = "held"


class _Path:
    __slots__ = ("chain", "conditions", "destination", "faults", "held", "latency_ns", "source", "state")

    def __init__(self, source: Host, destination: Host, conditions: Conditions, faults: Faults) -> None:
        self.source = source
        self.destination = destination
        self.faults = faults
        self.state = PathState.OPEN
        self.held: deque[tuple[bytes, Address, Address]] = deque()
        self.set(conditions)

    def set(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self.chain = conditions.rule()
        # Most paths only take their time. Their chain says so of each datagram, so it need not be asked.
        rules = self.chain.rules
        self.latency_ns = conditions.latency_ns if len(rules) == 1 and not conditions.jitter_ns else None


class Network:
    """All paths of a world. A path has `default` conditions until it is given others."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._default = Conditions()
        self._paths: dict[tuple[str, str], _Path] = {}
        self._hosts: dict[str, Host] = {}  # by ip
        self.injected: dict[str, int] = {}
        self.datagrams = 0
        self.bytes = 0

    # -- conditions ----------------------------------------------------------------------------------------------

    @property
    def default(self) -> Conditions:
        return self._default

    def set_conditions(
        self, conditions: Conditions, source: Iterable[str] | None = None, destination: Iterable[str] | None = None
    ) -> None:
        """For the paths from each of `source` to each of `destination`, one way; without both, for all."""
        if source is None and destination is None:
            self._default = conditions
            for key in self._paths:
                self._paths[key].set(conditions)
            return
        for path in self._between(source, destination):
            path.set(conditions)

    def add_rule(self, rule: Rule, source: str, destination: str) -> Installed:
        """A rule on one path beyond its conditions. It counts, and is removed, by what is returned."""
        return self._path(self._named(source), self._named(destination)).faults.add(rule)

    # -- state ---------------------------------------------------------------------------------------------------

    def partition(self, one: Iterable[str], other: Iterable[str], *, one_way: bool = False) -> None:
        """Lose everything from `one` to `other`, and back unless `one_way`."""
        one, other = list(one), list(other)
        for path in self._between(one, other):
            self._cut(path)
        if not one_way:
            for path in self._between(other, one):
                self._cut(path)

    def hold(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Keep everything from `one` to `other`, one way, until it is repaired."""
        for path in self._between(one, other):
            path.state = PathState.HELD

    def repair(self, one: Iterable[str] | None = None, other: Iterable[str] | None = None) -> None:
        """Open the paths between these, both ways; all of them without arguments. What was held is sent on."""
        one = list(self._world.hosts) if one is None else list(one)
        other = list(self._world.hosts) if other is None else list(other)
        for path in [*self._between(one, other), *self._between(other, one)]:
            path.state = PathState.OPEN
            while path.held:
                self._pass(path, *path.held.popleft())

    def state(self, source: str, destination: str) -> PathState:
        return self._path(self._named(source), self._named(destination)).state

    def _cut(self, path: _Path) -> None:
        path.state = PathState.CUT
        path.held.clear()

    def _between(self, source: Iterable[str] | None, destination: Iterable[str] | None) -> list[_Path]:
        sources = sorted(self._world.hosts if source is None else source)
        destinations = sorted(self._world.hosts if destination is None else destination)
        return [self._path(self._named(a), self._named(b)) for a in sources for b in destinations if a != b]

    def _named(self, name: str) -> Host:
        host = self._world.hosts.get(name)
        if host is None:
            raise ConfigurationError(f"there is no host {name!r}; there are {', '.join(self._world.hosts)}")
        return host

    def _path(self, source: Host, destination: Host) -> _Path:
        key = source.name, destination.name
        path = self._paths.get(key)
        if path is None:
            faults = Faults(self._world.rng(f"path/{source.name}/{destination.name}"))
            path = self._paths[key] = _Path(source, destination, self._default, faults)
        return path

    def by_ip(self, ip: str) -> Host | None:
        host = self._hosts.get(ip)
        if host is None:
            for name in self._world.hosts:
                self._hosts[self._world.hosts[name].ip] = self._world.hosts[name]
            host = self._hosts.get(ip)
        return host

    # -- datagrams -----------------------------------------------------------------------------------------------

    def send(self, source: SimulatedSocket, data: bytes, address: Address) -> None:
        self.datagrams += 1
        self.bytes += len(data)
        local = source.local_address
        self._world.note("send", source.host.name, f"{local[0]}:{local[1]} {address[0]}:{address[1]}", data)
        destination = self.by_ip(str(address[0]))
        if destination is None:
            self._world.after(0, source.trouble, address, Trouble("the host is unreachable", refused=False))
            return
        if destination is source.host:
            self._world.after(0, self._arrive, destination, data, local, address)
            return
        path = self._path(source.host, destination)
        if len(data) > path.conditions.mtu:
            self._count("too_long")
            limit = path.conditions.mtu
            cause = f"datagrams are too long; the path carries {limit} bytes"
            self._world.after(0, source.trouble, address, Trouble(cause, refused=False, limit=limit))
        elif path.state is PathState.CUT:
            self._count("partition")
        elif path.state is PathState.HELD:
            self._count("hold")
            if len(path.held) < _HELD:
                path.held.append((data, local, address))
        else:
            self._pass(path, data, local, address)

    def _pass(self, path: _Path, data: bytes, local: Address, address: Address) -> None:
        """Through the rules, and on their way."""
        if path.latency_ns is not None and not path.faults.rules:
            self._world.after(path.latency_ns, self._arrive, path.destination, data, local, address)
            return
        datagram = Datagram(data, address, True, local)
        now_ns = self._world.now_ns
        rng = path.faults.rng
        deliveries = path.chain.judge(datagram, now_ns, rng) or []
        if not deliveries:
            self._count("loss")
        elif path.faults.rules:
            further: list[Delivery] = []
            for delivery in deliveries:
                changed = Datagram(delivery.data, address, True, local)
                after = path.faults.judge(changed, now_ns + delivery.delay_ns)
                further += [Delivery(each.data, delivery.delay_ns + each.delay_ns) for each in after]
            deliveries = further
        if len(deliveries) > 1:
            self._count("duplicate")
        for delivery in deliveries:
            if delivery.data is not data and delivery.data != data:
                self._count("corrupt")
            self._world.after(delivery.delay_ns, self._arrive, path.destination, delivery.data, local, address)

    def _arrive(self, host: Host, data: bytes, source: Address, address: Address) -> None:
        if not host.up:
            return
        socket = host.sockets.get(int(address[1]))
        if socket is not None:
            socket.receive(data, source)
            return
        sender = self.by_ip(str(source[0]))
        if sender is None or (sender is not host and self._path(host, sender).state is not PathState.OPEN):
            return
        back = 0 if sender is host else self._path(host, sender).conditions.latency_ns
        self._world.after(back, self._refused, sender, int(source[1]), address)

    def _refused(self, sender: Host, port: int, address: Address) -> None:
        socket = sender.sockets.get(port)
        if socket is not None:
            socket.trouble(address, Trouble())

    def _count(self, kind: str) -> None:
        self.injected[kind] = self.injected.get(kind, 0) + 1


class SimulatedSocket:
    """A UDP socket of a simulated process; a `DatagramIO`. port 0 takes a free one.

    Raises AddressError where the port is in use. It ends with its process, or by `close`.
    """

    def __init__(self, loop: HostLoop, port: int = 0) -> None:
        self.host = host = loop.host
        if loop.dead:
            raise AddressError(f"the process on {host.name} is gone")
        if not 0 <= port <= 65535:
            raise AddressError(f"{port} is no port")
        if port == 0:
            port = next((free for free in range(_EPHEMERAL, 65536) if free not in host.sockets), 0)
        if port == 0 or port in host.sockets:
            raise AddressError(f"cannot listen on {host.ip}:{port}: the port is in use")
        self.local_address: Address = (host.ip, port)
        self.lost_backlog = 0
        self._loop = loop
        self._buffer: deque[tuple[bytes, Address]] = deque()
        self._bytes = 0
        self._reads = False
        self._on_datagrams: OnDatagrams | None = None
        self._on_unreachable: OnUnreachable | None = None
        host.sockets[port] = self

    def start(self, on_datagrams: OnDatagrams, on_unreachable: OnUnreachable) -> None:
        if self.host.sockets.get(self.local_address[1]) is not self:
            raise AddressError(f"the socket on {self.local_address[0]}:{self.local_address[1]} is closed")
        self._on_datagrams = on_datagrams
        self._on_unreachable = on_unreachable
        self._wake()

    def send(self, datagrams: Sequence[tuple[bytes, Address]]) -> None:
        host = self.host
        if host.sockets.get(self.local_address[1]) is not self:
            return
        network = host.world.network
        for data, address in datagrams:
            network.send(self, bytes(data), address)

    async def resolve(self, host: str, port: int) -> list[Address]:
        ip = host if is_numeric(host) else self.host.world.resolve(host)
        if ip is None:
            raise AddressError(f"cannot resolve {host!r}: the simulated world has no such host")
        return [canonical((ip, port))]

    def close(self) -> None:
        if self.host.sockets.get(self.local_address[1]) is self:
            self.sever()

    def sever(self) -> None:
        """Gone, with what it had received; nothing is called any more."""
        del self.host.sockets[self.local_address[1]]
        self._on_datagrams = self._on_unreachable = None
        self._buffer.clear()

    # -- from the network ----------------------------------------------------------------------------------------

    def receive(self, data: bytes, source: Address) -> None:
        if self._bytes + len(data) > _BUFFER:
            self.lost_backlog += 1
            self.host.world.network._count("buffer_full")
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
        if self._buffer and not self._reads and self._on_datagrams is not None:
            self._reads = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._reads = False
        batch: list[tuple[bytes, Address]] = []
        while self._buffer and len(batch) < _BATCH:
            data, source = self._buffer.popleft()
            self._bytes -= len(data)
            batch.append((data, source))
        if batch and self._on_datagrams is not None:
            self._on_datagrams(batch)
        self._wake()
