"""Datagrams in and out: the interface that endpoints use, and the real socket.

The socket is drained in batches, so that an endpoint answers once for many packets. Linux's error queue (IP_RECVERR,
IPV6_RECVERR; ip(7)) tells which peer's port is closed; that turns a killed process on a reachable host into news within
a heartbeat. What the system says of a destination becomes `Trouble`, a name for people and what follows from it; that
and AddressError are the only ways in which an OSError leaves this module.

One socket serves both families: bound to "::" it takes IPv4 peers too, as mapped addresses (RFC 4291 section 2.5.5.2),
which do not show outside: addresses here are `addresses.canonical`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quicoll_transport.errors import AddressError
from quicoll_transport.net.addresses import Address, canonical, format_address, is_numeric, is_v6
from quicoll_transport.net.resolver import Resolver, scope_of

__all__ = [
    "DatagramIO",
    "OnDatagrams",
    "OnUnreachable",
    "Trouble",
    "UdpSocket",
]

_BATCH = 128  # datagrams taken before the endpoint answers; more would delay acknowledgements
_DATAGRAM = 65536
_BUFFER = 4 << 20  # socket buffers asked for; the kernel may grant less
_BACKLOG = 2048  # datagrams kept while the socket is full; beyond it they are lost, which QUIC repairs
_ADDRESSES = 4096  # whose other form is remembered
_TROUBLES = 256  # destinations with trouble told in one iteration of the loop; the rest will have it again
_AGAIN = 0.001  # seconds until a send is tried again after ENOBUFS, which no event ends
_QUIC_LEAST = 1200  # bytes of UDP payload that QUIC needs of a path (RFC 9000 section 14)
_IP_RECVERR, _IPV6_RECVERR, _MSG_ERRQUEUE = 11, 25, 0x2000
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_DO = 10, 23, 2
_EXTENDED_ERROR = struct.Struct("=IBBBBII")  # struct sock_extended_err: errno, origin, type, code, pad, info, data

# What an error of sending, or an ICMP message, says of the destination.
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


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why datagrams do not reach an address. cause: for people.

    refused: the host is there and says that nothing listens; other causes may pass. limit: not 0 means only that
    datagrams were too large, and that so many bytes of UDP payload arrive.
    """

    cause: str = _CAUSES[errno.ECONNREFUSED]
    refused: bool = True
    limit: int = 0


OnDatagrams = Callable[[list[tuple[bytes, Address]]], None]
OnUnreachable = Callable[[Address, Trouble], None]


class DatagramIO(Protocol):
    """A network, as an endpoint needs it. Every method is called on the endpoint's loop; addresses are canonical.

    start: on_unreachable is never called from within `send`. close: nothing is called any more, sending does nothing.
    resolve: the addresses of a host, of the families that can be reached from here, in the resolver's order; raises
    AddressError. It may take long, and can be cancelled.
    """

    @property
    def local_address(self) -> Address: ...
    def start(self, on_datagrams: OnDatagrams, on_unreachable: OnUnreachable) -> None: ...
    def send(self, datagrams: Sequence[tuple[bytes, Address]]) -> None: ...
    async def resolve(self, host: str, port: int) -> list[Address]: ...
    def close(self) -> None: ...


