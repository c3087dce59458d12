"""Addresses: reading them, and one form for each.

One form. The same peer shows as ("192.0.2.1", 1) on an IPv4 socket, as ("::ffff:192.0.2.1", 1, 0, 0) on a socket for
both families, and a link-local one as ("fe80::1%eth0", 1, 0, 2) or with the number alone. Everything above the socket
sees `canonical` addresses only: (host, port) for IPv4, mapped or not, and (host, port, 0, scope) for IPv6 without the
zone in the host. So the addresses of links, of ICMP errors and in logs can be compared.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

from quicoll_transport.errors import AddressError

__all__ = [
    "Address",
    "canonical",
    "format_address",
    "is_detour",
    "is_loopback",
    "is_numeric",
    "is_unspecified",
    "is_v6",
    "parse_address",
    "parse_addresses",
]

Address = tuple[Any, ...]


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
        raise AddressError(f"{text!r} is not host:port, with a port from 0 to 65535")
    return host, int(port)


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """Parse the addresses of one host, "host:port" with plus signs between them. Raises AddressError as for one."""
    return [parse_address(part) for part in text.split("+")]


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


def is_detour(address: Address) -> bool:
    """Return whether an address stands for a way through a relay (quicoll_transport.relay): one of 240.0.0.0/8."""
    return str(address[0]).startswith("240.")


def is_loopback(address: Address) -> bool:
    """Return whether a canonical address is one by which a host reaches itself (RFC 1122 section 3.2.1.3, RFC 4291
    section 2.5.3)."""
    host = str(address[0])
    return host.startswith("127.") or host == "::1"


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
    """Return an address for people: 192.0.2.1:1, [2001:db8::1]:1, [fe80::1%2]:1, name:1, "by relay"."""
    host, port = str(address[0]), address[1]
    if is_detour(address):
        return "by relay"
    if ":" not in host:
        return f"{host}:{port}"
    return f"[{host}%{address[3]}]:{port}" if len(address) > 3 and address[3] else f"[{host}]:{port}"
