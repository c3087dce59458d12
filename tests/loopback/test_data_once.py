"""The example of data that is read exactly once, with processes that read ahead: a rank is killed and comes back.

REQUIREMENTS C1, C4, C5, C6.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import quicoll
from quicoll.data import Feed, Sampler
from quicoll.demo.timeline import EventReader
from quicoll.launch.supervisor import RunExit, Supervisor
from quicoll.train import CheckpointPolicy, TrainingResult, Worker

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.warm("torch")]

SCRIPT = Path(__file__).parents[2] / "examples" / "data_once.py"


async def train(
    directory: Path, *arguments: str, workers: int, kill_at: int = 0
) -> tuple[RunExit, list[str], set[str]]:
    """Run the example, and kill worker-1 once that step is committed; the outcome, all lines, the kinds of events."""
    lines: list[str] = []
    events = directory / "events"
    supervisor = Supervisor(
        [sys.executable, str(SCRIPT), *arguments],
        workers=workers,
        events=events,
        lost_after=1.5,
        seed=7,
        backoff=0.1,
        output=lambda node, line: lines.append(line),
    )
    running = asyncio.create_task(supervisor.run())
    feed, kinds = EventReader(events), set()
    while not running.done():
        for moment in feed.read():
            kinds.add(moment.kind)
            if kill_at and moment.kind == "step_committed" and moment.fields["step"] >= kill_at:
                pid = supervisor.pid("worker-1")
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                kill_at = 0
        await asyncio.wait([running], timeout=0.02)
    outcome = await running
    assert outcome.exit_status == 0, "\n".join(lines)
    assert not kill_at, "the run was over before anything was killed"
    return outcome, lines, kinds


def told(lines: list[str], what: str) -> set[str]:
    return {line for line in lines if what in line}


async def alone(checkpoints: Path, *, epochs: int) -> TrainingResult:
    """Train what the example trains, as the only rank of a job of that seed, on from the newest checkpoint."""
    example = runpy.run_path(str(SCRIPT))
    task = example["Line"]()
    async with quicoll.testing.cluster(1, seed=7) as (job, *_):
        feed = Feed(
            Sampler(example["SAMPLES"], batch_size=16, shards=8, seed=job.seed),
            lambda lists: DataLoader(example["Points"](), batch_sampler=lists),
        )
        policy = CheckpointPolicy(checkpoints, every=20)
        result = await Worker(job, task, data=feed, checkpoints=policy).run(epochs=epochs)
    assert set(task.used) == {epochs}
    return result


async def test_a_rank_is_killed_or_the_job_starts_again_and_each_sample_is_used_once_in_every_epoch(
    tmp_path: Path,
) -> None:
    """Two ranks with a reading process each; the bits are those of one rank that reads for itself, in two starts."""
    first = await alone(tmp_path / "checkpoints", epochs=2)
    whole = await alone(tmp_path / "checkpoints", epochs=4)
    assert (first.steps, whole.resumed_from, whole.steps) == (32, 32, 64)
    outcome, lines, kinds = await train(
        tmp_path, "--epochs", "4", "--workers", "1", "--pace", "0.15", workers=2, kill_at=6
    )
    assert outcome.restarts["worker-1"] == 1
    assert told(lines, "each sample was used") == {"each sample was used 4 times in 4 epochs"}
    digests = {line.rpartition(" ")[2] for line in told(lines, "digest")}
    assert digests == {whole.digest[:16]}
    assert {"progress", "view_ended", "state_received"} <= kinds
