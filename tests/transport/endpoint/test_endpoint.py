"""Endpoints on real sockets of the loopback interface: messages, misuse, callbacks, and what is left over."""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING, Any

import pytest
from endpoint_world import MS, PATIENT, Watch, World, connection_of, exchange, session_of
from link_pair import payload, tag

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.errors import (
    ConfigurationError,
    DeadlineExceeded,
    EndpointClosed,
    LinkLost,
    MessageCorrupted,
    MessageRefused,
)
from quicoll_transport.faults.compose import Delay, Faults
from quicoll_transport.link.core import LinkState
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.quic import SessionConfig
from quicoll_transport.security.identity import WORKER, Identity

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll_transport.net.addresses import Address

pytestmark = pytest.mark.loopback


# -- messages --------------------------------------------------------------------------------------------------------


async def test_messages_of_any_size_go_both_ways(world: World) -> None:
    a, b = await world.pair()
    for number, size in enumerate([0, 1, 1000, 65_536, 1 << 20, 8 << 20]):
        await asyncio.gather(exchange(a, b, number, size), exchange(b, a, number, size))
    assert a.stats.bytes_sent == b.stats.bytes_received == a.stats.bytes_received
    assert a.drained
    assert b.stats.credit_held == 0
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
    assert 800_000 <= b.stats.credit_peak <= 1 << 20
    memories = [bytearray(400_000) for _ in bodies]
    received = [b.post(tag(n), memoryview(memories[n])) for n in reversed(range(8))]
    await asyncio.gather(*(transfer.future for transfer in [*sent, *received]))
    assert memories == bodies
    assert b.stats.credit_held == 0


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
    assert "nobody here takes" in b.cause


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
    assert a.drained
    assert a._core._outbox.credit_used == 0
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
    world.loop.remove_reader(stopped._io._socket.fileno())
    data = bytearray(64 << 20)
    sent = [a.send(tag(n), memoryview(data)) for n in range(4)]
    sent += [a.send(tag(n), memoryview(data)[: 1 << 19]) for n in range(4, 40)]
    watch = Watch(a)
    worst = 0

    def measure(link: Link) -> None:
        nonlocal worst
        if connection_of(link) is not None:
            worst = max(worst, session_of(link)._plane.recovery.in_flight)

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
    await world.endpoints[0].aclose(timeout=60.0, reason="work is done")
    await asyncio.gather(received.future, sent.future)
    await watch.ended()
    assert memory == data
    assert watch.words == [b"last words"]
    assert "work is done" in b.cause


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
        assert list(opened._core.connections) == []
        assert opened._core.connections.by_cid == {}
        assert opened.links == {}
        assert opened._core.agenda == {}
        assert not opened._core.waiting
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
        (lambda: SessionConfig(congestion="bbr9"), "congestion 'bbr9' is not known; take bbr or cubic or reno"),
    ],
)
def test_settings_that_cannot_work_are_refused_where_they_are_made(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()
    assert EndpointConfig(lost_after_ns=None, credit_bytes=0, max_resends=0)
