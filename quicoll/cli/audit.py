"""`quicoll audit`: what runs did, the first thing in which two of them differ, and what their signatures prove."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quicoll.audit.diff import Comparison, diff
from quicoll.audit.log import Run, load_run
from quicoll.audit.verify import SignedFile, SignedStretch, Verification, verify_run
from quicoll.errors import LocalError
from quicoll.observability.flight_record import printable
from quicoll_transport.errors import TransportError
from quicoll_transport.security.credentials import AUTHORITY_FILE, read_certificates

__all__ = ["register"]

_audit_app = typer.Typer(help="Print the audit of a run, compare two, or verify one.", no_args_is_help=True)

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


@_audit_app.command("verify")
def verify_signatures(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The directory of a run, or the file of one rank.", show_default=False)
    ],
    ca: Annotated[
        Path, typer.Option(metavar="FILE", help="The job's authorities: ca.pem, or a directory with it.")
    ] = Path("certs"),
    as_json: AsJson = False,
) -> None:
    """Say what the signatures of an audit prove: who computed what, when, in which view, from which state.

    Exit status 0: every line of every rank is as it was signed, up to the end. 1: something was altered, cut off,
    exchanged, or signed by somebody else. 2: no such thing is seen, but something is not signed or not there; or a file
    cannot be read.
    """
    try:
        trust = read_certificates(ca / AUTHORITY_FILE if ca.is_dir() else ca)
    except TransportError as error:
        raise LocalError(str(error)) from error
    found = verify_run(run, trust)
    if as_json:
        typer.echo(json.dumps({"verdict": _verdict(found), **asdict(found)}))
    else:
        for file in found.files:
            for line in _proved(file):
                typer.echo(line)
        for text in (*found.faults, *found.gaps):
            typer.echo(printable(text, 1024), err=True)
        signed = sum(file.signed for file in found.files)
        typer.echo(f"{_verdict(found)}: {len(found.files)} files of job {printable(found.job)}, {signed} lines signed")
    status = {"verified": 0, "not as signed": 1, "incomplete": 2}[_verdict(found)]
    if status:
        raise typer.Exit(status)


def _verdict(found: Verification) -> str:
    return "not as signed" if found.faults else "incomplete" if found.gaps else "verified"


def _proved(file: SignedFile) -> list[str]:
    lines = [f"{file.name}: {printable(file.node) or 'nobody'}, {file.signed} lines signed"]
    for each in file.stretches:
        lines += _stretch(each)
    return lines


def _stretch(each: SignedStretch) -> list[str]:
    end = "ended in order" if each.closed else "no end"
    source = f", read from {printable(each.source)}" if each.source else ""
    (first_step, last_step), (first_view, last_view) = each.steps, each.views
    did = f"steps {first_step} to {last_step} in views {first_view} to {last_view}" if each.views[0] else "no step"
    return [
        f"  {each.opened} to {each.until}, {end}",
        f"    began with the state after step {each.from_step}{source}",
        f"    {did}, {each.calls} calls",
        f"    quicoll {printable(each.version) or 'of a checkout'}, program {printable(each.code) or 'not named'}, "
        f"environment {printable(each.fingerprint)}",
        *(f"    signed with the certificate sha256={certificate}" for certificate in each.certificates),
    ]


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
