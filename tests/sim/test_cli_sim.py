"""`quicoll sim`: exit status, summary, and commands that can be run again."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from quicoll.cli.main import main
from quicoll.sim import cluster, runner
from quicoll.sim.invariants import Checker
from quicoll.sim.scenario.swarm import generate


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sim", *arguments])
    return int(ended.value.code or 0)


def test_a_sweep_writes_its_summary_and_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.json"
    assert run("--seeds", "0:3", "--ranks", "2", "--steps", "2", "--processes", "2", "--json", str(path)) == 0
    summary = json.loads(path.read_text())
    assert summary["seeds"] == 3
    assert summary["failed"] == []
    assert summary["ranks"] == 2
    assert "every invariant held" in capsys.readouterr().out


def test_a_sweep_takes_ranges_and_single_seeds_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    swept(monkeypatch, -1)
    taken: list[list[int]] = []
    sweep = runner.run_seeds
    monkeypatch.setattr(runner, "run_seeds", lambda seeds, **how: taken.append(list(seeds)) or sweep(seeds, **how))
    assert run("--seeds", "17,3,10:13,11:14") == run("--seeds", "2:4") == 0
    assert taken == [[3, 10, 11, 12, 13, 17], [2, 3]]


def test_one_seed_shows_its_scenario_and_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--seed", "2", "--ranks", "2", "--steps", "2") == 0
    out = capsys.readouterr().out
    assert str(generate(2, ranks=2, steps=2)).splitlines()[0] in out
    assert runner.run_seed(2, ranks=2, steps=2).digest in out


def test_the_command_of_a_scenario_runs_this_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    made = generate(6, ranks=2, steps=2)
    words = shlex.split(made.command)
    assert words[:2] == ["quicoll", "sim"]
    assert run(*words[2:]) == 0
    assert runner.run_scenario(made).digest in capsys.readouterr().out


def test_a_run_is_explained_and_its_timeline_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert run("--seed", "2", "--ranks", "2", "--steps", "2", "--explain", "--trace", str(path)) == 0
    out = capsys.readouterr().out
    assert "every invariant held" in out
    assert runner.run_seed(2, ranks=2, steps=2).digest in out  # looking at it changes nothing
    assert any(event.get("name") == "heal()" for event in json.loads(path.read_text())["traceEvents"])


def test_a_failure_is_shrunk_and_its_command_fails_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock = cluster.Simulation._set_clock

    def guilty(self: cluster.Simulation, fault: Any) -> None:
        if type(fault).__name__ == "Drift":
            self.checker.break_("durable", "made up")
        set_clock(self, fault)

    monkeypatch.setattr(cluster.Simulation, "_set_clock", guilty)
    events = (
        "sim.at(0.01).pause(1, 0.001); sim.at(0.012).drift(0, ppm=50); sim.at(0.02).leap(1, 0.001); sim.at(0.03).heal()"
    )
    path = tmp_path / "one.json"
    assert run("--seed", "2", "--ranks", "2", "--steps", "2", "--events", events, "--json", str(path)) == 1
    failure = json.loads(path.read_text())["failed"][0]
    assert failure["kind"] == "durable"
    assert "made up" in failure["message"]
    assert "drift" in failure["command"]
    assert "pause" not in failure["command"]
    assert "leap" not in failure["command"]
    assert failure["command"] in capsys.readouterr().out
    assert run(*shlex.split(failure["command"])[2:], "--shrink-runs", "0") == 1


def swept(monkeypatch: pytest.MonkeyPatch, failed: int) -> None:
    """A sweep in which this seed has failed, in a process that is gone."""

    def sweep(seeds: list[int], **settings: object) -> runner.Sweep:
        results = tuple(runner.SeedResult(seed=seed, kind="durable" if seed == failed else None) for seed in seeds)
        return runner.Sweep(ranks=2, steps=2, kinds=("crash",), jobs=1, results=results, wall_s=1.0)

    monkeypatch.setattr(runner, "run_seeds", sweep)


SWEEP = ["--seeds", "1:3", "--ranks", "2", "--steps", "2", "--faults", "crash"]


def test_a_broken_promise_in_a_sweep_is_exit_status_one_and_made_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    swept(monkeypatch, 2)
    monkeypatch.setattr(Checker, "began", lambda self, node, step, view_id: self.break_("durable", "made up"))
    path = tmp_path / "sweep.json"
    assert run(*SWEEP, "--json", str(path), "--shrink-runs", "4") == 1
    failed = json.loads(path.read_text())["failed"]
    assert [each["seed"] for each in failed] == [2]
    words = shlex.split(failed[0]["command"])
    assert words[:4] == ["quicoll", "sim", "--seed", "2"]
    before = generate(2, ranks=2, steps=2, kinds=("crash",)).faults
    left = words[-1].count("crash(")
    assert left < before
    out = capsys.readouterr().out
    assert "FAILED seed 2: durable" in out
    assert f"seed 2, made smaller: durable with {left} of {before} faults after " in out
    assert run(*words[2:], "--shrink-runs", "0") == 1


def test_a_failure_that_does_not_come_again_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    swept(monkeypatch, 2)
    path = tmp_path / "sweep.json"
    assert run(*SWEEP, "--json", str(path)) == 1
    out = capsys.readouterr().out
    assert "seed 2: durable could not be shown again: all was well when it was run once more" in out
    assert "faults after" not in out
    command = "quicoll sim --seed 2 --ranks 2 --steps 2 --faults crash"
    assert json.loads(path.read_text())["failed"][0]["command"] == command
    monkeypatch.setattr(Checker, "began", lambda self, node, step, view_id: self.break_("quorum", "made up"))
    assert run(*SWEEP) == 1
    assert "seed 2: durable could not be shown again: quorum when it was run once more" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--seeds", "0:3", "--seed", "1"],
        ["--seeds", "3"],
        ["--seeds", "5:5"],
        ["--seeds", "a:b"],
        ["--seeds", "-1:4"],
        ["--seeds", "0:3", "--events", "sim.at(1).heal()"],
        ["--seeds", "0:3", "--explain"],
        ["--seed", "1", "--faults", "flood"],
        ["--seed", "1", "--ranks", "2", "--steps", "2", "--faults", "all,-all"],
        ["--seeds", "0:1", "--ranks", "2", "--steps", "2", "--faults=loss,-loss"],
        ["--seed", "1", "--settings", "Settings()"],
        ["--seed", "1", "--ranks", "1", "--steps", "1", "--events", "sim.at(0.1).heal()", "--faults", "crash"],
        ["--seed", "1", "--ranks", "1", "--steps", "1", "--events", "sim.at(0.1).heal()", "--processes", "2"],
        ["--seed", "1", "--ranks", "1", "--steps", "1", "--processes", "2"],
        ["--seed", "1", "--events", "__import__('os')"],
        ["--seed", "1", "--events", "sim.at(1.0).crash(99)"],
        ["--seeds", "0:1", "--json", "/nowhere/at/all.json"],
    ],
)
def test_a_command_that_makes_no_sense_is_exit_status_two(arguments: list[str]) -> None:
    assert run(*arguments) == 2


@pytest.mark.parametrize("arguments", [("--seed", "7"), ("--seeds", "0:9")])
def test_a_missing_package_is_one_line_and_not_a_broken_promise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str]
) -> None:
    monkeypatch.setattr("quicoll.sim.disk.sqlite.apsw", None)
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.endswith("need the package apsw: pip install 'quicoll[sim]'")


def test_an_interrupted_sweep_tells_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(seeds: Iterable[int], *, progress: Callable[[runner.SeedResult], None], **_: Any) -> runner.Sweep:
        progress(runner.SeedResult(seed=0))
        progress(runner.SeedResult(seed=1, kind="deadline", message="late"))
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_seeds", interrupted)
    assert run("--seeds", "0:9") == 128 + signal.SIGINT
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == "2 of 9 seeds were run, 1 of them failed"
    assert said.err == "quicoll: ended by SIGINT\n"
