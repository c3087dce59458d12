"""How long a message stands still when the path that it goes by is cut, and another one lives.

    python benchmarks/failover.py --emulator ../shared/wanem/wanem.py [--mib 64] [--profile wan] [--runs 3]

Two hosts with two addresses, each pair of them joined by a path of its own that the emulator makes (root, Linux; it
takes down what it has made). One message goes from one to the other, over bbr; when a third of it has arrived the
emulator cuts the path by which it goes. Run by run, in turn: not cut, cut where the sender has dialled, cut where the
receiver has.

Told are the time of the whole message, the longest time in which nothing of it arrived, and how many bytes more than
the message arrived. A socket of another network namespace is made by entering it and coming back, so each process has a
socket in two of them, as one with two networks.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _emulator import load_emulator

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.link.frames import TAG_SIZE
from quicoll_transport.net.multihomed import MultihomedIO
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.quic import SessionConfig
from quicoll_transport.security.authority import create_authority, issue
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.identity import WORKER, Identity

if TYPE_CHECKING:
    from quicoll_transport.net.runs import DatagramRun

PORT = 4433
LOST_AFTER_S = 2.0
CLONE_NEWNET = 0x40000000
NODES = ("sender", "receiver")


def addresses(node: int) -> list[tuple[str, int]]:
    """Of one of the two hosts: the emulator's hosts 0 and 1 are the first path, 2 and 3 the second one."""
    return [(f"10.77.0.{node + 1}", PORT), (f"10.77.0.{node + 3}", PORT)]


class Watched(MultihomedIO):
    """Notes when long datagrams came, which are those of the message."""

    def __init__(self, sockets: Sequence[UdpSocket]) -> None:
        super().__init__(sockets)
        self.came: list[float] = []
        self.bytes = 0
        self.third: asyncio.Event = asyncio.Event()
        self.wanted = 0

    def start(self, on_runs: Any, on_unreachable: Any) -> None:
        def noted(runs: list[DatagramRun]) -> None:
            count = sum(len(run.memory) for run in runs if run.size > 1000)
            if count:
                self.bytes += count
                self.came.append(time.monotonic())
                if self.bytes >= self.wanted // 3:
                    self.third.set()
            on_runs(runs)

        super().start(noted, on_unreachable)


def sockets(prefix: str, node: int, loop: asyncio.AbstractEventLoop) -> list[UdpSocket]:
    """One in the network namespace that this process is in, and one in that of the second path."""
    (host, port), (other, _) = addresses(node)
    first = UdpSocket(host, port, loop=loop)
    libc = ctypes.CDLL(None, use_errno=True)
    home, away = (os.open(path, os.O_RDONLY) for path in ("/proc/self/ns/net", f"/run/netns/{prefix}{node + 2}"))
    try:
        for step in (away, home):
            if libc.setns(step, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            if step == away:
                second = UdpSocket(other, port, loop=loop)
    finally:
        os.close(home)
        os.close(away)
    return [first, second]


async def take_part(options: argparse.Namespace) -> None:
    node = NODES.index(options.node)
    loop = asyncio.get_running_loop()
    io = Watched(sockets(options.prefix, node, loop))
    io.pair(addresses(1 - node))
    links: asyncio.Queue[Link] = asyncio.Queue()
    endpoint = Endpoint(
        credentials=Credentials.from_directory(options.certificates, role=WORKER, node=options.node),
        config=EndpointConfig(lost_after_ns=round(LOST_AFTER_S * 1e9), session=SessionConfig(congestion="bbr")),
        io=io,
        loop=loop,
        incarnation=1,
        authorize=lambda identity: None,
        on_link=links.put_nowait,
    )
    size, tag = round(options.mib * (1 << 20)), bytes(TAG_SIZE)
    io.wanted = size
    if options.node == options.dials:
        peer = Identity("paths", WORKER, NODES[1 - node])
        link = endpoint.link(peer, addresses=addresses(1 - node), dial=True)
    else:
        say("ready")
        link = await links.get()
    await link.wait_up()
    if options.node == "sender":
        payload = os.urandom(1 << 20) * (size >> 20)
        await link.send(tag, memoryview(payload)).within(100, what="the message")
        say("sent", resumed=link.stats.bytes_resumed)
        await asyncio.sleep(1.0)
    else:
        memory = bytearray(size)
        transfer = link.post(tag, memoryview(memory))
        began = time.monotonic()
        await io.third.wait()
        say("third", at=time.monotonic())
        await transfer.within(100, what="the message")
        assert memory[: 1 << 20] == memory[-(1 << 20) :]
        say("received", seconds=time.monotonic() - began, came=io.came, nbytes=io.bytes, links=link.stats.connections)
        await asyncio.sleep(1.0)
    await endpoint.aclose()


def say(event: str, **more: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **more}) + "\n")
    sys.stdout.flush()


