"""Tensors of another device than the CPU, which go by way of the host. The device is one of the tests' own.

There is no GPU where these run: that CUDA's streams and futures do as torch says is not shown here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch_processes import HELPERS, environment

pytestmark = [pytest.mark.slow, pytest.mark.warm("torch")]


def test_every_operation_gives_on_a_device_what_it_gives_on_the_cpu_and_a_device_that_fails_is_named(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(HELPERS / "torch_staged.py"), str(tmp_path / "found.json")]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr[-5000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["away"] == found["cpu"]
    assert found["cpu"][0]["all_reduce torch.float32"] == [[3.0, 9.0, 15.0, 21.0, 27.0, 33.0]]
    assert [len(each) for each in found["cpu"]] == [18] * 3
    assert found["said"] == [
        "LocalError True a tensor on device away:0 cannot be read: the device has an error",
        "LocalError True a result cannot be written to device away:0: the device has an error",
    ]
