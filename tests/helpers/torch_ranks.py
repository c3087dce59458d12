"""Ranks of the torch backend in one process: torch's operations on threads, over a cluster of real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import quicoll.testing
from quicoll.torch_backend.methods import Methods

__all__ = ["Ranks", "torch_ranks"]


class Ranks:
    """What each rank does, done by all of them at once."""

    def __init__(self, jobs: Sequence[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.jobs = jobs
        self.loop = loop
        self.world = len(jobs)
        self.threads = ThreadPoolExecutor(self.world)
        self.groups = [self.methods(job.group.for_threads(), job) for job in jobs]

    def methods(self, group: Any, job: Any, timeout: float = 60.0) -> Methods:
        engine = job.internals.runtime.loop
        made = Methods()
        made.begin_methods(group, timeout=timeout, engine_thread=lambda: _running() is engine)
        return made

    def all(self, work: Callable[[Methods, int], Any]) -> list[Any]:
        """What `work` gives for each rank. Raises what one of them raises; first what follows from no other's."""
        found = self.each(work)
        errors = [each for each in found if isinstance(each, BaseException)]
        for error in sorted(errors, key=lambda error: isinstance(error, quicoll.PeerError)):
            raise error
        return found

    def each(self, work: Callable[[Methods, int], Any]) -> list[Any]:
        """What `work` gives for each rank, or the error that it raises."""

        def one(rank: int) -> Any:
            try:
                return work(self.groups[rank], rank)
            except BaseException as error:
                return error

        return list(self.threads.map(one, range(self.world)))


def _running() -> Any:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@contextmanager
def torch_ranks(world: int, **settings: Any) -> Iterator[Ranks]:
    """Ranks of a cluster whose jobs live on a loop of a thread of its own."""
    made: list[Ranks] = []
    failed: list[BaseException] = []
    ready = threading.Event()
    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def live() -> None:
        async with quicoll.testing.cluster(world, **settings) as jobs:
            stop = asyncio.Event()
            stops.append((asyncio.get_running_loop(), stop))
            made.append(Ranks(jobs, asyncio.get_running_loop()))
            ready.set()
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(live())
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(120)
    if failed or not made:
        raise AssertionError("the cluster did not start") from (failed[0] if failed else None)
    try:
        yield made[0]
    finally:
        made[0].threads.shutdown(wait=False, cancel_futures=True)
        loop, stop = stops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
    if failed:
        raise failed[0]
