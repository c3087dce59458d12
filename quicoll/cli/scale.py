"""`quicoll scale`: ask a running job for another number of ranks, and wait until it has them."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quicoll.checks import MAX_MEMBERS
from quicoll.cli.membership_options import CoordinatorOption, RunOption, find_job, node_patterns
from quicoll.cli.report import working
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.membership.operators import OperatorAnswer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("scale")(scale_job)


def scale_job(
    world_size: Annotated[
        int | None,
        typer.Argument(
            metavar="N", min=1, max=MAX_MEMBERS, help="Ranks that the job shall have.", show_default="as many as it has"
        ),
    ] = None,
    leave: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODES",
            help="Nodes that shall leave, separated by commas; again for more. Else those of the highest ranks.",
            show_default=False,
        ),
    ] = None,
    coordinator: CoordinatorOption = None,
    certs: Annotated[
        Path | None,
        typer.Option(
            envvar="QUICOLL_CERTS",
            help="Directory with the operator's certificate.",
            show_default="that of the one `quicoll run` of this user",
        ),
    ] = None,
    operator: Annotated[str, typer.Option(help="The operator's name in its certificate.")] = "operator",
    run: RunOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until the job is as it was asked to be.")] = 300.0,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the job is so, or only say it.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object, one a line for each change, instead of sentences.")
    ] = False,
) -> None:
    """Ask a running job for N ranks; workers that join make it larger, and those of the highest ranks leave.

    The coordinator keeps to N until it is asked for another number. Exit status 0 once a view of N ranks is at work, 1
    when it is not so in time, and 2 when it cannot be.
    """
    from quicoll.membership.operator_client import ask_for_ranks

    named = node_patterns(leave)
    if world_size is None and not named:
        raise LocalError("say how many ranks the job shall have, or who shall --leave it")
    found = find_job(coordinator, certs, run)
    with working("until the job is as it was asked to be") if wait else nullcontext():
        answer = asyncio.run(
            ask_for_ranks(
                world_size,
                named,
                coordinator=found.coordinator,
                certs=found.certs,
                node=operator,
                timeout=timeout,
                wait=wait,
                say=_say_json if as_json else _say,
            )
        )
    if wait and answer.waiting_for:
        typer.echo(f"quicoll: not so within {timeout:g} s; the coordinator goes on with it", err=True)
        raise typer.Exit(1)


def _say_json(answer: OperatorAnswer) -> None:
    facts = {
        "world_size": answer.world_size,
        "leave": list(answer.leave),
        "view": answer.view_id,
        "nodes": list(answer.nodes),
        "waiting_for": answer.waiting_for,
    }
    typer.echo(json.dumps(facts))


def _say(answer: OperatorAnswer) -> None:
    """One line for each change."""
    asked = "1 rank is asked for" if answer.world_size == 1 else f"{answer.world_size} ranks are asked for"
    if answer.waiting_for:
        leaving = f", without {', '.join(answer.leave)}" if answer.leave else ""
        typer.echo(f"{asked}{leaving}: {answer.waiting_for}")
    else:
        typer.echo(f"view {answer.view_id} has {len(answer.nodes)} ranks: {', '.join(answer.nodes)}")