class UdpSocket:
    """One UDP socket on the running loop.

    host: numeric or resolvable, the first of its addresses that can be bound is taken; "::" listens to IPv4 as well,
    unless `v6only`. port: 0 takes a free one. Raises AddressError, which names the address and what is wrong with it.

    lost_backlog: datagrams lost because the socket was full for long. lost_unsendable: because the system refused them.
    """

    def __init__(self, host: str, port: int, *, loop: asyncio.AbstractEventLoop, v6only: bool = False) -> None:
        self._loop = loop
        self._resolver = Resolver()
        self._backlog: deque[tuple[bytes, Address]] = deque()
        self._on_datagrams: OnDatagrams | None = None
        self._on_unreachable: OnUnreachable | None = None
        self._again: asyncio.TimerHandle | None = None
        self._troubles: dict[Address, Trouble] = {}
        self._telling: asyncio.Handle | None = None
        self._canonical: dict[Address, Address] = {}
        self._wire: dict[Address, Address] = {}
        self.lost_backlog = 0
        self.lost_unsendable = 0
        self._errors = sys.platform == "linux"
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError, OverflowError) as error:
            raise AddressError(f"cannot resolve {host!r}: {error}") from error
        failed: OSError | None = None
        for family, kind, proto, _, address in found:
            try:
                self._socket = self._open(family, kind, proto, address, v6only=v6only)
            except OSError as error:
                failed = failed or error
                continue
            break
        else:
            assert failed is not None  # noqa: S101 - getaddrinfo finds something or raises
            why = _BINDING.get(failed.errno or 0, str(failed))
            raise AddressError(f"cannot listen on {format_address((host, port))}: {why}") from failed
        self._v6 = self._socket.family == socket.AF_INET6
        both = self._v6 and not self._socket.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        self._families = (False, True) if both else (self._v6,)  # by is_v6
        self.local_address: Address = canonical(self._socket.getsockname(), scope_of)

    def _open(self, family: int, kind: int, proto: int, address: Address, *, v6only: bool) -> socket.socket:
        opened = socket.socket(family, kind, proto)
        try:
            opened.setblocking(False)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                with contextlib.suppress(OSError):  # a wish; the kernel's limits stand
                    opened.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
            if family == socket.AF_INET6:  # never the host's default, net.ipv6.bindv6only
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(v6only or address[0] != "::"))
            if self._errors:
                # Both also for IPv4 through an IPv6 socket. QUIC must not be fragmented (RFC 9000 section 14), so what
                # is too long for the path comes back as EMSGSIZE with the path's MTU, see _trouble.
                opened.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
                opened.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_DO)
                if family == socket.AF_INET6:
                    opened.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
                    opened.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_DO)
            opened.bind(address)
        except BaseException:
            opened.close()
            raise
        return opened

    def start(self, on_datagrams: OnDatagrams, on_unreachable: OnUnreachable) -> None:
        if self._socket.fileno() < 0:
            raise AddressError(f"the socket on {format_address(self.local_address)} is closed")
        self._on_datagrams = on_datagrams
        self._on_unreachable = on_unreachable
        self._loop.add_reader(self._socket.fileno(), self._readable)

    async def resolve(self, host: str, port: int) -> list[Address]:
        if is_numeric(host):
            return [canonical((host, port), scope_of)]  # scope: in the host, fe80::1%eth0
        # A socket on "::" is for both families, unless it was made for one: then sending says so, the next is tried.
        either = self.local_address[0] == "::"
        family = socket.AF_UNSPEC if either else socket.AF_INET6 if self._v6 else socket.AF_INET
        return await self._resolver.resolve(host, port, family=family)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
        for handle in (self._again, self._telling):
            if handle is not None:
                handle.cancel()
        self._again = self._telling = None
        self._on_datagrams = self._on_unreachable = None
        self._backlog.clear()
        self._troubles.clear()

    # -- receiving -----------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        batch: list[tuple[bytes, Address]] = []
        receive = self._socket.recvfrom
        while len(batch) < _BATCH:
            try:
                batch.append(receive(_DATAGRAM))
            except BlockingIOError:
                if not batch:  # woken by the error queue alone, or it would wake us for ever
                    self._read_errors()
                break
            except OSError:  # a queued ICMP error, reported on the next call of any kind
                if not self._read_errors():
                    break
        if batch and self._on_datagrams is not None:
            if self._v6:
                batch = [(data, self._from_wire(address)) for data, address in batch]
            self._on_datagrams(batch)

    def _from_wire(self, address: Address) -> Address:
        known = self._canonical.get(address)
        if known is None:
            if len(self._canonical) >= _ADDRESSES:  # strangers can fill it; it costs only time to fill again
                self._canonical.clear()
            known = self._canonical[address] = canonical(address, scope_of)
        return known

    def _read_errors(self, sending: Address | None = None) -> bool:
        """Drain the error queue; True when there was something in it.

        sending: the destination of the `sendto` that failed. Where Linux refuses an IPv4 datagram for its size, its
        report names the host and port 0.
        """
        if not self._errors:
            return False
        found = False
        while self._socket.fileno() >= 0:
            try:
                _, ancillary, _, address = self._socket.recvmsg(64, 512, _MSG_ERRQUEUE)
            except OSError:
                break
            found = True
            for level, kind, data in ancillary:
                ours = (level, kind) in ((socket.IPPROTO_IP, _IP_RECVERR), (socket.IPPROTO_IPV6, _IPV6_RECVERR))
                if ours and len(data) >= _EXTENDED_ERROR.size and address:
                    code, _, _, _, _, info, _ = _EXTENDED_ERROR.unpack_from(data)
                    told = self._from_wire(address)
                    if told[1] == 0 and sending is not None and told[0] == sending[0]:
                        told = sending
                    self._trouble(told, code, mtu=info if code == errno.EMSGSIZE else 0)
        return found

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, datagrams: Sequence[tuple[bytes, Address]]) -> None:
        """Send, now or when the socket has room. What cannot be sent is lost, as on any network; the destination's
        trouble is told."""
        if self._backlog:
            self._keep(datagrams)
        elif self._socket.fileno() >= 0:
            self._send(datagrams)

    def _send(self, datagrams: Sequence[tuple[bytes, Address]]) -> None:
        sendto = self._socket.sendto
        for i, (data, address) in enumerate(datagrams):
            if not self._v6 and len(address) != 2:  # sendto would raise a TypeError
                self.lost_unsendable += 1
                self._trouble(address, errno.EAFNOSUPPORT)
                continue
            code = 0
            for _ in range(3):
                try:
                    sendto(data, self._to_wire(address) if self._v6 else address)
                except BlockingIOError:
                    self._loop.add_writer(self._socket.fileno(), self._writable)
                    self._keep(datagrams[i:])
                    return
                except OSError as error:
                    # An ICMP error of an earlier datagram is reported here and consumed; then this one goes. What
                    # fails every time is this one's own.
                    code = error.errno or errno.EIO
                    if code == errno.ENOBUFS:
                        self._again = self._again or self._loop.call_later(_AGAIN, self._writable)
                        self._keep(datagrams[i:])
                        return
                    self._read_errors(address)
                    continue
                code = 0
                break
            if code != 0:
                self.lost_unsendable += 1
                self._trouble(address, errno.EAFNOSUPPORT if is_v6(address) not in self._families else code)

    def _to_wire(self, address: Address) -> Address:
        known = self._wire.get(address)
        if known is None:
            if len(self._wire) >= _ADDRESSES:
                self._wire.clear()
            known = address if is_v6(address) else ("::ffff:" + str(address[0]), address[1], 0, 0)
            self._wire[address] = known
        return known

    def _keep(self, datagrams: Sequence[tuple[bytes, Address]]) -> None:
        room = _BACKLOG - len(self._backlog)
        self._backlog.extend(datagrams[:room])
        self.lost_backlog += max(0, len(datagrams) - room)

    def _writable(self) -> None:
        self._again = None
        self._loop.remove_writer(self._socket.fileno())
        waiting, self._backlog = list(self._backlog), deque()
        self._send(waiting)

    # -- trouble -------------------------------------------------------------------------------------------------

    def _trouble(self, address: Address, code: int, *, mtu: int = 0) -> None:
        """Tell it soon, once for each destination: never from within a `send`, whose caller is in the middle of it."""
        if code == errno.EMSGSIZE:
            # RFC 791, 8200, 768: headers without options. Without a size only what every path carries is safe.
            limit = mtu - (48 if is_v6(address) else 28) if mtu else _QUIC_LEAST
            cause = f"datagrams are too long; the path carries {limit} bytes"
            if limit < _QUIC_LEAST:
                trouble = Trouble(f"{cause}, and QUIC needs {_QUIC_LEAST}", refused=False)
            else:
                trouble = Trouble(cause, refused=False, limit=limit)
        else:
            cause = _CAUSES.get(code) or f"sending failed: {errno.errorcode.get(code, code)}"
            trouble = Trouble(cause, refused=code == errno.ECONNREFUSED)
        if len(self._troubles) < _TROUBLES:
            self._troubles.setdefault(address, trouble)
        if self._telling is None:
            self._telling = self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = None
        troubles, self._troubles = self._troubles, {}
        for address, trouble in troubles.items():
            if self._on_unreachable is not None:
                self._on_unreachable(address, trouble)
