"""A peer whose address changes: NAT rebinding, migration, spoofed changes. In memory on a virtual clock; once for real.

RFC 9000 section 9: the connection id says whose a datagram is, not the address; the server answers to where the newest
packet came from, and validates that path before it sends much there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from endpoint_world import session_of
from quicoll_fuzz.virtual import MemoryIO, Net, VirtualLoop, run_virtually, today

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link, Transfer
from quicoll_transport.link.frames import TAG_SIZE
from quicoll_transport.net.trouble import Trouble
from quicoll_transport.net.udp import DatagramIO, UdpSocket
from quicoll_transport.security.credentials import Credentials

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun

pytestmark = pytest.mark.slow
MS = 1_000_000
SERVER, CLIENT, ELSEWHERE = ("10.0.0.1", 1), ("10.0.0.2", 1), ("10.0.0.3", 7)
PATIENT = EndpointConfig(lost_after_ns=30_000 * MS, connect_ns=30_000 * MS)
CredentialsOf = Callable[..., Credentials]
Run = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]


class Roaming(MemoryIO):
    """A socket whose address changes: what is sent comes from the new one, what goes to an old one is lost."""

    def start(self, on_runs: Any, on_unreachable: Any) -> None:
        self._on_runs = on_runs
        super().start(on_runs, on_unreachable)

    def move(self, address: Address) -> None:
        self.net.hosts.pop(self.local_address, None)
        self.local_address = address
        self.net.hosts[address] = self._on_runs


class World:
    def __init__(self, loop: VirtualLoop, credentials_of: CredentialsOf) -> None:
        self.loop = loop
        self.net = Net(loop)
        self.roaming = Roaming(self.net, CLIENT)
        self.server = self._open(credentials_of("b"), MemoryIO(self.net, SERVER))
        self.client = self._open(credentials_of("a"), self.roaming)

    def _open(self, credentials: Credentials, io: MemoryIO) -> Endpoint:
        return Endpoint(
            credentials=credentials,
            config=PATIENT,
            io=io,
            loop=self.loop,
            incarnation=1,
            authorize=lambda identity: None,
            on_link=lambda link: None,
            wall_clock=today,
        )

    async def link(self) -> tuple[Link, Link]:
        ours = self.client.link(self.server.identity, addresses=[SERVER], dial=True)
        await ours.wait_up()
        return ours, self.server.links[self.client.identity]

    def peer_address(self, link: Link) -> Address | None:
        return session_of(link).peer_address


@pytest.fixture
def run(virtual_credentials_of: CredentialsOf, request: pytest.FixtureRequest) -> Run:
    """run(test): the test in a world on a virtual clock."""

    def run(test: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        async def main(loop: VirtualLoop) -> None:
            world = World(loop, virtual_credentials_of)
            try:
                async with asyncio.timeout(300):
                    await test(world)
            finally:
                await world.client.aclose()
                await world.server.aclose()

        run_virtually(main, seed=request.node.name)

    return run


def begin(source: Link, target: Link, number: int, size: int) -> tuple[Transfer, Transfer, bytearray, bytes]:
    data, memory = random.Random(number).randbytes(size), bytearray(size)
    tag = number.to_bytes(TAG_SIZE, "big")
    received = target.post(tag, memoryview(memory))
    return source.send(tag, memoryview(bytearray(data))), received, memory, data


async def finish(begun: Sequence[tuple[Transfer, Transfer, bytearray, bytes]]) -> None:
    for sent, received, memory, data in begun:
        await asyncio.gather(sent.future, received.future)
        assert memory == data


@pytest.mark.parametrize("to", [(CLIENT[0], 2), ELSEWHERE], ids=["another port (NAT rebinding)", "another host"])
def test_a_peer_whose_address_changes_in_the_middle_of_messages_keeps_its_link_and_connection(
    run: Run, to: Address
) -> None:
    async def test(world: World) -> None:
        ours, theirs = await world.link()
        both = [begin(ours, theirs, 1, 3 << 20), begin(theirs, ours, 2, 3 << 20)]
        await asyncio.sleep(0.003)
        assert not any(received.future.done() for _, received, _, _ in both)
        world.roaming.move(to)
        await finish(both)
        assert world.peer_address(theirs) == to
        assert ours.stats.connections == theirs.stats.connections == 1

    run(test)


def test_a_peer_that_moved_is_waited_for_though_the_host_refuses_what_goes_to_its_old_address(run: Run) -> None:
    """Nothing that it is owed reaches it, so with a full window it is silent until its probe timeout."""

    async def test(world: World) -> None:
        def refused(data: bytes, source: Address, destination: Address) -> list[tuple[float, bytes, Address]]:
            if destination not in world.net.hosts:
                world.loop.call_later(0.4, world.server._on_unreachable, destination, Trouble())
            return [(0.2, data, source)]

        world.net.tap = refused
        ours, theirs = await world.link()
        begun = []
        for number in range(3):
            begun.append(begin(ours, theirs, number, 5_000))
            await asyncio.sleep(0.05)
        assert not any(received.future.done() for _, received, _, _ in begun)
        world.roaming.move((CLIENT[0], 2))
        await finish(begun)
        assert ours.stats.connections == theirs.stats.connections == 1

    run(test)


def test_an_address_may_change_again_and_again_and_back(run: Run) -> None:
    async def test(world: World) -> None:
        ours, theirs = await world.link()
        for number in range(20):
            begun = [begin(ours, theirs, 2 * number, 300_000), begin(theirs, ours, 2 * number + 1, 300_000)]
            await asyncio.sleep(0.002)
            world.roaming.move((CLIENT[0], 1 + number % 12))  # more of them than QUIC keeps paths
            await finish(begun)
        assert ours.stats.connections == 1
        assert world.peer_address(theirs) == world.roaming.local_address

    run(test)


def test_an_idle_peer_that_moves_is_found_by_its_next_heartbeat(run: Run) -> None:
    async def test(world: World) -> None:
        ours, theirs = await world.link()
        assert theirs.proved_address == CLIENT
        told: list[Address | None] = []
        theirs.listen(lambda link, data: None, lambda link: told.append(link.proved_address))
        world.roaming.move(ELSEWHERE)
        await asyncio.sleep(10)
        assert told == [ELSEWHERE], "once, when it has shown that it is there"
        assert world.peer_address(theirs) == theirs.proved_address == ELSEWHERE
        assert not ours.suspect
        assert not theirs.suspect
        await finish([begin(theirs, ours, 1, 100_000)])
        assert theirs.stats.connections == 1

    run(test)


def test_a_knock_is_one_byte_that_nobody_answers_and_that_changes_nothing(run: Run) -> None:
    async def test(world: World) -> None:
        ours, theirs = await world.link()
        seen: list[tuple[bytes, Address, Address]] = []

        def tap(data: bytes, source: Address, target: Address) -> list[tuple[float, bytes, Address]]:
            seen.append((data, source, target))
            return [(0.0, data, source)]

        world.net.tap = tap
        world.server.knock(("nobody.example", 5))
        world.server.knock(ELSEWHERE)
        world.server.knock(CLIENT)
        await asyncio.sleep(0)
        assert seen == [(b"\x00", SERVER, ELSEWHERE), (b"\x00", SERVER, CLIENT)]
        await finish([begin(ours, theirs, 1, 1000)])
        assert ours.stats.connections == 1
        await world.server.aclose()
        seen.clear()
        world.server.knock(CLIENT)
        assert seen == []

    run(test)


@pytest.mark.interpreted
def test_news_of_the_host_is_taken_for_the_address_that_the_peer_has_now(run: Run) -> None:
    async def test(world: World) -> None:
        ours, theirs = await world.link()
        world.roaming.move(ELSEWHERE)
        await finish([begin(ours, theirs, 1, 100_000), begin(theirs, ours, 2, 100_000)])
        heard: list[int] = []
        theirs._core.unreachable = lambda now_ns, answer_ns: heard.append(now_ns)
        world.server._on_unreachable(CLIENT, Trouble())
        assert heard == [], "nobody of ours is there any more"
        world.server._on_unreachable(ELSEWHERE, Trouble())
        assert len(heard) == 1

    run(test)


@pytest.mark.parametrize("original", ["arrives too", "is lost"])
def test_a_spoofed_migration_neither_kills_the_link_nor_makes_the_victim_be_flooded(run: Run, original: str) -> None:
    """Somebody on the path sends packets of the peer on, from the address of a victim and before the originals."""
    victim = ("192.0.2.9", 9)

    async def test(world: World) -> None:
        ours, theirs = await world.link()
        stolen = 0

        def tap(data: bytes, source: Address, target: Address) -> list[tuple[float, bytes, Address]]:
            nonlocal stolen
            if source == CLIENT and stolen < 10 and world.loop.now > began + 0.002:
                stolen += 1
                late = [(0.003, data, source)] if original == "arrives too" else []
                return [(0.0, data, victim), *late]
            return [(0.0, data, source)]

        began = world.loop.now
        world.net.tap = tap
        proved: list[Address | None] = []
        world.server.loop.call_later(0.004, lambda: proved.append(theirs.proved_address))
        await finish([begin(ours, theirs, 1, 2 << 20), begin(theirs, ours, 2, 2 << 20)])
        assert stolen == 10
        assert victim not in proved, "it has not shown that it is there"
        assert victim in world.net.to_nobody, "the change was believed for a moment"
        assert world.net.to_nobody[victim] <= 3 * world.net.from_nobody[victim]
        assert world.peer_address(theirs) == CLIENT
        assert ours.stats.connections == theirs.stats.connections == 1

    run(test)


def test_repeated_and_invented_datagrams_from_elsewhere_do_not_move_a_peer(run: Run) -> None:
    async def test(world: World) -> None:
        ours, theirs = await world.link()
        seen: list[bytes] = []

        def tap(data: bytes, source: Address, target: Address) -> list[tuple[float, bytes, Address]]:
            if source == CLIENT:
                seen.append(data)
            return [(0.0, data, source)]

        world.net.tap = tap
        await finish([begin(ours, theirs, 1, 200_000)])
        world.net.tap = None
        rng = random.Random(1)
        for data in seen:
            world.net.inject(data, ELSEWHERE, SERVER)
            world.net.inject(data[:9] + rng.randbytes(len(data) - 9), ELSEWHERE, SERVER)
        await asyncio.sleep(1)
        assert world.peer_address(theirs) == CLIENT
        assert world.net.to_nobody.get(ELSEWHERE, 0) == 0
        await finish([begin(theirs, ours, 2, 200_000)])
        assert theirs.stats.connections == 1

    run(test)


class Switching:
    """A DatagramIO over real sockets, one at a time; after `left` more datagrams it closes one and opens the next."""

    left = 1 << 62

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._socket = UdpSocket("127.0.0.1", 0, loop=loop)

    @property
    def local_address(self) -> Address:
        return self._socket.local_address

    def start(self, on_runs: Any, on_unreachable: Any) -> None:
        self._callbacks = (on_runs, on_unreachable)
        self._socket.start(on_runs, on_unreachable)

    def send(self, runs: Sequence[DatagramRun]) -> None:
        self._socket.send(runs)
        self.left -= sum(len(run) for run in runs)
        if self.left <= 0:
            self.left = 1 << 62
            self._switch()

    async def resolve(self, host: str, port: int) -> Any:
        return await self._socket.resolve(host, port)

    def close(self) -> None:
        self._socket.close()

    def _switch(self) -> None:
        old, self._socket = self._socket, UdpSocket("127.0.0.1", 0, loop=self._loop)
        old.close()
        self._socket.start(*self._callbacks)


@pytest.mark.loopback
async def test_a_new_socket_in_the_middle_of_messages_keeps_the_connection(credentials_of: CredentialsOf) -> None:
    """On real sockets the old port is closed, so the kernel tells the server that nothing listens there (ICMP)."""
    loop = asyncio.get_running_loop()
    switching = Switching(loop)
    ios: dict[str, DatagramIO] = {"a": switching, "b": UdpSocket("127.0.0.1", 0, loop=loop)}
    client, server = (
        Endpoint(
            credentials=credentials_of(node),
            config=PATIENT,
            io=io,
            loop=loop,
            incarnation=1,
            authorize=lambda identity: None,
            on_link=lambda link: None,
        )
        for node, io in ios.items()
    )
    try:
        ours = client.link(server.identity, addresses=[server.address], dial=True)
        await ours.wait_up()
        theirs = server.links[client.identity]
        for number in range(3):
            # The client has the more to send: who only receives has nothing to say from its new address.
            begun = [begin(ours, theirs, 2 * number, 8 << 20), begin(theirs, ours, 2 * number + 1, 1 << 20)]
            before, session = switching.local_address, session_of(theirs)
            switching.left = 40
            await finish(begun)
            assert session.peer_address == switching.local_address != before
        assert ours.stats.connections == theirs.stats.connections == 1
    finally:
        await client.aclose(timeout=0.0)
        await server.aclose(timeout=0.0)
