"""Memory that ranks of one host share, without a host: every load and store is a step, in an order that a seed draws.

Each rank is a thread, and one of them runs at a time: whoever comes to a load, a store, a fence or the end of its turn
hands over to the next one that chance names. What a rank stores waits in a buffer of its own, in order, and reaches the
others at a moment that chance names too (x86-64's total store order, but for the copies of large chunks, which reach
them at once): a fence empties it. A rank can be killed at any step: what was in its buffer gets out, as on the machine,
and it takes none after it.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from quicoll.local.layout import WITHDRAWN, SegmentLayout

__all__ = ["Host", "Killed", "SteppedMemory"]


class Killed(BaseException):
    """Ends the thread of a rank that is killed."""


class Host:
    """kill: (rank, step) at which that rank is killed. steps: by rank, how many it has taken. arenas: memory of each
    rank that the others may read where it stands, `arena` bytes of it."""

    def __init__(
        self,
        world: int,
        seed: int,
        *,
        chunk: int = 4096,
        kill: tuple[int, int] | None = None,
        rooms: int = 0,
        parcel: int = 0,
        arena: int = 0,
    ) -> None:
        self.layout = SegmentLayout(world, chunk, rooms, parcel)
        self.random = random.Random(seed)
        self.kill = kill
        self.segments = [bytearray(self.layout.size) for _ in range(world)]
        self.buffers: list[deque[tuple[int, bytes]]] = [deque() for _ in range(world)]
        self.arenas = [np.zeros(arena, np.uint8) for _ in range(world)]
        self.steps = [0] * world
        self.ended: dict[int, BaseException | None] = {}
        self._world = world
        self._turns = [threading.Semaphore(0) for _ in range(world)]
        self._over = threading.Event()

    def run(self, work: Callable[[SteppedMemory], None]) -> None:
        """Let every rank do this work, to its end."""
        threads = [threading.Thread(target=self._rank, args=(rank, work)) for rank in range(self._world)]
        for thread in threads:
            thread.start()
        self._next()
        for thread in threads:
            thread.join()

    def _rank(self, rank: int, work: Callable[[SteppedMemory], None]) -> None:
        self._turns[rank].acquire()
        error: BaseException | None = None
        try:
            work(SteppedMemory(self, rank))
        except BaseException as raised:
            error = raised
        self.drain(rank)
        self.ended[rank] = error
        self._next()

    def _next(self) -> None:
        left = [rank for rank in range(self._world) if rank not in self.ended]
        if left:
            self._turns[self.random.choice(left)].release()

    def step(self, rank: int) -> None:
        """A rank comes to a step: others may have theirs before it, and stores reach the others."""
        self.steps[rank] += 1
        if self.kill == (rank, self.steps[rank]):
            raise Killed
        if self.random.random() < 0.3:
            self._next()
            self._turns[rank].acquire()
        for buffer in range(self._world):
            if self.buffers[buffer] and self.random.random() < 0.3:
                self._store(buffer)

    def _store(self, rank: int) -> None:
        at, data = self.buffers[rank].popleft()
        self.segments[rank][at : at + len(data)] = data

    def drain(self, rank: int) -> None:
        """All that a rank has stored reaches the others."""
        while self.buffers[rank]:
            self._store(rank)


class SteppedMemory:
    """The memory as one rank sees it: quicoll.local.layout.HostMemory."""

    def __init__(self, host: Host, rank: int) -> None:
        self.host = host
        self.rank = rank
        self.layout = host.layout

    def load(self, rank: int, word: int) -> int:
        return int.from_bytes(self.read(rank, 8 * word, 8), "little")

    def store(self, word: int, value: int) -> None:
        self.write(8 * word, value.to_bytes(8, "little"))

    def fence(self) -> None:
        self.host.step(self.rank)
        self.host.drain(self.rank)

    def read(self, rank: int, at: int, size: int) -> bytes:
        self.host.step(self.rank)
        if rank == self.rank:  # a processor sees its own stores at once
            self.host.drain(rank)
        return bytes(self.host.segments[rank][at : at + size])

    def write(self, at: int, data: bytes | memoryview) -> None:
        self.host.step(self.rank)
        self.host.buffers[self.rank].append((at, bytes(data)))

    def view(self, rank: int, at: int, size: int) -> np.ndarray[Any, Any]:
        self.host.step(self.rank)
        return np.frombuffer(self.host.segments[rank], np.uint8)[at : at + size]

    def make(self, at: int, size: int) -> None:
        """There is memory for all of it."""

    def place(self, values: np.ndarray[Any, Any]) -> int:
        arena = self.host.arenas[self.rank]
        at = values.__array_interface__["data"][0] - arena.__array_interface__["data"][0]
        return at + 1 if 0 <= at < arena.size else 0

    def withdraw(self, record: int) -> None:
        self.write(record + 8, WITHDRAWN.to_bytes(8, "little"))

    def lent(self, rank: int, place: int, size: int) -> np.ndarray[Any, Any] | None:
        self.host.step(self.rank)
        found = self.host.arenas[rank][place - 1 : place - 1 + size]
        return found if len(found) == size else None
