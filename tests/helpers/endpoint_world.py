"""Endpoints on real sockets of the loopback interface, and what tests do with their links."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from link_pair import payload, tag

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.link.core import LinkState
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.quic import Session
from quicoll_transport.security.credentials import Credentials

if TYPE_CHECKING:
    from quicoll_transport.endpoint.core.connection import Connection
    from quicoll_transport.errors import LinkLost
    from quicoll_transport.faults.compose import Faults
    from quicoll_transport.security.identity import Identity

MS = 1_000_000
CredentialsOf = Callable[..., Credentials]
PATIENT = EndpointConfig(lost_after_ns=30_000 * MS, connect_ns=30_000 * MS)


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
    if endpoint._timer is not None:
        endpoint._timer.cancel()


def calls(owner: object, name: str) -> asyncio.Semaphore:
    """A semaphore that is released whenever `owner` has called its method `name`."""
    seen, method = asyncio.Semaphore(0), getattr(owner, name)

    def wrapper(*arguments: object, **options: object) -> object:
        result = method(*arguments, **options)
        seen.release()
        return result

    setattr(owner, name, wrapper)
    return seen


def endpoint_of(link: Link) -> Endpoint:
    host = link._host
    assert isinstance(host, Endpoint)
    return host


def connection_of(link: Link) -> Connection | None:
    """The connection that carries the link now."""
    return endpoint_of(link)._core.connections.of_link.get(link._peer)


def session_of(link: Link) -> Session:
    """The QUIC session that carries the link now."""
    connection = connection_of(link)
    assert connection is not None
    assert isinstance(connection.carrier, Session)
    return connection.carrier


def fail_connection(link: Link, code: int, reason: str) -> None:
    """Close the link's connection from here, as after a failure."""
    endpoint, connection = endpoint_of(link), connection_of(link)
    assert connection is not None
    endpoint._core.traffic.fail(connection, code, reason)
    endpoint._act()
    endpoint._wake()


def cut_connection(link: Link) -> None:
    """The QUIC connection dies, the link does not."""
    fail_connection(link, 0x7FFF, "cut by the test")
