"""DiLoCo on two levels in real processes: two sites of two ranks, one of which and then a whole site are killed."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from quicoll.launch.supervisor import Supervisor
from quicoll.train.diloco_journal import RoundJournal

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.warm("torch")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "diloco.py"
ROUNDS = 5
RECIPE = (
    "--rounds", str(ROUNDS), "--every", "4", "--fragments", "2", "--delay", "1", "--parts", "2", "--wire", "int4",
    "--backup", "0",
)  # fmt: skip

# Who is killed when it, or the first of them, has told of a round; the one that told waits for its end there.
KILLED = {"worker-1: round 1": ("worker-1",), "worker-2: round 3": ("worker-2", "worker-3")}
HELD = """
import builtins, os, runpy, sys, time

def told(*words, say=print, **options):
    say(*words, **options)
    line = f"{os.environ['QUICOLL_NODE']}: {words[0]}"
    if os.environ["QUICOLL_RESTARTS"] == "0" and line.startswith(("worker-1: round 1", "worker-2: round 3")):
        time.sleep(600)

builtins.print = told
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Sites:
    """A run of the example, of a worker for each letter, which is its site."""

    def __init__(self, sites: str, *arguments: str, killed: dict[str, tuple[str, ...]] | None = None) -> None:
        self.lines: list[str] = []
        self.killed: list[str] = []
        self._events = dict(killed or {})
        self._supervisor = Supervisor(
            [sys.executable, *(["-c", HELD] if killed else []), str(EXAMPLE), *RECIPE, "--sites", sites, *arguments],
            workers=len(sites), seed=7, lost_after=1.5, backoff=0.1, output=self._said,
        )  # fmt: skip

    def _said(self, node: str, line: str) -> None:
        self.lines.append(f"{node}: {line}")
        for event in [event for event in self._events if f"{node}: {line}".startswith(event)]:
            for each in self._events.pop(event):
                pid = self._supervisor.pid(each)
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(each)

    async def ended(self) -> tuple[str, str]:
        """The digest and the journal at the end, of which there is to be one each."""
        outcome = await self._supervisor.run()
        said = "\n".join(self.lines)
        assert outcome.exit_status == 0, said
        digests, journals = (set(re.findall(f": {what} (.*)", said)) for what in ("digest", "journal"))
        assert len(digests) == len(journals) == 1, said
        return digests.pop(), journals.pop()


async def test_a_rank_and_then_a_site_are_killed_and_the_replay_of_the_journal_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUICOLL_LOCAL", "off")  # links, as between hosts
    disturbed = Sites("aabb", killed=KILLED)
    digest, journal = await disturbed.ended()
    assert disturbed.killed == ["worker-1", "worker-2", "worker-3"]
    entries = [RoundJournal.parse(journal).of_round(number) for number in range(1, ROUNDS + 1)]
    # The rank took nothing along that the other of its site has not; the site took its two of four workers, in the
    # round after the one that it had told of.
    assert [entry.number for entry in entries if entry.anew] == [4]
    assert entries[3].anew in ((0, 1), (2, 3))
    for sites in ("a", "abb"):
        assert await Sites(sites, "--replay", journal).ended() == (digest, journal)
    undisturbed, nothing = await Sites("a").ended()
    assert nothing == "empty"
    assert undisturbed != digest
