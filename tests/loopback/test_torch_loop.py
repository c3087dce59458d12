"""The example of a torch loop with atomic steps, as processes; and how little it differs from an ordinary one."""

from __future__ import annotations

import difflib
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from quicoll.launch.supervisor import Supervisor

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.warm("torch")]

HELPERS = Path(__file__).parents[1] / "helpers"
EXAMPLES = Path(__file__).parents[2] / "examples"

# The example, of which one process waits for its end as soon as it has told its first loss.
HELD = """
import builtins, os, runpy, sys, time

def told(*words, say=print, **options):
    say(*words, **options)
    first = (os.environ["QUICOLL_NODE"], os.environ["QUICOLL_RESTARTS"]) == ("worker-1", "0")
    if first and words[0].startswith("loss"):
        time.sleep(600)

builtins.print = told
runpy.run_path(sys.argv[1], run_name="__main__")
"""


async def digests(workers: int, *, kill: bool = False) -> set[str]:
    """Run the example, and kill a worker once it has told its first loss; the digests at the end."""
    lines: list[str] = []
    killed: list[int] = []

    def output(node: str, line: str) -> None:
        pid = supervisor.pid(node)
        if kill and not killed and node == "worker-1" and line.startswith("loss") and pid is not None:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
        lines.append(f"{node} {line}")

    supervisor = Supervisor(
        [sys.executable, *(["-c", HELD] if kill else []), str(EXAMPLES / "torch_loop.py")],
        workers=workers, seed=7, lost_after=1.5, backoff=0.1, output=output,
    )  # fmt: skip
    outcome = await supervisor.run()
    assert outcome.exit_status == 0, "\n".join(lines)
    assert len(killed) == kill
    found = {line.split("digest")[1] for line in lines if "digest" in line}
    assert found
    return found


async def test_one_two_and_three_processes_end_with_one_digest_though_one_is_killed() -> None:
    alone = await digests(1)
    assert await digests(2) == alone
    assert await digests(3, kill=True) == alone


async def test_a_blocking_loop_has_the_same_bits_when_its_gradients_travel_in_the_backward_pass() -> None:
    ends: list[set[str]] = []
    for workers, bucket_bytes in ((1, 0), (2, 20_000)):
        lines: list[str] = []
        supervisor = Supervisor(
            [sys.executable, str(HELPERS / "torch_early.py"), str(bucket_bytes)],
            workers=workers, seed=7, output=lambda node, line, lines=lines: lines.append(line),
        )  # fmt: skip
        outcome = await supervisor.run()
        assert outcome.exit_status == 0, "\n".join(lines)
        ends.append({line.split("digest ")[1] for line in lines if "digest" in line})
    (alone,), (together,) = ends
    assert alone.split()[0] == together.split()[0]
    assert (alone.split("early ")[1], together.split("early ")[1]) == ("[]", "[3]")


def test_the_ported_loop_differs_from_the_ordinary_one_in_ten_lines() -> None:
    def code(name: str) -> list[str]:
        text = (EXAMPLES / name).read_text().split('"""', 2)[2]
        lines = [line.strip() for line in text.splitlines()]
        return [
            line for line in lines if line and not any(word in line for word in ("print", "import os", "step.number"))
        ]

    diff = difflib.ndiff(code("torch_plain.py"), code("torch_loop.py"))
    changed = [line for line in diff if line.startswith("+ ")]
    assert 5 < len(changed) <= 10, changed


@pytest.mark.parametrize("page", ["README.md", "docs/torch.md"])
def test_the_difference_that_is_printed_is_that_of_the_examples(page: str) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", (EXAMPLES.parent / page).read_text(), re.DOTALL)

    def lines(name: str, mark: str) -> tuple[list[str], list[str]]:
        code = [line for line in (EXAMPLES / name).read_text().splitlines() if "print" not in line]
        printed = [line[1:] for line in diff.splitlines() if line.startswith(mark)]
        first = code.index(printed[0])
        return printed, code[first : first + len(printed)]

    for name, mark in (("torch_plain.py", "-"), ("torch_loop.py", "+")):
        printed, code = lines(name, mark)
        assert printed == code
