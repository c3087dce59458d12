"""The example of a loop, and whole-process failures that the demo does not show: the coordinator dies, all workers die.

REQUIREMENTS C2, C4, C5.
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

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.warm]

SCRIPT = Path(__file__).parents[2] / "examples" / "train_loop.py"

# The example, which after step `at` waits until a file is there, inside of the next step, where it sleeps.
HELD = """
import asyncio, pathlib, runpy, sys

at, gate, script, *arguments = sys.argv[1:]
sleep = asyncio.sleep

async def held():
    while not pathlib.Path(gate).exists():
        await sleep(0.01)

def gated(seconds):
    caller = sys._getframe(1)
    of_example = caller.f_globals["__name__"] == "__main__"
    return held() if of_example and caller.f_locals["job"].committed_step >= int(at) else sleep(seconds)

asyncio.sleep, sys.argv = gated, [script, *arguments]
runpy.run_path(script, run_name="__main__")
"""


async def train(
    directory: Path, *arguments: str, workers: int = 2, kill: tuple[str, ...] = (), at: int = 0
) -> tuple[RunExit, set[str], list[str]]:
    """Run the example and kill the named nodes after step `at`; the outcome, the digests, all lines."""
    lines: list[str] = []
    events, gate = directory / "events", directory / "go_on"
    held = ["-c", HELD, str(at), str(gate)] if kill else []
    supervisor = Supervisor(
        [sys.executable, *held, str(SCRIPT), "--steps", "130", *arguments],
        workers=workers,
        events=events,
        lost_after=1.5,
        backoff=0.1,
        output=lambda node, line: lines.append(line),
    )
    running = asyncio.create_task(supervisor.run())
    feed = EventReader(events)
    while not running.done():
        steps = [moment.fields["step"] for moment in feed.read() if moment.kind == "step_committed"]
        if kill and steps and max(steps) >= at:
            for node in kill:
                pid = supervisor.pid(node)
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            gate.touch()
            kill = ()
        await asyncio.wait([running], timeout=0.02)
    outcome = await running
    assert outcome.exit_status == 0, "\n".join(lines)
    assert not kill
    return outcome, {line.rpartition(" ")[2] for line in lines if "digest" in line}, lines


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def undisturbed(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """By one worker: any number of them gives the same bits."""
    directory = tmp_path_factory.mktemp("undisturbed")
    _, digests, _ = asyncio.run(train(directory, "--checkpoints", str(checkpoints), workers=1))
    assert len(digests) == 1
    return digests


async def test_the_training_loop_example_gives_the_same_digest_on_three_ranks_and_from_a_checkpoint(
    tmp_path: Path, undisturbed: set[str], checkpoints: Path
) -> None:
    assert [name for name in os.listdir(checkpoints) if "manifest" in name] == ["step-00000100.manifest.json"]
    _, digests, lines = await train(tmp_path, "--checkpoints", str(checkpoints), workers=3)
    assert sum("at step 100" in line for line in lines) == 3
    assert digests == undisturbed, "\n".join(lines)


async def test_training_goes_on_when_the_coordinator_is_killed_and_comes_back(
    tmp_path: Path, undisturbed: set[str]
) -> None:
    outcome, digests, lines = await train(tmp_path, kill=("coordinator",), at=30)
    assert digests == undisturbed, "\n".join(lines)
    assert outcome.restarts == {"coordinator": 1, "worker-0": 0, "worker-1": 0}


async def test_a_job_whose_workers_all_die_goes_back_to_the_checkpoint_and_to_the_same_bits(
    tmp_path: Path, undisturbed: set[str]
) -> None:
    """The journal says more than 100 steps are committed, but no memory holds more than the checkpoint of step 100."""
    saved = tmp_path / "saved"
    outcome, digests, lines = await train(tmp_path, "--checkpoints", str(saved), kill=("worker-0", "worker-1"), at=110)
    assert digests == undisturbed, "\n".join(lines)
    assert outcome.restarts == {"coordinator": 0, "worker-0": 1, "worker-1": 1}
    assert sum("at step 100" in line for line in lines) == 2
