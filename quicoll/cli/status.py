"""`quicoll status`: how a running job is, in one line, with an exit status for scripts."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from quicoll.cli.membership_options import (
    CoordinatorOption,
    LookAsOption,
    LookCertsOption,
    RunOption,
    StalledAfterOption,
    find_job,
)
from quicoll.cli.report import working

if TYPE_CHECKING:
    from quicoll.cli.membership_options import FoundJob
    from quicoll.membership.status_client import Glance

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("status")(show_status)


def show_status(
    coordinator: CoordinatorOption = None,
    certs: LookCertsOption = None,
    look_as: LookAsOption = None,
    run: RunOption = None,
    stalled_after: StalledAfterOption = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a sentence.")] = False,
) -> None:
    """Say in one line how a running job is; `quicoll top` shows all of it.

    Exit status 0 when it goes on, is idle between two steps, is about to have a view (for the first one nodes have a
    minute to come), or is done; 1 when it is held (there can be no view) or stalled (a step is open for longer than is
    usual); 2 when no coordinator that leads has answered, or for an error.
    """
    from quicoll.cli.status_words import facts_of, picture_of

    found = find_job(coordinator, certs, run)
    patience_ns = None if stalled_after is None else round(stalled_after * 1e9)
    with working(f"asks the coordinator at {found.coordinator}"):
        glance = asyncio.run(_look(found, look_as, timeout, links=as_json))
    picture = picture_of(glance, patience_ns=patience_ns)
    if as_json:
        typer.echo(json.dumps(facts_of(glance, patience_ns=patience_ns), indent=2))
    else:
        typer.echo(picture.sentence if glance.status else f"quicoll: {picture.sentence}", err=glance.status is None)
    raise typer.Exit(picture.exit_status)


async def _look(found: FoundJob, named: str | None, timeout: float, *, links: bool) -> Glance:
    from quicoll.cli.looking import watch_job

    async with watch_job(found, named) as watch:
        return await watch.look(timeout, links=links)
