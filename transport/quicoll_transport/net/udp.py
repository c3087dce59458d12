"""Datagrams in and out: the interface that endpoints use, and the real socket.

What the socket has is read in one go, up to a bound in bytes, so that an endpoint answers once for many packets and
others on the loop have their turn. What one sender has sent in it is a run, whatever others sent between. Runs of
datagrams go and come in one system call where the system can do that (offload.py); elsewhere one by one, and nobody
above sees the difference.

What arrives may wait for more. Where datagrams come one after the other for a while, each wake-up costs more than the
datagrams that it brings. So who is given runs says for how long the next ones may lie (`OnRuns`), and until then nobody
looks at the socket:

    waked      the loop watches the socket, and reads it as soon as it has something
    paused     it does not; a timer reads what has come meanwhile, together. It is paused again, or waked, as who was
               given that says; waked where there was nothing, where that raised, and where the bound left something

A run on its way out. `_gone` counts its datagrams that are dealt with: sent, or refused by the system for good.

    sent                    on to the next piece: 64 datagrams or 65507 bytes at most
    EAGAIN, ENOBUFS         back-pressure: what is left of the run is copied to the backlog and goes first, before
                            whatever comes later, once the socket has room
    an ICMP error           of an earlier datagram, reported by this call and consumed; then the piece goes
    any other error         of a piece of several: they go one by one, and each has its own outcome; if they go and the
                            error was EIO or EINVAL, it was the batching that failed, and this socket batches no more.
                            Of one datagram: it is lost, and its destination is in trouble

So nothing inside a run is lost, doubled or overtaken because the socket was full. The backlog is bounded in bytes;
what it cannot hold is lost, which QUIC repairs.

Linux's error queue tells which peer's port is closed; that turns a killed process on a reachable host into news within
a heartbeat. What the system says of a destination becomes `Trouble`; that and AddressError are the only ways in which
an OSError leaves this module.

One socket serves both families: bound to "::" it takes IPv4 peers too, as mapped addresses (RFC 4291 section 2.5.5.2),
which do not show outside: addresses here are `addresses.canonical`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from quicoll_transport.errors import AddressError
from quicoll_transport.net import arrival, offload
from quicoll_transport.net.addresses import Address, canonical, format_address, is_numeric, is_v6
from quicoll_transport.net.binding import bound_socket
from quicoll_transport.net.resolver import Resolver, scope_of
from quicoll_transport.net.runs import DatagramRun, RunsBySender
from quicoll_transport.net.trouble import Trouble, queued_errors, trouble_of

__all__ = [
    "DatagramIO",
    "OnRuns",
    "OnUnreachable",
    "UdpSocket",
]

_DRAIN = 1 << 20  # bytes taken before the endpoint answers; more would delay acknowledgements
_READS = 512  # system calls for them, likewise: small datagrams cost as much as large ones
_PIECE = 65536  # bytes that one system call may give
_ANCILLARY = offload.ANCILLARY + arrival.ANCILLARY
_TOGETHER_NS = 1_000_000  # between the first and the last of a run, for they have one time of arrival
_BACKLOG = 4 << 20  # bytes kept while the socket is full; beyond it they are lost, which QUIC repairs
_KEPT_RUN = 512  # bytes that a run in the backlog costs beside its datagrams
_ADDRESSES = 4096  # whose other form is remembered
_TROUBLES = 256  # destinations with trouble told in one iteration of the loop; the rest will have it again
_AGAIN = 0.001  # seconds until a send is tried again after ENOBUFS, which no event ends
_MSG_ERRQUEUE = 0x2000


OnRuns = Callable[[list[DatagramRun]], float | None]
OnUnreachable = Callable[[Address, Trouble], None]


class DatagramIO(Protocol):
    """A network, as an endpoint needs it. Every method is called on the endpoint's loop; addresses are canonical.

    start: on_runs gets what has arrived, that of each sender in its order, and returns for how many seconds what comes
    next may wait for more, at most; None: not at all. on_unreachable is never called from within `send`. Memory of
    runs, both ways: see runs.py. close: nothing is called any more, sending does nothing.
    resolve: the addresses of a host, of the families that can be reached from here, in the resolver's order; raises
    AddressError. It may take long, and can be cancelled.
    """

    @property
    def local_address(self) -> Address: ...
    def start(self, on_runs: OnRuns, on_unreachable: OnUnreachable) -> None: ...
    def send(self, runs: Sequence[DatagramRun]) -> None: ...
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
        self._backlog: deque[DatagramRun] = deque()
        self._backlog_bytes = 0
        self._begun = 0  # datagrams of the first run in the backlog that are gone
        self._slab = memoryview(bytearray(_DRAIN + _PIECE))
        self._beside = memoryview(bytearray(_DRAIN + _PIECE))
        self._on_runs: OnRuns | None = None
        self._on_unreachable: OnUnreachable | None = None
        self._again: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None  # its end, while the loop does not watch the socket
        self._troubles: dict[Address, Trouble] = {}
        self._telling: asyncio.Handle | None = None
        self._canonical: dict[Address, Address] = {}
        self._wire: dict[Address, Address] = {}
        self.lost_backlog = 0
        self.lost_unsendable = 0
        self._errors = sys.platform == "linux"
        able = offload.supported()
        self._sends_many = able.sends
        self._receives_many = able.receives
        self._stamped = arrival.can_stamp()
        self._socket = bound_socket(
            host, port, v6only=v6only, errors=self._errors, many=self._receives_many, stamped=self._stamped
        )
        self._v6 = self._socket.family == socket.AF_INET6
        both = self._v6 and not self._socket.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        self._families = (False, True) if both else (self._v6,)  # by is_v6
        self.local_address: Address = canonical(self._socket.getsockname(), scope_of)

    def start(self, on_runs: OnRuns, on_unreachable: OnUnreachable) -> None:
        if self._socket.fileno() < 0:
            raise AddressError(f"the socket on {format_address(self.local_address)} is closed")
        self._on_runs = on_runs
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
        for handle in (self._again, self._telling, self._pause):
            if handle is not None:
                handle.cancel()
        self._again = self._telling = self._pause = None
        self._on_runs = self._on_unreachable = None
        self._backlog.clear()
        self._backlog_bytes = 0
        self._troubles.clear()

    # -- receiving -----------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        patience: float | None = None
        try:
            runs, emptied = self._take()
            if runs and self._on_runs is not None:
                patience = self._on_runs(runs)
                if not emptied:  # what follows is here already
                    patience = None
        finally:
            if self._on_runs is not None:  # not closed in there
                self._watch(patience)

    def _watch(self, patience: float | None) -> None:
        """Pause for so long, or have the loop watch the socket."""
        if patience:
            if self._pause is None:
                self._loop.remove_reader(self._socket.fileno())
            self._pause = self._loop.call_later(patience, self._readable)
        elif self._pause is not None:
            self._pause = None
            self._loop.add_reader(self._socket.fileno(), self._readable)

    def _take(self) -> tuple[list[DatagramRun], bool]:
        """Read what there is, within the bounds, and say whether that was all; it stays in the slab until the next
        call."""
        taken = RunsBySender(self._slab, _TOGETHER_NS)
        emptied = False
        for _ in range(_READS):
            try:
                length, each, source, at_ns = self._read(self._slab[taken.filled : taken.filled + _PIECE])
            except BlockingIOError:
                emptied = True
                if not taken.filled:  # woken by the error queue alone, or it would wake us for ever
                    self._read_errors()
                break
            except OSError:  # a queued ICMP error, reported on the next call of any kind
                if not self._read_errors():
                    break
                continue
            if not length:
                continue  # an empty datagram is in no run
            taken.add(length, each, source, at_ns)
            if taken.filled >= _DRAIN:
                break
        wall_ns = time.time_ns() if self._stamped else 0
        runs: list[DatagramRun] = []
        for run, at_ns in taken.runs(self._beside):
            if self._v6:
                run.address = self._from_wire(run.address)
            run.waited_ns = arrival.waited(at_ns, wall_ns)
            runs.append(run)
        return runs, emptied

    def _read(self, into: memoryview) -> tuple[int, int, Address, int]:
        """Read once; return the number of bytes, the size of each datagram in them, who sent them, and when they came.

        That is in nanoseconds of the wall's clock; 0 where the system does not say it.
        """
        if not self._receives_many and not self._stamped:
            length, source = self._socket.recvfrom_into(into)
            return length, length, source, 0
        length, ancillary, _, source = self._socket.recvmsg_into([into], _ANCILLARY)
        return length, offload.coalesced_size(ancillary, length), source, arrival.stamp_of(ancillary)

    def _from_wire(self, address: Address) -> Address:
        known = self._canonical.get(address)
        if known is None:
            if len(self._canonical) >= _ADDRESSES:  # strangers can fill it; it costs only time to fill again
                self._canonical.clear()
            known = self._canonical[address] = canonical(address, scope_of)
        return known

    def _read_errors(self, sending: Address | None = None) -> bool:
        """Drain the error queue; True when there was something in it.

        sending: the destination of the call that failed. Where Linux refuses an IPv4 datagram for its size, its report
        names the host and port 0.
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
            for code, mtu in queued_errors(ancillary) if address else ():
                told = self._from_wire(address)
                if told[1] == 0 and sending is not None and told[0] == sending[0]:
                    told = sending
                self._trouble(told, code, mtu=mtu)
        return found

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, runs: Sequence[DatagramRun]) -> None:
        """Send, now or when the socket has room. What cannot be sent is lost, as on any network; the destination's
        trouble is told."""
        if self._socket.fileno() < 0:
            return
        for run in runs:
            gone = 0 if self._backlog else self._gone(run)
            if gone < len(run):
                self._keep(run.part(gone, len(run)))

    def _gone(self, run: DatagramRun) -> int:
        """Send a run; return how many datagrams are dealt with. If not all: the socket is full, and will wake us."""
        address, size, count = run.address, run.size, len(run)
        if not self._v6 and len(address) != 2:  # sendto would raise a TypeError
            self._refused(address, errno.EAFNOSUPPORT, count)
            return count
        wire = self._to_wire(address) if self._v6 else address
        most = max(1, min(offload.MOST_SEGMENTS, offload.MOST_BYTES // size)) if self._sends_many else 1
        gone, together = 0, 0  # together: the error of a piece of several
        while gone < count:
            step = min(most, count - gone)
            code = self._attempt(run.memory[gone * size : (gone + step) * size], size, wire, address)
            if code == errno.EAGAIN:
                break
            if code and step > 1:
                most, together = 1, code
                continue
            if code:
                self._refused(address, code, 1)
            elif together in (errno.EIO, errno.EINVAL):
                self._sends_many = False
            gone += step
        return gone

    def _attempt(self, memory: memoryview, size: int, wire: Address, address: Address) -> int:
        """Return 0 when it was sent, EAGAIN when the socket is full, or the error with which it cannot be sent."""
        code = 0
        for _ in range(3):  # ICMP errors of earlier datagrams come up here; what fails every time is this one's own
            try:
                if len(memory) > size:
                    self._socket.sendmsg([memory], offload.segment_size(size), 0, wire)
                else:
                    self._socket.sendto(memory, wire)
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._writable)
                return errno.EAGAIN
            except OSError as error:
                code = error.errno or errno.EIO
                if code == errno.ENOBUFS:
                    self._again = self._again or self._loop.call_later(_AGAIN, self._writable)
                    return errno.EAGAIN
                self._read_errors(address)
            else:
                return 0
        return code

    def _to_wire(self, address: Address) -> Address:
        known = self._wire.get(address)
        if known is None:
            if len(self._wire) >= _ADDRESSES:
                self._wire.clear()
            known = address if is_v6(address) else ("::ffff:" + str(address[0]), address[1], 0, 0)
            self._wire[address] = known
        return known

    def _keep(self, run: DatagramRun) -> None:
        """Copy a run to the end of the backlog, as far as it has room."""
        count = len(run)
        fits = min(count, max(0, _BACKLOG - self._backlog_bytes - _KEPT_RUN) // run.size)
        if fits:
            kept = run.part(0, fits).kept()
            self._backlog.append(kept)
            self._backlog_bytes += len(kept.memory) + _KEPT_RUN
        self.lost_backlog += count - fits

    def _writable(self) -> None:
        self._again = None
        self._loop.remove_writer(self._socket.fileno())
        while self._backlog:
            run = self._backlog[0]
            self._begun += self._gone(run.part(self._begun, len(run)))
            if self._begun < len(run):
                return
            self._begun = 0
            self._backlog.popleft()
            self._backlog_bytes -= len(run.memory) + _KEPT_RUN

    # -- trouble -------------------------------------------------------------------------------------------------

    def _refused(self, address: Address, code: int, count: int) -> None:
        self.lost_unsendable += count
        self._trouble(address, errno.EAFNOSUPPORT if is_v6(address) not in self._families else code)

    def _trouble(self, address: Address, code: int, *, mtu: int = 0) -> None:
        """Tell it soon, once for each destination: never from within a `send`, whose caller is in the middle of it."""
        if len(self._troubles) < _TROUBLES:
            self._troubles.setdefault(address, trouble_of(address, code, mtu))
        if self._telling is None:
            self._telling = self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = None
        troubles, self._troubles = self._troubles, {}
        for address, trouble in troubles.items():
            if self._on_unreachable is not None:
                self._on_unreachable(address, trouble)
