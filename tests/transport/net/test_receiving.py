"""What arrives: as runs, bounded in each wake-up, the same however the system batched it."""

from __future__ import annotations

import errno
import random
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from inbox import FAMILIES, Inbox

from quicoll_transport.faults.compose import Faults
from quicoll_transport.faults.socket import FaultyIO
from quicoll_transport.net import offload
from quicoll_transport.net.multihomed import MultihomedIO
from quicoll_transport.net.offload import Offload
from quicoll_transport.net.runs import DatagramRun, apart, joined
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.relay.detour import DetourIO

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.udp import OnRuns

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

    def close(self) -> None:
        """It has no memory and no descriptor."""

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
    batches = drained(reading(monkeypatch, [(b"tiny", 4, A)] * 1100, together=False))
    assert [len(batch) for batch in batches] == [512, 512, 76]


def test_empty_datagrams_are_passed_over_and_do_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    script: list[tuple[bytes, int, Address] | int] = [(b"", 0, B)] * 1200
    opened = reading(monkeypatch, [*script, (b"a", 1, A), (b"", 0, B), (b"b", 1, A)], together=True)
    opened._on_runs = lambda runs: pytest.fail("there is nothing yet")
    opened._readable()
    opened._readable()
    assert drained(opened) == [[(b"a", A), (b"b", A)]]


class Clockwork:
    """A loop without time: who watches, and what is due."""

    def __init__(self) -> None:
        self.watched = True
        self.due: list[tuple[float, Callable[[], None]]] = []

    def add_reader(self, descriptor: int, read: Callable[[], None]) -> None:
        assert not self.watched
        self.watched = True

    def remove_reader(self, descriptor: int) -> None:
        self.watched = False

    def remove_writer(self, descriptor: int) -> None:
        """Nobody writes."""

    def call_later(self, seconds: float, what: Callable[[], None]) -> Clockwork:
        self.due.append((seconds, what))
        return self

    def cancel(self) -> None:
        self.due.clear()


def patient(monkeypatch: pytest.MonkeyPatch, script: list[tuple[bytes, int, Address] | int]) -> UdpSocket:
    opened = reading(monkeypatch, script, together=True)
    opened._loop = Clockwork()
    return opened


def test_what_comes_next_waits_as_long_as_who_was_given_the_last_says_and_is_given_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = patient(monkeypatch, [(b"a", 1, A)])
    source, loop = opened._socket, opened._loop
    given: list[list[bytes]] = []
    patience: list[float | None] = [0.5, 0.25, None]

    def take(runs: list[DatagramRun]) -> float | None:
        given.append([data for data, _ in apart(runs)])
        return patience.pop(0)

    opened._on_runs = take
    opened._readable()
    assert not loop.watched
    for seconds, come in ((0.5, [(b"b", 1, A), (b"c", 1, B), (b"d", 1, A)]), (0.25, [(b"e", 1, A)])):
        assert [each for each, _ in loop.due] == [seconds]
        assert not loop.watched
        source.pieces += come
        loop.due.pop()[1]()
    assert loop.watched
    assert not loop.due
    assert given == [[b"a"], [b"b", b"d", b"c"], [b"e"]]


def test_nobody_pauses_where_more_is_there_than_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = patient(monkeypatch, [(b"a", 1, A)] * 513)
    loop = opened._loop
    given: list[int] = []

    def take(runs: list[DatagramRun]) -> float:
        given.append(sum(len(run) for run in runs))
        return 0.5

    opened._on_runs = take
    opened._readable()
    assert loop.watched
    assert not loop.due
    opened._readable()
    assert not loop.watched
    assert given == [512, 1]


def test_a_pause_ends_where_nothing_has_come_or_what_was_given_could_not_be_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = patient(monkeypatch, [(b"a", 1, A)])
    loop = opened._loop
    opened._on_runs = lambda runs: 0.5
    opened._readable()
    loop.due.pop()[1]()  # nothing
    assert loop.watched

    def fail(runs: list[DatagramRun]) -> float:
        raise RuntimeError("told to fail")

    opened._socket.pieces.append((b"b", 1, A))
    opened._readable()
    assert not loop.watched
    opened._on_runs = fail
    opened._socket.pieces.append((b"c", 1, A))
    with pytest.raises(RuntimeError):
        loop.due.pop()[1]()
    assert loop.watched


@pytest.mark.parametrize("within", [True, False])
def test_a_socket_that_is_closed_while_it_pauses_or_by_whom_it_gives_to_is_left_alone(
    within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = patient(monkeypatch, [(b"a", 1, A)])
    loop = opened._loop

    def take(runs: list[DatagramRun]) -> float:
        if within:
            opened.close()
        return 0.5

    opened._on_runs = take
    opened._readable()
    opened.close()
    assert not loop.watched
    assert not loop.due


@pytest.mark.parametrize("wrapped", ["faults", "detour", "multihomed"])
def test_what_lies_between_a_socket_and_its_endpoint_passes_on_what_that_says(wrapped: str) -> None:
    class Inner:
        local_address = A

        def start(self, on_runs: OnRuns, on_unreachable: object) -> None:
            self.on_runs = on_runs

    inner: Any = Inner()
    outer = {
        "faults": lambda: FaultyIO(inner, Faults(random.Random(1)), loop=None),
        "detour": lambda: DetourIO(inner, loop=None),
        "multihomed": lambda: MultihomedIO([inner]),
    }[wrapped]()
    outer.start(lambda runs: 0.125, lambda *_: None)
    assert inner.on_runs(joined([(b"a", B)])) == 0.125


def test_an_error_that_no_queue_explains_ends_the_wake_up_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = reading(monkeypatch, [(b"a", 1, A), errno.ECONNREFUSED, (b"b", 1, A)], together=True)
    assert drained(opened) == [[(b"a", A)], [(b"b", A)]]
