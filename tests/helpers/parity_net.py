"""Two networks with one face: real loopback sockets under asyncio, and the simulated world. See `Net`.

A node is a process with one endpoint. A test runs beside the nodes, in a place of its own, and has code run on them:
`await net.call("a", do)` runs `await do(process)` there and gives what comes of it. In the simulated world every node
has a host and an event loop of its own; on the real network they share one.

What a test may not do: measure how long something took (but by `net.now`, against its own deadlines), or depend on
which of two things at the same moment comes first.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from endpoint_world import vanish

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.faults.compose import Cut, Faults, Installed
from quicoll_transport.link.frames import TAG_SIZE
from quicoll_transport.net.udp import DatagramIO, UdpSocket
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import WORKER, Identity
from quicoll_transport.sim import WALL_EPOCH_NS, SimulatedSocket, World

if TYPE_CHECKING:
    from quicoll_transport.security.credentials import Credentials

T = TypeVar("T")
Address = Any
Do = Callable[["Process"], Awaitable[T]]
Test = Callable[["Net"], Awaitable[None]]

MS = 1_000_000
PATIENT = EndpointConfig(lost_after_ns=30_000 * MS, connect_ns=30_000 * MS)
QUICK = EndpointConfig(lost_after_ns=500 * MS, connect_ns=2_000 * MS, handshake_ns=500 * MS)
LIMIT_S = 100  # of either time, for a whole test

_JOB = "parity"
_NODES = ("a", "b", "d")


def identity(node: str) -> Identity:
    return Identity(_JOB, WORKER, node)


@lru_cache(maxsize=1)
def _credentials() -> dict[Identity, Credentials]:
    """Valid from before the simulated world's beginning until long after today."""
    start = datetime.fromtimestamp(WALL_EPOCH_NS / 1e9, UTC) - timedelta(days=1)
    return ephemeral(_JOB, [(WORKER, node) for node in _NODES], days=36500, now=start)


def tag(number: int) -> bytes:
    return number.to_bytes(TAG_SIZE, "big")


