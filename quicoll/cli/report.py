"""The findings of a command as JSON: into a file, or to standard output where the file is called `-`.

With `-` the output is for another program, so what is for people goes to stderr then.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from quicoll.errors import LocalError

__all__ = ["console_beside", "open_report", "write_report"]


def console_beside(report: Path | None, **options: Any) -> Console:
    """Return the console for what people read: stdout, or stderr where the report goes to stdout."""
    return Console(highlight=False, stderr=_is_stdout(report), **options)


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
