"""For tests of code that uses quicoll: a whole cluster inside one test, and faults on purpose.

    async with quicoll.testing.cluster(3) as jobs:
        results = await asyncio.gather(*(job.group.all_reduce(x) for job in jobs))

The cluster is the real thing: a coordinator, n endpoints on loopback sockets, mutual TLS with keys that exist in
memory only. Its engines share one thread, the jobs belong to the test's own loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

from quicoll.checks import seconds as duration
from quicoll.checks import whole
from quicoll.config import Config
from quicoll.engine.runtime import Runtime, ThreadRuntime
from quicoll.engine.start import start_with
from quicoll.errors import LocalError
from quicoll.job import Job
from quicoll.membership.coordinator.journal import MemoryJournal
from quicoll.membership.coordinator.service import NODE, CoordinatorService, coordinator_config
from quicoll.membership.view import MAX_INT
from quicoll.observability.events import Event, Observer, Observers
from quicoll_transport.endpoint import EndpointConfig
from quicoll_transport.faults.compose import Cut, Installed, InstalledPayload, PayloadRule, Rule
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import COORDINATOR, WORKER, Identity

if TYPE_CHECKING:
    from quicoll.engine.engine import Engine

__all__ = ["Cluster", "Event", "cluster", "corrupt_payloads", "cut_network", "disturb_network", "network_clock_ns"]

_JOB = "test"


def cut_network(job: Job, seconds: float) -> None:
    """Drop every datagram of this rank, both ways, for `seconds` seconds from now."""
    seconds = duration(seconds, "how long the network is cut")
    engine, loop = job._engine, job._runtime.loop

    def cut() -> None:
        rule = engine.faults.add(Cut(until_ns=round((loop.time() + seconds) * 1e9)))
        loop.call_later(seconds, rule.remove)
        engine.observers.emit("fault", what=f"network cut for {seconds:g} s")

    try:
        loop.call_soon_threadsafe(cut)
    except RuntimeError:
        raise LocalError("the job is closed, and its network with it") from None


def network_clock_ns(job: Job) -> int:
    """The time by which this rank's fault rules go (`until_ns`, `Between`), in nanoseconds."""
    return round(job._runtime.loop.time() * 1e9)


@asynccontextmanager
async def disturb_network(job: Job, rule: Rule) -> AsyncIterator[Installed]:
    """`rule` judges every datagram of this rank, both ways, until the block ends; what it keeps is released then.

    Gives the handle, whose `stats` count. Rules of several blocks at once: the first with an opinion decides; use Chain
    to have them all.
    """

    async def install() -> Installed:
        job._engine.observers.emit("fault", what=f"network disturbed: {rule!r}")
        return job._engine.faults.add(rule)

    async def remove() -> None:
        installed.remove()

    installed = await job._runtime.call(install())
    try:
        yield installed
    finally:
        with suppress(LocalError):  # the job ended inside the block, and its network with it
            await job._runtime.call(remove())


@asynccontextmanager
async def corrupt_payloads(job: Job, rule: PayloadRule) -> AsyncIterator[InstalledPayload]:
    """`rule` may change payloads that this rank received, before their checksums are checked, until the block ends."""

    async def install() -> InstalledPayload:
        job._engine.observers.emit("fault", what=f"payloads disturbed: {rule!r}")
        return job._engine.faults.add_payload(rule)

    async def remove() -> None:
        installed.remove()

    installed = await job._runtime.call(install())
    try:
        yield installed
    finally:
        with suppress(LocalError):
            await job._runtime.call(remove())


class _Shared:
    """The part of one job in a runtime that serves them all, and the coordinator: it goes on when the job leaves."""

    def __init__(self, runtime: Runtime) -> None:
        self.loop = runtime.loop
        self.call = runtime.call
        self.submit = runtime.submit
        self.wait = runtime.wait

    async def aclose(self) -> None:
        return None


