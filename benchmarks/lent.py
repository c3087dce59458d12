"""What `quicoll.empty` saves: large operations between ranks of one host, of tensors that lie in it and of others.

    python benchmarks/lent.py [--mib 64] [--ranks 2] [--rounds 9] [--json FILE]

In each round every operation is carried out with a tensor of either kind, one after the other, with `out` given. Told
are medians over the rounds, of the slowest rank: milliseconds, and milliseconds of the processors of all ranks
together; and both as a part of what a tensor of malloc's takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import quicoll.blocking
from quicoll.launch.supervisor import Supervisor

MIB = 1 << 20


def operations(group: quicoll.blocking.Group, x: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Return what is measured, of a tensor of this rank."""
    world, rank = group.world_size, group.rank
    part = x[: x.size // world]
    whole, mine = np.empty_like(x), np.empty_like(part)
    return {
        "all_reduce": lambda: group.all_reduce(x, out=whole),
        "reduce_scatter": lambda: group.reduce_scatter(x, out=mine),
        "all_gather": lambda: group.all_gather(part, out=whole[: part.size * world]),
        "broadcast": lambda: group.broadcast(x, out=None if rank == 0 else whole),
        "all_to_all": lambda: group.all_to_all(x[: part.size * world], out=whole[: part.size * world]),
    }


def rank(options: argparse.Namespace) -> None:
    """Carry out the rounds as one of the ranks."""
    with quicoll.blocking.join(join_timeout=60.0) as job:
        group = job.group
        elements = options.mib * MIB // 4
        kinds = {"malloc": np.empty(elements, np.float32), "quicoll.empty": quicoll.empty(elements, np.float32)}
        calls = {}
        for kind, x in kinds.items():
            x[:] = np.arange(elements, dtype=np.float32) * np.float32(job.rank + 1)
            calls[kind] = operations(group, x)
        found: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for number in range(options.rounds + 1):
            for name in calls["malloc"]:
                for kind, each in calls.items():
                    group.barrier()
                    wall, cpu = time.perf_counter(), time.process_time()
                    each[name]()
                    took = time.perf_counter() - wall, time.process_time() - cpu
                    told = group.all_gather(np.array([took]))
                    if number:  # the first one makes what later ones find
                        row = float(told[:, 0].max()), float(told[:, 1].sum())
                        found.setdefault(name, {}).setdefault(kind, []).append(row)
        if job.rank == 0:
            options.rank.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options)
        return
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory) / "told.json"
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--rank", str(told)]
        outcome = asyncio.run(Supervisor(command, workers=options.ranks, max_restarts=0, lost_after=60.0).run())
        if outcome.exit_status:
            sys.exit(outcome.reason)
        found = json.loads(told.read_text())
    for name, kinds in found.items():
        wall, cpu = ({kind: statistics.median(column) for kind, column in columns(kinds, i)} for i in range(2))
        print(
            f"{name:15} {wall['quicoll.empty'] * 1e3:7.2f} ms, {wall['quicoll.empty'] / wall['malloc']:.2f} of "
            f"{wall['malloc'] * 1e3:.2f}; processors {cpu['quicoll.empty'] * 1e3:7.2f} ms, "
            f"{cpu['quicoll.empty'] / cpu['malloc']:.2f} of {cpu['malloc'] * 1e3:.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"mib": options.mib, "ranks": options.ranks, "rounds": found}, indent=1))


def columns(kinds: dict[str, list[tuple[float, float]]], i: int) -> list[tuple[str, list[float]]]:
    """Return the figures of each kind of tensor: seconds, or those of processors."""
    return [(kind, [row[i] for row in rows]) for kind, rows in kinds.items()]


if __name__ == "__main__":
    main()