def payload(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


class Process:
    """What runs on a node. faults: rules for what it receives and sends."""

    def __init__(self, endpoint: Endpoint, faults: Faults) -> None:
        self.endpoint = endpoint
        self.faults = faults

    def link(self, peer: str) -> Link:
        return self.endpoint.links[identity(peer)]

    def dial(self, peer: str, address: Address) -> Link:
        return self.endpoint.link(identity(peer), addresses=[address], dial=True)

    async def send(self, peer: str, number: int, size: int) -> None:
        await self.link(peer).send(tag(number), memoryview(payload(number, size))).future

    async def receive(self, peer: str, number: int, size: int) -> bytes:
        memory = bytearray(size)
        await self.link(peer).post(tag(number), memoryview(memory)).future
        return bytes(memory)

    async def ended(self, peer: str) -> str:
        """Wait for the end of the link that there is now; its cause."""
        link = self.link(peer)
        over: asyncio.Future[None] = link.loop.create_future()

        def look(_: Link) -> None:
            if link.ended and not over.done():
                over.set_result(None)

        link.listen(lambda link, data: None, look)
        look(link)
        await over
        return link.cause


class Net(ABC):
    """See the module's head. Nodes are "a", "b" and "d"."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.addresses: dict[str, Address] = {}
        self._starts = 0

    async def start(self, node: str, *, config: EndpointConfig = PATIENT, incarnation: int | None = None) -> None:
        """Start the node's process; again at the same address after a `kill`."""
        self._starts += 1
        born = 100 + self._starts if incarnation is None else incarnation
        self.processes[node] = self._open(node, config, born)
        self.addresses[node] = self.processes[node].endpoint.address

    def _endpoint(
        self, node: str, config: EndpointConfig, incarnation: int, io: DatagramIO, loop: asyncio.AbstractEventLoop
    ) -> Process:
        faults = Faults(random.Random(f"{node}/{incarnation}"))
        endpoint = Endpoint(
            credentials=_credentials()[identity(node)],
            config=config,
            io=io,
            loop=loop,
            incarnation=incarnation,
            authorize=lambda peer: None,
            on_link=lambda link: None,
            faults=faults,
            wall_clock=lambda: datetime.fromtimestamp(time.time(), UTC),
        )
        return Process(endpoint, faults)

    async def pair(self, *, config: EndpointConfig = PATIENT) -> None:
        """Processes on a and b, and a link between them that a dialled."""
        await self.start("a", config=config)
        await self.start("b", config=config)
        await self.connect("a", "b")

    async def connect(self, node: str, peer: str) -> None:
        async def dial(process: Process) -> None:
            await process.dial(peer, self.addresses[peer]).wait_up()

        await self.call(node, dial)

    async def exchange(self, source: str, target: str, number: int, size: int) -> None:
        """A message arrives."""
        received, _ = await asyncio.gather(
            self.call(target, lambda process: process.receive(source, number, size)),
            self.call(source, lambda process: process.send(target, number, size)),
        )
        assert received == payload(number, size)

    @abstractmethod
    def _open(self, node: str, config: EndpointConfig, incarnation: int) -> Process: ...

    @abstractmethod
    async def call(self, node: str, do: Do[T]) -> T: ...

    @abstractmethod
    def kill(self, node: str) -> None:
        """The process is gone; nothing is said, nothing is flushed. What was called there does not return."""

    @abstractmethod
    def cut(self, node: str, peer: str) -> None:
        """Nothing passes between the two any more, until `mend`."""

    @abstractmethod
    def mend(self, node: str, peer: str) -> None: ...

    @abstractmethod
    def silent_address(self) -> Address:
        """Of a host that is there, with nothing that listens."""

    @abstractmethod
    def now(self) -> float: ...


class RealNet(Net):
    """Sockets on 127.0.0.1."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self._opened: list[Endpoint] = []
        self._cuts: dict[tuple[str, str], list[Installed]] = {}

    def _open(self, node: str, config: EndpointConfig, incarnation: int) -> Process:
        known = self.addresses.get(node)
        io = UdpSocket("127.0.0.1", 0 if known is None else known[1], loop=self.loop)
        made = self._endpoint(node, config, incarnation, io, self.loop)
        self._opened.append(made.endpoint)
        return made

    async def call(self, node: str, do: Do[T]) -> T:
        return await do(self.processes[node])

    def kill(self, node: str) -> None:
        endpoint = self.processes.pop(node).endpoint
        vanish(endpoint)

    def cut(self, node: str, peer: str) -> None:
        self._cuts[node, peer] = [self.processes[each].faults.add(Cut()) for each in (node, peer)]

    def mend(self, node: str, peer: str) -> None:
        for installed in self._cuts.pop((node, peer)):
            installed.remove()

    def silent_address(self) -> Address:
        io = UdpSocket("127.0.0.1", 0, loop=self.loop)
        address = io.local_address
        io.close()
        return address

    def now(self) -> float:
        return self.loop.time()

    async def aclose(self) -> None:
        for endpoint in self._opened:
            await endpoint.aclose(timeout=0.0)


class SimulatedNet(Net):
    """A host for each node, half a millisecond apart."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._hosts = {node: world.host(node) for node in _NODES}

    def _open(self, node: str, config: EndpointConfig, incarnation: int) -> Process:
        loop = self._hosts[node].start()
        return self._endpoint(node, config, incarnation, SimulatedSocket(loop, 4433), loop)

    async def call(self, node: str, do: Do[T]) -> T:
        here, there = asyncio.get_running_loop(), self._hosts[node].loop
        assert there is not None
        answer: asyncio.Future[T] = here.create_future()

        def give(task: asyncio.Task[T]) -> None:
            if answer.done():
                return
            error = task.exception()
            if error is None:
                answer.set_result(task.result())
            else:
                answer.set_exception(error)

        async def run() -> T:
            return await do(self.processes[node])

        def begin() -> None:
            there.create_task(run()).add_done_callback(lambda task: here.call_soon(give, task))

        there.call_soon(begin)
        return await answer

    def kill(self, node: str) -> None:
        self._hosts[node].kill()
        del self.processes[node]

    def cut(self, node: str, peer: str) -> None:
        self._world.network.partition([node], [peer])

    def mend(self, node: str, peer: str) -> None:
        self._world.network.repair([node], [peer])

    def silent_address(self) -> Address:
        return (self._hosts["d"].ip, 9)

    def now(self) -> float:
        return self._world.elapsed_ns / 1e9


@contextmanager
def _no_surprises(failures: list[Any]) -> Iterator[None]:
    yield
    assert failures == [], "an error reached the event loop's handler"


def on_real_network(test: Test) -> None:
    async def run() -> None:
        failures: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        net = RealNet()
        with _no_surprises(failures):
            try:
                async with asyncio.timeout(LIMIT_S):
                    await test(net)
            finally:
                await net.aclose()

    asyncio.run(run())


def on_simulated_network(test: Test) -> None:
    _credentials()  # outside, so that they are not made of the world's seed
    with World(1) as world:
        net = SimulatedNet(world)

        async def run() -> None:
            await test(net)

        task = world.host("test").start().create_task(run())
        with _no_surprises(world.failures):
            world.run(task.done, limit_ns=LIMIT_S * 1_000_000_000)
            task.result()
