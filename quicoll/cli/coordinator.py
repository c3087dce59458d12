"""`quicoll coordinator`: the job's coordinator, until a signal ends it. It carries no tensors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quicoll.cli.membership_options import (
    MaxWorldSizeOption,
    MinWorldSizeOption,
    NodesOption,
    SeedOption,
    VoteTimeoutOption,
    WarmSparesOption,
    node_patterns,
)
from quicoll.config import check_variables
from quicoll.errors import LocalError
from quicoll.observability.events import Event, JsonLines, event_json
from quicoll_transport.endpoint.loops import with_own_clock
from quicoll_transport.security.identity import COORDINATOR

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from quicoll.membership.service import CoordinatorService

__all__ = ["register"]

_TELL_AFTER_S = 5.0
_TELL_EVERY_S = 300.0


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("coordinator")(coordinator)


def coordinator(
    job: Annotated[str, typer.Option(envvar="QUICOLL_JOB", help="The job's name, as in the certificates.")],
    certs: Annotated[Path, typer.Option(envvar="QUICOLL_CERTS", help="Directory with the coordinator's certificate.")],
    world_size: Annotated[int, typer.Option(min=1, help="Members that the first view waits for.")],
    journal: Annotated[
        str,
        typer.Option(
            envvar="QUICOLL_JOURNAL",
            metavar="FILE|URL",
            help="File with the decisions, or postgresql://... ; a coordinator that comes back reads it.",
        ),
    ],
    fsync: Annotated[
        bool,
        typer.Option(
            help="With a file: each decision is on the disk before anybody hears of it. Not so, the journal survives "
            "this process, and not the machine; for one that nobody reads after that."
        ),
    ] = True,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address; port 0 picks one.")] = "127.0.0.1:4433",
    seed: SeedOption = None,
    lost_after: Annotated[
        float, typer.Option(envvar="QUICOLL_LOST_AFTER", help="Seconds of silence until a member is lost.")
    ] = 2.0,
    lease: Annotated[
        float, typer.Option(help="With PostgreSQL: seconds after which another coordinator takes the lead.")
    ] = 5.0,
    forget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODES",
            help="Nodes of the last view that are gone for good, where too few are left: names, separated by commas; "
            "again for more. Refused while they may be alive.",
            show_default=False,
        ),
    ] = None,
    nodes: NodesOption = None,
    min_world_size: MinWorldSizeOption = 1,
    max_world_size: MaxWorldSizeOption = None,
    warm_spares: WarmSparesOption = 0,
    vote_timeout: VoteTimeoutOption = None,
    relay: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT|none",
            help="A `quicoll relay`, for ranks that cannot reach each other behind NAT; none: no relay.",
            show_default="this coordinator",
        ),
    ] = "",
    relay_rate: Annotated[
        float, typer.Option(help="Megabytes a second that this coordinator passes on as a relay, at most.")
    ] = 100.0,
    events: Annotated[
        Path | None, typer.Option(envvar="QUICOLL_EVENTS", help="Directory for coordinator.jsonl, the events file.")
    ] = None,
    transport_events: Annotated[
        bool,
        typer.Option(
            "--transport-events", envvar="QUICOLL_TRANSPORT_EVENTS", help="Tell the transport's own events as well."
        ),
    ] = False,
    qlog: Annotated[
        Path | None, typer.Option(envvar="QUICOLL_QLOG", help="Directory for a qlog trace of each connection.")
    ] = None,
    deny: Annotated[
        Path | None,
        typer.Option(envvar="QUICOLL_DENY", help="File of SHA-256 fingerprints of certificates to refuse, one a line."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every event as a JSON object, one a line, instead of sentences.")
    ] = False,
) -> None:
    """Run the coordinator of a job in the foreground. Started again with the same journal, it goes on from there.

    With a journal in PostgreSQL several may run: one leads, the others stand by and take over. One that loses the lead
    stands by again.

    SIGHUP makes it read its certificates and the deny list anew. Exit status 0 when SIGTERM ended it, 130 when Ctrl-C
    did, 2 for an error.
    """
    from quicoll.membership.serving import serve

    check_variables(os.environ)
    writer = JsonLines(events / f"{COORDINATOR}.jsonl") if events is not None else None

    waiting = _Waiting(lambda cause: typer.echo(f"waits: {cause}"))

    def observe(event: Event) -> None:
        if writer is not None:
            writer(event)
        if as_json:
            typer.echo(event_json(event, datetime.now(UTC)))
            return
        if event.kind == "listening":
            seed = event.fields["seed"]
            role = "standing by" if seed is None else f"seed {seed}"
            typer.echo(f"coordinator of job {job}, {role}, listening on {event.fields['address']}")
        if event.kind == "leads":
            typer.echo(f"leads job {job}, seed {event.fields['seed']}, lease with token {event.fields['token']}")
        if event.kind == "stands_by":
            typer.echo(f"stands by again: {event.fields['cause']}")
        if event.kind == "nodes_forgotten":
            typer.echo(f"forgotten: {', '.join(event.fields['nodes'])}")
        if event.kind == "held" and forget:
            typer.echo(f"no view: {event.fields['cause']}")
        waiting.take(event)
        if event.kind == "job_done":
            typer.echo(f"job {job} is done at step {event.fields['step']}")

    start = partial(
        serve,
        listen=listen,
        job=job,
        certs=certs,
        journal=journal,
        fsync=fsync,
        lease=lease,
        forget=node_patterns(forget),
        world_size=world_size,
        seed=seed,
        lost_after=lost_after,
        nodes=node_patterns(nodes),
        min_world_size=min_world_size,
        max_world_size=max_world_size,
        warm_spares=warm_spares,
        vote_timeout=vote_timeout,
        relay=relay,
        relay_rate=relay_rate,
        observer=observe,
        transport_events=transport_events,
        qlog=qlog,
        deny=deny,
    )
    try:
        ended_by = asyncio.run(_serve(start, as_json=as_json))
    finally:
        if writer is not None:
            writer.close()
    if ended_by is signal.SIGINT:
        raise KeyboardInterrupt  # everything is closed by now; SIGTERM, of a service manager, is no failure


class _Waiting:
    """Says why there is no view where that lasts: soon, and then ever more rarely. Takes events on the running loop."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._cause = ""
        self._wait = _TELL_AFTER_S
        self._timer: asyncio.TimerHandle | None = None

    def take(self, event: Event) -> None:
        if event.kind == "held":
            self._cause = event.fields["cause"]
            if self._timer is None:
                self._wait = _TELL_AFTER_S
                self._start()
        elif event.kind in ("view_proposed", "view_installed", "job_done", "stands_by") and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._wait, self._tell)

    def _tell(self) -> None:
        self._say(self._cause)
        self._wait = min(2 * self._wait, _TELL_EVERY_S)
        self._start()


async def _serve(start: Callable[..., Coroutine[Any, Any, None]], *, as_json: bool) -> signal.Signals | None:
    """Run the coordinator that `start` makes; return the signal that ended it."""
    with_own_clock(asyncio.get_running_loop())
    services: list[CoordinatorService] = []
    serving = asyncio.create_task(start(ready=services.append))
    ended_by: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        ended_by.append(number)
        serving.cancel()

    def reload() -> None:
        for service in services:  # none before it is ready: then it is reading the files by itself
            try:
                service.reload()
            except LocalError as error:  # of the files; the coordinator goes on with what it has
                typer.echo(f"quicoll: nothing is changed by SIGHUP: {error}", err=True)
            else:
                typer.echo("certificates and deny list are read anew", err=as_json)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    loop.add_signal_handler(signal.SIGHUP, reload)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    return ended_by[0] if ended_by else None
