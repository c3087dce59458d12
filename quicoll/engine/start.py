"""An engine on a loop of its own: credentials, socket and address of the coordinator from the settings."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from quicoll.config import coordinator_addresses, coordinators_of
from quicoll.engine.engine import Engine
from quicoll.engine.runtime import Runtime, ThreadRuntime
from quicoll.engine.this_host import ThisHost
from quicoll.errors import LocalError
from quicoll.lanes.memory import lanes_unusable
from quicoll.lanes.starting import LaneProcesses
from quicoll.local.sealing import unusable
from quicoll.membership.incarnation import CHANCE_BYTES, first
from quicoll.observability.events import JsonLines, Observer, Observers, make_directory
from quicoll.observability.logs import hear
from quicoll.observability.recording import record_rank
from quicoll.observability.thread_stacks import thread_stacks
from quicoll_transport.errors import TransportError
from quicoll_transport.net.addresses import is_numeric, is_v6, parse_addresses
from quicoll_transport.net.multihomed import bound_io
from quicoll_transport.net.resolver import Resolver, resolve_all
from quicoll_transport.security.access import Access, read_deny_list
from quicoll_transport.security.identity import WORKER

if TYPE_CHECKING:
    from quicoll.config import Config
    from quicoll.engine.host import HostHere
    from quicoll.lanes.starting import LaneHost
    from quicoll.observability.flight import FlightRecorder
    from quicoll_transport.events import LinkSnapshot
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.udp import DatagramIO
    from quicoll_transport.security.credentials import Credentials

__all__ = ["own_credentials", "read_access", "start", "start_with"]


async def start(
    config: Config,
    *,
    observer: Observer | None = None,
    runtime: Runtime | None = None,
    stacks: Callable[[int, Callable[[str], None]], None] | None = None,
    credentials: Credentials | None = None,
    incarnation: int = 0,
) -> tuple[Engine, Runtime]:
    """Start an engine from its settings: certificates from files, a UDP socket, the system's clock.

    Args:
        config: Settings of the rank.
        observer: Gets every event, on the engine's loop.
        runtime: Where the engine runs; None makes a thread of its own.
        stacks: Gives the stacks of the rank's program; None: this process is that.
        credentials: The rank's; None: those in its files.
        incarnation: As `start_with` has it; 0 draws one.
    Returns:
        The engine and the runtime that it is on.
    Raises:
        LocalError: Settings, certificates or an address cannot work.
    """
    if config.log is not None:
        hear(config.log)
    if credentials is None:
        credentials = own_credentials(config)
    try:
        own = parse_addresses(config.listen)
    except TransportError as error:
        raise LocalError(str(error)) from error
    await _check_way(config.listen, config.coordinator, config.join_timeout)
    if config.qlog is not None:
        make_directory(config.qlog, "qlog")
    events = JsonLines(Path(config.events) / f"{config.node}.jsonl") if config.events is not None else None
    incarnation = incarnation or first(os.urandom(CHANCE_BYTES))
    record = record_rank(
        job=config.job,
        node=config.node,
        chance=incarnation,
        flight_dir=config.flight_dir,
        trace_dir=config.trace_dir,
        telemetry=config.telemetry,
        metrics=config.metrics,
    )
    engine, runtime = await start_with(
        config,
        credentials=credentials,
        make_io=lambda loop: bound_io(own, loop=loop),
        coordinators=coordinators_of(config.coordinator),
        incarnation=incarnation,
        observers=(observer, events),
        runtime=runtime,
        host=ThisHost.here() if config.local and runtime is None and not unusable() else None,
        flight=None if record is None else record.recorder,
        stacks=stacks or stacks_here,
        lane_host=None if lanes_unusable() else LaneProcesses(),
    )
    if record is not None and record.streaming is not None:
        loop, endpoint = runtime.loop, engine.endpoint

        def ask_links(give: Callable[[Sequence[LinkSnapshot]], None]) -> None:
            _tell_soon(loop, lambda: give([link.snapshot() for link in endpoint.links.values()]))

        record.streaming.ask_links = ask_links
        if record.served:
            served = record.served
            _tell_soon(loop, lambda: engine.observers.emit("metrics_served", address=served))
    return engine, runtime


async def start_with(
    config: Config,
    *,
    credentials: Credentials,
    make_io: Callable[[asyncio.AbstractEventLoop], DatagramIO],
    coordinators: Sequence[Sequence[Address]],
    incarnation: int,
    observers: tuple[Observer | None, ...] = (),
    runtime: Runtime | None = None,
    wall_clock: Callable[[], datetime] | None = None,
    host: HostHere | None = None,
    flight: FlightRecorder | None = None,
    stacks: Callable[[int, Callable[[str], None]], None] | None = None,
    lane_host: LaneHost | None = None,
) -> tuple[Engine, Runtime]:
    """Start an engine over the given credentials and network: what tests and simulations call.

    Args:
        config: Settings of the rank. Of its files only the deny list is read.
        credentials: The rank's own.
        make_io: Makes the network on the engine's loop.
        coordinators: The addresses of each, (host, port); a name is looked up whenever it is dialled, so it may move.
        incarnation: As `quicoll.membership.incarnation.first` gives it; it also seeds the chance of `faults`.
        observers: Each gets every event, on the engine's loop.
        runtime: Where the engine runs; None makes a thread of its own.
        wall_clock: The date that certificates are checked against, aware; None takes the system's.
        host: The one that this rank is on; None uses no memory that ranks share.
        flight: Keeps what this rank did last; None where nothing does.
        stacks: Gives the stacks of this process, for who waits for it; None asks no rank for its own, and answers none.
        lane_host: Where lanes run; None has none.
    Returns:
        The engine and the runtime that it is on.
    Raises:
        LocalError: The deny list cannot be used, or the network not made.
    """
    try:
        denied = _listed(config)
    except LocalError:
        if flight is not None:
            flight.close()
        raise
    owned = runtime is None
    if runtime is None:
        share = None if config.engine_share == "auto" else float(config.engine_share)
        runtime = ThreadRuntime(config.node, share=share, lost_after=config.lost_after)
    loop = runtime.loop
    told = Observers(config.node, lambda: round(loop.time() * 1e9), *observers, flight=flight)
    if flight is not None:
        flight.unwritten = lambda reason: _tell_soon(loop, lambda: told.emit("flight_unwritten", reason=reason))
    made: list[Engine] = []

    async def make() -> Engine:
        io = make_io(loop)
        try:
            engine = Engine(
                config,
                credentials=credentials,
                io=io,
                loop=loop,
                incarnation=incarnation,
                observers=told,
                coordinators=coordinators,
                wall_clock=wall_clock,
                denied=denied,
                host=host,
                stacks=stacks,
                lane_host=lane_host,
            )
        except BaseException:
            io.close()
            raise
        made.append(engine)
        return engine

    async def unmake() -> None:
        for engine in made:  # its maker was cancelled, and it is there all the same
            await engine.aclose("not joined")
        told.close()

    try:
        engine = await runtime.call(make())
        if isinstance(runtime, ThreadRuntime):
            engine.endpoint.heard = runtime.hand_out
        return engine, runtime
    except BaseException as error:
        try:
            await runtime.call(unmake())
        finally:
            if owned:
                await runtime.aclose()
        if isinstance(error, TransportError):
            raise LocalError(str(error)) from error
        raise


def stacks_here(most: int, give: Callable[[str], None]) -> None:
    """Give the stacks of this process, of `most` characters at most."""
    give(thread_stacks(most))


def _tell_soon(loop: asyncio.AbstractEventLoop, tell: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(tell)


def own_credentials(config: Config) -> Credentials:
    """Read the rank's credentials from its files.

    Args:
        config: Settings of the rank.
    Raises:
        LocalError: They cannot be used; where nobody has said which job this is, it says what to do.
    """
    try:
        return read_access(config).credentials
    except LocalError as error:
        if config.sources["coordinator"] == "default":
            raise LocalError(
                f"there is no job to join: no coordinator is named, and {error}. {_hint(config)}"
            ) from None
        raise


def read_access(config: Config) -> Access:
    """Read what the rank's files say now: its credentials and its deny list.

    Args:
        config: Settings of the rank.
    Raises:
        LocalError: A file cannot be used, or its certificate is another job's.
    """
    try:
        access = Access.read(config.certs, role=WORKER, node=config.node, deny=config.deny)
    except TransportError as error:
        raise LocalError(str(error)) from error
    if access.credentials.identity.job != config.job:
        raise LocalError(f"the certificate is for job {access.credentials.identity.job!r}, not {config.job!r}")
    return access


def _hint(config: Config) -> str:
    """What to do, for who has started ranks with a launcher that has no store, or a rank by itself."""
    rank, world_size = config.sources["rank_hint"], config.sources["world_size"]
    if not {rank, world_size} & {"default", "argument", "QUICOLL_RANK_HINT", "QUICOLL_WORLD_SIZE"}:
        return (
            f"Ranks that a launcher starts ({rank}) meet in a directory that their hosts share: set QUICOLL_RENDEZVOUS"
        )
    program = sys.argv[0] if sys.argv[0].endswith(".py") else "PROGRAM.py"
    return f"To start a coordinator and two ranks, run: quicoll run -n 2 {program}"


def _listed(config: Config) -> tuple[str, ...]:
    try:
        return () if config.deny is None else read_deny_list(config.deny)
    except TransportError as error:
        raise LocalError(str(error)) from error


async def _check_way(listen: str, coordinator: str, timeout: float) -> None:
    """Say at once, not after `join_timeout`, that there is no such host, or that nothing sent from `listen` gets there.

    The name is looked up again whenever its link is dialled, and what a network is not up for yet may come up later: an
    error here is only what stays as it is.
    """
    targets, failed = await resolve_all(coordinator_addresses(coordinator), Resolver().resolve, timeout=timeout)
    if failed and not targets:
        raise LocalError(f"the coordinator's address {coordinator!r}: {failed[0]}")
    own = [host for host, _ in parse_addresses(listen) if is_numeric(host)]
    if own and targets and not any(_can_send(here, target) for here in own for target in targets):
        raise LocalError(f"listen = {listen!r}: nothing sent from there reaches the coordinator at {coordinator!r}")


def _can_send(host: str, target: Address) -> bool:
    """Whether a socket at `host` may send to `target`, as far as families and kinds of address decide: not from IPv4 to
    IPv6, nor from a loopback address to another host. Connecting a UDP socket sends nothing."""
    if is_v6((host,)) is not is_v6(target):
        return False
    with socket.socket(socket.AF_INET6 if is_v6(target) else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return True  # making the real socket says what is wrong with the address
        try:
            probe.connect(target)
        except OSError as error:
            # A host always has routes to its own addresses, and from a loopback address to no other: whether the system
            # says so by EINVAL or, while no network is up, by ENETUNREACH, no network that comes up changes it.
            return error.errno != errno.EINVAL and not ipaddress.ip_address(host).is_loopback
    return True
