"""A coordinator's process: its files, its socket and its journal; whether it leads alone or in turn with others.

    alone     the journal is a file, which no other coordinator can have: it leads from the beginning
    in turn   the journal is shared: it stands by until the journal's lease is its own, leads for as long as it is, and
              stands by again when it is lost

How it ends:

    it is cancelled                            in either way; the lease is given up, members hear that it was stopped
    the lease is lost (LeaseLost): another     in turn: not at all. The term is over (term.py), its journal is closed,
    leads, or the database is away             and the next leadership begins, as in a process that was just started
    the journal cannot be opened at the start, by that error, either way: who starts it has to know at once. One that
    refuses a record, is damaged, contradicts  stands by asks on, whatever the database answers: a leader is there, and
    the settings                               this one may be needed later

An operator's wish to forget nodes (`forget`) is one for the job as it was when the process began. It goes with the
process from term to term until the journal has it, and is closed by the first view after it, whoever has led that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicoll.checks import MAX_WHOLE, seconds, whole
from quicoll.deadlines import Deadlines
from quicoll.errors import LocalError, QuicollError
from quicoll.membership.journal import Journal, LeaseLost
from quicoll.membership.leadership import Leadership
from quicoll.membership.messages import COORDINATOR_NODE
from quicoll.membership.relaying import relay_limits
from quicoll.membership.service import CoordinatorService, coordinator_config
from quicoll.observability.events import Observer, Observers, make_directory
from quicoll_transport.endpoint import EndpointConfig
from quicoll_transport.errors import TransportError
from quicoll_transport.net.addresses import parse_addresses
from quicoll_transport.net.multihomed import bound_io
from quicoll_transport.security.access import Access
from quicoll_transport.security.identity import COORDINATOR

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.coordinator.core import CoordinatorCore
    from quicoll.membership.coordinator.history import History
    from quicoll.membership.journal import RecordStore
    from quicoll.membership.leadership import SharedStore

__all__ = ["serve", "serve_in_turn"]


async def serve(
    *,
    listen: str = "127.0.0.1:4433",
    job: str,
    certs: str | Path,
    journal: str | Path,
    fsync: bool = True,
    lease: float = 5.0,
    forget: Sequence[str] = (),
    world_size: int,
    node: str = COORDINATOR_NODE,
    seed: int | None = None,
    lost_after: float = 2.0,
    min_world_size: int = 1,
    max_world_size: int | None = None,
    warm_spares: int = 0,
    nodes: Sequence[str] = (),
    vote_timeout: float | None = None,
    relay: str = "",
    relay_rate: float = 100.0,
    observer: Observer | None = None,
    transport_events: bool = False,
    qlog: str | Path | None = None,
    deny: str | Path | None = None,
    ready: Callable[[CoordinatorService], None] | None = None,
) -> None:
    """Run a coordinator until cancelled: then its members hear that it was stopped, and the journal is closed.

    Args:
        listen: "host:port", port 0 for a free one (the event "listening" has it). An address of each network or
            provider of this host, with plus signs between them: ranks name them so too, and go on over another one
            when one falls silent.
        job: The job's name, as in the certificates.
        certs: Directory with coordinator-<node>.pem.
        journal: SQLite file, made if missing; a coordinator that is started again goes on from it. Or the URL of a
            PostgreSQL database, postgresql://...; then several coordinators may run, of which one leads.
        fsync: With a file, whether a decision is on the disk before anybody hears of it. False only for a journal that
            nobody reads once this machine has stopped: it survives the coordinator's process, and not the machine.
        lease: With PostgreSQL, seconds after its last sign of life in the database until another takes the lead from
            the one that has it; and how long the leader tries to reach the database before it stands by again.
        forget: Nodes of the last view that are gone for good and shall not be waited for, where too few are left for a
            quorum. They are not forgotten as long as they may be alive; the event "held" says why.
        world_size: Ranks that the first view waits for.
        node: The coordinator's name in its certificate.
        seed: The job's; None takes the journal's or a random one.
        lost_after: Seconds of silence after which a member is lost. Ranks that do not set it take this one.
        min_world_size: Least ranks of every view.
        max_world_size: Most ranks of every view; further nodes stand by. None: as many as there may be.
        warm_spares: How many of those that stand by are kept warm: they have their program and the state's memory
            ready, and links to all ranks. Each is shown to the others once, in a view of its own.
        nodes: Who may join: names, or patterns with * and ?. Empty lets in every node with a certificate of the job.
        vote_timeout: Seconds from the first vote for a step to the last. Ranks that set a longer `timeout`, or a
            `hold_timeout` that is not longer, are refused. None takes 300, and refuses nobody.
        relay: Who passes on datagrams between ranks that cannot reach each other, behind NAT: "" for this coordinator,
            "none" for nobody, else the address of a `quicoll relay`, "host:port".
        relay_rate: Megabytes a second that this coordinator passes on; half of it at most from one rank to another.
        observer: Gets every event, on the running loop.
        transport_events: Whether the transport's own events are told as well.
        qlog: Directory for a qlog trace of each connection.
        deny: File of SHA-256 fingerprints of certificates that may not come in.
        ready: Called with the service once it listens; `reload` is there for a signal handler.
    Raises:
        LocalError: Settings, certificates, the deny list or the address cannot work.
        JournalError: The journal cannot be read or written. With PostgreSQL: it cannot be opened at the start, or it
            refuses a record; where another coordinator leads, or the database is away, this one stands by again.
    """
    if not fsync and _is_shared(journal):
        raise LocalError("fsync = False is for a journal in a file; what PostgreSQL does is its own setting")
    seed = None if seed is None else whole(seed, "seed")
    config = coordinator_config(
        whole(world_size, "world_size"),
        seconds(lost_after, "lost_after"),
        seed,
        min_world_size=whole(min_world_size, "min_world_size"),
        max_world_size=None if max_world_size is None else whole(max_world_size, "max_world_size"),
        warm_spares=whole(warm_spares, "warm_spares"),
        nodes=nodes,
        forget=forget,
        vote_timeout=None if vote_timeout is None else seconds(vote_timeout, "vote_timeout"),
        relay=relay,
    )
    if qlog is not None:
        make_directory(qlog, "qlog")
    loop = asyncio.get_running_loop()
    observers = Observers(node, lambda: round(loop.time() * 1e9), observer)
    read_access = partial(Access.read, certs, role=COORDINATOR, node=node, deny=deny)
    try:
        access = read_access()
        if access.credentials.identity.job != job:
            raise LocalError(f"the certificate is for job {access.credentials.identity.job!r}, not {job!r}")
        io = bound_io(parse_addresses(listen), loop=loop)
    except TransportError as error:
        raise LocalError(str(error)) from error
    make = partial(
        CoordinatorService,
        credentials=access.credentials,
        io=io,
        transport=EndpointConfig(lost_after_ns=Deadlines.of(lost_after).lost_ns, qlog_directory=qlog),
        loop=loop,
        incarnation=1 + (int.from_bytes(os.urandom(8), "big") >> 1) % MAX_WHOLE,
        observers=observers,
        denied=access.denied,
        read_access=read_access,
        transport_events=transport_events,
        relay_limits=relay_limits(relay_rate),
    )
    try:
        if _is_shared(journal):
            await _serve_shared(make, str(journal), config, job, seconds(lease, "lease"), observers, ready)
        else:
            await _serve_alone(make, journal, config, job, ready, fsync=fsync)
    finally:
        io.close()


async def _serve_alone(
    make: Callable[..., CoordinatorService],
    path: str | Path,
    config: CoordinatorConfig,
    job: str,
    ready: Callable[[CoordinatorService], None] | None,
    *,
    fsync: bool,
) -> None:
    """Lead with a journal that is nobody else's."""
    store = Journal.open(path, job=job, fsync=fsync)
    try:
        service = make(journal=store, config=_seeded(config, store))
        async with _ending(service):
            if ready is not None:
                ready(service)
            await service.wait_failed()
    finally:
        store.close()


