"""Data-parallel training with a checkpoint of each step, in which a rank is killed once; for torchrun.

    torchrun --nproc-per-node=2 --max-restarts=1 torch_restart.py DIRECTORY

At the end rank 0 compares the parameters with those of one process, bit for bit, and leaves done.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_program import RANK, batch, loss_of, net, same, trained_alone

STEPS = 5


def main() -> None:
    directory, attempt = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    dist.init_process_group("quicoll", timeout=timedelta(seconds=200))
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first, checkpoint = 0, directory / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        first = state["step"]
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(first, STEPS):
        if (attempt, step, RANK) == ("0", 3, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss_of(model, batch(step, RANK)).backward()
        optimizer.step()
        if RANK == 0:
            state = {"step": step + 1, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, directory / "draft.pt")
            os.replace(directory / "draft.pt", checkpoint)
        dist.barrier()
    if RANK == 0:
        equal = same(model.module.parameters(), trained_alone(net(), STEPS).parameters())
        (directory / "done.json").write_text(json.dumps({"attempt": attempt, "from": first, "equal": equal}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
