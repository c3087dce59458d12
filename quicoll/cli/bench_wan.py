"""`quicoll bench wan`: how near operations come to what a long path that loses packets allows."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from quicoll.cli.report import console_beside, open_report, write_report
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.bench.wan import WanCell, WanLink
    from quicoll.bench.wan_timing import WanSamples

__all__ = ["wan"]

_PROFILES = "metro,wan,badwan,satellite,loss2,bursts,asymmetric"
_MOST_CELLS = 500
_TCP_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def wan(
    profiles: Annotated[
        str | None,
        typer.Option(
            help=f"Links by name, with commas: {_PROFILES}, shallow.",
            show_default="all but shallow, or none with --link",
        ),
    ] = None,
    links: Annotated[
        list[str] | None,
        typer.Option(
            "--link",
            metavar="LINK",
            help="A link of your own: rate, round trip, loss, as '200mbit 50ms 0.1%'; also burst=8, queue=0.25 "
            "(round trips), back=50mbit (towards rank 0). Again for more.",
            show_default=False,
        ),
    ] = None,
    mib: Annotated[str, typer.Option(help="MiB of the tensor, with commas.")] = "4",
    ranks: Annotated[str, typer.Option(help="How many ranks, each on a host of its own, with commas.")] = "2",
    congestion: Annotated[str, typer.Option(help="Congestion control, with commas: bbr, cubic, reno.")] = "bbr,cubic",
    kind: Annotated[str, typer.Option(help="all_reduce, or transfer from rank 0 to rank 1.")] = "all_reduce",
    operations: Annotated[int, typer.Option(min=2, max=100, help="How often, with the first.")] = 6,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How many runs of each, from seed 0 on.")] = 1,
    limit: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds for one run's operations; what takes longer is given up.")
    ] = 120.0,
    emulator: Annotated[
        Path | None,
        typer.Option(
            help="Real sockets in network namespaces, which this program makes: path of wanem.py. Needs root.",
            show_default="simulated",
        ),
    ] = None,
    join: Annotated[
        bool,
        typer.Option("--join", help="Be a rank of the job of the environment, with hosts that are really far apart."),
    ] = False,
    gloo: Annotated[
        bool, typer.Option("--gloo/--no-gloo", help="With --emulator or --join: Gloo over TCP in the same run.")
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all samples to this file; - for stdout.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the figures into this file, .png or .svg; needs quicoll[plot].")
    ] = None,
) -> None:
    """Operations over links that are long and lose packets: how many times the least possible time they take.

    That is the tensor's bytes at the link's rate, 2(N-1)/N of them for an all_reduce of N ranks, and 2(N-1) one-way
    delays. Told are the first operation of new connections, and the median and the 90th percentile of the others.

    Simulated unless something else is said: the real code on a virtual clock, of which a seed gives the same figures
    again. Exit status 1 when an operation failed or took longer than --limit.
    """
    from quicoll.bench.plot import demand_matplotlib

    if emulator is not None and join:
        raise LocalError("--emulator makes the links, --join takes those that are there: one of them")
    if plot is not None:
        demand_matplotlib()
    chosen = _links(profiles, links)
    sizes, many = _numbers("--mib", mib), _numbers("--ranks", ranks)
    controls = [word.strip() for word in congestion.split(",")]
    cells = _cells(chosen, sizes, many, controls, kind, operations, limit)
    table = _Table(json_file, plot, kind)
    try:
        if join:

            def cells_of(world_size: int, control: str) -> list[WanCell]:
                return _cells(chosen, sizes, [world_size], [control], kind, operations, limit)

            asyncio.run(_joined(table, cells_of, gloo))
        elif emulator is not None:
            _emulated(table, cells, seeds, emulator, gloo)
        else:
            _simulated(table, cells, seeds)
    finally:  # also what was measured before an error or Ctrl-C is told of
        table.close()
    raise typer.Exit(1 if table.failed else 0)


def _links(profiles: str | None, links: list[str] | None) -> list[WanLink]:
    from quicoll.bench.wan import LINKS, parse_link

    names = profiles if profiles is not None else "" if links else _PROFILES
    found = []
    for name in (word.strip() for word in names.split(",") if word.strip()):
        if name not in LINKS:
            raise LocalError(f"there is no link {name!r}; take {', '.join(LINKS)}, or describe one with --link")
        found.append(LINKS[name])
    return found + [parse_link(text) for text in links or ()]


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise LocalError(f"{option} takes whole numbers with commas, not {text!r}") from None


def _cells(
    links: list[WanLink],
    mib: list[int],
    ranks: list[int],
    controls: list[str],
    kind: str,
    operations: int,
    limit: float,
) -> list[WanCell]:
    """Return all that is measured; those with one link, size and number of ranks stand together."""
    from quicoll.bench.wan import WanCell

    found = [
        WanCell(link, kind, size, many, control, operations, limit)
        for link in links
        for many in ranks
        for size in mib
        for control in controls
    ]
    if not 1 <= len(found) <= _MOST_CELLS:
        raise LocalError(f"1 to {_MOST_CELLS} cells are measured in a run, and these would be {len(found)}")
    return found


class _Table:
    """What is told: a line for each contender of a cell as soon as it is measured; the report and the plot after it."""

    def __init__(self, json_file: Path | None, plot: Path | None, kind: str) -> None:
        open_report(json_file)
        self.how: dict[str, Any] = {}
        self.failed = False
        self._json, self._plot, self._kind = json_file, plot, kind
        self._console = console_beside(json_file, soft_wrap=True)
        self._errors = Console(stderr=True, highlight=False, soft_wrap=True)
        self._reports: list[dict[str, Any]] = []

    def open(self, head: str, **how: Any) -> None:
        """Say how it is measured, and begin the table."""
        self.how = how
        self._console.print(f"{head}; times over the ideal", markup=False)
        self._line("link", "ranks", "MiB", "", "first", "median", "90th", "ideal")

    def measuring(self, what: str, number: int, of: int) -> AbstractContextManager[object]:
        """Say, on stderr, what is under way."""
        said = f"{number} of {of}: {what}"
        if self._errors.is_terminal:
            return self._errors.status(said)
        self._errors.print(said, markup=False)
        return nullcontext()

    def add(self, cell: WanCell, runs: list[dict[str, WanSamples]], also: dict[str, Any]) -> None:
        """Tell of a cell's runs, one for each seed."""
        from quicoll.bench.wan import WanFigure, wan_report

        samples = {name: [run[name].seconds for run in runs] for name in runs[0]}
        for name, each in sorted(samples.items(), reverse=True):  # quicoll before gloo
            figure = WanFigure.of(each, cell.ideal_s)
            called = f"quicoll {cell.congestion}" if name == "quicoll" else f"gloo tcp {also['tcp']}"
            told = [f"{one:.2f}" for one in (figure.first, figure.median, figure.p90)] if figure else ["-"] * 3
            self._line(cell.link.name, cell.ranks, cell.mib, called, *told, f"{cell.ideal_s:.3f} s")
        for seed, run in enumerate(runs):
            for name, found in run.items():
                if found.failed:
                    self.failed = True
                    self._errors.print(f"{cell}: {name}, run {seed}: {found.failed}", markup=False)
                elif len(found.seconds) < cell.operations:
                    said = f"{cell}: {name}, run {seed}: {len(found.seconds)} operations in {cell.limit_s:g} s"
                    self._errors.print(said, markup=False)
        self._reports.append(
            {**wan_report(cell, samples), **also, "failed": {n: [run[n].failed for run in runs] for n in samples}}
        )

    def close(self) -> None:
        """Write the report and draw the plot, where there is anything to tell."""
        if not self._reports:
            return
        from quicoll.bench.plot import draw_wan
        from quicoll_transport.compiled import COMPILED

        machine = {"cpus": os.cpu_count(), "system": platform.platform(), "load": round(os.getloadavg()[0], 2)}
        report = {"benchmark": "wan", **self.how, "compiled": COMPILED, "machine": machine, "cells": self._reports}
        write_report(self._json, report)
        if self._plot is not None:
            draw_wan(self._plot, self._reports, title=f"quicoll bench wan: {self._kind}", subtitle=self.how["links"])

    def _line(self, link: str, ranks: object, mib: object, who: str, *figures: str) -> None:
        words = "".join(f"{word:>9}" for word in figures)
        self._console.print(f"{link:<16} {ranks!s:>5} {mib!s:>4}  {who:<14}{words}", markup=False)


