"""One of the processes of an FSDP2 program over Gloo, whose shards go over quicoll where that is asked for.

torch_sharded.py DIRECTORY RANK WORLD plain|carried
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import quicoll.blocking
import quicoll.torch
from quicoll.torch.fsdp import GradientScatter, ParameterGather

CALLS: list[str] = []


def counted(kind: Any) -> None:
    """Count the calls of a kind of object."""
    plain = kind.__call__

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        CALLS.append(kind.__name__)
        return plain(self, *arguments, **options)

    kind.__call__ = call


def main() -> None:
    directory, rank, world, carried = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "carried"
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/torch", rank=rank, world_size=world, timeout=timedelta(seconds=200)
    )
    counted(ParameterGather)
    counted(GradientScatter)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))  # as a launcher says it
    with quicoll.blocking.join(rendezvous=directory / "ranks") as job:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 5))
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        if carried:
            quicoll.torch.carry_shards(model, job.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        if rank == 0:
            torch.save(whole, directory / "model.pt")
            (directory / "calls.json").write_text(json.dumps({kind: CALLS.count(kind) for kind in sorted({*CALLS})}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
