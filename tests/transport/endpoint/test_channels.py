"""Channels between endpoints, and what a link holds of its callers' memory; real sockets of the loopback interface."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import pytest
from endpoint_world import connection_of, cut_connection, endpoint_of, session_of

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.errors import ConfigurationError, DeadlineExceeded, LinkLost, MessageRefused
from quicoll_transport.link.core import LinkState
from quicoll_transport.link.frames import TAG_SIZE, checksum
from quicoll_transport.net.runs import DatagramRun
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.quic import Session

if TYPE_CHECKING:
    from quicoll_transport.endpoint.channel import Channel
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.security.credentials import Credentials

pytestmark = pytest.mark.loopback

log = logging.getLogger("quicoll.tests")

MS = 1_000_000
PATIENT_NS = 60_000 * MS
MakeEnds = Callable[..., Any]


def tag(number: int) -> bytes:
    return number.to_bytes(TAG_SIZE, "big")


def payload(number: int, size: int) -> bytearray:
    return bytearray(random.Random(number).randbytes(size))


@pytest.fixture
async def ends(credentials_of: Callable[..., Credentials]) -> AsyncIterator[MakeEnds]:
    """ends(credit_bytes=...): both ends of a link that is up; the first one dialled."""
    made: list[Endpoint] = []
    loop = asyncio.get_running_loop()

    async def make(**options: Any) -> tuple[Link, Link]:
        config = EndpointConfig(lost_after_ns=PATIENT_NS, connect_ns=PATIENT_NS, **options)
        for node in "ab":
            made.append(
                Endpoint(
                    credentials=credentials_of(node),
                    config=config,
                    io=UdpSocket("127.0.0.1", 0, loop=loop),
                    loop=loop,
                    incarnation=len(made) + 1,
                    authorize=lambda identity: None,
                    on_link=lambda link: None,
                )
            )
        a, b = made[-2:]
        ours = a.link(b.identity, addresses=[b.address], dial=True)
        await ours.wait_up()
        return ours, b.links[a.identity]

    yield make
    for endpoint in made:
        await endpoint.aclose(timeout=0.0)


async def until_received(link: Link, amount: Callable[[], int], least: int) -> None:
    """Let the loop run until `amount` has reached `least`; the link's own failure ends it."""
    while amount() < least:
        assert not link.ended
        await asyncio.sleep(0)


# -- channels --------------------------------------------------------------------------------------------------------


async def test_messages_of_any_size_come_in_order_and_whole_without_posting_anything(ends: MakeEnds) -> None:
    a, b = await ends(credit_bytes=1 << 20)
    sizes = [0, 1, 70_000, 3 << 20, 5, 0, 1 << 20]
    sent = [a.channel(1).send(payload(n, size)) for n, size in enumerate(sizes)]
    for n, size in enumerate(sizes):
        got = await b.channel(1).receive()
        assert got == payload(n, size)
        assert not got.readonly
    await asyncio.gather(*(transfer.future for transfer in sent))
    assert b.stats.credit_peak <= 1 << 20
    assert b.stats.credit_held == 0
    assert a._core._outbox.credit_used == 0


async def test_many_channels_both_ways_at_once_do_not_wait_for_each_other(ends: MakeEnds) -> None:
    a, b = await ends(credit_bytes=1 << 20)
    stuck = [a.channel(99).send(bytes(600_000)) for _ in range(4)]  # nobody takes these

    async def talk(source: Channel, target: Channel) -> None:
        for n in range(20):
            source.send(payload(n, 3000 * (n % 7)))
        for n in range(20):
            assert await target.receive() == payload(n, 3000 * (n % 7))

    pairs = [(a.channel(n), b.channel(n)) for n in range(10)]
    await asyncio.gather(*(talk(x, y) for x, y in pairs), *(talk(y, x) for x, y in pairs))
    assert [transfer.future.done() for transfer in stuck] == [True, False, False, False]
    assert a.channel(3) is a.channel(3)


