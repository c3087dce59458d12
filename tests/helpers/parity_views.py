"""Two clusters with one face: four ranks on two hosts, over real loopback sockets and real memory, and simulated.

A test is a function that is given `RunRanks`, which runs a coroutine on every rank and gives what comes of it. What
tells real hosts apart is their addresses, so 127.0.0.1 has ranks 0 and 1, and 127.0.0.2 has ranks 2 and 3; all are
threads of this process, which speak with each other as processes do.

What a test may not do: measure how long something took, or ask on which of the two it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pytest

import quicoll.testing
from quicoll.engine.host_ways import HostWays
from quicoll.engine.this_host import ThisHost
from quicoll.sim import Settings, Simulation
from quicoll.testing import cluster
from quicoll_transport.net.udp import UdpSocket

if TYPE_CHECKING:
    from quicoll.job import Job

__all__ = ["Ran", "RunRanks", "on_real_hosts", "on_simulated_hosts", "ways_of"]

HOSTS = ("one", "one", "two", "two")
TIMEOUT_S = 60.0
LOST_AFTER_S = 20.0
_NO_SPACE = 28

Work = Callable[["Job"], Awaitable[Any]]


@dataclass(frozen=True)
class Ran:
    """What came of it. results: of the ranks. shared: who has told of memory that it shares, and with which ranks.
    reasons: why ranks share none."""

    results: list[Any]
    shared: dict[str, list[int]]
    reasons: list[str]


class RunRanks(Protocol):
    """Run a coroutine on each of four ranks, in one view."""

    def __call__(self, work: Work, *, apart: bool = False, short: int | None = None) -> Ran:
        """apart: each rank has a host of its own. short: a rank that has no memory to share."""
        ...


class _Told:
    def __init__(self) -> None:
        self.shared: dict[str, list[int]] = {}
        self.reasons: list[str] = []

    def take(self, kind: str, node: str, fields: Any) -> None:
        if kind == "shared_memory":
            if fields["used"]:
                self.shared[node] = fields["ranks"]
            else:
                self.reasons.append(fields["reason"])


def ways_of(job: Job) -> HostWays:
    """Return the ways of a rank to those of its host."""
    communicator = job.group._context.engine._views.communicator
    assert communicator is not None
    (ways,) = (each for each in communicator.ways if isinstance(each, HostWays))
    return ways


def on_real_hosts(work: Work, *, apart: bool = False, short: int | None = None) -> Ran:
    """Run it on sockets and in memory of this machine."""
    told = _Told()
    # The coordinator is the first to have a socket.
    addresses = iter(["127.0.0.1", *("127.0.0.1" if host == "one" else "127.0.0.2" for host in HOSTS)])
    begun: list[ThisHost] = []
    here = ThisHost.here

    def begin() -> ThisHost | None:
        found = here()
        if found is not None:
            found.short = OSError(_NO_SPACE, "No space left on device") if len(begun) == short else None
            begun.append(found)
        return found

    async def run() -> list[Any]:
        async with (
            asyncio.timeout(2 * TIMEOUT_S),
            cluster(
                len(HOSTS),
                local=not apart,
                timeout=TIMEOUT_S,
                lost_after=LOST_AFTER_S,
                observer=lambda event: told.take(event.kind, event.node, event.fields),
            ) as jobs,
        ):
            return list(await asyncio.gather(*(work(job) for job in jobs)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            quicoll.testing, "UdpSocket", lambda host, port, loop: UdpSocket(next(addresses), port, loop=loop)
        )
        patch.setattr(ThisHost, "here", begin)
        results = asyncio.run(run())
    return Ran(results, told.shared, told.reasons)


def on_simulated_hosts(work: Work, *, apart: bool = False, short: int | None = None) -> Ran:
    """Run it in a simulated world."""
    told = _Told()
    settings = Settings(
        ranks=len(HOSTS), hosts=() if apart else HOSTS, timeout=TIMEOUT_S, lost_after=LOST_AFTER_S, limit=2 * TIMEOUT_S
    )

    async def one(job: Job) -> Any:
        return await work(job)

    sim = Simulation(one, settings=settings, recorder=lambda t_ns, kind, who, what: told.take(kind, who, what))
    if short is not None:
        sim.at(0.0).memory(short, "full")
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    return Ran(list(outcome.results), told.shared, told.reasons)
