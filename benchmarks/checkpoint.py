"""What a checkpoint costs: the pause of the training, and saving and restoring beside the disk's own rate.

    python benchmarks/checkpoint.py [--mib 512] [--rounds 3] [--directory DIR] [--json FILE]

One rank, a state of --mib in tensors of 16 MiB. In turn, in one process, as often as --rounds says:

    plain write   the same bytes in one file, with fsync
    save          `Checkpointer`: from the step that begins it until the checkpoint is complete
    pause         of that, the time for which the step was kept: the copy of the state
    copy          numpy's copy of the same bytes into memory that is there, and into new memory
    plain read    of the file
    restore       `Checkpointer.restore` of all tensors; digest: BLAKE2b-256 over the same bytes

Told are the medians, and the most memory beside the state while it was saved and while it was restored. Files that were
just written are read from the page cache, in both ways.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.checkpoint import Contents
from quicoll.checkpoint.disk import OsDisk
from quicoll.testing import cluster
from quicoll.train import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.train.fetching import FetchedCheckpoint

_MIB = 1 << 20
_TENSOR = 16 * _MIB


def timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def memory_mib(what: str) -> float:
    """Resident memory now ("VmRSS"), or the most since it was forgotten ("VmHWM")."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) / 1024
    raise AssertionError(what)


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


async def measure(mib: int, rounds: int, directory: Path) -> dict[str, list[float]]:
    count = max(mib * _MIB // _TENSOR, 1)
    arrays = {f"t{n}": np.random.default_rng(n).random(_TENSOR // 4, np.float32) for n in range(count)}
    values = list(arrays.values())
    target = [np.ones_like(value) for value in values]
    found: dict[str, list[float]] = {}
    disk, path = OsDisk(), directory / "plain"

    def note(what: str, value: float) -> None:
        found.setdefault(what, []).append(value)

    async def everything(stored: FetchedCheckpoint) -> Any:
        return await stored.load()

    async with cluster(1) as jobs:
        (job,) = jobs
        job.register_state(lambda: {}, lambda _: None)
        saver = Checkpointer(job, directory / "c", every=1, keep=1)
        for _ in range(rounds + 1):  # the first is not counted: it makes what is kept
            note("plain write", timed(lambda: disk.create(path, [value.data.cast("B") for value in values])))
            note("copy", timed(lambda: [np.copyto(*pair) for pair in zip(target, values, strict=True)]))
            note("copy to new memory", timed(lambda: [value.copy() for value in values]))
            before = saver.newest
            pause = 0.0
            rss = memory_mib("VmRSS")
            forget_peak()
            began = time.perf_counter()
            while saver.newest == before:
                async with job.step() as step:
                    at = time.perf_counter()
                    await saver.in_step(step, lambda: Contents(arrays))
                    pause = max(pause, time.perf_counter() - at)
                await saver.settle()
            note("save", time.perf_counter() - began)
            note("pause", pause)
            note("memory of save", memory_mib("VmHWM") - rss)
            await saver.finish(lambda: Contents(arrays))
            note("plain read", timed(path.read_bytes))
            note("digest", timed(lambda: [hashlib.blake2b(value, digest_size=32).digest() for value in values]))
            rss = memory_mib("VmRSS")
            forget_peak()
            began = time.perf_counter()
            restored = await saver.restore(everything)
            note("restore", time.perf_counter() - began)
            note("memory of restore", memory_mib("VmHWM") - rss)
            if restored is None or any(not np.array_equal(arrays[name], value) for name, value in restored[1].items()):
                raise SystemExit("what was restored is not what was saved")
            del restored
            path.unlink()
            os.sync()
    return {what: measured[1:] for what, measured in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="quicoll-bench-", dir=given.directory))
    try:
        found = asyncio.run(measure(given.mib, given.rounds, directory))
    finally:
        shutil.rmtree(directory)
    for what, values in found.items():
        median = statistics.median(values)
        if what.startswith("memory"):
            print(f"{what:20} {median:7.0f} MiB, {median / given.mib:.2f} of the state")
        else:
            print(f"{what:20} {median:7.3f} s, {given.mib / median:7.0f} MiB/s, {median * 1024 / given.mib:.3f} s/GiB")
    if given.json is not None:
        given.json.write_text(json.dumps({"mib": given.mib, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