def _simulated(table: _Table, cells: list[WanCell], seeds: int) -> None:
    from quicoll.bench.wan_simulated import simulate_cell
    from quicoll.sim.disk.sqlite import demand_sqlite

    demand_sqlite()
    table.open("simulated, an access link for each host", links="simulated")
    _all(table, cells, seeds, lambda cell, seed, first: {"quicoll": simulate_cell(cell, seed)}, {})


def _emulated(table: _Table, cells: list[WanCell], seeds: int, emulator: Path, gloo: bool) -> None:
    from quicoll.bench.wan_emulated import demand_emulator, emulate_cell, tcp_control

    demand_emulator(emulator, gloo=gloo)
    tcp = tcp_control()
    if gloo and tcp != "bbr":
        typer.echo("this kernel has no TCP bbr (modprobe tcp_bbr): Gloo is measured over cubic", err=True)
    beside = f", Gloo over TCP {tcp} in the same processes" if gloo else ""
    table.open(f"real sockets over emulated links{beside}", links="emulated")

    def run(cell: WanCell, seed: int, first: bool) -> dict[str, WanSamples]:
        # Once for a link, size and number of ranks: quicoll's congestion control is nothing to Gloo.
        return emulate_cell(cell, seed, emulator=emulator, gloo=gloo and first, tcp=tcp)

    _all(table, cells, seeds, run, {"tcp": tcp})


