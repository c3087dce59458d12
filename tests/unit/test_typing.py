"""What a type checker says of programs that use quicoll."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
from typing import assert_type

import quicoll
from quicoll import blocking, testing


async def asynchronous() -> None:
    async with quicoll.join(coordinator="127.0.0.1:1", timeout=3, site=None) as job:
        assert_type(job, quicoll.Job)
        assert_type(job.rank, int)
        async with job.step() as step:
            assert_type(step, quicoll.Step)
            assert_type(step.number, int)
    async with testing.cluster(2, lost_after=1.0) as jobs:
        assert_type(jobs[0], quicoll.Job)


def synchronous() -> None:
    with blocking.join(world_size=2) as job:
        assert_type(job.committed_step, int)


async def wrong() -> None:
    quicoll.join(lostafter=1.0)
    blocking.join(world_size="two")
    testing.cluster(2, lostafter=1.0)
    quicoll.Config.resolve(lostafter=1.0)
    quicoll.Jbo
"""


@pytest.mark.slow
def test_settings_and_results_have_types_and_wrong_names_are_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "MYPYPATH": os.pathsep.join([str(ROOT), str(ROOT / "transport")])}
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", "--no-color-output", "--no-error-summary"]
    done = subprocess.run([*command, str(program)], cwd=ROOT, env=environment, capture_output=True, text=True)
    first = PROGRAM.splitlines().index("async def wrong() -> None:") + 2
    said = [line.partition("error: ")[2].rpartition("  [") for line in done.stdout.splitlines() if "error: " in line]
    lines = [int(line.split(":")[1]) for line in done.stdout.splitlines() if "error: " in line]
    assert lines == [first + number for number in range(5)], done.stdout + done.stderr
    for (text, _, _), word in zip(said, ["lostafter", "world_size", "lostafter", "lostafter", "Jbo"], strict=True):
        assert f'"{word}"' in text
