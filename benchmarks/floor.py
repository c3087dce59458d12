"""What encryption, checksums, copies and sockets alone cost a byte, called from Python: the floor under the transport.

    python -m benchmarks.floor [--datagram 65000] [--mib 64] [--rounds 5]

No QUIC: no recovery, no streams, no frames but their space, no protection of headers. What is left is what any
transport in Python with these promises pays, by the calls that quicoll makes: xxh3 of each message, a copy into the
packets, AES-128-GCM in place, sendmsg (GSO where datagrams are small), recvmsg (GRO), AES in place, a copy to where the
bytes belong, xxh3. Words of 40 bytes say how far the receiver is, so that nothing is lost.

`one way` is a message between two ends, `all_reduce` the sum over two ranks in chunks of 1 MiB: each sends the other's
half, adds what comes to its own, and sends that back. Two processes, each on what core it gets.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import selectors
import socket
import time
from typing import Any

import numpy as np
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from quicoll_transport.net import offload

_HEAD, _FRAME, _TAG = 13, 11, 16  # bytes of a short header, a STREAM frame's head, a tag
_CHUNK = 1 << 20
_AHEAD = 2 << 20
_TURN = 1 << 20
_IV = bytes(12)


class End:
    """One end: sends chunks of its arrays, and puts what comes into others. Both go on until both are through."""

    def __init__(
        self, opened: socket.socket, size: int, number: int, *, ahead: int = _AHEAD, turn: int = _TURN
    ) -> None:
        """number: of the round, so that a late word of the one before is none of this. ahead: bytes that may be under
        way; turn: bytes made or read at a time."""
        self.socket, self.size, self.number = opened, size, number
        self.ahead, self.turn = ahead, turn
        self.step = size - _HEAD - _FRAME - _TAG
        self.seal, self.open = AESGCM(bytes(16)).encrypt_into, AESGCM(bytes(16)).decrypt_into
        self.together = max(1, min(offload.MOST_SEGMENTS, offload.MOST_BYTES // size))
        self.out = memoryview(bytearray(self.together * size))
        self.slab = memoryview(bytearray(turn + 65536))
        self.sent = self.taken = self.told = self.received = 0
        self.queue: list[memoryview] = []  # to be sent, one chunk each
        self.at = 0
        self.targets: list[tuple[memoryview, Any]] = []  # and what to do when it is full
        self.filled = 0

    def post(self, target: memoryview, done: Any) -> None:
        self.targets.append((target, done))

    def send(self, chunk: memoryview) -> None:
        xxhash.xxh3_64_intdigest(chunk)
        self.queue.append(chunk)

    def work(self) -> bool:
        """Do what there is to do; return whether there was anything."""
        return self._transmit() | self._take()

    def _transmit(self) -> bool:
        made = 0
        while self.queue and self.sent - self.taken < self.ahead and made < self.turn:
            chunk, used, out, size, step = self.queue[0], 0, self.out, self.size, self.step
            for _ in range(self.together):
                piece = chunk[self.at : self.at + step]
                end = used + _HEAD + _FRAME + len(piece)
                out[used + _HEAD + _FRAME : end] = piece
                text = out[used + _HEAD : end]
                self.seal(_IV, text, out[used : used + _HEAD], out[used + _HEAD : end + _TAG])
                used, self.at = end + _TAG, self.at + len(piece)
                made += len(piece)
                self.sent += len(piece)
                if self.at == len(chunk):
                    break
            if used > size:
                self.socket.sendmsg([out[:used]], offload.segment_size(size))
            else:
                self.socket.send(out[:used])
            if self.at == len(chunk):
                del self.queue[0]
                self.at = 0
        return made > 0

    def _take(self) -> bool:
        slab, total = self.slab, 0
        while total < self.turn:
            try:
                length, ancillary, _, _ = self.socket.recvmsg_into([slab[:65536]], offload.ANCILLARY)
            except BlockingIOError:
                break
            size = offload.coalesced_size(ancillary, length)
            for start in range(0, length, size):
                data = slab[start : min(start + size, length)]
                if len(data) == 40:
                    if data[8] == self.number:
                        self.taken = max(self.taken, int.from_bytes(data[:8], "big"))
                    continue
                self.open(_IV, data[_HEAD:], data[:_HEAD], data[_HEAD:-_TAG])
                text = data[_HEAD + _FRAME : -_TAG]
                target, done = self.targets[0]
                target[self.filled : self.filled + len(text)] = text
                self.filled += len(text)
                self.received += len(text)
                if self.filled == len(target):
                    del self.targets[0]
                    self.filled = 0
                    xxhash.xxh3_64_intdigest(target)
                    done()
            total += length
        if self.received - self.told >= self.ahead // 4 or (total and not self.targets):
            self.told = self.received
            self.socket.send((self.received.to_bytes(8, "big") + bytes((self.number,))).ljust(40))
        return total > 0

    @property
    def through(self) -> bool:
        return not self.queue and not self.targets and self.taken == self.sent


def _run(end: End) -> None:
    selector = selectors.DefaultSelector()
    selector.register(end.socket, selectors.EVENT_READ)
    while not end.through:
        if not end.work():
            selector.select(1)


def _one_way(end: End, rank: int, array: np.ndarray, out: np.ndarray) -> None:
    data, target = memoryview(array).cast("B"), memoryview(out).cast("B")
    for start in range(0, len(data), _CHUNK):
        if rank == 0:
            end.send(data[start : start + _CHUNK])
        else:
            end.post(target[start : start + _CHUNK], lambda: None)


def _all_reduce(end: End, rank: int, array: np.ndarray, out: np.ndarray) -> None:
    half, items = len(array) // 2, _CHUNK // 4
    mine, theirs = (0, half) if rank == 0 else (half, 0)

    def reduce(scratch: np.ndarray, start: int, stop: int) -> None:
        np.add(array[start:stop], scratch, out=out[start:stop])
        end.send(memoryview(out[start:stop]).cast("B"))

    parts = [(start, min(start + items, half)) for start in range(0, half, items)]
    for start, stop in parts:
        scratch = np.empty(stop - start, np.float32)
        end.post(
            memoryview(scratch).cast("B"),
            lambda scratch=scratch, start=start, stop=stop: reduce(scratch, mine + start, mine + stop),
        )
        end.send(memoryview(array[theirs + start : theirs + stop]).cast("B"))
    for start, stop in parts:
        end.post(memoryview(out[theirs + start : theirs + stop]).cast("B"), lambda: None)


def _rank(rank: int, pipe: Any, arguments: argparse.Namespace) -> None:
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        opened.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
    opened.bind(("127.0.0.1", 0))
    offload.coalesce(opened)
    pipe.send(opened.getsockname())
    opened.connect(pipe.recv())
    opened.setblocking(False)
    array = np.ones(arguments.mib << 18, np.float32)
    out = np.empty_like(array)
    for work in (_one_way, _all_reduce):
        for number in range(arguments.rounds + 1):
            end = End(opened, arguments.datagram, number)
            out[:] = 0
            pipe.send(None)
            pipe.recv()
            began, cpu = time.perf_counter(), time.process_time()
            work(end, rank, array, out)
            _run(end)
            pipe.send((time.perf_counter() - began, time.process_time() - cpu))
            assert work is _one_way or (out == 2).all()


def main() -> None:
    """Print a line of JSON for each work: MB/s of the tensor, CPU seconds a GB of both processes; medians."""
    parser = argparse.ArgumentParser(description="the floor under a transport in Python")
    parser.add_argument("--datagram", type=int, default=65000)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    ranks = [multiprocessing.Process(target=_rank, args=(r, pipes[r][1], arguments)) for r in range(2)]
    for each in ranks:
        each.start()
    here = [pipe[0] for pipe in pipes]
    names = [pipe.recv() for pipe in here]
    here[0].send(names[1])
    here[1].send(names[0])
    size = arguments.mib << 20
    for name in ("one way", "all_reduce"):
        rows = []
        for _ in range(arguments.rounds + 1):
            for pipe in here:
                pipe.recv()
            for pipe in here:
                pipe.send(None)
            both = [pipe.recv() for pipe in here]
            rows.append((max(each[0] for each in both), sum(each[1] for each in both)))
        rows = rows[1:]
        seconds, cpu = (sorted(row[i] for row in rows)[len(rows) // 2] for i in (0, 1))
        figures = {
            "mb_s": round(size / seconds / 1e6),
            "ms": round(seconds * 1e3),
            "cpu_s_gb": round(cpu / size * 1e9, 2),
        }
        print(
            json.dumps(
                {
                    "work": name,
                    "datagram": arguments.datagram,
                    "mib": arguments.mib,
                    **figures,
                    "cpu_s_gb": round(cpu / size * 1e9, 2),
                }
            )
        )
    for each in ranks:
        each.join()


if __name__ == "__main__":
    main()
