"""DiLoCo: a small transformer reads English, and the workers exchange what they have learned once in 20 steps.

    quicoll run -n 2 --seed 7 examples/diloco.py --rounds 6

The text ships with Python: its reference manual. Four logical workers read it, each for itself, on however many ranks;
kill one (`kill -9 PID`) and the others go on with its workers from the last round. The digest at the end is the same on
1, 2, 3 and 4 ranks: with `--backup 1` also where one was killed, otherwise with `--replay` and the journal that the job
printed, since the workers of a rank that was killed begin anew then. With `--quorum 3 --grace 1` nobody waits for a
rank that is slower than the others; that is in the journal too. With QUICOLL_LOCAL=off the ranks of one host use links,
as between hosts, and the bytes at the end are those that would cross them.

On two levels: two sites of two ranks, each of which computes a half of what its site's workers read in a step. The
gradients are averaged inside of a site in each step, and only rounds go across. Kill a rank, or both of a site:

    QUICOLL_LOCAL=off quicoll run -n 4 --seed 7 examples/diloco.py --parts 2 --sites aabb --wire int4

The loss at the end is of an eighth of the text, which nobody reads. What it comes to, and beside what, is in
docs/howto/diloco.md; the settings that are there, in some minutes on four processors:

    quicoll run -n 4 --seed 7 examples/diloco.py --rounds 320 --every 56 --fragments 1 --delay 0 --wire int4 \
        --algorithm direct --rate 0.006 --anneal --dropout 0
"""

import argparse
import asyncio
import math
import os
import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional

import quicoll

WORKERS, LENGTH, WIDTH, BLOCK = 4, 48, 32, 4096
LETTERS = torch.tensor(
    [min(ord(letter), 127) for name, text in sorted(pydoc_data.topics.topics.items()) for letter in text]
)
BLOCKS = LETTERS[: len(LETTERS) // BLOCK * BLOCK].view(-1, BLOCK)
OTHERS = torch.arange(len(BLOCKS)) % 8 == 7
TEXT, HELD_OUT = BLOCKS[~OTHERS].flatten(), BLOCKS[OTHERS].flatten()


class Reader(nn.Module):
    """Says of each letter which one comes next."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.next = nn.Linear(WIDTH, 128)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        found: torch.Tensor = self.next(self.layers(self.letters(letters) + self.places, mask=later, is_causal=True))
        return found


def begins(seed: int, step: int, worker: int, pieces: int) -> torch.Tensor:
    """Where in the text the pieces begin that a logical worker reads in an inner step, on whichever rank."""
    generator = torch.Generator().manual_seed(seed * 10_000_000 + step * WORKERS + worker)
    return torch.randint(0, len(TEXT) - LENGTH - 1, (pieces,), generator=generator)


def begins_of_part(seed: int, step: int, shard: int, pieces: int, parts: int) -> torch.Tensor:
    """The same of a logical shard, which is a part of a logical worker."""
    worker, part = divmod(shard, parts)
    return begins(seed, step, worker, pieces)[part * pieces // parts : (part + 1) * pieces // parts]


def loss(model: nn.Module, text: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
    """Of pieces of a text."""
    rows = text[begin[:, None] + torch.arange(LENGTH + 1)]
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def held_out(model: nn.Module) -> float:
    """The loss of all that is held out."""
    model.eval()
    with torch.no_grad():
        return float(loss(model, HELD_OUT, torch.arange(0, len(HELD_OUT) - LENGTH, LENGTH)))


def annealed(step: int, steps: int) -> float:
    """Rises for 50 steps, and falls along a cosine to nothing."""
    return min(1.0, step / 50) * 0.5 * (1.0 + math.cos(math.pi * step / steps))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--every", type=int, default=20, help="inner steps of a round")
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--delay", type=int, default=2)
    parser.add_argument("--mix", type=float, help="how much of a worker's own stays after a delay: 0 to 1")
    parser.add_argument("--wire", help="what is exchanged travels as: int8, int4, topk:1/64, topk-2bit:1/16")
    parser.add_argument("--algorithm", default="auto", help="of the exchange: direct sends the fewest bytes")
    parser.add_argument("--feedback", type=float, default=1.0, help="how much of what the wire loses is sent later")
    parser.add_argument("--rate", type=float, default=3e-3, help="of the inner optimizer")
    parser.add_argument("--anneal", action="store_true", help="let that rise for 50 steps, and fall over all rounds")
    parser.add_argument("--outer-rate", type=float, default=0.7)
    parser.add_argument("--momentum", type=float, default=0.9, help="of the outer optimizer")
    parser.add_argument("--pieces", type=int, default=8, help="that a worker reads in an inner step")
    parser.add_argument("--parts", type=int, default=1, help="into which a site's ranks divide these, each step")
    parser.add_argument("--sites", help="a letter for each worker of `quicoll run`; else QUICOLL_SITE says it")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1, help="of the model, and of what is read when")
    parser.add_argument("--backup", type=int, default=0, help="ranks that keep a copy of what a worker has of its own")
    parser.add_argument("--quorum", type=int, help="workers that are waited for; all, unless it is given")
    parser.add_argument("--grace", type=float, default=0.0, help="seconds that the others have then")
    parser.add_argument("--replay", help="the journal of another job")
    parser.add_argument("--checkpoints", help="a directory")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model = Reader(options.dropout)
    steps = options.rounds * options.every
    number = int(os.environ.get("QUICOLL_NODE", "0").rpartition("-")[2]) if options.sites else 0
    async with quicoll.join(site=options.sites[number] if options.sites else None) as job:
        print(f"process {os.getpid()} is rank {job.rank} of {job.world_size}", flush=True)
        diloco = quicoll.train.DiLoCo(
            job,
            model,
            torch.optim.AdamW(model.parameters(), lr=options.rate),
            torch.optim.SGD(
                model.parameters(), lr=options.outer_rate, momentum=options.momentum, nesterov=options.momentum > 0
            ),
            lambda model, part: loss(
                model, TEXT, begins_of_part(options.seed, part.step, part.shard, options.pieces, options.parts)
            ),
            shards=WORKERS * options.parts,
            parts=options.parts,
            every=options.every,
            fragments=options.fragments,
            delay=options.delay,
            mix=options.mix,
            wire=options.wire,
            algorithm=options.algorithm,
            feedback=options.feedback,
            quorum=options.quorum,
            grace=options.grace,
            backup=options.backup,
            replay=options.replay,
            schedule=(lambda step: annealed(step, steps)) if options.anneal else None,
            checkpoints=quicoll.train.CheckpointPolicy(options.checkpoints, every=2) if options.checkpoints else None,
            on_step=lambda number: print(f"round {number}: loss {diloco.loss:.4f}", flush=True),
        )
        result = await diloco.run(steps=options.rounds)
        sent = sum(link.bytes_sent for link in await job.links())
        nbytes = 4 * sum(each.numel() for each in model.parameters())
        print(f"{sent:,} bytes sent over links; the gradients of one step are {nbytes:,}")
        print(f"{1.0 - diloco.figures.communication_share:.1%} of the time computing")
        print(f"loss of what nobody has read {held_out(model):.4f}")
        print(f"journal {diloco.journal or 'empty'}")
        print(f"digest {result.digest[:16]}")


if __name__ == "__main__":
    asyncio.run(main())
