"""`quicoll coordinator`: the job's coordinator, until it is told to end. It carries no tensors."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quicoll.observability.events import Event, JsonLines
from quicoll_transport.security.identity import COORDINATOR

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("coordinator")(coordinator)


def coordinator(
    job: Annotated[str, typer.Option(envvar="QUICOLL_JOB", help="The job's name, as in the certificates.")],
    certs: Annotated[Path, typer.Option(envvar="QUICOLL_CERTS", help="Directory with the coordinator's certificate.")],
    world_size: Annotated[int, typer.Option(min=1, help="Members that the first view waits for.")],
    journal: Annotated[Path, typer.Option(help="File with the decisions; a coordinator that comes back reads it.")],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address; port 0 picks one.")] = "127.0.0.1:4433",
    lost_after: Annotated[
        float, typer.Option(envvar="QUICOLL_LOST_AFTER", help="Seconds of silence until a member is lost.")
    ] = 2.0,
    events: Annotated[
        Path | None, typer.Option(envvar="QUICOLL_EVENTS", help="Directory for coordinator.jsonl, the events file.")
    ] = None,
) -> None:
    """Run the coordinator of a job in the foreground. Started again with the same journal, it goes on from there.

    Exit status 0 when SIGTERM ended it, 130 when Ctrl-C did, 2 for an error.
    """
    writer = JsonLines(events / f"{COORDINATOR}.jsonl") if events is not None else None

    def observe(event: Event) -> None:
        if writer is not None:
            writer(event)
        if event.kind == "listening":
            typer.echo(f"coordinator of job {job} listening on {event.fields['address']}")

    try:
        told = asyncio.run(_serve(listen, job, certs, journal, world_size, lost_after, observe))
    finally:
        if writer is not None:
            writer.close()
    if told is signal.SIGINT:
        raise KeyboardInterrupt  # everything is closed by now; SIGTERM, of a service manager, is no failure


async def _serve(
    listen: str,
    job: str,
    certs: Path,
    journal: Path,
    world_size: int,
    lost_after: float,
    observe: Callable[[Event], None],
) -> signal.Signals | None:
    """The signal that ended it."""
    from quicoll.membership.coordinator.service import serve

    serving = asyncio.create_task(
        serve(
            listen=listen,
            job=job,
            certs=certs,
            journal=journal,
            world_size=world_size,
            lost_after=lost_after,
            observer=observe,
        )
    )
    loop = asyncio.get_running_loop()
    told: list[signal.Signals] = []

    def tell(number: signal.Signals) -> None:
        told.append(number)
        serving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, tell, number)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    return told[0] if told else None