async def _serve_shared(
    make: Callable[..., CoordinatorService],
    url: str,
    config: CoordinatorConfig,
    job: str,
    lease: float,
    observers: Observers,
    ready: Callable[[CoordinatorService], None] | None,
) -> None:
    """Stand by until the lease of the journal in the database is ours, then lead for as long as it is."""
    try:
        from quicoll.membership.postgresql.journal import PostgresJournal
    except ImportError as error:
        raise LocalError(
            f"a journal in PostgreSQL needs psycopg: pip install 'quicoll[postgresql]' ({error})"
        ) from error

    def reach() -> tuple[SharedStore, Executor]:
        return PostgresJournal(url, job=job, lease=lease), ThreadPoolExecutor(1, thread_name_prefix="quicoll-journal")

    service = make(journal=None, config=config)
    await serve_in_turn(service, reach, config=config, lease=lease, observers=observers, ready=ready)


async def serve_in_turn(
    service: CoordinatorService,
    reach: Callable[[], tuple[SharedStore, Executor]],
    *,
    config: CoordinatorConfig,
    lease: float,
    observers: Observers,
    ready: Callable[[CoordinatorService], None] | None = None,
) -> None:
    """Stand by until the journal's lease is ours, lead for as long as it is, and stand by again; for ever. The service
    is closed at the end.

    Args:
        service: It stands by.
        reach: Gives a journal that was never used, and where to call it, one call at a time; for each leadership anew.
        config: The core's settings.
        lease: Seconds that a lease runs.
        observers: Hear that it leads.
        ready: Called with the service once the journal was reached.
    Raises:
        LocalError: Settings and journal contradict each other.
        JournalError: The journal cannot be reached at the start, or is damaged, or refuses a record.
    """
    async with _ending(service):
        wish = _Wish(config)
        begins = True
        lost_early = 0  # times in a row
        while True:
            store, executor = reach()
            leadership = Leadership(
                store,
                executor,
                holder=service.address,
                lease=lease,
                lost_early=lost_early,
                following=service.following,
                on_standby=service.stand_by,
            )
            async with leadership:
                if begins:
                    await leadership.open()
                    if ready is not None:
                        ready(service)
                begins = False
                await _lead_once(service, leadership, wish, observers)
                lost_early = leadership.early_losses()


