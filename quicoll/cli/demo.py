"""`quicoll demo`: train over a network that fails, and compare every bit with a process that nothing happened to.

The run: workers train the digits over QUIC. After a quarter of the steps one of them is killed with SIGKILL; after half
of them another cuts its own network, both directions, for longer than the others wait. The others notice, give up the
step under way, go on without the lost one, and take it in again with the present state. In the end all workers, and one
process that trained alone, must hold the same digest. Exit status 0 says that all of this was seen.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quicoll.cli.looking import watch_job
from quicoll.cli.membership_options import find_job
from quicoll.cli.report import console_beside, open_report, write_report
from quicoll.cli.status_words import picture_of
from quicoll.cli.top import drawn
from quicoll.demo.plot import draw_run
from quicoll.demo.timeline import EventReader, FaultMark, Moment, Recovery, measure_recovery
from quicoll.demo.worker import main as work
from quicoll.demo.worker import prepare
from quicoll.errors import LocalError
from quicoll.launch.forked import ForkedProgram, can_fork
from quicoll.launch.narration import step_aborted_line, view_line
from quicoll.launch.supervisor import RunExit, Supervisor
from quicoll.rendezvous.scratch import scratch_directory

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from quicoll.cli.status_words import Picture

__all__ = ["register"]

ACCURACY = 0.95
"""Share of the held-out digits that the trained net must get right."""
FEWEST_STEPS = 24
"""With fewer, the steps between one fault and the next are too few to come back in."""
LOST_AFTER_S = 1.5
CUT_FOR_S = 4.0
DEADLINE_S = 170.0
"""The whole run of the workers: nobody waits longer for a demo."""
_POLL_S = 0.05
_LOOK_S = 0.5
_ANSWER_S = 5.0
_BAR = 60
"""Characters of the bar that the steps fill."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("demo")(demo)


def demo(
    workers: Annotated[int, typer.Option(min=1, help="Number of worker processes; 3 or more, unless --no-faults.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 160,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the initial parameters and of the samples.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the measurements to this file; - for stdout.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the run into this file, an SVG: loss, steps a second, who was in the view, faults. Else it is "
            "drawn into a temporary one, which is told.",
            show_default=False,
        ),
    ] = None,
    no_faults: Annotated[bool, typer.Option("--no-faults", help="Kill nothing and cut nothing.")] = False,
) -> None:
    """Train a small net with several workers over QUIC, kill one, cut one off, and compare all bits at the end."""
    if not no_faults and workers < 3:
        raise LocalError("without one of 2 workers there is no majority to go on: take 3 or more, or --no-faults")
    if not no_faults and steps < FEWEST_STEPS:
        raise LocalError(f"take {FEWEST_STEPS} steps or more, or --no-faults")
    _require("torch", "sklearn")
    open_report(json_file)
    if plot is not None and plot.suffix != ".svg":
        raise LocalError(f"the picture is an SVG: --plot {plot.with_suffix('.svg')}")
    open_report(plot)
    console = console_beside(json_file)
    began = time.monotonic()
    with scratch_directory() as temporary:
        results = temporary / "results"
        results.mkdir()
        story = _Story(console, steps=steps, workers=workers, began=began)
        cluster = _Cluster(story, temporary / "events", results, steps=steps, seed=seed, faults=not no_faults)
        with story:
            outcome = asyncio.run(cluster.run())
        if outcome.exit_status > 128:
            story.say(outcome.reason)
            raise typer.Exit(outcome.exit_status)
        baseline = None
        if outcome.exit_status == 0:
            story.say("the same training in one process that nothing happens to")
            baseline = _baseline(results, steps=steps, seed=seed)
        ended = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("worker-*.json"))}
    report = _report(story, outcome, ended, baseline, workers=workers, steps=steps, seed=seed)
    report["wall_s"] = round(time.monotonic() - began, 3)
    failures = _failures(report, outcome, ended, faults=not no_faults)
    report["failures"] = failures
    write_report(json_file, report)
    _show(console, report, failures)
    console.print(f"drawn to {_draw(story, plot)}", markup=False, soft_wrap=True)
    raise typer.Exit(1 if failures else 0)


