"""Addresses: reading them, one form for each, and the order in which those of a peer are dialled.

One form. The same peer shows as ("192.0.2.1", 1) on an IPv4 socket, as ("::ffff:192.0.2.1", 1, 0, 0) on a socket for
both families, and a link-local one as ("fe80::1%eth0", 1, 0, 2) or with the number alone. Everything above the socket
sees `canonical` addresses only: (host, port) for IPv4, mapped or not, and (host, port, 0, scope) for IPv6 without the
zone in the host. So the addresses of links, of ICMP errors and in logs can be compared.

Dialling. A peer may have several addresses, a name may stand for several. They are tried in rounds, one at a time, in
the order of RFC 8305 section 4: families alternate, and the one that worked last goes first. An attempt that fails is
followed by the next at once. One that is not answered is given up after the Connection Attempt Delay (RFC 8305 section
5, 250 ms), and that doubles with every round, so that a slow path is not given up for ever. Attempts are not raced:
a link has one connection, and a handshake costs both sides more than the wait does. With a single address an attempt
has all of the handshake's time.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from quicoll_transport.errors import AddressError

__all__ = [
    "MAX_CANDIDATES",
    "Address",
    "DialPlan",
    "canonical",
    "format_address",
    "is_numeric",
    "is_unspecified",
    "is_v6",
    "parse_address",
]

Address = tuple[Any, ...]

MAX_CANDIDATES = 16  # addresses of one round; a resolver's answer is bounded by nothing else
_ATTEMPT_DELAY_NS = 250_000_000


def parse_address(text: str, *, default_port: int | None = None) -> tuple[str, int]:
    """Parse "host:port" or "[v6]:port". Raises AddressError for anything else."""
    host, separator, port = text.strip().rpartition(":")
    if default_port is not None and (not separator or port.endswith("]") or is_numeric(text.strip())):
        host, port = text.strip(), str(default_port)
    elif ":" in host and not host.startswith("["):  # which of the colons is the one before the port?
        raise AddressError(f"{text!r} is not host:port; an IPv6 address stands in brackets, [{host}]:{port}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise AddressError(f"{text!r} is not host:port")
    return host, int(port)


def is_numeric(host: str) -> bool:
    """Return whether `host` is an IP address, so that sending to it needs no look-up (which would block the loop)."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_unspecified(host: str) -> bool:
    """Return whether `host` stands for every address of its host, 0.0.0.0 or ::, which can be bound but not sent to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_v6(address: Address) -> bool:
    """Return whether a canonical address is of IPv6."""
    return ":" in str(address[0])


def canonical(address: Address, scope_of: Callable[[str], int] = int) -> Address:
    """Return the one form of an address; names stay as they are.

    scope_of: the number of a zone, "eth0" or "2" (RFC 4007 section 11); raises AddressError or ValueError for none.
    """
    host, port = str(address[0]), address[1]
    zone = ""
    if "%" in host:
        host, zone = host.split("%", 1)
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return (str(address[0]), port)
    if isinstance(ip, ipaddress.IPv4Address):
        return (str(ip), port)
    if ip.ipv4_mapped is not None:
        return (str(ip.ipv4_mapped), port)
    scope = address[3] if len(address) > 3 else 0
    if not scope and zone:
        try:
            scope = scope_of(zone)
        except ValueError:
            raise AddressError(f"{address[0]!r}: there is no interface {zone!r}") from None
    return (str(ip), port, 0, scope)


def format_address(address: Address) -> str:
    """Return an address for people: 192.0.2.1:1, [2001:db8::1]:1, [fe80::1%2]:1, name:1."""
    host, port = str(address[0]), address[1]
    if ":" not in host:
        return f"{host}:{port}"
    return f"[{host}%{address[3]}]:{port}" if len(address) > 3 and address[3] else f"[{host}]:{port}"


def alternate(addresses: Sequence[Address]) -> list[Address]:
    """Return addresses without repetitions, the families in turn, beginning with that of the first."""
    unique = list(dict.fromkeys(addresses))
    families: tuple[list[Address], list[Address]] = ([], [])
    for address in unique:
        families[is_v6(address) != is_v6(unique[0])].append(address)
    return [address for turn in zip_longest(*families) for address in turn if address is not None]


class DialPlan:
    """Which address of a peer comes next, and how long it may stay silent. See the module's head.

    begin -> next, next, ... until None; `worked` or another `begin` ends the round.
    """

    __slots__ = ("_failed", "_good", "_left", "_rounds", "_several", "current")

    def __init__(self) -> None:
        self._left: deque[Address] = deque()
        self._good: Address | None = None
        self._rounds = 0
        self._several = False
        self._failed: dict[Address, str] = {}
        self.current: Address | None = None

    def begin(self, candidates: Sequence[Address]) -> None:
        """Start a round with these (canonical) addresses, MAX_CANDIDATES of them at most."""
        turns = alternate(candidates)[:MAX_CANDIDATES]
        if self._good in turns:
            turns.remove(self._good)
            turns.insert(0, self._good)
        self._left = deque(turns)
        self._several = len(turns) > 1
        self._rounds += 1
        self._failed.clear()

    @property
    def more(self) -> bool:
        """Whether this round has another address to try."""
        return bool(self._left)

    def next(self) -> Address | None:
        self.current = self._left.popleft() if self._left else None
        return self.current

    def patience_ns(self, most_ns: int) -> int:
        """Return how long the current attempt may be without an answer; `most_ns` when there is nothing else to try."""
        if not self._several:
            return most_ns
        return min(most_ns, _ATTEMPT_DELAY_NS << min(self._rounds - 1, 16))

    def failed(self, reason: str) -> str:
        """Note why the current attempt failed; return the reasons of this round, with addresses if several."""
        if not self._several or self.current is None:
            return reason
        self._failed[self.current] = reason
        return "; ".join(f"{format_address(address)}: {why}" for address, why in self._failed.items())

    def worked(self) -> None:
        """Note that the current attempt made a connection; next time its address goes first."""
        if self.current is not None:
            self._good = self.current
        self._left.clear()
        self._several = False
        self._rounds = 0