async def test_a_receive_that_is_cancelled_or_late_loses_no_message(ends: MakeEnds) -> None:
    a, b = await ends(credit_bytes=1 << 16)
    channel = b.channel(0)
    with pytest.raises(DeadlineExceeded, match="channel 0 did not come within") as caught:
        await channel.receive(timeout=0.001)
    assert caught.value.peer == str(b.identity)
    sizes = [10, 500_000, 20, 300_000, 0]
    sent = [a.channel(0).send(payload(n, size)) for n, size in enumerate(sizes)]
    got: list[memoryview] = []
    for turn in range(10_000):
        task = asyncio.ensure_future(channel.receive())
        for _ in range(turn % 7):
            await asyncio.sleep(0)
        task.cancel()
        try:
            got.append(await task)
        except asyncio.CancelledError:
            continue
        if len(got) == len(sizes):
            break
        await asyncio.sleep(0)
    else:
        while len(got) < len(sizes):
            got.append(await channel.receive())
    assert got == [payload(n, size) for n, size in enumerate(sizes)]
    await asyncio.gather(*(transfer.future for transfer in sent))
    assert not channel._waiters


async def test_a_message_that_came_in_the_moment_of_the_cancellation_is_the_next_ones(ends: MakeEnds) -> None:
    a, b = await ends()
    channel = b.channel(0)
    first, second = asyncio.ensure_future(channel.receive()), asyncio.ensure_future(channel.receive())
    await asyncio.sleep(0)
    waiter, advance = channel._waiters[0], channel._advance

    def advance_and_cancel() -> None:
        advance()
        if waiter.done():  # woken, and cancelled before it runs
            first.cancel()

    channel._advance = advance_and_cancel
    await a.channel(0).send(b"once").future
    assert await second == b"once"
    assert first.cancelled()


async def test_those_who_wait_are_served_in_turn(ends: MakeEnds) -> None:
    a, b = await ends(credit_bytes=0)
    waiting = [asyncio.ensure_future(b.channel(0).receive()) for _ in range(5)]
    for n in range(5):
        a.channel(0).send(bytes([n]))
    assert [bytes(got) for got in await asyncio.gather(*waiting)] == [bytes([n]) for n in range(5)]


async def test_an_aborted_send_is_skipped_and_a_refused_one_is_named(ends: MakeEnds) -> None:
    a, b = await ends(credit_bytes=1 << 16)
    channel = b.channel(0)
    channel.limit = 200_000
    aborted, large, small = (a.channel(0).send(payload(n, size)) for n, size in ((0, 150_000), (1, 200_001), (2, 9)))
    aborted.abort()
    with pytest.raises(MessageRefused, match="limit of 200000"):
        await channel.receive()
    with pytest.raises(MessageRefused, match="limit of 200000"):
        await large.future
    assert await channel.receive() == payload(2, 9)
    await small.future
    assert aborted.future.cancelled()