class Cluster(list[Job]):
    """The jobs of a cluster, by rank at the time of joining. `coordinator`: the service they belong to."""

    def __init__(self, jobs: list[Job], coordinator: CoordinatorService) -> None:
        super().__init__(jobs)
        self.coordinator = coordinator


@asynccontextmanager
async def cluster(
    n: int,
    *,
    network: Literal["loopback"] = "loopback",
    seed: int = 0,
    incarnation: int | None = None,
    observer: Observer | None = None,
    sites: Sequence[str] | None = None,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """`n` ranks that have joined one job, in this process; `jobs[i]` is rank i.

    network: "loopback", real sockets on 127.0.0.1. seed: the job's seed. incarnation: of all its processes,
    positive; it seeds the chance of `disturb_network` and `corrupt_payloads`; None takes the time. observer: gets the
    events of all ranks and the coordinator, on the engines' thread. sites: the site of each rank. settings: as for
    `quicoll.join` (lost_after, timeout, chunk_bytes, ...).
    """
    if network != "loopback":
        raise LocalError(f"network {network!r} is not known; use 'loopback'")
    n = whole(n, "the number of ranks")
    if n < 1:
        raise LocalError(f"a cluster has at least one rank, not {n}")
    born = time.time_ns() if incarnation is None else whole(incarnation, "incarnation")
    if not 1 <= born <= MAX_INT:
        raise LocalError(f"an incarnation is from 1 to {MAX_INT}, not {born}")
    nodes = [f"worker-{i}" for i in range(n)]
    if sites is not None and len(sites) != n:
        raise LocalError(f"{len(sites)} sites for {n} ranks")
    lost_after = settings["lost_after"] = duration(settings.get("lost_after", 2.0), "lost_after")
    settled = coordinator_config(n, lost_after, seed)
    credentials = ephemeral(_JOB, [(COORDINATOR, NODE), *((WORKER, node) for node in nodes)])
    runtime = ThreadRuntime("cluster")
    loop = runtime.loop

    async def start_coordinator() -> CoordinatorService:
        return CoordinatorService(
            credentials=credentials[Identity(_JOB, COORDINATOR, NODE)],
            io=UdpSocket("127.0.0.1", 0, loop=loop),
            journal=MemoryJournal(),
            config=settled,
            transport=EndpointConfig(lost_after_ns=round(lost_after * 1e9)),
            loop=loop,
            incarnation=born,
            observers=Observers(NODE, lambda: round(loop.time() * 1e9), observer),
        )

    try:
        service = await runtime.call(start_coordinator())
    except BaseException:
        await runtime.aclose()
        raise
    engines: list[tuple[Config, Engine]] = []
    jobs: list[Job] = []
    try:
        for i, node in enumerate(nodes):
            config = Config.resolve(
                environ={},
                **{
                    "coordinator": service.address,
                    "job": _JOB,
                    "node": node,
                    "world_size": n,
                    "listen": "127.0.0.1:0",
                    **({} if sites is None else {"site": sites[i]}),
                    **settings,
                },
            )
            engine, _ = await start_with(
                config,
                credentials=credentials[Identity(_JOB, WORKER, node)],
                make_io=lambda loop: UdpSocket("127.0.0.1", 0, loop=loop),
                coordinator_address=service.endpoint.address,
                incarnation=born,
                observers=(observer,),
                runtime=runtime,
            )
            engines.append((config, engine))
        views = await asyncio.gather(
            *(runtime.call(engine.wait_view(config.join_timeout, joining=True)) for config, engine in engines)
        )
        jobs = [
            Job(config, engine, _Shared(runtime), view) for (config, engine), view in zip(engines, views, strict=True)
        ]
        yield Cluster(sorted(jobs, key=lambda job: job.rank), service)
    finally:
        try:
            await asyncio.gather(*(runtime.call(engine.aclose("test over")) for _, engine in engines))
            await runtime.call(service.aclose())
        finally:
            await runtime.aclose()
            for job in jobs:
                job._end_audit()
