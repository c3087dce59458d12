"""Addresses in one form, real sockets of both families, every socket fault by name, faulty IO."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from networks import has_v6, needs_v6

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.endpoint.core import dial_plan
from quicoll_transport.errors import AddressError
from quicoll_transport.faults.compose import Chain, Cut, Delay, Drop, Duplicate, Faults, Hold, Rate, Reorder
from quicoll_transport.faults.socket import FaultyIO
from quicoll_transport.net.addresses import (
    Address,
    canonical,
    format_address,
    parse_address,
)
from quicoll_transport.net.resolver import Resolver
from quicoll_transport.net.udp import OnDatagrams, OnUnreachable, Trouble, UdpSocket
from quicoll_transport.quic import SessionConfig
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.identity import WORKER, Identity

if TYPE_CHECKING:
    from quicoll_transport.endpoint.core.peer import Peer

MS = 1_000_000
CredentialsOf = Callable[..., Credentials]


needs_recverr = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells an unconnected socket of ICMP")
FAMILIES = [pytest.param("127.0.0.1", id="v4"), pytest.param("::1", id="v6", marks=needs_v6)]


# -- one form of an address ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "form"),
    [
        (("192.0.2.1", 1), ("192.0.2.1", 1)),
        (("::ffff:192.0.2.1", 1, 0, 0), ("192.0.2.1", 1)),
        (("::FFFF:C000:201", 1), ("192.0.2.1", 1)),
        (("2001:DB8:0::1", 1), ("2001:db8::1", 1, 0, 0)),
        (("2001:db8::1", 1, 77, 0), ("2001:db8::1", 1, 0, 0)),
        (("fe80::1%2", 1, 0, 2), ("fe80::1", 1, 0, 2)),
        (("fe80::1%2", 1), ("fe80::1", 1, 0, 2)),
        (("fe80::1", 1, 0, 2), ("fe80::1", 1, 0, 2)),
        (("host.example", 1), ("host.example", 1)),
    ],
)
def test_an_address_has_one_form(given: Address, form: Address) -> None:
    assert canonical(given) == form
    assert canonical(form) == form


def test_a_zone_that_is_no_interface_is_named() -> None:
    with pytest.raises(AddressError, match="no interface 'nowhere0'"):
        canonical(("fe80::1%nowhere0", 1))


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (("192.0.2.1", 1), "192.0.2.1:1"),
        (("2001:db8::1", 1, 0, 0), "[2001:db8::1]:1"),
        (("fe80::1", 1, 0, 2), "[fe80::1%2]:1"),
        (("host", 1), "host:1"),
    ],
)
def test_an_address_is_shown_as_it_is_written(address: Address, text: str) -> None:
    assert format_address(address) == text
    assert canonical(parse_address(text)) == address


@pytest.mark.parametrize("text", ["::1", "2001:db8::1:80", "1:2:3"])
def test_an_ipv6_address_without_brackets_is_ambiguous_and_refused(text: str) -> None:
    with pytest.raises(AddressError, match="brackets"):
        parse_address(text)


@pytest.mark.parametrize("text", ["::1", "[::1]"])
def test_an_ipv6_address_alone_takes_the_default_port(text: str) -> None:
    assert parse_address(text, default_port=9) == ("::1", 9)


# -- real sockets ----------------------------------------------------------------------------------------------------


class Inbox:
    """A socket and what it was told, awaitable."""

    def __init__(self, host: str, *, v6only: bool = False, port: int = 0) -> None:
        self.socket = UdpSocket(host, port, loop=asyncio.get_running_loop(), v6only=v6only)
        self.address = self.socket.local_address
        self.got: asyncio.Queue[tuple[bytes, Address]] = asyncio.Queue()
        self.troubles: asyncio.Queue[tuple[Address, Trouble]] = asyncio.Queue()
        self.socket.start(self._datagrams, lambda address, trouble: self.troubles.put_nowait((address, trouble)))

    def _datagrams(self, datagrams: list[tuple[bytes, Address]]) -> None:
        for each in datagrams:
            self.got.put_nowait(each)


@pytest.fixture
async def open_inbox() -> AsyncIterator[Callable[..., Inbox]]:
    opened: list[Inbox] = []

    def make(host: str, **settings: bool | int) -> Inbox:
        opened.append(Inbox(host, **settings))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for inbox in opened:
        inbox.socket.close()


def unused(host: str) -> Address:
    """An address where nothing listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as closed:
        closed.bind((host, 0))
        return canonical(closed.getsockname())


