"""Two workers write checkpoints together and are killed while they do: the job goes on to the same bits (S7, C5)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from quicoll import checkpoint
from quicoll.launch.supervisor import Supervisor

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.warm]

SCRIPT = """
import asyncio, os, pathlib, sys, time
import numpy as np
import quicoll, quicoll.train

if sys.argv[2] == "kill" and os.environ["QUICOLL_RESTARTS"] == "0":
    replace, complete = pathlib.Path.replace, []

    def held(source, target):
        if str(target).endswith(".manifest.json"):
            if complete:
                time.sleep(600)  # a second checkpoint has its data and no manifest: here the process is killed
            complete.append(target)
        return replace(source, target)

    pathlib.Path.replace = held

class Task:
    def __init__(self):
        self.weights = np.zeros(4, np.float32)
        self.ballast = np.zeros(1 << 20)
    def architecture(self):
        return {}
    def parameters(self):
        return {"weights": self.weights}
    def forward(self, part):
        return np.full(4, part.shard + part.step, np.float32)
    def backward(self, loss):
        return [loss + self.weights * np.float32(0.5)]
    def apply(self, average):
        self.weights = self.weights - np.float32(0.25) * average[0]
        self.ballast += self.weights[0]
    def state(self):
        return {"weights": self.weights, "ballast": self.ballast}
    def load_state(self, state):
        self.weights, self.ballast = np.array(state["weights"]), np.array(state["ballast"])

async def main():
    async with quicoll.join() as job:
        worker = quicoll.train.Worker(
            job, Task(), shards=2, checkpoints=quicoll.train.CheckpointPolicy(sys.argv[1], every=4),
            on_step=lambda step: asyncio.sleep(0.02),
        )
        result = await worker.run(steps=60)
        print("digest", result.resumed_from, result.digest, flush=True)

asyncio.run(main())
"""


def under_way(directory: Path) -> int:
    """The step of a checkpoint of which there is data and no manifest, beyond a first complete one; 0: none."""
    names = [path.name for path in directory.glob("*")]
    complete = {name[:13] for name in names if name.endswith(".manifest.json")}
    data = sorted({name.lstrip(".")[:13] for name in names if ".r0" in name} - complete)
    return int(data[-1][5:]) if complete and data else 0


async def train(script: Path, directory: Path, *, workers: int, kill: bool) -> tuple[set[str], set[str]]:
    """Run the script, and kill all workers once while a checkpoint is written; digests, and steps resumed from."""
    lines: list[str] = []
    supervisor = Supervisor(
        [sys.executable, str(script), str(directory), "kill" if kill else ""],
        workers=workers,
        lost_after=2.0,
        backoff=0.1,
        output=lambda node, line: lines.append(line),
    )
    running = asyncio.create_task(supervisor.run())
    while not running.done():
        if kill and under_way(directory):
            for pid in [supervisor.pid(f"worker-{rank}") for rank in range(workers)]:
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            kill = False
        await asyncio.wait([running], timeout=0.002)
    outcome = await running
    assert outcome.exit_status == 0, "\n".join(lines)
    assert not kill, "no checkpoint was seen under way"
    found = [line.split() for line in lines if line.startswith("digest ")]
    assert len(found) == workers, "\n".join(lines)
    return {words[2] for words in found}, {words[1] for words in found}


async def test_two_workers_killed_while_they_write_go_on_from_a_complete_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    whole, _ = await train(script, tmp_path / "one", workers=1, kill=False)
    digests, resumed = await train(script, tmp_path / "two", workers=2, kill=True)
    assert digests == whole
    assert resumed <= {str(step) for step in range(1, 60)}
    found = await asyncio.to_thread(checkpoint.latest, tmp_path / "two")
    assert found is not None
    assert found.step == 60
    (stored, *_) = await asyncio.to_thread(lambda: list(checkpoint.stored(tmp_path / "two")))
    assert [file.node for file in stored.manifest.files] == ["worker-0", "worker-1"]
