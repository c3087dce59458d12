"""DistributedDataParallel over quicoll: a small transformer reads English, with the same bits on all world sizes.

    torchrun --nproc-per-node=2 --max-restarts=3 examples/torchrun_ddp.py DIRECTORY

The text ships with Python: its reference manual. A step's 16 pieces of text are 4 logical shards, on however many
processes; kill one, and torchrun starts all of them again from the checkpoint in DIRECTORY. The digest at the end, of
parameters, optimizer and schedule, is the same on 1, 2, 3 and 4 processes, whether any was killed or not.
"""

from __future__ import annotations

import hashlib
import os
import pydoc_data.topics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import quicoll.torch

STEPS, SHARDS, PIECES, LENGTH, WIDTH = 12, 4, 4, 48, 32
TEXT = torch.tensor(
    [min(ord(letter), 127) for name, text in sorted(pydoc_data.topics.topics.items()) for letter in text]
)


class Reader(nn.Module):
    """Says of each letter which one comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.next = nn.Linear(WIDTH, 128)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        found: torch.Tensor = self.next(self.layers(self.letters(letters) + self.places, mask=later, is_causal=True))
        return found


def pieces(step: int, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some text, and the letter that follows each of its letters: of the step and the shard, whoever has it."""
    generator = torch.Generator().manual_seed(step * SHARDS + shard)
    begins = torch.randint(0, len(TEXT) - LENGTH - 1, (PIECES,), generator=generator)
    rows = torch.stack([TEXT[begin : begin + LENGTH + 1] for begin in begins.tolist()])
    return rows[:, :-1], rows[:, 1:]


def tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)


def main() -> None:
    torch.set_num_threads(1)  # kernels divide sums by it
    torch.manual_seed(0)
    dist.init_process_group("quicoll")
    model = DistributedDataParallel(Reader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS)
    hook = quicoll.torch.CanonicalHook(model, shards=SHARDS, seed=0)
    parts = {"model": model.module, "optimizer": optimizer, "schedule": schedule}
    checkpoint, first = Path(sys.argv[1], "checkpoint.pt"), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        first = saved.pop("step")
        for name, state in saved.items():
            parts[name].load_state_dict(state)
    for step in range(first, STEPS):
        optimizer.zero_grad()
        for shard in hook.shards(step):
            letters, following = pieces(step, shard)
            loss = nn.functional.cross_entropy(model(letters).flatten(0, 1), following.flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if dist.get_rank() == 0:
            draft = checkpoint.with_suffix(".draft")
            torch.save({"step": step + 1} | {name: part.state_dict() for name, part in parts.items()}, draft)
            os.replace(draft, checkpoint)
        print(f"step {step} of process {os.getpid()}, rank {dist.get_rank()}: loss {loss.item():.4f}", flush=True)
    digest = hashlib.sha256()
    for part in parts.values():
        for tensor in tensors(part.state_dict()):
            digest.update(tensor.detach().numpy().tobytes())
    print(f"rank {dist.get_rank()} digest {digest.hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
