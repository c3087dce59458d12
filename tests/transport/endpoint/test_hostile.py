"""Hostile peers against one endpoint, with an honest link at work all the while. Strangers without a certificate, of a
foreign authority, expired, of another job or role are in test_admission; here are those who abuse the protocol.
The bounds and where each is tested are listed in docs/internals/security.md."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from aioquic.tls import AlertDescription
from endpoint_world import connection_of
from stock_session import StockSession

from quicoll_transport.carrier import CLOSE_GONE, CLOSE_PROTOCOL, CLOSE_REFUSED, Authenticated, Closed
from quicoll_transport.endpoint import Endpoint, EndpointConfig
from quicoll_transport.errors import LinkLost
from quicoll_transport.link.control_stream import encode_control
from quicoll_transport.link.frames import MAX_CONTROL, TAG_SIZE, Header, Hello
from quicoll_transport.net.runs import DatagramRun, apart, joined
from quicoll_transport.quic import SessionConfig
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.identity import COORDINATOR, WORKER, Identity

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

MS = 1_000_000
HOST, HONEST = ("10.0.0.1", 1), ("10.0.0.2", 1)
CredentialsOf = Callable[..., Credentials]


class Net:
    """Datagrams between addresses, each delivered in a later turn of the loop. Anybody may send as anybody."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.hosts: dict[Address, Callable[[list[DatagramRun]], None]] = {}
        self.bytes_to: dict[Address, int] = {}

    def send(self, data: bytes, source: Address, target: Address) -> None:
        self.bytes_to[target] = self.bytes_to.get(target, 0) + len(data)
        self.loop.call_soon(self._deliver, data, source, target)

    def _deliver(self, data: bytes, source: Address, target: Address) -> None:
        if target in self.hosts:
            self.hosts[target](joined([(data, source)]))

    def now(self) -> int:
        return round(self.loop.time() * 1e9)


class FakeIO:
    """An endpoint's socket on a Net."""

    def __init__(self, net: Net, address: Address) -> None:
        self._net = net
        self.local_address = address

    def start(self, on_runs: Any, on_unreachable: Any) -> None:
        self._net.hosts[self.local_address] = on_runs

    def send(self, runs: Sequence[DatagramRun]) -> None:
        for data, target in apart(runs):
            self._net.send(data, self.local_address, target)

    def close(self) -> None:
        self._net.hosts.pop(self.local_address, None)


class Attacker:
    """A client of its own making. `out` sees every datagram that it would send and says what to send instead."""

    def __init__(self, place: Place, credentials: Credentials | None, *, address: Address = ("10.6.6.6", 6)) -> None:
        self.net, self.address = place.net, address
        self.out: Callable[[bytes], list[bytes]] = lambda data: [data]
        self.session = StockSession.client(
            credentials=credentials, config=SessionConfig(), address=HOST, now_ns=self.net.now()
        )
        if credentials is None:
            self.session._quic.configuration.cadata = place.host.credentials.authority_pem
            self.session._quic.tls._cadata = place.host.credentials.authority_pem
        self.authenticated = self.net.loop.create_future()
        self.closed = self.net.loop.create_future()
        self.net.hosts[address] = self._runs

    def listen(self, runs: list[DatagramRun]) -> None:
        """Take datagrams without an answer."""
        for run in runs:
            self.session.receive(run, self.net.now())

    def _runs(self, runs: list[DatagramRun]) -> None:
        self.listen(runs)
        while (event := self.session.next_event()) is not None:
            if isinstance(event, Authenticated):
                self.authenticated.set_result(None)
            elif isinstance(event, Closed) and not self.closed.done():
                self.closed.set_result(event)
        self.flush()

    def flush(self) -> None:
        for data, _ in apart(self.session.datagrams_to_send(self.net.now())):
            for one in self.out(data):
                self.net.send(one, self.address, HOST)

    def hello(self) -> None:
        self.session.send_control(encode_control(Hello(1, 1, 0, 0, 0, (), 0, 0)))
        self.flush()


