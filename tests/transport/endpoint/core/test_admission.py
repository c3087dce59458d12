"""The side that is dialled, on real sockets: which connection belongs to which link, and who may come in at all."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from endpoint_world import (
    MS,
    Watch,
    World,
    calls,
    connection_of,
    cut_connection,
    endpoint_of,
    exchange,
    session_of,
    vanish,
)
from link_pair import payload, tag
from stock_session import StockSession

from quicoll_transport.carrier import CLOSE_REFUSED, Closed, ControlData
from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.errors import ConfigurationError, LinkLost
from quicoll_transport.link.control_stream import encode_control
from quicoll_transport.link.core import LinkState
from quicoll_transport.link.frames import Header, Hello, Ping, checksum
from quicoll_transport.net.runs import DatagramRun, apart
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.quic import SessionConfig
from quicoll_transport.security.identity import COORDINATOR, WORKER, Identity

if TYPE_CHECKING:
    from quicoll_transport.security.credentials import Credentials

pytestmark = pytest.mark.loopback


# -- connections come and go -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["dialler", "acceptor"])
async def test_a_link_resumes_over_a_new_connection_exactly_once(world: World, who: str) -> None:
    a, b = await world.pair()
    watch = Watch(b)
    data, memory = payload(1, 6 << 20), bytearray(6 << 20)
    received, sent = b.post(tag(1), memoryview(memory)), a.send(tag(1), memoryview(data))
    words = [str(n).encode() for n in range(60)]
    for n, word in enumerate(words):
        a.send_app(word)
        if n % 20 == 10:
            await exchange(b, a, 100 + n, 100)
            cut_connection(a if who == "dialler" else b)
    await asyncio.gather(received.future, sent.future)
    await watch.until(lambda: len(watch.words) == 60)
    assert memory == data
    assert watch.words == words
    assert b.stats.messages_received == 1
    assert a.stats.connections > 1
    assert LinkState.DOWN in watch.states or who == "dialler"
    assert a.state is b.state is LinkState.UP


async def test_a_restarted_peer_ends_the_old_link_and_gets_a_new_one(world: World) -> None:
    _, b = await world.pair()
    pending = b.post(tag(1), memoryview(bytearray(10)))
    first = world.endpoints[0]
    vanish(first)
    again = world.open("a")
    fresh, theirs = await world.link(again, world.endpoints[1])
    # A packet of b's may have been under way to the old socket, and the kernel's answer to it comes first then.
    with pytest.raises(LinkLost, match=r"restarted|nothing listens"):
        await pending.future
    assert theirs is not b
    assert theirs.remote_incarnation == again.incarnation
    await exchange(fresh, theirs, 1, 1000)
    await exchange(theirs, fresh, 2, 1000)


async def test_a_restarted_acceptor_ends_the_old_link_of_the_dialler(world: World) -> None:
    a, _ = await world.pair()
    watch, address = Watch(a), world.endpoints[1].address
    vanish(world.endpoints[1])
    again = world.open("b", address=address)
    cut_connection(a)  # or ICMP would; the redial meets somebody who does not know the link
    error = await watch.ended()
    assert "unknown link" in error.cause
    fresh, theirs = await world.link(world.endpoints[0], again)
    await exchange(fresh, theirs, 1, 10)


async def test_a_stale_incarnation_is_refused_while_the_newer_one_goes_on(world: World) -> None:
    b = world.open("b")
    newer, theirs = await world.link(world.open("a", incarnation=50), b)
    stale = world.open("a", incarnation=49)
    lost = stale.link(b.identity, addresses=[b.address], dial=True)
    with pytest.raises(LinkLost, match="a later process of this node is here"):
        await lost.wait_up()
    await exchange(newer, theirs, 1, 1000)
    assert theirs.stats.connections == 1


async def test_where_both_sides_dial_there_is_one_link(world: World) -> None:
    for _ in range(5):
        a, b = world.open("a"), world.open("b")
        ours = a.link(b.identity, addresses=[b.address], dial=True)
        theirs = b.link(a.identity, addresses=[a.address], dial=True)
        await asyncio.gather(ours.wait_up(), theirs.wait_up())
        await asyncio.gather(exchange(ours, theirs, 1, 100_000), exchange(theirs, ours, 1, 100_000))
        assert (a.links[b.identity], b.links[a.identity]) == (ours, theirs)
        assert ours.state is theirs.state is LinkState.UP


async def test_an_orderly_close_is_told_at_once(world: World) -> None:
    a, b = await world.pair()
    watch = Watch(b)
    waiting = b.post(tag(1), memoryview(bytearray(1)))
    a.close("had enough")
    error = await watch.ended()
    assert "had enough" in error.cause
    with pytest.raises(LinkLost):
        await waiting.future
    assert a.state is LinkState.CLOSED
    assert b.state is LinkState.LOST
    with pytest.raises(LinkLost, match="had enough"):
        await a.wait_up()
    again, _ = await world.link(world.endpoints[0], world.endpoints[1])
    assert again is not a


async def test_a_peer_that_spoils_connection_after_connection_loses_its_link(world: World) -> None:
    a, b = await world.pair()
    watch = Watch(b)
    bad = encode_control(Ping(1))[:-1] + b"\xc1"  # 0xc1 is no msgpack

    def spoil(link: Link) -> None:
        if link.state is LinkState.UP and connection_of(link) is not None:
            session_of(link).send_control(bad)
            link._touch()

    a.listen(lambda link, data: None, spoil)
    spoil(a)
    error = await watch.ended()
    assert "breaks the protocol again and again" in error.cause
    assert b._peer.violations > 5


# -- who may come in -------------------------------------------------------------------------------------------------


class Stranger:
    """A hostile client: it verifies nothing, and speaks before it is asked."""

    def __init__(self, world: World, host: Endpoint, credentials: Credentials | None) -> None:
        self._loop = world.loop
        self._io = UdpSocket("127.0.0.1", 0, loop=world.loop)
        self.session = StockSession.client(
            credentials=credentials, config=SessionConfig(), address=host.address, now_ns=self._now()
        )
        self.session._quic.configuration.cadata = host.credentials.authority_pem
        self.session._quic.tls._cadata = host.credentials.authority_pem
        self.session.send_control(encode_control(Hello(1, 1, 0, 0, 0, (), 0, 0)))
        self.session.start_message(0, Header(tag(0), 0, 3, checksum(b"abc")).encode(), memoryview(b"abc"))
        self.closed: asyncio.Future[Closed] = world.loop.create_future()
        self.heard: list[Any] = []
        self._io.start(self._runs, lambda address: None)
        self.flush()

    def _now(self) -> int:
        return round(self._loop.time() * 1e9)

    def flush(self) -> None:
        self._io.send(self.session.datagrams_to_send(self._now()))

    def _runs(self, runs: list[DatagramRun]) -> None:
        for run in runs:
            self.session.receive(run, self._now())
        while (event := self.session.next_event()) is not None:
            self.heard.append(event)
            if isinstance(event, Closed):
                self.closed.set_result(event)
        self.flush()

    def close(self) -> None:
        self._io.close()


REFUSALS: list[tuple[str, dict[str, Any] | None, str]] = [
    ("no certificate", None, "sent no certificate"),
    ("foreign authority", {"node": "d", "authority": 1}, "not signed by an authority that we trust"),
    ("wrong job", {"node": "d", "job": "k"}, "is for job 'k', not 'j'"),
    ("expired", {"node": "d"}, "expired at"),
    ("stolen node name", {"node": "a", "authority": 1}, "not signed by an authority that we trust"),
    ("wrong role", {"node": "c"}, "coordinators may not come here"),
    ("authorization fails", {"node": "d"}, "its authorization failed"),
]


@pytest.mark.parametrize(("case", "who", "reason"), REFUSALS, ids=[case for case, _, _ in REFUSALS])
async def test_strangers_are_refused_with_the_reason_in_our_log_only_while_honest_links_go_on(
    world: World, case: str, who: dict[str, Any] | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    later = timedelta()

    def authorize(identity: Identity) -> str | None:
        if case == "authorization fails" and identity.node == "d":
            raise RuntimeError("database is away")
        return "coordinators may not come here" if identity.role == COORDINATOR else None

    host = world.open("b", authorize=authorize, wall_clock=lambda: datetime.now(UTC) + later)
    if case == "wrong job":
        other = world.credentials_of("d", job="k").trust
        host.credentials = replace(host.credentials, trust=(*host.credentials.trust, *other))
    honest, theirs = await world.link(world.open("a"), host)
    if case == "expired":
        later = timedelta(days=2)
    stranger = Stranger(world, host, None if who is None else world.credentials_of(**who))
    closed = await stranger.closed
    stranger.close()
    assert (closed.code, closed.reason) == (CLOSE_REFUSED, "refused"), "the stranger does not learn why"
    assert len(host.refused) == 1
    assert reason in host.refused[0]
    assert reason in caplog.text
    assert not any(isinstance(event, ControlData) for event in stranger.heard)
    assert set(host.links) == {endpoint_of(honest).identity}
    assert len(host._core.connections) == 1
    assert host._core.connections.strangers == 0
    await exchange(honest, theirs, 1, 1000)


async def test_a_dialler_refuses_a_node_that_is_not_the_one_it_dialled(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = world.open("a", config=EndpointConfig(connect_ns=1000 * MS)), world.open("b")
    link = a.link(Identity("j", WORKER, "d"), addresses=[b.address], dial=True)
    with pytest.raises(LinkLost, match=r"not reached within 1\.0 s .*dialled worker/d, found worker/b"):
        await link.wait_up()
    assert "dialled worker/d, found worker/b" in a.refused[0]
    assert "dialled worker/d, found worker/b" in caplog.text
    assert b.links == {}


async def test_a_dialler_that_is_refused_hears_so_and_tries_again_until_its_deadline(world: World) -> None:
    calls: list[Identity] = []
    answers = iter(["not yet", "not yet"])

    def authorize(identity: Identity) -> str | None:
        calls.append(identity)
        return next(answers, None)

    b = world.open("b", authorize=authorize)
    a, _ = await world.link(world.open("a"), b)
    assert len(calls) == 3
    assert a.refusal == ""
    late = world.open("d", config=EndpointConfig(connect_ns=1000 * MS))
    answers = iter(["never"] * 99)
    link = late.link(b.identity, addresses=[b.address], dial=True)
    with pytest.raises(LinkLost, match=r"not reached within 1\.0 s \(refused: refused\)"):
        await link.wait_up()


@pytest.mark.interpreted
async def test_unfinished_handshakes_are_bounded_and_expire(world: World) -> None:
    host = world.open("b", config=EndpointConfig(max_handshakes=3, handshake_ns=1000 * MS))
    registered, forgotten = calls(host._core.traffic, "register"), calls(host._core.traffic, "_forget")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flood:
        flood.bind(("127.0.0.1", 0))
        flood.setblocking(False)
        now = round(world.loop.time() * 1e9)
        for _ in range(13):
            stranger = StockSession.client(credentials=None, config=SessionConfig(), address=host.address, now_ns=now)
            for data, _ in apart(stranger.datagrams_to_send(now)):
                flood.sendto(data, host.address)
            await registered.acquire()
            assert host._core.connections.strangers <= 3
        a, b = await world.link(world.open("a"), host)  # which takes the place of the oldest
        await exchange(a, b, 1, 10)
        for _ in range(13):
            await forgotten.acquire()
    assert host._core.connections.strangers == 0
    assert list(host._core.connections) == [connection_of(b)]
    assert all(connection is connection_of(b) for connection in host._core.connections.by_cid.values())


async def test_links_are_bounded(world: World) -> None:
    host = world.open("b", config=EndpointConfig(max_links=1))
    await world.link(world.open("a"), host)
    late = world.open("d", config=EndpointConfig(connect_ns=1000 * MS))
    link = late.link(host.identity, addresses=[host.address], dial=True)
    with pytest.raises(LinkLost, match="no room for another link"):
        await link.wait_up()
    with pytest.raises(ConfigurationError, match="more than 1 links"):
        host.link(Identity("j", WORKER, "e"))
