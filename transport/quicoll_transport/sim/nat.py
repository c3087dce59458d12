"""Address translators (NAT) in front of simulated hosts.

A translator has one public address. What a host behind it sends goes out from a port of that address, the *mapping* of
the socket; what comes for the port is passed in to the socket, if the *filter* lets it. RFC 4787 has the words, and the
kinds differ in both:

    kind                      one mapping for each        passed in is what comes from
    FULL_CONE                 socket                      anywhere
    RESTRICTED_CONE           socket                      a host that the socket has sent to
    PORT_RESTRICTED_CONE      socket                      an address and port that the socket has sent to
    SYMMETRIC                 socket and destination      that destination

A mapping, and what a filter knows, lives for `lifetime_ns` after the last datagram that went out by it; `forget` ends
all of them at once, as a router does that starts anew. The next datagram out gets another port. What comes for a port
that stands for nothing, or that the filter stops, is lost without a word. Nothing that comes in keeps a mapping alive,
and nothing is turned back inside (no hairpinning): the hosts behind one translator reach each other by their own
addresses.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quicoll_transport.errors import ConfigurationError

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

__all__ = ["Nat", "NatKind"]

_FIRST_PORT = 20000
_PORTS = 40000  # then they begin anew


class NatKind(enum.Enum):
    FULL_CONE = "full-cone"
    RESTRICTED_CONE = "restricted-cone"
    PORT_RESTRICTED_CONE = "port-restricted-cone"
    SYMMETRIC = "symmetric"


@dataclass(slots=True)
class _Mapping:
    """inside: the socket's address. key: by what it is found. sent_ns: when something went out last, by destination."""

    inside: Address
    key: tuple[Address, Address | None]
    last_ns: int
    sent_ns: dict[Address, int] = field(default_factory=dict)


class Nat:
    """See the module's head; `Network.add_nat` makes them.

    Attributes:
        ip: Its public address.
        kind: How it maps and filters.
        expired: Mappings that were looked for and had run out.
    """

    def __init__(self, ip: str, kind: NatKind, *, lifetime_ns: int) -> None:
        if lifetime_ns <= 0:
            raise ConfigurationError(f"a mapping lives for more than {lifetime_ns} ns")
        self.ip = ip
        self.kind = kind
        self.expired = 0
        self._lifetime_ns = lifetime_ns
        self._ports: dict[int, _Mapping] = {}
        self._by_key: dict[tuple[Address, Address | None], int] = {}
        self._given = 0

    def outward(self, inside: Address, destination: Address, now_ns: int) -> Address:
        """Return where a datagram that goes out comes from, for who gets it.

        Args:
            inside: The socket's address.
            destination: Where it is sent.
            now_ns: The time.
        """
        target = destination[:2]
        key = (inside, target if self.kind is NatKind.SYMMETRIC else None)
        port = self._by_key.get(key)
        mapping = None if port is None else self._living(port, now_ns)
        if port is None or mapping is None:
            port = self._free_port(now_ns)
            mapping = self._ports[port] = _Mapping(inside, key, now_ns)
            self._by_key[key] = port
        mapping.last_ns = mapping.sent_ns[target] = now_ns
        return (self.ip, port)

    def inward(self, port: int, source: Address, now_ns: int) -> Address | None:
        """Return the address of the socket that gets what has come; None: it is lost.

        Args:
            port: Of the public address.
            source: Where it comes from.
            now_ns: The time.
        """
        mapping = self._living(port, now_ns)
        if mapping is None:
            return None
        known = [target for target, at_ns in mapping.sent_ns.items() if now_ns - at_ns <= self._lifetime_ns]
        passes = {
            NatKind.FULL_CONE: True,
            NatKind.RESTRICTED_CONE: any(target[0] == source[0] for target in known),
            NatKind.PORT_RESTRICTED_CONE: source[:2] in known,
            NatKind.SYMMETRIC: source[:2] in known,
        }
        return mapping.inside if passes[self.kind] else None

    def inside(self, port: int, now_ns: int) -> Address | None:
        """Return the address of the socket that a port stands for, whatever the filter; None: it stands for none."""
        mapping = self._living(port, now_ns)
        return None if mapping is None else mapping.inside

    def forget(self) -> None:
        """Lose all mappings."""
        self._ports.clear()
        self._by_key.clear()

    def _living(self, port: int, now_ns: int) -> _Mapping | None:
        mapping = self._ports.get(port)
        if mapping is not None and now_ns - mapping.last_ns > self._lifetime_ns:
            del self._ports[port], self._by_key[mapping.key]
            self.expired += 1
            return None
        return mapping

    def _free_port(self, now_ns: int) -> int:
        for _ in range(_PORTS):
            port = _FIRST_PORT + self._given % _PORTS
            self._given += 1
            if self._living(port, now_ns) is None:
                return port
        raise ConfigurationError(f"the translator at {self.ip} has no port left")