class Place:
    """The host b, an honest node a, and the link between them."""

    def __init__(self, credentials_of: CredentialsOf) -> None:
        self.net = Net()
        self.credentials_of = credentials_of
        self.endpoints: list[Endpoint] = []

    def open(self, node: str, address: Address, config: EndpointConfig) -> Endpoint:
        made = Endpoint(
            credentials=self.credentials_of(node),
            config=config,
            io=FakeIO(self.net, address),
            loop=self.net.loop,
            incarnation=1,
            authorize=lambda identity: "coordinators may not come here" if identity.role == COORDINATOR else None,
            on_link=lambda link: None,
        )
        self.endpoints.append(made)
        return made

    async def start(self, **settings: Any) -> None:
        settings.setdefault("handshake_ns", 300 * MS)
        self.host = self.open("b", HOST, EndpointConfig(lost_after_ns=30_000 * MS, **settings))
        a = self.open("a", HONEST, EndpointConfig(lost_after_ns=30_000 * MS))
        self.ours = a.link(self.host.identity, addresses=[HOST], dial=True)
        await self.ours.wait_up()
        self.theirs = self.host.links[a.identity]
        self.exchanged = 0

    async def works(self) -> None:
        """The honest link delivers, over the connection that it always had, and nothing else is kept."""
        self.exchanged += 1
        data, memory = random.Random(1).randbytes(50_000), bytearray(50_000)
        tag = self.exchanged.to_bytes(TAG_SIZE, "big")
        received = self.theirs.post(tag, memoryview(memory))
        sent = self.ours.send(tag, memoryview(data))
        await asyncio.gather(sent.future, received.future)
        assert memory == data
        assert self.ours.stats.connections == self.theirs.stats.connections == 1

    def only_the_honest(self) -> None:
        assert list(self.host._core.connections) == [connection_of(self.theirs)]
        assert set(self.host._core.connections.by_cid.values()) == {connection_of(self.theirs)}
        assert self.host._core.connections.strangers == 0


@pytest.fixture
async def place(credentials_of: CredentialsOf) -> AsyncIterator[Place]:
    made = Place(credentials_of)
    yield made
    for endpoint in made.endpoints:
        await endpoint.aclose(timeout=0.0)


def forgotten(place: Place) -> asyncio.Semaphore:
    """Released whenever the host has forgotten a connection."""
    seen, forget = asyncio.Semaphore(0), place.host._core.traffic._forget

    def wrapper(connection: Any) -> None:
        forget(connection)
        seen.release()

    place.host._core.traffic._forget = wrapper
    return seen


# -- slow ------------------------------------------------------------------------------------------------------------


@pytest.mark.interpreted
async def test_an_initial_and_then_silence_is_forgotten_at_the_handshake_deadline(place: Place) -> None:
    await place.start()
    ended, sent = forgotten(place), 0

    def two(data: bytes) -> list[bytes]:
        nonlocal sent
        sent += 1
        return [data] if sent <= 2 else []  # the first Initial, and the one with the token

    slow = Attacker(place, None)
    slow.out = two
    began = place.net.now()
    slow.flush()
    await place.works()
    assert place.host._core.connections.strangers == 1
    await ended.acquire()
    assert place.net.now() - began >= 300 * MS
    place.only_the_honest()
    await place.works()


async def test_an_authenticated_peer_that_says_no_hello_is_closed_at_the_handshake_deadline(place: Place) -> None:
    await place.start()
    slow = Attacker(place, place.credentials_of("d"))
    began = place.net.now()
    slow.flush()
    await slow.authenticated
    await place.works()
    end = await slow.closed
    assert (end.code, end.reason) == (CLOSE_REFUSED, "handshake too slow")
    assert place.net.now() - began >= 300 * MS
    place.only_the_honest()
    await place.works()


# -- lengths ---------------------------------------------------------------------------------------------------------


async def lie(place: Place, tell: Callable[[StockSession], None]) -> tuple[Closed, int]:
    """What a peer that tells this lie after its Hello hears, and the most memory that was taken meanwhile."""
    await place.start()
    liar = Attacker(place, place.credentials_of("d"))
    liar.flush()
    await liar.authenticated
    tracemalloc.start()
    try:
        liar.hello()
        tell(liar.session)
        liar.flush()
        end = await liar.closed
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    await place.works()
    place.only_the_honest()
    return end, peak


async def test_a_header_that_claims_two_to_the_60_bytes_takes_no_memory_and_ends_the_connection(place: Place) -> None:
    header = Header(bytes(TAG_SIZE), 0, 1 << 60, 0).encode()
    end, peak = await lie(place, lambda session: session.start_message(0, header, memoryview(bytes(1000))))
    assert end.code == CLOSE_PROTOCOL
    assert f"message of {1 << 60} bytes is above the limit" in end.reason
    assert peak < 4 << 20


