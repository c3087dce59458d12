"""For tests of code that uses quicoll: a whole cluster inside one test, and faults on purpose.

    async with quicoll.testing.cluster(3) as jobs:
        results = await asyncio.gather(*(job.group.all_reduce(x) for job in jobs))

The cluster is the real thing: a coordinator, n endpoints on loopback sockets, mutual TLS with keys that exist in
memory only. Its engines share one thread, the jobs belong to the test's own loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, Unpack

from quicoll.checks import seconds as duration
from quicoll.checks import whole
from quicoll.config import Config, JoinSettings
from quicoll.engine.engine import Engine
from quicoll.engine.runtime import Runtime, ThreadRuntime
from quicoll.engine.start import start_with
from quicoll.engine.this_host import ThisHost
from quicoll.engine_process.starting import start_beside
from quicoll.errors import LocalError
from quicoll.job import Job
from quicoll.lanes.memory import lanes_unusable
from quicoll.lanes.starting import LaneProcesses
from quicoll.local.sealing import unusable
from quicoll.membership.incarnation import CHANCE_BYTES, first
from quicoll.membership.journal import MemoryJournal
from quicoll.membership.messages import COORDINATOR_NODE
from quicoll.membership.service import CoordinatorService, coordinator_config
from quicoll.membership.view import MAX_INT
from quicoll.observability.events import Event, Observer, Observers
from quicoll.step.protocol import at_work
from quicoll_transport.endpoint import EndpointConfig
from quicoll_transport.faults.compose import Cut, Installed, InstalledPayload, PayloadRule, Rule
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import COORDINATOR, WORKER, Identity

if TYPE_CHECKING:
    from quicoll.engine.face import EngineFace
    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll_transport.security.credentials import Credentials

__all__ = ["Cluster", "Event", "cluster", "corrupt_payloads", "cut_network", "disturb_network", "network_clock_ns"]

_JOB = "test"


def cut_network(job: Job, seconds: float) -> None:
    """Drop every datagram of a rank, both ways, from now on.

    What ranks of one host hand each other through its memory goes on until a lost link ends the view; with
    `local=False` all of it is datagrams.

    Args:
        job: The rank's job.
        seconds: For how long.
    Raises:
        LocalError: seconds is no such number, or the job is closed.
    """
    seconds = duration(seconds, "how long the network is cut")
    engine, loop = _engine_here(job), job.internals.runtime.loop

    def cut() -> None:
        rule = engine.faults.add(Cut(until_ns=round((loop.time() + seconds) * 1e9)))
        loop.call_later(seconds, rule.remove)
        engine.observers.emit("fault", what=f"network cut for {seconds:g} s")

    try:
        loop.call_soon_threadsafe(cut)
    except RuntimeError:
        raise LocalError("the job is closed, and its network with it") from None


def network_clock_ns(job: Job) -> int:
    """Return the time on the clock of a rank's fault rules (`until_ns`, `Between`), in nanoseconds."""
    return round(job.internals.runtime.loop.time() * 1e9)


@asynccontextmanager
async def disturb_network(job: Job, rule: Rule) -> AsyncIterator[Installed]:
    """Apply a fault rule to every datagram of a rank, both ways, until the block ends.

    What the rule holds back is released then. Where several blocks are open, the first rule that does not pass a
    datagram on decides; a Chain applies all of its rules.

    Args:
        job: The rank's job.
        rule: What becomes of a datagram; see `quicoll_transport.faults`.
    Yields:
        The installed rule, whose `stats` count.
    """
    add = _engine_here(job).faults.add
    async with _installed(job, f"network disturbed: {rule!r}", lambda: add(rule)) as installed:
        yield installed


@asynccontextmanager
async def corrupt_payloads(job: Job, rule: PayloadRule) -> AsyncIterator[InstalledPayload]:
    """Let a rule change payloads that a rank received, before their checksums are checked, until the block ends.

    Args:
        job: The rank's job.
        rule: Changes a payload in place, or not; see `quicoll_transport.faults`.
    Yields:
        The installed rule; its `seen` and `changed` count payloads.
    """
    add = _engine_here(job).faults.add_payload
    async with _installed(job, f"payloads disturbed: {rule!r}", lambda: add(rule)) as installed:
        yield installed


def _engine_here(job: Job) -> Engine:
    """Return a job's engine. Raises LocalError where that is in another process: rules are objects of this one."""
    engine = job.internals.engine
    if not isinstance(engine, Engine):
        raise LocalError("the engine is in a process of its own (engine = 'process'), where no rule can be installed")
    return engine


_InstalledT = TypeVar("_InstalledT", Installed, InstalledPayload)


@asynccontextmanager
async def _installed(job: Job, what: str, add: Callable[[], _InstalledT]) -> AsyncIterator[_InstalledT]:
    """Add a rule on the engine's loop, say so in its events, and remove it at the end of the block."""
    engine, runtime = job.internals.engine, job.internals.runtime

    async def install() -> _InstalledT:
        engine.observers.emit("fault", what=what)
        return add()

    installed = await runtime.call(install())

    async def remove() -> None:
        installed.remove()

    try:
        yield installed
    finally:
        with suppress(LocalError):  # the job ended inside the block, and its network with it
            await runtime.call(remove())


class Cluster(list[Job]):
    """The jobs of a cluster, by rank at the time of joining.

    Attributes:
        coordinator: The service they belong to.
    """

    def __init__(self, jobs: list[Job], coordinator: CoordinatorService) -> None:
        super().__init__(jobs)
        self.coordinator = coordinator


