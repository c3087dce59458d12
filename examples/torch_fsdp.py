"""FSDP2 beside tensor parallel on a mesh of quicoll's ranks, two by two, in steps that all ranks commit or none.

    quicoll run -n 4 examples/torch_fsdp.py

torch divides: `parallelize_module` each layer among the two ranks of a row, `fully_shard` what is left of it among the
two of a column. Each rank prints how many of the parameters it holds, and how far they are from those of one process.
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import quicoll.blocking
import quicoll.torch

STEPS, BATCH = 20, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step % 4))
    return x, torch.sin(x.cumsum(1))


def alone(model: nn.Module) -> None:
    """The same on one process."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, wanted = samples(step)
        F.mse_loss(model(x), wanted).backward()
        optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    other = copy.deepcopy(model)
    with quicoll.blocking.join() as job:
        mesh = quicoll.torch.device_mesh(job.group, (2, 2), ("dp", "tp"))
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)
        half = slice(mesh.get_local_rank("dp"), None, 2)
        for number in range(STEPS):
            with job.step() as step:
                optimizer.zero_grad()
                x, wanted = (each[half] for each in samples(number))
                loss = F.mse_loss(model(x), wanted)
                loss.backward()
                step.on_commit(optimizer.step)
            if job.rank == 0 and number % 10 == 9:
                print(f"step {number + 1}: loss {loss.item():.4f}", flush=True)
        held = sum(each.to_local().numel() for each in model.parameters())
        total = sum(each.numel() for each in other.parameters())
        alone(other)
        far = max(
            float((mine.full_tensor() - theirs).detach().abs().max())
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True)
        )
        print(f"rank {job.rank} holds {held} of {total} parameters: at most {far:.1e} from one process", flush=True)


if __name__ == "__main__":
    main()
