"""The line between two processes of one program: whole messages, in order, of any length; how it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial

from quicoll.lanes.line import MOST_WAITING, ProcessLine


class Pair:
    """Both ends, in one loop."""

    def __init__(self) -> None:
        self.heard: tuple[list[bytes], list[bytes]] = [], []
        self.ended: list[int] = []
        self._change = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lines = [
            ProcessLine(end, loop=loop, on_message=partial(self._hear, number), on_end=partial(self._end, number))
            for number, end in enumerate(ends)
        ]

    def _hear(self, number: int, data: bytes) -> None:
        self.heard[number].append(data)
        self._change.set()

    def _end(self, number: int) -> None:
        self.ended.append(number)
        self._change.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._change.clear()
            await self._change.wait()

    def close(self) -> None:
        for line in self.lines:
            line.close()


async def test_messages_of_any_length_come_whole_and_in_order() -> None:
    pair = Pair()
    sizes = [0, 1, (128 << 10) - 1, 128 << 10, (128 << 10) + 1, 256 << 10, 5_000_001, 3]
    sent = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    for each in sent:
        pair.lines[0].send(each)
    await pair.until(lambda: len(pair.heard[1]) == len(sent))
    assert pair.heard[1] == sent
    pair.lines[1].send(b"back")
    await pair.until(lambda: bool(pair.heard[0]))
    assert pair.heard[0] == [b"back"]
    pair.close()


async def test_an_end_that_closes_ends_the_other_once_and_what_is_sent_then_goes_nowhere() -> None:
    pair = Pair()
    pair.lines[0].send(b"x" * 300_000)
    await pair.until(lambda: bool(pair.heard[1]))
    pair.lines[0].close()
    await pair.until(lambda: bool(pair.ended))
    assert pair.ended == [1]
    pair.lines[1].send(b"nobody")
    pair.close()
    assert pair.ended == [1]


async def test_an_end_that_reads_no_more_is_as_good_as_gone() -> None:
    pair = Pair()
    loop = asyncio.get_running_loop()
    loop.remove_reader(pair.lines[1]._end.fileno())
    for _ in range(MOST_WAITING + 1000):
        pair.lines[0].send(b"word" * 1000)
    await pair.until(lambda: bool(pair.ended))
    assert pair.ended == [0]
    pair.close()
