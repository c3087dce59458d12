"""Ranks with nothing but a launcher: torchrun, and srun as its variables show it, on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from torch_processes import LOST_AFTER

from quicoll import Config, LocalError, PeerError
from quicoll.rendezvous.meeting import meet_ranks, meets
from quicoll_transport.security.credentials import Credentials

ROOT = Path(__file__).parents[2]
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1"}


def clean(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what another launcher says, and with `extra`."""
    others = ("QUICOLL_", "SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    path = os.pathsep.join([str(ROOT), str(ROOT / "transport"), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "QUICOLL_LOST_AFTER": LOST_AFTER, **extra}


def task(rank: int, directory: Path, **more: str) -> dict[str, str]:
    return {**SRUN, "SLURM_PROCID": str(rank), "QUICOLL_RENDEZVOUS": str(directory), **more}


def named(environ: Mapping[str, str], **settings: Any) -> Config:
    return Config.named(environ=environ, **settings)


SCRIPT = """
import asyncio, json, os, signal, sys
import numpy as np
import quicoll

async def main():
    async with quicoll.join(join_timeout=300.0) as job:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        async with job.step():
            total = await job.group.all_reduce(np.ones(1000))
        told = {"rank": job.rank, "world": job.world_size, "sum": float(total[0]), "node": job.node,
                "source": job.config.sources["coordinator"], "again": os.environ.get("TORCHELASTIC_RESTART_COUNT")}
    with open(os.path.join(sys.argv[1], job.node), "w") as file:
        json.dump(told, file)

asyncio.run(main())
"""


def results(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("worker-*"))]


FAKE_SRUN = """
import os, subprocess, sys
command = [each for each in sys.argv[1:] if not each.startswith("--")]
shared = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
tasks = [subprocess.Popen(command, env={**os.environ, **shared, "SLURM_PROCID": str(n)}) for n in (1, 0)]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.slow
def test_the_batch_file_for_slurm_works_where_an_earlier_launch_has_left_its_words(tmp_path: Path) -> None:
    script, shared = tmp_path / "script.py", tmp_path / ".quicoll"
    script.write_text(SCRIPT)
    stale = shared / "quicoll-job-slurm-7.0-0"
    stale.mkdir(parents=True, mode=0o700)
    word = {"number": "0" * 32, "authority": "of processes that are gone", "coordinator": "127.0.0.1:9"}
    (stale / "open").write_text(json.dumps(word))
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(f"#!{sys.executable}\n{FAKE_SRUN}")
    (programs / "srun").chmod(0o755)
    # As in a batch script: the variables of a task are there, and those of a step are not.
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_SUBMIT_DIR": str(tmp_path)}
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    launched = subprocess.run(
        ["/bin/bash", str(ROOT / "examples" / "slurm" / "train.sbatch"), str(script), str(tmp_path)],
        env=clean({**batch, "PATH": path, "PYTHON": sys.executable}), capture_output=True, timeout=500, check=False,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr.decode()[-3000:]
    assert [(each["rank"], each["world"], each["sum"]) for each in results(tmp_path)] == [(0, 2, 2.0), (1, 2, 2.0)]
    assert results(tmp_path)[0]["source"] == f"rendezvous {shared}"
    assert list(shared.iterdir()) == []  # nothing is left behind


@pytest.mark.slow
@pytest.mark.warm("torch")
def test_torchrun_alone_starts_a_job_and_starts_it_again_when_a_rank_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launched = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
            str(script), str(tmp_path),
        ],
        env=clean({}), capture_output=True, timeout=500, check=False,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr.decode()[-3000:]
    found = results(tmp_path)
    assert [(each["rank"], each["world"], each["sum"], each["again"]) for each in found] == [
        (0, 2, 2.0, "1"),
        (1, 2, 2.0, "1"),
    ]
    assert found[0]["source"] == "rendezvous at torchrun's store"


async def test_each_rank_keeps_its_key_and_gets_a_certificate_of_one_authority(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    gone: list[str] = []

    async def one(rank: int, ready: asyncio.Barrier) -> tuple[str, Credentials]:
        environ = task(rank, shared, SLURM_NTASKS="3")
        config = named(environ)
        assert meets(config, environ)
        async with meet_ranks(config, environ) as meeting:
            found = Credentials.from_directory(meeting.certs, role="worker", node=config.node)
            await ready.wait()
            words = [path.read_text() for path in shared.rglob("*") if path.is_file()]
            assert words
            assert not any("PRIVATE" in word for word in words)
            await ready.wait()
            meeting.close()
        gone.append(meeting.certs)
        return meeting.coordinator, found

    ready = asyncio.Barrier(3)
    met = await asyncio.gather(*(one(rank, ready) for rank in (2, 0, 1)))
    assert len({coordinator for coordinator, _ in met}) == 1
    assert [found.identity.node for _, found in met] == ["worker-2", "worker-0", "worker-1"]
    assert all(found.trust == met[0][1].trust for _, found in met)
    assert len(gone) == 3
    assert not any(map(os.path.exists, gone))


LEAVING = """
import subprocess, sys
from quicoll.rendezvous.meeting import _leave

process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=-3, stderr=-3)
_leave(process)
print(process.pid)
"""


@pytest.mark.slow
def test_a_program_that_leaves_its_coordinator_to_itself_ends_without_a_warning() -> None:
    command = [sys.executable, "-W", "error", "-c", LEAVING]
    ended = subprocess.run(command, env=clean({}), capture_output=True, text=True, timeout=500, check=True)
    os.kill(int(ended.stdout), signal.SIGKILL)
    assert ended.stderr == ""


async def test_two_ranks_of_one_name_are_told(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        environ = task(0, tmp_path)
        await stack.enter_async_context(meet_ranks(named(environ, node="a"), environ))
        environ = task(1, tmp_path)
        with pytest.raises(PeerError, match="rank 0 is called 'a' too"):
            await stack.enter_async_context(meet_ranks(named(environ, node="a", join_timeout=30.0), environ))


async def test_a_rank_whose_rank_0_does_not_come_gives_up_by_its_deadline(tmp_path: Path) -> None:
    environ = task(1, tmp_path)
    with pytest.raises(PeerError, match=r"rank 0 did not come within 0\.3 s"):
        async with meet_ranks(named(environ, join_timeout=0.3), environ):
            pass


async def test_a_directory_without_a_launcher_is_refused(tmp_path: Path) -> None:
    environ = {"QUICOLL_RENDEZVOUS": str(tmp_path)}
    with pytest.raises(LocalError, match="no launcher says which rank this is"):
        async with meet_ranks(named(environ), environ):
            pass


@pytest.mark.parametrize(
    ("settings", "environ"),
    [
        ({"coordinator": "127.0.0.1:7"}, {}),
        ({"certs": "mine"}, {}),
        ({}, {"QUICOLL_COORDINATOR": "127.0.0.1:7"}),
        ({}, {"QUICOLL_CERTS": "mine"}),
    ],
)
def test_a_coordinator_or_certificates_that_are_named_are_taken_and_no_meeting_is_held(
    settings: dict[str, Any], environ: dict[str, str], tmp_path: Path
) -> None:
    variables = {**task(0, tmp_path), **environ}
    assert not meets(named(variables, **settings), variables)
