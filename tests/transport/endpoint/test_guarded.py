"""Endpoints under floods, on a network in memory and a virtual clock: an honest link works, and newcomers come in.

`guard` has the buckets, test_guard their arithmetic; here is what they are for. Bounds: docs/internals/security.md.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import pytest
from aioquic import tls
from aioquic._buffer import Buffer
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicProtocolVersion
from depth import deep
from endpoint_world import cut_connection, session_of
from quicoll_fuzz.hostile import Hostile, Tally
from quicoll_fuzz.virtual import MemoryIO, Net, VirtualLoop, run_virtually, today
from stock_session import StockSession

from quicoll_transport.carrier import CLOSE_PROTOCOL
from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.errors import ConfigurationError, DeadlineExceeded, MessageRefused
from quicoll_transport.events import ConnectionDown, TransportEvent
from quicoll_transport.link import outbox
from quicoll_transport.link.control_stream import encode_control
from quicoll_transport.link.frames import TAG_SIZE, Header, Ping, Pong
from quicoll_transport.quic import SessionConfig
from quicoll_transport.security.limits import GuardConfig, PaceConfig

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.security.credentials import Credentials
    from quicoll_transport.security.identity import Identity

log = logging.getLogger("quicoll.tests")

MS = 1_000_000
HOST, HONEST, NEWCOMER, ENEMY = ("10.0.0.1", 1), ("10.0.0.2", 1), ("10.0.0.3", 1), ("10.6.6.6", 6)
FLOOD = int(os.environ.get("QUICOLL_TEST_FLOOD", "10000"))
CredentialsOf = Callable[..., "Credentials"]
Run = Callable[..., None]


class World:
    """The host b, an honest node a with a link to it, and whoever else a test brings."""

    def __init__(self, loop: VirtualLoop, credentials_of: CredentialsOf, settings: dict[str, Any]) -> None:
        self.loop = loop
        self.net = Net(loop)
        self.credentials_of = credentials_of
        self.events: list[TransportEvent] = []
        self.endpoints: list[Endpoint] = []
        self.exchanged = 0
        self.sent = 0  # bytes that left the host
        self.host = self.open("b", HOST, observer=self.events.append, **settings)
        self.honest = self.open("a", HONEST)

    def open(self, node: str, address: Address, *, observer: Any = None, **settings: Any) -> Endpoint:
        made = Endpoint(
            credentials=self.credentials_of(node),
            config=EndpointConfig(lost_after_ns=20_000 * MS, connect_ns=20_000 * MS, **settings),
            io=MemoryIO(self.net, address),
            loop=self.loop,
            incarnation=1,
            authorize=lambda identity: None,
            on_link=lambda link: None,
            observer=observer,
            wall_clock=today,
        )
        self.endpoints.append(made)
        return made

    async def start(self) -> None:
        self.ours = await self.join(self.honest)
        self.theirs = self.host.links[self.honest.identity]

    async def join(self, endpoint: Endpoint) -> Link:
        link = endpoint.link(self.host.identity, addresses=[HOST], dial=True)
        await link.wait_up()
        return link

    async def works(self, *, connections: int = 1) -> None:
        """The honest link delivers, over the connection that it always had."""
        self.exchanged += 1
        data, memory = random.Random(self.exchanged).randbytes(20_000), bytearray(20_000)
        tag = self.exchanged.to_bytes(TAG_SIZE, "big")
        received = self.theirs.post(tag, memoryview(memory))
        sent = self.ours.send(tag, memoryview(bytearray(data)))
        async with asyncio.timeout(2):
            await asyncio.gather(sent.future, received.future)
        assert memory == data
        assert self.ours.stats.connections == connections

    async def enemy(self, *, config: SessionConfig | None = None) -> Hostile:
        """A member that is past its Hello and says whatever the test wants."""
        made = Hostile(
            net=self.net, address=ENEMY, target=HOST, credentials=self.credentials_of("d"), trust=b"", tally=Tally(),
            rng=random.Random(1), lies="nothing", identity=(1, 1), config=config,
        )  # fmt: skip
        await asyncio.sleep(0.02)
        made.hello()
        made.pump()
        await asyncio.sleep(0.02)
        assert len(self.host.links) == 2
        return made

    def downs(self) -> list[tuple[int, str]]:
        """How connections of the enemy ended here."""
        ends = [event for event in self.events if isinstance(event, ConnectionDown)]
        assert all(event.peer == "worker/d" for event in ends), "only the enemy's"
        return [(event.code, event.reason) for event in ends]


@pytest.fixture
def run(virtual_credentials_of: CredentialsOf, request: pytest.FixtureRequest) -> Run:
    """run(test, **settings of the host): the test in a world on a virtual clock."""

    def run(test: Callable[[World], Coroutine[Any, Any, None]], **settings: Any) -> None:
        async def main(loop: VirtualLoop) -> None:
            world = World(loop, virtual_credentials_of, settings)
            try:
                async with asyncio.timeout(1000):
                    await world.start()
                    await test(world)
            finally:
                for endpoint in reversed(world.endpoints):
                    await endpoint.aclose()

        run_virtually(main, seed=request.node.name)

    return run


class Forge:
    """First datagrams by the thousand: the same ClientHello under a new connection id and token each time."""

    def __init__(self) -> None:
        self._rng = random.Random("forge")
        session = StockSession.client(
            credentials=None, config=SessionConfig(datagram_bytes=1200), address=HOST, now_ns=10**9
        )
        quic: Any = session._quic
        (hello,) = (bytes(stream.sender._buffer) for stream in quic._crypto_streams.values() if stream.sender._buffer)
        frame = Buffer(capacity=len(hello) + 16)
        frame.push_uint_var(6)  # CRYPTO
        frame.push_uint_var(0)
        frame.push_uint_var(len(hello))
        frame.push_bytes(hello)
        self._frame = frame.data
        self._source = session.cids[0]

    def initial(self, cid: bytes, token: bytes = b"") -> bytes:
        head = Buffer(capacity=300)
        head.push_uint8(0xC3)
        head.push_uint32(QuicProtocolVersion.VERSION_1)
        for one in (cid, self._source):
            head.push_uint8(len(one))
            head.push_bytes(one)
        head.push_uint_var(len(token))
        head.push_bytes(token)
        size = 1200 - head.tell() - 2
        head.push_uint16(0x4000 | size)
        head.push_uint32(0)
        crypto = CryptoPair()
        crypto.setup_initial(cid, is_client=True, version=QuicProtocolVersion.VERSION_1)
        return crypto.encrypt_packet(head.data, self._frame.ljust(size - 4 - 16, b"\0"), 0)

    def answered(self, world: World, address: Address) -> bytes:
        """What a source sends that has got its Retry."""
        cid = self._rng.randbytes(8)
        assert world.host._gate._tokens is not None
        token = world.host._gate._tokens.create_token(
            address=address,
            original_destination_connection_id=self._rng.randbytes(8),
            retry_source_connection_id=cid,
            now=world.loop.now,
        )
        return self.initial(cid, token)


def enemy_identity(world: World) -> Identity:
    return world.credentials_of("d").identity


def source(number: int) -> Address:
    return (f"10.{100 + (number >> 16)}.{number >> 8 & 255}.{number & 255}", 1000)


# -- strangers -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(60 + FLOOD / 100)
def test_ten_thousand_half_open_handshakes_neither_stop_the_honest_link_nor_keep_newcomers_out(run: Run) -> None:
    """Each of a source of its own that has shown its address, 4000 a second. QUICOLL_TEST_FLOOD=100000 sends more."""
    forge = Forge()

    async def test(world: World) -> None:
        newcomer, joined, worst = world.open("d", NEWCOMER), None, 0
        for number in range(FLOOD):
            world.net.inject(forge.answered(world, source(number)), source(number), HOST)
            if number % 40 == 39:
                await asyncio.sleep(0.01)
                worst = max(worst, world.host._core.connections.strangers)
            if number % 1000 == 999:
                await world.works()
            if number == FLOOD // 2:
                joined = world.loop.create_task(world.join(newcomer))
        assert worst == 512, "the table was full, and never fuller"
        waiting = [one.carrier._handshake._quic for one in world.host._core.connections if one.identity is None]
        assert {quic.tls.state for quic in waiting} == {tls.State.SERVER_EXPECT_CERTIFICATE}, "each was taken seriously"
        door = world.host._core.admission.door
        assert door.displaced > 0
        allowed = 256 + 150 * (FLOOD / 4000 + 1) * 1.2
        assert worst <= FLOOD - door.refused <= allowed, "CPU for so many handshakes and no more"
        assert joined is not None
        async with asyncio.timeout(10):
            await joined
        await world.works()
        await asyncio.sleep(4)
        assert world.host._core.connections.strangers == 0
        assert len(world.host._core.connections) == 2
        assert door.remembered <= 4096 + 2

    run(test)


@pytest.mark.slow
def test_half_open_handshakes_take_bounded_memory_and_expire(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Traced: what EndpointConfig says of a place holds. --log-cli-level=INFO shows the figures."""
    forge, places, total = Forge(), 64, deep(250, 400)
    caplog.set_level(logging.WARNING, logger="quicoll.transport")  # what was logged is kept by whoever runs this
    caplog.set_level(logging.WARNING, logger="quic")

    async def test(world: World) -> None:
        await world.works()
        datagrams = [(forge.answered(world, source(n)), source(n)) for n in range(total)]
        tracemalloc.start()
        try:
            for start in range(0, total, 50):
                for data, address in datagrams[start : start + 50]:
                    world.net.inject(data, address, HOST)
                await asyncio.sleep(0.01)
            assert world.host._core.connections.strangers == places
            assert world.host._core.admission.door.displaced > 2 * places
            assert len(world.host._core.agenda) <= places + 4
            gc.collect()  # whoever was displaced is a cycle of references inside the QUIC library
            kept, peak = tracemalloc.get_traced_memory()
            await asyncio.sleep(4)
            assert world.host._core.connections.strangers == 0
            gc.collect()
            left = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        each, waiting = (kept - left) / places / 1024, peak / total / 1024
        log.info("%.1f KiB a place, %.1f KiB a handshake that waits for the collector", each, waiting)
        assert kept - left <= places * (100 << 10)
        assert peak <= total * (100 << 10)
        assert left <= total << 10, "sources, and tokens that were used: tables with bounds of their own"
        await world.works()

    run(test, max_handshakes=places, guard=GuardConfig(handshakes=1000, handshake_burst=1000))