def _all(
    table: _Table,
    cells: list[WanCell],
    seeds: int,
    run: Callable[[WanCell, int, bool], dict[str, WanSamples]],
    also: dict[str, Any],
) -> None:
    last: tuple[object, ...] = ()
    for number, cell in enumerate(cells, 1):
        place = (cell.link, cell.ranks, cell.mib)
        with table.measuring(str(cell), number, len(cells)):
            runs = [run(cell, seed, place != last) for seed in range(seeds)]
        table.add(cell, runs, also)
        last = place


def _tcp_here() -> str:
    try:
        return _TCP_CONTROL.read_text().strip()
    except OSError:
        return "as it is"


async def _joined(table: _Table, cells_of: Callable[[int, str], list[WanCell]], gloo: bool) -> None:
    """Measure as a rank of a job that is there; what rank 0 was asked for counts, and it alone tells of it."""
    import msgspec

    import quicoll
    from quicoll.bench.wan import WanCell
    from quicoll.bench.wan_ranks import measure_job

    async with quicoll.join() as job:
        asked = msgspec.to_builtins(cells_of(job.world_size, job.config.congestion))
        cells = msgspec.convert(await job.group.broadcast_object(asked), list[WanCell])
        # Of rank 0 too: either all ranks make a group of Gloo's or none.
        master = await job.group.broadcast_object(os.environ.get("MASTER_ADDR") if gloo else None)
        if job.rank == 0:
            if gloo and master is None:
                typer.echo("Gloo is left out: it needs MASTER_ADDR, rank 0's address, and GLOO_SOCKET_IFNAME", err=True)
            table.open(f"{job.world_size} ranks, over the links that there are", links="real")
        for number, cell in enumerate(cells, 1):
            with table.measuring(str(cell), number, len(cells)) if job.rank == 0 else nullcontext():
                found = await measure_job(job, cell, master)
            if job.rank == 0:
                table.add(cell, [found], {"tcp": _tcp_here()})
