"""Real sockets in two network namespaces with an emulated bad path between them: loss, corruption that reaches the
program, copies, late packets, and cuts.

Needs root, gcc and ip(8), and the emulator beside the project (../shared/wanem), which is used where it stands. The
emulator's cuts and the deadlines are real time; so these tests take what they say. Without QUICOLL_TEST_WANEM_MIB each
side sends 1.5 MiB: cubic makes about 100 KiB/s of a path of 100 ms that spoils two packets in a hundred (Mathis et al.
1997: rate = 1.2 * packet / (RTT * sqrt(loss))). QUICOLL_TEST_WANEM_MIB=8 sends so many MiB in each direction.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quicoll_transport.security.authority import create_authority, issue
from quicoll_transport.security.identity import WORKER

ROOT = Path(__file__).resolve().parents[3]
WANEM = ROOT.parent / "shared" / "wanem" / "wanem.py"
NODE = Path(__file__).with_name("wan_node.py")
MIB = float(os.environ.get("QUICOLL_TEST_WANEM_MIB", "1.5"))
_PATIENCE = 100.0 * max(1.0, MIB / 1.5)


def _missing() -> str:
    if not WANEM.is_file():
        return "the emulator is not there (../shared/wanem beside the project)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("gcc", "ip"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    return ""


pytestmark = [
    pytest.mark.skipif(bool(_missing()), reason=_missing() or "never"),
    pytest.mark.slow,
    pytest.mark.timeout(3 * _PATIENCE),
]


class Node:
    """A wan_node in its namespace, and what it says."""

    def __init__(self, wan: Any, number: int, certificates: Path, **options: object) -> None:
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        self.process: subprocess.Popen[str] = wan.popen(
            number,
            [sys.executable, NODE, f"--node={number}", f"--certificates={certificates}", *arguments],
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def hear(self, event: str) -> dict[str, Any]:
        """The next event of this name; what it says before it is of no interest, unless it failed."""
        while True:
            said = self._said.get(timeout=_PATIENCE)
            assert said is not None, f"the node ended before it said {event!r}"
            if said["event"] == event:
                return said
            assert said["event"] in ("ready", "up", "received", "ended"), said

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self.process.stdout.close()


class Path2:
    """Two hosts with the path between them, and the nodes started on them."""

    def __init__(self, wan: Any, certificates: Path) -> None:
        self.wan = wan
        self.certificates = certificates
        self.nodes: list[Node] = []

    def start(self, **options: object) -> tuple[Node, Node]:
        self.nodes = [Node(self.wan, number, self.certificates, **options) for number in (0, 1)]
        for node in self.nodes:
            node.hear("ready")
            node.tell("link")
        for node in self.nodes:
            node.hear("up")
        return self.nodes[0], self.nodes[1]

    def command(self, *lines: str) -> None:
        self.wan.cmd(*lines)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path2]:
    spec = importlib.util.spec_from_file_location("wanem", WANEM)
    assert spec is not None
    assert spec.loader is not None
    wanem = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wanem)
    create_authority(tmp_path, job="wan")
    for number in (0, 1):
        issue(tmp_path, role=WORKER, node=f"n{number}")
    # The prefix names interfaces and a socket: of this process alone, so that runs side by side do not meet.
    wan = wanem.Wan(2, "badwan", seed=7, seconds=600, prefix=f"q{os.getpid() % 1_000_000}w")
    made = Path2(wan, tmp_path)
    try:
        yield made
    finally:
        for node in made.nodes:
            node.close()
        wan.close()
        wan._log.join()
        for pipe in (wan.p.stdout, wan.p.stderr):
            pipe.close()


def test_every_transfer_arrives_once_and_right_through_loss_corruption_copies_reordering_and_a_cut(path: Path2) -> None:
    path.command("set corrupt 1% fixsum 1 dup 1% reorder 1% late 20ms")
    count = 6
    nodes = path.start(count=count, size=int(MIB * (1 << 20) / count), lost_after=15.0)
    for node in nodes:
        node.tell("transfer")
    nodes[0].hear("received")
    path.command("cut 0-1")
    time.sleep(5.0)  # what is tested: a cut of so many seconds
    path.command("heal")
    for node in nodes:
        done = node.hear("done")
        assert done["wrong"] == 0
        assert done["messages"] == 2 * count, "each once: by tag and by channel"
        assert done["received"] == count * (int(MIB * (1 << 20) / count) + 1000)
        assert done["corrupt"] == 0, "what the path spoils, QUIC's AEAD finds"
    for link in path.wan.stats()["links"].values():
        for fault in ("lost", "corrupted", "dups", "reordered", "cut"):
            assert link[fault] > 0, f"the path did what it should: {fault}"


def test_a_cut_longer_than_lost_after_ends_the_link_at_both_ends_and_a_new_one_works(path: Path2) -> None:
    lost_after, slack = 3.0, 10.0
    nodes = path.start(count=2, size=50_000, lost_after=lost_after)
    for node in nodes:
        node.tell("transfer")
    for node in nodes:
        assert node.hear("done")["wrong"] == 0
    path.command("cut 0-1")
    began = time.monotonic()  # of the same clock as theirs
    for node in nodes:
        ended = node.hear("ended")
        assert ended["kind"] == "LinkLost"
        assert ended["at"] - began < lost_after + slack
    path.command("heal")
    for node in nodes:
        node.tell("link")
    for node in nodes:
        node.hear("up")
        node.tell("transfer")
    for node in nodes:
        assert node.hear("done")["wrong"] == 0
