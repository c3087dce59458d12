"""Tensor parallel inside data parallel, two by two: each layer divided among two ranks, each batch among two pairs.

    quicoll run -n 4 examples/tensor_parallel.py

Rank 0 prints the loss, and how far the weights, put together, are from those of one process.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

import quicoll.blocking
from quicoll.torch.parallel import ParallelMLP

STEPS, BATCH = 30, 8


def samples(step: int, pair: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(2 * step + pair))
    return x, torch.sin(x.cumsum(1))


def train(up: nn.Linear, down: nn.Linear, steps: int) -> None:
    """The same on one process, for comparison."""
    optimizer = torch.optim.SGD([*up.parameters(), *down.parameters()], lr=0.3)
    for step in range(steps):
        optimizer.zero_grad()
        for pair in range(2):
            x, y = samples(step, pair)
            (F.mse_loss(down(F.gelu(up(x))), y) / 2).backward()
        optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    up, down = nn.Linear(16, 50), nn.Linear(50, 16)
    with quicoll.blocking.join() as job:
        pair, place = divmod(job.rank, 2)
        tensor_group = job.group.split(pair)
        data_group = job.group.split(place)
        assert tensor_group is not None
        assert data_group is not None
        model = ParallelMLP(up, down, tensor_group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = samples(step, pair)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            data_group.all_reduce(gradients, op="avg", out=gradients)
            optimizer.step()
            if job.rank == 0 and step % 10 == 9:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
        whole = model.up.whole(), model.down.whole()
        alone = copy.deepcopy(up), copy.deepcopy(down)
        train(*alone, STEPS)
        far = max(
            float((mine - theirs).detach().abs().max())
            for ours, other in zip(whole, alone, strict=True)
            for mine, theirs in zip(ours.parameters(), other.parameters(), strict=True)
        )
        print(f"rank {job.rank}: at most {far:.1e} from one process", flush=True)


if __name__ == "__main__":
    main()
