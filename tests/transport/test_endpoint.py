"""Endpoints on real sockets of the loopback interface: links, messages, failures, refusals, and what is left over."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from quicoll_transport.addresses import Address, parse_address
from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.errors import (
    AddressError,
    ConfigurationError,
    DeadlineExceeded,
    EndpointClosed,
    LinkLost,
    MessageCorrupted,
    MessageRefused,
)
from quicoll_transport.faults import Corrupt, Cut, Datagram, Delay, Delivery, Drop, Duplicate, Faults, Rng
from quicoll_transport.frames import TAG_SIZE, Header, Hello, Ping, checksum, encode_control
from quicoll_transport.identity import COORDINATOR, WORKER, Credentials, Identity
from quicoll_transport.link import LinkState
from quicoll_transport.quic import CLOSE_REFUSED, Closed, ControlData, Session, SessionConfig
from quicoll_transport.udp import UdpSocket

pytestmark = pytest.mark.loopback

MS = 1_000_000
CredentialsOf = Callable[..., Credentials]
PATIENT = EndpointConfig(lost_after_ns=30_000 * MS, connect_ns=30_000 * MS)


def tag(number: int) -> bytes:
    return number.to_bytes(TAG_SIZE, "big")


def payload(number: int, size: int) -> bytearray:
    return bytearray(random.Random(number).randbytes(size))


class World:
    """The endpoints of one test; whatever is still open at its end is closed."""

    def __init__(self, credentials_of: CredentialsOf) -> None:
        self.loop = asyncio.get_running_loop()
        self.credentials_of = credentials_of
        self.endpoints: list[Endpoint] = []
        self.accepted: list[Link] = []
        self.incarnations = 100

    def open(
        self,
        node: str,
        *,
        config: EndpointConfig = PATIENT,
        job: str = "j",
        authority: int = 0,
        address: tuple[str, int] = ("127.0.0.1", 0),
        faults: Faults | None = None,
        incarnation: int | None = None,
        authorize: Callable[[Identity], str | None] = lambda identity: None,
        on_link: Callable[[Link], None] | None = None,
        wall_clock: Callable[[], datetime] | None = None,
    ) -> Endpoint:
        self.incarnations += 1
        more: dict[str, Any] = {} if wall_clock is None else {"wall_clock": wall_clock}
        io = UdpSocket(*address, loop=self.loop)
        made = Endpoint(
            credentials=self.credentials_of(node, job=job, authority=authority),
            config=config,
            io=io,
            loop=self.loop,
            incarnation=self.incarnations if incarnation is None else incarnation,
            authorize=authorize,
            on_link=on_link or self.accepted.append,
            faults=faults,
            **more,
        )
        self.endpoints.append(made)
        return made

    async def link(self, a: Endpoint, b: Endpoint) -> tuple[Link, Link]:
        """Both ends of a link that a dials, up."""
        ours = a.link(b.identity, addresses=[b.address], dial=True)
        await ours.wait_up()
        theirs = b.links[a.identity]
        assert theirs.state is LinkState.UP
        return ours, theirs

    async def pair(self, **options: Any) -> tuple[Link, Link]:
        return await self.link(self.open("a", **options), self.open("b", **options))


@pytest.fixture
async def world(credentials_of: CredentialsOf) -> AsyncIterator[World]:
    made = World(credentials_of)
    yield made
    for opened in made.endpoints:
        await opened.aclose(timeout=0.0)


class Watch:
    """Takes a link over; waits for what it says without polling."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.words: list[bytes] = []
        self.states: list[LinkState] = []
        self._changed = asyncio.Event()
        link.listen(self._app, self._state)

    def _app(self, link: Link, data: bytes) -> None:
        self.words.append(data)
        self._changed.set()

    def _state(self, link: Link) -> None:
        self.states.append(link.state)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def ended(self) -> LinkLost:
        await self.until(lambda: self.link.ended)
        assert self.link.error is not None
        return self.link.error


async def exchange(source: Link, target: Link, number: int, size: int) -> None:
    data, memory = payload(number, size), bytearray(size)
    received = target.post(tag(number), memoryview(memory))
    sent = source.send(tag(number), memoryview(data))
    await asyncio.gather(sent.future, received.future)
    assert memory == data


