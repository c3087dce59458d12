"""What a type checker says of programs that use quicoll."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
from typing import assert_type

import quicoll
from quicoll import blocking, testing


async def asynchronous() -> None:
    async with quicoll.join(coordinator="127.0.0.1:1", timeout=3, site=None) as job:
        assert_type(job, quicoll.Job)
        assert_type(job.rank, int)
        async with job.step() as step:
            assert_type(step, quicoll.Step)
            assert_type(step.number, int)
    async with testing.cluster(2, lost_after=1.0) as jobs:
        assert_type(jobs[0], quicoll.Job)


def synchronous() -> None:
    with blocking.join(world_size=2) as job:
        assert_type(job.committed_step, int)


async def wrong() -> None:
    quicoll.join(lostafter=1.0)
    blocking.join(world_size="two")
    testing.cluster(2, lostafter=1.0)
    quicoll.Config.resolve(lostafter=1.0)
    quicoll.Jbo
"""


RESULTS = """
from typing import Any, assert_type
import numpy as np
import numpy.typing as npt
import torch
import quicoll
from quicoll import Handle, Shards, blocking
from quicoll.blocking import BlockingHandle

Floats = npt.NDArray[np.float32]

Tensors = list[torch.Tensor]

async def asynchronous(group: quicoll.Group, shards: Shards, a: Floats, t: torch.Tensor, many: Tensors) -> None:
    assert_type(group.all_reduce(a), Handle[Floats])
    assert_type(await group.all_reduce(a, op="max", wire="int8"), Floats)
    assert_type(await group.all_reduce(t, wire="topk:1/64", residual=t), torch.Tensor)
    assert_type(await group.all_reduce(shards.leaves([a]), wire="int4", residual=shards.leaves([a])), Floats)
    assert_type(await group.all_reduce(many), list[torch.Tensor])
    assert_type(await group.all_reduce(shards.leaves([a, a])), Floats)
    assert_type(await group.all_reduce(shards.leaves([many])), list[torch.Tensor])
    assert_type(await group.reduce(t), torch.Tensor | None)
    assert_type(await group.reduce_scatter(shards.leaves([t])), torch.Tensor)
    assert_type(await group.broadcast(many), list[torch.Tensor])
    assert_type(await group.all_gather(a), Floats)
    assert_type(await group.gather(a), Floats | None)
    assert_type(await group.scatter(t), torch.Tensor)
    assert_type(await group.all_to_all(many), list[torch.Tensor])
    assert_type(await group.recv(a, source=0), Floats)
    assert_type(await group.all_gather_object(1), list[Any])
    assert_type(await group.split(0), quicoll.Group | None)
    group.all_reduce(3.0)  # type: ignore[arg-type]
    group.all_gather(many)  # type: ignore[type-var]
    group.all_reduce(a, wire=8)  # type: ignore[arg-type]
    group.all_reduce(t, wire="int4", residual=3.0)  # type: ignore[arg-type]
    group.send(a, nope=2)  # type: ignore[call-arg]

def synchronous(group: blocking.Group, shards: Shards, a: Floats, t: torch.Tensor, many: Tensors) -> None:
    assert_type(group.all_reduce(a), Floats)
    assert_type(group.all_reduce(a, async_op=False), Floats)
    assert_type(group.all_reduce(a, async_op=True), BlockingHandle[Floats])
    assert_type(group.all_reduce(shards.leaves([t]), async_op=True).wait(1.0), torch.Tensor)
    assert_type(group.broadcast(many, async_op=True).wait(), list[torch.Tensor])
    assert_type(group.gather(t), torch.Tensor | None)
    assert_type(group.all_gather_object({}, async_op=True), BlockingHandle[list[Any]])
    assert_type(group.split(1), blocking.Group | None)
    assert_type(group.split(1, async_op=True), BlockingHandle[blocking.Group | None])
    group.send(a, nope=2)  # type: ignore[call-overload]

def steps(job: blocking.Job) -> None:
    assert_type(job.rank, int)
    assert_type(job.ready(timeout=1.0), None)
    job.resume_from("one")  # type: ignore[arg-type]
    with job.step() as step:
        assert_type(step, blocking.Step)

def trained(job: blocking.Job, task: quicoll.train.Task) -> None:
    worker = blocking.Worker(job, task, shards=8, phase_barrier=True)
    assert_type(worker.run(steps=3), quicoll.train.TrainingResult)
    blocking.Worker(job, task, shards="eight")  # type: ignore[arg-type]
"""
"""An error that is expected has `type: ignore`: strict mypy reports those that ignore nothing."""


PROGRAMS = {"program": PROGRAM, "results": RESULTS}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str]]]:
    """Line and text of each error, by program. In one process, since most of its time goes to what they import."""
    directory = tmp_path_factory.mktemp("programs")
    for name, text in PROGRAMS.items():
        (directory / f"{name}.py").write_text(text)
    environment = {**os.environ, "MYPYPATH": os.pathsep.join([str(ROOT), str(ROOT / "transport")])}
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", "--no-color-output", "--no-error-summary"]
    files = [str(directory / f"{name}.py") for name in PROGRAMS]
    done = subprocess.run([*command, *files], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr  # there are errors, as there should be
    found: dict[str, list[tuple[int, str]]] = {name: [] for name in PROGRAMS}
    for line in done.stdout.splitlines():
        where, _, text = line.partition(": error: ")
        if text:
            path, number = where.split(":")[:2]
            found[Path(path).stem].append((int(number), text))
    return found


@pytest.mark.slow
def test_settings_and_results_have_types_and_wrong_names_are_refused(said: dict[str, list[tuple[int, str]]]) -> None:
    first = PROGRAM.splitlines().index("async def wrong() -> None:") + 2
    assert [line for line, _ in said["program"]] == [first + number for number in range(5)], said
    words = ["lostafter", "world_size", "lostafter", "lostafter", "Jbo"]
    for (_, text), word in zip(said["program"], words, strict=True):
        assert f'"{word}"' in text.rpartition("  [")[0]


@pytest.mark.slow
def test_the_result_of_every_operation_has_its_type(said: dict[str, list[tuple[int, str]]]) -> None:
    assert said["results"] == []
