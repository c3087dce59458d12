"""`quicoll run`: a script as N workers on this machine, over QUIC, with a coordinator of their own.

quicoll run -n 4 train.py --epochs 3          a Python file, by the Python that runs quicoll
quicoll run -n 4 -m package.train --epochs 3  a module, by the same
quicoll run -n 4 -- python train.py           a program, found as a shell finds it
"""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import gettempdir
from typing import Annotated

import typer

from quicoll.cli.membership_options import (
    MaxWorldSizeOption,
    MinWorldSizeOption,
    NodesOption,
    SeedOption,
    VoteTimeoutOption,
    WarmSparesOption,
    coordinator_options,
)
from quicoll.cli.report import open_report, write_report
from quicoll.cli.trace import write_timeline
from quicoll.errors import LocalError
from quicoll.launch.supervisor import Supervisor
from quicoll.observability.prometheus import demand_prometheus
from quicoll_transport.security.authority import job_of
from quicoll_transport.security.credentials import AUTHORITY_FILE, read_certificates

__all__ = ["register"]

_DEFAULT_JOB = "local"


def register(app: typer.Typer) -> None:
    """Add the command to the application. Options end at the script: what follows it is the script's."""
    app.command("run", context_settings={"allow_interspersed_args": False})(run_script)


def run_script(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", help="What each worker runs: a Python file, or a program.", show_default=False
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option("-n", "--workers", min=1, help="How many workers.")] = 2,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a Python module, as in python -m.")] = False,
    seed: SeedOption = None,
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="How often each worker that dies is started again, within --restart-window; not where no "
            "restart would help.",
        ),
    ] = 3,
    restart_window: Annotated[float, typer.Option(help="Seconds for which a restart counts.")] = 600.0,
    grace: Annotated[
        float, typer.Option(help="Seconds that workers have to end in after SIGTERM or Ctrl-C, until SIGKILL.")
    ] = 10.0,
    certs: Annotated[
        Path | None,
        typer.Option(help="Directory of certificates for worker-0 ... and coordinator; else throw-away ones."),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(help="The job's name; else the one in the certificates, or 'local'.", show_default=False),
    ] = None,
    events: Annotated[Path | None, typer.Option(help="Keep the events of every process in this directory.")] = None,
    qlog: Annotated[
        Path | None, typer.Option(help="Write qlog traces of every connection of every process to this directory.")
    ] = None,
    flight: Annotated[
        Path | None,
        typer.Option(
            help="When something fails, write what each process did last to this directory, for quicoll post-mortem."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a timeline of all workers to this file at the end, for Perfetto."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT", help="Serve figures for Prometheus: worker-0 at this port, the next at the next one."
        ),
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(help="Keep the coordinator's journal in this file, and go on from it.")
    ] = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="The coordinator's address.")] = "127.0.0.1:0",
    lost_after: Annotated[float | None, typer.Option(help="Seconds of silence until a peer is lost.")] = None,
    spares: Annotated[
        int, typer.Option(min=0, help="How many more workers stand by, and replace those that are lost.")
    ] = 0,
    nodes: NodesOption = None,
    min_world_size: MinWorldSizeOption = 1,
    max_world_size: MaxWorldSizeOption = None,
    warm_spares: WarmSparesOption = 0,
    vote_timeout: VoteTimeoutOption = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write how the run ended, and how often each process was started again; - writes it to stdout, and "
            "what workers say to stderr.",
        ),
    ] = None,
) -> None:
    """Run a script as several workers: quicoll run -n 4 train.py, or -m package.train, or -- python train.py.

    Exit status 0 when all have ended with 0, also where none of them has joined the job, which a warning says; 1 when
    one keeps dying or no restart would help it; 143 and 130 after SIGTERM and Ctrl-C: the workers get SIGTERM, and
    --grace to end in. A second one ends them at once.
    """
    open_report(report)
    behind = next((word for word in arguments or () if word.partition("=")[0] in ("-n", "--workers")), None)
    source = context.get_parameter_source("workers")
    if behind is not None and source is not None and source.name == "DEFAULT":
        typer.echo(
            f"quicoll: {behind} behind {script} is an argument of the script; workers are set before it: "
            f"quicoll run -n N {script}",
            err=True,
        )
    command = [*(_module(script) if module else _program(script)), *(arguments or ())]
    if metrics is not None and command[0] == sys.executable:  # another program may have packages of its own
        demand_prometheus(metrics)
    if max_world_size is None and (spares or certs is None):
        max_world_size = workers  # throw-away certificates are there for so many
    # Made by the first worker that writes there.
    traced = None if trace is None else Path(gettempdir(), f"quicoll-trace-{secrets.token_hex(8)}")
    named = job or (_job_in(certs) if certs is not None else _DEFAULT_JOB)
    supervisor = Supervisor(
        command,
        workers=workers,
        job=named,
        certs=certs,
        events=events,
        qlog=qlog,
        flight=flight,
        journal=journal,
        listen=listen,
        seed=seed,
        max_restarts=restarts,
        restart_window=restart_window,
        grace=grace,
        lost_after=lost_after,
        spares=spares,
        most=None if max_world_size is None else max(max_world_size, workers) + spares,
        coordinator_options=coordinator_options(
            nodes, min_world_size, max_world_size, vote_timeout, warm_spares=warm_spares
        ),
        environment={
            **({} if traced is None else {"QUICOLL_TRACE_DIR": str(traced)}),
            **({} if metrics is None else {"QUICOLL_METRICS": metrics}),
        },
        narrate=True,
        output=_Painter(supervised=workers + spares, err=str(report) == "-"),
    )
    try:
        outcome = asyncio.run(supervisor.run())
        if trace is not None and traced is not None:
            _write_trace(traced, trace)
    finally:
        if traced is not None:
            shutil.rmtree(traced, ignore_errors=True)
    ended = {"exit_status": outcome.exit_status, "reason": outcome.reason, "restarts": dict(outcome.restarts)}
    write_report(report, ended)
    if not outcome.exit_status and not outcome.joined:
        copies = "1 process" if workers + spares == 1 else f"{workers + spares} processes, each by itself"
        typer.echo(
            f"quicoll: nobody has joined job {named}: {script} ran as {copies}; does it call quicoll.join()?", err=True
        )
    if outcome.reason:
        typer.echo(f"quicoll: {outcome.reason}", err=True)
        if flight is not None and outcome.exit_status == 1:
            typer.echo(f"quicoll: who did what last: quicoll post-mortem {flight}", err=True)
    raise typer.Exit(outcome.exit_status)


