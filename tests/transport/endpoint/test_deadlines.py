"""Every wait ends by its deadline with an error that says what, with whom and how long; and every await of the public
interface may be cancelled at any turn of the loop: links go on working, and after aclose nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.errors import DeadlineExceeded, LinkLost
from quicoll_transport.faults.compose import Cut, Faults
from quicoll_transport.link.core import LinkState
from quicoll_transport.link.frames import TAG_SIZE
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.identity import WORKER, Identity

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

pytestmark = pytest.mark.loopback

MS = 1_000_000
PATIENT = EndpointConfig(lost_after_ns=30_000 * MS, connect_ns=30_000 * MS)
CredentialsOf = Callable[..., Credentials]


def open_files() -> set[str]:
    return set(os.listdir("/dev/fd"))


class World:
    """Endpoints of one test, and what the process held before there were any."""

    def __init__(self, credentials_of: CredentialsOf) -> None:
        self.loop = asyncio.get_running_loop()
        self.credentials_of = credentials_of
        self.endpoints: list[Endpoint] = []
        self.tags = iter(range(1, 1 << 60))
        self.incarnations = iter(range(1, 1 << 60))
        self.files = open_files()
        self.tasks = asyncio.all_tasks() - {asyncio.current_task()}
        self.timers = self.live_timers()

    def live_timers(self) -> int:
        return sum(not handle.cancelled() for handle in self.loop._scheduled)

    def open(self, node: str, *, config: EndpointConfig = PATIENT, faults: Faults | None = None) -> Endpoint:
        made = Endpoint(
            credentials=self.credentials_of(node),
            config=config,
            io=UdpSocket("127.0.0.1", 0, loop=self.loop),
            loop=self.loop,
            incarnation=next(self.incarnations),
            authorize=lambda identity: None,
            on_link=lambda link: None,
            faults=faults,
        )
        self.endpoints.append(made)
        return made

    async def pair(self, **options: Any) -> tuple[Link, Link]:
        a, b = self.open("a", **options), self.open("b", **options)
        ours = a.link(b.identity, addresses=[b.address], dial=True)
        await ours.wait_up()
        return ours, b.links[a.identity]

    def tag(self) -> bytes:
        return next(self.tags).to_bytes(TAG_SIZE, "big")

    async def exchange(self, source: Link, target: Link, size: int = 20_000) -> None:
        """A message arrives: the link works."""
        tag, memory = self.tag(), bytearray(size)
        data = random.Random(size).randbytes(size)
        await asyncio.gather(target.post(tag, memoryview(memory)).future, source.send(tag, memoryview(data)).future)
        assert memory == data

    async def close(self) -> None:
        """Everything is closed; nothing of it may be left, not even for one more turn of the loop."""
        for endpoint in self.endpoints:
            await endpoint.aclose(timeout=0.0)
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        assert asyncio.all_tasks() - self.tasks == {asyncio.current_task()}
        assert self.live_timers() == self.timers
        assert open_files() == self.files
        self.endpoints.clear()


@pytest.fixture
async def world(credentials_of: CredentialsOf) -> AsyncIterator[World]:
    made = World(credentials_of)
    yield made
    await made.close()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def cancelled_after(count: int, operation: Awaitable[object]) -> bool:
    """Cancel `operation` at the loop's turn number `count`; False when it had ended before."""
    task = asyncio.ensure_future(operation)
    await turns(count)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


async def awaited(future: asyncio.Future[None]) -> None:
    await future


# -- deadlines -------------------------------------------------------------------------------------------------------


