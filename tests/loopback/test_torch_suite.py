"""Torch's own tests of a backend, over quicoll: some of them, and in a deep run all that Gloo passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="torch's test code needs it")

from depth import DEEP
from torch_processes import HELPERS, ROOT, environment

pytestmark = pytest.mark.slow

# Of those that ask most of a backend, without deadlines that a busy machine could miss.
SOME = [
    "test_all_gather_object_subgroup",
    "test_all_to_all_group",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_profiling_torch_profiler",
    "test_sparse_all_reduce_sum",
]


def test_some_of_torchs_own_tests_pass_with_three_ranks(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, str(HELPERS / "torch_suite_pass.py"), "quicoll", "all", "3", str(results), *SOME]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=580, check=False)
    assert ran.returncode == 0, ran.stderr[-5000:]
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert {each["test"]: each["ended"] for each in found} == dict.fromkeys(SOME, "passed"), found


@pytest.mark.skipif(not DEEP, reason="an hour; part of `make deep`")
@pytest.mark.timeout(0)
def test_whatever_gloo_passes_of_torchs_own_tests_passes(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, str(ROOT / "tests" / "torch_suite.py"), "--json", str(results)]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:]
    by_gloo = [each["gloo"] for here in json.loads(results.read_text()) for each in here["passes"].values()]
    assert sum(each["ended"] == "passed" for results in by_gloo for each in results.values()) > 400
