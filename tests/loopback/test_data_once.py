"""The example of data that is read exactly once, with processes that read ahead: a rank is killed and comes back.

REQUIREMENTS C1, C4, C5, C6.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from quicoll.demo.timeline import EventReader
from quicoll.launch.supervisor import RunExit, Supervisor

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

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


async def test_a_rank_that_is_killed_comes_back_and_each_sample_is_used_once_in_every_epoch(tmp_path: Path) -> None:
    """Two ranks with two reading processes each; the bits are those of one rank that reads for itself."""
    (tmp_path / "alone").mkdir()
    _, alone, _ = await train(tmp_path / "alone", "--epochs", "4", workers=1)
    outcome, lines, kinds = await train(
        tmp_path, "--epochs", "4", "--workers", "2", "--pace", "0.15", workers=2, kill_at=6
    )
    assert outcome.restarts["worker-1"] == 1
    assert told(lines, "each sample was used") == {"each sample was used 4 times in 4 epochs"}
    assert told(alone, "each sample was used") == {"each sample was used 4 times in 4 epochs"}
    digests = {line.rpartition(" ")[2] for line in told([*lines, *alone], "digest")}
    assert len(digests) == 1
    assert {"progress", "view_ended", "state_received"} <= kinds


async def test_a_job_that_starts_again_goes_on_where_its_data_was(tmp_path: Path) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    for epochs in (2, 3):
        (tmp_path / str(epochs)).mkdir()
        _, lines, _ = await train(
            tmp_path / str(epochs), "--epochs", str(epochs), "--checkpoints", checkpoints, workers=1
        )
        assert told(lines, "each sample was used") == {f"each sample was used {epochs} times in {epochs} epochs"}
