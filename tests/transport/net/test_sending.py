"""Runs on their way out: several datagrams in one call, the way back to one by one, a socket that is full."""

from __future__ import annotations

import errno
import random
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from inbox import FAMILIES, Failing, Inbox

from quicoll_transport.net import offload, udp
from quicoll_transport.net.offload import Offload
from quicoll_transport.net.runs import DatagramRun, apart

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

pytestmark = pytest.mark.loopback
OpenInbox = Callable[..., Inbox]
PLAIN = Offload(sends=False, receives=False)
needs_offload = pytest.mark.skipif(not offload.supported().sends, reason="this system sends datagrams one by one only")


@pytest.fixture(params=["together", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of sending, the one without help of the system everywhere."""
    way: str = request.param
    if way == "one by one":
        monkeypatch.setattr(offload, "supported", lambda: PLAIN)
    elif not offload.supported().sends:
        pytest.skip("this system sends datagrams one by one only")
    return way


def datagrams(count: int, size: int, *, last: int = 0) -> list[bytes]:
    made = [n.to_bytes(2, "big") * (size // 2) for n in range(count)]
    return [*made[:-1], made[-1][: last or size]]


def run_of(data: list[bytes], address: Address) -> DatagramRun:
    return DatagramRun(memoryview(bytearray().join(data)), len(data[0]), address)


def replace_socket(inbox: Inbox, *codes: int, **more: Iterator[int] | list[int]) -> Failing:
    failing = Failing(inbox.socket._socket, codes, **{name: iter(each) for name, each in more.items()})
    inbox.socket._socket = failing
    return failing


@pytest.mark.parametrize("host", FAMILIES)
async def test_a_run_arrives_whole_and_in_order(open_inbox: OpenInbox, host: str, way: str) -> None:
    a, b = open_inbox(host), open_inbox(host)
    data = datagrams(80, 1200, last=700)
    a.socket.send([run_of(data, b.address)])
    assert await b.receive(80) == data


@pytest.mark.parametrize(("size", "most"), [(40, 64), (1452, 45), (8900, 7), (40_000, 1)])
@needs_offload
async def test_a_call_takes_64_datagrams_and_65507_bytes_at_the_most(
    open_inbox: OpenInbox, size: int, most: int
) -> None:
    a, b = open_inbox("127.0.0.1"), open_inbox("127.0.0.1")
    sent = replace_socket(a)
    a.socket.send([run_of(datagrams(2 * most + 1, size), b.address)])
    assert [count for _, count in sent.calls] == [most, most, 1]
    assert all(length <= 65507 for length, _ in sent.calls)
    assert [len(each) for each in await b.receive(2 * most + 1)] == [size] * (2 * most + 1)


async def test_without_help_of_the_system_every_datagram_is_a_call(
    open_inbox: OpenInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "supported", lambda: PLAIN)
    a, b = open_inbox("127.0.0.1"), open_inbox("127.0.0.1")
    sent = replace_socket(a)
    a.socket.send([run_of(datagrams(5, 10), b.address)])
    assert [count for _, count in sent.calls] == [1] * 5


@needs_offload
@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
async def test_a_card_that_cannot_cut_a_run_gets_datagrams_one_by_one_for_good(
    open_inbox: OpenInbox, code: int
) -> None:
    a, b, other = open_inbox("127.0.0.1"), open_inbox("127.0.0.1"), open_inbox("127.0.0.1")
    sent, untouched = replace_socket(a, together=[code] * 3), replace_socket(other)
    data = datagrams(100, 100)
    a.socket.send([run_of(data[:70], b.address)])
    a.socket.send([run_of(data[70:], b.address)])
    assert await b.receive(100) == data
    assert sent.calls == [(100, 1)] * 100
    assert a.socket.lost_unsendable == 0
    assert a.troubles.empty()
    other.socket.send([run_of(data, b.address)])
    assert len(untouched.calls) == 2, "each socket finds out for itself"


@needs_offload
async def test_a_run_that_is_refused_for_another_reason_is_tried_together_again(open_inbox: OpenInbox) -> None:
    a, b = open_inbox("127.0.0.1"), open_inbox("127.0.0.1")
    sent = replace_socket(a, together=[errno.EMSGSIZE] * 3)
    data = datagrams(10, 100)
    a.socket.send([run_of(data, b.address)])
    a.socket.send([run_of(data, b.address)])
    assert await b.receive(20) == data + data
    assert sent.calls == [(100, 1)] * 10 + [(1000, 10)]


@needs_offload
async def test_an_address_that_takes_nothing_does_not_end_sending_together(open_inbox: OpenInbox) -> None:
    """EINVAL is also what the system says of a link-local address without its interface."""
    a, b = open_inbox("127.0.0.1"), open_inbox("127.0.0.1")
    sent = replace_socket(a, *[errno.EINVAL] * (3 + 3 * 4))
    a.socket.send([run_of(datagrams(4, 10), b.address)])
    a.socket.send([run_of(datagrams(4, 10), b.address)])
    assert await b.receive(4) == datagrams(4, 10)
    assert sent.calls == [(40, 4)]
    assert a.socket.lost_unsendable == 4


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOBUFS])
@pytest.mark.parametrize("worked", [0, 1, 2])
async def test_a_run_cut_by_a_full_socket_arrives_complete_and_in_order(
    open_inbox: OpenInbox, way: str, code: int, worked: int
) -> None:
    a, b = open_inbox("127.0.0.1"), open_inbox("127.0.0.1")
    replace_socket(a, *[0] * worked, code)
    data = datagrams(160, 100, last=60)
    memory = bytearray().join(data)
    a.socket.send([DatagramRun(memoryview(memory), 100, b.address)])
    memory[:] = bytes(len(memory))  # it is the carrier's again, whatever waits
    a.socket.send([run_of([b"later"], b.address)])
    assert await b.receive(161) == [*data, b"later"]
    assert b.got.empty()
    assert not a.socket._backlog
    assert a.socket._backlog_bytes == 0
    assert (a.socket.lost_backlog, a.socket.lost_unsendable) == (0, 0)


class HandLoop:
    """A loop that is told when the socket is writable again."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def add_writer(self, number: int, callback: Callable[[], None]) -> None:
        self.waiting = [callback]

    def remove_writer(self, number: int) -> None:
        self.waiting = []

    def call_later(self, delay: float, callback: Callable[[], None]) -> HandLoop:
        self.waiting.append(callback)
        return self

    def call_soon(self, callback: Callable[[], None]) -> HandLoop:
        return self

    def remove_reader(self, number: int) -> None:
        pass

    def cancel(self) -> None:
        pass


class Wire:
    """A socket that takes what it is given, or fails by chance; what went out is in `sent`."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sent: list[tuple[bytes, Address]] = []

    def fileno(self) -> int:
        return 99

    def recvmsg(self, *arguments: int) -> None:
        raise BlockingIOError

    def sendto(self, data: memoryview, address: Address) -> None:
        self._fail(errno.ECONNREFUSED)
        self.sent.append((bytes(data), address))

    def sendmsg(self, pieces: list[memoryview], ancillary: list[tuple[int, int, bytes]], _: int, to: Address) -> None:
        self._fail(errno.ECONNREFUSED, errno.EMSGSIZE)
        size = int.from_bytes(ancillary[0][2], sys.byteorder)
        self.sent += apart([DatagramRun(pieces[0], size, to)])

    def _fail(self, *codes: int) -> None:
        if self.rng.random() < 0.4:
            code = self.rng.choice([errno.EAGAIN, errno.ENOBUFS, *codes])
            raise OSError(code, "by chance")


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_doubled_or_overtaken_however_often_the_socket_is_full(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Also where ICMP errors come up in between, and pieces are too long to go together."""
    rng = random.Random(seed)
    monkeypatch.setattr(offload, "supported", lambda: Offload(sends=bool(seed % 2), receives=False))
    loop = HandLoop()
    opened = udp.UdpSocket("127.0.0.1", 0, loop=loop)
    opened._socket.close()
    wire = opened._socket = Wire(rng)
    given: list[tuple[bytes, Address]] = []
    for n in range(60):
        address = ("192.0.2.1", rng.randrange(1, 3))
        run = run_of(datagrams(rng.randrange(1, 150), 4 + n, last=rng.choice([0, 3])), address)
        given += apart([run])
        opened.send([run])
        run.memory[:] = bytes(len(run.memory))
        for callback in loop.waiting if rng.random() < 0.5 else ():
            callback()
    while opened._backlog:
        assert loop.waiting, "somebody will wake it"
        for callback in list(loop.waiting):
            callback()
    refused = opened.lost_unsendable  # three ICMP errors in a row pass for the datagram's own
    assert opened.lost_backlog == 0
    assert len(wire.sent) == len(given) - refused
    rest = iter(given)
    assert all(any(one == other for other in rest) for one in wire.sent), "in order, none twice"


async def test_the_backlog_is_bounded_in_bytes_and_what_it_loses_is_counted(open_inbox: OpenInbox) -> None:
    a, b = open_inbox("127.0.0.1"), open_inbox("127.0.0.1")
    replace_socket(a, errno.EAGAIN)
    a.socket.send([run_of(datagrams(5000, 1000), b.address)])
    kept = ((4 << 20) - 512) // 1000
    assert [len(run) for run in a.socket._backlog] == [kept]
    assert a.socket.lost_backlog == 5000 - kept
    a.socket.send([run_of([b"small"], b.address)] * 100)
    assert sum(len(run.memory) + 512 for run in a.socket._backlog) <= 4 << 20
    assert a.socket.lost_backlog > 5000 - kept, "a run costs memory beside its bytes"


async def test_what_waits_when_a_socket_is_closed_is_gone_and_nothing_is_sent_any_more(open_inbox: OpenInbox) -> None:
    a, b = open_inbox("127.0.0.1"), open_inbox("127.0.0.1")
    replace_socket(a, errno.EAGAIN)
    a.socket.send([run_of(datagrams(3, 10), b.address)])
    a.socket.close()
    a.socket.send([run_of(datagrams(3, 10), b.address)])
    assert not a.socket._backlog