@pytest.mark.loopback
@pytest.mark.parametrize("host", FAMILIES)
async def test_datagrams_arrive_with_the_address_of_their_sender(open_inbox: Callable[..., Inbox], host: str) -> None:
    a, b = open_inbox(host), open_inbox(host)
    a.socket.send([(b"one", b.address), (b"two", b.address)])
    assert [await b.got.get(), await b.got.get()] == [(b"one", a.address), (b"two", a.address)]
    assert a.address == canonical(a.address)


@pytest.mark.loopback
@needs_v6
async def test_a_dual_stack_socket_talks_to_both_families_in_canonical_addresses(
    open_inbox: Callable[..., Inbox],
) -> None:
    both, four, six = open_inbox("::"), open_inbox("127.0.0.1"), open_inbox("::1")
    port = both.address[1]
    assert both.address == ("::", port, 0, 0)
    four.socket.send([(b"4", ("127.0.0.1", port))])
    assert await both.got.get() == (b"4", four.address), "no mapped address outside"
    six.socket.send([(b"6", ("::1", port, 0, 0))])
    assert await both.got.get() == (b"6", six.address)
    both.socket.send([(b"to 4", four.address), (b"to 6", six.address)])
    assert await four.got.get() == (b"to 4", ("127.0.0.1", port))
    assert await six.got.get() == (b"to 6", ("::1", port, 0, 0))


@pytest.mark.loopback
@needs_v6
async def test_v6only_leaves_the_port_of_ipv4_to_others(open_inbox: Callable[..., Inbox]) -> None:
    six = open_inbox("::", v6only=True)
    four = open_inbox("127.0.0.1", port=six.address[1])
    assert four.address[1] == six.address[1]
    six.socket.send([(b"x", ("127.0.0.1", 9))])
    _, trouble = await six.troubles.get()
    assert trouble == Trouble("the address family is not available here", refused=False)


@pytest.mark.loopback
@needs_recverr
@pytest.mark.parametrize(
    ("bound", "host"),
    [
        pytest.param("127.0.0.1", "127.0.0.1", id="v4"),
        pytest.param("::1", "::1", id="v6", marks=needs_v6),
        pytest.param("::", "127.0.0.1", id="v4-through-dual", marks=needs_v6),
        pytest.param("::", "::1", id="v6-through-dual", marks=needs_v6),
    ],
)
async def test_a_closed_port_is_told_at_once_on_both_families(
    open_inbox: Callable[..., Inbox], bound: str, host: str
) -> None:
    inbox, nobody = open_inbox(bound), unused(host)
    inbox.socket.send([(b"anyone?", nobody)])
    assert await inbox.troubles.get() == (nobody, Trouble("nothing listens there", refused=True))


@pytest.mark.loopback
@needs_recverr
async def test_what_others_wait_for_goes_out_although_one_port_is_closed(open_inbox: Callable[..., Inbox]) -> None:
    a, b, nobody = open_inbox("127.0.0.1"), open_inbox("127.0.0.1"), unused("127.0.0.1")
    for i in range(20):
        a.socket.send([(b"?", nobody), (bytes([i]), b.address)])
    assert [(await b.got.get())[0] for _ in range(20)] == [bytes([i]) for i in range(20)]
    assert a.socket.lost_unsendable == 0