def vanish(endpoint: Endpoint) -> None:
    """The process of this endpoint is killed: its socket closes, nothing is said."""
    endpoint._io.close()
    endpoint._closed = True
    endpoint._due.stop()


def calls(owner: object, name: str) -> asyncio.Semaphore:
    """A semaphore that is released whenever `owner` has called its method `name`."""
    seen, method = asyncio.Semaphore(0), getattr(owner, name)

    def wrapper(*arguments: object, **options: object) -> object:
        result = method(*arguments, **options)
        seen.release()
        return result

    setattr(owner, name, wrapper)
    return seen


def cut_connection(link: Link) -> None:
    """The QUIC connection dies, the link does not."""
    connection = link.connection
    assert connection is not None
    link._endpoint._fail(connection, 0x7FFF, "cut by the test")


# -- messages --------------------------------------------------------------------------------------------------------


async def test_messages_of_any_size_go_both_ways(world: World) -> None:
    a, b = await world.pair()
    for number, size in enumerate([0, 1, 1000, 65_536, 1 << 20, 8 << 20]):
        await asyncio.gather(exchange(a, b, number, size), exchange(b, a, number, size))
    assert a.stats.bytes_sent == b.stats.bytes_received == a.stats.bytes_received
    assert a.core.drained
    assert b.stats.held_bytes == 0
    assert a.remote_incarnation == world.endpoints[1].incarnation


async def test_many_messages_at_once_all_arrive(world: World) -> None:
    a, b = await world.pair()
    await asyncio.gather(*(exchange(a, b, n, 997 * (n % 40)) for n in range(200)))
    assert a.stats.messages_sent == b.stats.messages_received == 200


async def test_unposted_messages_wait_within_the_credit_and_posted_ones_pass_them(world: World) -> None:
    a, b = await world.pair(config=EndpointConfig(lost_after_ns=30_000 * MS, credit_bytes=1 << 20))
    bodies = [payload(n, 400_000) for n in range(8)]
    sent = [a.send(tag(n), memoryview(data)) for n, data in enumerate(bodies)]
    await exchange(a, b, 100, 3 << 20)
    await asyncio.gather(sent[0].future, sent[1].future)
    assert not any(transfer.future.done() for transfer in sent[2:])
    assert 800_000 <= b.stats.held_peak <= 1 << 20
    memories = [bytearray(400_000) for _ in bodies]
    received = [b.post(tag(n), memoryview(memories[n])) for n in reversed(range(8))]
    await asyncio.gather(*(transfer.future for transfer in [*sent, *received]))
    assert memories == bodies
    assert b.stats.held_bytes == 0


async def test_application_messages_wait_for_their_listener_and_come_in_order(world: World) -> None:
    a, b = await world.pair()
    words = [str(n).encode() for n in range(300)]
    for word in words[:100]:
        a.send_app(word)
    await exchange(a, b, 1, 10)
    watch = Watch(b)
    for word in words[100:]:
        a.send_app(word)
    await watch.until(lambda: len(watch.words) == 300)
    assert watch.words == words


async def test_application_messages_that_nobody_takes_end_the_link(world: World) -> None:
    a, b = await world.pair()
    watch = Watch(a)
    for _ in range(40):
        a.send_app(bytes(250_000))
    await watch.ended()
    assert "nobody here takes" in b.core.cause


async def test_aborted_transfers_leave_nothing_behind(world: World) -> None:
    a, b = await world.pair()
    data = payload(1, 8 << 20)
    sent, received = a.send(tag(1), memoryview(data)), b.post(tag(1), memoryview(bytearray(8 << 20)))
    await exchange(b, a, 2, 10)
    sent.abort()
    received.abort()
    sent.abort()
    assert sent.future.cancelled()
    await exchange(a, b, 3, 1 << 20)
    assert a.core.drained
    assert a.core._outbox.credit_used == 0
    with pytest.raises(DeadlineExceeded, match="the gradient did not end within"):
        await b.post(tag(4), memoryview(bytearray(5))).within(0.0, what="the gradient")


