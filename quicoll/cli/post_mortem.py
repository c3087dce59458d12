"""`quicoll post-mortem`: who did what last, from the files that flight recorders have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from quicoll.observability.flight_files import read_flights
from quicoll.observability.post_mortem import PostMortem, conclude, told_in_sentences

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("post-mortem")(post_mortem)


def post_mortem(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="What the ranks had as QUICOLL_FLIGHT_DIR, all files in one place.", show_default=False
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of sentences.")] = False,
) -> None:
    """Say who was lost or late, who only gave up because of it, and what each rank did last.

    Reads what ranks with a flight_dir (quicoll run --flight DIR) wrote when something failed. Files that are torn or
    missing are named; what can be concluded from the others is.

    Exit status 0: a view has failed, and is explained. 1: none has, as far as the files say. 2: there is no such file,
    or none can be read.
    """
    read = read_flights(directory)
    found = conclude(read.files.values())
    unread = [f"{name}: {why}" for name, why in read.unread.items()]
    if as_json:
        typer.echo(json.dumps(_told(found, unread)))
    else:
        for line in [*told_in_sentences(found), *unread]:
            typer.echo(line)
    if not read.files:
        raise typer.Exit(2)
    if not any(end.kind != "changed" for end in found.ends):
        raise typer.Exit(1)


def _told(found: PostMortem, unread: list[str]) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(found)
    return {**told, "unread": unread}
