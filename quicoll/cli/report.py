"""The findings of a command as JSON: into a file, or to standard output where the file is called `-`.

With `-` the output is for another program, so what is for people goes to stderr then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from quicoll.errors import LocalError

__all__ = ["console_beside", "open_report", "working", "write_report"]


def console_beside(report: Path | None, **options: Any) -> Console:
    """Return the console for what people read: stdout, or stderr where the report goes to stdout."""
    return Console(highlight=False, stderr=_is_stdout(report), **options)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on stderr, where that is a terminal, that something is at work, until the block ends. Elsewhere nothing.

    For what may take more than two seconds and says nothing meanwhile.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield
        return
    # What is printed meanwhile goes by way of the console only where both are the terminal: a pipe gets it as ever.
    spinner, here = Spinner("dots", text=what), sys.stdout.isatty()
    with Live(spinner, console=console, transient=True, redirect_stdout=here, refresh_per_second=8):
        yield


def open_report(path: Path | None) -> None:
    """Check now, and not after an hour of work, that the report can be written. An existing one stays until then.

    Raises LocalError.
    """
    if path is None or _is_stdout(path):
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise _unwritable(path, error) from error


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    """Write the report; None: nowhere. Raises LocalError where the file cannot be written."""
    if path is None:
        return
    text = json.dumps(report, indent=2)
    if _is_stdout(path):
        typer.echo(text)
        return
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> LocalError:
    return LocalError(f"cannot write {path}: {error.strerror or error}")


def _is_stdout(path: Path | None) -> bool:
    return path is not None and str(path) == "-"
