"""`quicoll audit`: what runs did, and the first thing in which two of them differ."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quicoll.audit.diff import Comparison, diff
from quicoll.audit.log import Run, load_run

__all__ = ["register"]

_audit_app = typer.Typer(help="Print the audit of a run, or compare two.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_STATUS = {"equal": 0, "no difference": 0, "different": 1, "incomplete": 2}


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(_audit_app, name="audit")


@_audit_app.command("diff")
def diff_runs(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="The directory of a run, or the file of one rank.", show_default=False)
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="The directory or file of the other run.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Name the first operation, step and rank at which two runs differ.

    Exit status 0: equal, or no difference in what two world sizes, or the ranks whose files were given, have in
    common. 1: they differ. 2: no difference is seen, but a rank's file is missing or damaged, or there is nothing to
    compare; or a file cannot be read, or is of another job or run.
    """
    runs = load_run(a), load_run(b)
    found = diff(*runs)
    if as_json:
        told = {
            "verdict": found.verdict,
            "equal": found.verdict == "equal",
            "difference": None if found.difference is None else asdict(found.difference),
            "operations": found.operations,
            "apart": found.apart,
            "gaps": found.gaps,
            "runs": [_summary(run) for run in runs],
        }
        typer.echo(json.dumps(told))
    else:
        for gap in found.gaps:
            typer.echo(gap, err=True)
        for line in _told(found, *runs):
            typer.echo(line)
    if _STATUS[found.verdict]:
        raise typer.Exit(_STATUS[found.verdict])


@_audit_app.command("show")
def show_run(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The directory of a run, or the file of one rank.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Print the calls of a run, step by step."""
    loaded = load_run(run)
    if as_json:
        typer.echo(json.dumps(_summary(loaded)))
        return
    for gap in loaded.gaps:
        typer.echo(gap, err=True)
    for place, attempt in loaded.places.items():
        typer.echo(f"{place}: ranks {', '.join(map(str, attempt.ranks))} of {attempt.world}")
        first = next(iter(attempt.ranks.values()))
        for index, record in enumerate(first):
            terms = f"  {record.terms}" if record.terms else ""
            typer.echo(f"  {index}  {record.op}{terms}  group {record.group}  result {record.result or '-'}")


def _told(found: Comparison, a: Run, b: Run) -> list[str]:
    if found.difference is not None:
        return [str(found.difference)]
    verdict = "incomplete: no difference in what is there" if found.verdict == "incomplete" else found.verdict
    steps = len({place.step for place in a.places if not place.outside})
    lines = [f"{verdict}: {steps} steps, {a.operations} calls in A, {b.operations} in B"]
    if found.apart:
        lines.append(
            f"  {found.apart} of {found.operations} operations could not be compared, or not whole: what they give "
            "depends on the world size"
        )
    for name, run in (("A", a), ("B", b)):
        if run.alone and found.partial:
            ranks = sorted({rank for attempt in run.places.values() for rank in attempt.ranks})
            lines.append(f"  {name} is the file of rank {', '.join(map(str, ranks))} alone")
    return lines


def _summary(run: Run) -> dict[str, object]:
    steps = [place.step for place in run.places if not place.outside]
    return {
        "path": run.name,
        "steps": len(steps),
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "calls": run.operations,
        "gaps": list(run.gaps),
    }
