"""Addresses, on real sockets: bound, looked up, and dialled one after the other."""

from __future__ import annotations

import socket

import pytest
from endpoint_world import MS, World, calls, exchange

from quicoll_transport.endpoint import EndpointConfig
from quicoll_transport.errors import AddressError, LinkLost
from quicoll_transport.net.addresses import parse_address
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.security.identity import WORKER, Identity

pytestmark = pytest.mark.loopback


async def test_an_occupied_port_is_named(world: World) -> None:
    a = world.open("a")
    with pytest.raises(AddressError, match=f"127.0.0.1:{a.address[1]}: the port is in use"):
        UdpSocket("127.0.0.1", a.address[1], loop=world.loop)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "999.1.1.1", "x" * 300])
async def test_a_host_that_cannot_be_resolved_is_named(world: World, host: str) -> None:
    with pytest.raises(AddressError, match="cannot resolve"):
        UdpSocket(host, 0, loop=world.loop)


async def test_an_address_of_another_machine_cannot_be_bound(world: World) -> None:
    with pytest.raises(AddressError, match=r"cannot listen on 192\.0\.2\.1"):
        UdpSocket("192.0.2.1", 0, loop=world.loop)


async def test_names_are_resolved_when_they_are_dialled(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    link = a.link(b.identity, addresses=[("localhost", b.address[1])], dial=True)
    await link.wait_up()
    assert a._lookups == {}


async def test_a_name_that_cannot_be_resolved_is_the_reason_when_the_link_is_not_reached(world: World) -> None:
    a = world.open("a", config=EndpointConfig(connect_ns=1000 * MS))
    link = a.link(Identity("j", WORKER, "b"), addresses=[("no-such-host.invalid", 1)], dial=True)
    with pytest.raises(LinkLost, match="not reached"):
        await link.wait_up()
    assert "no-such-host.invalid" in link.refusal


async def test_the_next_address_is_tried_when_one_does_not_answer(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = closed.getsockname()
    link = a.link(b.identity, addresses=[nobody, b.address], dial=True)
    await link.wait_up()
    assert link.attempts == 2


@pytest.mark.interpreted
async def test_an_acceptor_may_start_after_its_dialler(world: World) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as reserve:
        reserve.bind(("127.0.0.1", 0))
        address = reserve.getsockname()
    a = world.open("a")
    detached = calls(a._core, "_detached")
    link = a.link(Identity("j", WORKER, "b"), addresses=[address], dial=True)
    await detached.acquire()
    assert "nothing listens there" in link.refusal
    world.open("b", address=address)
    await link.wait_up()


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
async def test_ipv6_works_like_ipv4(world: World) -> None:
    try:
        a, b = world.open("a", address=("::1", 0)), world.open("b", address=("::1", 0))
    except AddressError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    ours, theirs = await world.link(a, b)
    await exchange(ours, theirs, 1, 100_000)


@pytest.mark.parametrize(
    ("text", "pair"),
    [("a.b:1", ("a.b", 1)), ("[::1]:65535", ("::1", 65535)), (" 1.2.3.4:0 ", ("1.2.3.4", 0)), ("host", ("host", 9))],
)
def test_addresses_are_parsed(text: str, pair: tuple[str, int]) -> None:
    assert parse_address(text, default_port=9) == pair


@pytest.mark.parametrize("text", ["", ":1", "a:", "a:b", "a:65536", "a:-1", "a"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError, match="is not host:port, with a port from 0 to 65535"):
        parse_address(text)
