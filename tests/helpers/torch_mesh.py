"""One of four ranks of a job that gives torch a mesh of itself: tensor parallel one way, data parallel the other.

quicoll run -n 4 torch_mesh.py DIRECTORY

Each leaves a file, named after its rank, when all was as it should be.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import quicoll
import quicoll.blocking
from quicoll.torch import device_mesh, functional

STEPS = 3
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


def batch(step: int) -> Any:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def alone() -> list[Any]:
    """What one process makes of all samples."""
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def trained(job: Any, model: nn.Module, mesh: Any, *, sharded: bool) -> list[Any]:
    """In steps of the job: torch's operations are part of them."""
    half = mesh.get_local_rank("dp")
    if sharded:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        with job.step() as here:
            optimizer.zero_grad()
            model(batch(step)[4 * half : 4 * half + 4]).square().mean().backward()
            if not sharded:
                for each in model.parameters():
                    dist.all_reduce(local(each.grad), op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
            here.on_commit(optimizer.step)
    return [whole(each) for each in model.parameters()]


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def whole(value: Any) -> Any:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def close(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def by_two(job: Any) -> None:
    mesh = device_mesh(job.group, (2, 2), ("dp", "tp"))
    assert mesh.get_local_rank("tp") == job.rank % 2
    assert mesh.get_local_rank("dp") == job.rank // 2
    for sharded in (False, True):
        model = parallelize_module(Two(), mesh["tp"], copy.copy(PLAN))
        assert isinstance(model.up.weight, DTensor)
        assert model.up.weight.to_local().shape == (8, 8)
        before = job.committed_step
        close(trained(job, model, mesh, sharded=sharded), alone())
        assert job.committed_step == before + STEPS
    # The backward pass of DDP, along "dp" of another mesh of the same ranks.
    other = device_mesh(job.group, (2, 2), ("dp", "tp"))
    model = DistributedDataParallel(Two(), process_group=other.get_group("dp"))
    model(batch(0)[4 * (job.rank // 2) :][:4]).square().mean().backward()
    single = Two()
    single(batch(0)).square().mean().backward()
    close([each.grad for each in model.parameters()], [each.grad for each in single.parameters()])
    # An operation of torch's default group, which is quicoll's for whoever asks.
    assert functional.all_reduce(torch.ones(2)).tolist() == [4.0, 4.0]
    with pytest.raises(quicoll.LocalError, match="has not the 4 ranks of"):
        device_mesh(job.group, (3, 2))


def in_a_part(job: Any) -> None:
    """Of a sub-group: torch's world is smaller than the job."""
    pair = job.group.split(job.rank // 2)
    mesh = device_mesh(pair, (2,), ("tp",))
    assert dist.get_world_size() == 2
    model = parallelize_module(Two(), mesh, copy.copy(PLAN))
    model(batch(0)).square().mean().backward()
    single = Two()
    single(batch(0)).square().mean().backward()
    close([whole(each.grad) for each in model.parameters()], [each.grad for each in single.parameters()])


def until_it_fails(group: Any) -> None:
    while True:
        dist.all_reduce(torch.ones(1), group=group)


def in_the_next_view(job: Any) -> None:
    """Three are left. What torch has is of no use to them any more, until it is made anew."""
    old = device_mesh(job.group, (4,))
    with pytest.raises(dist.DistBackendError) as lost:
        until_it_fails(old.get_group())
    assert isinstance(lost.value, quicoll.PeerError)
    while job.world_size != 3:
        try:
            job.ready()
        except quicoll.StepAborted:
            continue
    with pytest.raises(quicoll.LocalError, match="was made in view"):
        dist.all_reduce(torch.ones(1))
    mesh = device_mesh(job.group, (3,), ("dp",))
    total = torch.full((2,), float(job.rank))
    dist.all_reduce(total, group=mesh.get_group("dp"))
    assert total.tolist() == [3.0, 3.0]


def main() -> None:
    directory = Path(sys.argv[1])
    with quicoll.blocking.join() as job:
        job.register_state(dict, lambda state: None)
        job.ready()
        by_two(job)
        in_a_part(job)
        device_mesh(job.group, (4,))
        job.group.barrier()
        if job.rank == 3:
            (directory / "rank3").touch()
            return
        in_the_next_view(job)
        dist.destroy_process_group()
        device_mesh(job.group, (3,))
        assert dist.get_world_size() == 3
        job.group.barrier()
        (directory / f"rank{job.rank}").touch()


if __name__ == "__main__":
    main()
