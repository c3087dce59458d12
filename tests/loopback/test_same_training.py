"""The digits training step gives equal parameters on any number of ranks, by any algorithm, in any buckets and chunks.

What it is compared with is the same training in one process, without a network or a plan (`train.digits.baseline`).
Shards are smaller than the demo's, 4 samples instead of 96; everything else is the demo's. QUICOLL_TEST_TRAINING_STEPS
takes more steps than the 6 after which a bit that differed at first has reached every parameter.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from depth import deep, some

from quicoll import checkpoint
from quicoll.data import Sampler
from quicoll.demo.digits import SHARDS, Digits, baseline, pin_torch
from quicoll.errors import LocalError
from quicoll.testing import cluster
from quicoll.train import CheckpointPolicy, Divide, Part, TorchTask, Worker

STEPS, BATCH, SEED = int(os.environ.get("QUICOLL_TEST_TRAINING_STEPS", "6")), 4, 7


@pytest.fixture(scope="module", autouse=True)
def pinned() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    pin_torch()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def alone(pinned: None) -> dict[str, bytes]:
    return parameters(baseline(steps=STEPS, seed=SEED, batch=BATCH))


def parameters(task: Digits) -> dict[str, bytes]:
    """All parameters and their momentum, as bytes."""
    return {name: torch.as_tensor(value).numpy().tobytes() for name, value in task.state().items()}


async def trained(world: int, *, sites: bool = False, chunk_bytes: int = 1 << 20, **how: Any) -> list[Digits]:
    names = [f"site-{2 * rank // world}" for rank in range(world)] if sites else None
    tasks = [Digits(seed=SEED, batch=BATCH) for _ in range(world)]
    async with cluster(world, sites=names, chunk_bytes=chunk_bytes) as jobs:
        results = await asyncio.gather(
            *(Worker(job, task, shards=SHARDS, **how).run(steps=STEPS) for job, task in zip(jobs, tasks, strict=True))
        )
    assert [(result.steps, result.committed, result.aborted) for result in results] == [(STEPS, STEPS, 0)] * world
    assert {result.digest for result in results} == {checkpoint.digest(tasks[0].state())}
    return tasks


@pytest.mark.parametrize("world", deep([1, 2, 5], [1, 2, 3, 5, 8]))
async def test_parameters_are_equal_at_every_world_size(world: int, alone: dict[str, bytes]) -> None:
    for task in await trained(world):
        assert parameters(task) == alone


@pytest.mark.parametrize("algorithm", some(["direct", "auto", "tree", "hierarchical", "exchange"], 2))
async def test_parameters_are_equal_by_every_algorithm(algorithm: str, alone: dict[str, bytes]) -> None:
    for task in await trained(3, sites=True, algorithm=algorithm):
        assert parameters(task) == alone


@pytest.mark.parametrize(
    ("bucket_bytes", "chunk_bytes"),
    some([(1, 1 << 20), (0, 5000), (40_000, 5000), (3000, 1 << 20), (0, 20_011)], 2),
)
async def test_parameters_are_equal_in_any_buckets_and_chunks(
    bucket_bytes: int, chunk_bytes: int, alone: dict[str, bytes]
) -> None:
    for task in await trained(3, bucket_bytes=bucket_bytes, chunk_bytes=chunk_bytes):
        assert parameters(task) == alone


async def test_all_at_once(alone: dict[str, bytes]) -> None:
    for task in await trained(deep(5, 8), sites=True, algorithm="hierarchical", bucket_bytes=15_000, chunk_bytes=3001):
        assert parameters(task) == alone


async def test_other_bits_would_be_seen(alone: dict[str, bytes]) -> None:
    """The steps are enough for one unit in the last place of one parameter to come out everywhere."""
    task = Digits(seed=SEED, batch=BATCH)
    with torch.no_grad():
        first = task.state()["parameter.conv1.weight"]
        torch.as_tensor(first).view(-1).view(torch.int32)[0] ^= 1
    async with cluster(1) as (job,):
        await Worker(job, task, shards=SHARDS).run(steps=STEPS)
    changed = parameters(task)
    assert all(changed[name] != alone[name] for name in alone if name.startswith("parameter."))


async def test_a_negative_bucket_is_refused() -> None:
    async with cluster(1) as (job,):
        with pytest.raises(LocalError, match="bucket_bytes"):
            Worker(job, Digits(seed=SEED, batch=BATCH), shards=SHARDS, bucket_bytes=-1)


# -- layers that keep running statistics -------------------------------------------------------------------------------

X = np.random.default_rng(3).standard_normal((50, 5)).astype(np.float32)


def normalised() -> TorchTask:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = torch.nn.Sequential(
            torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1)
        )

    def loss(module: torch.nn.Module, part: Part) -> torch.Tensor:
        return torch.as_tensor(module(torch.from_numpy(X[part.indices])).square().mean())

    return TorchTask(module, torch.optim.Adam(module.parameters(), lr=0.01), loss)


def batches() -> Sampler:
    return Sampler(len(X), batch_size=18, shards=6, seed=SEED)


async def statistics(world: int, **how: Any) -> list[dict[str, bytes]]:
    """All of the module after three steps, the last with parts of two samples or three."""
    tasks = [normalised() for _ in range(world)]
    async with cluster(world) as jobs:
        workers = [Worker(job, task, data=batches(), **how) for job, task in zip(jobs, tasks, strict=True)]
        await asyncio.gather(*(worker.run(epochs=1) for worker in workers))
    return [
        {name: torch.as_tensor(value).numpy().tobytes() for name, value in task.state()["module"].items()}
        for task in tasks
    ]


async def test_running_statistics_are_the_same_bits_at_every_world_size(pinned: None) -> None:
    """S1, A2: they move with the commit, by the mean over the logical shards; no rank has statistics of its own."""
    (alone,) = await statistics(1)
    assert np.frombuffer(alone["1.num_batches_tracked"], np.int64).tolist() == [3]
    assert np.frombuffer(alone["1.running_var"], np.float32).std() > 0
    for world, how in ((2, {}), (3, {"phase_barrier": True}), (4, {"bucket_bytes": 40})):
        for found in await statistics(world, **how):
            assert found == alone


# -- a divided state, from checkpoints ---------------------------------------------------------------------------------


async def resumed(world: int, steps: int, directory: Path | None, *, copies: int = 0) -> tuple[set[str], list[Any]]:
    """The digests after so many steps, and from where the ranks began. copies: each rank has a disk of its own."""

    def policy(node: str) -> CheckpointPolicy | None:
        if directory is None:
            return None
        own = directory / node
        return (
            CheckpointPolicy(own, every=4, shared=False, copies=copies)
            if copies
            else CheckpointPolicy(directory, every=4)
        )

    async with cluster(world) as jobs:
        workers = [
            Worker(job, normalised(), data=batches(), checkpoints=policy(job.node), divide=Divide(8)) for job in jobs
        ]
        results = await asyncio.gather(*(worker.run(steps=steps) for worker in workers))
    return {result.digest for result in results}, [result.resumed_from for result in results]


async def test_a_divided_state_comes_back_from_checkpoints_at_another_world_size(pinned: None, tmp_path: Path) -> None:
    """S7, C5: each rank writes what it owns of Adam's moments, and reads what it is to own."""
    alone, _ = await resumed(1, 9, None)
    await resumed(3, 5, tmp_path)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.step, found.tensors["divided.exp_avg"].shape) == (5, (6 * 5 + 6 + 6 + 6 + 6 + 1 + 6 + 6 + 1,))
    assert await resumed(2, 9, tmp_path) == (alone, [5, 5])


async def test_a_divided_state_comes_back_from_disks_of_their_own_by_the_copies_on_them(
    pinned: None, tmp_path: Path
) -> None:
    """S7: each rank keeps its neighbour's blocks too, as a backup, and reads them where the policy has put them."""
    alone, _ = await resumed(1, 9, None)
    await resumed(3, 5, tmp_path, copies=2)
    assert await resumed(3, 9, tmp_path, copies=2) == (alone, [5, 5, 5])
