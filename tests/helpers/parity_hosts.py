"""Two hosts with one face: this one, with its sockets, eventfds and sealed memory, and a simulated one. See `Ranks`.

A test is a coroutine that is given `Ranks`, and runs on one event loop, which all of its ranks share: on a real host
that of asyncio, on a simulated one that of a simulated process. A rank's end is that of its process; so on a real host
a rank that is to end has a process of its own, which takes part in the meeting and then waits for its end.

What a test may not do: measure how long something took, or ask on which of the two hosts it runs.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from quicoll.engine.this_host import ThisHost
from quicoll.local.meeting import SECRET_BYTES, MeetingPlace
from quicoll.sim.hosts import SimHosts
from quicoll_transport.sim import World

if TYPE_CHECKING:
    from quicoll.engine.host import Belongings, HostHere, MetHost
    from quicoll_transport.sim import HostLoop

__all__ = ["HostTest", "Ranks", "on_simulated_host", "on_this_host", "secret"]

HostTest = Callable[["Ranks"], Awaitable[None]]

VIEW = 7
WITHIN_S = 60.0  # for a meeting that is to succeed
LIMIT_S = 120


def secret(rank: int, peer: int) -> bytes:
    """What a rank has told a peer."""
    return bytes([rank, peer]) * (SECRET_BYTES // 2)


class Ranks(ABC):
    """The ranks of one host. loop: on which the test runs."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.met: list[MetHost] = []
        self.brought: list[Belongings] = []

    @abstractmethod
    def host(self, rank: int) -> HostHere:
        """Return the host, as a rank of it sees it."""

    @abstractmethod
    async def beside_one_that_ends(self) -> tuple[MetHost, Callable[[], None]]:
        """Let rank 0 meet rank 1, which has a process of its own; return what rank 0 has, and what ends rank 1."""

    @abstractmethod
    def held(self) -> int:
        """Return how much of the host is in use: what is not given back makes it grow."""

    def bring(self, rank: int, world: int) -> Belongings:
        brought = self.host(rank).bring(world, self.loop)
        self.brought.append(brought)
        return brought

    async def meet(self, world: int) -> list[MetHost]:
        """Let as many ranks meet; return what each has."""
        brought = [self.bring(rank, world) for rank in range(world)]
        met = await asyncio.gather(*(self.meeting(rank, brought) for rank in range(world)))
        self.met += met
        return list(met)

    def meeting(
        self, rank: int, brought: list[Belongings], *, within: float = WITHIN_S, wrong: bool = False
    ) -> Awaitable[MetHost]:
        """The part of one rank in a meeting. wrong: it does not know what the others have told it."""
        others = [peer for peer in range(len(brought)) if peer != rank]
        told = {peer: bytes(SECRET_BYTES) if wrong else secret(peer, rank) for peer in others}
        return brought[rank].meet(
            view_id=VIEW,
            rank=rank,
            places={peer: MeetingPlace(brought[peer].name, told[peer]) for peer in others},
            secrets={peer: secret(rank, peer) for peer in others},
            within=within,
        )

    def close(self) -> None:
        """Give all back."""
        for each in self.brought:
            each.close()
        self.brought.clear()
        for met in self.met:
            met.wakes.close()
        self.met.clear()


class _RealRanks(Ranks):
    def __init__(self) -> None:
        super().__init__()
        self._processes: list[asyncio.subprocess.Process] = []

    async def end_processes(self) -> None:
        """End those that are there still."""
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def host(self, rank: int) -> HostHere:
        here = ThisHost.here()
        assert here is not None
        return here

    def held(self) -> int:
        gc.collect()  # a mapping has a descriptor of its own, which goes with it
        return len(os.listdir("/proc/self/fd"))

    async def beside_one_that_ends(self) -> tuple[MetHost, Callable[[], None]]:
        brought = self.bring(0, 2)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            json.dumps(brought.name.hex()),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        self._processes.append(process)
        name = bytes.fromhex(json.loads(await process.stdout.readline()))
        met = await brought.meet(
            view_id=VIEW,
            rank=0,
            places={1: MeetingPlace(name, secret(1, 0))},
            secrets={1: secret(0, 1)},
            within=WITHIN_S,
        )
        self.met.append(met)

        def end() -> None:
            process.send_signal(signal.SIGKILL)

        return met, end


class _SimulatedRanks(Ranks):
    def __init__(self, hosts: SimHosts, loop: HostLoop) -> None:
        super().__init__()
        self._hosts = hosts
        self._loop = loop
        self._begun: dict[int, HostHere] = {}

    def host(self, rank: int) -> HostHere:
        if rank not in self._begun:
            self._begun[rank] = self._hosts.begin(_node(rank), self._loop, lambda: self._hosts.ended(_node(rank)))
        return self._begun[rank]

    def held(self) -> int:
        return sum(len(self._hosts.leftovers(_node(rank))) for rank in range(8)) + len(self._hosts.places)

    async def beside_one_that_ends(self) -> tuple[MetHost, Callable[[], None]]:
        met, other = await self.meet(2)
        self.met.remove(other)  # it goes with its process
        self.brought.pop()
        return met, lambda: self._hosts.ended(_node(1))


def _node(rank: int) -> str:
    return f"node-{rank}"


def on_this_host(test: HostTest) -> None:
    """Run a test on real memory and sockets."""

    async def run() -> None:
        ranks = _RealRanks()
        try:
            async with asyncio.timeout(LIMIT_S):
                await test(ranks)
        finally:
            ranks.close()
            await ranks.end_processes()

    asyncio.run(run())


def on_simulated_host(test: HostTest) -> None:
    """Run a test on a simulated host."""
    with World(1) as world:
        loop = world.host("machine").start()
        hosts = SimHosts(world, {_node(rank): "one" for rank in range(8)})

        async def run() -> None:
            ranks = _SimulatedRanks(hosts, loop)
            try:
                await test(ranks)
            finally:
                ranks.close()

        tasks: list[asyncio.Task[None]] = []
        loop.call_soon(lambda: tasks.append(loop.create_task(run())))
        world.run(lambda: bool(tasks) and tasks[0].done(), limit_ns=LIMIT_S * 1_000_000_000)
        tasks[0].result()


async def _one_that_ends(name: Any) -> None:
    """Rank 1 of two, until its process is ended."""
    here = ThisHost.here()
    assert here is not None
    brought = here.bring(2, asyncio.get_running_loop())
    sys.stdout.write(json.dumps(brought.name.hex()) + "\n")
    sys.stdout.flush()
    await brought.meet(
        view_id=VIEW,
        rank=1,
        places={0: MeetingPlace(bytes.fromhex(name), secret(0, 1))},
        secrets={0: secret(1, 0)},
        within=WITHIN_S,
    )
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(_one_that_ends(json.loads(sys.argv[1])))
