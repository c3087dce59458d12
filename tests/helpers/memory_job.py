"""Jobs in memory, for what ranks do together in steps without a network: `Checkpointer` on n ranks in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from quicoll.errors import PeerError

__all__ = ["MemoryCluster", "MemoryJob"]


class MemoryCluster:
    """The ranks of one view. Whoever is lost fails all that wait, and all that come later."""

    def __init__(self, world_size: int, *, view: int = 1, step: int = 0, nodes: Sequence[str] = ()) -> None:
        self.view = SimpleNamespace(
            view_id=view,
            nodes=tuple(nodes or (f"n{rank}" for rank in range(world_size))),
            members=[SimpleNamespace(site="") for _ in range(world_size)],
        )
        self.jobs = [MemoryJob(self, rank, step) for rank in range(world_size)]
        self.lost = False
        self.bytes: dict[tuple[int, int], int] = {}  # that one rank has sent to another
        self.channels: dict[tuple[int, int], asyncio.Queue[Any]] = {}
        self._given: list[dict[int, Any]] = []
        self._changed = asyncio.Condition()

    async def gather(self, number: int, rank: int, value: Any) -> list[Any]:
        async with self._changed:
            while len(self._given) <= number:
                self._given.append({})
            given = self._given[number]
            given[rank] = value
            self._changed.notify_all()
            await self._changed.wait_for(lambda: len(given) == len(self.jobs) or self.lost)
            if len(given) < len(self.jobs):
                raise PeerError("a rank was lost")
            return [given[each] for each in range(len(self.jobs))]

    async def receive(self, sender: int, to: int) -> Any:
        getting = asyncio.ensure_future(self.channels.setdefault((sender, to), asyncio.Queue()).get())
        async with self._changed:
            losing = asyncio.ensure_future(self._lost())
        await asyncio.wait({getting, losing}, return_when=asyncio.FIRST_COMPLETED)
        losing.cancel()
        if not getting.done():
            getting.cancel()
            raise PeerError("a rank was lost")
        return getting.result()

    async def _lost(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.lost)

    async def lose(self) -> None:
        async with self._changed:
            self.lost = True
            self._changed.notify_all()


class MemoryJob:
    """Stands in for `quicoll.job.Job` and its group."""

    def __init__(self, cluster: MemoryCluster, rank: int, step: int) -> None:
        self.rank = rank
        self.node = cluster.view.nodes[rank]
        self.committed_step = step
        self.config = SimpleNamespace(timeout=30.0)
        self.group = self
        self._cluster = cluster
        self._gathers = 0

    @property
    def view(self) -> Any:
        return self._cluster.view

    @property
    def world_size(self) -> int:
        return len(self._cluster.jobs)

    async def ready(self) -> None:
        pass

    async def all_gather_object(self, value: Any) -> list[Any]:
        self._gathers += 1
        return await self._cluster.gather(self._gathers - 1, self.rank, value)

    def send(self, x: Any, *, to: int) -> Awaitable[None]:
        cluster = self._cluster
        cluster.bytes[self.rank, to] = cluster.bytes.get((self.rank, to), 0) + x.nbytes
        cluster.channels.setdefault((self.rank, to), asyncio.Queue()).put_nowait(x.copy())
        return asyncio.sleep(0)

    def recv(self, like: Any, *, source: int) -> Awaitable[Any]:
        return asyncio.ensure_future(self._cluster.receive(source, self.rank))

    def step(self) -> MemoryStep:
        return MemoryStep(self)


class MemoryStep:
    """Committed when all ranks have come to its end."""

    def __init__(self, job: MemoryJob) -> None:
        self.number = job.committed_step + 1
        self._job = job
        self._callbacks: list[Callable[[], None]] = []
        self.on_commit = self._callbacks.append

    async def __aenter__(self) -> MemoryStep:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            await self._job.all_gather_object("vote")
            for callback in self._callbacks:
                callback()
            self._job.committed_step += 1
