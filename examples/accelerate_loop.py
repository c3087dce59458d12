"""Accelerate over quicoll: a loop of Accelerate's, whose process group is made before it.

    pip install accelerate
    torchrun --nproc-per-node=2 examples/accelerate_loop.py

The digest at the end, of all parameters, is the same on every rank and in every run with equally many ranks.
"""

import hashlib

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("quicoll")  # Accelerate takes the group that there is
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    x = torch.randn(512, 16)
    dataset = TensorDataset(x, (x @ torch.randn(16, 4)).argmax(1))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    mean = accelerator.reduce(loss.detach(), reduction="mean")
    parameters = accelerator.unwrap_model(model).parameters()
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in parameters)).hexdigest()
    print(
        f"rank {accelerator.process_index} of {accelerator.num_processes} over {dist.get_backend()}: "
        f"loss {mean:.4f}, digest {digest[:16]}",
        flush=True,
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
