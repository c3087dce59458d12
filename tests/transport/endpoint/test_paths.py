"""Endpoints over real sockets of both families: the next address, datagrams that do not fit, routes that are away."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import pytest
from inbox import FAMILIES, needs_recverr, unused
from networks import needs_v6

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.endpoint.core import dial_plan
from quicoll_transport.net.addresses import canonical, format_address
from quicoll_transport.net.runs import DatagramRun, apart
from quicoll_transport.net.trouble import Trouble
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.quic import SessionConfig
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.identity import WORKER, Identity

if TYPE_CHECKING:
    from quicoll_transport.endpoint.core.peer import Peer

MS = 1_000_000
CredentialsOf = Callable[..., Credentials]


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


@pytest.mark.interpreted
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

    a._core._detached = detached
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


@pytest.mark.interpreted
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

    a._core._detached = detached
    assert (
        await refused
        == f"{format_address(first)}: nothing listens there; {format_address(second)}: nothing listens there"
    )
    assert not link._peer.plan.more
    link.close("enough")


@pytest.mark.interpreted
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

    def watched(runs: Sequence[DatagramRun]) -> None:
        sizes.extend(len(data) for data, _ in apart(runs))
        send(runs)

    b._io.send = watched
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
    limits = [c.carrier._plane.sender.mtu.size for e in (a, b) for c in e._core.connections]
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


@pytest.mark.interpreted
@pytest.mark.loopback
async def test_a_route_that_is_away_for_a_while_does_not_count_against_a_link_that_is_up(pair: Pair) -> None:
    a, b = pair.open("a", "127.0.0.1"), pair.open("b", "127.0.0.1")
    link = a.link(b.identity, addresses=[b.address], dial=True)
    await link.wait_up()
    counted: list[int] = []
    link._core.unreachable = lambda now_ns, answer_ns: counted.append(now_ns)
    for _ in range(100):
        a._on_unreachable(b.address, Trouble("the network is unreachable", refused=False))
    assert counted == []
    a._on_unreachable(b.address, Trouble())
    assert len(counted) == 1
    await deliver(link, b)
