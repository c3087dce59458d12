"""How near operations come to what a long path that loses packets allows: quicoll itself, in its simulator.

    python benchmarks/wan_virtual.py [--profiles wan badwan] [--controllers bbr cubic] [--mib 4 16] [--ranks 2]
                                     [--kinds transfer all_reduce] [--seeds 5] [--operations 6] [--json FILE]

Time is the simulator's: what the machine does at the moment, or how fast it is, changes nothing, and a run is the same
again. So processor time counts for nothing either; these are paths on which the network is what takes long.

A figure is the time of an operation, of the rank that was last, over the ideal: for all_reduce 2 (N-1)/N S / rate and
2 (N-1) delays, for a transfer from one rank to another S / rate and a delay. The first operation of a connection begins
with a window of ten packets; the others are told of as median and 90th percentile, over all seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quicoll.sim import Conditions, Settings, Simulation


@dataclass(frozen=True, slots=True)
class Profile:
    """A path between any two hosts. queue: in round trips; back_mbit: from others to rank 0, where it is another."""

    mbit: int
    rtt_ms: int
    loss: float
    burst: float = 1.0
    queue: float = 1.0
    back_mbit: int | None = None


PROFILES = {
    "metro": Profile(500, 10, 0.0001),
    "wan": Profile(200, 50, 0.001),
    "badwan": Profile(100, 100, 0.01),
    "loss": Profile(100, 50, 0.02),
    "bursts": Profile(100, 50, 0.01, burst=8.0),
    "satellite": Profile(50, 300, 0.001),
    "asymmetric": Profile(200, 50, 0.001, back_mbit=50),
    "shallow": Profile(200, 50, 0.001, queue=0.25),
}


def conditions(profile: Profile, mbit: int) -> Conditions:
    """One way of a profile's path."""
    rate = mbit * 125_000
    return Conditions(
        latency_ns=profile.rtt_ms * 500_000,
        loss=profile.loss,
        burst=profile.burst,
        bytes_per_second=rate,
        queue_bytes=max(int(rate * profile.rtt_ms / 1000 * profile.queue), 64 << 10),
    )


def ideal(kind: str, profile: Profile, size: int, ranks: int) -> float:
    """Seconds that nothing can be below."""
    rate = min(profile.mbit, profile.back_mbit or profile.mbit) * 125_000
    if kind == "transfer":
        return size / (profile.mbit * 125_000) + profile.rtt_ms / 2000
    return 2 * (ranks - 1) / ranks * size / rate + (ranks - 1) * profile.rtt_ms / 1000


def measure(
    kind: str, profile: Profile, controller: str, mib: int, ranks: int, seed: int, operations: int
) -> list[float]:
    """The operations of one run, each over the ideal."""
    taken: list[list[float]] = []

    async def worker(job: Any, sim: Any) -> None:
        group, times = job.group, []
        values = np.full(mib << 18, job.rank + 1.0, np.float32)
        result = np.empty_like(values)
        await group.barrier(timeout=900)
        for _ in range(operations):
            await group.barrier(timeout=900)
            begin = sim.now
            if kind == "all_reduce":
                await group.all_reduce(values, out=result, timeout=900)
                assert result[0] == result[-1] == ranks * (ranks + 1) / 2
            elif job.rank == 0:
                await group.send(values, to=1, timeout=900)
            elif job.rank == 1:
                await group.recv(values, source=0, out=result, timeout=900)
                assert result[0] == result[-1] == 1.0
            times.append(sim.now - begin)
        taken.append(times)

    settings = Settings(
        ranks=ranks,
        conditions=conditions(profile, profile.mbit),
        congestion=controller,
        lost_after=8.0,
        timeout=900.0,
        hold_timeout=400.0,
        limit=3000.0,
    )
    simulation = Simulation(worker, seed=seed, settings=settings)
    if profile.back_mbit is not None:
        others = [f"worker-{rank}" for rank in range(1, ranks)]
        simulation.at(0.0).conditions(conditions(profile, profile.back_mbit), others, "worker-0")
    outcome = simulation.run()
    if len(taken) < ranks:
        sys.exit(f"seed {seed} failed: {outcome.error}")
    best = ideal(kind, profile, mib << 20, ranks)
    return [max(times) / best for times in zip(*taken, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=list(PROFILES))
    parser.add_argument("--controllers", nargs="+", choices=("bbr", "cubic", "reno"), default=["bbr", "cubic"])
    parser.add_argument("--kinds", nargs="+", choices=("transfer", "all_reduce"), default=["transfer", "all_reduce"])
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--operations", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.operations < 2:
        parser.error("the first operation is told of by itself: --operations 2 at least")
    rows = []
    print("| path | operation | MiB | control | first | median | 90th |\n|---|---|---|---|---|---|---|")
    for name in options.profiles:
        for kind in options.kinds:
            for mib in options.mib:
                for controller in options.controllers:
                    runs = [
                        measure(
                            kind,
                            PROFILES[name],
                            controller,
                            mib=mib,
                            ranks=options.ranks,
                            seed=seed,
                            operations=options.operations,
                        )
                        for seed in range(options.seeds)
                    ]
                    first = sorted(run[0] for run in runs)[len(runs) // 2]
                    later = sorted(ratio for run in runs for ratio in run[1:])
                    figures = (first, later[len(later) // 2], later[len(later) * 9 // 10])
                    told = " | ".join(f"{figure:.2f}" for figure in figures)
                    print(f"| {name} | {kind} | {mib} | {controller} | {told} |", flush=True)
                    rows.append({"path": name, "kind": kind, "mib": mib, "controller": controller, "runs": runs})
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
