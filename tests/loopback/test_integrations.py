"""Examples for other people's packages, with the real ones: Lightning, Accelerate, wandb, MLflow.

None of them is a dependency, and some are large; each test is skipped where its package is not installed.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch_processes import environment  # after the check that there is a torch

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 20

pytestmark = [pytest.mark.slow, pytest.mark.loopback]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is not installed: pip install {package}"
    )


def run(*command: str | Path, directory: Path, **more: str) -> str:
    """Run a module with its arguments; what it says, on both streams."""
    ended = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=directory, env={**environment(), **more}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-5000:]
    return ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "example",
    [
        pytest.param("lightning_ddp.py", marks=needs("lightning")),
        pytest.param("accelerate_loop.py", marks=needs("accelerate")),
    ],
)
def test_it_trains_over_quicoll_with_the_same_bits_in_every_run(example: str, tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        said = run(
            "torch.distributed.run", "--standalone", "--nproc-per-node=2", EXAMPLES / example, directory=tmp_path
        )
        runs.append(sorted(re.findall(r"rank (\d) of 2 over quicoll: loss (\S+), digest (\w{16})", said)))
    assert [rank for rank, _, _ in runs[0]] == ["0", "1"], runs
    assert len({digest for _, _, digest in runs[0]}) == 1
    assert runs[0] == runs[1]


@needs("accelerate")
def test_accelerate_refuses_the_backend_by_name_on_the_cpu(tmp_path: Path) -> None:
    """Which is why the example makes the group itself; where this fails, Accelerate and our page can do better."""
    program = tmp_path / "named.py"
    program.write_text(
        "from accelerate import Accelerator, InitProcessGroupKwargs\n"
        "try:\n"
        "    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend='quicoll')])\n"
        "except ValueError as error:\n"
        "    print('refused:', error)\n"
    )
    said = run("torch.distributed.run", "--standalone", "--nproc-per-node=1", program, directory=tmp_path)
    assert "refused: Your assigned backend quicoll is not available, please use gloo" in said


def tracked(to: str, directory: Path, **more: str) -> str:
    return run(
        "quicoll.cli.main", "run", "-n", "2", EXAMPLES / "tracked.py", "--to", to, "--steps", str(STEPS),
        directory=directory, **more,
    )  # fmt: skip


def test_figures_of_all_steps_and_of_the_job_come_to_a_function(tmp_path: Path) -> None:
    said = tracked("print", tmp_path)
    for node in ("worker-0", "worker-1"):
        steps = [int(step) for step in re.findall(rf"\[{node}\] step (\d+): {{'loss': ", said)]
        assert steps == list(range(1, STEPS + 1))
        # Who leaves last may have been alone in a second view for a moment; a row has the latest.
        assert re.search(rf"\[{node}\] step \d+: .*'quicoll/view': [12].0", said)


@needs("wandb")
def test_wandb_has_them(tmp_path: Path) -> None:
    said = tracked("wandb", tmp_path, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    for node in ("worker-0", "worker-1"):
        (summary,) = re.findall(rf"^\[{node}\] .*Run summary:\n((?:\[{node}\] .*\n)+)", said, re.MULTILINE)
        figures = dict(re.findall(r"wandb: +(\S+) (\S+)\n", summary))
        assert {"loss", "quicoll/step_interval_s", "quicoll/view", "quicoll/world_size"} <= figures.keys()
        assert float(figures["loss"]) < 0.5
        assert float(figures["quicoll/step_interval_s"]) > 0
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 2
    assert "WARNING" not in said  # of steps that go back


@needs("mlflow")
def test_mlflow_has_them(tmp_path: Path) -> None:
    # The files of mlflow are what needs no server; it wants to be told that they will do.
    given = {"MLFLOW_TRACKING_URI": (tmp_path / "runs").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    tracked("mlflow", tmp_path, **given)
    losses = sorted((tmp_path / "runs").glob("*/*/metrics/loss"))
    assert len(losses) == 2  # a run for each rank
    for loss in losses:
        rows = [line.split() for line in loss.read_text().splitlines()]
        assert [int(step) for _, _, step in rows] == list(range(1, STEPS + 1))
        assert float(rows[-1][1]) < float(rows[0][1])
        views = [line.split() for line in (loss.parent / "quicoll" / "view").read_text().splitlines()]
        assert [float(value) for _, value, _ in views] in ([1.0], [2.0])  # as above
