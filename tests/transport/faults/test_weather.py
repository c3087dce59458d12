"""Endpoints on real sockets and a bad network: loss, silence, killed peers, garbage."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest
from endpoint_world import MS, Watch, World, exchange, vanish
from link_pair import payload, tag

from quicoll_transport.endpoint import EndpointConfig
from quicoll_transport.errors import LinkLost
from quicoll_transport.faults.compose import Corrupt, Cut, Datagram, Delay, Delivery, Drop, Duplicate, Faults, Rng
from quicoll_transport.link.core import LinkState

pytestmark = pytest.mark.loopback


class Weather:
    """Loses, doubles, spoils and reorders, each datagram at most one of it."""

    def __init__(self) -> None:
        self.rules = [Drop(0.05), Duplicate(0.05), Corrupt(0.05)]
        self.late = Delay(0, jitter_ns=2 * MS)

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        for rule in self.rules:
            if (deliveries := rule.decide(datagram, now_ns, rng)) is not None:
                return deliveries
        return self.late.decide(datagram, now_ns, rng) if rng.random() < 0.2 else None


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
    assert all(rule.decided > 20 for rule in installed)
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
        await watch.until(lambda: a.suspect)
    await watch.until(lambda: not a.suspect)
    assert a.state is LinkState.UP
    await exchange(a, b, 1, 1000)
    assert a.stats.connections == 1


@pytest.mark.interpreted
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
    monkeypatch.setattr(broken._core, place, fails)
    if place == "handle_timer":
        monkeypatch.setattr(broken._core, "next_timer", lambda: 1)
    broken._touch()
    with pytest.raises(LinkLost, match=r"internal error: KeyError\('a table of ours'\)"):
        await posted.future
    assert a.links == {whole.identity: whole}
    await exchange(whole, far, 2, 50_000)


@pytest.mark.interpreted
async def test_a_link_so_broken_that_it_cannot_end_is_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, heard = world.open("a"), []
    broken, _ = await world.link(a, world.open("b"))
    whole, far = await world.link(a, world.open("d"))

    def fails(*arguments: object, **more: object) -> None:
        raise KeyError("a table of ours")

    monkeypatch.setattr(world.loop, "call_exception_handler", heard.append)
    for place in ("poll", "lose"):
        monkeypatch.setattr(broken._core, place, fails)
    broken._touch()
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
        def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
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
    # What was recorded of its handshake begins others, from a host whose address needs no proof; none comes to its end.
    assert len(target._core.connections) - target._core.connections.strangers == 1
