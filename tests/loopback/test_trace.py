"""`quicoll run --trace`: a run of real processes, one of them killed, becomes one timeline that a viewer takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trace_rules import read_trace

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

PROGRAM = """
import os
import signal
import sys

import numpy as np

import quicoll
from quicoll import blocking

with blocking.join() as job:
    job.register_state(lambda: {"weights": np.zeros(4, np.float32)}, lambda state: None)
    while job.committed_step < 8:
        try:
            with job.step():
                job.group.all_reduce(np.ones(4, np.float32))
                if job.node == "worker-1" and job.committed_step == 4 and os.environ["QUICOLL_RESTARTS"] == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
                job.group.all_reduce(np.ones(50000, np.float32))
        except quicoll.StepAborted:
            pass
"""


def test_all_ranks_are_on_one_timeline_and_so_is_who_was_killed(tmp_path: Path) -> None:
    program, trace = tmp_path / "program.py", tmp_path / "trace.json"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "quicoll.cli.main", "run", "-n", "2", "--trace", str(trace), str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = read_trace(trace)
    events = told["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert names == {1: "worker-0", 2: "worker-1"}
    committed = {
        each["name"]
        for each in events
        if each.get("cat") == "step" and each["pid"] == 1 and each["args"]["ended by"] == "committed"
    }
    assert committed == {f"step {number}" for number in range(1, 9)}
    assert len([each for each in events if each.get("cat") == "view" and each["pid"] == 1]) >= 2
    assert {each["args"]["bytes given"] for each in events if each.get("cat") == "collective"} >= {16, 200000}
    assert len(told["otherData"]["clocks"]) == 1, "processes of one host share a clock"
