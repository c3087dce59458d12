"""`quicoll relay`: passes datagrams on between ranks that cannot reach each other, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quicoll.checks import MAX_WHOLE
from quicoll.config import check_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("relay")(relay)


def relay(
    job: Annotated[str, typer.Option(envvar="QUICOLL_JOB", help="The job's name, as in the certificates.")],
    certs: Annotated[Path, typer.Option(envvar="QUICOLL_CERTS", help="Directory with relay-relay.pem and its key.")],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address; port 0 picks one.")] = "0.0.0.0:4434",
    rate: Annotated[
        float, typer.Option(help="Megabytes a second that it passes on; half of it at most from one rank to another.")
    ] = 100.0,
    deny: Annotated[
        Path | None,
        typer.Option(envvar="QUICOLL_DENY", help="File of SHA-256 fingerprints of certificates to refuse, one a line."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with the address, instead of a line.")
    ] = False,
) -> None:
    """Pass datagrams on between ranks of a job that cannot reach each other, behind NAT.

    Name it to the job by `quicoll coordinator --relay HOST:PORT`. It sees ciphertext alone. It needs a certificate:
    quicoll certs issue DIR --role relay --node relay. Exit status 0 when SIGTERM ended it, 130 when Ctrl-C did, 2 for
    an error.
    """
    from quicoll.membership.relay_service import serve_relay

    def ready(address: str) -> None:
        said = f"relay of job {job}, listening on {address}"
        typer.echo(json.dumps({"kind": "listening", "job": job, "address": address}) if as_json else said)

    check_variables(os.environ)
    start = partial(
        serve_relay,
        listen=listen,
        job=job,
        certs=certs,
        rate=rate,
        deny=deny,
        incarnation=1 + (int.from_bytes(os.urandom(8), "big") >> 1) % MAX_WHOLE,
        ready=ready,
    )
    if asyncio.run(_serve(start)) is signal.SIGINT:
        raise KeyboardInterrupt


async def _serve(start: Callable[[], Coroutine[Any, Any, None]]) -> signal.Signals | None:
    """Run the relay that `start` makes; return the signal that ended it."""
    serving = asyncio.create_task(start())
    ended_by: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        ended_by.append(number)
        serving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    return ended_by[0] if ended_by else None
