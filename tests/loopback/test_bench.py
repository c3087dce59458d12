"""`quicoll bench` over real processes, as short as it can be: that everybody takes part, not how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.loopback


def measured(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "quicoll.cli.main", "bench", *arguments, "--rounds", "1", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_sums_are_timed_beside_gloo() -> None:
    pytest.importorskip("torch", reason="Gloo is torch's")
    report = measured("allreduce", "--vs", "gloo", "--sizes", "4,1KiB", "-n", "2")
    assert list(report["ratios"]) == ["all_reduce 4 B", "all_reduce 1 KiB"]
    for case in report["cases"]:
        assert sorted(case["samples"]) == ["gloo", "quicoll"]
        assert all(sample["seconds"] > 0 for samples in case["samples"].values() for sample in samples)


def test_messages_are_timed_beside_stock_aioquic_and_steps_alone() -> None:
    report = measured("transfer", "--vs", "aioquic", "--sizes", "100KiB", "--datagram", "1452")
    assert list(report["ratios"]["transfer 100 KiB"]) == ["aioquic"]
    report = measured("step", "--sizes", "0")
    assert report["ratios"] == {"empty step": {}}
    assert report["limits_mb_per_s"]["aes"] > 0


def test_what_the_processes_said_is_shown_when_they_fail() -> None:
    command = [sys.executable, "-m", "quicoll.cli.main", "bench", "step", "--sizes", "0"]
    broken = {**os.environ, "QUICOLL_TIMEOUT": "-1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=broken)
    assert done.returncode == 1
    assert "timeout" in done.stderr
