"""Paths between simulated hosts, and what becomes of each datagram on them.

A host is attached to the network by its `Interface`, which has the sockets of its process. Every ordered pair of hosts
has a path of its own, with `Conditions` and a state. A datagram passes, in this order:

    size       more than the path's MTU: lost at once, and the sender learns how much passes (ICMP, RFC 1191)
    state      OPEN: on; CUT: lost; HELD: kept until the path is released or repaired, then sent on in order
    rules      the same as on a real socket (quicoll_transport.faults.compose): those of the path's conditions, then,
               if none of them dropped it, those that were added
    access     the uplink of the sender before the rules, the downlink of the receiver after them, where hosts have an
               access link (access.py): their queues are shared by all paths of the host
    arrival    the host is off: lost; nothing listens on the port: the sender learns it (ICMP, RFC 792) one latency
               later; the socket's buffer is full: lost; else the process reads it when it runs

A host may have further addresses, each at an interface of its own with paths of its own, so that one of its networks or
providers may fail while another works. Who names the host means all of them. Its processes have sockets at each.

A host may be behind an address translator (nat.py). Its own address then means something to those behind the same one
alone; a datagram for it from elsewhere is lost. Others see, and send to, what the translator makes of it.

    state     cut     hold    repair
    OPEN      CUT     HELD    OPEN
    CUT       CUT     HELD    OPEN
    HELD      CUT     HELD    OPEN     what was held is sent on; by a cut it is lost

What is under way when a path is cut still arrives; it had left. `injected` counts what was done to datagrams, by kind.
Calls name hosts; nothing depends on the order of the names.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quicoll_transport.errors import ConfigurationError
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
from quicoll_transport.net.trouble import Trouble
from quicoll_transport.sim.nat import Nat, NatKind

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.sim.access import AccessLink
    from quicoll_transport.sim.timeline import Timeline

__all__ = ["Conditions", "Interface", "Network", "OpenSocket", "PathState"]

_HELD = 65536  # datagrams that a held path keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The properties of a path in one direction.

    Attributes:
        latency_ns: What each datagram takes.
        jitter_ns: Up to so much is added, at random; the order is kept.
        loss: Probability that a datagram is lost.
        burst: Mean length of a burst of losses; 1 for independent losses.
        duplicate: Probability that a datagram arrives twice.
        reorder: Probability that a datagram is overtaken by later ones.
        reorder_ns: How much later a reordered datagram arrives.
        corrupt: Probability that bits of a datagram are flipped.
        bytes_per_second: Rate of a bottleneck; None for no bottleneck.
        queue_bytes: What the queue of the bottleneck holds; what exceeds it is lost.
        mtu: Largest UDP payload in bytes. Larger datagrams are lost, and the sender learns the limit.
    Raises:
        ConfigurationError: The MTU is below 1200, which QUIC needs, or another value is out of its range.
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
        """Return new rules for one path: what keeps the order comes first, what breaks it last."""
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


class OpenSocket(Protocol):
    """What the network asks of a socket. `SimulatedSocket` is one."""

    local_address: Address

    @property
    def interface(self) -> Interface: ...

    def receive(self, data: bytes, source: Address) -> None:
        """Take a datagram that has arrived."""

    def trouble(self, address: Address, trouble: Trouble) -> None:
        """Take note that a datagram to `address` did not arrive."""

    def sever(self) -> None:
        """Close the socket at once."""


class Interface:
    """A host's place in the network.

    Attributes:
        network: The network; `Network.attach` makes its interfaces.
        name: Of the host; of a further one the host's, a slash, and its number from 2 on.
        ip: Its address.
        further: The host's other interfaces.
        up: Whether the host is switched on. It answers nothing at all while it is not.
        sockets: Open sockets, by port.
        nat: The translator that it is behind; None: it is behind none.
        uplink: What all that it sends passes first; None: nothing bounds it.
        downlink: What all that it receives passes last; None: nothing bounds it.
    """

    def __init__(self, network: Network, name: str, ip: str) -> None:
        self.network = network
        self.name = name
        self.ip = ip
        self.up = True
        self.sockets: dict[int, OpenSocket] = {}
        self.nat: Nat | None = None
        self.uplink: Rate | None = None
        self.downlink: Rate | None = None
        self.further: list[Interface] = []

    def sever(self) -> None:
        """Close every socket of the host: their process has ended."""
        for interface in (self, *self.further):
            for port in list(interface.sockets):
                interface.sockets[port].sever()

    def switch(self, *, up: bool) -> None:
        """Switch the host on or off."""
        for interface in (self, *self.further):
            interface.up = up


class _Path:
    __slots__ = ("chain", "conditions", "destination", "faults", "held", "latency_ns", "source", "state")

    def __init__(self, source: Interface, destination: Interface, conditions: Conditions, faults: Faults) -> None:
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
    """All paths of a world. A path has the `default` conditions until it is given others.

    Attributes:
        injected: Number of datagrams that were lost, held, duplicated or changed, by kind.
        datagrams: Number of datagrams sent.
        bytes: Their bytes.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._default = Conditions()
        self._paths: dict[tuple[str, str], _Path] = {}
        self._interfaces: dict[str, Interface] = {}  # by name
        self._by_ip: dict[str, Interface] = {}
        self._nats: dict[str, Nat] = {}  # by public address
        self._access_rng = timeline.rng("access")  # rules ask for one; a rate draws nothing
        self.injected: dict[str, int] = {}
        self.datagrams = 0
        self.bytes = 0

    def attach(self, name: str, ip: str) -> Interface:
        """Add a host."""
        interface = self._interfaces[name] = self._by_ip[ip] = Interface(self, name, ip)
        return interface

    def attach_further(self, name: str, ip: str) -> Interface:
        """Give a host another address."""
        first = self._named(name)
        interface = self.attach(f"{name}/{len(first.further) + 2}", ip)
        first.further.append(interface)
        return interface

    def resolve(self, name: str) -> str | None:
        """Return the address of a host; None where there is no such host."""
        interface = self._interfaces.get(name)
        return None if interface is None else interface.ip

    def by_ip(self, ip: str) -> Interface | None:
        """Return the interface with this address; None where there is none."""
        return self._by_ip.get(ip)

    def add_nat(self, kind: NatKind, *hosts: str, lifetime_ns: int = 120_000_000_000) -> Nat:
        """Put hosts behind an address translator with a public address of its own, and return it.

        Args:
            kind: How it maps and filters.
            hosts: Names. What they have under way is not touched.
            lifetime_ns: How long a mapping lives that nothing goes out by.
        Raises:
            ConfigurationError: There is no such host, or it is behind a translator already.
        """
        inside = [self._named(name) for name in hosts]
        if taken := [interface.name for interface in inside if interface.nat is not None]:
            raise ConfigurationError(f"{', '.join(taken)}: behind a translator already")
        number = len(self._nats) + 1
        nat = Nat(f"198.18.{number >> 8}.{number & 255}", kind, lifetime_ns=lifetime_ns)
        self._nats[nat.ip] = nat
        for interface in inside:
            interface.nat = nat
        return nat

    # -- conditions ----------------------------------------------------------------------------------------------

    @property
    def default(self) -> Conditions:
        """Conditions of paths that were not given others."""
        return self._default

    def set_conditions(
        self, conditions: Conditions, source: Iterable[str] | None = None, destination: Iterable[str] | None = None
    ) -> None:
        """Set conditions of paths, one way.

        Args:
            conditions: The conditions.
            source: Names of the hosts that send; None for all.
            destination: Names of the hosts that receive; None for all. Without both, new paths get them too.
        """
        if source is None and destination is None:
            self._default = conditions
            for key in self._paths:
                self._paths[key].set(conditions)
            return
        for path in self._between(source, destination):
            path.set(conditions)

    def set_access(self, access: AccessLink, hosts: Iterable[str] | None = None) -> None:
        """Give hosts an access link; its queues are empty, and what was in one before still arrives.

        Args:
            access: The link; `AccessLink()` bounds nothing, as without one.
            hosts: Names of the hosts; None for all that there are now.
        Raises:
            ConfigurationError: There is no such host.
        """
        for interface in [self._named(name) for name in (self._interfaces if hosts is None else hosts)]:
            interface.uplink, interface.downlink = access.uplink(), access.downlink()

    def add_rule(self, rule: Rule, source: str, destination: str) -> Installed:
        """Add a rule to one path beyond its conditions; the handle counts its effects and removes it."""
        return self._path(self._named(source), self._named(destination)).faults.add(rule)

    # -- state ---------------------------------------------------------------------------------------------------

    def partition(self, one: Iterable[str], other: Iterable[str], *, one_way: bool = False) -> None:
        """Lose everything between two groups of hosts until the paths are repaired.

        Args:
            one: Names of one group.
            other: Names of the other.
            one_way: Lose only what goes from `one` to `other`.
        """
        one, other = list(one), list(other)
        for path in self._between(one, other):
            self._cut(path)
        if not one_way:
            for path in self._between(other, one):
                self._cut(path)

    def unplug(self, name: str, number: int) -> None:
        """Lose everything that goes to one address of a host, or comes from there, until it is repaired.

        Args:
            name: Of the host.
            number: Of the address; 1 is the first one.
        Raises:
            ConfigurationError: There is none.
        """
        own = self._all_of([name])
        if not 1 <= number <= len(own):
            raise ConfigurationError(f"{name} has {len(own)} addresses, and none of number {number}")
        for other in self._all_of(self._interfaces):
            if other not in own:
                self._cut(self._path(own[number - 1], other))
                self._cut(self._path(other, own[number - 1]))

    def hold(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Keep everything from `one` to `other`, one way, until it is repaired."""
        for path in self._between(one, other):
            path.state = PathState.HELD

    def repair(self, one: Iterable[str] | None = None, other: Iterable[str] | None = None) -> None:
        """Open the paths between these, both ways; all of them without arguments. What was held is sent on."""
        one = list(self._interfaces) if one is None else list(one)
        other = list(self._interfaces) if other is None else list(other)
        for path in [*self._between(one, other), *self._between(other, one)]:
            path.state = PathState.OPEN
            while path.held:
                self._pass(path, *path.held.popleft())

    def state(self, source: str, destination: str) -> PathState:
        """Return the state of the path from `source` to `destination`."""
        return self._path(self._named(source), self._named(destination)).state

    def _cut(self, path: _Path) -> None:
        path.state = PathState.CUT
        path.held.clear()

    def _between(self, source: Iterable[str] | None, destination: Iterable[str] | None) -> list[_Path]:
        sources = self._all_of(self._interfaces if source is None else source)
        destinations = self._all_of(self._interfaces if destination is None else destination)
        return [self._path(a, b) for a in sources for b in destinations if a is not b]

    def _all_of(self, names: Iterable[str]) -> list[Interface]:
        """Return the interfaces of hosts, in the order of their names."""
        found: dict[str, Interface] = {}
        for name in sorted(names):
            host = self._named(name)
            found |= {each.name: each for each in (host, *host.further)}
        return list(found.values())

    def _named(self, name: str) -> Interface:
        host = self._interfaces.get(name)
        if host is None:
            raise ConfigurationError(f"there is no host {name!r}; there are {', '.join(self._interfaces)}")
        return host

    def _path(self, source: Interface, destination: Interface) -> _Path:
        key = source.name, destination.name
        path = self._paths.get(key)
        if path is None:
            faults = Faults(self._timeline.rng(f"path/{source.name}/{destination.name}"))
            path = self._paths[key] = _Path(source, destination, self._default, faults)
        return path

    # -- datagrams -----------------------------------------------------------------------------------------------

    def send(self, source: OpenSocket, data: bytes, address: Address) -> None:
        """Send a datagram of a socket."""
        self.datagrams += 1
        self.bytes += len(data)
        local = source.local_address
        self._timeline.note("send", source.interface.name, f"{local[0]}:{local[1]} {address[0]}:{address[1]}", data)
        destination = self.by_ip(str(address[0]))
        if self._nats:
            routed = self._translate(source.interface, local, destination, address)
            if routed is None:
                self.count("nat")
                return
            local, destination = routed
        if destination is None:
            self._timeline.carry(0, source.trouble, address, Trouble("the host is unreachable", refused=False))
            return
        if destination is source.interface:
            self._timeline.carry(0, self._arrive, destination, data, local, address)
            return
        path = self._path(source.interface, destination)
        if len(data) > path.conditions.mtu:
            self.count("too_long")
            limit = path.conditions.mtu
            cause = f"datagrams are too long; the path carries {limit} bytes"
            self._timeline.carry(0, source.trouble, address, Trouble(cause, refused=False, limit=limit))
        elif path.state is PathState.CUT:
            self.count("partition")
        elif path.state is PathState.HELD:
            self.count("hold")
            if len(path.held) < _HELD:
                path.held.append((data, local, address))
        else:
            self._pass(path, data, local, address)

    def _translate(
        self, sender: Interface, local: Address, destination: Interface | None, address: Address
    ) -> tuple[Address, Interface | None] | None:
        """Return what a datagram's source is where it arrives, and which host that is; None: it gets nowhere.

        Which host is behind a port is looked up when it is sent; whether it passes, when it arrives.
        """
        now_ns, nat, outer = self._timeline.now_ns, sender.nat, self._nats.get(str(address[0]))
        if outer is not None:
            inside = None if outer is nat else outer.inside(int(address[1]), now_ns)
            destination = None if inside is None else self.by_ip(str(inside[0]))
            if destination is None:
                if nat is not None:
                    nat.outward(local, address, now_ns)
                return None
        elif destination is not None and destination.nat is not None and destination.nat is not nat:
            return None
        if nat is not None and (destination is None or destination.nat is not nat):
            local = nat.outward(local, address, now_ns)
        return local, destination

    def _pass(self, path: _Path, data: bytes, local: Address, address: Address) -> None:
        """Apply the path's rules and send on what they let through."""
        uplink, destination = path.source.uplink, path.destination
        arrive = self._arrive if destination.downlink is None else self._enter
        if path.latency_ns is not None and not path.faults.rules and uplink is None:
            self._timeline.carry(path.latency_ns, arrive, destination, data, local, address)
            return
        datagram = Datagram(data, address, True, local)
        now_ns = self._timeline.now_ns
        rng = path.faults.rng
        waited_ns = 0
        if uplink is not None:
            sent = uplink.decide(datagram, now_ns, rng)
            if not sent:
                self.count("uplink")
                return
            waited_ns = sent[0].delay_ns
            now_ns += waited_ns
        deliveries = path.chain.decide(datagram, now_ns, rng) or []
        if not deliveries:
            self.count("loss")
        elif path.faults.rules:
            further: list[Delivery] = []
            for delivery in deliveries:
                changed = Datagram(delivery.data, address, True, local)
                after = path.faults.decide(changed, now_ns + delivery.delay_ns)
                further += [Delivery(each.data, delivery.delay_ns + each.delay_ns) for each in after]
            deliveries = further
        if len(deliveries) > 1:
            self.count("duplicate")
        for delivery in deliveries:
            if delivery.data is not data and delivery.data != data:
                self.count("corrupt")
            self._timeline.carry(waited_ns + delivery.delay_ns, arrive, destination, delivery.data, local, address)

    def _enter(self, host: Interface, data: bytes, source: Address, address: Address) -> None:
        """Let a datagram that has come over its path pass the host's downlink."""
        downlink = host.downlink
        if downlink is None:
            self._arrive(host, data, source, address)
            return
        passed = downlink.decide(Datagram(data, source, False, address), self._timeline.now_ns, self._access_rng)
        if not passed:
            self.count("downlink")
            return
        self._timeline.carry(passed[0].delay_ns, self._arrive, host, data, source, address)

    def _arrive(self, host: Interface, data: bytes, source: Address, address: Address) -> None:
        if not host.up:
            return
        nat, port = self._nats.get(str(address[0])), int(address[1])
        if nat is not None:
            inside = nat.inward(port, source, self._timeline.now_ns)
            if inside is None:
                self.count("nat")
                return
            port = int(inside[1])
        socket = host.sockets.get(port)
        if socket is not None:
            socket.receive(data, source)
            return
        sender, port = self._sender(source)
        if sender is None or (sender is not host and self._path(host, sender).state is not PathState.OPEN):
            return
        back = 0 if sender is host else self._path(host, sender).conditions.latency_ns
        self._timeline.carry(back, self._refused, sender, port, address)

    def _sender(self, source: Address) -> tuple[Interface | None, int]:
        """Return the host and the port of its own that a datagram's source stands for."""
        nat = self._nats.get(str(source[0]))
        inside = source if nat is None else nat.inside(int(source[1]), self._timeline.now_ns)
        return (None, 0) if inside is None else (self.by_ip(str(inside[0])), int(inside[1]))

    def _refused(self, sender: Interface, port: int, address: Address) -> None:
        socket = sender.sockets.get(port)
        if socket is not None:
            socket.trouble(address, Trouble())

    def count(self, kind: str) -> None:
        """Count what was done to a datagram."""
        self.injected[kind] = self.injected.get(kind, 0) + 1