class _Cluster:
    """The workers, and what is done to them."""

    def __init__(self, story: _Story, events: Path, results: Path, *, steps: int, seed: int, faults: bool) -> None:
        self._story = story
        self._feed = EventReader(events)
        nodes = [f"worker-{number}" for number in range(story.workers)]
        arguments = _arguments(results, steps=steps, seed=seed)
        self._kill_at = max(1, steps // 4) if faults else None
        self._to_kill = nodes[-1]
        if faults:
            arguments += ["--kill-node", self._to_kill, "--kill-at", str(self._kill_at)]
            arguments += ["--cut-node", nodes[1], "--cut-at", str(steps // 2), "--cut-for", str(CUT_FOR_S)]
        self._supervisor = Supervisor(
            _forked(arguments) or [sys.executable, "-m", "quicoll.demo.worker", *arguments],
            workers=story.workers,
            job="demo",
            events=events,
            lost_after=LOST_AFTER_S,
            output=lambda node, line: story.say(f"{node}: {line}"),
        )

    async def run(self) -> RunExit:
        running = asyncio.create_task(self._supervisor.run())
        looking = asyncio.create_task(self._look()) if self._story.live is not None else None
        deadline = time.monotonic() + DEADLINE_S
        try:
            while not running.done():
                self._story.take(self._feed.read())
                self._kill_when_due()
                if time.monotonic() > deadline:
                    self._story.say(f"not finished within {DEADLINE_S:g} s")
                    self._supervisor.stop()
                    deadline = float("inf")
                await asyncio.wait([running], timeout=_POLL_S)
        finally:
            if looking is not None:
                looking.cancel()
                await asyncio.wait([looking])
        self._story.take(self._feed.read())
        return await running

    async def _look(self) -> None:
        """Ask the coordinator for what `quicoll top` shows: ranks, links, who is waited for and why."""
        found = None
        while found is None:
            try:
                found = find_job(None, None, str(os.getpid()))
            except LocalError:  # it is not announced yet
                await asyncio.sleep(_LOOK_S)
        async with watch_job(found, None) as watch:
            while True:
                self._story.picture = picture_of(await watch.look(_ANSWER_S), patience_ns=None)
                await asyncio.sleep(_LOOK_S)

    def _kill_when_due(self) -> None:
        if self._kill_at is None or self._story.committed < self._kill_at:
            return
        pid = self._supervisor.pid(self._to_kill)
        if pid is not None:
            self._kill_at = None
            os.kill(pid, signal.SIGKILL)
            self._story.fault(FaultMark(t=time.monotonic(), node=self._to_kill, cause="killed"))
            self._story.say(f"step {self._story.committed}: {self._to_kill} is killed (SIGKILL to process {pid})")


@dataclass(slots=True)
class _Node:
    """The row of a worker in the table."""

    step: int = 0
    view: int | None = None
    rank: int | None = None
    state: str = "starting"


@dataclass(slots=True)
class _Story:
    """Turns events into lines and, on a terminal, into a table below them that changes in place."""

    console: Console
    steps: int = field(kw_only=True)
    workers: int = field(kw_only=True)
    began: float = field(kw_only=True)
    committed: int = 0
    moments: list[Moment] = field(default_factory=list)
    faults: list[FaultMark] = field(default_factory=list)
    aborted: dict[tuple[int, int], str] = field(default_factory=dict)
    views: dict[int, list[str]] = field(default_factory=dict)
    nodes: dict[str, _Node] = field(default_factory=dict)
    live: Live | None = None
    picture: Picture | None = None
    marks: list[tuple[int, str]] = field(default_factory=list)

    def __enter__(self) -> _Story:
        self.nodes = {f"worker-{number}": _Node() for number in range(self.workers)}
        if self.console.is_terminal:
            # Without a thread of its own, which could hold a lock of the output while a worker is forked.
            self.live = Live(self._table(), console=self.console, auto_refresh=False, transient=True)
            self.live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def say(self, line: str, *, at: float | None = None) -> None:
        """One line, with the seconds since the demo began."""
        self.console.print(f"{(at or time.monotonic()) - self.began:7.2f} s  {line}", markup=False, soft_wrap=True)

    def fault(self, fault: FaultMark) -> None:
        self.faults.append(fault)
        self.marks.append((self.committed, f"{fault.node}: {fault.cause} at {fault.t - self.began:.1f} s"))
        self.nodes[fault.node].state = fault.cause

    def take(self, moments: list[Moment]) -> None:
        """Note new events, say those that matter."""
        self.moments += moments
        for moment in moments:
            if moment.node in self.nodes:
                self._tell(moment, self.nodes[moment.node])
        if self.live is not None:
            self.live.update(self._table(), refresh=True)

    def _tell(self, moment: Moment, node: _Node) -> None:
        fields = moment.fields
        match moment.kind:
            case "view_installed":
                members = [str(name) for name in fields["nodes"]]
                node.view, node.state, node.rank = fields["view"], "training", members.index(moment.node)
                if fields["view"] not in self.views:
                    self.views[fields["view"]] = members
                    self.say(view_line(fields["view"], members), at=moment.t)
            case "step_committed":
                node.step = max(node.step, fields["step"])
                if fields["step"] > self.committed:
                    self.committed = fields["step"]
                    if self.committed % max(1, self.steps // 8) == 0:
                        self.say(f"step {self.committed} of {self.steps} committed", at=moment.t)
            case "step_aborted":
                if (fields["step"], fields["view"]) not in self.aborted:
                    lost = ", ".join(fields.get("lost") or ()) or "nobody lost"
                    self.aborted[fields["step"], fields["view"]] = lost
                    said = step_aborted_line(fields["step"], fields["view"], fields["cause"])
                    self.say(said, at=moment.t)
            case "fault":
                self.fault(FaultMark(t=moment.t, node=moment.node, cause="network cut"))
                self.say(f"step {node.step}: {moment.node} cuts its own network for {CUT_FOR_S:g} s", at=moment.t)
            case "held" if node.state == "training":  # at the start all are, until the last has come
                node.state = "held"
                self.say(f"{moment.node} is held: it reaches no majority", at=moment.t)
            case "state_received":
                self.say(f"{moment.node} has received the state of step {fields['step']}", at=moment.t)
            case _:
                pass

    def _table(self) -> RenderableType:
        """The way so far with the faults on it, and below it what `quicoll top` shows, or what is known until then."""
        parts: list[RenderableType] = [
            Text(""),
            self._way(),
            *(Text(f"  x {said}", style="red") for _, said in self.marks),
        ]
        parts.append(Text(""))
        if self.picture is not None:
            parts.append(drawn(self.picture, room=self.console.size))
            return Group(*parts)
        table = Table("node", "state", "rank", "view", "step")
        for name, node in self.nodes.items():
            table.add_row(name, node.state, _text(node.rank), _text(node.view), str(node.step))
        return Group(*parts, table)

    def _way(self) -> Text:
        filled = self.committed * _BAR // self.steps
        bar = Text("#" * filled, style="green") + Text("-" * (_BAR - filled), style="dim")
        for step, _ in self.marks:
            at = min(step * _BAR // self.steps, _BAR - 1)
            bar = bar[:at] + Text("x", style="bold red") + bar[at + 1 :]
        return Text.assemble("  [", bar, f"] step {self.committed} of {self.steps}")


def _arguments(results: Path, *, steps: int, seed: int) -> list[str]:
    return ["--steps", str(steps), "--seed", str(seed), "--result", str(results)]


def _forked(arguments: list[str]) -> ForkedProgram | None:
    """The worker as a fork of this process; None where it has to be a process like any other."""
    return ForkedProgram(lambda: work(arguments), prepare=prepare) if can_fork() else None


def _baseline(results: Path, *, steps: int, seed: int) -> dict[str, Any] | None:
    """Train in a process of its own, with the environment that the workers had."""
    arguments = [*_arguments(results, steps=steps, seed=seed), "--baseline"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    program = _forked(arguments)
    if program is None:
        command = [sys.executable, "-m", "quicoll.demo.worker", *arguments]
        subprocess.run(command, check=False, env=environment)  # noqa: S603  our own module
    else:
        asyncio.run(_to_its_end(program, environment))
    path = results / "baseline.json"
    return json.loads(path.read_text()) if path.exists() else None


async def _to_its_end(program: ForkedProgram, environment: dict[str, str]) -> None:
    await program.ready()
    await program.start(environment).wait()


def _report(
    story: _Story,
    outcome: RunExit,
    ended: dict[str, dict[str, Any]],
    baseline: dict[str, Any] | None,
    *,
    workers: int,
    steps: int,
    seed: int,
) -> dict[str, Any]:
    digests = sorted({worker["digest"] for worker in ended.values()})
    reference = baseline["digest"] if baseline is not None else None
    recoveries = [measure_recovery(story.moments, fault, nodes=list(story.nodes)) for fault in story.faults]
    return {
        "accuracy": min((worker["accuracy"] for worker in ended.values()), default=0.0),
        "final_digest": digests[0] if len(digests) == 1 else None,
        "baseline_digest": reference,
        "baseline_accuracy": baseline["accuracy"] if baseline is not None else None,
        "bit_identical": len(ended) == workers and digests == [reference],
        "digests": {node: worker["digest"] for node, worker in ended.items()},
        "steps": steps,
        "workers": workers,
        "seed": seed,
        "recoveries": [_rounded(recovery) for recovery in recoveries],
        "aborted_steps": [{"step": step, "view": view} for step, view in story.aborted],
        "views": len(story.views),
        "restarts": dict(outcome.restarts),
        "train_s": round(max((worker["train_s"] for worker in ended.values()), default=0.0), 3),
        "baseline_train_s": round(baseline["train_s"], 3) if baseline is not None else None,
        "versions": _versions(),
    }


def _failures(report: dict[str, Any], outcome: RunExit, ended: dict[str, dict[str, Any]], *, faults: bool) -> list[str]:
    """Why the demo does not show what it should; empty if it does."""
    if outcome.exit_status:
        return [outcome.reason]
    failures = []
    if len(ended) < report["workers"]:
        failures.append(f"{report['workers'] - len(ended)} of {report['workers']} workers did not finish")
    if report["baseline_digest"] is None:
        failures.append("the undisturbed process did not finish")
    elif not report["bit_identical"]:
        failures.append("the workers' bits are not those of the undisturbed process")
    if report["accuracy"] < ACCURACY:
        failures.append(f"accuracy {report['accuracy']:.3f} is below {ACCURACY}")
    if faults:
        came_back = {r["cause"] for r in report["recoveries"] if None not in r.values()}
        failures += [f"no recovery from: {cause}" for cause in ("killed", "network cut") if cause not in came_back]
    return failures


def _show(console: Console, report: dict[str, Any], failures: list[str]) -> None:
    """The measurements as plain columns, which look the same in a terminal, a pipe and a log."""
    lines = [""]
    if report["recoveries"]:
        lines.append(
            f"{'fault':<12} {'node':<10} {'rank':>4}  {'given up after':>14}  {'next step':>9}  {'back after':>10}"
        )
    for recovery in report["recoveries"]:
        times = [_seconds(recovery[name]) for name in ("abort_s", "resume_s", "rejoined_s")]
        what = f"{recovery['cause']:<12} {recovery['node']:<10} {_text(recovery['rank']):>4}"
        lines.append(f"{what}  {times[0]:>14}  {times[1]:>9}  {times[2]:>10}")
    lines += ["", f"{'':<12} {'accuracy':>8}  digest of all parameters and momenta"]
    members, alone = f"{report['workers']} workers", report["baseline_accuracy"]
    lines.append(f"{members:<12} {report['accuracy']:>8.4f}  {report['final_digest'] or 'they differ'}")
    lines.append(f"{'one process':<12} {_text(alone):>8}  {report['baseline_digest'] or 'none'}")
    lines += ["", *(f"FAILED: {failure}" for failure in failures)]
    if not failures:
        what = f"{report['workers']} workers over QUIC"
        if report["recoveries"]:
            again = len(report["aborted_steps"])
            what += f" lost one to SIGKILL and one to a cut network, began {again} steps again, took both back,"
        lines.append(
            f"{what} {'and ' if report['recoveries'] else ''}hold, bit for bit, what one process trained alone."
        )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _draw(story: _Story, plot: Path | None) -> Path:
    """Write the picture, and return where it is."""
    if plot is None:
        with tempfile.NamedTemporaryFile(prefix="quicoll-demo-", suffix=".svg", delete=False) as made:
            plot = Path(made.name)
    picture = draw_run(story.moments, story.faults, nodes=list(story.nodes), began=story.began)
    try:
        plot.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise LocalError(f"cannot write {plot}: {error.strerror or error}") from error
    return plot


def _rounded(recovery: Recovery) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(recovery).items()}


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _require(*modules: str) -> None:
    from importlib.util import find_spec

    for module in modules:
        if find_spec(module) is None:
            raise LocalError(f"the demo needs {module}: pip install 'quicoll[demo]'")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    for package in ("quicoll", "aioquic", "numpy", "torch", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
