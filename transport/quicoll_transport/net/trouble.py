"""Why datagrams do not reach an address: what the system says of a destination, under a name for people.

Two ways lead here: an error of the call that sends, and Linux's error queue (IP_RECVERR, IPV6_RECVERR; ip(7)), which
has what routers and hosts answered by ICMP, and, where a datagram was too long, how much passes.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll_transport.net.addresses import is_v6

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

__all__ = ["Trouble", "queued_errors", "report_errors", "trouble_of"]

_QUIC_LEAST = 1200  # bytes of UDP payload that QUIC needs of a path (RFC 9000 section 14)
_IP_RECVERR, _IPV6_RECVERR = 11, 25
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_DO = 10, 23, 2
_EXTENDED_ERROR = struct.Struct("=IBBBBII")  # struct sock_extended_err: errno, origin, type, code, pad, info, data

_CAUSES = {
    errno.ECONNREFUSED: "nothing listens there",
    errno.EHOSTUNREACH: "the host is unreachable",
    errno.EHOSTDOWN: "the host is unreachable",
    errno.ENETUNREACH: "the network is unreachable",
    errno.ENETDOWN: "the network interface is down",
    errno.ENODEV: "the network interface is gone",
    errno.ENXIO: "the network interface is gone",
    errno.EADDRNOTAVAIL: "no address here to send from; has the interface gone?",
    errno.EAFNOSUPPORT: "the address family is not available here",
    errno.EACCES: "not permitted (broadcast address, or a firewall)",
    errno.EPERM: "not permitted (a firewall here)",
    errno.EINVAL: "no valid destination (a link-local address needs its interface, fe80::1%eth0)",
    errno.EPROTO: "the host does not speak this protocol",
    errno.ENOPROTOOPT: "the host does not speak this protocol",
}


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why datagrams do not reach an address. cause: for people.

    refused: the host is there and says that nothing listens; other causes may pass. limit: not 0 means only that
    datagrams were too large, and that so many bytes of UDP payload arrive.
    """

    cause: str = _CAUSES[errno.ECONNREFUSED]
    refused: bool = True
    limit: int = 0


def trouble_of(address: Address, code: int, mtu: int = 0) -> Trouble:
    """Return what an error says of a destination.

    Args:
        address: Canonical.
        code: An errno.
        mtu: Of the path, where the error says so; 0: it does not.
    """
    if code != errno.EMSGSIZE:
        cause = _CAUSES.get(code) or f"sending failed: {errno.errorcode.get(code, code)}"
        return Trouble(cause, refused=code == errno.ECONNREFUSED)
    # RFC 791, 8200, 768: headers without options. Without a size only what every path carries is safe.
    limit = mtu - (48 if is_v6(address) else 28) if mtu else _QUIC_LEAST
    cause = f"datagrams are too long; the path carries {limit} bytes"
    if limit < _QUIC_LEAST:
        return Trouble(f"{cause}, and QUIC needs {_QUIC_LEAST}", refused=False)
    return Trouble(cause, refused=False, limit=limit)


def report_errors(opened: socket.socket) -> None:
    """Have Linux queue ICMP errors for a socket, and let nothing that it sends be fragmented.

    QUIC must not be fragmented (RFC 9000 section 14), so what is too long for the path comes back as EMSGSIZE with the
    path's MTU. An IPv6 socket gets both families' options: IPv4 peers go through it too.
    """
    opened.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
    opened.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_DO)
    if opened.family == socket.AF_INET6:
        opened.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
        opened.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_DO)


def queued_errors(ancillary: Iterable[tuple[int, int, bytes]]) -> list[tuple[int, int]]:
    """Return (errno, MTU of the path or 0) of each error in what the error queue gave."""
    ours = ((socket.IPPROTO_IP, _IP_RECVERR), (socket.IPPROTO_IPV6, _IPV6_RECVERR))
    found: list[tuple[int, int]] = []
    for level, kind, data in ancillary:
        if (level, kind) in ours and len(data) >= _EXTENDED_ERROR.size:
            code, _, _, _, _, info, _ = _EXTENDED_ERROR.unpack_from(data)
            found.append((code, info if code == errno.EMSGSIZE else 0))
    return found
