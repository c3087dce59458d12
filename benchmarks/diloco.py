"""How much of the time DiLoCo leaves for computing: simulated, with the real code, on a virtual clock.

    python benchmarks/diloco.py [--parameters 74497,1000001] [--mbit 200] [--rtt-ms 50] [--loss 0.1] [--ranks 4]
                                [--sites 0] [--every 100] [--fragments 4] [--delay 5] [--step-ms 50] [--rounds 3]
                                [--wire int4] [--congestion bbr,cubic] [--json FILE]

Each host has an access link of that rate; an inner step takes --step-ms of simulated time, and nothing else that a
processor does takes any. With --sites the ranks are spread over so many, each a logical worker; inside a site
there is 0.1 ms, and each inner step reduces gradients there. One row for each number of parameters and congestion
control, of the rounds after the first, which knows nothing of the path:

    computing   the inner steps' share of a round
    fragments   seconds that an exchange was waited for between two inner steps of a round
    between     seconds from the last inner step of a round to the first of the next: the last exchange, if it has no
                delay, and what the round is staged by; the decision is not waited for
    bytes       that a rank sends in a round, and how many times fewer that is than float32 gradients in each inner step
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quicoll.sim import AccessLink, Conditions, Settings, Simulation
from quicoll.train import DiLoCo

if TYPE_CHECKING:
    from quicoll.job import Job


class Flat(torch.nn.Module):
    """So many parameters, in eight tensors, and next to nothing to be computed."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        sizes = [(place + 1) * parameters // 8 - place * parameters // 8 for place in range(8)]
        torch.manual_seed(1)
        self.values = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(size)) for size in sizes])

    def forward(self, goal: float) -> torch.Tensor:
        return torch.stack([((each - goal) ** 2).mean() for each in self.values]).sum()


def measured(options: argparse.Namespace, parameters: int, congestion: str) -> dict[str, Any]:
    """One row."""
    marks: list[list[tuple[float, float]]] = [[] for _ in range(options.ranks)]
    sent: list[list[int]] = [[] for _ in range(options.ranks)]
    step_s = options.step_ms / 1000
    sites = options.sites or options.ranks
    per_site = options.ranks // sites

    async def worker(job: Job, sim: Simulation) -> None:
        model = Flat(parameters)

        async def inner(_: int) -> None:
            began = float(sim.now)
            await asyncio.sleep(step_s)
            marks[job.rank].append((began, float(sim.now)))

        async def rounds(_: int) -> None:
            sent[job.rank].append(sum(link.bytes_sent for link in await job.links()))

        diloco = DiLoCo(
            job,
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True),
            lambda module, part: module(float(part.shard)),
            shards=options.ranks,
            parts=per_site,
            every=options.every,
            fragments=options.fragments,
            delay=options.delay,
            wire=options.wire or None,
            on_step=rounds,
            on_inner_step=inner,
        )
        await diloco.run(steps=options.rounds)

    rate = options.mbit * 125_000
    simulation = Simulation(
        worker,
        seed=1,
        settings=Settings(
            ranks=options.ranks,
            conditions=Conditions(latency_ns=round(options.rtt_ms * 500_000), loss=options.loss / 100),
            access=(AccessLink(up=rate, down=rate),) if not options.sites else (),
            sites=tuple(str(rank // per_site) for rank in range(options.ranks)),
            congestion=congestion,
            lost_after=8.0,
            timeout=120.0,
            hold_timeout=400.0,
            limit=options.rounds * options.every * step_s * 4 + 200.0,
        ),
    )
    outcome = simulation.run()
    if outcome.error is not None:
        raise outcome.error
    rows = [_parts(marks[rank], options.every, step_s) for rank in range(options.ranks)]
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    of_round = max((each[-1] - each[0]) / (options.rounds - 1) for each in sent)
    gradients = options.every * 2 * (options.ranks - 1) / options.ranks * 4 * parameters
    return {
        "parameters": parameters,
        "congestion": congestion,
        **mean,
        "bytes": of_round,
        "fewer": gradients / of_round,
    }


def _parts(marks: list[tuple[float, float]], every: int, step_s: float) -> dict[str, float]:
    """Where the time from the end of the first round's inner steps to that of the last's has gone, by round.

    marks: When each inner step began and ended; of whole rounds, none of them aborted.
    """
    rounds = [marks[at : at + every] for at in range(0, len(marks), every)]
    between = [after[0][0] - before[-1][1] for before, after in pairwise(rounds)]
    within = [each[-1][1] - each[0][0] - every * step_s for each in rounds[1:]]
    seconds = (rounds[-1][-1][1] - rounds[0][-1][1]) / len(between)
    return {
        "computing": every * step_s / seconds,
        "seconds": seconds,
        "fragments": sum(within) / len(within),
        "between": sum(between) / len(between),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", default="74497,1000001")
    parser.add_argument("--mbit", type=float, default=200)
    parser.add_argument("--rtt-ms", type=float, default=50)
    parser.add_argument("--loss", type=float, default=0.1, help="percent of the packets")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sites", type=int, default=0, help="0: each rank is one by itself")
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--delay", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wire", default="int4")
    parser.add_argument("--congestion", default="bbr,cubic")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    rows = []
    for parameters in map(int, options.parameters.split(",")):
        for congestion in options.congestion.split(","):
            rows.append(row := measured(options, parameters, congestion))
            print(
                f"{parameters:>10,} {congestion:>6}: computing {row['computing']:.1%} of {row['seconds']:.2f} s;"
                f" fragments {row['fragments']:.3f}, between {row['between']:.3f};"
                f" {row['bytes']:,.0f} bytes, {row['fewer']:,.0f} times fewer",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
