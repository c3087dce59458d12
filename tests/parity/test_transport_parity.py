"""The transport behaves alike on real sockets and in the simulated world: one suite, run on both, the same assertions.

The simulator is worth what it says only if its network is a network. So nothing here asks on which of the two it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from endpoint_world import cut_connection
from parity_net import (
    MS,
    PATIENT,
    QUICK,
    Net,
    Process,
    Test,
    on_real_network,
    on_simulated_network,
    payload,
    tag,
)

from quicoll_transport.endpoint import EndpointConfig
from quicoll_transport.errors import (
    ConfigurationError,
    DeadlineExceeded,
    LinkLost,
    MessageCorrupted,
    MessageRefused,
)
from quicoll_transport.link.core import LinkState


def on_both(test: Test) -> Any:
    """Make it a pytest test on each network."""

    @pytest.mark.parametrize(
        "network",
        [
            pytest.param(on_real_network, id="real", marks=pytest.mark.loopback),
            pytest.param(on_simulated_network, id="simulated"),
        ],
    )
    def run(network: Callable[[Test], None]) -> None:
        network(test)

    run.__doc__ = test.__doc__
    return run


# -- links -----------------------------------------------------------------------------------------------------------


@on_both
async def test_a_link_comes_up_and_both_ends_know_each_other(net: Net) -> None:
    await net.pair()

    async def look(process: Process, peer: str) -> tuple[LinkState, int, int]:
        link = process.link(peer)
        return link.state, link.remote_incarnation, link.stats.connections

    assert await net.call("a", lambda a: look(a, "b")) == (LinkState.UP, 102, 1)
    assert await net.call("b", lambda b: look(b, "a")) == (LinkState.UP, 101, 1)


@on_both
async def test_where_both_dial_there_is_one_link(net: Net) -> None:
    await net.start("a")
    await net.start("b")
    await asyncio.gather(net.connect("a", "b"), net.connect("b", "a"))
    await asyncio.gather(net.exchange("a", "b", 1, 50_000), net.exchange("b", "a", 2, 50_000))

    async def links(process: Process) -> int:
        return len(process.endpoint.links)

    assert (await net.call("a", links), await net.call("b", links)) == (1, 1)


@on_both
async def test_a_port_on_which_nothing_listens_refuses(net: Net) -> None:
    await net.start("a", config=EndpointConfig(connect_ns=400 * MS, handshake_ns=100 * MS))

    async def dial(process: Process) -> None:
        link = process.dial("b", net.silent_address())
        with pytest.raises(LinkLost, match=r"not reached within .* \(nothing listens") as caught:
            await link.wait_up()
        assert caught.value.peer == "worker/b"
        assert link.attempts >= 2

    await net.call("a", dial)


@on_both
async def test_a_wait_for_a_link_ends_by_its_deadline(net: Net) -> None:
    await net.start("a")

    async def dial(process: Process) -> None:
        link = process.dial("b", net.silent_address())
        with pytest.raises(DeadlineExceeded, match=r"did not come up within 0\.05 s") as caught:
            await link.wait_up(timeout=0.05)
        assert (caught.value.peer, caught.value.what, caught.value.usable) == ("worker/b", "connecting", True)
        assert link.state is LinkState.CONNECTING

    await net.call("a", dial)


@on_both
async def test_an_orderly_close_is_told_and_pending_transfers_fail(net: Net) -> None:
    await net.pair()

    async def wait(process: Process) -> str:
        pending = process.link("a").post(tag(1), memoryview(bytearray(1)))
        cause = await process.ended("a")
        with pytest.raises(LinkLost, match="had enough"):
            await pending.future
        return cause

    async def close(process: Process) -> LinkState:
        link = process.link("b")
        link.close("had enough")
        with pytest.raises(LinkLost, match="had enough"):
            await link.wait_up()
        return link.state

    waiting = asyncio.ensure_future(net.call("b", wait))
    await net.exchange("a", "b", 2, 1)
    assert await net.call("a", close) is LinkState.CLOSED
    assert "had enough" in await waiting
    await net.connect("a", "b")
    await net.exchange("a", "b", 3, 10)


@on_both
async def test_closing_an_endpoint_delivers_what_was_given_to_it(net: Net) -> None:
    await net.pair()

    async def close(process: Process) -> None:
        sent = process.link("b").send(tag(1), memoryview(payload(1, 100_000)))
        await process.endpoint.aclose(timeout=20.0)
        await sent.future

    async def receive(process: Process) -> bytes:
        return await process.receive("a", 1, 100_000)

    received, _ = await asyncio.gather(net.call("b", receive), net.call("a", close))
    assert received == payload(1, 100_000)


# -- messages --------------------------------------------------------------------------------------------------------


@on_both
async def test_messages_of_any_size_go_both_ways(net: Net) -> None:
    await net.pair()
    for number, size in enumerate([0, 1, 1199, 1200, 65_536, 1 << 20]):
        await asyncio.gather(net.exchange("a", "b", number, size), net.exchange("b", "a", number, size))

    async def nothing_held(process: Process, peer: str) -> bool:
        link = process.link(peer)
        return link.drained and link.stats.credit_held == 0

    assert await net.call("a", lambda a: nothing_held(a, "b"))
    assert await net.call("b", lambda b: nothing_held(b, "a"))


@on_both
async def test_channels_keep_their_own_order_and_wait_for_no_other(net: Net) -> None:
    await net.pair()
    sizes = [0, 1, 30_000, 7, 200_000, 3]

    async def send(process: Process) -> None:
        link = process.link("b")
        sent = [
            link.channel(channel).send(payload(channel * 100 + n, size))
            for n, size in enumerate(sizes)
            for channel in (0, 7, 2**32 - 1)
        ]
        await asyncio.gather(*(transfer.future for transfer in sent))

    async def receive(process: Process, channel: int) -> list[bytes]:
        return [bytes(await process.link("a").channel(channel).receive()) for _ in sizes]

    sending = asyncio.ensure_future(net.call("a", send))
    for channel in (2**32 - 1, 0, 7):  # the last one first: the others' messages do not stand in its way
        got = await net.call("b", lambda b, channel=channel: receive(b, channel))
        assert got == [payload(channel * 100 + n, size) for n, size in enumerate(sizes)]
    await sending


@on_both
async def test_a_channel_that_does_not_exist_is_refused_before_anything_is_sent(net: Net) -> None:
    await net.pair()

    async def ask(process: Process) -> None:
        for number in (-1, 2**32):
            with pytest.raises(ConfigurationError):
                process.link("b").channel(number)

    await net.call("a", ask)
    await net.exchange("a", "b", 1, 10)


@on_both
async def test_a_receive_that_is_cancelled_or_late_loses_no_message(net: Net) -> None:
    await net.pair()

    async def receive(process: Process) -> list[bytes]:
        channel = process.link("a").channel(3)
        cancelled = asyncio.ensure_future(channel.receive())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        with pytest.raises(DeadlineExceeded, match=r"a message on channel 3 did not come within 0\.02 s"):
            await channel.receive(timeout=0.02)
        return []

    async def take(process: Process) -> list[bytes]:
        channel = process.link("a").channel(3)
        return [bytes(await channel.receive()) for _ in range(3)]

    async def send(process: Process) -> None:
        channel = process.link("b").channel(3)
        await asyncio.gather(*(channel.send(bytes([n])).future for n in range(3)))

    await net.call("b", receive)
    await net.call("a", send)
    assert await net.call("b", take) == [b"\0", b"\1", b"\2"]


@on_both
async def test_a_cancelled_send_is_withdrawn_and_gives_its_memory_back(net: Net) -> None:
    await net.pair(config=EndpointConfig(lost_after_ns=30_000 * MS, connect_ns=30_000 * MS, credit_bytes=0))

    async def send(process: Process) -> None:
        memory = bytearray(100_000)
        transfer = process.link("b").send(tag(1), memoryview(memory))
        task = asyncio.ensure_future(transfer.within(20.0, what="a gradient"))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await asyncio.sleep(0)
        memory.clear()  # raises BufferError while anybody holds it
        with pytest.raises(DeadlineExceeded, match=r"a gradient did not end within 0\.01 s"):
            await process.link("b").send(tag(2), memoryview(bytes(10))).within(0.01, what="a gradient")

    await net.call("a", send)
    await net.exchange("a", "b", 3, 100)


@on_both
async def test_messages_that_nobody_takes_wait_within_the_credit_and_posted_ones_pass_them(net: Net) -> None:
    credit = 1 << 18
    await net.pair(config=EndpointConfig(lost_after_ns=30_000 * MS, connect_ns=30_000 * MS, credit_bytes=credit))
    size, count = 100_000, 6

    async def send(process: Process) -> list[bool]:
        link = process.link("b")
        process.sent = [link.send(tag(n), memoryview(payload(n, size))) for n in range(count)]
        await asyncio.gather(*(transfer.future for transfer in process.sent[:2]))
        return [transfer.future.done() for transfer in process.sent]

    assert await net.call("a", send) == [True, True, False, False, False, False]
    await net.exchange("a", "b", 100, 300_000)

    async def take(process: Process) -> tuple[list[bytes], int, int]:
        got = [await process.receive("a", n, size) for n in range(count)]
        stats = process.link("a").stats
        return got, stats.credit_peak, stats.credit_held

    got, peak, held = await net.call("b", take)
    assert got == [payload(n, size) for n in range(count)]
    assert 2 * size <= peak <= credit
    assert held == 0

    async def finish(process: Process) -> None:
        await asyncio.gather(*(transfer.future for transfer in process.sent))

    await net.call("a", finish)


@on_both
async def test_a_message_of_the_wrong_size_fails_at_both_ends_and_the_link_goes_on(net: Net) -> None:
    await net.pair()

    async def receive(process: Process) -> None:
        with pytest.raises(MessageRefused, match="100 bytes"):
            await process.receive("a", 1, 99)

    async def send(process: Process) -> None:
        with pytest.raises(MessageRefused, match="100 bytes"):
            await process.send("b", 1, 100)

    await asyncio.gather(net.call("b", receive), net.call("a", send))
    await net.exchange("a", "b", 2, 1000)


@on_both
async def test_a_corrupt_payload_is_sent_again_and_one_that_stays_corrupt_fails_at_both_ends(net: Net) -> None:
    await net.pair()

    async def spoil(process: Process, times: int) -> None:
        left = iter(range(times))

        def flip(view: memoryview) -> None:
            if next(left, None) is not None:
                view[5] ^= 1

        process.faults.payload_fault = flip

    async def counts(process: Process) -> int:
        return process.link("a").stats.corrupt

    await net.call("b", lambda b: spoil(b, 2))
    await net.exchange("a", "b", 1, 100_000)
    assert await net.call("b", counts) == 2

    await net.call("b", lambda b: spoil(b, 1000))

    async def fails(process: Process, operation: Callable[[], Any]) -> tuple[int, int]:
        with pytest.raises(MessageCorrupted) as caught:
            await operation()
        return caught.value.expected, caught.value.found

    found = await asyncio.gather(
        net.call("b", lambda b: fails(b, lambda: b.receive("a", 2, 100_000))),
        net.call("a", lambda a: fails(a, lambda: a.send("b", 2, 100_000))),
    )
    assert found[0] == found[1]
    assert await net.call("b", counts) == 2 + PATIENT.max_resends + 1
    await net.call("b", lambda b: spoil(b, 0))
    await net.exchange("a", "b", 3, 1000)


# -- what breaks -----------------------------------------------------------------------------------------------------


@on_both
async def test_a_killed_peer_is_known_from_its_host_long_before_its_silence(net: Net) -> None:
    await net.pair(config=EndpointConfig(lost_after_ns=60_000 * MS, connect_ns=60_000 * MS))
    net.kill("b")
    before = net.now()

    async def notice(process: Process) -> str:
        pending = process.link("b").post(tag(1), memoryview(bytearray(5)))
        cause = await process.ended("b")
        with pytest.raises(LinkLost, match="listens"):
            await pending.future
        return cause

    assert "nothing listens at its address" in await net.call("a", notice)
    assert net.now() - before < 45, "silence would have taken 60 s"


@on_both
async def test_a_restarted_peer_has_a_new_incarnation_and_a_new_link(net: Net) -> None:
    await net.pair()

    async def wait(process: Process) -> str:
        return await process.ended("a")

    over = asyncio.ensure_future(net.call("b", wait))
    await net.exchange("a", "b", 1, 10)
    net.kill("a")
    await net.start("a")
    await net.connect("a", "b")
    assert "restarted" in await over

    async def look(process: Process) -> int:
        return process.link("a").remote_incarnation

    assert await net.call("b", look) == 103
    await asyncio.gather(net.exchange("a", "b", 2, 1000), net.exchange("b", "a", 3, 1000))


@on_both
async def test_a_stale_incarnation_is_refused(net: Net) -> None:
    await net.pair()
    net.kill("a")
    await net.start("a", incarnation=5)

    async def dial(process: Process) -> None:
        with pytest.raises(LinkLost, match="a later process of this node is here"):
            await process.dial("b", net.addresses["b"]).wait_up()

    await net.call("a", dial)


@on_both
async def test_silence_ends_the_link_at_lost_after_and_not_before(net: Net) -> None:
    await net.pair(config=QUICK)
    await net.exchange("a", "b", 1, 100)
    net.cut("a", "b")
    before = net.now()

    async def notice(process: Process) -> float:
        pending = process.link("b").post(tag(2), memoryview(bytearray(5)))
        with pytest.raises(LinkLost, match="silent") as caught:
            await pending.future
        return caught.value.silent_for

    assert await net.call("a", notice) >= 0.5
    assert net.now() - before >= 0.3, "the last heartbeat was heard shortly before the cut"
    net.mend("a", "b")
    await net.connect("a", "b")
    await net.exchange("a", "b", 3, 1000)


@on_both
async def test_a_short_cut_raises_suspicion_and_everything_arrives_afterwards(net: Net) -> None:
    await net.pair(config=EndpointConfig(lost_after_ns=2_000 * MS, connect_ns=30_000 * MS))

    async def until(process: Process, suspect: bool) -> None:
        link = process.link("b")
        changed = asyncio.Event()
        link.listen(lambda link, data: None, lambda link: changed.set())
        while link.suspect is not suspect:
            changed.clear()
            await changed.wait()

    net.cut("a", "b")
    sending = asyncio.ensure_future(net.exchange("a", "b", 1, 300_000))
    await net.call("a", lambda a: until(a, True))
    net.mend("a", "b")
    await net.call("a", lambda a: until(a, False))
    await sending

    async def connections(process: Process) -> int:
        return process.link("b").stats.connections

    assert await net.call("a", connections) == 1


@on_both
async def test_a_link_resumes_over_a_new_connection_and_each_message_comes_once(net: Net) -> None:
    await net.pair()

    async def drop(process: Process) -> None:
        link = process.link("b")
        await link.wait_up()
        cut_connection(link)

    async def send(process: Process) -> None:
        channel = process.link("b").channel(1)
        await asyncio.gather(*(channel.send(payload(n, 20_000)).future for n in range(20)))

    async def take(process: Process, count: int) -> list[bytes]:
        channel = process.link("a").channel(1)
        return [bytes(await channel.receive()) for _ in range(count)]

    sending = asyncio.ensure_future(net.call("a", send))
    got: list[bytes] = []
    for _ in range(4):
        got += await net.call("b", lambda b: take(b, 5))
        await net.call("a", drop)
    await sending
    assert got == [payload(n, 20_000) for n in range(20)]
    await net.exchange("b", "a", 1, 1000)

    async def stats(process: Process) -> tuple[int, int]:
        stats = process.link("a").stats
        return stats.connections, stats.messages_received

    connections, received = await net.call("b", stats)
    assert connections > 1
    assert received == 20
