"""`quicoll trace`: one timeline of what all ranks did, from the files that each of them has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quicoll.cli.report import working
from quicoll.errors import LocalError
from quicoll.observability.chrome_trace import write_chrome_trace
from quicoll.observability.flight_timeline import draw_timeline
from quicoll.observability.flight_trace import read_traces

__all__ = ["register", "write_timeline"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("trace")(trace_run)


def trace_run(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="What the ranks had as QUICOLL_TRACE_DIR, all files in one place.", show_default=False
        ),
    ],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The timeline, for ui.perfetto.dev.", show_default=False)
    ],
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object: how many files are drawn, and which were not read whole, or at all."
        ),
    ] = False,
) -> None:
    """Write one timeline of all ranks: views, steps, operations and events, for Perfetto.

    quicoll run --trace FILE does it by itself. Times of several hosts are put on one clock, by the calls that their
    ranks heard of each other. Files that are torn or missing are named; what the others say is drawn.

    Exit status 0: all files were read. 2: one could not be, or not whole; or there is none.
    """
    with working(f"reads the traces in {directory}"):
        read, unread = write_timeline(directory, file)
    if as_json:
        typer.echo(json.dumps({"file": str(file), "read": read, "unread": unread}))
    if unread:
        raise typer.Exit(2)


def write_timeline(directory: Path, file: Path) -> tuple[int, dict[str, str]]:
    """Write the timeline of a directory, and say what could not be read of it.

    Returns how many files are drawn, and by name why files were not read whole (those are drawn too), or not at all.
    """
    files, unread = read_traces(directory)
    for name, why in unread.items():
        typer.echo(f"quicoll: {name}: {why}", err=True)
    if not files:
        raise LocalError(f"no trace in {directory} can be read")
    events, about = draw_timeline(files)
    write_chrome_trace(file, events, about)
    return len(files), dict(unread)