@pytest.mark.loopback
async def test_an_address_of_a_family_that_the_socket_has_not_is_named(open_inbox: Callable[..., Inbox]) -> None:
    inbox = open_inbox("127.0.0.1")
    inbox.socket.send([(b"x", ("2001:db8::1", 9, 0, 0))])
    address, trouble = await inbox.troubles.get()
    assert (address, trouble.cause) == (("2001:db8::1", 9, 0, 0), "the address family is not available here")
    assert not trouble.refused
    assert inbox.socket.lost_unsendable == 1


@pytest.mark.loopback
@needs_v6
async def test_a_scope_without_an_interface_is_trouble_and_not_an_exception(open_inbox: Callable[..., Inbox]) -> None:
    inbox = open_inbox("::")
    inbox.socket.send([(b"x", ("fe80::1", 9, 0, 0x7FFFFFFF))])
    _, trouble = await inbox.troubles.get()
    assert not trouble.refused
    assert "network" in trouble.cause or "valid destination" in trouble.cause


@pytest.mark.loopback
@pytest.mark.parametrize("host", FAMILIES)
async def test_a_datagram_too_long_for_the_path_says_what_fits(open_inbox: Callable[..., Inbox], host: str) -> None:
    inbox = open_inbox(host)
    inbox.socket.send([(bytes(66_000), inbox.address), (b"short", inbox.address)])
    _, trouble = await inbox.troubles.get()
    assert trouble.limit >= 1200
    assert "too long" in trouble.cause
    assert (await inbox.got.get())[0] == b"short"


class Failing:
    """A socket whose system calls fail as told: it stands for what a test cannot do to the host it runs on."""

    def __init__(self, real: socket.socket, codes: Sequence[int]) -> None:
        self.real = real
        self.codes = list(codes)

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    def sendto(self, data: bytes, address: Address) -> int:
        if self.codes:
            raise OSError(self.codes.pop(0), "told to fail")
        return self.real.sendto(data, address)


@pytest.mark.loopback
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENETUNREACH, "network is unreachable"),
        (errno.EHOSTUNREACH, "host is unreachable"),
        (errno.ENETDOWN, "interface is down"),
        (errno.ENODEV, "interface is gone"),
        (errno.EADDRNOTAVAIL, "has the interface gone"),
        (errno.EACCES, "not permitted"),
        (errno.EPERM, "firewall"),
        (errno.EAFNOSUPPORT, "address family"),
        (errno.EIO, "EIO"),
    ],
)
async def test_each_fault_of_sending_has_its_name(open_inbox: Callable[..., Inbox], code: int, words: str) -> None:
    inbox, other = open_inbox("127.0.0.1"), open_inbox("127.0.0.1")
    inbox.socket._socket = Failing(inbox.socket._socket, [code] * 3)  # type: ignore[assignment]
    inbox.socket.send([(b"lost", other.address), (b"kept", other.address)])
    address, trouble = await inbox.troubles.get()
    assert address == other.address
    assert words in trouble.cause
    assert not trouble.refused
    assert (await other.got.get())[0] == b"kept"
    assert inbox.socket.lost_unsendable == 1


@pytest.mark.loopback
@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOBUFS])
async def test_a_full_socket_keeps_datagrams_in_order_and_sends_them_later(
    open_inbox: Callable[..., Inbox], code: int
) -> None:
    a, b = open_inbox("127.0.0.1"), open_inbox("127.0.0.1")
    failing = Failing(a.socket._socket, [code])
    a.socket._socket = failing  # type: ignore[assignment]
    a.socket.send([(b"0", b.address), (b"1", b.address)])
    a.socket.send([(b"2", b.address)])
    assert [(await b.got.get())[0] for _ in range(3)] == [b"0", b"1", b"2"]
    assert not a.socket._backlog
    assert a.socket.lost_backlog == 0


@pytest.mark.loopback
async def test_the_backlog_is_bounded_and_what_it_loses_is_counted(open_inbox: Callable[..., Inbox]) -> None:
    a, b = open_inbox("127.0.0.1"), open_inbox("127.0.0.1")
    a.socket._socket = Failing(a.socket._socket, [errno.EAGAIN])  # type: ignore[assignment]
    a.socket.send([(b"x", b.address)] * 5000)
    assert len(a.socket._backlog) == 2048
    assert a.socket.lost_backlog == 5000 - 2048


