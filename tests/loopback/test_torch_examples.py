"""The examples of torch programs, as processes: the bits of one of them, whatever happens to several."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quicoll.launch.supervisor import Supervisor

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.warm("torch")]

EXAMPLES = Path(__file__).parents[2] / "examples"


# An example, of which one process waits for its end as soon as it has told of its first round.
HELD = """
import builtins, os, runpy, sys, time

def told(*words, say=print, **options):
    say(*words, **options)
    first = (os.environ["QUICOLL_NODE"], os.environ["QUICOLL_RESTARTS"]) == ("worker-1", "0")
    if first and words[0].startswith("round 1"):
        time.sleep(600)

builtins.print = told
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Launch:
    """A run of an example: what it says, and what is done when a worker says something."""

    def __init__(
        self,
        name: str,
        *arguments: str | Path,
        workers: int,
        expects: Callable[[str], bool] | None = None,
        program: str = "",
    ) -> None:
        self.lines: list[str] = []
        self.killed: list[int] = []
        self._expects = expects
        self._supervisor = Supervisor(
            [sys.executable, *(["-c", program] if program else []), str(EXAMPLES / name), *map(str, arguments)],
            workers=workers, seed=7, lost_after=1.5, backoff=0.1, output=self._said,
        )  # fmt: skip

    def _said(self, node: str, line: str) -> None:
        self.lines.append(f"{node}: {line}")
        pid = self._supervisor.pid(node)
        if self._expects is not None and not self.killed and pid is not None and self._expects(f"{node}: {line}"):
            self.killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    async def far(self) -> list[float]:
        """How far each rank says that it is from one process."""
        outcome = await self._supervisor.run()
        assert outcome.exit_status == 0, "\n".join(self.lines)
        return [float(each) for each in re.findall("at most (.*) from one process", "\n".join(self.lines))]

    async def run(self) -> set[str]:
        """The digests at the end, of which there is to be one."""
        outcome = await self._supervisor.run()
        assert outcome.exit_status == 0, "\n".join(self.lines)
        assert len(self.killed) == (self._expects is not None), "\n".join(self.lines)
        found = {line.split("digest ")[1] for line in self.lines if "digest " in line}
        assert len(found) == 1, self.lines
        return found


def begun(line: str) -> bool:
    return line.startswith("worker-1: step ")


async def test_the_elastic_loop_with_a_divided_optimizer_ends_with_one_digest_though_a_rank_is_killed(
    tmp_path: Path,
) -> None:
    alone = await Launch("torch_elastic.py", "--steps", "30", workers=1).run()
    killed = Launch("torch_elastic.py", "--steps", "30", "--pace", "0.1", workers=3, expects=begun)
    assert await killed.run() == alone
    # Interrupted by the end of its steps, and gone on with by another number of ranks.
    first = Launch("torch_elastic.py", "--steps", "20", "--checkpoints", tmp_path / "steps", workers=2)
    assert await first.run() != alone
    on = Launch("torch_elastic.py", "--steps", "30", "--checkpoints", tmp_path / "steps", workers=3)
    assert await on.run() == alone
    assert not any(": step 1 on " in line for line in on.lines)


async def test_the_loop_in_asyncio_ends_with_one_digest_and_its_other_task_answers() -> None:
    alone = Launch("torch_async.py", workers=1)
    digest = await alone.run()
    assert any("asked, it says: step 24 on 1 ranks: loss" in line for line in alone.lines), alone.lines
    assert await Launch("torch_async.py", workers=3, expects=begun).run() == digest


@pytest.mark.parametrize(("name", "workers"), [("experts.py", 3), ("torch_fsdp.py", 4)])
async def test_what_is_divided_trains_as_one_process_does(name: str, workers: int) -> None:
    far = await Launch(name, workers=workers).far()
    assert len(far) == workers
    assert max(far) < 1e-5


async def test_diloco_ends_with_one_digest_on_any_number_of_ranks_though_one_is_killed(tmp_path: Path) -> None:
    recipe = ("--wire", "int8", "--rounds")
    alone = await Launch("diloco.py", *recipe, "3", workers=1).run()
    killed = Launch(
        "diloco.py", *recipe, "3", "--backup", "1",
        workers=3, expects=lambda line: line.startswith("worker-1: round 1"), program=HELD,
    )  # fmt: skip
    assert await killed.run() == alone
    # Interrupted by the end of its rounds, and gone on with by another number of ranks.
    where = ("--checkpoints", tmp_path)
    assert await Launch("diloco.py", *recipe, "2", *where, workers=1).run() != alone
    on = Launch("diloco.py", *recipe, "3", *where, workers=2)
    assert await on.run() == alone
    assert not any("round 2" in line for line in on.lines)