@asynccontextmanager
async def cluster(
    n: int,
    *,
    network: Literal["loopback"] = "loopback",
    incarnation: int | None = None,
    observer: Observer | None = None,
    sites: Sequence[str] | None = None,
    **settings: Unpack[JoinSettings],
) -> AsyncIterator[Cluster]:
    """Start a coordinator and `n` ranks that have joined one job, in this process; `jobs[i]` is rank i.

    Args:
        n: How many ranks.
        network: "loopback": real sockets on 127.0.0.1.
        incarnation: Of all its processes, positive; it seeds the randomness of `disturb_network` and
            `corrupt_payloads`. None draws one.
        observer: Called with the events of all ranks and the coordinator, on the engines' thread.
        sites: The site of each rank.
        **settings: As for `quicoll.join` (lost_after, timeout, chunk_bytes, ...); the job's seed is 0 unless given.
    Yields:
        The jobs, by rank, and the coordinator.
    Raises:
        LocalError: An argument or a setting cannot work.
    """
    if network != "loopback":
        raise LocalError(f"network {network!r} is not known; use 'loopback'")
    n = whole(n, "the number of ranks")
    if n < 1:
        raise LocalError(f"a cluster has at least one rank, not {n}")
    born = first(os.urandom(CHANCE_BYTES)) if incarnation is None else whole(incarnation, "incarnation")
    if not 1 <= born <= MAX_INT:
        raise LocalError(f"an incarnation is from 1 to {MAX_INT}, not {born}")
    if sites is not None and len(sites) != n:
        raise LocalError(f"{len(sites)} sites for {n} ranks")
    lost_after = settings.get("lost_after")
    lost_after = settings["lost_after"] = duration(2.0 if lost_after is None else lost_after, "lost_after")
    seed = settings.get("seed")
    settled = coordinator_config(n, lost_after, 0 if seed is None else whole(seed, "seed"))
    nodes = [f"worker-{i}" for i in range(n)]
    credentials = ephemeral(_JOB, [(COORDINATOR, COORDINATOR_NODE), *((WORKER, node) for node in nodes)])
    home = _Home(ThreadRuntime("cluster"), credentials, born, observer)
    try:
        service = await home.runtime.call(_start_coordinator(home, settled, lost_after))
    except BaseException:
        await home.runtime.aclose()
        raise
    engines: list[tuple[Config, EngineFace]] = []
    jobs: list[Job] = []
    try:
        for i, node in enumerate(nodes):
            own: JoinSettings = {
                "coordinator": service.address,
                "job": _JOB,
                "node": node,
                "world_size": n,
                "listen": "127.0.0.1:0",
                "site": None if sites is None else sites[i],
                "handle_sigterm": False,  # the process is the test's
                "local": False,  # a test is of what goes over the network, where it does not say otherwise
            }
            own.update(settings)
            engines.append(await _start_rank(home, service, own))
        views = await asyncio.gather(
            *(home.runtime.call(engine.wait_view(config.join_timeout, joining=True)) for config, engine in engines)
        )
        lent = _Lent(home.runtime)
        jobs = [Job(config, engine, lent, at_work(view)) for (config, engine), view in zip(engines, views, strict=True)]
        yield Cluster(sorted(jobs, key=lambda job: job.rank), service)
    finally:
        try:
            await asyncio.gather(*(home.runtime.call(engine.aclose("test over")) for _, engine in engines))
            await home.runtime.call(service.aclose())
        finally:
            try:
                for job in jobs:  # its engine has left; what else it holds is closed here
                    await job.aclose("test over")
            finally:
                await home.runtime.aclose()


@dataclass(frozen=True, slots=True)
class _Home:
    """What all processes of a cluster would have in common, if they were processes."""

    runtime: Runtime
    credentials: Mapping[Identity, Credentials]
    incarnation: int
    observer: Observer | None


class _Lent:
    """A runtime that serves all jobs of a cluster and its coordinator: it goes on when one job leaves."""

    def __init__(self, runtime: Runtime) -> None:
        self.loop = runtime.loop
        self.call = runtime.call
        self.begin = runtime.begin
        self.post = runtime.post
        self.submit = runtime.submit
        self.wait = runtime.wait
        self.hold = runtime.hold
        self.let_go = runtime.let_go

    async def aclose(self) -> None:
        return None


async def _start_coordinator(home: _Home, config: CoordinatorConfig, lost_after: float) -> CoordinatorService:
    """Make the coordinator; runs on the loop where it lives."""
    loop = home.runtime.loop
    return CoordinatorService(
        credentials=home.credentials[Identity(_JOB, COORDINATOR, COORDINATOR_NODE)],
        io=UdpSocket("127.0.0.1", 0, loop=loop),
        journal=MemoryJournal(),
        config=config,
        transport=EndpointConfig(lost_after_ns=round(lost_after * 1e9)),
        loop=loop,
        incarnation=home.incarnation,
        observers=Observers(COORDINATOR_NODE, lambda: round(loop.time() * 1e9), home.observer),
    )


async def _start_rank(home: _Home, service: CoordinatorService, settings: JoinSettings) -> tuple[Config, EngineFace]:
    """Make the engine of one rank, which joins by itself."""
    config = Config.resolve(environ={}, **settings)
    credentials = home.credentials[Identity(_JOB, WORKER, config.node)]
    if config.engine == "process":
        proxy = await start_beside(
            config,
            credentials=credentials,
            runtime=home.runtime,
            observer=home.observer,
            incarnation=home.incarnation,
        )
        return config, proxy
    engine, _ = await start_with(
        config,
        credentials=credentials,
        make_io=lambda loop: UdpSocket("127.0.0.1", 0, loop=loop),
        coordinators=[[service.endpoint.address]],
        incarnation=home.incarnation,
        observers=(home.observer,),
        runtime=home.runtime,
        host=ThisHost.here() if config.local and not unusable() else None,
        lane_host=None if lanes_unusable() else LaneProcesses(),
    )
    return config, engine
