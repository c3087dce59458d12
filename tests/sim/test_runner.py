"""Runs and sweeps: results by seed, whoever ran them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from quicoll.errors import LocalError
from quicoll.sim import runner
from quicoll.sim.outcome import Settings
from quicoll.sim.runner import SeedResult, Sweep, run_scenario, run_seed, run_seeds
from quicoll.sim.scenario.language import parse_events
from quicoll.sim.scenario.swarm import Scenario

SMALL = {"ranks": 2, "steps": 2}

KEYS = (
    "seeds",
    "failed",
    "faults_injected",
    "steps_committed",
    "steps_aborted",
    "views",
    "virtual_s",
    "wall_s",
    "scenarios_per_s",
)


def test_a_calm_scenario_commits_its_steps_and_ends_well() -> None:
    outcome = run_scenario(Scenario(seed=1, steps=3))
    assert outcome.error is None
    assert outcome.committed >= 3
    assert outcome.results == (outcome.committed,) * 4


def test_a_rank_that_was_left_out_is_waited_for() -> None:
    # Worker 2 complains of worker 0, which is dead and whose end nobody hears of; it is itself left out for a second.
    # When the others did not wait, it came back to nobody, and the run took a hold_timeout for nothing.
    events = parse_events("""
        sim.at(0.0544).hold({0}, {"coordinator", 1}).crash(0)
        sim.at(0.1544).restart(0)
        sim.at(0.1554).heal()
    """)
    settings = Settings(ranks=3, lost_after=0.3, timeout=3.0, chunk_bytes=1000)
    outcome = run_scenario(Scenario(seed=0, steps=4, compute_s=0.004, settings=settings, events=events))
    assert outcome.error is None
    assert outcome.virtual_s < 5.0
    assert len(set(outcome.results)) == 1


def test_what_only_ends_faults_is_not_counted_as_one() -> None:
    events = parse_events("""
        sim.at(0.01).conditions(Conditions(loss=0.01, mtu=1300)).partition({0}, {1}).pause(1).slow(0, 0.0001)
        sim.at(0.01).drift(0, ppm=50).crash("coordinator").hold({1}, {0})
        sim.at(0.02).conditions(Conditions()).repair().resume(1).slow(0, 0.0).drift(0, ppm=0).restart("coordinator")
        sim.at(0.03).heal()
        sim.at(0.04).restart(0)
    """)
    outcome = run_scenario(Scenario(seed=0, steps=1, settings=Settings(ranks=2), events=events))
    assert outcome.error is None, outcome.error
    scheduled = {kind: count for kind, count in outcome.injected.items() if not kind.startswith("datagram_")}
    once = ("coordinator_crash", "drift", "hold", "loss", "mtu", "partition", "pause", "restart", "slow")
    assert scheduled == dict.fromkeys(once, 1)


def test_a_seed_twice_has_one_trace() -> None:
    first, second = run_seed(3, **SMALL), run_seed(3, **SMALL)
    assert first.digest == second.digest
    assert first.digest != run_seed(4, **SMALL).digest


def test_results_are_the_same_however_many_processes_ran_them() -> None:
    heard: list[int] = []
    one = run_seeds(range(4), **SMALL, progress=lambda result: heard.append(result.seed))
    two = run_seeds([3, 1, 0, 2, 2], **SMALL, jobs=2)
    assert sorted(heard) == [0, 1, 2, 3]
    assert [result.seed for result in two.results] == [0, 1, 2, 3]
    assert [result.digest for result in one.results] == [result.digest for result in two.results]
    assert one.digest == two.digest
    assert one.results[2].digest == run_seed(2, **SMALL).digest
    assert not one.failures


def test_the_summary_has_its_keys_and_adds_up() -> None:
    sweep = run_seeds(range(2), **SMALL)
    summary = json.loads(json.dumps(sweep.summary()))
    assert set(KEYS) <= set(summary)
    assert summary["seeds"] == 2
    assert summary["failed"] == []
    assert summary["steps_committed"] == sum(result.committed for result in sweep.results) >= 4
    assert summary["faults_injected"] == {
        kind: sum(result.injected.get(kind, 0) for result in sweep.results)
        for kind in sorted({kind for result in sweep.results for kind in result.injected})
    }
    assert summary["faults_injected"]
    assert summary["scenarios_per_s"] > 0


def test_a_failure_is_in_the_summary_with_its_command() -> None:
    results = (
        SeedResult(seed=1),
        SeedResult(seed=2, kind="durable", message="gone"),
        SeedResult(seed=3, kind="x", message="y"),
    )
    sweep = Sweep(ranks=3, steps=5, kinds=("loss",), jobs=1, results=results, wall_s=0.5)
    failed = sweep.summary({3: "quicoll sim --seed 3 --events ''"})["failed"]
    assert failed == [
        {
            "seed": 2,
            "kind": "durable",
            "message": "gone",
            "command": "quicoll sim --seed 2 --ranks 3 --steps 5 --faults loss",
        },
        {"seed": 3, "kind": "x", "message": "y", "command": "quicoll sim --seed 3 --events ''"},
    ]


def test_a_worker_that_dies_is_a_failure_of_its_seed_and_the_others_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(self: runner._Worker, request: dict[str, object]) -> None:
        if request["seed"] == 1:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        original(self, request)

    original = runner._Worker.ask
    monkeypatch.setattr(runner._Worker, "ask", ask)
    sweep = run_seeds(range(3), **SMALL)
    assert [(result.seed, result.kind) for result in sweep.results] == [(0, None), (1, "worker-died"), (2, None)]
    assert "-9" in str(sweep.results[1].message)


def test_a_worker_that_is_stuck_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner._Worker, "ask", lambda self, request: setattr(self, "seed", request["seed"]))
    sweep = run_seeds([8], **SMALL, wall_limit=0.0)
    assert [(result.seed, result.kind) for result in sweep.results] == [(8, "worker-stuck")]


def test_a_worker_imports_what_its_parent_has_imported_and_nothing_from_where_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoy = tmp_path / "quicoll"
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise ImportError('of the working directory')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    sweep = run_seeds([1], **SMALL)
    assert [(result.seed, result.kind) for result in sweep.results] == [(1, None)]


def test_no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[subprocess.Popen[bytes]] = []

    class Counted(subprocess.Popen):
        def __init__(self, *args: object, **settings: object) -> None:
            super().__init__(*args, **settings)
            made.append(self)

    def broken(result: SeedResult) -> None:
        raise KeyError(result.seed)

    monkeypatch.setattr(subprocess, "Popen", Counted)
    with pytest.raises(KeyError):
        run_seeds(range(4), **SMALL, jobs=2, progress=broken)
    assert len(made) == 2
    assert all(process.returncode is not None for process in made)


def test_a_sweep_without_a_process_is_refused() -> None:
    with pytest.raises(LocalError):
        run_seeds(range(2), jobs=0)


def test_a_scenario_for_other_nodes_is_refused() -> None:
    with pytest.raises(LocalError, match="there is no node"):
        run_scenario(Scenario(seed=0, events=parse_events("sim.at(0.1).crash(7)")))