async def test_wrong_size_fails_at_both_ends_and_the_link_goes_on(world: World) -> None:
    a, b = await world.pair()
    received = b.post(tag(1), memoryview(bytearray(99)))
    sent = a.send(tag(1), memoryview(payload(1, 100)))
    for transfer in (sent, received):
        with pytest.raises(MessageRefused, match="100 bytes"):
            await transfer.future
    await exchange(a, b, 2, 1000)


async def test_payload_that_is_corrupted_once_is_sent_again(world: World) -> None:
    faults = Faults(random.Random(1))
    times = iter([True, True, False])

    def flip(view: memoryview) -> None:
        if next(times, False):
            view[5] ^= 1

    faults.payload_fault = flip
    a, b = await world.link(world.open("a"), world.open("b", faults=faults))
    await exchange(a, b, 1, 100_000)
    assert b.stats.corrupt == a.stats.resends == 2


async def test_payload_that_stays_corrupt_fails_at_both_ends_with_the_digests(world: World) -> None:
    faults = Faults(random.Random(1))

    def flip(view: memoryview) -> None:
        view[5] ^= 1

    faults.payload_fault = flip
    a, b = await world.link(world.open("a"), world.open("b", faults=faults))
    received = b.post(tag(1), memoryview(bytearray(100_000)))
    sent = a.send(tag(1), memoryview(payload(1, 100_000)))
    results = await asyncio.gather(sent.future, received.future, return_exceptions=True)
    first, second = results
    assert isinstance(first, MessageCorrupted)
    assert isinstance(second, MessageCorrupted)
    assert (first.expected, first.found) == (second.expected, second.found)
    assert b.stats.corrupt == PATIENT.max_resends + 1
    faults.payload_fault = None
    await exchange(a, b, 2, 1000)


# -- a bad network ---------------------------------------------------------------------------------------------------


