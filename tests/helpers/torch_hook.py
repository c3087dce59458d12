"""One of the processes of a DDP program with a CanonicalHook: rank 0 leaves the model that it ends with.

torch_hook.py DIRECTORY RANK WORLD BACKEND [NAME=VALUE ...]      options of DistributedDataParallel
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import quicoll.blocking
import quicoll.torch

SHARDS = 5
STEPS = 4


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(20, 8, generator=generator), torch.randint(0, 3, (20,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.25), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(model: nn.Module, step: int, shard: int) -> torch.Tensor:
    x, y = batch(step)
    return nn.functional.cross_entropy(model(x[shard::SHARDS]), y[shard::SHARDS])


@contextlib.contextmanager
def job_beside(backend: str, directory: Path, rank: int, world: int) -> Iterator[quicoll.blocking.Group | None]:
    """A job of the same ranks, where torch's own group is another backend's."""
    if backend == "quicoll":
        yield None
        return
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))  # as a launcher says it
    with quicoll.blocking.join(rendezvous=directory / "ranks") as job:
        yield job.group


def main() -> None:
    directory, rank, world, backend = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    options = {name: int(value) for name, value in (each.split("=") for each in sys.argv[5:])}
    dist.init_process_group(
        backend, init_method=f"file://{directory}/torch", rank=rank, world_size=world, timeout=timedelta(seconds=200)
    )
    with job_beside(backend, directory, rank, world) as group:
        # Small buckets, of which DDP makes others after its first backward pass.
        model = DistributedDataParallel(network(), bucket_cap_mb=0.001, **options)
        hook = quicoll.torch.CanonicalHook(model, shards=SHARDS, group=group, seed=7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            for shard in hook.shards(step):
                loss_of(model, step, shard).backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), directory / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
