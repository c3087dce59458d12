"""Two ranks behind address translators of Linux itself, each in a network namespace behind a router of its own.

    rank 192.168.7.2 --- router 192.168.7.1, 10.9.0.2 ---+
                                                          bridge, coordinator 10.9.0.1
    rank 192.168.7.2 --- router 192.168.7.1, 10.9.0.3 ---+

Needs root, ip(8) and nft(8). Linux keeps the port of a socket where it can, so that it is the same for all
destinations, and lets in what answers (a port-restricted cone); with `random` each destination gets another port
(symmetric). The routers drop what nobody has asked for, as those of homes and clouds do.
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

from quicoll_transport.security.authority import create_authority, issue

IP, NFT = shutil.which("ip") or "", shutil.which("nft") or ""


def _missing() -> str:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not IP or not NFT:
        return f"{'nft' if IP else 'ip'} is not installed"
    name = f"quicoll-try-{os.getpid()}"
    if subprocess.run([IP, "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces cannot be made here"
    rules = "add table ip t; add chain ip t c { type nat hook postrouting priority 100; }; add rule ip t c masquerade"
    tried = subprocess.run([IP, "netns", "exec", name, NFT, rules], capture_output=True, check=False)
    subprocess.run([IP, "netns", "del", name], capture_output=True, check=False)
    return "this kernel translates no addresses (nf_tables)" if tried.returncode else ""


REASON = _missing()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON or "never"),
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


def ip(*words: str) -> None:
    subprocess.run([IP, *words], check=True, capture_output=True)


class Town:
    """A street with a coordinator, and houses with a router each. All names are of this process."""

    def __init__(self) -> None:
        self.prefix = f"q{os.getpid()}"
        self.names: list[str] = []
        self.street = self.space("s")
        self.run(self.street, "ip", "link", "add", "br0", "type", "bridge")
        self.run(self.street, "ip", "addr", "add", "10.9.0.1/24", "dev", "br0")
        self.run(self.street, "ip", "link", "set", "br0", "up")
        self.processes: list[subprocess.Popen[str]] = []

    def space(self, name: str) -> str:
        name = f"{self.prefix}{name}"
        ip("netns", "add", name)
        self.names.append(name)
        self.run(name, "ip", "link", "set", "lo", "up")
        return name

    def run(self, space: str, *words: str) -> None:
        subprocess.run([IP, "netns", "exec", space, *words], check=True, capture_output=True)

    def house(self, number: int, how: str) -> str:
        """Build one; return where its rank lives."""
        router, home = self.space(f"r{number}"), self.space(f"h{number}")
        ip("link", "add", "up0", "netns", router, "type", "veth", "peer", "name", f"p{number}", "netns", self.street)
        ip("link", "add", "in0", "netns", router, "type", "veth", "peer", "name", "eth0", "netns", home)
        self.run(self.street, "ip", "link", "set", f"p{number}", "master", "br0", "up")
        for space, device, address in (
            (router, "up0", f"10.9.0.{1 + number}/24"),
            (router, "in0", "192.168.7.1/24"),
            (home, "eth0", "192.168.7.2/24"),
        ):
            self.run(space, "ip", "addr", "add", address, "dev", device)
            self.run(space, "ip", "link", "set", device, "up")
        self.run(home, "ip", "route", "add", "default", "via", "192.168.7.1")
        self.run(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        self.run(
            router, NFT,
            "add table ip t;"
            "add chain ip t out { type nat hook postrouting priority 100; };"
            f"add rule ip t out oif up0 {how};"
            "add chain ip t in { type filter hook input priority 0; };"
            "add rule ip t in iifname up0 ct state new drop",
        )  # fmt: skip
        return home

    def start(self, space: str, *words: str) -> subprocess.Popen[str]:
        root = Path(__file__).resolve().parents[2]
        environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'transport'}", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [IP, "netns", "exec", space, sys.executable, *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for name in self.names:
            ip("netns", "del", name)


@pytest.fixture
def town() -> Iterator[Town]:
    made = Town()
    yield made
    made.close()


def meet(town: Town, tmp_path: Path, *ways: str) -> list[dict[str, Any]]:
    """Let two ranks do a step, each behind a router that translates so; return what they say."""
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
        town.start(town.house(number, how), "-c", RANK, node, str(certs))
        for number, (node, how) in enumerate(zip("ab", ways, strict=True), 1)
    ]
    said = []
    for rank in ranks:
        out, err = rank.communicate(timeout=200)
        assert rank.returncode == 0, err
        said.append(json.loads(out))
    assert [each["sum"] for each in said] == [2 * 199_999] * 2
    return said


def test_ranks_behind_routers_that_keep_ports_open_their_ways_to_each_other(town: Town, tmp_path: Path) -> None:
    a, b = meet(town, tmp_path, "masquerade", "masquerade")
    assert a["seen"][0].startswith("10.9.0.3:")
    assert b["seen"][0].startswith("10.9.0.2:")


def test_ranks_behind_routers_that_give_each_destination_a_port_meet_by_the_relay(town: Town, tmp_path: Path) -> None:
    a, b = meet(town, tmp_path, "masquerade random", "masquerade random")
    assert (a["seen"], b["seen"]) == (["by relay"], ["by relay"])
