"""The transformer of examples/torchrun_ddp.py as an ordinary program trains it, without the hook: for torchrun.

The digest that each rank says at the end is of the parameters. torch_plain_ddp.py DIRECTORY
"""

from __future__ import annotations

import hashlib
import runpy
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


def main() -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "torchrun_ddp.py"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("quicoll", timeout=timedelta(seconds=200))
    model = DistributedDataParallel(example["Reader"](), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        letters, following = example["pieces"](step, dist.get_rank())
        nn.functional.cross_entropy(model(letters).flatten(0, 1), following.flatten()).backward()
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(f"rank {dist.get_rank()} digest {digest.hexdigest()[:16]}", flush=True)  # noqa: T201 - what the test reads
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
