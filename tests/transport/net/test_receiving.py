"""What arrives: as runs, bounded in each wake-up, the same however the system batched it."""

from __future__ import annotations

import errno
import random
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from inbox import FAMILIES, Inbox

from quicoll_transport.net import offload
from quicoll_transport.net.offload import Offload
from quicoll_transport.net.runs import DatagramRun, apart
from quicoll_transport.net.udp import UdpSocket

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

pytestmark = pytest.mark.loopback
OpenInbox = Callable[..., Inbox]
A, B = ("192.0.2.1", 1), ("192.0.2.2", 2)
GRO = struct.Struct("=i")


@pytest.fixture(params=["together", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    way: str = request.param
    able = offload.supported()
    if way == "one by one":
        monkeypatch.setattr(offload, "supported", lambda: Offload(sends=able.sends, receives=False))
    elif not able.receives:
        pytest.skip("this system gives datagrams one by one only")
    return way


@pytest.mark.parametrize("host", FAMILIES)
async def test_runs_of_several_senders_arrive_in_order_of_each(open_inbox: OpenInbox, host: str, way: str) -> None:
    target, senders = open_inbox(host), [open_inbox(host) for _ in range(3)]
    sent = {sender.address: [bytes([i, n]) * 300 for n in range(40)] for i, sender in enumerate(senders)}
    for start in range(0, 40, 8):
        for sender in senders:
            sender.send(*((data, target.address) for data in sent[sender.address][start : start + 8]))
    got: dict[Address, list[bytes]] = {}
    for _ in range(120):
        data, source = await target.got.get()
        got.setdefault(source, []).append(data)
    assert got == sent


async def test_what_waits_together_is_given_as_one_run(open_inbox: OpenInbox, way: str) -> None:
    a, b = open_inbox("127.0.0.1"), open_inbox("127.0.0.1")
    a.send(*[(bytes(1000), b.address)] * 30, (b"short", b.address))
    assert len(await b.receive(31)) == 31
    assert b.runs == [31]


class Source:
    """A socket that gives scripted pieces: (bytes, size of each datagram, sender), or an error."""

    def __init__(self, pieces: list[tuple[bytes, int, Address] | int]) -> None:
        self.pieces = pieces

    def fileno(self) -> int:
        return 99

    def recvmsg(self, *arguments: int) -> None:
        raise BlockingIOError

    def recvmsg_into(
        self, into: list[memoryview], ancillary: int
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Address]:
        if not self.pieces:
            raise BlockingIOError
        piece = self.pieces.pop(0)
        if isinstance(piece, int):
            raise OSError(piece, "told to fail")
        data, size, sender = piece
        into[0][: len(data)] = data
        beside = [(17, 104, GRO.pack(size))] if size < len(data) else []
        return len(data), beside, 0, sender

    def recvfrom_into(self, into: memoryview) -> tuple[int, Address]:
        length, _, _, sender = self.recvmsg_into([into], 0)
        return length, sender


def reading(
    monkeypatch: pytest.MonkeyPatch, pieces: list[tuple[bytes, int, Address] | int], *, together: bool
) -> UdpSocket:
    monkeypatch.setattr(offload, "supported", lambda: Offload(sends=False, receives=together))
    opened = UdpSocket("127.0.0.1", 0, loop=None)
    opened._socket.close()
    opened._socket = Source(pieces)
    return opened


def drained(opened: UdpSocket) -> list[list[tuple[bytes, Address]]]:
    """What each wake-up gives until there is nothing left."""
    batches: list[list[tuple[bytes, Address]]] = []

    def take(runs: list[DatagramRun]) -> None:
        batches.append(list(apart(runs)))
        for run in runs:
            run.memory[:] = bytes(len(run.memory))  # as who opens packets in place

    opened._on_runs = take
    count = -1
    while len(batches) != count:
        count = len(batches)
        opened._readable()
    return batches


@pytest.mark.parametrize("seed", range(40))
def test_the_same_datagrams_come_out_however_the_system_batched_them(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    pieces: list[tuple[bytes, int, Address]] = []
    for _ in range(300):
        size = rng.choice([1, 20, 20, 20, 1000])
        count = rng.choice([1, 1, 5, 60])
        data = rng.randbytes(size * count - rng.choice([0, 0, size // 2]))
        pieces.append((data, min(size, len(data)), rng.choice([A, A, B])))
    singly = [(data[i : i + size], size, who) for data, size, who in pieces for i in range(0, len(data), size)]
    for together, script in ((True, pieces), (True, singly), (False, singly)):
        batches = drained(reading(monkeypatch, list(script), together=together))
        for sender in (A, B):
            found = [data for batch in batches for data, who in batch if who == sender]
            assert found == [data for data, _, who in singly if who == sender]


def test_a_wake_up_takes_about_a_mib_and_leaves_the_rest_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = (bytes(65_000), 1000, A)
    batches = drained(reading(monkeypatch, [piece] * 50, together=True))
    assert {len(batch) for batch in batches[:-1]} == {17 * 65}
    assert sum(len(batch) for batch in batches) == 50 * 65


def test_small_datagrams_are_bounded_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = drained(reading(monkeypatch, [(b"tiny", 4, A)] * 500, together=False))
    assert [len(batch) for batch in batches] == [128, 128, 128, 116]


def test_empty_datagrams_are_passed_over_and_do_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    script: list[tuple[bytes, int, Address] | int] = [(b"", 0, B)] * 300
    opened = reading(monkeypatch, [*script, (b"a", 1, A), (b"", 0, B), (b"b", 1, A)], together=True)
    opened._on_runs = lambda runs: pytest.fail("there is nothing yet")
    opened._readable()
    opened._readable()
    assert drained(opened) == [[(b"a", A), (b"b", A)]]


def test_an_error_that_no_queue_explains_ends_the_wake_up_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = reading(monkeypatch, [(b"a", 1, A), errno.ECONNREFUSED, (b"b", 1, A)], together=True)
    assert drained(opened) == [[(b"a", A)], [(b"b", A)]]
