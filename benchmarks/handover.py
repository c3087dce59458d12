"""What it costs to hand a state over: seconds, memory and bytes, between real processes.

    python benchmarks/handover.py [--mib 256] [--workers 2] [--small 0] [--json FILE]

worker-0 says that its state is the one after step 1, the others have another state of the same shapes; `job.ready()`
brings them to one. For each worker: seconds of `ready`, and of a core; the most memory that its process held above what
it held before (VmHWM, which Linux lets a process set back, less VmRSS); how long its event loop stood still at the
longest; the payload that its links sent and received. The state's memory has been written before, so it is not in the
difference.
--small puts so many tensors of 100 bytes beside the large ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import quicoll
from quicoll import checkpoint
from quicoll.launch.supervisor import Supervisor

_TENSORS = 8
_MIB = 1 << 20


def memory_mib(name: str) -> float:
    """A figure of this process, as Linux has it: VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"this system does not tell {name}")


def forget_peak() -> None:
    """Let VmHWM begin again."""
    Path("/proc/self/clear_refs").write_text("5")


async def longest_pause(found: list[float]) -> None:
    """Keep in found[0] the longest time that the event loop did not run."""
    at = time.monotonic()
    while True:
        await asyncio.sleep(0.005)
        now = time.monotonic()
        found[0], at = max(found[0], now - at), now


async def work(mib: int, small: int, directory: Path) -> None:
    async with quicoll.join(lost_after=10.0, hold_timeout=600.0) as job:
        made = np.random.default_rng(int(job.node.rpartition("-")[2]))
        elements = mib * _MIB // 4 // _TENSORS
        state = {f"layer{i}": made.standard_normal(elements, dtype=np.float32) for i in range(_TENSORS)}
        state |= {f"small{i:05}": made.standard_normal(25, dtype=np.float32) for i in range(small)}

        def load(new: Mapping[str, Any]) -> None:
            for name, value in new.items():
                np.copyto(state[name], value)

        job.register_state(lambda: state, load)
        if job.node == "worker-0":
            job.resume_from(1)
        await job.group.barrier()
        before = memory_mib("VmRSS")
        forget_peak()
        pause = [0.0]
        watching = asyncio.create_task(longest_pause(pause))
        began, busy = time.monotonic(), time.process_time()
        await job.ready()
        seconds, busy = time.monotonic() - began, time.process_time() - busy
        peak = memory_mib("VmHWM")
        watching.cancel()
        links = await job.links()
        report = {
            "seconds": round(seconds, 2),
            "cpu_seconds": round(busy, 2),
            "above_mib": round(peak - before, 1),
            "pause_ms": round(pause[0] * 1e3, 1),
            "sent_mib": round(sum(link.bytes_sent for link in links) / _MIB, 1),
            "received_mib": round(sum(link.bytes_received for link in links) / _MIB, 1),
            "digest": checkpoint.digest(state),
        }
        (directory / f"{job.node}.json").write_text(json.dumps(report))
        await job.group.barrier()


def measure(mib: int, workers: int, small: int) -> dict[str, Any]:
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="quicoll-bench-") as directory:
        command = [sys.executable, __file__, "--mib", str(mib), "--small", str(small), "--directory", directory]
        run = Supervisor(
            command, workers=workers, job="handover", max_restarts=0, lost_after=10.0,
            output=lambda node, line: lines.append(f"{node}: {line}"),
        )  # fmt: skip
        outcome = asyncio.run(run.run())
        if outcome.exit_status:
            raise SystemExit("\n".join([*lines, outcome.reason]))
        found = {path.stem: json.loads(path.read_text()) for path in sorted(Path(directory).glob("*.json"))}
    if len({each.pop("digest") for each in found.values()}) != 1:
        raise SystemExit("the states differ")
    return {"mib": mib, "small": small, "workers": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--small", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--directory", type=Path, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.directory is not None and "QUICOLL_NODE" in os.environ:
        asyncio.run(work(given.mib, given.small, given.directory))
        return
    found = measure(given.mib, given.workers, given.small)
    for node, each in found["workers"].items():
        print(
            f"{node}: {each['seconds']} s ({each['cpu_seconds']} s of a core), {each['above_mib']} MiB above its "
            f"state, loop still {each['pause_ms']} ms, sent {each['sent_mib']}, received {each['received_mib']} MiB"
        )
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
