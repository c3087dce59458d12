"""Groups in memory: the few collectives by which ranks hand over a state, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from quicoll.errors import PeerError
from quicoll.numerics.buffers import source as read
from quicoll.numerics.destinations import allocate, destination

__all__ = ["Hub", "MemoryGroup"]


class Hub:
    """What the ranks of one group exchange.

    tamper: changes what the n-th message from one rank to another brings. mishear: changes what a rank hears of another
    in the n-th gather, by (number, sender, hearer, value). log: each operation once, in order.
    """

    def __init__(
        self,
        world: int,
        tamper: Callable[[int, Any], Any] = lambda number, value: value,
        mishear: Callable[[int, int, int, Any], Any] = lambda number, sender, hearer, value: value,
    ) -> None:
        self.world = world
        self.tamper = tamper
        self.mishear = mishear
        self.log: list[str] = []
        self.messages = 0
        self.gathered: list[dict[int, Any]] = []
        self.channels: dict[tuple[int, int], asyncio.Queue[Any]] = {}
        self.changed = asyncio.Condition()
        self.failed = False
        self.met: dict[int, None] = {}

    async def gather(self, number: int, rank: int, value: Any) -> dict[int, Any]:
        async with self.changed:
            if number == len(self.gathered):
                self.gathered.append({})
                self.log.append("all_gather")
            given = self.gathered[number]
            given[rank] = value
            self.changed.notify_all()
            await self.changed.wait_for(lambda: len(given) == self.world or self.failed)
            if len(given) < self.world:
                raise PeerError("a rank failed")
            return given

    async def send(self, sender: int, to: int, value: Any) -> None:
        self.log.append(f"{sender} to {to}")
        value = self.tamper(self.messages, value)
        self.messages += 1
        self.channels.setdefault((sender, to), asyncio.Queue()).put_nowait(value)

    async def recv(self, sender: int, to: int) -> Any:
        queue = self.channels.setdefault((sender, to), asyncio.Queue())
        getting = asyncio.ensure_future(queue.get())
        failing = asyncio.ensure_future(self._failing())
        await asyncio.wait({getting, failing}, return_when=asyncio.FIRST_COMPLETED)
        failing.cancel()
        if not getting.done():
            getting.cancel()
            raise PeerError("a rank failed")
        return getting.result()

    async def meet(self, rank: int) -> None:
        """The barrier; there is one in a group's life."""
        async with self.changed:
            if not self.met:
                self.log.append("barrier")
            self.met[rank] = None
            self.changed.notify_all()
            await self.changed.wait_for(lambda: len(self.met) == self.world or self.failed)
            if len(self.met) < self.world:
                raise PeerError("a rank failed")

    async def _failing(self) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.failed)

    async def fail(self) -> None:
        async with self.changed:
            self.failed = True
            self.changed.notify_all()


class MemoryGroup:
    """One rank's side of a Hub. As with a real group, an operation is under way as soon as it is called."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.world_size = hub.world
        self.number = 0

    def all_gather(self, x: Any, *, counts: Sequence[int] | None = None) -> Awaitable[Any]:
        self.number += 1
        return _begun(self._all_gather(self.number - 1, x, counts))

    async def _all_gather(self, number: int, x: Any, counts: Sequence[int] | None) -> Any:
        given = await self.hub.gather(number, self.rank, x)
        assert counts is None or [len(given[rank]) for rank in range(self.hub.world)] == [*counts]
        heard = [self.hub.mishear(number, rank, self.rank, given[rank].copy()) for rank in range(self.hub.world)]
        return np.concatenate(heard)

    async def barrier(self, *, timeout: float) -> None:
        await self.hub.meet(self.rank)

    def send(self, x: Any, *, to: int) -> Awaitable[None]:
        several = isinstance(x, list)
        data = [read(each).flat.copy() for each in x] if several else read(x).flat.copy()
        return _begun(self.hub.send(self.rank, to, data))

    def recv(self, like: Any, *, source: int, out: Any = None) -> Awaitable[Any]:
        return _begun(self._recv(like, source, out))

    async def _recv(self, like: Any, source: int, out: Any) -> Any:
        value = await self.hub.recv(source, self.rank)
        if isinstance(like, list):
            return value
        target = allocate(read(like)) if out is None else destination(out, read(like))
        return target.commit(value)


def _begun(work: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody awaits it
    return task
