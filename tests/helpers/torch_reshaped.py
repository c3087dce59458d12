"""Save a sharded model with torch's distributed checkpoints, or load it, over quicoll: for torchrun.

    torch_reshaped.py save|load DIRECTORY

The model is FSDP2's, and the optimizer has stepped; who loads begins from another seed. Rank 0 leaves the bits of both,
put together, in DIRECTORY/<save or load><number of ranks>.pt.
"""

from __future__ import annotations

import importlib
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    model(x).square().mean().backward()
    optimizer.step()


def main() -> None:
    what, directory = sys.argv[1], Path(sys.argv[2])
    importlib.import_module("quicoll.torch_backend")  # where it is not installed
    dist.init_process_group("quicoll", timeout=timedelta(seconds=200))
    torch.manual_seed(0 if what == "save" else 1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if what == "save":
        dcp.save(state, checkpoint_id=directory / "dcp")
    else:
        dcp.load(state, checkpoint_id=directory / "dcp")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_state_dict(model, optimizer, options=whole)
    if dist.get_rank() == 0:
        torch.save(found, directory / f"{what}{dist.get_world_size()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
