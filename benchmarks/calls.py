"""How many Python functions one small all_reduce runs through: what the library costs where the network costs nothing.

    python benchmarks/calls.py [--kib 4] [--step] [--ranks 2] [--rounds 200] [--top 0] [--json FILE]

With --step an empty step, its vote and its commit.

All ranks live in this process (`quicoll.testing.cluster`): the callers on one thread, the engines and the coordinator
on another; both are counted with `sys.setprofile`, and the sum is divided by rounds and ranks. A call is one entry of a
Python function; a coroutine or generator that goes on after a wait counts again, because it costs again. Functions
written in C do not count. Calls are the median round's: now and then a heartbeat falls into one. How many datagrams a
round takes depends on the machine and its load, and with them what QUIC costs, so the fewest of any round are given as
well, and calls by room. Functions and modules are those that at least half of the rounds have run through.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

import quicoll.testing

_WARM = 50  # rounds before the first that counts: plans are kept, links have measured their paths


class Counting:
    """Counts the entries of Python functions on every thread that starts after it was made, by round."""

    def __init__(self) -> None:
        self.rounds: list[Counter[CodeType]] = []
        self._counts: Counter[CodeType] | None = None
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        counts = self._counts
        if counts is not None and event == "call":
            counts[frame.f_code] += 1

    def begin(self) -> None:
        self._counts = Counter()

    def end(self) -> None:
        counts, self._counts = self._counts, None
        if counts is not None:
            self.rounds.append(counts)

    def close(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


async def empty_step(job: quicoll.Job) -> None:
    async with job.step():
        pass


async def measure(ranks: int, kib: int, rounds: int, *, step: bool) -> list[Counter[CodeType]]:
    counting = Counting()
    try:
        async with quicoll.testing.cluster(ranks) as jobs:
            inputs = [np.full(kib * 256, rank + 1, np.float32) for rank in range(ranks)]
            for number in range(_WARM + rounds):
                if number >= _WARM:
                    counting.begin()
                if step:
                    await asyncio.gather(*(empty_step(job) for job in jobs))
                else:
                    await asyncio.gather(*(job.group.all_reduce(x) for job, x in zip(jobs, inputs, strict=True)))
                counting.end()
    finally:
        counting.close()
    return counting.rounds


def _place(code: CodeType) -> str:
    """The module of a function, by its file."""
    parts = Path(code.co_filename).with_suffix("").parts
    for root in ("quicoll", "quicoll_transport", "aioquic", "asyncio", "concurrent"):
        if root in parts:
            return ".".join(parts[len(parts) - 1 - parts[::-1].index(root) :])
    return parts[-1]


def summary(rounds: list[Counter[CodeType]], ranks: int) -> dict[str, Any]:
    seen: Counter[CodeType] = Counter()
    total: Counter[CodeType] = Counter()
    for counts in rounds:
        seen.update(counts.keys())
        total.update(counts)
    here = Path(__file__).name
    own = [code for code in seen if 2 * seen[code] >= len(rounds) and not code.co_filename.endswith(here)]
    by_room: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    for code in own:
        by_name[f"{_place(code)}.{code.co_qualname}"] += total[code]
        by_room[".".join(_place(code).split(".")[:2])] += total[code]
    return {
        "calls": round(statistics.median(sum(counts.values()) for counts in rounds) / ranks),
        "fewest": round(min(sum(counts.values()) for counts in rounds) / ranks),
        "functions": len(own),
        "modules": len({_place(code) for code in own}),
        "rooms": {room: round(count / len(rounds) / ranks, 1) for room, count in by_room.most_common()},
        "top": {name: round(count / len(rounds) / ranks, 1) for name, count in by_name.most_common()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kib", type=int, default=4)
    parser.add_argument("--step", action="store_true", help="an empty step, in place of an all_reduce")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--top", type=int, default=0, help="print the functions that are called most")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    found = summary(asyncio.run(measure(given.ranks, given.kib, given.rounds, step=given.step)), given.ranks)
    counted = "{calls} calls ({fewest} at least), {functions} functions, {modules} modules".format_map(found)
    what = "an empty step" if given.step else f"{given.kib} KiB all_reduce"
    print(f"{what}, {given.ranks} ranks, for one rank: {counted}")
    for room, count in found["rooms"].items():
        print(f"  {count:8.1f}  {room}")
    for name, count in list(found["top"].items())[: given.top]:
        print(f"  {count:8.1f}  {name}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