@pytest.mark.loopback
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EADDRINUSE, "the port is in use"),
        (errno.EACCES, "no permission"),
        (errno.EADDRNOTAVAIL, "no address of this host"),
        (errno.EAFNOSUPPORT, "the address family is not available here"),
        (errno.ENODEV, "no such interface"),
        (errno.EMFILE, "too many open files"),
        (errno.EIO, "told to fail"),
    ],
)
async def test_each_fault_of_binding_has_its_name_and_leaves_no_socket(
    monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    opened: list[socket.socket] = []

    class Refusing(socket.socket):
        def __init__(self, *arguments: int) -> None:
            super().__init__(*arguments)
            opened.append(self)

        def bind(self, address: object) -> None:
            raise OSError(code, "told to fail")

    monkeypatch.setattr("quicoll_transport.net.udp.socket.socket", Refusing)
    with pytest.raises(AddressError, match=words) as raised:
        UdpSocket("127.0.0.1", 1, loop=asyncio.get_running_loop())
    assert "127.0.0.1:1" in str(raised.value)
    assert isinstance(raised.value.__cause__, OSError)
    assert [each.fileno() for each in opened] == [-1]


@pytest.mark.loopback
async def test_a_closed_socket_says_so_when_started_and_is_silent_otherwise(open_inbox: Callable[..., Inbox]) -> None:
    inbox = open_inbox("127.0.0.1")
    inbox.socket.send([(b"x", unused("127.0.0.1"))])
    inbox.socket.close()
    inbox.socket.close()
    inbox.socket.send([(b"x", ("127.0.0.1", 9))])
    with pytest.raises(AddressError, match="is closed"):
        inbox.socket.start(lambda datagrams: None, lambda address, trouble: None)
    await asyncio.sleep(0)
    assert inbox.troubles.empty()
    assert inbox.socket._again is inbox.socket._telling is None


@pytest.mark.loopback
async def test_closing_with_a_backlog_leaves_no_timer_behind(open_inbox: Callable[..., Inbox]) -> None:
    inbox = open_inbox("127.0.0.1")
    inbox.socket._socket = Failing(inbox.socket._socket, [errno.ENOBUFS])  # type: ignore[assignment]
    inbox.socket.send([(b"x", inbox.address)])
    again = inbox.socket._again
    assert again is not None
    inbox.socket.close()
    assert again.cancelled()


@pytest.mark.loopback
async def test_a_name_is_looked_up_in_the_families_of_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def resolve(self: Resolver, host: str, port: int, *, family: int) -> list[Address]:
        asked.append(family)
        return [("::1", port, 0, 0), ("127.0.0.1", port)]

    monkeypatch.setattr(Resolver, "resolve", resolve)
    hosts = ["127.0.0.1", *(["::", "::1"] if has_v6() else [])]
    for host in hosts:
        opened = UdpSocket(host, 0, loop=asyncio.get_running_loop())
        assert await opened.resolve("peer", 5) == [("::1", 5, 0, 0), ("127.0.0.1", 5)]
        opened.close()
    assert asked == [socket.AF_INET, socket.AF_UNSPEC, socket.AF_INET6][: len(hosts)]


@pytest.mark.loopback
async def test_a_numeric_address_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Resolver, "resolve", None)
    opened = UdpSocket("127.0.0.1", 0, loop=asyncio.get_running_loop())
    assert await opened.resolve("::ffff:127.0.0.8", 8) == [("127.0.0.8", 8)]
    with pytest.raises(AddressError, match="nowhere0"):
        await opened.resolve("fe80::1%nowhere0", 1)
    opened.close()


# -- endpoints: next address, both families --------------------------------------------------------------------------