async def test_a_control_message_of_two_to_the_31_bytes_takes_no_memory_and_ends_the_connection(place: Place) -> None:
    end, peak = await lie(place, lambda session: session.send_control((1 << 31).to_bytes(4, "big") + b"x"))
    assert end.code == CLOSE_PROTOCOL
    assert f"control message of {1 << 31} bytes is above the limit of {MAX_CONTROL}" in end.reason
    assert peak < 4 << 20


# -- replayed, spoofed -----------------------------------------------------------------------------------------------


async def test_an_initial_with_its_token_is_worth_nothing_from_another_address(place: Place) -> None:
    await place.start()
    said: list[bytes] = []
    watched = Attacker(place, place.credentials_of("d"))

    def note(data: bytes) -> list[bytes]:
        said.append(data)
        return [data]

    watched.out = note
    watched.flush()
    await watched.authenticated
    kept = len(place.host._core.connections)
    thief, neighbour = ("10.7.7.7", 7), (watched.address[0], 7)
    for data in said:
        for source in (thief, neighbour):
            for _ in range(10):
                fresh = data[:6] + bytes(8) + data[14:] if data[0] & 0x80 else data  # of no connection that is known
                place.net.send(fresh, source, HOST)
    await place.works()
    with_token = said[1]
    for source in (thief, neighbour):
        place.net.send(with_token, source, HOST)
    await watched.closed
    await place.works()
    place.net.bytes_to.pop(thief, None)
    for source in (thief, neighbour):  # its connection is over, so nothing but the token can speak for it
        place.net.send(with_token, source, HOST)
    await place.works()
    assert len(place.host._core.connections) == 1 < kept
    assert thief not in place.net.bytes_to
    place.only_the_honest()
    place.net.send(with_token, watched.address, HOST)  # from its own address too: a token opens one handshake
    await place.works()
    place.only_the_honest()


@pytest.mark.interpreted
@pytest.mark.parametrize("retry", [True, False], ids=["retry", "no retry"])
async def test_a_spoofed_source_is_sent_at_most_three_times_what_it_seemed_to_send(place: Place, retry: bool) -> None:
    await place.start(retry=retry)
    victim = ("10.9.9.9", 9)
    ended = forgotten(place)
    attacker = Attacker(place, None, address=victim)
    del place.net.hosts[victim]
    (first, _), *_ = apart(attacker.session.datagrams_to_send(place.net.now()))
    place.net.send(first, victim, HOST)
    if not retry:
        await ended.acquire()  # probes, and the last words at the deadline, count too
    await place.works()
    factor = place.net.bytes_to[victim] / len(first)
    assert 0 < factor <= (0.25 if retry else 3.0)
    place.only_the_honest()


# -- names and links of others ---------------------------------------------------------------------------------------


async def test_a_node_that_answers_in_the_place_of_another_is_found_out(place: Place) -> None:
    await place.start(connect_ns=500 * MS)
    elsewhere = ("10.0.0.3", 1)
    impostor = place.open("d", elsewhere, EndpointConfig())
    link = place.host.link(Identity("j", WORKER, "e"), addresses=[elsewhere], dial=True)
    with pytest.raises(LinkLost, match="dialled worker/e, found worker/d"):
        await link.wait_up()
    assert impostor.links == {}
    assert "dialled worker/e, found worker/d" in place.host.refused[0]
    await place.works()


async def test_nobody_takes_over_the_link_of_another_by_naming_it(place: Place) -> None:
    await place.start()
    thief = Attacker(place, place.credentials_of("d"))
    thief.flush()
    await thief.authenticated
    theirs = place.theirs._core.local
    thief.session.send_control(encode_control(Hello(1, 1, theirs.incarnation, theirs.link, 0, (), 0, 0)))
    thief.flush()
    end = await thief.closed
    assert (end.code, end.reason) == (CLOSE_GONE, "unknown link")
    place.only_the_honest()
    await place.works()


@pytest.mark.interpreted
async def test_a_copied_certificate_is_worth_nothing_without_its_key(place: Place) -> None:
    """The certificate of the honest node itself, with the key of another member."""
    await place.start()
    copied = replace(place.credentials_of("a"), private_key=place.credentials_of("d").private_key)
    ended, thief = forgotten(place), Attacker(place, copied)
    thief.flush()
    end = await thief.closed
    assert end.code == 0x100 + AlertDescription.decrypt_error
    await ended.acquire()  # QUIC answers for a while what may still come (RFC 9000 section 10.2)
    place.only_the_honest()
    await place.works()