class Process:
    """One of the two, and what it says."""

    def __init__(self, wan: Any, node: int, dials: str, certificates: str, mib: float) -> None:
        arguments = [f"--node={NODES[node]}", f"--dials={dials}", f"--prefix={wan.prefix}", f"--mib={mib}"]
        self.process = wan.popen(
            node,
            [sys.executable, __file__, *arguments, f"--certificates={certificates}"],
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def hear(self, event: str) -> dict[str, Any]:
        while (said := self._said.get(timeout=120)) is not None:
            if said["event"] == event:
                return said
        raise SystemExit(f"it ended before it said {event!r}")


def run(wan: Any, dials: str, *, cut: bool, certificates: str, mib: float) -> dict[str, Any]:
    accepts = 1 - NODES.index(dials)
    processes: dict[int, Process] = {accepts: Process(wan, accepts, dials, certificates, mib)}
    processes[accepts].hear("ready")
    processes[1 - accepts] = Process(wan, 1 - accepts, dials, certificates, mib)
    try:
        at = processes[1].hear("third")["at"]
        if cut:
            at = time.monotonic()
            wan.cmd("cut 0-1")
        received, sent = processes[1].hear("received"), processes[0].hear("sent")
    finally:
        wan.cmd("heal")
        for each in processes.values():
            each.process.wait(30)
    came = [each for each in received["came"] if each >= at - 0.2]
    gaps = [later - before for before, later in itertools.pairwise(came)]
    again = received["nbytes"] - (mib * (1 << 20))
    return {
        "seconds": received["seconds"], "still": max(gaps), "again_mib": again / (1 << 20),
        "connections": received["links"], "resumed": sent["resumed"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--emulator", type=Path)
    parser.add_argument("--mib", type=float, default=64)
    parser.add_argument("--profile", default="wan")
    parser.add_argument("--runs", type=int, default=3)
    for hidden in ("node", "dials", "prefix", "certificates"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        asyncio.run(take_part(options))
        return
    if options.emulator is None:
        print("nothing is measured without --emulator")
        return
    wanem = load_emulator(options.emulator)
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as certificates:
        create_authority(Path(certificates), job="paths")
        for node in NODES:
            issue(Path(certificates), role=WORKER, node=node)
        wan = wanem.Wan(4, options.profile, seed=1, seconds=600, prefix=f"p{os.getpid() % 1_000_000}f")
        try:
            for _ in range(options.runs):
                for name, dials, cut in (
                    ("not cut", "sender", False), ("cut, the sender dialled", "sender", True),
                    ("cut, the receiver dialled", "receiver", True),
                ):  # fmt: skip
                    one = run(wan, dials, cut=cut, certificates=certificates, mib=options.mib)
                    found.setdefault(name, []).append(one)
                    print(name, json.dumps(one), flush=True)
        finally:
            wan.close()
    for name, runs in found.items():
        middle = {what: statistics.median(each[what] for each in runs) for what in runs[0]}
        print(f"{name}: {json.dumps(middle)}")


if __name__ == "__main__":
    main()
