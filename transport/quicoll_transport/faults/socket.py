"""Faults on a real socket: a DatagramIO that carries out what `faults` decides, on the loop's own clock."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quicoll_transport.faults.compose import Datagram, Faults
from quicoll_transport.net.runs import apart, joined

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.net.udp import DatagramIO, OnRuns, OnUnreachable

__all__ = ["FaultyIO"]


class FaultyIO:
    """A DatagramIO with faults between it and the endpoint, in both directions.

    The rules see datagrams, one by one and in order: runs are taken apart first, so how datagrams were batched, here or
    by the kernel, decides nothing.

    Each direction has a queue by due time, equal times in order of decision; so what the rules say about order holds
    also where the loop is late. It keeps `limit` datagrams and `limit_bytes` in each; what does not fit is lost, and
    counted in `overflowed`. On close, what was sent and is still under way goes out at once, by due time: it had left
    here, and it may hold the news of the close. What a Hold keeps, and what was coming in, is gone.
    """

    def __init__(
        self,
        inner: DatagramIO,
        faults: Faults,
        *,
        loop: asyncio.AbstractEventLoop,
        limit: int = 65536,
        limit_bytes: int = 128 << 20,
    ) -> None:
        self._inner = inner
        self._faults = faults
        self._loop = loop
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._on_runs: OnRuns | None = None
        self._queues: dict[bool, list[tuple[int, int, bytes, Address]]] = {True: [], False: []}  # by `outgoing`
        self._bytes = {True: 0, False: 0}
        self._decisions = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._closed = False
        self.overflowed = 0
        faults.wake = self._woken

    @property
    def local_address(self) -> Address:
        return self._inner.local_address

    def start(self, on_runs: OnRuns, on_unreachable: OnUnreachable) -> None:
        self._on_runs = on_runs
        self._inner.start(self._received, on_unreachable)

    async def resolve(self, host: str, port: int) -> list[Address]:
        return await self._inner.resolve(host, port)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._faults.wake == self._woken:
            self._faults.wake = None
        under_way = sorted(self._queues[True])
        if under_way:
            self._inner.send(joined((data, address) for _, _, data, address in under_way))
        for queue in self._queues.values():
            queue.clear()
        self._inner.close()

    def send(self, runs: Sequence[DatagramRun]) -> None:
        if self._closed:
            return
        if not self._faults.rules and not self._queues[True]:
            self._inner.send(runs)
            return
        self._pass(runs, outgoing=True)

    def _received(self, runs: list[DatagramRun]) -> float | None:
        if self._closed:
            return None
        if not self._faults.rules and not self._queues[False]:
            return self._deliver(runs, outgoing=False)
        self._pass(runs, outgoing=False)
        return None

    def _now_ns(self) -> int:
        return round(self._loop.time() * 1e9)

    def _pass(self, runs: Sequence[DatagramRun], *, outgoing: bool) -> None:
        now_ns = self._now_ns()
        local = self._inner.local_address
        for data, address in apart(runs):
            datagram = Datagram(data, address, outgoing, local)
            for delivery in self._faults.decide(datagram, now_ns):
                self._put(outgoing, address, delivery.data, now_ns + max(0, delivery.delay_ns))
        self._deliver_due(now_ns, outgoing=outgoing)
        self._arm()

    def _put(self, outgoing: bool, address: Address, data: bytes, due_ns: int) -> None:
        queue = self._queues[outgoing]
        if len(queue) >= self._limit or self._bytes[outgoing] + len(data) > self._limit_bytes:
            self.overflowed += 1
            return
        self._bytes[outgoing] += len(data)
        self._decisions += 1
        heapq.heappush(queue, (due_ns, self._decisions, data, address))

    def _woken(self) -> None:
        """Queue what was held and is free now, before anything that comes later.

        It is passed on by the timer only: the code that released it may be in the middle of anything.
        """
        if self._closed:
            return
        now_ns = self._now_ns()
        for datagram, deliveries in self._faults.released(now_ns):
            for delivery in deliveries:
                due_ns = now_ns + max(0, delivery.delay_ns)
                self._put(datagram.outgoing, datagram.address, delivery.data, due_ns)
        self._arm()

    def _deliver_due(self, now_ns: int, *, outgoing: bool) -> None:
        queue = self._queues[outgoing]
        due: list[tuple[bytes, Address]] = []
        while queue and queue[0][0] <= now_ns:
            _, _, data, address = heapq.heappop(queue)
            self._bytes[outgoing] -= len(data)
            due.append((data, address))
        if due:
            self._deliver(joined(due), outgoing=outgoing)

    def _arm(self) -> None:
        at = min((queue[0][0] for queue in self._queues.values() if queue), default=None)
        if self._timer is not None:
            if at == self._timer_ns:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None and not self._closed:
            self._timer_ns = at
            self._timer = self._loop.call_at(at / 1e9, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        # A loop's clock is a float and may wake us a little before the time; then nothing would ever be due.
        now_ns = max(self._now_ns(), self._timer_ns)
        for outgoing in (True, False):
            self._deliver_due(now_ns, outgoing=outgoing)
        self._arm()

    def _deliver(self, runs: list[DatagramRun], *, outgoing: bool) -> float | None:
        if self._closed:
            return None
        if outgoing:
            self._inner.send(runs)
        elif self._on_runs is not None:
            return self._on_runs(runs)
        return None
