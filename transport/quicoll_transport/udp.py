"""Datagrams in and out: the interface that endpoints use, the real socket, and a wrapper that applies faults.

The socket is drained in batches, so that an endpoint answers once for many packets. Linux's error queue (IP_RECVERR)
tells which peer's port is closed; that turns a killed process on a reachable host into news within a heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from .errors import AddressError
from .faults import Datagram, Faults
from .quic import Address

__all__ = ["DatagramIO", "FaultyIO", "UdpSocket", "is_numeric", "parse_address", "resolve"]

OnDatagrams = Callable[[list[tuple[bytes, Address]]], None]
OnUnreachable = Callable[[Address], None]

_BATCH = 128  # datagrams taken before the endpoint answers; more would delay acknowledgements
_DATAGRAM = 65536
_BUFFER = 4 << 20  # socket buffers asked for; the kernel may grant less
_BACKLOG = 2048  # datagrams kept while the socket is full; beyond it they are lost, which QUIC repairs
_IP_RECVERR, _IPV6_RECVERR, _MSG_ERRQUEUE = 11, 25, 0x2000


class DatagramIO(Protocol):
    """What an endpoint needs of a network. Every method is called on the endpoint's loop."""

    @property
    def local_address(self) -> Address: ...
    def start(self, on_datagrams: OnDatagrams, on_unreachable: OnUnreachable) -> None: ...
    def send(self, datagrams: Sequence[tuple[bytes, Address]]) -> None: ...
    def close(self) -> None: ...


def parse_address(text: str, *, default_port: int | None = None) -> tuple[str, int]:
    """ "host:port" or "[v6]:port" to a pair; raises AddressError for anything else."""
    host, separator, port = text.strip().rpartition(":")
    if not separator and default_port is not None:
        host, port = port, str(default_port)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not port.isdigit() or int(port) > 65535:
        raise AddressError(f"{text!r} is not host:port")
    return host, int(port)


def is_numeric(host: str) -> bool:
    """Whether `host` is an IP address, so that sending to it needs no look-up (which would block the loop)."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def resolve(host: str, port: int, *, loop: asyncio.AbstractEventLoop, like: Address) -> Address:
    """The first address of `host` in the family of `like`, a socket's own address; raises AddressError."""
    family = socket.AF_INET6 if ":" in str(like[0]) else socket.AF_INET
    try:
        found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"cannot resolve {host!r}: {error}") from error
    return found[0][4]


