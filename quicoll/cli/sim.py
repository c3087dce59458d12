"""`quicoll sim`: clusters in simulated worlds that break, by the thousand or one by its seed.

With --seeds, every seed is a random scenario (quicoll.sim.scenario.swarm), run in worker processes; a failure is
shrunk, and printed as the command that shows it again. With --seed, one of them, or, with --events, one that is written
out. Exit status 0 if all invariants held, 1 if one was broken, 2 for a command that is wrong.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from quicoll.cli.report import console_beside, open_report, write_report
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from rich.console import Console

    from quicoll.sim.outcome import Outcome
    from quicoll.sim.runner import SeedResult, Sweep
    from quicoll.sim.scenario.swarm import Scenario

__all__ = ["register"]

TELL_S = 10.0
"""Seconds between two lines of progress of a sweep, where there is no terminal for a bar."""
MOST_SHRUNK = 5
"""Failures of a sweep that are shrunk; more are seldom more bugs."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("sim")(sim)


def sim(
    seeds: Annotated[str | None, typer.Option(help="Ranges A:B, without B, and seeds, with commas.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="One seed.")] = None,
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Number of workers.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps that every rank commits.")] = 8,
    faults: Annotated[
        str | None, typer.Option(help="Kinds of fault, separated by commas; -disk means all but disk. Default: all.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="With --seeds: number of processes. Default: one for each core.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the summary to this file; - for stdout.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="With --seed: write a timeline for Perfetto (Chrome trace).")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="With --seed: print the run as a story.")] = False,
    shrink_runs: Annotated[int, typer.Option(min=0, help="Runs spent on shrinking each failure.")] = 200,
    compute: Annotated[
        float | None, typer.Option(min=0, help="With --events: simulated seconds of computing in a step.")
    ] = None,
    settings: Annotated[
        str | None, typer.Option(help="With --events: settings of the cluster, as Settings(lost_after=0.5).")
    ] = None,
    events: Annotated[str | None, typer.Option(help="With --seed: the faults, as sim.at(1.2).crash(3); ...")] = None,
) -> None:
    """Run whole clusters on a virtual clock, break their network, machines and clocks, and check every promise."""
    console = console_beside(json_file, soft_wrap=True)
    if (seeds is None) is (seed is None):
        raise LocalError("use --seeds A:B for a sweep, or --seed S for one run")
    if seeds is not None and (events is not None or trace is not None or explain):
        raise LocalError("--events, --trace and --explain are for one run: use --seed S")
    if events is None and (compute is not None or settings is not None):
        raise LocalError("--compute and --settings go with --events; without them the seed decides")
    if events is not None and faults is not None:
        raise LocalError("--faults and --events: either the faults are drawn, or they are written out")
    if seed is not None and processes is not None:
        raise LocalError("--processes is for a sweep: use --seeds A:B")
    from quicoll.sim.disk.sqlite import demand_sqlite

    demand_sqlite()  # every cluster has a journal: a missing SQLite is no failure of the promises
    kinds = "all" if faults is None else faults
    open_report(json_file)
    with _quiet():
        if seeds is not None:
            count = processes or os.cpu_count() or 1
            failed = _sweep(console, _seeds(seeds), ranks, steps, kinds, count, json_file, shrink_runs)
        else:
            assert seed is not None  # noqa: S101 - for the type checker
            scenario = _scenario(seed, ranks, steps, kinds, compute, settings, events)
            failed = _one(console, scenario, json_file, shrink_runs, trace, explain)
    raise typer.Exit(1 if failed else 0)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the logs: those of a broken cluster are expected here and would hide the findings."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _seeds(text: str) -> list[int]:
    """Return the seeds of "0:500" or "3,17,40:60", each once. A number alone is refused: it may mean so many."""
    found: set[int] = set()
    for part in text.split(","):
        first, colon, end = part.partition(":")
        try:
            seeds = range(int(first), int(end) if colon else int(first) + 1)
        except ValueError:
            seeds = range(0)
        if not seeds or seeds.start < 0 or text.isdecimal():
            raise LocalError(f"seeds are written as 0:500 or 3,17,40:60, not {text!r}")
        found.update(seeds)
    return sorted(found)


def _scenario(
    seed: int,
    ranks: int,
    steps: int,
    faults: str,
    compute: float | None,
    settings: str | None,
    events: str | None,
) -> Scenario:
    from quicoll.sim.outcome import Settings
    from quicoll.sim.scenario.language import parse_events, parse_settings
    from quicoll.sim.scenario.swarm import Scenario, generate, parse_kinds
    from quicoll.sim.workload import COMPUTE_S

    if events is None:
        return generate(seed, ranks=ranks, steps=steps, kinds=parse_kinds(faults))
    found = Settings(ranks=ranks) if settings is None else parse_settings(settings, ranks=ranks)
    compute_s = COMPUTE_S if compute is None else compute
    return Scenario(seed=seed, steps=steps, compute_s=compute_s, settings=found, events=parse_events(events))


def _one(
    console: Console,
    scenario: Scenario,
    json_file: Path | None,
    shrink_runs: int,
    trace: Path | None,
    explain: bool,
) -> bool:
    from quicoll.sim.runner import run_scenario
    from quicoll.sim.trace.recording import Recording

    console.print(f"seed {scenario.seed}, {scenario.ranks} ranks, {scenario.steps} steps", markup=False)
    for line in str(scenario).splitlines():
        console.print(f"  {line}", markup=False)
    recording = Recording()
    outcome = run_scenario(scenario, recorder=recording.record if trace is not None or explain else None)
    if trace is not None:
        recording.write_chrome(trace, outcome)
    if explain:
        console.print(recording.explain(outcome), markup=False)
    command = None
    if outcome.error is not None:
        console.print(f"FAILED as it was asked for: {outcome.error}", markup=False)
        command = _shrunk(console, scenario, outcome.error.kind, shrink_runs)
    write_report(json_file, _described(outcome, command or scenario.command))
    console.print(
        f"{outcome.committed} steps committed, {outcome.aborted} aborted, {outcome.views} views, "
        f"{outcome.virtual_s:.3f} s of simulated time in {outcome.wall_s:.3f} s; trace {outcome.digest}",
        markup=False,
    )
    return outcome.error is not None


def _described(outcome: Outcome, command: str) -> dict[str, Any]:
    """One run, with the keys of a sweep's summary."""
    error = outcome.error
    failure = (
        [] if error is None else [{"seed": outcome.seed, "kind": error.kind, "message": str(error), "command": command}]
    )
    return {
        "seeds": 1,
        "failed": failure,
        "faults_injected": outcome.injected,
        "steps_committed": outcome.committed,
        "steps_aborted": outcome.aborted,
        "views": outcome.views,
        "virtual_s": outcome.virtual_s,
        "wall_s": round(outcome.wall_s, 3),
        "scenarios_per_s": round(1 / outcome.wall_s, 3) if outcome.wall_s else None,
        "digest": outcome.digest,
    }


def _sweep(
    console: Console,
    seeds: list[int],
    ranks: int,
    steps: int,
    faults: str,
    jobs: int,
    json_file: Path | None,
    shrink_runs: int,
) -> bool:
    from quicoll.sim.runner import run_seeds
    from quicoll.sim.scenario.swarm import generate, parse_kinds

    kinds = parse_kinds(faults)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("no failure", total=len(seeds))
        done = failures = 0
        told_at = time.monotonic()

        def progress(result: SeedResult) -> None:
            nonlocal done, failures, told_at
            done += 1
            if not result.ok:
                failures += 1
                bar.console.print(f"seed {result.seed} FAILED {result.message}", markup=False)
            so_far = f"{failures} failed" if failures else "no failure"
            bar.update(task, advance=1, description=so_far)
            if not console.is_terminal and time.monotonic() - told_at > TELL_S and done < len(seeds):
                told_at = time.monotonic()
                console.print(f"{done} of {len(seeds)} seeds, {so_far}", markup=False)

        try:
            sweep = run_seeds(seeds, ranks=ranks, steps=steps, kinds=kinds, jobs=jobs, progress=progress)
        except KeyboardInterrupt:
            bar.console.print(f"{done} of {len(seeds)} seeds were run, {failures} of them failed", markup=False)
            raise
    commands: dict[int, str] = {}
    for result in sweep.failures[:MOST_SHRUNK]:
        if result.kind is not None and not result.kind.startswith("worker-"):
            scenario = generate(result.seed, ranks=ranks, steps=steps, kinds=kinds)
            command = _shrunk(console, scenario, result.kind, shrink_runs)
            if command is not None:
                commands[result.seed] = command
    summary = sweep.summary(commands)
    write_report(json_file, summary)
    _show(console, sweep, summary)
    return bool(sweep.failures)


def _shrunk(console: Console, scenario: Scenario, kind: str, runs: int) -> str | None:
    """The command of the smallest scenario that was found to fail in this way; it is printed as well.

    None where the scenario itself does not fail so again: then something beyond the seed is at work, a smaller scenario
    would explain nothing, and that is said.
    """
    from quicoll.sim.runner import run_scenario
    from quicoll.sim.scenario.shrink import shrink

    def verdict(candidate: Scenario) -> str | None:
        error = run_scenario(candidate).error
        return None if error is None else error.kind

    again = verdict(scenario) if runs else kind
    if again != kind:
        what = "all was well" if again is None else again
        console.print(f"seed {scenario.seed}: {kind} could not be shown again: {what} when it was run once more")
        return None
    found = shrink(scenario, kind, verdict, runs=runs)
    console.print(
        f"seed {scenario.seed}, made smaller: {kind} with {found.scenario.faults} of {scenario.faults} faults "
        f"after {found.runs} runs{'' if found.whole else ', not finished'}:",
        markup=False,
    )
    for line in str(found.scenario).splitlines():
        console.print(f"  {line}", markup=False)
    console.print(f"  {found.scenario.command}", markup=False)
    return found.scenario.command


def _show(console: Console, sweep: Sweep, summary: dict[str, Any]) -> None:
    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "scenarios": f"{summary['seeds']} (seeds {summary['first_seed']} to {summary['last_seed']})",
        "failed": str(len(summary["failed"])),
        "steps committed, aborted": f"{summary['steps_committed']}, {summary['steps_aborted']}",
        "views": str(summary["views"]),
        "simulated, real time": f"{summary['virtual_s']:.1f} s, {summary['wall_s']:.1f} s",
        "scenarios a second": f"{summary['scenarios_per_s']} ({summary['scenarios_per_cpu_s']} for a core)",
        "digest": str(summary["digest"]),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    injected = ", ".join(f"{kind} {count}" for kind, count in summary["faults_injected"].items())
    console.print(f"injected: {injected or 'nothing'}", markup=False)
    for failure in summary["failed"]:
        console.print(f"FAILED seed {failure['seed']}: {failure['kind']}\n  {failure['command']}", markup=False)
    if not sweep.failures:
        console.print("every invariant held.", markup=False)
