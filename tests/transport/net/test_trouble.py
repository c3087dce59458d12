"""What the system says of a destination, told under a name and never raised."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from inbox import FAMILIES, Failing, Inbox, needs_recverr, unused
from networks import needs_v6

from quicoll_transport.net.trouble import Trouble


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
    inbox.send((b"anyone?", nobody))
    assert await inbox.troubles.get() == (nobody, Trouble("nothing listens there", refused=True))


@pytest.mark.loopback
@needs_recverr
async def test_what_others_wait_for_goes_out_although_one_port_is_closed(open_inbox: Callable[..., Inbox]) -> None:
    a, b, nobody = open_inbox("127.0.0.1"), open_inbox("127.0.0.1"), unused("127.0.0.1")
    for i in range(20):
        a.send((b"?", nobody), (bytes([i]), b.address))
    assert await b.receive(20) == [bytes([i]) for i in range(20)]
    assert a.socket.lost_unsendable == 0


@pytest.mark.loopback
async def test_an_address_of_a_family_that_the_socket_has_not_is_named(open_inbox: Callable[..., Inbox]) -> None:
    inbox = open_inbox("127.0.0.1")
    inbox.send((b"x", ("2001:db8::1", 9, 0, 0)))
    address, trouble = await inbox.troubles.get()
    assert (address, trouble.cause) == (("2001:db8::1", 9, 0, 0), "the address family is not available here")
    assert not trouble.refused
    assert inbox.socket.lost_unsendable == 1


@pytest.mark.loopback
@needs_v6
async def test_a_scope_without_an_interface_is_trouble_and_not_an_exception(open_inbox: Callable[..., Inbox]) -> None:
    inbox = open_inbox("::")
    inbox.send((b"x", ("fe80::1", 9, 0, 0x7FFFFFFF)))
    _, trouble = await inbox.troubles.get()
    assert not trouble.refused
    assert "network" in trouble.cause or "valid destination" in trouble.cause


@pytest.mark.loopback
@pytest.mark.parametrize("host", FAMILIES)
async def test_a_datagram_too_long_for_the_path_says_what_fits(open_inbox: Callable[..., Inbox], host: str) -> None:
    inbox = open_inbox(host)
    inbox.send((bytes(66_000), inbox.address), (b"short", inbox.address))
    _, trouble = await inbox.troubles.get()
    assert trouble.limit >= 1200
    assert "too long" in trouble.cause
    assert (await inbox.got.get())[0] == b"short"


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
    inbox.socket._socket = Failing(inbox.socket._socket, [code] * 3)
    inbox.send((b"lost", other.address), (b"longer", other.address))
    address, trouble = await inbox.troubles.get()
    assert address == other.address
    assert words in trouble.cause
    assert not trouble.refused
    assert (await other.got.get())[0] == b"longer"
    assert inbox.socket.lost_unsendable == 1


@pytest.mark.loopback
async def test_a_run_to_where_there_is_no_way_is_lost_datagram_by_datagram_and_told_once(
    open_inbox: Callable[..., Inbox],
) -> None:
    a, b = open_inbox("127.0.0.1"), open_inbox("127.0.0.1")
    a.socket._socket = Failing(a.socket._socket, [errno.ENETUNREACH] * (3 + 3 * 10))
    a.send(*[(b"lost", b.address)] * 10)
    _, trouble = await a.troubles.get()
    assert trouble == Trouble("the network is unreachable", refused=False)
    assert a.socket.lost_unsendable == 10
    a.send((b"later", b.address))
    assert await b.receive(1) == [b"later"]
    assert a.troubles.empty()
