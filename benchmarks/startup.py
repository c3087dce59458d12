"""How long `quicoll run` takes to the first view of its workers, and where the time goes.

    python benchmarks/startup.py [--ranks 2,16] [--rounds 3] [--json FILE]

Workers import nothing but quicoll. Told are, in seconds from the command's start and as medians over rounds: when the
first and the last worker has imported what it needs, when the last one is in the view, and how long after the last
import that is: what it takes to join, once all are there. Processes share the machine's processors while they import.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_STARTED = "BENCHMARK_STARTED"


def worker(told: Path) -> None:
    """Join, and have rank 0 write what all ranks have seen."""
    import asyncio

    import quicoll.joining.entry

    imported = time.time()

    async def join() -> tuple[int, list[tuple[float, float]]]:
        async with quicoll.join(join_timeout=120.0) as job:
            mine = (imported, time.time())
            return job.rank, await job.group.all_gather_object(mine)

    rank, seen = asyncio.run(join())
    if rank == 0:
        started = float(os.environ[_STARTED])
        told.write_text(json.dumps([[when - started for when in each] for each in seen]))


def measure(ranks: int) -> dict[str, float]:
    """Start a run of so many workers, and return what became of it."""
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory) / "told.json"
        command = [sys.executable, "-m", "quicoll.cli.main", "run", "-n", str(ranks), "--"]
        command += [sys.executable, os.path.abspath(__file__), "--worker", str(told)]
        environment = {**os.environ, _STARTED: repr(time.time())}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        seen = json.loads(told.read_text())
    imported, joined = [each[0] for each in seen], [each[1] for each in seen]
    return {
        "first import": min(imported),
        "last import": max(imported),
        "view": max(joined),
        "joining": max(joined) - max(imported),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker)
        return
    sizes = [int(text) for text in options.ranks.split(",")]
    found: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in sizes}
    for _ in range(options.rounds):
        for ranks in sizes:
            found[ranks].append(measure(ranks))
    for ranks, rounds in found.items():
        medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        print(f"{ranks:3} ranks: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in medians.items()))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
