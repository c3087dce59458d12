"""A UDP socket on a local address: opened as this library needs it, and bound; or why it cannot be.

Not compiled: once for each endpoint, and each error has the system's own as its cause.
"""

from __future__ import annotations

import contextlib
import errno
import socket

from quicoll_transport.errors import AddressError
from quicoll_transport.net import arrival, offload
from quicoll_transport.net.addresses import Address, format_address
from quicoll_transport.net.trouble import report_errors

__all__ = ["bound_socket"]

_BUFFER = 4 << 20  # socket buffers asked for; the kernel may grant less

# Why a local address cannot be bound.
_BINDING = {
    errno.EADDRINUSE: "the port is in use",
    errno.EACCES: "no permission (ports below 1024 need it)",
    errno.EPERM: "no permission",
    errno.EADDRNOTAVAIL: "it is no address of this host",
    errno.EAFNOSUPPORT: "the address family is not available here",
    errno.ENODEV: "there is no such interface",
    errno.EINVAL: "no valid address to listen on (a link-local address needs its interface, fe80::1%eth0)",
    errno.EMFILE: "this process has too many open files",
    errno.ENFILE: "this host has too many open files",
}


def bound_socket(
    host: str, port: int, *, v6only: bool, errors: bool, many: bool, stamped: bool
) -> socket.socket:  # fmt: skip
    """Return a socket that does not block, on the first address of a host that can be bound.

    Args:
        host: Numeric or resolvable.
        port: 0 takes a free one.
        v6only: Whether one on "::" leaves IPv4 to others.
        errors: Whether the system queues ICMP errors for it.
        many: Whether the system is asked to give datagrams together.
        stamped: Whether it is asked when they came.
    Raises:
        AddressError: There is no such address; it names the host and what is wrong with it.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise AddressError(f"cannot resolve {host!r}: {error}") from error
    failed: OSError | None = None
    for family, kind, proto, _, address in found:
        try:
            return _open(family, kind, proto, address, v6only=v6only, errors=errors, many=many, stamped=stamped)
        except OSError as error:
            failed = failed or error
    assert failed is not None  # noqa: S101 - getaddrinfo finds something or raises
    why = _BINDING.get(failed.errno or 0, str(failed))
    raise AddressError(f"cannot listen on {format_address((host, port))}: {why}") from failed


def _open(
    family: int, kind: int, proto: int, address: Address, *, v6only: bool, errors: bool, many: bool, stamped: bool
) -> socket.socket:
    opened = socket.socket(family, kind, proto)
    try:
        opened.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            with contextlib.suppress(OSError):  # a wish; the kernel's limits stand
                opened.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        if family == socket.AF_INET6:  # never the host's default, net.ipv6.bindv6only
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(v6only or address[0] != "::"))
        if errors:
            report_errors(opened)
        if many:
            with contextlib.suppress(OSError):  # then they come one by one
                offload.coalesce(opened)
        if stamped:
            with contextlib.suppress(OSError):  # then nobody knows
                arrival.stamp(opened)
        opened.bind(address)
    except BaseException:
        opened.close()
        raise
    return opened
