"""What lanes take from a rank's process: all_reduce of two ranks over QUIC with 0, 1 and 2 lanes, in turn.

    python benchmarks/lanes.py [--mib 16] [--lanes 0 1 2] [--rounds 3] [--operations 8] [--json FILE]

For each number of lanes, as medians over rounds that take turns: how long an operation takes; the CPU time of rank 0's
process, and of its lanes, for each GB that the rank sends (with two ranks as much as it reduces); which part of the
bytes went by lanes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import quicoll.blocking
from quicoll import Event
from quicoll.launch.supervisor import Supervisor

MIB = 1 << 20
TICKS = os.sysconf("SC_CLK_TCK")


class LanesUsed:
    """Told of events; waits for lanes."""

    def __init__(self) -> None:
        self._count = 0
        self._change = threading.Condition()

    def __call__(self, event: Event) -> None:
        if event.kind == "lane_used":
            with self._change:
                self._count += 1
                self._change.notify_all()

    def wait(self, count: int) -> None:
        """Until so many lanes are used."""
        with self._change:
            if not self._change.wait_for(lambda: self._count >= count, 60.0):
                raise RuntimeError("the lanes are not there")


def lane_processes() -> list[int]:
    """Return the numbers of this process's lanes."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                command = (path / "cmdline").read_bytes()
                status = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if b"quicoll.lanes.process" in command and int(status[1]) == os.getpid():
                found.append(int(path.name))
    return found


def cpu_of(process: int) -> float:
    """Return the CPU seconds of a process so far; in steps of a clock tick."""
    status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(status[11]) + int(status[12])) / TICKS


def sent_over_links(job: quicoll.blocking.Job) -> int:
    """Return payload bytes that went over the rank's own links."""
    return sum(link.bytes_sent for link in job.links())


def rank(options: argparse.Namespace) -> None:
    """Carry out the operations as one of two ranks."""
    used, lanes = LanesUsed(), int(os.environ["QUICOLL_LANES"])
    with quicoll.blocking.join(join_timeout=60.0, observer=used) as job:
        tensor = np.ones(options.mib * MIB // 4, np.float32)
        out = np.empty_like(tensor)
        used.wait(lanes)
        job.group.barrier()
        for _ in range(2):
            job.group.all_reduce(tensor, out=out)
        over_links, processes = sent_over_links(job), lane_processes()
        of_rank, of_lanes = time.process_time(), sum(map(cpu_of, processes))
        times = []
        for _ in range(options.operations):
            began = time.perf_counter()
            job.group.all_reduce(tensor, out=out)
            times.append(time.perf_counter() - began)
        sent = options.operations * options.mib * MIB
        found = {
            "operation_s": statistics.median(times),
            "rank_cpu_s_per_gb": (time.process_time() - of_rank) / sent * 1e9,
            "lanes_cpu_s_per_gb": (sum(map(cpu_of, processes)) - of_lanes) / sent * 1e9,
            "by_lanes": 1 - (sent_over_links(job) - over_links) / sent,
        }
        if job.rank == 0:
            options.rank.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--lanes", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--operations", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options)
        return
    found: dict[int, list[dict[str, float]]] = {lanes: [] for lanes in options.lanes}
    os.environ["QUICOLL_LOCAL"] = "off"
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory) / "told.json"
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--rank", str(told)]
        for _ in range(options.rounds):
            for lanes in options.lanes:
                os.environ["QUICOLL_LANES"] = str(lanes)
                outcome = asyncio.run(Supervisor(command, workers=2, max_restarts=0, lost_after=60.0).run())
                if outcome.exit_status:
                    sys.exit(outcome.reason)
                found[lanes].append(json.loads(told.read_text()))
    for lanes, rounds in found.items():
        median = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        print(
            f"{options.mib} MiB, {lanes} lanes: {median['operation_s'] * 1e3:.0f} ms; CPU seconds for each GB: "
            f"{median['rank_cpu_s_per_gb']:.2f} in the rank's process, "
            f"{median['lanes_cpu_s_per_gb']:.2f} in its lanes; "
            f"{median['by_lanes']:.0%} by lanes"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"mib": options.mib, "rounds": found}, indent=1))


if __name__ == "__main__":
    main()
