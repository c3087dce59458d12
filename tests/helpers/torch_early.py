"""Train in a blocking loop, with gradients that travel in the backward pass or without: python torch_early.py BYTES."""

from __future__ import annotations

import sys

import torch
from torch import nn

import quicoll.blocking
from quicoll.torch import Training
from quicoll.torch.early import EarlyGradients


def main() -> None:
    early: list[int] = []
    handed = EarlyGradients.over

    def over(self: EarlyGradients) -> None:
        early.append(self.issued)
        handed(self)

    EarlyGradients.over = over
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    with quicoll.blocking.join() as job:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = Training(job, model, optimizer, shards=4, bucket_bytes=int(sys.argv[1]))
        for step in training.steps(4):
            with step:
                for shard, _ in step.shards:
                    x = torch.full((8, 64), shard + step.number / 8)
                    step.backward(model(x).square().mean())
        sys.stdout.write(f"digest {training.digest()} early {sorted({*early})}\n")


if __name__ == "__main__":
    main()
