"""torchft's own tests of process groups, over quicoll: some of them, where torchft is installed; in a deep run all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="its tests are run where it is; tests/torchft_suite.py says how")
pytest.importorskip("parameterized", reason="torchft's tests need it")

from depth import DEEP
from torch_processes import HELPERS, ROOT, environment

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

# A group, one beside Gloo's default group, those of two replicas of which one fails, and one that another process uses.
SOME = [
    "torchft.process_group_test.ProcessGroupTest.test_gloo_apis_0_cpu",
    "torchft.process_group_test.ProcessGroupTest.test_functional_collectives",
    "torchft.manager_integ_test.ManagerIntegTest.test_ddp_recovery_0_async_quorum",
    "torchft.parameter_server_test.TestParameterServer.test_parameter_server",
]


def test_some_of_torchfts_own_tests_pass(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, str(HELPERS / "torchft_pass.py"), "quicoll", str(results), *SOME]
    environ = environment() | {"PYTHONHASHSEED": "0"}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=580, check=False)
    assert ran.returncode == 0, ran.stderr[-5000:]
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert {each["test"]: each["ended"] for each in found} == dict.fromkeys(SOME, "passed"), found
    assert all(each["groups"] for each in found)


@pytest.mark.skipif(not DEEP, reason="a quarter of an hour; part of `make deep`")
@pytest.mark.timeout(0)
def test_whatever_gloo_passes_of_torchfts_own_tests_passes(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, str(ROOT / "tests" / "torchft_suite.py"), "--json", str(results)]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:]
    assert sum(each["ended"] == "passed" for each in json.loads(results.read_text())["quicoll"].values()) > 40