def test_a_node_that_was_here_before_comes_back_at_once_in_the_middle_of_a_flood(run: Run) -> None:
    forge = Forge()

    async def test(world: World) -> None:
        for number in range(50):
            world.net.inject(forge.answered(world, source(number)), source(number), HOST)
        await asyncio.sleep(0.001)
        assert not world.host._core.admission.door.handshake(source(5000), world.host.now_ns()), (
            "for strangers there is nothing left"
        )
        cut_connection(world.ours)
        began = world.loop.now
        await world.ours.wait_up()
        assert world.loop.now - began < 0.1
        await world.works(connections=2)
        late = world.loop.create_task(world.join(world.open("d", NEWCOMER)))
        await asyncio.sleep(0.1)
        assert not late.done(), "whoever was never here has to wait"
        await late

    run(test, guard=GuardConfig(handshakes=1, handshake_burst=20))


def test_one_source_gets_its_share_of_handshakes_only(run: Run) -> None:
    forge = Forge()

    async def test(world: World) -> None:
        for _ in range(400):
            world.net.inject(forge.answered(world, ENEMY), ENEMY, HOST)
        await asyncio.sleep(0.001)
        assert world.host._core.connections.strangers == 128, "source_burst"
        async with asyncio.timeout(0.1):
            await world.join(world.open("d", NEWCOMER))
        await world.works()

    run(test)


