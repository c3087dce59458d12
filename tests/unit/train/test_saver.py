"""A worker's checkpoints: its policy reaches the checkpointer, and its state is found without what is divided."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_job import MemoryCluster, MemoryJob

from quicoll import checkpoint
from quicoll.checkpoint import Shard
from quicoll.errors import CheckpointError, LocalError
from quicoll.train import CheckpointPolicy
from quicoll.train.saver import Saver, newest_state, state_of_step

SIZE, STEP = 90, 6


def state(step: int) -> dict[str, Any]:
    return {"architecture": "one layer", "task": {"weights": np.full(50, step, np.float32)}}


def moments(step: int) -> Any:
    return np.random.default_rng(step).random(SIZE)


async def saved(place: Path, *, copies: int, world: int = 3, **options: Any) -> None:
    """A checkpoint of a worker whose optimizer's state is divided, on a disk for each rank."""

    async def rank(job: MemoryJob) -> None:
        policy = CheckpointPolicy(place / job.node, every=2, shared=False, copies=copies, **options)
        part = slice(SIZE * job.rank // world, SIZE * (job.rank + 1) // world)
        saver = Saver(
            job,
            policy,
            lambda: state(job.committed_step),
            shards=lambda: {"divided.m": Shard(moments(job.committed_step)[part], (SIZE,), (part.start,))},
            resumed_from=0,
        )
        await saver.finish()

    await asyncio.gather(*map(rank, MemoryCluster(world, step=STEP).jobs))


def held(place: Path, rank: int, world: int = 3) -> list[bool]:
    """Which ranks' shards are on the disk of one."""
    (found,) = checkpoint.stored(place / f"n{rank}")
    here = []
    for owner in range(world):
        start, stop = SIZE * owner // world, SIZE * (owner + 1) // world
        try:
            value = np.asarray(found.read("divided.m", offset=(start,), shape=(stop - start,)))
        except CheckpointError:
            here.append(False)
        else:
            assert np.array_equal(value, moments(STEP)[start:stop])
            here.append(True)
    return here


@pytest.mark.parametrize(
    ("copies", "disks"),
    [
        (1, [[True, False, False], [False, True, False], [False, False, True]]),
        (2, [[True, False, True], [True, True, False], [False, True, True]]),
        (3, [[True] * 3] * 3),
    ],
)
async def test_each_shard_of_a_worker_is_on_as_many_disks_as_its_policy_says(
    copies: int, disks: list[list[bool]], tmp_path: Path
) -> None:
    await saved(tmp_path, copies=copies)
    assert [held(tmp_path, rank) for rank in range(3)] == disks


async def test_a_worker_finds_its_state_on_a_disk_that_lacks_the_others_shards(tmp_path: Path) -> None:
    await saved(tmp_path, copies=1)
    for rank in range(3):
        policy = CheckpointPolicy(tmp_path / f"n{rank}", shared=False)
        for found in (await newest_state(policy), await state_of_step(policy.directory, STEP)):
            assert found is not None
            assert found.step == STEP
            assert found.state["architecture"] == "one layer"
            assert np.array_equal(found.state["task"]["weights"], state(STEP)["task"]["weights"])


async def test_the_limit_of_copies_is_the_policys(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="of 239 at most"):
        await saved(tmp_path, copies=2, copy_limit=SIZE * 8 // 3 - 1)
    await saved(tmp_path, copies=2, copy_limit=SIZE * 8 // 3)


@pytest.mark.parametrize(
    "options", [{"every": -1}, {"keep": 0}, {"copies": 2}, {"copies": 0}, {"shared": False, "copy_limit": 0}]
)
def test_a_policy_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LocalError, match=r"every|copies|copy_limit"):
        CheckpointPolicy("checkpoints", **options)


async def test_what_is_no_state_of_a_worker_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=1, tensors={"a": np.ones(2)}, metadata={"state.skeleton": "", "state.names": "["})
    with pytest.raises(CheckpointError, match="holds no state of a task"):
        await newest_state(CheckpointPolicy(tmp_path))
    checkpoint.save(
        tmp_path, step=2, tensors={"a": np.ones(2)}, metadata={"state.skeleton": "", "state.names": '["b"]'}
    )
    with pytest.raises(CheckpointError, match="it has no tensor 'b'"):
        await state_of_step(tmp_path, 2)
