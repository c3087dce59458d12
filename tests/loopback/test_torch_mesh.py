"""torch's meshes over the groups of a job, in processes, as torch has one default group in each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch_processes import HELPERS, environment  # noqa: E402 - after the check that there is a torch
from torch_ranks import torch_ranks  # noqa: E402 - likewise

from quicoll.errors import LocalError  # noqa: E402 - likewise
from quicoll.torch import device_mesh  # noqa: E402 - likewise

LIMIT_S = 500


@pytest.mark.slow
@pytest.mark.warm("torch")
def test_parallel_modules_on_a_mesh_of_the_job_train_in_its_steps_as_one_process_and_in_the_next_view_anew(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "quicoll.cli.main", "run", "-n", "4", str(HELPERS / "torch_mesh.py")]
    launched = subprocess.run(
        [*command, str(tmp_path)],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stdout[-5000:] + launched.stderr[-5000:]
    assert sorted(each.name for each in tmp_path.glob("rank*")) == ["rank0", "rank1", "rank2", "rank3"]


def test_a_default_group_that_is_another_one_is_left_alone(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with torch_ranks(1) as ranks, pytest.raises(LocalError, match="torch has a default group already"):
            device_mesh(ranks.jobs[0].group, (1,))
        assert torch.distributed.get_backend() == "gloo"
    finally:
        torch.distributed.destroy_process_group()
