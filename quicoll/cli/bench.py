"""`quicoll bench`: how fast quicoll is on this machine, beside others, pair by pair in one run.

Every contender runs in the same processes and takes its turn in every round, so a ratio is one of figures that were
taken within seconds of each other. Absolute figures say what this machine did today.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
from collections import deque
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from quicoll.cli.bench_wan import wan
from quicoll.cli.explain import size_of
from quicoll.cli.report import console_beside, open_report, write_report
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quicoll.bench.cases import Programme
    from quicoll.bench.figures import Row

__all__ = ["register", "table_of"]

_LEAST_RATED = 64 << 10  # bytes from which on rates say something
_SAID = 40  # lines of the processes that are shown when they fail
_NEEDS = {"gloo": "torch", "aioquic": "aioquic"}


_works = typer.Typer(help="Measure quicoll beside others, pair by pair in one run.", no_args_is_help=True)

RivalsOption = Annotated[
    str | None, typer.Option("--vs", help="Compare with gloo, which needs torch.", metavar="NAMES", show_default=False)
]
RanksOption = Annotated[int, typer.Option("-n", "--ranks", min=2, max=64, help="How many processes.")]
SizesOption = Annotated[
    str | None, typer.Option(help="Sizes with commas, as 4,64KiB,16MiB; else those that say most.", show_default=False)
]
RoundsOption = Annotated[int, typer.Option(min=1, help="How often everything is measured; medians count.")]
LentOption = Annotated[
    bool, typer.Option("--lent", help="With tensors of quicoll.empty, which ranks of one host read where they lie.")
]
ReportOption = Annotated[Path | None, typer.Option("--json", help="Write all samples to this file; - for stdout.")]
PlotOption = Annotated[
    Path | None, typer.Option(help="Draw the figures into this file, .png or .svg; needs quicoll[plot].")
]


def register(app: typer.Typer) -> None:
    """Add the command, with one below it for each work, to the application."""
    app.add_typer(_works, name="bench")


@_works.command("transfer")
def _transfer(
    versus: Annotated[
        str | None,
        typer.Option("--vs", help="Compare with stock aioquic.", metavar="NAMES", show_default=False),
    ] = None,
    sizes: SizesOption = None,
    rounds: RoundsOption = 5,
    datagram: Annotated[int, typer.Option(min=0, help="UDP payload in bytes; 0 for what the path carries.")] = 0,
    json_file: ReportOption = None,
    plot: PlotOption = None,
) -> None:
    """One message from a process to another; --vs aioquic: beside stock aioquic."""
    _measure("transfer", versus, 2, sizes, rounds, datagram, json_file, plot)


@_works.command("allreduce")
def _allreduce(
    versus: RivalsOption = None,
    ranks: RanksOption = 2,
    sizes: SizesOption = None,
    rounds: RoundsOption = 5,
    lent: LentOption = False,
    json_file: ReportOption = None,
    plot: PlotOption = None,
) -> None:
    """Sums of tensors of many sizes."""
    _measure("allreduce", versus, ranks, sizes, rounds, 0, json_file, plot, lent=lent)


@_works.command("sharded")
def _sharded(
    versus: RivalsOption = None,
    ranks: RanksOption = 2,
    sizes: SizesOption = None,
    rounds: RoundsOption = 5,
    lent: LentOption = False,
    json_file: ReportOption = None,
    plot: PlotOption = None,
) -> None:
    """What sharded training is made of: all_gather, reduce_scatter and broadcast."""
    _measure("sharded", versus, ranks, sizes, rounds, 0, json_file, plot, lent=lent)


@_works.command("latency")
def _latency(
    versus: RivalsOption = None,
    ranks: RanksOption = 2,
    sizes: SizesOption = None,
    rounds: RoundsOption = 5,
    json_file: ReportOption = None,
    plot: PlotOption = None,
) -> None:
    """The smallest operations."""
    _measure("latency", versus, ranks, sizes, rounds, 0, json_file, plot)


@_works.command("step")
def _step(
    versus: RivalsOption = None,
    ranks: RanksOption = 2,
    sizes: SizesOption = None,
    rounds: RoundsOption = 5,
    json_file: ReportOption = None,
    plot: PlotOption = None,
) -> None:
    """A step with its vote."""
    _measure("step", versus, ranks, sizes, rounds, 0, json_file, plot)


_works.command("wan")(wan)


def _measure(
    work: str,
    versus: str | None,
    ranks: int,
    sizes: str | None,
    rounds: int,
    datagram: int,
    json_file: Path | None,
    plot: Path | None,
    *,
    lent: bool = False,
) -> None:
    """Measure a work of quicoll.bench.cases.WORKS, and show and write what was found."""
    from quicoll.bench.cases import Programme
    from quicoll.bench.figures import row_of
    from quicoll.bench.limits import measure_limits
    from quicoll.bench.plot import demand_matplotlib, draw_figures
    from quicoll_transport.compiled import COMPILED
    from quicoll_transport.quic import SessionConfig

    SessionConfig(datagram_bytes=datagram)  # says what it may be
    rivals = tuple(name.strip() for name in versus.split(",")) if versus else ()
    chosen = tuple(size_of(text) for text in sizes.split(",")) if sizes else ()
    plan = Programme.of(work, rivals=rivals, sizes=chosen, rounds=rounds, datagram_bytes=datagram, lent=lent)
    if "gloo" in rivals:
        _demand_torch()
    if plot is not None:
        demand_matplotlib()
    open_report(json_file)
    console = console_beside(json_file)
    limits = measure_limits()
    console.print(
        f"one core here: memory {limits['memory']:.0f} MB/s, float32 sum {limits['add_float32']:.0f} MB/s, "
        f"AES-128-GCM of packets {limits['aes']:.0f} MB/s; quicoll is {'compiled' if COMPILED else 'pure Python'}",
        markup=False,
    )
    lines = _run(plan, ranks)
    rows = [row_of(line) for line in lines]
    console.print(table_of(work, rows))
    if rivals:
        console.print("ratio: quicoll's time over the other's, by pairs; below 1 quicoll is faster")
    machine = {
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "compiled": COMPILED,
        "load": round(os.getloadavg()[0], 2),
    }
    write_report(
        json_file,
        {
            "benchmark": work,
            "ranks": ranks,
            "rounds": rounds,
            "datagram_bytes": datagram,
            "lent": lent,
            "limits_mb_per_s": limits,
            "versions": _versions(rivals),
            "machine": machine,
            "ratios": {row.name: dict(row.ratios) for row in rows},
            "cases": lines,
        },
    )
    if plot is not None:
        subtitle = f"{ranks} processes on {machine['cpus']} cores, medians of {rounds} rounds; x: time to the other's"
        draw_figures(plot, rows, title=f"quicoll bench {work}", subtitle=subtitle)


def _demand_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise LocalError("--vs gloo needs torch: pip install 'quicoll[torch]'")


def _run(plan: Programme, ranks: int) -> list[dict[str, Any]]:
    """Return what rank 0 wrote. Raises typer.Exit with the run's status where it did not end well."""
    import msgspec

    from quicoll.launch.supervisor import Supervisor
    from quicoll.rendezvous.scratch import scratch_directory

    with scratch_directory() as directory:
        told, result = directory / "plan.json", directory / "result.jsonl"
        told.write_bytes(msgspec.json.encode(plan))
        said: deque[str] = deque(maxlen=_SAID)
        supervisor = Supervisor(
            [sys.executable, "-m", "quicoll.bench.rank", str(told), str(result)],
            workers=ranks,
            job="bench",
            max_restarts=0,
            lost_after=60.0,
            output=lambda node, line: said.append(f"{node}: {line}"),
        )
        outcome = asyncio.run(supervisor.run())
        if outcome.exit_status:
            for line in (*said, f"quicoll: {outcome.reason}"):
                typer.echo(line, err=True)
            raise typer.Exit(outcome.exit_status)
        return [json.loads(line) for line in result.read_text().splitlines()]


def _versions(rivals: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in ("quicoll", "numpy", *(_NEEDS[rival] for rival in rivals)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def table_of(work: str, rows: Sequence[Row]) -> Table:
    """One line for each contender of a case: so it fits into 80 characters, and no figure is broken in two."""
    table = Table(title=f"quicoll bench {work}: one call", title_justify="left", box=None, pad_edge=False)
    for name in ("", "", "median", "least to most", "MB/s", "CPU s/GB", "ratio"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        for name, figure in row.figures.items():
            large = row.size >= _LEAST_RATED
            table.add_row(
                row.name if name == "quicoll" else "",
                name,
                _time(figure.median_s),
                f"{_time(figure.least_s)} to {_time(figure.most_s)}",
                _round(row.rate(name)) if large else "",
                _round(row.cpu_per_gb(name)) if large else "",
                _round(row.ratios[name]) if name in row.ratios else "",
            )
    return table


def _time(seconds: float) -> str:
    return (
        f"{seconds * 1e6:.0f} us"
        if seconds < 1e-3
        else f"{seconds * 1e3:.3g} ms"
        if seconds < 1
        else f"{seconds:.3g} s"
    )


def _round(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
