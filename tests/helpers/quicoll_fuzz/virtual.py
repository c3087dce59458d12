"""A loop whose clock jumps to the next timer, a network in memory, and seeded chance below TLS."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

from quicoll_transport.errors import AddressError
from quicoll_transport.net.addresses import Address
from quicoll_transport.net.runs import DatagramRun, apart, joined
from quicoll_transport.quic import entropy

__all__ = ["MemoryIO", "Net", "Stuck", "VirtualLoop", "run_virtually", "seeded_chance", "today"]

Receive = Callable[[list[DatagramRun]], None]
# What becomes of a datagram: (data, source, destination) -> what is delivered, each with a delay in seconds more.
Tap = Callable[[bytes, Address, Address], list[tuple[float, bytes, Address]]]

LATENCY = 0.0005
_TURNS = 20_000  # of the loop; in so many an honest run gets far


class Stuck(Exception):
    """The loop gave its task up: it turned without end, or waited for what cannot come."""


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: where a selector would wait for `timeout` seconds, the loop's clock has them behind it."""

    loop: VirtualLoop
    turns = 0
    since = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        self.turns += 1
        if self.turns >= _TURNS:
            if self.loop.now - self.since < _TURNS * 1e-7:
                self.loop.give_up(f"the loop turns and time stands still: {self.loop.busy()}")
            self.turns, self.since = 0, self.loop.now
        if not ready:
            if timeout is None:
                self.loop.give_up("nothing is scheduled and nobody can wake this loop: a wait without a deadline")
            else:
                self.loop.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. Hours pass in no time; the order of events depends on nothing outside."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.task: asyncio.Task[None] | None = None  # what this loop is for
        self.stuck = ""
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = 1e-9  # as time() is exact, a timer is due when it says so

    def time(self) -> float:
        return self.now

    def give_up(self, why: str) -> None:
        """End the task that this loop is for; it may clean up."""
        if self.task is None or self.stuck:
            raise RuntimeError(why)
        self.stuck = why
        self.task.cancel()

    def busy(self) -> list[str]:
        """What the loop would do next."""
        ready = [*self._ready, *sorted(self._scheduled)[:3]]
        return [repr(handle) for handle in ready[:5]]

    @property
    def scheduled(self) -> int:
        """Timers that the loop holds, cancelled ones too until asyncio drops them."""
        return len(self._scheduled)


class Net:
    """Datagrams between addresses, each address with a receiver. Counts what goes to and comes from each."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.hosts: dict[Address, Receive] = {}
        self.tap: Tap | None = None
        self.datagrams = 0
        self.to_nobody: dict[Address, int] = {}  # bytes sent to addresses where nobody is
        self.from_nobody: dict[Address, int] = {}
        self._queues: dict[Address, list[tuple[bytes, Address]]] = {}

    def send(self, data: bytes, source: Address, destination: Address) -> None:
        """Send one datagram through the tap."""
        if destination not in self.hosts:
            self.to_nobody[destination] = self.to_nobody.get(destination, 0) + len(data)
        if self.tap is None:
            self.inject(data, source, destination)
            return
        for delay, changed, origin in self.tap(data, source, destination):
            if delay:
                self.loop.call_later(delay, self.inject, changed, origin, destination)
            else:
                self.inject(changed, origin, destination)

    def inject(self, data: bytes, source: Address, destination: Address) -> None:
        """Put a datagram on the wire behind the tap; its source may be anybody."""
        self.datagrams += 1
        if source not in self.hosts:
            self.from_nobody[source] = self.from_nobody.get(source, 0) + len(data)
        if destination not in self.hosts:
            return
        queue = self._queues.get(destination)
        if queue is None:
            queue = self._queues[destination] = []
            self.loop.call_later(LATENCY, self._deliver, destination)
        queue.append((data, source))

    def _deliver(self, destination: Address) -> None:
        queue = self._queues.pop(destination)
        receive = self.hosts.get(destination)
        for start in range(0, len(queue), 32):
            if receive is not None:
                receive(joined(queue[start : start + 32]))


class MemoryIO:
    """The DatagramIO of an endpoint on a Net."""

    def __init__(self, net: Net, address: Address) -> None:
        self.net = net
        self.local_address: Address = address

    def start(self, on_runs: Receive, on_unreachable: Callable[..., None]) -> None:
        self.net.hosts[self.local_address] = on_runs

    def send(self, runs: Sequence[DatagramRun]) -> None:
        for data, address in apart(runs):
            self.net.send(data, self.local_address, address)

    async def resolve(self, host: str, port: int) -> list[Address]:
        raise AddressError(f"there are no names here, so none such as {host!r}")

    def close(self) -> None:
        self.net.hosts.pop(self.local_address, None)


def seeded_chance(seed: str) -> AbstractContextManager[None]:
    """Keys, connection ids, nonces and dates from one seed. For fuzzing only: what is made in here is no secret."""
    return entropy(random.Random(f"{seed}/chance").randbytes, wall_clock=today)


def today() -> datetime:
    """The date in every virtual world."""
    return datetime(2026, 6, 1, 12, tzinfo=UTC)


def run_virtually(main: Callable[[VirtualLoop], Coroutine[Any, Any, None]], *, seed: str) -> None:
    """Run `main` to its end in virtual time, with chance from `seed`. Raises Stuck."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        with seeded_chance(seed):
            loop.task = loop.create_task(main(loop))
            try:
                loop.run_until_complete(loop.task)
            except asyncio.CancelledError:
                raise Stuck(loop.stuck) from None
    finally:
        asyncio.set_event_loop(None)
        loop.close()
