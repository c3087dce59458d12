"""What it costs to hand a state over: seconds, memory and bytes, between real processes.

    python benchmarks/handover.py [--mib 256] [--workers 2] [--small 0] [--beside [--dense]] [--json FILE]

worker-0 says that its state is the one after step 1, the others have another state of the same shapes; `job.ready()`
brings them to one. For each worker: seconds of `ready`, and of a core; the most memory that its process held above what
it held before (VmHWM, which Linux lets a process set back, less VmRSS); how long its event loop stood still at the
longest; the payload that its links sent and received. The state's memory has been written before, so it is not in the
difference.
--small puts so many tensors of 100 bytes beside the large ones.

--beside lets the ranks train: of the state all but 1 MiB is frozen. The last worker's process ends after some steps and
is started again, without the state. Told is how long the others committed nothing after it was back, and how many steps
they committed until it took part again: once where the state is handed over while all wait (learn_from_bytes=0), once
where it is learned beside the steps. Told is as well what the other ranks have sent. --dense lets every step change all
of the state, of which nothing can be learned.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
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
_BEFORE, _AFTER = 10, 10  # steps of the worker that ends, and of the one that is back
_COMPUTE_S = 0.1
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


async def train(mib: int, directory: Path, *, dense: bool) -> None:
    """Until the worker that came back has done _AFTER steps."""
    node, returned = os.environ["QUICOLL_NODE"], os.environ.get("QUICOLL_RESTARTS", "0") != "0"
    last = node == f"worker-{int(os.environ['QUICOLL_WORLD_SIZE']) - 1}"
    state = {"frozen": np.full((mib - 1) * _MIB, 0 if returned else 7, np.uint8), "hot": np.zeros(_MIB // 8)}
    joined = time.monotonic()
    commits: list[float] = []
    done: list[bool] = []

    def load(new: Mapping[str, Any]) -> None:
        for name, value in new.items():
            np.copyto(state[name], value)

    def apply(total: Any) -> None:
        state["hot"] += total[0]
        if dense:
            state["frozen"] += 1
        commits.append(time.monotonic())
        done.append(total[1] > 0)

    async with quicoll.join(lost_after=10.0, hold_timeout=600.0) as job:
        job.register_state(lambda: state, load)
        while not any(done):
            try:
                async with job.step() as step:
                    await asyncio.sleep(_COMPUTE_S)
                    mine = [1.0, float(returned and len(commits) >= _AFTER)]
                    total = await job.group.all_reduce(np.array(mine))
                    step.on_commit(lambda total=total: apply(total))
            except quicoll.StepAborted:
                continue
            if last and not returned and len(commits) == _BEFORE:
                os._exit(1)
        sent = sum(link.bytes_sent for link in await job.links()) / _MIB
    report = {"joined": joined, "commits": commits, "sent_mib": sent, "digest": checkpoint.digest(state)}
    (directory / f"{node}.json").write_text(json.dumps(report))


def beside(mib: int, workers: int, *, dense: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"mib": mib, "workers": workers, "dense": dense}
    for name, learn_from in (("all wait", 0), ("learned", 64 * _MIB)):
        os.environ["QUICOLL_LEARN_FROM_BYTES"] = str(learn_from)
        ranks = run(["--beside", "--mib", str(mib), *(["--dense"] if dense else [])], workers, restarts=1)
        back, first = ranks[f"worker-{workers - 1}"], ranks["worker-0"]
        since, until = back["joined"], back["commits"][0]
        times = [since, *(at for at in first["commits"] if since < at < until), until]
        found[name] = {
            "seconds": round(until - since, 2),
            "still_s": round(max(after - before for before, after in itertools.pairwise(times)), 2),
            "steps_meanwhile": len(times) - 2,
            "sent_mib": round(sum(each["sent_mib"] for each in ranks.values()), 1),
        }
    return found


def run(arguments: list[str], workers: int, *, restarts: int = 0) -> dict[str, Any]:
    """What each worker has reported."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="quicoll-bench-") as directory:
        command = [sys.executable, __file__, *arguments, "--directory", directory]
        ranks = Supervisor(
            command, workers=workers, job="handover", max_restarts=restarts, lost_after=10.0,
            output=lambda node, line: lines.append(f"{node}: {line}"),
        )  # fmt: skip
        outcome = asyncio.run(ranks.run())
        if outcome.exit_status:
            raise SystemExit("\n".join([*lines, outcome.reason]))
        found = {path.stem: json.loads(path.read_text()) for path in sorted(Path(directory).glob("*.json"))}
    if len({each.pop("digest") for each in found.values()}) != 1:
        raise SystemExit("the states differ")
    return found


def measure(mib: int, workers: int, small: int) -> dict[str, Any]:
    found = run(["--mib", str(mib), "--small", str(small)], workers)
    return {"mib": mib, "small": small, "workers": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--small", type=int, default=0)
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--directory", type=Path, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.directory is not None and "QUICOLL_NODE" in os.environ:
        if given.beside:
            asyncio.run(train(given.mib, given.directory, dense=given.dense))
        else:
            asyncio.run(work(given.mib, given.small, given.directory))
        return
    if given.beside:
        found = beside(given.mib, given.workers, dense=given.dense)
        for name in ("all wait", "learned"):
            each = found[name]
            print(
                f"{name}: back after {each['seconds']} s, in which the others committed {each['steps_meanwhile']} "
                f"steps; without one for {each['still_s']} s at the longest; {each['sent_mib']} MiB were sent"
            )
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
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