def test_a_flood_from_invented_sources_keeps_nothing_and_is_answered_with_less_than_it_sends(run: Run) -> None:
    datagram = Forge().initial(bytes(8))

    async def test(world: World) -> None:
        before = world.host._core.admission.door.remembered
        for number in range(10_000):
            world.net.inject(datagram, source(number), HOST)
            if number % 500 == 499:
                await asyncio.sleep(0.01)
                await world.works()
        sent, got = sum(world.net.to_nobody.values()), sum(world.net.from_nobody.values())
        assert 0 < sent < 0.15 * got
        assert world.host._core.admission.door.dropped > 0, "the bucket of first datagrams ran dry"
        assert world.host._core.admission.door.remembered == before
        assert world.host._core.connections.strangers == 0
        async with asyncio.timeout(5):
            await world.join(world.open("d", NEWCOMER))

    run(test, guard=GuardConfig(initials=2000, initial_burst=2000))


def test_unknown_versions_and_garbage_draw_nothing_but_a_few_resets(run: Run) -> None:
    rng = random.Random(1)
    initial = Forge().initial(bytes(8))

    async def test(world: World) -> None:
        victim = source(1)
        for version in (b"\x00\x00\x00\x00", b"\x6b\x33\x43\xcf", b"\x1a\x2a\x3a\x4a", b"\xff\x00\x00\x1d"):
            for size in (1200, 1452):  # version negotiation would answer these (RFC 9000 section 6.1)
                world.net.inject((initial[:1] + version + initial[5:]).ljust(size, b"\0"), victim, HOST)
        for _ in range(2000):
            data = rng.randbytes(rng.choice((1, 20, 43, 100, 1200, 1452)))
            world.net.inject(data[:1] + bytes(4) + data[5:] if rng.random() < 0.2 else data, victim, HOST)
        for form in (0xD0, 0xE0, 0xF0):  # 0-RTT, Handshake, Retry
            for _ in range(100):
                world.net.inject(bytes([form]) + initial[1:5] + rng.randbytes(1300), victim, HOST)
        await asyncio.sleep(1)
        short = world.net.to_nobody.pop(victim)  # a quarter of the garbage looks like packets with a short header
        assert world.net.to_nobody == {}
        assert 0 < short <= 200 * 43
        await asyncio.sleep(10)
        for _ in range(2000):
            world.net.inject(b"\x40" + rng.randbytes(1300), victim, HOST)
        await asyncio.sleep(0.1)
        assert world.net.to_nobody == {victim: 200 * 43}, "of all sources together, and again after a second"
        assert world.host._core.connections.strangers == 0
        await world.works()

    run(test)


