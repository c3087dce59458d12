"""Two ranks behind address translators, or firewalls, on real sockets: each in a network namespace of its own.

    rank 192.168.7.2 --- translator, 10.9.0.2 ---+
                                                  street, coordinator 10.9.0.1
    rank 192.168.7.2 --- translator, 10.9.0.3 ---+

What translators do, and what this needs: tests/helpers/street.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quicoll
import quicoll_transport
from quicoll_transport.security.authority import create_authority, issue

STREET = Path(__file__).resolve().parents[1] / "helpers" / "street.py"
SOURCES = [str(Path(package.__file__ or "").resolve().parent.parent) for package in (quicoll, quicoll_transport)]
NSENTER, UNSHARE = shutil.which("nsenter") or "", shutil.which("unshare") or ""


def _missing() -> str:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for program in ("ip", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there are no TUN devices here"
    tried = subprocess.run([UNSHARE, "--net", "true"], capture_output=True, check=False)
    return "network namespaces cannot be made here" if tried.returncode else ""


REASON = _missing()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON or "never"),
    pytest.mark.loopback,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

RANK = """
import asyncio, json, sys
import numpy as np
import quicoll

seen = []

def observe(event):
    if event.kind == "connection_up" and "coordinator" not in event.fields["peer"]:
        seen.append(event.fields["address"])

async def main(node, certs):
    settings = dict(coordinator="10.9.0.1:4433", certs=certs, job="alpha", node=node, join_timeout=150.0)
    async with quicoll.join(observer=observe, transport_events=True, **settings) as job:
        async with job.step():
            total = await job.group.all_reduce(np.arange(200_000))
        print(json.dumps({"sum": int(total[-1]), "seen": seen}), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


class Town:
    """A street with a coordinator, and houses. All of it ends with this process."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.street = self.place("street", "10.9.0.1", "10.9.0.2", "10.9.0.3")

    def place(self, *words: str) -> int:
        """Make a namespace; return whose it is."""
        made = subprocess.Popen(
            [sys.executable, STREET, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        self.processes.append(made)
        assert made.stdout is not None
        assert made.stdout.readline() == "ready\n"
        return made.pid

    def start(self, place: int, *words: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(SOURCES), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [NSENTER, f"--net=/proc/{place}/ns/net", sys.executable, *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def town() -> Iterator[Town]:
    made = Town()
    yield made
    made.close()


def meet(town: Town, tmp_path: Path, *kinds: str) -> list[dict[str, Any]]:
    """Let two ranks do a step, each behind a translator of this kind; return what they say."""
    certs = tmp_path / "certs"
    create_authority(certs, job="alpha")
    issue(certs, role="coordinator", node="coordinator")
    for node in "ab":
        issue(certs, role="worker", node=node)
    home = town.start(
        town.street, "-c", "import sys; from quicoll.cli.main import main; sys.exit(main())",
        "coordinator", "--job", "alpha", "--certs", str(certs), "--world-size", "2", "--listen", "10.9.0.1:4433",
        "--journal", str(tmp_path / "journal"),
    )  # fmt: skip
    assert home.stdout is not None
    assert "listening on 10.9.0.1:4433" in home.stdout.readline()
    ranks = [
        town.start(town.place("house", kind, f"10.9.0.{2 + number}", str(town.street)), "-c", RANK, node, str(certs))
        for number, (node, kind) in enumerate(zip("ab", kinds, strict=True))
    ]
    said = []
    for rank in ranks:
        out, err = rank.communicate(timeout=200)
        assert rank.returncode == 0, err
        said.append(json.loads(out))
    assert [each["sum"] for each in said] == [2 * 199_999] * 2
    return said


def test_ranks_behind_routers_that_keep_ports_open_their_ways_to_each_other(town: Town, tmp_path: Path) -> None:
    a, b = meet(town, tmp_path, "cone", "cone")
    assert a["seen"][0].startswith("10.9.0.3:")
    assert b["seen"][0].startswith("10.9.0.2:")


def test_ranks_behind_routers_that_give_each_destination_a_port_meet_by_the_relay(town: Town, tmp_path: Path) -> None:
    a, b = meet(town, tmp_path, "symmetric", "symmetric")
    assert (a["seen"], b["seen"]) == (["by relay"], ["by relay"])


def test_ranks_behind_firewalls_that_translate_nothing_open_their_ways_to_each_other(
    town: Town, tmp_path: Path
) -> None:
    a, b = meet(town, tmp_path, "firewall", "firewall")
    assert a["seen"][0].startswith("10.9.0.3:")
    assert b["seen"][0].startswith("10.9.0.2:")
