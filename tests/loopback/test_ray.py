"""The example for Ray, on a Ray of this machine: actors that are killed are replaced, and the bits are one worker's."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 200

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed; it is large and nothing else needs it: pip install ray",
    ),
]


def environment(**more: str) -> dict[str, str]:
    others = ("QUICOLL_", "RAY_", "RANK", "WORLD_SIZE", "SLURM_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    path = os.pathsep.join([str(ROOT), str(ROOT / "transport"), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def processes_with(variable: str) -> list[int]:
    """Return who has this in the environment that it was started with."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or it has just ended
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


@pytest.fixture
def ray_directory() -> Iterator[str]:
    """A short path, because Ray has sockets in it; what is left of this Ray at the end is killed."""
    directory = tempfile.mkdtemp(prefix="r")
    yield directory
    for pid in processes_with(f"RAY_TMPDIR={directory}"):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def alone() -> str:
    """The digest of one worker without Ray."""
    command = [
        sys.executable,
        "-m",
        "quicoll.cli.main",
        "run",
        "-n",
        "1",
        "examples/train_loop.py",
        "--steps",
        str(STEPS),
    ]
    said = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True).stdout
    (digest,) = re.findall(r"digest (\w+)", said)
    return str(digest)


@pytest.mark.parametrize("lost", ["1", "coordinator"])
def test_an_actor_that_is_killed_is_replaced_and_joins(lost: str, alone: str, ray_directory: str) -> None:
    # With a token of its own this Ray writes none to the user's home.
    given = {"RAY_TMPDIR": ray_directory, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_DEDUP_LOGS": "0"}
    options = ["--ranks", "3", "--cpus", "0.1", "--steps", str(STEPS), "--pace", "0.05", "--kill", lost]
    ended = subprocess.run(
        [sys.executable, "examples/ray_train.py", *options],
        cwd=ROOT, env=environment(**given, RAY_USAGE_STATS_ENABLED="0"), capture_output=True, text=True, timeout=500,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert sorted(re.findall(r"^(worker-\d): digest (\w+)", ended.stdout, re.MULTILINE)) == [
        (f"worker-{number}", alone) for number in range(3)
    ]
    starts = re.findall(r"(worker-\d) is rank \d of 3", ended.stdout + ended.stderr)
    again = ["worker-1"] if lost == "1" else []
    assert sorted(starts) == sorted(["worker-0", "worker-1", "worker-2", *again])
    assert re.search(
        rf"Task {'Rank.train' if again else 'Coordinator.serve'} failed.*retried", ended.stdout + ended.stderr
    )
    deadline = time.monotonic() + 30.0
    while processes_with(f"RAY_TMPDIR={ray_directory}") and time.monotonic() < deadline:
        time.sleep(0.1)  # they are told to end, and not waited for
    assert processes_with(f"RAY_TMPDIR={ray_directory}") == []
