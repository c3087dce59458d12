"""A short run of tests/takeovers.py, and what it would notice. With PostgreSQL: test_takeover.py."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

PROGRAM = Path(__file__).parents[1] / "takeovers.py"


@pytest.fixture(scope="module")
def takeovers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("takeovers", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["takeovers"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.warm
def test_no_step_is_lost_or_applied_twice_when_the_coordinator_is_killed(tmp_path: Path) -> None:
    measured, temporary = tmp_path / "measured.json", tmp_path / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, PROGRAM, "--times", "2", "--seed", "3", "--json", measured],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(measured.read_text())
    assert found["without_a_commit"]["kill"]["times"] == 2
    assert found["steps_committed"] > 20
    assert list(temporary.iterdir()) == []


def written(directory: Path, *steps: int) -> Path:
    with sqlite3.connect(directory / "journal.db") as database:
        database.execute("CREATE TABLE commits (step INTEGER)")
        database.executemany("INSERT INTO commits VALUES (?)", [(step,) for step in steps])
    database.close()
    return directory


def test_a_step_that_is_missing_in_the_journal_or_twice_in_it_is_a_failure(
    takeovers: ModuleType, tmp_path: Path
) -> None:
    for name, steps in (("gap", (1, 3)), ("twice", (1, 2, 2))):
        directory = tmp_path / name
        directory.mkdir()
        with pytest.raises(takeovers.ChaosError, match="the journal has step"):
            takeovers.Decisions(written(directory, *steps), None).read()
    whole = takeovers.Decisions(written(tmp_path, 1, 2, 3), None)
    whole.read()
    whole.read()
    assert whole.last == 3


def test_a_step_that_is_applied_twice_or_with_other_bits_is_a_failure(takeovers: ModuleType, tmp_path: Path) -> None:
    applied = takeovers.Applied(tmp_path, ["worker-0"])
    right = takeovers.chaos.Reference()
    applied.take("worker-0", ["commit", "1", right.at(1), "1"])
    with pytest.raises(takeovers.ChaosError, match="applied step 1 after step 1"):
        applied.take("worker-0", ["commit", "1", right.at(1), "2"])
    with pytest.raises(takeovers.ChaosError, match="WRONG COMMIT"):
        applied.take("worker-0", ["commit", "2", right.at(1), "2"])
    assert applied.steps == {"worker-0": [1]}
