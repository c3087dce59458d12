"""A rank of the chaos run (tests/chaos.py): trains until it is told to stop, and misbehaves where it is told to.

Words on standard input, one a line: "until N" to stop after step N, "lie memory SECONDS", "lie vote SECONDS". What
happened goes to the file that the first argument names, one line each: "commit STEP DIGEST NANOSECONDS" when a step is
applied, "abort" for an attempt that failed, "lies KIND COUNT" after a time of lying, "end STEP DIGEST"; "near STEP
RIGHT" (1 or 0) where the ranks share a host's memory, and have reduced something in it, small and large; and "parcels
COUNT" where some of them do, by how many messages have gone through it since the last one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np

import quicoll
import quicoll_transport.link.inbox
from quicoll.collectives.context import CallContext
from quicoll.engine.host_ways import HostWays
from quicoll.errors import LocalError, QuicollError
from quicoll.testing import corrupt_payloads
from quicoll_transport.faults.compose import PayloadCorrupt

__all__ = ["SHARDS", "SIZE", "applied", "digest", "gradient"]

SHARDS, SIZE, PACE_S = 8, 1500, 0.03

Array = np.ndarray[Any, Any]


def gradient(weights: Array, shard: int, step: int) -> Array:
    """Depends on all that was committed, so that one wrong bit stays seen."""
    drawn = np.random.default_rng([shard, step]).standard_normal(SIZE, np.float32)
    return drawn - np.float32(0.1) * weights


def applied(weights: Array, mean: Array) -> Array:
    return weights - np.float32(0.5) * mean


def digest(weights: Array) -> str:
    return blake2b(weights.tobytes(), digest_size=8).hexdigest()


class _Equal(int):
    """A checksum that every other one is equal to."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


@contextmanager
def _checksums_say_nothing() -> Iterator[None]:
    honest = quicoll_transport.link.inbox.checksum
    quicoll_transport.link.inbox.checksum = lambda data: _Equal(0)
    try:
        yield
    finally:
        quicoll_transport.link.inbox.checksum = honest


class Trainer:
    def __init__(self, record: str) -> None:
        self.weights = np.zeros(SIZE, np.float32)
        self.until: int | None = None
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lies: set[asyncio.Task[None]] = set()
        self._given = 0, 0  # in which view, how many parcels

    def say(self, *words: object) -> None:
        os.write(self._record, (" ".join(map(str, words)) + "\n").encode())

    def load(self, state: Mapping[str, Any]) -> None:
        self.weights = np.array(state["weights"], np.float32)

    async def train(self, job: quicoll.Job) -> None:
        job.register_state(lambda: {"weights": self.weights}, self.load)
        while self.until is None or job.committed_step < self.until:
            try:
                async with job.step() as step:
                    await asyncio.sleep(PACE_S)
                    shards = job.group.shards(SHARDS)
                    leaves = [gradient(self.weights, shard, step.number) for shard in shards]
                    # Each rank reduces by itself: what one of them makes up, the vote finds.
                    mean = await job.group.all_reduce(
                        shards.leaves(leaves, like=self.weights), op="avg", algorithm="exchange"
                    )

                    if job.group._here.near:  # the same on all ranks of a view
                        self.say("near", step.number, int(await self._near(job, step.number)))

                    self.count_parcels(job)

                    def commit(number: int = step.number, mean: Array = mean) -> None:
                        self.weights = applied(self.weights, mean)
                        self.say("commit", number, digest(self.weights), time.monotonic_ns())

                    step.on_commit(commit)
            except LocalError:
                raise
            except QuicollError as error:
                self.say("abort")
                sys.stderr.write(f"{time.monotonic():.3f} step not committed: {error}\n")
                await asyncio.sleep(0.01)
        self.say("end", job.committed_step, digest(self.weights))

    def count_parcels(self, job: quicoll.Job) -> None:
        communicator = job.group._context.engine._views.communicator
        for ways in () if communicator is None else communicator.ways:
            if not isinstance(ways, HostWays):
                continue
            last, self._given = self._given, (communicator.view.view_id, ways.parcels.given)
            count = self._given[1] - (last[1] if last[0] == self._given[0] else 0)
            if count:
                self.say("parcels", count)

    async def _near(self, job: quicoll.Job, step: int) -> bool:
        """Reduce what every rank knows, through the memory of their host; return whether that came."""
        sizes = (3, 40_000, 7, 100)
        world = job.world_size * (job.world_size + 1) // 2
        tensors = [np.full(size, float(step * (job.rank + 1))) for size in sizes]
        if (job.rank + step) % 2:
            tensors[1] = quicoll.empty(sizes[1], "float64")
            tensors[1][:] = step * (job.rank + 1)
        handles = [job.group.all_reduce(each) for each in tensors]
        try:
            await job.group.barrier()
            found = [await handle for handle in handles]
        except QuicollError:
            tensors[1][:] = -1.0  # it is ours again
            raise
        tensors[1][:] = -1.0
        return all((each == step * world).all() for each in found)

    # -- lies ----------------------------------------------------------------------------------------------------

    def told(self, job: quicoll.Job, words: list[str]) -> None:
        match words:
            case ["until", step]:
                self.until = int(step)
            case ["lie", kind, seconds]:
                lie = {"memory": self._lie_memory, "vote": self._lie_vote}[kind]
                task = asyncio.get_running_loop().create_task(lie(job, float(seconds)))
                self._lies.add(task)
                task.add_done_callback(self._lies.discard)

    async def _lie_memory(self, job: quicoll.Job, seconds: float) -> None:
        """Take other bits for what the others sent, where the checksum says nothing of it."""
        with _checksums_say_nothing():
            async with corrupt_payloads(job, PayloadCorrupt(min_bytes=1000)) as rule:
                await asyncio.sleep(seconds)
        self.say("lies", "memory", rule.changed)

    async def _lie_vote(self, job: quicoll.Job, seconds: float) -> None:
        """Vote with another digest than that of the results."""
        honest, lies = CallContext.digests, 0

        def lying(self: CallContext, step: int) -> Any:
            nonlocal lies
            lies += 1
            found, *more = honest(self, step)
            return (bytes([found[0] ^ 1]) + found[1:], *more)

        CallContext.digests = lying
        try:
            await asyncio.sleep(seconds)
        finally:
            CallContext.digests = honest
        self.say("lies", "vote", lies)


async def main(record: str) -> None:
    trainer = Trainer(record)
    async with quicoll.join(timeout=20.0, hold_timeout=60.0, join_timeout=60.0) as job:
        loop = asyncio.get_running_loop()

        def listen() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(trainer.told, job, line.split())

        threading.Thread(target=listen, daemon=True).start()
        await trainer.train(job)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
