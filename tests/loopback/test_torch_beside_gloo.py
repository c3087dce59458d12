"""What torch offers on top of process groups does over quicoll what it does over Gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch_processes import HELPERS, environment

pytestmark = pytest.mark.slow

LIMIT_S = 580


def beside_gloo(cases: str, directory: Path) -> dict[str, list[str]]:
    """By case, how its results compare, once for each answer that a rank gives."""
    results = directory / "results.json"
    command = [sys.executable, str(HELPERS / "torch_beside_gloo.py"), cases, str(results)]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr[-5000:]
    found: dict[str, list[str]] = json.loads(results.read_text())
    assert len(found) == sum((HELPERS / f"{cases}.py").read_text().count(f"case({ranks}") for ranks in (2, 4))
    return found


def test_every_functional_collective_and_compiled_ones_give_gloos_bits(tmp_path: Path) -> None:
    found = beside_gloo("torch_cases_functional", tmp_path)
    assert {name: said for name, said in found.items() if said != ["equal"]} == {}


def test_what_ddp_and_meshes_offer_trains_with_gloos_bits(tmp_path: Path) -> None:
    found = beside_gloo("torch_cases_training", tmp_path)
    others = {name: said for name, said in found.items() if said != ["equal"]}
    # Four ranks' parameters are averaged, which Gloo adds in another order.
    assert others in ({}, {"hierarchical model averaging: near (4 ranks)": ["near"]})