def test_a_stranger_that_sends_and_sends_and_never_gets_on_is_cut_off(run: Run) -> None:
    forge, rng = Forge(), random.Random(1)

    async def test(world: World) -> None:
        first = forge.answered(world, ENEMY)
        world.net.inject(first, ENEMY, HOST)
        await asyncio.sleep(0.01)
        assert world.host._core.connections.strangers == 1
        for _ in range(300):
            world.net.inject(b"\xe3" + first[1:14] + rng.randbytes(1100), ENEMY, HOST)
        await asyncio.sleep(0.01)
        assert world.host._core.connections.strangers == 0, "long before its deadline"
        await world.works()

    run(test, handshake_ns=10_000 * MS)


# -- members ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["heartbeats", "control messages"])
def test_a_control_flood_ends_the_connection_of_the_member_that_sends_it(run: Run, kind: str) -> None:
    async def test(world: World) -> None:
        enemy = await world.enemy()
        word = encode_control(Ping(1)) if kind == "heartbeats" else b"\x00\x00\x00\x03\x92\x03\x00"  # Pong(0)
        for _ in range(60):
            enemy.session.send_control(50 * word)
            enemy.pump()
            await asyncio.sleep(0.002)
            await world.works()
        ((code, reason),) = world.downs()
        assert code == CLOSE_PROTOCOL
        assert f"{kind} in a second" in reason
        assert not enemy.alive

    run(test, pace=PaceConfig(controls=2000, control_burst=2000, pings=500, ping_burst=500))