class Weather:
    """Loses, doubles, spoils and reorders, each datagram at most one of it."""

    def __init__(self) -> None:
        self.rules = [Drop(0.05), Duplicate(0.05), Corrupt(0.05)]
        self.late = Delay(0, jitter_ns=2 * MS)

    def judge(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        for rule in self.rules:
            if (deliveries := rule.judge(datagram, now_ns, rng)) is not None:
                return deliveries
        return self.late.judge(datagram, now_ns, rng) if rng.random() < 0.2 else None


async def test_all_arrives_right_through_loss_duplication_corruption_and_reordering(world: World) -> None:
    faults = [Faults(random.Random(seed)) for seed in (3, 4)]
    a, b = await world.link(world.open("a", faults=faults[0]), world.open("b", faults=faults[1]))
    installed = [fault.add(Weather()) for fault in faults]
    watch = Watch(b)
    for n in range(50):
        a.send_app(str(n).encode())
    await asyncio.gather(*(exchange(*((a, b) if n % 2 else (b, a)), n, 60_000 * (n % 5)) for n in range(30)))
    await watch.until(lambda: len(watch.words) == 50)
    assert watch.words == [str(n).encode() for n in range(50)]
    assert all(rule.judged > 20 for rule in installed)
    assert a.stats.corrupt == b.stats.corrupt == 0, "what the network spoils, QUIC drops"
    assert a.stats.connections == 1


async def test_a_link_comes_up_through_loss(world: World) -> None:
    faults = Faults(random.Random(11))
    faults.add(Drop(0.2))
    a, b = await world.link(world.open("a", faults=faults), world.open("b"))
    await exchange(a, b, 1, 10_000)


async def test_silence_ends_the_link_at_lost_after_and_not_before(world: World) -> None:
    config = EndpointConfig(lost_after_ns=500 * MS)
    faults = Faults(random.Random(1))
    a, b = await world.link(world.open("a", config=config, faults=faults), world.open("b", config=config))
    watch = Watch(a)
    sent, received = a.send(tag(1), memoryview(payload(1, 100))), a.post(tag(2), memoryview(bytearray(5)))
    await sent.future
    faults.add(Cut())
    cut_at = world.loop.time()
    late = a.send(tag(3), memoryview(payload(3, 100)))
    for transfer in (late, received):
        with pytest.raises(LinkLost, match="silent") as caught:
            await transfer.future
        assert caught.value.peer == "worker/b"
        assert caught.value.silent_for >= 0.5
    assert world.loop.time() - cut_at >= 0.3, "the last heartbeat was heard shortly before the cut"
    await watch.until(lambda: a.ended)
    assert watch.states[-1] is LinkState.LOST
    await Watch(b).ended()


async def test_a_short_cut_only_raises_suspicion(world: World) -> None:
    config = EndpointConfig(lost_after_ns=2000 * MS)
    faults = Faults(random.Random(1))
    a, b = await world.link(world.open("a", config=config, faults=faults), world.open("b", config=config))
    watch = Watch(a)
    with faults.add(Cut()):
        await watch.until(lambda: a.core.suspect)
    await watch.until(lambda: not a.core.suspect)
    assert a.state is LinkState.UP
    await exchange(a, b, 1, 1000)
    assert a.stats.connections == 1


@pytest.mark.parametrize("place", ["poll", "handle_timer", "heard"])
async def test_an_error_of_our_own_over_one_link_ends_that_link_by_name_and_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    a = world.open("a")
    broken, _ = await world.link(a, world.open("b"))
    whole, far = await world.link(a, world.open("d"))

    def fails(*arguments: object) -> None:
        raise KeyError("a table of ours")

    posted = broken.post(tag(1), memoryview(bytearray(10)))
    monkeypatch.setattr(broken.core, place, fails)
    if place == "handle_timer":
        monkeypatch.setattr(broken.core, "next_timer", lambda: 1)
    broken.touch()
    with pytest.raises(LinkLost, match=r"internal error: KeyError\('a table of ours'\)"):
        await posted.future
    assert a.links == {whole.identity: whole}
    await exchange(whole, far, 2, 50_000)


async def test_a_link_so_broken_that_it_cannot_end_is_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, heard = world.open("a"), []
    broken, _ = await world.link(a, world.open("b"))
    whole, far = await world.link(a, world.open("d"))

    def fails(*arguments: object, **more: object) -> None:
        raise KeyError("a table of ours")

    monkeypatch.setattr(world.loop, "call_exception_handler", heard.append)
    for place in ("poll", "lose"):
        monkeypatch.setattr(broken.core, place, fails)
    broken.touch()
    await exchange(whole, far, 2, 50_000)
    assert a.links == {whole.identity: whole}
    assert [type(context["exception"]) for context in heard] == [KeyError]
    monkeypatch.undo()
    broken.close("its core works again")


async def test_a_killed_peer_is_known_from_the_host_long_before_its_silence(world: World) -> None:
    config = EndpointConfig(lost_after_ns=60_000 * MS, connect_ns=60_000 * MS)
    a, _ = await world.pair(config=config)
    watch = Watch(a)
    start = world.loop.time()
    vanish(world.endpoints[1])
    received = a.post(tag(1), memoryview(bytearray(5)))
    sent = a.send(tag(2), memoryview(payload(2, 100)))
    error = await watch.ended()
    assert "listens" in error.cause
    assert world.loop.time() - start < 45, "silence would have taken 60 s"
    for transfer in (received, sent):
        with pytest.raises(LinkLost):
            await transfer.future


async def test_garbage_datagrams_do_no_harm(world: World) -> None:
    seen: list[bytes] = []

    class Record:
        def judge(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
            seen.append(datagram.data)
            return None

    faults = Faults(random.Random(1))
    recording = faults.add(Record())
    a, b = await world.link(world.open("a", faults=faults), world.open("b"))
    await exchange(a, b, 1, 50_000)
    recording.remove()
    rng = random.Random(9)
    target = world.endpoints[1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.bind(("127.0.0.1", 0))
        for batch in range(30):
            for _ in range(100):
                data = bytearray(rng.choice(seen))
                for _ in range(rng.choice([0, 1, 2, 20])):
                    data[rng.randrange(min(len(data), rng.choice([30, 9000])))] = rng.randrange(256)
                if rng.random() < 0.3:
                    data = bytearray(rng.randbytes(rng.randrange(2000)))
                if rng.random() < 0.3:
                    del data[rng.randrange(len(data) + 1) :]
                stranger.sendto(data, target.address)
            await exchange(a, b, 1000 + batch, 10_000)
    assert a.stats.connections == b.stats.connections == 1
    assert a.state is b.state is LinkState.UP
    assert set(target.links) == {world.endpoints[0].identity}
    assert len(target._connections) == 1, "a token is good for one address only"


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
    with pytest.raises(LinkLost, match="restarted"):
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
        if link.state is LinkState.UP and link.connection is not None:
            link.connection.session.send_control(bad)
            link.touch()

    a.listen(lambda link, data: None, spoil)
    spoil(a)
    error = await watch.ended()
    assert "breaks the protocol again and again" in error.cause
    assert b.violations > 5


# -- who may come in -------------------------------------------------------------------------------------------------


class Stranger:
    """A hostile client: it verifies nothing, and speaks before it is asked."""

    def __init__(self, world: World, host: Endpoint, credentials: Credentials | None) -> None:
        self._loop = world.loop
        self._io = UdpSocket("127.0.0.1", 0, loop=world.loop)
        self.session = Session.client(
            credentials=credentials, config=SessionConfig(), address=host.address, now_ns=self._now()
        )
        self.session._quic.configuration.cadata = host.credentials.authority_pem
        self.session._quic.tls._cadata = host.credentials.authority_pem
        self.session.send_control(encode_control(Hello(1, 1, 0, 0, 0, (), 0, 0)))
        self.session.start_message(0, Header(tag(0), 0, 3, checksum(b"abc")).encode(), memoryview(b"abc"))
        self.closed: asyncio.Future[Closed] = world.loop.create_future()
        self.heard: list[Any] = []
        self._io.start(self._datagrams, lambda address: None)
        self.flush()

    def _now(self) -> int:
        return round(self._loop.time() * 1e9)

    def flush(self) -> None:
        self._io.send(self.session.datagrams_to_send(self._now()))

    def _datagrams(self, datagrams: list[tuple[bytes, Any]]) -> None:
        for data, address in datagrams:
            self.session.receive(data, address, self._now())
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
    assert set(host.links) == {honest._endpoint.identity}
    assert len(host._connections) == 1
    assert host._strangers == 0
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


async def test_unfinished_handshakes_are_bounded_and_expire(world: World) -> None:
    host = world.open("b", config=EndpointConfig(max_handshakes=3, handshake_ns=1000 * MS))
    registered, forgotten = calls(host, "_register"), calls(host, "_forget")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flood:
        flood.bind(("127.0.0.1", 0))
        flood.setblocking(False)
        now = round(world.loop.time() * 1e9)

        def knock(session: Session) -> None:
            for data, _ in session.datagrams_to_send(now):
                flood.sendto(data, host.address)

        def stranger() -> Session:
            return Session.client(credentials=None, config=SessionConfig(), address=host.address, now_ns=now)

        for _ in range(3):
            session = stranger()
            knock(session)
            while not session._quic._retry_count:
                session.receive(await world.loop.sock_recv(flood, 65536), host.address, now)
            knock(session)
            await registered.acquire()
        for _ in range(10):
            knock(stranger())
        a, b = await world.link(world.open("a"), host)  # as soon as there is room for it
        await exchange(a, b, 1, 10)
        for _ in range(3):
            await forgotten.acquire()
    assert host._strangers == 0
    assert list(host._connections) == [b.connection]
    assert all(connection is b.connection for connection in host._by_cid.values())


async def test_links_are_bounded(world: World) -> None:
    host = world.open("b", config=EndpointConfig(max_links=1))
    await world.link(world.open("a"), host)
    late = world.open("d", config=EndpointConfig(connect_ns=1000 * MS))
    link = late.link(host.identity, addresses=[host.address], dial=True)
    with pytest.raises(LinkLost, match="no room for another link"):
        await link.wait_up()
    with pytest.raises(ConfigurationError, match="more than 1 links"):
        host.link(Identity("j", WORKER, "e"))


# -- addresses -------------------------------------------------------------------------------------------------------


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
    assert a._dialler.resolving == {}


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


async def test_an_acceptor_may_start_after_its_dialler(world: World) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as reserve:
        reserve.bind(("127.0.0.1", 0))
        address = reserve.getsockname()
    a = world.open("a")
    detached = calls(a, "_detached")
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
    with pytest.raises(AddressError, match="is not host:port"):
        parse_address(text)


# -- misuse and callbacks --------------------------------------------------------------------------------------------


async def test_misuse_is_refused_here(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    with pytest.raises(ConfigurationError, match="no address to dial"):
        a.link(b.identity, dial=True)
    with pytest.raises(ConfigurationError, match="incarnation"):
        world.open("d", incarnation=0)
    await a.aclose()
    with pytest.raises(EndpointClosed):
        a.link(b.identity)


async def test_callbacks_that_raise_are_reported_and_harm_nobody(world: World) -> None:
    reported: list[str] = []
    world.loop.set_exception_handler(lambda loop, context: reported.append(str(context["exception"])))

    def fail(*arguments: object) -> None:
        raise RuntimeError("my own fault")

    def take(link: Link) -> None:
        link.listen(fail, fail)

    a, b = world.open("a"), world.open("b", on_link=take)
    ours, theirs = await world.link(a, b)
    for _ in range(3):
        ours.send_app(b"x")
    await exchange(ours, theirs, 1, 1000)
    await exchange(theirs, ours, 2, 1000)
    assert reported.count("my own fault") >= 4, "UP, and three words"
    assert ours.stats.connections == 1
    ours.close("done")
    await Watch(theirs).until(lambda: theirs.ended)


async def test_a_link_whose_taking_over_raises_is_closed(world: World) -> None:
    reported: list[str] = []
    world.loop.set_exception_handler(lambda loop, context: reported.append(str(context["exception"])))

    def fail(link: Link) -> None:
        raise RuntimeError("no room")

    a, b = world.open("a"), world.open("b", on_link=fail)
    link = a.link(b.identity, addresses=[b.address], dial=True)
    with pytest.raises(LinkLost, match="could not be taken over"):
        await link.wait_up()
    assert reported == ["no room"]
    assert b.links == {}


async def test_callbacks_may_use_the_link_and_end_it(world: World) -> None:
    a, b = await world.pair()
    watch = Watch(a)

    def answer(link: Link, data: bytes) -> None:
        link.send_app(b"re " + data)
        if data == b"2":
            link.close("answered enough")

    b.listen(answer, lambda link: None)
    for word in (b"1", b"2", b"3"):
        a.send_app(word)
    error = await watch.ended()
    assert watch.words[:1] == [b"re 1"]
    assert "answered enough" in error.cause


# -- a peer that does not read, and the end --------------------------------------------------------------------------


async def test_a_peer_that_never_reads_costs_bounded_memory_and_is_lost_in_time(world: World) -> None:
    config = EndpointConfig(lost_after_ns=1000 * MS)
    a, _ = await world.pair(config=config)
    stopped = world.endpoints[1]
    world.loop.remove_reader(stopped._io._socket.fileno())  # type: ignore[attr-defined]
    data = bytearray(64 << 20)
    sent = [a.send(tag(n), memoryview(data)) for n in range(4)]
    sent += [a.send(tag(n), memoryview(data)[: 1 << 19]) for n in range(4, 40)]
    watch = Watch(a)
    worst = 0

    def measure(link: Link) -> None:
        nonlocal worst
        if link.connection is not None:
            streams = link.connection.session._quic._streams.values()
            worst = max(worst, sum(len(stream.sender._buffer) for stream in streams))

    a.listen(lambda link, data: None, lambda link: (measure(link), watch._changed.set()))
    await watch.ended()
    measure(a)
    assert worst < 8 << 20
    results = await asyncio.gather(*(transfer.future for transfer in sent), return_exceptions=True)
    assert all(isinstance(result, LinkLost) for result in results)


async def test_what_was_sent_before_aclose_is_delivered(world: World) -> None:
    a, b = await world.pair()
    watch = Watch(b)
    memory, data = bytearray(2 << 20), payload(1, 2 << 20)
    received, sent = b.post(tag(1), memoryview(memory)), a.send(tag(1), memoryview(data))
    a.send_app(b"last words")
    await world.endpoints[0].aclose(timeout=60.0)
    await asyncio.gather(received.future, sent.future)
    await watch.ended()
    assert memory == data
    assert watch.words == [b"last words"]
    assert "endpoint closed" in b.core.cause


async def test_aclose_does_not_wait_longer_than_it_may_and_may_be_called_twice_and_cancelled(world: World) -> None:
    a, b = await world.pair()
    stuck = a.send(tag(1), memoryview(bytearray(100 << 20)))  # offered; nobody posts
    first = asyncio.ensure_future(world.endpoints[0].aclose(timeout=60.0))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(world.endpoints[0].aclose())
    with pytest.raises(EndpointClosed):
        world.endpoints[0].link(b.identity)
    first.cancel()
    await second
    with pytest.raises(LinkLost, match="endpoint closed"):
        await stuck.future
    assert a.state is LinkState.CLOSED
    waiting = b.send(tag(2), memoryview(bytearray(100 << 20)))
    await world.endpoints[1].aclose(timeout=0.01)
    with pytest.raises(LinkLost):
        await waiting.future


def descriptors() -> int:
    """Open files of this process, 0 where the host does not say."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


async def test_aclose_leaves_no_task_timer_handle_or_descriptor(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: UdpSocket, host: str, port: int) -> list[Address]:
        return await world.loop.create_future()

    monkeypatch.setattr(UdpSocket, "resolve", never)  # the system's resolver may hold a file for as long as it likes
    loop: Any = world.loop
    open_files = descriptors()
    tasks = asyncio.all_tasks()
    faults = Faults(random.Random(1))
    faults.add(Delay(10_000 * MS))
    late = world.open("d", faults=faults)
    late.link(Identity("j", WORKER, "b"), addresses=[("no-such-host.invalid", 1)], dial=True)
    late.link(Identity("j", WORKER, "a"), addresses=[("127.0.0.1", 9)], dial=True)
    a, b = await world.pair()
    await exchange(a, b, 1, 100_000)
    b.post(tag(2), memoryview(bytearray(1)))
    for opened in world.endpoints:
        await opened.aclose(timeout=0.0)
        assert opened._connections == {}
        assert opened._by_cid == {}
        assert opened.links == {}
        assert opened._due == {}
        assert opened._dirty == {}
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks
    assert [handle for handle in loop._scheduled if not handle.cancelled()] == []
    assert len(loop._selector.get_map()) == 1, "only the loop's own wake-up"
    assert descriptors() == open_files


async def test_an_idle_link_wakes_only_for_its_heartbeats(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = await world.pair(config=EndpointConfig(lost_after_ns=800 * MS))
    await exchange(a, b, 1, 100)
    wakes = 0
    original = Endpoint._on_timer

    def count(self: Endpoint) -> None:
        nonlocal wakes
        wakes += 1
        original(self)

    monkeypatch.setattr(Endpoint, "_on_timer", count)
    until, done = world.loop.time() + 0.5, world.loop.create_future()
    world.loop.call_at(until, done.set_result, None)
    await done
    assert a.state is b.state is LinkState.UP
    assert wakes < 100, "five heartbeats of each side, their acknowledgements and probes; not a busy loop"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: EndpointConfig(lost_after_ns=0), "lost_after_ns must be positive, is 0"),
        (lambda: EndpointConfig(connect_ns=-1), "connect_ns must be positive"),
        (lambda: EndpointConfig(handshake_ns=0), "handshake_ns must be positive"),
        (lambda: EndpointConfig(credit_bytes=-1), "credit_bytes must be at least 0"),
        (lambda: EndpointConfig(max_resends=-1), "max_resends must be at least 0"),
        (lambda: EndpointConfig(max_handshakes=0), "max_handshakes must be positive"),
        (lambda: EndpointConfig(max_links=0), "max_links must be positive"),
        (lambda: EndpointConfig(qlog_files=0), "qlog_files must be positive"),
        (lambda: SessionConfig(datagram_bytes=1199), "datagram_bytes must be 0 or 1200 to 65507, is 1199"),
        (lambda: SessionConfig(datagram_bytes=65508), "datagram_bytes must be 0 or 1200 to 65507"),
        (lambda: SessionConfig(window_bytes=0), "window_bytes must be positive"),
        (lambda: SessionConfig(initial_rtt_ns=0), "initial_rtt_ns must be positive"),
        (lambda: SessionConfig(idle_ns=0), "idle_ns must be positive"),
        (lambda: SessionConfig(congestion="bbr9"), "congestion 'bbr9' is not known; take cubic, reno or"),
    ],
)
def test_settings_that_cannot_work_are_refused_where_they_are_made(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()
    assert EndpointConfig(lost_after_ns=None, credit_bytes=0, max_resends=0)
