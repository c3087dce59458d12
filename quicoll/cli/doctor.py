"""`quicoll doctor`: what keeps a rank from working here, in sentences, with what to do."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quicoll.cli.report import working
from quicoll.config import Config
from quicoll.doctor.certificates import certificates
from quicoll.doctor.examination import examine_host
from quicoll.doctor.network import answer
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.config import JoinSettings

__all__ = ["register"]

_MARKS = {"fine": ("ok", "green"), "note": ("note", "yellow"), "wrong": ("WRONG", "red")}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("doctor")(doctor)


def doctor(
    coordinator: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="As the setting of this name.")] = None,
    certs: Annotated[Path | None, typer.Option(help="Directory of certificates.")] = None,
    job: Annotated[str | None, typer.Option(help="The job's name.")] = None,
    node: Annotated[str | None, typer.Option(help="This rank's name.")] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where other ranks reach this one.")] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where other ranks are told to reach this one.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Another rank, or a doctor with --answer, to reach; may be repeated."),
    ] = None,
    wait: Annotated[
        float,
        typer.Option("--answer", help="Stand at the rank's address for so many seconds, and answer other doctors."),
    ] = 0.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each answer.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Check what a rank needs here: certificates, clock, port, coordinator, path, NAT, versions, limits.

    Settings that are not given come from the environment, as `quicoll env` shows them. Exit status 0 when nothing is
    wrong, 1 when something is.
    """
    settings: JoinSettings = {
        "coordinator": coordinator,
        "certs": certs,
        "job": job,
        "node": node,
        "listen": listen,
        "advertise": advertise,
    }
    if wait > 0:
        asyncio.run(_stand(settings, wait))
        return
    with working("asks the coordinator and the peers"):
        findings = asyncio.run(examine_host(peers=peer or (), patience=timeout, **settings))
    count = sum(finding.state == "wrong" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"wrong": count, "findings": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            mark, color = _MARKS[finding.state]
            typer.echo(f"{typer.style(f'{mark:<6}', fg=color)}{finding.check:<13} {finding.says}")
            if finding.advice:
                typer.echo(f"{'':<19} -> {finding.advice}")
        typer.echo("Nothing is wrong." if not count else f"{count} {'thing is' if count == 1 else 'things are'} wrong.")
    raise typer.Exit(1 if count else 0)


async def _stand(settings: JoinSettings, wait: float) -> None:
    config = await Config.resolve_in_loop(**settings)
    found, credentials = certificates(config)
    if credentials is None:
        raise LocalError(f"{found[-1].says} {found[-1].advice}")
    typer.echo(f"{config.node} answers at {config.listen} for {wait:g} s")
    await answer(config, credentials, wait)