async def test_a_wait_for_the_link_ends_by_its_deadline_and_the_link_goes_on_connecting(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    link = a.link(b.identity, addresses=[b.address], dial=True)
    with pytest.raises(DeadlineExceeded, match="did not come up within 0 s") as raised:
        await link.wait_up(timeout=0.0)
    assert (raised.value.peer, raised.value.what, raised.value.seconds) == ("worker/b", "connecting", 0.0)
    assert raised.value.usable
    await link.wait_up()
    assert link.state is LinkState.UP


async def test_connecting_ends_by_the_link_s_deadline_and_says_what_the_last_attempt_met(world: World) -> None:
    a = world.open("a", config=EndpointConfig(connect_ns=900 * MS, handshake_ns=40 * MS))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        link = a.link(Identity("j", WORKER, "b"), addresses=[silent.getsockname()], dial=True)
        with pytest.raises(LinkLost, match=r"not reached within 0\.\d s \(handshake too slow\)") as raised:
            await link.wait_up()
    assert raised.value.peer == "worker/b"
    assert link.attempts >= 2, "an attempt ends by its own deadline, so that there is another"


async def test_a_look_up_that_is_never_answered_ends_with_the_handshake_s_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def never(self: UdpSocket, host: str, port: int) -> list[Address]:
        asked.set()
        return await world.loop.create_future()

    monkeypatch.setattr(UdpSocket, "resolve", never)
    a = world.open("a", config=EndpointConfig(connect_ns=300 * MS, handshake_ns=30 * MS))
    link = a.link(Identity("j", WORKER, "b"), addresses=[("name.invalid", 7)], dial=True)
    await asked.wait()
    with pytest.raises(LinkLost, match=r"look-up of 'name\.invalid'"):
        await link.wait_up()
    asked.clear()
    a.link(Identity("j", WORKER, "d"), addresses=[("name.invalid", 7)], dial=True)
    await asked.wait()
    await world.close()


async def test_a_late_send_names_what_whom_and_how_long_and_gives_the_memory_back(world: World) -> None:
    ours, theirs = await world.pair(config=EndpointConfig(lost_after_ns=30_000 * MS, credit_bytes=0))
    memory = bytearray(100_000)
    with pytest.raises(DeadlineExceeded, match=r"gradient 7 did not end within 0\.02 s \(peer=worker/b\)") as raised:
        await ours.send(world.tag(), memoryview(memory)).within(0.02, what="gradient 7")
    assert (raised.value.peer, raised.value.what, raised.value.seconds) == ("worker/b", "gradient 7", 0.02)
    await turns(3)
    memory.extend(b"it can be resized, so nobody holds it")
    await world.exchange(ours, theirs)


async def test_a_late_receive_gives_the_buffer_back_and_the_message_can_still_be_had(world: World) -> None:
    ours, theirs = await world.pair()
    tag, buffer = world.tag(), bytearray(10)
    with pytest.raises(DeadlineExceeded, match="parameters did not end within"):
        await theirs.post(tag, memoryview(buffer)).within(0.0, what="parameters")
    await ours.send(tag, memoryview(b"0123456789")).within(30.0, what="late message")
    assert buffer == bytes(10)
    await theirs.post(tag, memoryview(buffer)).within(30.0, what="parameters")
    assert buffer == b"0123456789"


async def test_a_transfer_in_time_just_ends(world: World) -> None:
    ours, theirs = await world.pair()
    tag, buffer = world.tag(), bytearray(3)
    received = theirs.post(tag, memoryview(buffer))
    await asyncio.gather(
        ours.send(tag, memoryview(b"abc")).within(30.0, what="send"), received.within(30.0, what="receive")
    )
    assert buffer == b"abc"


async def test_the_error_of_the_link_passes_through_a_deadline(world: World) -> None:
    ours, _ = await world.pair()
    sending = asyncio.ensure_future(ours.post(world.tag(), memoryview(bytearray(3))).within(30.0, what="receive"))
    await turns(1)
    ours.close("enough")
    with pytest.raises(LinkLost, match="enough"):
        await sending


async def test_closing_ends_by_its_deadline_though_the_peer_takes_nothing_any_more(world: World) -> None:
    faults = Faults(random.Random(1))
    a, b = world.open("a", faults=faults), world.open("b")
    link = a.link(b.identity, addresses=[b.address], dial=True)
    await link.wait_up()
    faults.add(Cut())
    sent = link.send(world.tag(), memoryview(bytes(1000)))
    await a.aclose(timeout=0.05)
    with pytest.raises(LinkLost, match="endpoint closed"):
        await sent.future


# -- cancellation at every turn --------------------------------------------------------------------------------------

# From 1: a coroutine that is cancelled before its first turn has not begun and does nothing.
EVERY = range(1, 40)
FEW = [*range(0, 12), 16, 20, 25, 30, 40, 60]  # where each turn needs new endpoints


async def test_cancelling_a_wait_for_the_link_at_any_turn_leaves_it_connecting(world: World) -> None:
    seen = set()
    for count in FEW:
        a, b = world.open("a"), world.open("b")
        link = a.link(b.identity, addresses=[b.address], dial=True)
        seen.add(await cancelled_after(count, link.wait_up()))
        await link.wait_up()
        await world.exchange(link, b.links[a.identity])
        await world.close()
    assert True in seen


@pytest.mark.parametrize("size", [100, 300_000])
@pytest.mark.parametrize("bounded", [False, True])
async def test_cancelling_a_send_at_any_turn_withdraws_the_message(world: World, size: int, bounded: bool) -> None:
    ours, theirs = await world.pair(config=EndpointConfig(lost_after_ns=30_000 * MS, credit_bytes=1 << 16))
    seen = set()
    for count in EVERY:
        memory, tag = bytearray(size), world.tag()
        received = theirs.post(tag, memoryview(bytearray(size)))
        sent = ours.send(tag, memoryview(memory))
        operation = sent.within(30.0, what="send") if bounded else awaited(sent.future)
        was_cancelled = await cancelled_after(count, operation)
        seen.add(was_cancelled)
        assert sent.future.done()
        await turns(2)
        memory.clear()  # raises BufferError while anybody holds it
        received.abort()
        await world.exchange(ours, theirs)
    assert True in seen
    await world.close()


@pytest.mark.parametrize("size", [100, 300_000])
@pytest.mark.parametrize("bounded", [False, True])
async def test_cancelling_a_receive_at_any_turn_ends_all_writing_to_the_buffer(
    world: World, size: int, bounded: bool
) -> None:
    ours, theirs = await world.pair(config=EndpointConfig(lost_after_ns=30_000 * MS, credit_bytes=1 << 16))
    seen = set()
    for count in EVERY:
        memory, tag = bytearray(size), world.tag()
        sent = ours.send(tag, memoryview(b"\xff" * size))
        received = theirs.post(tag, memoryview(memory))
        operation = received.within(30.0, what="receive") if bounded else awaited(received.future)
        was_cancelled = await cancelled_after(count, operation)
        seen.add(was_cancelled)
        at_once = bytes(memory)
        await world.exchange(ours, theirs)
        assert memory == at_once
        if not received.future.cancelled():
            assert at_once == b"\xff" * size
        sent.abort()
    assert True in seen
    assert theirs.stats.messages_received >= len(EVERY)
    await world.close()


async def test_cancelling_a_channel_s_receive_at_any_turn_loses_no_message(world: World) -> None:
    ours, theirs = await world.pair()
    channel, taken = theirs.channel(3), []

    async def take() -> None:
        taken.append(bytes(await channel.receive()))

    for count in EVERY:
        await cancelled_after(count, take())
        sent = ours.channel(3).send(count.to_bytes(2, "big"))
        await cancelled_after(count, take())
        await sent.future
    while len(taken) < len(EVERY):
        await take()
    assert taken == [count.to_bytes(2, "big") for count in EVERY]
    await world.close()


async def test_cancelling_aclose_at_any_turn_closes_at_once(world: World) -> None:
    seen = set()
    for count in range(8):
        faults = Faults(random.Random(1))
        a, b = world.open("a", faults=faults), world.open("b")
        link = a.link(b.identity, addresses=[b.address], dial=True)
        await link.wait_up()
        faults.add(Cut())
        sent = link.send(world.tag(), memoryview(bytes(1000)))
        # Cancelled before its first turn, a coroutine has not begun: the endpoint knows of nothing and goes on.
        seen.add(await cancelled_after(count, a.aclose(timeout=30.0)))
        if count == 0:
            await a.aclose(timeout=0.0)
        with pytest.raises(LinkLost, match="endpoint closed"):
            await sent.future
        await b.aclose(timeout=0.0)
        world.assert_nothing_left()
    assert seen == {True}


async def test_a_second_aclose_that_is_cancelled_does_not_disturb_the_first(world: World) -> None:
    faults = Faults(random.Random(1))
    a, b = world.open("a", faults=faults), world.open("b")
    link = a.link(b.identity, addresses=[b.address], dial=True)
    await link.wait_up()
    with faults.add(Cut()):
        sent = link.send(world.tag(), memoryview(bytes(1000)))
        first = asyncio.ensure_future(a.aclose(timeout=30.0))
        for count in range(5):
            assert await cancelled_after(count, a.aclose())
    await first
    await sent.future


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups take a few turns of the loop and then find the loopback address."""

    async def look_up(self: UdpSocket, host: str, port: int) -> list[Address]:
        await turns(6)
        return [("127.0.0.1", port)]

    monkeypatch.setattr(UdpSocket, "resolve", look_up)


async def test_ending_a_link_at_any_turn_of_dialling_by_name_leaves_nothing(world: World, names: None) -> None:
    for count in FEW:
        a, b = world.open("a"), world.open("b")
        link = a.link(b.identity, addresses=[("peer.invalid", b.address[1])], dial=True)
        waiting = asyncio.ensure_future(link.wait_up())
        await turns(count)
        if count % 2:
            link.close("changed our mind")
        await a.aclose(timeout=0.0)
        await asyncio.gather(waiting, return_exceptions=True)
        await world.close()


async def test_cancelling_the_wait_at_any_turn_of_dialling_by_name_leaves_the_link_connecting(
    world: World, names: None
) -> None:
    for count in FEW:
        a, b = world.open("a"), world.open("b")
        link = a.link(b.identity, addresses=[("peer.invalid", b.address[1])], dial=True)
        await cancelled_after(count, link.wait_up())
        await link.wait_up()
        await world.exchange(link, b.links[a.identity])
        await world.close()


async def test_a_real_look_up_leaves_no_task_behind(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    link = a.link(b.identity, addresses=[("localhost", b.address[1])], dial=True)
    await link.wait_up()
    a.link(Identity("j", WORKER, "d"), addresses=[("localhost", 9)], dial=True)
    await world.close()


async def test_links_made_and_closed_again_and_again_leave_nothing(world: World) -> None:
    for _ in range(int(os.environ.get("QUICOLL_TEST_CYCLES", "10"))):
        ours, theirs = await world.pair()
        await world.exchange(ours, theirs, size=100_000)
        await world.close()
