"""What a checkpoint costs: the pause of the training, and saving and restoring beside the disk's own rate.

    python benchmarks/checkpoint.py [--mib 512] [--tensor-mib 16] [--rounds 3] [--directory DIR] [--json FILE]

One rank, a state of --mib in tensors of --tensor-mib. In turn, in one process, as often as --rounds says:

    plain write   the same bytes in one file, with fsync
    save          `Checkpointer`: from the step that begins it until the checkpoint is complete
    pause         of that, the time for which the step was kept: the copy of the state
    copy          numpy's copy of the same bytes into memory that is there, and into new memory
    plain read    of the file, into new memory of the tensors' sizes
    restore       `Checkpointer.restore` of all tensors
    digests       SHA-256, which checkpoints have, and others, over the same bytes on one thread

Told are the medians in wall time and in CPU seconds of the whole process, the ratios of save and restore to the plain
write and read of the same round, and the most memory beside the state while it was saved (its copy is kept from one
save to the next) and while it was restored. Files that were just written are read from the page cache, in both ways.
Before either way of reading as much memory is taken, touched and freed: what pages cost that a virtual machine has
never had is its host's affair, and several times all the rest.
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
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.checkpoint import Contents
from quicoll.checkpoint.disk import OsDisk
from quicoll.testing import cluster
from quicoll.train import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quicoll.train.fetching import FetchedCheckpoint

_MIB = 1 << 20


class Figures:
    """What was measured, by what: in each round wall time and CPU time in seconds, or something else as it is."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}
        self.memory: dict[str, list[float]] = {}

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall.setdefault(what, []).append(time.perf_counter() - wall)
        self.cpu.setdefault(what, []).append(time.process_time() - cpu)

    @contextmanager
    def most_memory(self, what: str) -> Iterator[None]:
        before = _memory_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        yield
        self.memory.setdefault(what, []).append(_memory_mib("VmHWM") - before)

    def forget_first(self) -> None:
        """Of each: it makes what is kept."""
        for kind in (self.wall, self.cpu, self.memory):
            for values in kind.values():
                del values[0]


def _memory_mib(what: str) -> float:
    """Resident memory now ("VmRSS"), or the most since it was forgotten ("VmHWM")."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) / 1024
    raise AssertionError(what)


def _touched(sizes: list[int]) -> None:
    kept = [np.empty(nbytes, np.uint8) for nbytes in sizes]
    for each in kept:
        each.fill(1)


def _plain_read(path: Path, sizes: list[int]) -> list[Any]:
    found = [np.empty(nbytes, np.uint8) for nbytes in sizes]
    with open(path, "rb", buffering=0) as file:
        for each in found:
            if file.readinto(each.data) != each.nbytes:
                raise SystemExit("the plain file is cut short")
    return found


def _digested(values: list[Any], made: Callable[[Any], Any]) -> None:
    for value in values:
        made(value).digest()


async def measure(mib: int, tensor_mib: float, rounds: int, directory: Path) -> Figures:
    nbytes = max(int(tensor_mib * _MIB), 4)
    count = max(mib * _MIB // nbytes, 1)
    arrays = {f"t{n}": np.random.default_rng(n).random(nbytes // 4, np.float32) for n in range(count)}
    values = list(arrays.values())
    target = [np.ones_like(value) for value in values]
    found = Figures()
    disk, path = OsDisk(), directory / "plain"

    async def everything(stored: FetchedCheckpoint) -> Any:
        return await stored.load()

    async with cluster(1) as jobs:
        (job,) = jobs
        job.register_state(lambda: {}, lambda _: None)
        saver = Checkpointer(job, directory / "c", every=1, keep=1)
        for _ in range(rounds + 1):
            with found.timed("plain write"):
                disk.create(path, [value.data.cast("B") for value in values])
            with found.timed("copy"):
                for pair in zip(target, values, strict=True):
                    np.copyto(*pair)
            with found.timed("copy to new memory"):
                copies = [value.copy() for value in values]
            del copies
            before = saver.newest
            with found.most_memory("of save"), found.timed("save"):
                paused = 0
                while saver.newest == before:
                    async with job.step() as step:
                        if paused:
                            await saver.in_step(step, lambda: Contents(arrays))
                        else:  # or the step after it, in a view's first
                            with found.timed("pause"):
                                await saver.in_step(step, lambda: Contents(arrays))
                            paused = 1
                            if found.wall["pause"][-1] < found.wall["copy"][-1] / 4:
                                del found.wall["pause"][-1], found.cpu["pause"][-1]
                                paused = 0
                    await saver.settle()
            await saver.finish(lambda: Contents(arrays))
            sizes = [value.nbytes for value in values]
            _touched(sizes)
            with found.timed("plain read"):
                plain = _plain_read(path, sizes)
            del plain
            for name in ("sha256", "blake2b", "blake2s", "sha3_256"):
                with found.timed(f"digest {name}"):
                    _digested(values, getattr(hashlib, name))
            _touched(sizes)
            with found.most_memory("of restore"), found.timed("restore"):
                restored = await saver.restore(everything)
            if restored is None or any(not np.array_equal(arrays[name], value) for name, value in restored[1].items()):
                raise SystemExit("what was restored is not what was saved")
            del restored
            path.unlink()
            os.sync()
    found.forget_first()
    return found


def show(found: Figures, mib: int) -> None:
    for what, values in found.wall.items():
        median, cpu = statistics.median(values), statistics.median(found.cpu[what])
        print(f"{what:20} {median:7.3f} s, {mib / median:7.0f} MiB/s, {cpu * 1024 / mib:6.3f} CPU s/GiB")
    for what, beside in (("save", "plain write"), ("restore", "plain read"), ("pause", "copy")):
        ratios = [one / other for one, other in zip(found.wall[what], found.wall[beside], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{what} / {beside}: {statistics.median(ratios):.2f} times the time ({spread})")
    for what, values in found.memory.items():
        median = statistics.median(values)
        print(f"memory {what:13} {median:7.0f} MiB, {median / mib:.2f} of the state")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensor-mib", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    if given.directory is not None:
        given.directory.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="quicoll-bench-", dir=given.directory))
    try:
        found = asyncio.run(measure(given.mib, given.tensor_mib, given.rounds, directory))
    finally:
        shutil.rmtree(directory)
    show(found, given.mib)
    if given.json is not None:
        told = {"mib": given.mib, "wall": found.wall, "cpu": found.cpu, "memory": found.memory}
        given.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
