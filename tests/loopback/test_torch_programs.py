"""Programs of torch's over the backend "quicoll": launched as users launch them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_processes import LOST_AFTER, environment  # noqa: E402 - after the check that there is a torch

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
LIMIT_S = 500

pytestmark = [pytest.mark.slow, pytest.mark.warm("torch")]


def torchrun(*arguments: str | Path, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *map(str, arguments),
    ]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_a_program_of_torchs_runs_as_it_is(tmp_path: Path) -> None:
    program = HELPERS / "torch_program.py"
    launched = torchrun(program, tmp_path)
    assert launched.returncode == 0, launched.stdout[-1000:] + launched.stderr[-5000:]
    held = json.loads((tmp_path / "checks.json").read_text())
    assert held == re.findall(r"@check\ndef (\w+)", program.read_text())
    assert len(held) > 10


@pytest.mark.warm("torch")
def test_a_killed_rank_is_started_again_and_the_bits_are_the_same(tmp_path: Path) -> None:
    launched = torchrun("--max-restarts=1", HELPERS / "torch_restart.py", tmp_path)
    assert launched.returncode == 0, launched.stderr[-5000:]
    assert json.loads((tmp_path / "done.json").read_text()) == {"attempt": "1", "from": 3, "equal": True}


@pytest.mark.warm("torch")
def test_all_who_are_left_are_told_who_was_lost(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HELPERS / "torch_loss.py"), str(tmp_path), str(rank), "3"],
            env=environment(),
            stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    errors = [each.communicate(timeout=LIMIT_S)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0, -9], errors
    for rank in (0, 1):
        found = json.loads((tmp_path / f"told{rank}.json").read_text())
        assert found["told"] == [["PeerError", "worker-2", ["worker-2"]]] * 3
        assert found["seconds"] < 150  # the deadline is 200


def read_by(program: Path, directory: Path, ranks: int) -> tuple[str, set[str]]:
    """Run a program; what it says, and the digests that it ends with."""
    directory.mkdir()
    launched = torchrun("--max-restarts=1", program, directory, ranks=ranks)
    assert launched.returncode == 0, launched.stderr[-5000:]
    return launched.stdout, set(re.findall(r"digest (\w{16})", launched.stdout))


@pytest.mark.warm("torch")
def test_a_transformer_on_real_text_has_the_bits_of_one_process_though_one_of_two_is_killed(tmp_path: Path) -> None:
    example = ROOT / "examples" / "torchrun_ddp.py"
    _, alone = read_by(example, tmp_path / "one", 1)
    assert len(alone) == 1
    assert read_by(example, tmp_path / "four", 4)[1] == alone
    said, digests = read_by(HELPERS / "torch_killed.py", tmp_path / "killed", 2)
    assert digests == alone
    processes = set(re.findall(r"process (\d+), rank 1", said))
    assert len(processes) == 2  # the one that was killed, and its successor


@pytest.mark.warm("torch")
@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallel_training_of_a_transformer_has_the_same_bits_in_every_run(tmp_path: Path, ranks: int) -> None:
    plain = HELPERS / "torch_plain_ddp.py"
    runs = [read_by(plain, tmp_path / name, ranks)[1] for name in ("first", "second")]
    assert len(runs[0]) == 1  # all ranks have one
    assert runs[0] == runs[1]


@pytest.mark.warm("torch")
def test_a_checkpoint_of_torchs_is_read_on_another_number_of_ranks(tmp_path: Path) -> None:
    for what, ranks in (("save", 2), ("load", 3), ("load", 1)):
        launched = torchrun(HELPERS / "torch_reshaped.py", what, tmp_path, ranks=ranks)
        assert launched.returncode == 0, launched.stderr[-5000:]
    model, optimizer = torch.load(tmp_path / "save2.pt")
    for ranks in (3, 1):
        found = torch.load(tmp_path / f"load{ranks}.pt")
        assert {name: each.tolist() for name, each in found[0].items()} == {
            name: each.tolist() for name, each in model.items()
        }
        assert found[1]["param_groups"] == optimizer["param_groups"]
        for name, moments in optimizer["state"].items():
            assert all(torch.equal(found[1]["state"][name][kind], value) for kind, value in moments.items())


def sharded_by(directory: Path, how: str) -> tuple[dict[str, int], dict[str, Any]]:
    directory.mkdir()
    command = [sys.executable, str(HELPERS / "torch_sharded.py"), str(directory)]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", how], env=environment(), stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    errors = [each.communicate(timeout=LIMIT_S)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], errors
    return json.loads((directory / "calls.json").read_text()), torch.load(directory / "model.pt")


@pytest.mark.warm("torch")
def test_shards_of_a_model_over_gloo_are_carried(tmp_path: Path) -> None:
    none, plain = sharded_by(tmp_path / "plain", "plain")
    calls, carried = sharded_by(tmp_path / "carried", "carried")
    assert none == {}
    assert calls["GradientScatter"] == 2 * 4  # two layers, four steps
    assert calls["ParameterGather"] >= 2 * 4
    # With two ranks there is one order of addition.
    assert all(torch.equal(carried[name], plain[name]) for name in plain)


@pytest.mark.warm("torch")
def test_layers_divided_among_two_pairs_train_as_one_process_does() -> None:
    command = [
        sys.executable,
        "-m",
        "quicoll.cli.main",
        "run",
        "-n",
        "4",
        "--lost-after",
        LOST_AFTER,
        str(ROOT / "examples" / "tensor_parallel.py"),
    ]
    launched = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert launched.returncode == 0, launched.stderr[-5000:]
    far = [float(each) for each in re.findall("at most (.*) from one process", launched.stdout)]
    assert len(far) == 4
    assert max(far) < 1e-6


def test_ranks_that_a_program_spawns_meet_wherever_torchs_ranks_meet_and_one_is_silent_for_seconds(
    tmp_path: Path,
) -> None:
    """Without a setting for what is lost."""
    given = {name: value for name, value in environment().items() if name != "QUICOLL_LOST_AFTER"}
    command = [sys.executable, str(HELPERS / "torch_spawned.py"), str(tmp_path)]
    ran = subprocess.run(command, env=given, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr[-5000:]
    ways = ["tcp", "env and arguments", "env", "file", "a TCPStore", "the same again", "a FileStore"]
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found == {**dict.fromkeys(ways, 3.0), "a prefix": 6.0}