class UdpSocket:
    """One UDP socket on the running loop. `bind` a numeric or resolvable host; port 0 takes a free one."""

    def __init__(self, host: str, port: int, *, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._backlog: deque[tuple[bytes, Address]] = deque()
        self._on_datagrams: OnDatagrams | None = None
        self._on_unreachable: OnUnreachable | None = None
        self.lost_backlog = 0
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
            )[0]
        except (OSError, UnicodeError) as error:
            raise AddressError(f"cannot resolve {host!r}: {error}") from error
        self._socket = socket.socket(family, kind, proto)
        try:
            self._socket.setblocking(False)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                with contextlib.suppress(OSError):  # a wish; the kernel's limits stand
                    self._socket.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
            self._errors = sys.platform == "linux"
            if self._errors:
                if family == socket.AF_INET6:
                    self._socket.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
                else:
                    self._socket.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
            self._socket.bind(address)
        except OSError as error:
            self._socket.close()
            why = "the port is in use" if error.errno == errno.EADDRINUSE else str(error)
            raise AddressError(f"cannot listen on {host}:{port}: {why}") from error
        self._family = family
        self.local_address: Address = self._socket.getsockname()

    def start(self, on_datagrams: OnDatagrams, on_unreachable: OnUnreachable) -> None:
        self._on_datagrams = on_datagrams
        self._on_unreachable = on_unreachable
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
        self._backlog.clear()

    def _readable(self) -> None:
        batch: list[tuple[bytes, Address]] = []
        receive = self._socket.recvfrom
        while len(batch) < _BATCH:
            try:
                batch.append(receive(_DATAGRAM))
            except BlockingIOError:
                break
            except OSError:  # a queued ICMP error, reported on the next call of any kind
                if not self._read_errors():
                    break
        if batch and self._on_datagrams is not None:
            self._on_datagrams(batch)

    def _read_errors(self) -> bool:
        """Drain the error queue; True when there was something in it."""
        if not self._errors:
            return False
        found = False
        while self._socket.fileno() >= 0:
            try:
                _, ancillary, _, address = self._socket.recvmsg(64, 512, _MSG_ERRQUEUE)
            except OSError:
                break
            found = True
            for _level, _kind, data in ancillary:
                # struct sock_extended_err starts with the errno of the failed send (ip(7))
                code = int.from_bytes(data[:4], sys.byteorder)
                if code in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH) and self._on_unreachable:
                    self._on_unreachable(address)
        return found

    def send(self, datagrams: Sequence[tuple[bytes, Address]]) -> None:
        if self._backlog:
            self._keep(datagrams)
            return
        sendto = self._socket.sendto
        for i, (data, address) in enumerate(datagrams):
            for _ in range(2):
                try:
                    sendto(data, address)
                except BlockingIOError:
                    self._loop.add_writer(self._socket.fileno(), self._writable)
                    self._keep(datagrams[i:])
                    return
                except OSError:
                    # An ICMP error of an earlier datagram is reported here and consumed; then this one goes. A
                    # datagram that cannot be sent at all is lost, as on any network.
                    self._read_errors()
                    continue
                break

    def _keep(self, datagrams: Sequence[tuple[bytes, Address]]) -> None:
        room = _BACKLOG - len(self._backlog)
        self._backlog.extend(datagrams[:room])
        self.lost_backlog += max(0, len(datagrams) - room)

    def _writable(self) -> None:
        self._loop.remove_writer(self._socket.fileno())
        waiting, self._backlog = list(self._backlog), deque()
        self.send(waiting)


class FaultyIO:
    """A DatagramIO with faults between it and the endpoint, in both directions."""

    def __init__(self, inner: DatagramIO, faults: Faults, *, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._faults = faults
        self._loop = loop
        self._on_datagrams: OnDatagrams | None = None
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._next_timer = 0
        self._closed = False

    @property
    def local_address(self) -> Address:
        return self._inner.local_address

    def start(self, on_datagrams: OnDatagrams, on_unreachable: OnUnreachable) -> None:
        self._on_datagrams = on_datagrams
        self._inner.start(self._received, on_unreachable)

    def close(self) -> None:
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._inner.close()

    def send(self, datagrams: Sequence[tuple[bytes, Address]]) -> None:
        if not self._faults.rules:
            self._inner.send(datagrams)
            return
        self._pass(datagrams, outgoing=True)

    def _received(self, datagrams: list[tuple[bytes, Address]]) -> None:
        if not self._faults.rules:
            self._deliver(datagrams, outgoing=False)
            return
        self._pass(datagrams, outgoing=False)

    def _pass(self, datagrams: Sequence[tuple[bytes, Address]], *, outgoing: bool) -> None:
        now_ns = round(self._loop.time() * 1e9)
        direct: list[tuple[bytes, Address]] = []
        for data, address in datagrams:
            for delivery in self._faults.judge(Datagram(data, address, outgoing), now_ns):
                if delivery.delay_ns <= 0:
                    direct.append((delivery.data, address))
                    continue
                key = self._next_timer
                self._next_timer += 1
                self._timers[key] = self._loop.call_later(
                    delivery.delay_ns / 1e9, self._later, key, delivery.data, address, outgoing
                )
        if direct:
            self._deliver(direct, outgoing=outgoing)

    def _later(self, key: int, data: bytes, address: Address, outgoing: bool) -> None:
        del self._timers[key]
        self._deliver([(data, address)], outgoing=outgoing)

    def _deliver(self, datagrams: Sequence[tuple[bytes, Address]], *, outgoing: bool) -> None:
        if self._closed:
            return
        if outgoing:
            self._inner.send(datagrams)
        elif self._on_datagrams is not None:
            self._on_datagrams(list(datagrams))
