"""`quicoll audit`: what runs did, and the first thing in which two of them differ."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quicoll.audit import Run, diff, load_run

__all__ = ["app"]

app = typer.Typer(help="Look at the audits of runs, and compare two.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("diff")
def diff_runs(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run's directory, or one rank's file.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other run's.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Name the first operation, step and rank at which two runs differ; exit status 1 if they do, 0 if not."""
    runs = load_run(a), load_run(b)
    found = diff(*runs)
    if as_json:
        difference = None if found is None else asdict(found)
        typer.echo(json.dumps({"equal": found is None, "difference": difference, "runs": [_summary(r) for r in runs]}))
    else:
        for name, run in zip("AB", runs, strict=True):
            for warning in run.warnings:
                typer.echo(f"{name}: {warning}", err=True)
        steps = len({place.step for place in runs[0].places if not place.outside})
        typer.echo(
            f"equal: {steps} steps, {runs[0].operations} calls in A, {runs[1].operations} in B"
            if found is None
            else str(found)
        )
    if found is not None:
        raise typer.Exit(1)


@app.command("show")
def show(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's directory, or one rank's file.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Print what a run did, step by step."""
    loaded = load_run(run)
    if as_json:
        typer.echo(json.dumps(_summary(loaded)))
        return
    for warning in loaded.warnings:
        typer.echo(warning, err=True)
    for place, ranks in loaded.places.items():
        typer.echo(f"{place}: ranks {', '.join(map(str, ranks))}")
        first = next(iter(ranks.values()))
        for index, record in enumerate(first):
            typer.echo(f"  {index}  {record.op}  group {record.group}  result {record.result or '-'}")


def _summary(run: Run) -> dict[str, object]:
    steps = [place.step for place in run.places if not place.outside]
    return {
        "path": run.name,
        "steps": len(steps),
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "calls": run.operations,
        "warnings": list(run.warnings),
    }
