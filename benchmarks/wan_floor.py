"""What an all_reduce costs over an emulated link without any transport: the floor under `quicoll bench wan --emulator`.

    python benchmarks/wan_floor.py --emulator PROGRAM [--ranks 4] [--mbit 500] [--rtt-ms 10] [--mib 16] [--rounds 6]

PROGRAM has the command line that stands at the head of quicoll/bench/wan_emulated.py (root, gcc, Linux; it takes down
what it makes). Each rank is one end of `floor.py` to the next one and one to the one before: a ring, in which a chunk
is added to on N - 1 ranks and handed on to N - 1 more. Encryption, checksums, copies and sockets in datagrams of 1452
bytes, and nothing else; nobody paces, and nothing that is lost comes again, so the link loses nothing and its queues
hold all that may be under way. Ends by itself: a round that takes half a minute is over.

Printed are times of the rounds after the first over the ideal (bytes at the link's rate and 2(N - 1) one-way delays, as
in docs/wan.md), and the processor time of a rank in one.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
from floor import End

from quicoll_transport.net import offload

_RIGHT, _LEFT, _MEET = 7000, 7001, 7002  # ports: to the next rank, from the one before, to meet
_DATAGRAM = 1452
_LIMIT_S = 30.0
_AGAIN_S = 0.2


class _Ring:
    """This rank's place in it."""

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._host = os.environ["WANEM_ADDR"]
        net = self._host.rpartition(".")[0]
        self._next = f"{net}.{(self.rank + 1) % self.world + 1}"
        before = f"{net}.{(self.rank - 1) % self.world + 1}"
        self.right, self.left = self._open(_RIGHT, (self._next, _LEFT)), self._open(_LEFT, (before, _RIGHT))
        self._meeting = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._meeting.bind((self._host, _MEET))
        self._meeting.settimeout(_AGAIN_S if self.rank == 0 else _LIMIT_S)
        self._word = 0

    def _open(self, port: int, peer: tuple[str, int]) -> socket.socket:
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            opened.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        opened.bind((self._host, port))
        offload.coalesce(opened)
        opened.connect(peer)
        opened.setblocking(False)
        return opened

    def meet(self) -> None:
        """Return when all ranks are here: two words go round, one after the other, each as often as it takes."""
        for _ in range(2):
            self._word += 1
            mine, ends = bytes((self._word,)), time.perf_counter() + _LIMIT_S
            got = b""
            while got != mine:
                if self.rank == 0:
                    self._meeting.sendto(mine, (self._next, _MEET))
                try:
                    got = self._meeting.recv(1)
                except (TimeoutError, ConnectionRefusedError):
                    if time.perf_counter() > ends:
                        raise SystemExit(f"rank {self.rank}: the others are not there") from None
                    continue
                if self.rank:
                    self._meeting.sendto(got, (self._next, _MEET))  # an older one as well: it was lost further on


def _all_reduce(ring: _Ring, array: np.ndarray, number: int, ahead: int) -> tuple[float, float]:
    """Sum over all ranks, in place; return the seconds that it took, and those of this processor."""
    out = End(ring.right, _DATAGRAM, number, ahead=ahead, turn=ahead // 16)
    into = End(ring.left, _DATAGRAM, number, ahead=ahead, turn=ahead // 16)
    part, step = len(array) // ring.world, ahead // 16 // array.itemsize

    def added(target: np.ndarray, scratch: np.ndarray) -> None:
        np.add(target, scratch, out=target)
        out.send(memoryview(target).cast("B"))

    ring.meet()
    began, cpu = time.perf_counter(), time.process_time()
    for hop in range(2 * ring.world - 1):
        begin = (ring.rank - hop) % ring.world * part
        for start in range(begin, begin + part, step):
            target = array[start : min(start + step, begin + part)]
            view = memoryview(target).cast("B")
            if hop == 0:
                out.send(view)
            elif hop < ring.world:
                scratch = np.empty_like(target)
                into.post(memoryview(scratch).cast("B"), partial(added, target, scratch))
            else:
                into.post(view, partial(out.send, view) if hop < 2 * ring.world - 2 else lambda: None)
    selector = selectors.DefaultSelector()
    for each in (ring.right, ring.left):
        selector.register(each, selectors.EVENT_READ)
    while into.targets or not out.through:
        if not out.work() | into.work():
            selector.select(0.01)
        if time.perf_counter() - began > _LIMIT_S:
            raise SystemExit(f"rank {ring.rank}: something was lost, or the link is slower than it was said to be")
    return time.perf_counter() - began, time.process_time() - cpu


def main() -> None:
    """Print what the module's head says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--emulator", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=500, help="of each host's access")
    parser.add_argument("--rtt-ms", type=float, default=10)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--ahead-kib", type=int, default=1024, help="bytes that may be under way to the next rank")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    if "WANEM_ADDR" in os.environ:
        _take_part(arguments)
    elif arguments.emulator is None:
        print("nothing is measured without --emulator")
    else:
        link = f"set up {arguments.mbit}m down {arguments.mbit}m upqueue 8m downqueue 8m"
        command = [sys.executable, arguments.emulator, "-n", arguments.ranks, "-t", 180, "-p", f"floor{os.getpid()}"]
        command += ["-c", link, "-c", f"set delay {arguments.rtt_ms / 2}ms", "--", sys.executable, *sys.argv]
        sys.exit(subprocess.run([str(each) for each in command], check=False).returncode)


def _take_part(arguments: argparse.Namespace) -> None:
    ring, rounds = _Ring(), []
    nbytes = arguments.mib << 20
    for number in range(arguments.rounds):
        array = np.ones(nbytes // 4, np.float32)
        rounds.append(_all_reduce(ring, array, number, arguments.ahead_kib << 10))
        assert (array == ring.world).all()
    ring.meet()  # or the last words of a neighbour would come to a closed socket
    between = 2 * (ring.world - 1)
    ideal = nbytes * between / ring.world * 8 / (arguments.mbit * 1e6) + between * arguments.rtt_ms / 2e3
    seconds, cpu = zip(*rounds[1:], strict=True)
    if ring.rank == 0:
        ratios = [round(each / ideal, 2) for each in seconds]
        median_s = sorted(cpu)[len(cpu) // 2]
        print(json.dumps({"ideal_ms": round(ideal * 1e3), "ratios": ratios, "cpu_ms": round(median_s * 1e3)}))


if __name__ == "__main__":
    main()
