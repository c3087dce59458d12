"""A short chaos run (tests/chaos.py), and that it would notice what it is there for."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

CHAOS = Path(__file__).parents[1] / "chaos.py"


@pytest.fixture(scope="module")
def chaos() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chaos", CHAOS)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["chaos"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def processes_with(text: str) -> list[int]:
    """Processes whose command names this."""
    found = []
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdecimal() and text.encode() in (directory / "cmdline").read_bytes():
                found.append(int(directory.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


@pytest.mark.parametrize("hosts", [0, 1, 2])
def test_nothing_wrong_is_committed_whatever_happens_to_the_processes(hosts: int, tmp_path: Path) -> None:
    """Workers that share no memory, calls that go through it, and messages that do."""
    done = subprocess.run(
        [sys.executable, CHAOS, "--minutes", "0.2", "--seed", "3", "--hosts", str(hosts)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong commits: 0" in done.stdout
    assert "all 4 workers end with the state of the undisturbed training" in done.stdout
    assert processes_with(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_interrupted_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, CHAOS, "--minutes", "5", "--workers", "3", "--no-namespaces"]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE) as run:
        end = time.monotonic() + 300
        while len(processes_with(str(tmp_path))) < 4:  # the coordinator and three workers
            assert time.monotonic() < end
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=300)
    assert run.returncode == 130
    assert processes_with(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_one_wrong_bit_a_step_twice_and_a_wrong_end_are_failures(chaos: ModuleType, tmp_path: Path) -> None:
    right = chaos.Reference()
    record = tmp_path / "worker-0.record"

    def read(*lines: str) -> None:
        record.write_text("".join(f"{line}\n" for line in lines))
        chaos.Commits(tmp_path, ["worker-0"]).read()

    good = [f"commit {step} {right.at(step)} {step}" for step in (1, 2, 3)]
    read(*good, f"end 3 {right.at(3)}")
    with pytest.raises(chaos.ChaosError, match=r"WRONG COMMIT: worker-0 has .* after step 2"):
        read(good[0], f"commit 2 {right.at(3)} 2")
    with pytest.raises(chaos.ChaosError, match="applied step 2 after step 2"):
        read(*good[:2], good[1])
    with pytest.raises(chaos.ChaosError, match="ends after step 3 with"):
        read(*good, f"end 3 {right.at(2)}")


def test_the_expected_training_depends_on_every_bit(chaos: ModuleType) -> None:
    weights = np.zeros(chaos.SIZE, np.float32)
    changed = weights.copy()
    changed.view(np.uint32)[7] ^= 1 << 30
    for step in range(1, 4):
        weights, changed = (
            chaos.applied(state, sum(chaos.gradient(state, shard, step) for shard in range(chaos.SHARDS)))
            for state in (weights, changed)
        )
        assert chaos.digest(weights) != chaos.digest(changed)