def test_the_usual_pace_is_out_of_reach_for_an_honest_peer_and_within_that_of_a_flood(run: Run) -> None:
    async def test(world: World) -> None:
        enemy = await world.enemy()
        word, sent = 500 * encode_control(Ping(1)), 0
        while not world.downs():
            enemy.session.send_control(word)
            enemy.pump()
            sent += 500
            assert sent <= 20_000
            await asyncio.sleep(0.002)
        assert world.downs() == [(CLOSE_PROTOCOL, "more than 1000 heartbeats in a second")]
        for _ in range(200):  # honest: small messages and words without a pause
            world.ours.send_app(b"word")
            await world.works()

    run(test)


def test_a_member_that_opens_streams_and_gives_them_up_again_is_cut_off(run: Run) -> None:
    """What HTTP/2 knows as rapid reset (CVE-2023-44487)."""

    async def test(world: World) -> None:
        enemy = await world.enemy()
        for _ in range(30):
            for _ in range(20):
                stream = enemy.quic.get_next_available_stream_id(is_unidirectional=True)
                enemy.quic.send_stream_data(stream, b"q")
                enemy.pump()
                enemy.quic.reset_stream(stream, 0)
            enemy.pump()
            await asyncio.sleep(0.005)
            await world.works()
            if not enemy.alive:
                break
        assert world.downs() == [(CLOSE_PROTOCOL, "more than 100 message streams given up in a second")]

    run(test, pace=PaceConfig(resets=100, reset_burst=200))


def test_a_member_may_have_128_streams_open_and_no_more(run: Run) -> None:
    async def test(world: World) -> None:
        enemy = await world.enemy()
        enemy.quic._remote_max_streams_uni = 1 << 20  # it does not keep to the limit that it was told
        for number in range(129):
            stream = enemy.quic.get_next_available_stream_id(is_unidirectional=True)
            enemy.quic.send_stream_data(stream, b"q")
            enemy.pump()
            await asyncio.sleep(0.002)
            assert enemy.alive == (number < 128)
        await asyncio.sleep(1)  # QUIC tells when its closing period is over (RFC 9000 section 10.2)
        ((_, reason),) = world.downs()
        assert reason == "stream 128 where 128 were allowed"
        await world.works()

    run(test)


@pytest.mark.parametrize("what", ["header", "control message"])
def test_a_header_or_a_word_that_comes_byte_by_byte_is_waited_for_until_its_deadline(run: Run, what: str) -> None:
    async def test(world: World) -> None:
        enemy = await world.enemy()
        data = Header(bytes(TAG_SIZE), 0, 0, 0).encode()[:70] if what == "header" else bytes([0, 0, 0, 60]) + bytes(60)
        stream = enemy.quic.get_next_available_stream_id(is_unidirectional=True) if what == "header" else 0
        began, reason = world.loop.now, ""
        for byte in data:
            enemy.quic.send_stream_data(stream, bytes([byte]))
            enemy.timer()
            await asyncio.sleep(1)
            if world.downs():
                break
            assert enemy.alive
        ((code, reason),) = world.downs()
        assert code == CLOSE_PROTOCOL
        assert "took more than 30 s" in reason if what == "header" else reason == "a control message takes too long"
        assert 30 <= world.loop.now - began < 33
        await world.works()

    run(test)


def deaf(enemy: Hostile, kind: str) -> None:
    """From now on it reads nothing, though it lives: heartbeats of its own keep its link up."""
    quic = enemy.quic
    if kind == "acknowledges nothing":
        quic._write_ack_frame = lambda **_: None
    else:  # grants nothing: the windows that it has opened stay as they are
        quic._write_connection_limits = quic._write_stream_limits = lambda **_: None


def talk(link: Link) -> None:
    while True:
        link.send_app(bytes(10_000))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["acknowledges nothing", "grants nothing"])
