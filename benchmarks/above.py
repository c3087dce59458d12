"""How much memory an all_reduce takes above the tensors that its caller has.

    python benchmarks/above.py [--mib 64] [--rounds 5] [--json FILE]                   # QUICOLL_LOCAL=off: over QUIC

Two processes with a tensor and an `out=` of that size each, which are touched before. Told are, for each rank and each
operation in turn, the MiB that the process held at most while it ran (VmHWM, which Linux lets a process set back) above
what it held before the first of them (VmRSS). Also of operations without `out=`, whose results are memory of quicoll's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

import quicoll.blocking
from quicoll.launch.supervisor import Supervisor

MIB = 1 << 20


def memory_mib(name: str) -> float:
    """A figure of this process, as Linux has it: VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"this system does not tell {name}")


def rank(mib: int, rounds: int, told: Path) -> None:
    """Carry out the operations as one of two ranks."""
    found: dict[str, list[float]] = {"with out=": [], "without": []}
    with quicoll.blocking.join(join_timeout=60.0) as job:
        tensor = np.ones(mib * MIB // 4, np.float32)
        out = np.zeros_like(tensor)
        for how, peaks in found.items():
            job.group.barrier()
            before = memory_mib("VmRSS")
            for _ in range(rounds):
                Path("/proc/self/clear_refs").write_text("5")
                result = job.group.all_reduce(tensor, out=out if how == "with out=" else None)
                peaks.append(round(memory_mib("VmHWM") - before, 1))
                del result
        (told / str(job.rank)).write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options.mib, options.rounds, options.rank)
        return
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--rank", directory]
        outcome = asyncio.run(Supervisor(command, workers=2, max_restarts=0, lost_after=60.0).run())
        if outcome.exit_status:
            sys.exit(outcome.reason)
        found = [json.loads((Path(directory) / str(number)).read_text()) for number in range(2)]
    for number, told in enumerate(found):
        for how, peaks in told.items():
            print(f"rank {number}, {how:9} {', '.join(f'{peak:g}' for peak in peaks)} MiB above {options.mib}")
    if options.json is not None:
        options.json.write_text(json.dumps({"mib": options.mib, "ranks": found}, indent=1))


if __name__ == "__main__":
    main()
