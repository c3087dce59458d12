"""DiLoCo: a small transformer reads English, and the workers exchange what they have learned once in 20 steps.

    quicoll run -n 2 --seed 7 examples/diloco.py --rounds 6

The text ships with Python: its reference manual. Four logical workers read it, each for itself, on however many ranks;
kill one (`kill -9 PID`) and the others go on with its workers from the last round. The digest at the end is the same on
1, 2, 3 and 4 ranks: with `--backup 1` also where one was killed, otherwise with `--replay` and the journal that the job
printed, since the workers of a rank that was killed begin anew then. With `--quorum 3 --grace 1` nobody waits for a
rank that is slower than the others; that is in the journal too. With QUICOLL_LOCAL=off the ranks of one host use links,
as between hosts, and the bytes at the end are those that would cross them.
"""

import argparse
import asyncio
import os
import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional

import quicoll

WORKERS, EVERY, PIECES, LENGTH, WIDTH = 4, 20, 8, 48, 32
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


def loss(model: nn.Module, part: quicoll.train.Part) -> torch.Tensor:
    """Of some text that is a logical worker's in an inner step, on whichever rank."""
    generator = torch.Generator().manual_seed(part.step * WORKERS + part.shard)
    begins = torch.randint(0, len(TEXT) - LENGTH - 1, (PIECES,), generator=generator)
    rows = torch.stack([TEXT[begin : begin + LENGTH + 1] for begin in begins.tolist()])
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--delay", type=int, default=2)
    parser.add_argument("--wire", help="what is exchanged travels as: int8, int4, topk:1/64")
    parser.add_argument("--backup", type=int, default=0, help="ranks that keep a copy of what a worker has of its own")
    parser.add_argument("--quorum", type=int, help="workers that are waited for; all, unless it is given")
    parser.add_argument("--grace", type=float, default=0.0, help="seconds that the others have then")
    parser.add_argument("--replay", help="the journal of another job")
    parser.add_argument("--checkpoints", help="a directory")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Reader()
    async with quicoll.join() as job:
        print(f"process {os.getpid()} is rank {job.rank} of {job.world_size}", flush=True)
        diloco = quicoll.train.DiLoCo(
            job,
            model,
            torch.optim.AdamW(model.parameters(), lr=3e-3),
            torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True),
            loss,
            shards=WORKERS,
            every=EVERY,
            fragments=options.fragments,
            delay=options.delay,
            wire=options.wire,
            quorum=options.quorum,
            grace=options.grace,
            backup=options.backup,
            replay=options.replay,
            checkpoints=quicoll.train.CheckpointPolicy(options.checkpoints, every=2) if options.checkpoints else None,
            on_step=lambda number: print(f"round {number}: loss {diloco.loss:.4f}", flush=True),
        )
        result = await diloco.run(steps=options.rounds)
        sent = sum(link.bytes_sent for link in await job.links())
        nbytes = 4 * sum(each.numel() for each in model.parameters())
        print(f"{sent:,} bytes sent over links; the gradients of one step are {nbytes:,}")
        print(f"journal {diloco.journal or 'empty'}")
        print(f"digest {result.digest[:16]}")


if __name__ == "__main__":
    asyncio.run(main())