async def test_the_end_of_the_link_ends_every_receive(ends: MakeEnds) -> None:
    a, b = await ends()
    waiting = [asyncio.ensure_future(b.channel(n // 2).receive()) for n in range(4)]
    await asyncio.sleep(0)
    a.close("done")
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, LinkLost)
    with pytest.raises(LinkLost):
        await b.channel(7).receive()
    with pytest.raises(LinkLost):
        await b.channel(7).send(b"late").future


async def test_misuse_of_channels_is_refused_here(ends: MakeEnds) -> None:
    a, b = await ends()
    for number in (-1, 1 << 32):
        with pytest.raises(ConfigurationError, match="channel"):
            a.channel(number)
    with pytest.raises(ConfigurationError, match="negative"):
        await b.channel(0).receive(timeout=-1)
    with pytest.raises(ConfigurationError, match="contiguous"):
        a.channel(0).send(memoryview(bytes(8)).cast("I"))


# -- memory of the callers -------------------------------------------------------------------------------------------


def is_free(memory: bytearray) -> bool:
    """A bytearray can change its size exactly when nobody holds a view of it."""
    try:
        memory.append(0)
    except BufferError:
        return False
    memory.pop()
    return True


@pytest.mark.parametrize("how", ["abort", "close", "cut, then abort"])
async def test_memory_is_its_owners_again_at_once_when_a_transfer_is_aborted(ends: MakeEnds, how: str) -> None:
    a, b = await ends()
    data, memory = bytearray(8 << 20), bytearray(8 << 20)
    received, sent = b.post(tag(1), memoryview(memory)), a.send(tag(1), memoryview(data))
    inbox = b._core._inbox
    await until_received(b, lambda: sum(inflow.filled for inflow in inbox._inflows.values()), 100_000)
    assert not is_free(data)
    assert not is_free(memory)
    if how == "close":
        a.close("done")
        b.close("done")
        await asyncio.gather(sent.future, received.future, return_exceptions=True)
    else:
        if how != "abort":
            cut_connection(a)
        assert connection_of(a) is None or session_of(a)._sending
        sent.abort()
        received.abort()
        await asyncio.sleep(0)  # the actions that follow from it
        await asyncio.sleep(0)
    assert is_free(data)
    assert is_free(memory)
    if how == "abort":
        session = session_of(a)
        assert not session._sending
    if how != "close":
        small = b.post(tag(2), memoryview(bytearray(5)))
        a.send(tag(2), memoryview(b"alive"))
        await small.future


async def test_memory_is_its_owners_again_when_a_transfer_is_done(ends: MakeEnds) -> None:
    a, b = await ends()
    data, memory = payload(1, 1 << 20), bytearray(1 << 20)
    received, sent = b.post(tag(1), memoryview(memory)), a.send(tag(1), memoryview(data))
    await asyncio.gather(received.future, sent.future)
    assert memory == data
    assert is_free(data)
    assert is_free(memory)


# -- reconnections ---------------------------------------------------------------------------------------------------


@pytest.mark.interpreted
async def test_a_hundred_reconnections_inside_one_message_hand_it_over_once(
    ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MiB; QUICOLL_TEST_RECONNECT_MIB=256 for the full size, --log-cli-level=INFO shows the figures."""
    size, cuts = int(os.environ.get("QUICOLL_TEST_RECONNECT_MIB", "8")) << 20, 100
    sessions: list[Session] = []  # those that sent anything of the message
    feed = Session.start_message

    def start_message(session: Session, *arguments: Any) -> None:
        if session not in sessions:
            sessions.append(session)
        feed(session, *arguments)

    monkeypatch.setattr(Session, "start_message", start_message)
    a, b = await ends()
    wire, send = 0, endpoint_of(a)._io.send

    def count(runs: list[DatagramRun]) -> None:
        nonlocal wire
        wire += sum(len(run.memory) for run in runs)
        send(runs)

    monkeypatch.setattr(endpoint_of(a)._io, "send", count)
    began = time.perf_counter()
    data, memory = bytearray().join(payload(n, 1 << 20) for n in range(size >> 20)), bytearray(size)
    received, sent = b.post(tag(1), memoryview(memory)), a.send(tag(1), memoryview(data))
    told: list[object] = []
    received.future.add_done_callback(told.append)

    def in_place() -> int:
        arriving = b._core._inbox._inflows.values()
        return max((inflow.filled for inflow in arriving if not inflow.paused), default=0)

    for n in range(cuts):
        goal = size * (n + 1) // (cuts + 2)
        await until_received(b, in_place, goal)
        while connection_of(a) is None or connection_of(b) is None:  # noqa: ASYNC110 - one turn may pass several goals
            await asyncio.sleep(0.001)
        cut_connection(a if n % 2 else b)
        a._peer.next_dial_ns = 0
        a._peer.backoff_ns = 1
        a._touch()
    await asyncio.gather(received.future, sent.future)
    taken = time.perf_counter() - began
    fed = sum(session.bytes_fed for session in sessions)
    assert checksum(memory) == checksum(data)
    assert len(told) == b.stats.messages_received == a.stats.messages_sent == 1
    assert b.stats.bytes_received == size
    assert a.stats.connections == b.stats.connections == cuts + 1
    # A connection is given two congestion windows ahead, and its window cannot have grown beyond what it delivered.
    again = fed - size
    assert 0 <= again <= 2 * size + cuts * (1 << 19)
    assert wire < 1.25 * size + cuts * (1 << 17), "on the wire: what was under way when it died"
    assert a.stats.bytes_resumed > 0.4 * cuts * size
    assert a.state is b.state is LinkState.UP
    log.info("%d MiB, %d reconnections: %.1f s, %d bytes on the wire", size >> 20, cuts, taken, wire)