def test_a_member_that_never_reads_costs_bounded_memory_and_no_wait_without_an_end(run: Run, kind: str) -> None:
    """It goes on talking, so it is not lost; what is sent to it ends by the sender's deadlines."""

    async def test(world: World) -> None:
        enemy = await world.enemy(config=SessionConfig(datagram_bytes=1400, window_bytes=1 << 16))
        deaf(enemy, kind)
        link = world.host.links[enemy_identity(world)]
        outbound = session_of(link)._plane.outbound
        data = bytearray(8 << 20)
        parts = [memoryview(data)[: 100_000 if n < 8 else None] for n in range(12)]  # sent at once, and offered
        sent = [link.send(bytes([n]) * TAG_SIZE, part) for n, part in enumerate(parts)]
        del parts
        with pytest.raises(MessageRefused, match="application messages"):
            talk(link)
        held = 0
        for second in range(120):
            for _ in range(10):
                enemy.session.send_control(encode_control(Ping(second)))
                enemy.timer()
                await asyncio.sleep(0.1)
            held = max(held, sum(stream.waiting for stream in outbound._streams.values() if stream.urgent))
            await world.works()
        assert not link.ended
        words = outbox._MAX_APP_BYTES + 16 * len(link._core._outbox._app)
        answers = 1200 * len(encode_control(Pong(1 << 62)))  # to its heartbeats; with our own, which are fewer
        assert outbox._MAX_APP_BYTES * 0.99 < held <= words + 2 * answers
        for transfer in sent:
            with pytest.raises(DeadlineExceeded, match=r"with worker/d|worker/d"):
                await transfer.within(1.0, what="a message to somebody who reads nothing")
        data.append(1)  # nobody looks at the memory any more: it can be resized
        assert world.downs() == []
        await world.works()

    run(test)


def test_a_member_that_drips_a_payload_holds_what_it_names_within_the_credit_and_nobody_waits_for_it(run: Run) -> None:
    async def test(world: World) -> None:
        enemy = await world.enemy()
        link = world.host.links[enemy_identity(world)]
        stream = enemy.quic.get_next_available_stream_id(is_unidirectional=True)
        enemy.quic.send_stream_data(stream, Header(bytes(TAG_SIZE), 0, 1 << 20, 0).encode())
        memory = bytearray(1 << 20)
        wanted = link.post(bytes(TAG_SIZE), memoryview(memory))
        for _ in range(100):
            enemy.quic.send_stream_data(stream, b"q")
            enemy.timer()
            await asyncio.sleep(1)
            await world.works()
        assert memory[:100] == 100 * b"q"
        with pytest.raises(DeadlineExceeded):
            await wanted.within(1.0, what="a message that drips")
        enemy.quic.send_stream_data(stream, b"late")
        enemy.timer()
        await asyncio.sleep(1)
        memory.append(1)
        assert memory[100:104] == bytes(4)
        assert link.stats.credit_held == 0
        assert enemy.alive
        await world.works()

    run(test)


# -- forged packets --------------------------------------------------------------------------------------------------


def test_a_connection_ends_at_the_integrity_limit_and_its_link_goes_on_over_another(run: Run) -> None:
    """RFC 9001 section 6.6, with the limit lowered from 2^52 to 50."""

    async def test(world: World) -> None:
        seen: list[bytes] = []

        def tap(data: bytes, source: Address, target: Address) -> list[tuple[float, bytes, Address]]:
            if target == HOST and not data[0] & 0x80:
                seen.append(data)
            return [(0.0, data, source)]

        world.net.tap = tap
        await world.works()
        world.net.tap = None
        session = session_of(world.theirs)
        for number in range(49):
            world.net.inject(seen[-1][:-1] + bytes([seen[-1][-1] ^ (number + 1)]), HONEST, HOST)
        world.net.inject(seen[-1], HONEST, HOST)  # a true one, though repeated
        await asyncio.sleep(0.1)
        assert session.forged_packets == 49
        await world.works()
        world.net.inject(seen[-1][:-1] + bytes([seen[-1][-1] ^ 255]), HONEST, HOST)
        async with asyncio.timeout(5):
            while world.theirs.stats.connections == 1:  # noqa: ASYNC110 - time is virtual
                await asyncio.sleep(0.01)
        assert world.theirs._peer.violations == 0, "whoever forged it was not the peer"
        await world.works(connections=2)

    run(test, session=SessionConfig(forged_packets=50))


@pytest.mark.parametrize(
    "setting", [{"forged_packets": 0}, {"forged_packets": (1 << 52) + 1}, {"header_ns": 0}], ids=str
)
def test_limits_that_cannot_work_are_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(setting))} must be"):
        SessionConfig(**setting)
