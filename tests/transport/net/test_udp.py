"""Real sockets: both families, binding, names, the end."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

import pytest
from inbox import FAMILIES, Failing, Inbox, unused
from networks import has_v6, needs_v6

from quicoll_transport.errors import AddressError
from quicoll_transport.net.addresses import Address, canonical
from quicoll_transport.net.resolver import Resolver
from quicoll_transport.net.trouble import Trouble
from quicoll_transport.net.udp import UdpSocket


@pytest.mark.loopback
@pytest.mark.parametrize("host", FAMILIES)
async def test_datagrams_arrive_with_the_address_of_their_sender(open_inbox: Callable[..., Inbox], host: str) -> None:
    a, b = open_inbox(host), open_inbox(host)
    a.send((b"one", b.address), (b"two", b.address))
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
    four.send((b"4", ("127.0.0.1", port)))
    assert await both.got.get() == (b"4", four.address), "no mapped address outside"
    six.send((b"6", ("::1", port, 0, 0)))
    assert await both.got.get() == (b"6", six.address)
    both.send((b"to 4", four.address), (b"to 6", six.address))
    assert await four.got.get() == (b"to 4", ("127.0.0.1", port))
    assert await six.got.get() == (b"to 6", ("::1", port, 0, 0))


@pytest.mark.loopback
@needs_v6
async def test_v6only_leaves_the_port_of_ipv4_to_others(open_inbox: Callable[..., Inbox]) -> None:
    six = open_inbox("::", v6only=True)
    four = open_inbox("127.0.0.1", port=six.address[1])
    assert four.address[1] == six.address[1]
    six.send((b"x", ("127.0.0.1", 9)))
    _, trouble = await six.troubles.get()
    assert trouble == Trouble("the address family is not available here", refused=False)


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

    monkeypatch.setattr("quicoll_transport.net.binding.socket.socket", Refusing)
    with pytest.raises(AddressError, match=words) as raised:
        UdpSocket("127.0.0.1", 1, loop=asyncio.get_running_loop())
    assert "127.0.0.1:1" in str(raised.value)
    assert isinstance(raised.value.__cause__, OSError)
    assert [each.fileno() for each in opened] == [-1]


@pytest.mark.loopback
async def test_a_closed_socket_says_so_when_started_and_is_silent_otherwise(open_inbox: Callable[..., Inbox]) -> None:
    inbox = open_inbox("127.0.0.1")
    inbox.send((b"x", unused("127.0.0.1")))
    inbox.socket.close()
    inbox.socket.close()
    inbox.send((b"x", ("127.0.0.1", 9)))
    with pytest.raises(AddressError, match="is closed"):
        inbox.socket.start(lambda datagrams: None, lambda address, trouble: None)
    await asyncio.sleep(0)
    assert inbox.troubles.empty()
    assert inbox.socket._again is inbox.socket._telling is None


@pytest.mark.loopback
async def test_closing_with_a_backlog_leaves_no_timer_behind(open_inbox: Callable[..., Inbox]) -> None:
    inbox = open_inbox("127.0.0.1")
    inbox.socket._socket = Failing(inbox.socket._socket, [errno.ENOBUFS])
    inbox.send((b"x", inbox.address))
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
