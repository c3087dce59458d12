"""Three processes, a directory for each: one is lost, and what was on it comes over the network (S7, A5)."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from quicoll import checkpoint
from quicoll.launch.supervisor import Supervisor

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.warm]

RANKS, ROWS, COLUMNS, STEPS = 3, 60, 40_000, 4

SCRIPT = f"""
import asyncio, hashlib, pathlib, sys
import numpy as np
import quicoll, quicoll.train
from quicoll.checkpoint import Contents, Local, Shard

ROWS, COLUMNS, STEPS = {ROWS}, {COLUMNS}, {STEPS}

def moments(step):
    return np.random.default_rng(step).random((ROWS, COLUMNS))

def weights(step):
    return np.random.default_rng(1000 + step).random(200_000)

def digest(value):
    return hashlib.sha256(np.ascontiguousarray(value)).hexdigest()

async def main():
    mode, place = sys.argv[1], pathlib.Path(sys.argv[2])
    async with quicoll.join() as job:
        first, end = (ROWS * rank // job.world_size for rank in (job.rank, job.rank + 1))
        saver = quicoll.train.Checkpointer(job, place / job.node, every=STEPS, shared=False, copies=2)
        if mode == "save":
            def contents():
                step = job.committed_step
                rows = Shard(moments(step)[first:end], shape=(ROWS, COLUMNS), offset=(first, 0))
                return Contents({{"m": rows, "w": weights(step), "position": Local(np.array([job.rank, step]))}})

            while job.committed_step < STEPS:
                async with job.step() as step:
                    await saver.in_step(step, contents)
                    await job.group.barrier()
            await saver.finish(contents)
            saver.raise_last()
            print("saved", job.node, job.rank, job.committed_step, flush=True)
            return

        async def read(stored):
            rows = stored.read("m", offset=(first, 0), shape=(end - first, COLUMNS))
            return await asyncio.gather(rows, stored.read("w"), stored.read("position", node=job.node))

        here = sorted(path.name for path in (place / job.node).glob("*.json"))
        step, (rows, w, position) = await saver.restore(read)
        print("restored", job.node, job.rank, len(here), step, digest(rows), digest(w), *position, flush=True)

asyncio.run(main())
"""


async def run(script: Path, mode: str, place: Path) -> list[list[str]]:
    """Run the script on all ranks; the words of the lines that they print."""
    lines: list[str] = []
    supervisor = Supervisor(
        [sys.executable, str(script), mode, str(place)],
        workers=RANKS,
        lost_after=30.0,
        output=lambda node, line: lines.append(line),
    )
    outcome = await supervisor.run()
    assert outcome.exit_status == 0, "\n".join(lines)
    found = sorted(line.split() for line in lines if line.startswith(("saved ", "restored ")))
    assert len(found) == RANKS, "\n".join(lines)
    return found


def digest(value: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> str:
    return hashlib.sha256(np.ascontiguousarray(value)).hexdigest()


async def test_three_processes_restore_their_bits_though_one_directory_is_lost(tmp_path: Path) -> None:
    script, place = tmp_path / "ranks.py", tmp_path / "disks"
    script.write_text(SCRIPT)
    saved = {node: rank for _, node, rank, _ in await run(script, "save", place)}
    assert sorted(path.name for path in place.iterdir()) == [f"worker-{rank}" for rank in range(RANKS)]
    shutil.rmtree(place / "worker-1")
    moments, weights = np.random.default_rng(STEPS).random((ROWS, COLUMNS)), np.random.default_rng(1000 + STEPS)
    w = digest(weights.random(200_000))
    found = await run(script, "restore", place)
    for _, node, rank, manifests, *words in found:
        rows = moments[ROWS * int(rank) // RANKS : ROWS * (int(rank) + 1) // RANKS]
        assert words == [str(STEPS), digest(rows), w, saved[node], str(STEPS)], node
        assert manifests == ("0" if node == "worker-1" else "1")
    assert not list(place.rglob("*.tmp"))  # what came is put away again
    for rank in (0, 2):
        (stored,) = await asyncio.to_thread(lambda rank=rank: list(checkpoint.stored(place / f"worker-{rank}")))
        assert stored.step == STEPS