async def _lead_once(service: CoordinatorService, leadership: Leadership, wish: _Wish, observers: Observers) -> None:
    """Stand by, lead, and return when the lease is lost; the service stands by then."""
    try:
        store = await leadership.lead()
    except LeaseLost as error:
        service.stand_by(error.leader)
        return
    settings = _seeded(wish.settings(store.load()), store)
    service.lead(store, leadership.executor, settings, token=leadership.token)
    core = service.core
    observers.emit("leads", token=leadership.token, seed=core.history.seed)
    try:
        # The term's own error first: where both have one, the other may be a consequence.
        await _first_error(service.wait_failed(), leadership.keep())
    except LeaseLost as error:
        service.step_down(error.message, error.leader)
        wish.term_ended(core)


class _Wish:
    """The settings of one term after the other, with the nodes that an operator gives up as long as that is open.

    Whether it is, the journal says with which the next term begins. What the one before has handed to its journal, the
    nodes' end or a view, may have got there or not.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._view_id: int | None = None  # of the view that was the last one when the first term began

    def settings(self, history: History) -> CoordinatorConfig:
        """Return those of the term that begins with this journal."""
        if self._view_id is None:
            self._view_id = _view_id(history)
        elif self._view_id != _view_id(history) or not set(self._config.forget) & set(history.base):
            self._config = replace(self._config, forget=())  # there was a quorum meanwhile, or they are forgotten
        return self._config

    def term_ended(self, core: CoordinatorCore) -> None:
        """Take in that a term is over. core: of that term; only what it was asked for is taken from it."""
        self._config = replace(self._config, forget=core.to_forget)


def _view_id(history: History) -> int:
    return 0 if history.view is None else history.view.view_id


async def _first_error(*waits: Coroutine[Any, Any, None]) -> None:
    """Wait until one of them raises, and raise that; end the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _ending(service: CoordinatorService) -> AsyncIterator[None]:
    """Close the service at the end, and tell members how it came to it."""
    reason = "stopped"
    try:
        yield
    except QuicollError:
        reason = "cannot go on"
        raise
    finally:
        await service.aclose(reason)


def _seeded(config: CoordinatorConfig, store: RecordStore) -> CoordinatorConfig:
    """Return the settings with a seed: the given one, or a random one for a new journal."""
    if config.seed is None and store.load().seed is None:
        return replace(config, seed=int.from_bytes(os.urandom(8), "big") >> 1)
    return config


def _is_shared(journal: str | Path) -> bool:
    """Return whether `journal` is a database's URL, not a file."""
    return str(journal).startswith(("postgresql://", "postgres://"))