class Pair:
    """Endpoints that any node may make links to."""

    def __init__(self, credentials_of: CredentialsOf) -> None:
        self.credentials_of = credentials_of
        self.endpoints: list[Endpoint] = []

    def open(self, node: str, host: str, *, config: EndpointConfig | None = None) -> Endpoint:
        loop = asyncio.get_running_loop()
        endpoint = Endpoint(
            credentials=self.credentials_of(node),
            config=config or EndpointConfig(lost_after_ns=30_000 * MS, connect_ns=30_000 * MS),
            io=UdpSocket(host, 0, loop=loop),
            loop=loop,
            incarnation=len(self.endpoints) + 1,
            authorize=lambda identity: None,
            on_link=lambda link: None,
        )
        self.endpoints.append(endpoint)
        return endpoint


@pytest.fixture
async def pair(credentials_of: CredentialsOf) -> AsyncIterator[Pair]:
    made = Pair(credentials_of)
    yield made
    for endpoint in made.endpoints:
        await endpoint.aclose()


async def deliver(link: Link, peer: Endpoint, *, size: int = 60_000) -> None:
    """One message from the peer's side of the link to ours, checked."""
    data, tag = random.Random(size).randbytes(size), bytes(24)
    theirs = next(iter(peer.links.values()))
    buffer = bytearray(size)
    receiving, sending = link.post(tag, memoryview(buffer)), theirs.send(tag, memoryview(data))
    await asyncio.gather(receiving.future, sending.future)
    assert buffer == data


@pytest.mark.loopback
@needs_v6
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_dual_stack_endpoint_is_reached_over_either_family(pair: Pair, host: str) -> None:
    b, a = pair.open("b", "::"), pair.open("a", host)
    link = a.link(b.identity, addresses=[(host, b.address[1])], dial=True)
    await link.wait_up()
    await deliver(link, b)
    (connection,) = b._core.connections
    assert connection.carrier.peer_address == a.address


@pytest.mark.loopback
@needs_v6
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_dual_stack_endpoint_dials_either_family(pair: Pair, host: str) -> None:
    a, b = pair.open("a", "::"), pair.open("b", host)
    link = a.link(b.identity, addresses=[b.address], dial=True)
    await link.wait_up()
    await deliver(link, b)


@pytest.mark.loopback
@needs_v6
async def test_of_several_addresses_the_ones_of_a_missing_family_are_passed_over(pair: Pair) -> None:
    a, b = pair.open("a", "127.0.0.1"), pair.open("b", "127.0.0.1")
    link = a.link(b.identity, addresses=[("::1", b.address[1]), b.address], dial=True)
    await link.wait_up()
    assert link.attempts == 2