def _write_trace(directory: Path, file: Path) -> None:
    """Write the timeline. The run is over and has its own exit status: what cannot be drawn is said."""
    try:
        write_timeline(directory, file)
    except LocalError as error:
        typer.echo(f"quicoll: no trace: {error}", err=True)


def _program(name: str) -> list[str]:
    """The command for a Python file, or for a program: an executable file that is none, or a name on the PATH."""
    path = Path(name)
    if path.is_file():
        if path.suffix not in (".py", ".pyw") and os.access(path, os.X_OK):
            return [str(path.absolute())]
        return [sys.executable, name]
    if (path / "__main__.py").is_file():
        return [sys.executable, name]
    if shutil.which(name) is not None:
        return [name]
    hint = ""
    if Path(f"{name}.py").is_file():
        hint = f"; did you mean {name}.py?"
    elif path.is_dir() and not (path / "__init__.py").is_file():
        hint = "; it is a directory without a __main__.py"
    elif _is_module(name):
        hint = f"; a module is run with -m {name}"
    raise LocalError(f"there is no script at {name}, and no program of that name{hint}")


def _module(name: str) -> list[str]:
    if not _is_module(name):
        raise LocalError(f"there is no module {name}")
    return [sys.executable, "-m", name]


def _is_module(name: str) -> bool:
    """Whether `python -m` would find its first part. The rest is not looked for: that would import the first."""
    first = name.partition(".")[0]
    importlib.invalidate_caches()
    return bool(first) and PathFinder.find_spec(first, [os.getcwd(), *sys.path]) is not None


def _job_in(certs: Path) -> str:
    return job_of(read_certificates(certs / AUTHORITY_FILE)[0])


class _Painter:
    """Writes a child's line behind its node's name, in a colour of the node's own where that can be seen."""

    _COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red")

    def __init__(self, *, supervised: int, err: bool) -> None:
        self._err = err
        self._width = len(f"worker-{supervised - 1}") if supervised > 1 else len("worker-0")
        self._seen: dict[str, str] = {}

    def __call__(self, node: str, line: str) -> None:
        color = self._seen.setdefault(node, self._COLORS[len(self._seen) % len(self._COLORS)])
        # click strips the colour when the output is no terminal.
        typer.echo(f"{typer.style(f'[{node}]'.ljust(self._width + 2), fg=color)} {line}", err=self._err)
