"""The end of a job with real processes: who comes later hears of it, and the run ends well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.loopback, pytest.mark.warm]

SCRIPT = """
import asyncio, os, signal, sys
import numpy as np
import quicoll

async def main() -> None:
    async with quicoll.join() as job:
        while job.committed_step < 3:
            async with job.step():
                await job.group.barrier()
        if job.node == "worker-1" and os.environ["QUICOLL_RESTARTS"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if job.node == "worker-0":
            quicoll.checkpoint.save("checkpoints", step=job.committed_step, tensors={"w": np.full(2, 5.0)})

try:
    asyncio.run(main())
except quicoll.JobDone as error:
    print("caught", error.step, isinstance(error, quicoll.QuicollError), flush=True)
    if len(sys.argv) > 1:
        print("final", quicoll.checkpoint.of_step("checkpoints", error.step).tensors["w"].tolist(), flush=True)
    if len(sys.argv) > 1:
        raise
"""


def test_a_worker_killed_just_before_the_end_is_done_when_it_comes_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["-n", "2", "--lost-after", "1", "--restarts", "1", "--events", str(tmp_path / "events")]
    done = subprocess.run(
        [sys.executable, "-m", "quicoll.cli.main", "run", *options, str(script), "raise"],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[worker-1] caught 3 True\n" in done.stdout.replace("  ", " ")
    assert "[worker-1] final [5.0, 5.0]\n" in done.stdout.replace("  ", " ")
    assert "Traceback" not in done.stdout + done.stderr
    assert "job local is done at step 3" in done.stdout
    told = [json.loads(line) for line in (tmp_path / "events" / "worker-1.jsonl").read_text().splitlines()]
    assert [event["step"] for event in told if event["kind"] == "job_done"] == [3]


def test_a_spare_that_was_not_needed_ends_with_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace('job.node == "worker-1"', "False"))
    options = ["-n", "1", "--spares", "1", "--nodes", "worker-?", "--lost-after", "1", "--restarts", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "quicoll.cli.main", "run", *options, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("caught 3 True") == 1, done.stdout