@pytest.mark.loopback
@needs_recverr
@pytest.mark.parametrize("host", FAMILIES)
async def test_the_next_address_is_dialled_at_once_when_one_is_refused(
    pair: Pair, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a machine that stands still for a moment the refusal would come after the attempt was given up for its silence.
    monkeypatch.setattr(dial_plan, "_ATTEMPT_DELAY_NS", 60_000 * MS)
    a, b = pair.open("a", host), pair.open("b", host)
    waits: list[bool] = []
    original = a._core._detached

    def detached(peer: Peer, reason: str) -> None:
        original(peer, reason)
        assert "nothing listens there" in reason
        waits.append(peer.next_dial_ns > a.now_ns())

    a._core._detached = detached  # type: ignore[method-assign]
    link = a.link(b.identity, addresses=[unused(host), unused(host), unused(host), b.address], dial=True)
    await link.wait_up()
    assert link.attempts == 4
    assert waits == [False] * 3
    await deliver(link, b)


@pytest.mark.loopback
@pytest.mark.parametrize("host", FAMILIES)
async def test_an_address_that_stays_silent_is_left_for_the_next(pair: Pair, host: str) -> None:
    patient = EndpointConfig(lost_after_ns=30_000 * MS, connect_ns=30_000 * MS, handshake_ns=30_000 * MS)
    a, b = pair.open("a", host, config=patient), pair.open("b", host)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind((host, 0))
        link = a.link(b.identity, addresses=[canonical(silent.getsockname()), b.address], dial=True)
        await link.wait_up()
        assert link.attempts == 2
        assert link._peer.plan.current == b.address


@pytest.mark.loopback
@needs_recverr
@pytest.mark.parametrize("host", FAMILIES)
async def test_where_nothing_listens_the_reason_names_every_address(pair: Pair, host: str) -> None:
    a = pair.open("a", host)
    first, second = unused(host), unused(host)
    link = a.link(Identity("j", WORKER, "b"), addresses=[first, second], dial=True)
    refused = asyncio.get_running_loop().create_future()
    original = a._core._detached

    def detached(peer: Peer, reason: str) -> None:
        original(peer, reason)
        if link.attempts == 2 and not refused.done():
            refused.set_result(link.refusal)

    a._core._detached = detached  # type: ignore[method-assign]
    assert (
        await refused
        == f"{format_address(first)}: nothing listens there; {format_address(second)}: nothing listens there"
    )
    assert not link._peer.plan.more
    link.close("enough")


@pytest.mark.loopback
async def test_datagrams_too_long_for_the_path_become_shorter(pair: Pair) -> None:
    a, b = (
        pair.open(
            node,
            "127.0.0.1",
            config=EndpointConfig(lost_after_ns=30_000 * MS, session=SessionConfig(datagram_bytes=8000)),
        )
        for node in "ab"
    )
    link = a.link(b.identity, addresses=[b.address], dial=True)
    await link.wait_up()
    for endpoint, peer in ((a, b), (b, a)):
        endpoint._on_unreachable(peer.address, Trouble("too long", refused=False, limit=1300))
    sizes: list[int] = []
    send = b._io.send

    def watched(datagrams: Sequence[tuple[bytes, Address]]) -> None:
        sizes.extend(len(data) for data, _ in datagrams)
        send(datagrams)

    b._io.send = watched  # type: ignore[method-assign]
    await deliver(link, b)
    assert max(sizes) == 1300


SMALL_PATH = """
import asyncio, sys
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.endpoint import Endpoint, EndpointConfig
from quicoll_transport.security.identity import WORKER, Identity
from quicoll_transport.quic import SessionConfig
from quicoll_transport.net.udp import UdpSocket

async def main(host):
    loop = asyncio.get_running_loop()
    made = ephemeral("j", [(WORKER, "a"), (WORKER, "b")])
    config = EndpointConfig(
        lost_after_ns=30 * 10**9, connect_ns=30 * 10**9, session=SessionConfig(datagram_bytes=8000)
    )
    a, b = (
        Endpoint(
            credentials=made[Identity("j", WORKER, node)], config=config, io=UdpSocket(host, 0, loop=loop), loop=loop,
            incarnation=1, authorize=lambda identity: None, on_link=lambda link: None,
        )
        for node in "ab"
    )
    link = a.link(b.identity, addresses=[b.address], dial=True)
    await link.wait_up()
    data = bytes(range(250)) * 1000
    buffer = bytearray(len(data))
    theirs = next(iter(b.links.values()))
    transfers = link.post(bytes(24), memoryview(buffer)), theirs.send(bytes(24), memoryview(data))
    await asyncio.gather(*(transfer.future for transfer in transfers))
    assert buffer == data
    limits = [c._max_datagram_size for e in (a, b) for c in (x.carrier._quic for x in e._core.connections)]
    await a.aclose()
    await b.aclose()
    print("arrived", *limits)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.loopback
@pytest.mark.parametrize(("host", "limit"), [("127.0.0.1", 1372), pytest.param("::1", 1352, marks=needs_v6)])
def test_on_a_path_of_1400_bytes_a_link_comes_up_and_datagrams_fit(host: str, limit: int) -> None:
    """In a network namespace of its own, where the loopback interface has another MTU; nothing is fragmented there."""
    unshare, ip = shutil.which("unshare"), shutil.which("ip")
    if unshare is None or ip is None or os.geteuid() != 0:
        pytest.skip("a network namespace needs root, unshare and ip")
    probe = subprocess.run([unshare, "-n", "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no network namespace here: {probe.stderr.strip()}")
    script = f'"{ip}" link set lo mtu 1400 up && exec "$@"'
    command = [unshare, "-n", "sh", "-c", script, "sh", sys.executable, "-W", "error", "-c", SMALL_PATH, host]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "arrived"
    assert str(limit) in done.stdout.split()[1:], "the side that sent much knows what fits"


@pytest.mark.loopback
async def test_a_route_that_is_away_for_a_while_does_not_count_against_a_link_that_is_up(pair: Pair) -> None:
    a, b = pair.open("a", "127.0.0.1"), pair.open("b", "127.0.0.1")
    link = a.link(b.identity, addresses=[b.address], dial=True)
    await link.wait_up()
    counted: list[int] = []
    link._core.unreachable = counted.append  # type: ignore[method-assign]
    for _ in range(100):
        a._on_unreachable(b.address, Trouble("the network is unreachable", refused=False))
    assert counted == []
    a._on_unreachable(b.address, Trouble())
    assert len(counted) == 1
    await deliver(link, b)


# -- faults between a socket and an endpoint -------------------------------------------------------------------------

PEER = ("192.0.2.7", 7)


class Recorder:
    """An inner IO that keeps what it is given."""

    local_address: Address = ("192.0.2.1", 1)

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False
        self.push: OnDatagrams | None = None
        self.moved = asyncio.Event()

    def start(self, on_datagrams: OnDatagrams, on_unreachable: OnUnreachable) -> None:
        self.push = on_datagrams

    def send(self, datagrams: Sequence[tuple[bytes, Address]]) -> None:
        assert not self.closed
        self.sent.extend(data for data, _ in datagrams)
        self.moved.set()

    def close(self) -> None:
        self.closed = True


class Bench:
    """A FaultyIO on the running loop, between a Recorder and a list of what came in."""

    def __init__(self, **settings: int) -> None:
        self.faults = Faults(random.Random(1))
        self.inner = Recorder()
        self.got: list[bytes] = []
        self.io = FaultyIO(self.inner, self.faults, loop=asyncio.get_running_loop(), **settings)
        self.io.start(self._got, lambda address, trouble: None)

    def _got(self, batch: list[tuple[bytes, Address]]) -> None:
        self.got.extend(data for data, _ in batch)
        self.inner.moved.set()

    def send(self, *numbers: int) -> None:
        self.io.send([(bytes([n]), PEER) for n in numbers])

    def receive(self, *numbers: int) -> None:
        assert self.inner.push is not None
        self.inner.push([(bytes([n]), PEER) for n in numbers])

    async def settle(self) -> None:
        """Until nothing is under way."""
        while any(self.io._queues.values()):
            self.inner.moved.clear()
            await self.inner.moved.wait()


def numbers(data: Sequence[bytes]) -> list[int]:
    return [each[0] for each in data]


async def test_without_rules_datagrams_pass_at_once() -> None:
    bench = Bench()
    bench.send(1, 2)
    bench.receive(3)
    assert (numbers(bench.inner.sent), numbers(bench.got)) == ([1, 2], [3])
    assert bench.io._timer is None


async def test_jitter_keeps_the_order_in_both_directions() -> None:
    bench = Bench()
    bench.faults.add(Delay(0, jitter_ns=3 * MS))
    for i in range(0, 200, 2):
        bench.send(i, i + 1)
        bench.receive(i, i + 1)
    await bench.settle()
    assert numbers(bench.inner.sent) == numbers(bench.got) == list(range(200))
    assert bench.io._timer is None


async def test_order_is_kept_also_behind_what_is_due_while_the_loop_was_late() -> None:
    bench = Bench()
    rule = bench.faults.add(Delay(1))
    bench.send(1)
    rule.remove()
    bench.send(2)
    assert numbers(bench.inner.sent) == [1, 2]


async def test_reordering_happens_where_it_is_asked_for() -> None:
    bench = Bench()
    bench.faults.add(Reorder(0.3, later_ns=2 * MS))
    bench.send(*range(100))
    await bench.settle()
    assert sorted(numbers(bench.inner.sent)) == list(range(100))
    assert numbers(bench.inner.sent) != list(range(100))


async def test_copies_come_after_their_original() -> None:
    bench = Bench()
    bench.faults.add(Chain(Duplicate(1.0, later_ns=MS), Delay(MS)))
    bench.send(1)
    assert bench.inner.sent == []
    await bench.settle()
    assert numbers(bench.inner.sent) == [1, 1]


async def test_a_hold_keeps_both_directions_and_releases_each_in_order() -> None:
    bench = Bench()
    with bench.faults.add(Hold()) as held:
        bench.send(1, 2)
        bench.receive(3, 4)
        await bench.settle()
        assert (bench.inner.sent, bench.got) == ([], [])
        held.release()
        bench.send(5)
        assert numbers(bench.inner.sent) == [1, 2, 5], "what was held goes before what comes now"
        await bench.settle()
        assert numbers(bench.got) == [3, 4]


async def test_leaving_the_block_of_a_hold_delivers_without_anything_else_happening() -> None:
    bench = Bench()
    with bench.faults.add(Hold()):
        bench.send(1)
        bench.receive(2)
    await bench.settle()
    assert (numbers(bench.inner.sent), numbers(bench.got)) == ([1], [2])


async def test_a_release_inside_a_receive_does_not_enter_the_receiver_twice() -> None:
    bench = Bench()
    held = bench.faults.add(Hold())
    bench.receive(1)
    depth: list[int] = []
    active = 0

    def receive(batch: list[tuple[bytes, Address]]) -> None:
        nonlocal active
        active += 1
        depth.append(active)
        held.release()
        bench.send(9)
        bench.inner.moved.set()
        active -= 1

    bench.io._on_datagrams = receive
    bench.faults.add(Drop(0.0))
    held.release()
    bench.send(8)
    await bench.settle()
    assert depth == [1]


async def test_closing_sends_what_is_under_way_and_leaves_nothing_behind() -> None:
    bench = Bench()
    hold = bench.faults.add(Cut(outgoing=False))
    bench.faults.add(Delay(3_600_000 * MS, jitter_ns=MS))
    bench.send(1, 2, 3)
    timer = bench.io._timer
    assert timer is not None
    hold.remove()
    bench.receive(4)
    bench.io.close()
    bench.io.close()
    assert numbers(bench.inner.sent) == [1, 2, 3], "it had left here"
    assert bench.got == [], "nothing is told after the close"
    assert bench.inner.closed
    assert bench.io._timer is None
    assert bench.faults.wake is None
    bench.send(5)
    bench.receive(6)
    assert (numbers(bench.inner.sent), bench.got) == ([1, 2, 3], [])


async def test_what_a_hold_keeps_is_gone_with_the_close() -> None:
    bench = Bench()
    held = bench.faults.add(Hold())
    bench.send(1)
    bench.io.close()
    held.remove()
    await asyncio.sleep(0)
    assert bench.inner.sent == []


@pytest.mark.parametrize("settings", [{"limit": 10}, {"limit_bytes": 10}])
async def test_what_is_under_way_is_bounded(settings: dict[str, int]) -> None:
    bench = Bench(**settings)
    bench.faults.add(Delay(3_600_000 * MS))
    bench.send(*range(30))
    assert bench.io.overflowed == 20
    bench.io.close()
    assert numbers(bench.inner.sent) == list(range(10))


async def test_a_slow_line_serialises_on_the_loops_clock() -> None:
    bench = Bench()
    bench.faults.add(Rate(1000, queue_bytes=8))  # 1 ms a byte
    bench.send(*range(20))
    assert len(bench.io._queues[True]) == 8
    due = sorted(entry[0] for entry in bench.io._queues[True])
    assert [later - earlier for earlier, later in pairwise(due)] == [MS] * 7
    await bench.settle()
    assert numbers(bench.inner.sent) == list(range(8))
