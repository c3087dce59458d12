"""What an endpoint answers to who asks how it sees it, without a link."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from forwarder import Forwarder

from quicoll_transport.endpoint import Endpoint, EndpointConfig, LinkState
from quicoll_transport.endpoint.inquiry import Seen, inquire
from quicoll_transport.errors import AuthenticationError, DeadlineExceeded, LinkLost, TransportError
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import COORDINATOR, WORKER, Identity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from quicoll_transport.security.credentials import Credentials

pytestmark = pytest.mark.loopback

HOME = Identity("job", COORDINATOR, "coordinator")
NODE = Identity("job", WORKER, "a")


@pytest.fixture(scope="module")
def made() -> dict[Identity, Credentials]:
    return ephemeral("job", [(COORDINATOR, "coordinator"), (WORKER, "a")])


def socket() -> UdpSocket:
    return UdpSocket("127.0.0.1", 0, loop=asyncio.get_running_loop())


def endpoint(credentials: Credentials, **settings: Any) -> Endpoint:
    return Endpoint(
        credentials=credentials,
        config=EndpointConfig(),
        io=socket(),
        loop=asyncio.get_running_loop(),
        incarnation=7,
        authorize=lambda identity: None,
        on_link=lambda link: link.listen(lambda *_: None, lambda *_: None),
        **settings,
    )


@asynccontextmanager
async def home(made: dict[Identity, Credentials], **settings: Any) -> AsyncIterator[Endpoint]:
    served = endpoint(made[HOME], **settings)
    yield served
    await served.aclose()


async def ask(made: dict[Identity, Credentials], port: int, io: UdpSocket | None = None, **times: float) -> Seen:
    times = {"timeout": 5.0, "search": 0.1, **times}
    return await inquire(("127.0.0.1", port), credentials=made[NODE], io=io or socket(), **times)


async def test_the_answer_has_the_address_that_was_bound_and_what_the_path_carries(
    made: dict[Identity, Credentials],
) -> None:
    async with home(made) as served:
        io = socket()
        bound = io.local_address
        seen = await ask(made, served.address[1], io)
    assert (seen.peer, seen.address) == (HOME, bound)
    assert seen.certificate == made[HOME].certificate
    assert abs(seen.ahead_ns) <= seen.rtt_ns
    assert seen.datagram_bytes >= 1452


async def test_behind_a_mapped_port_the_peer_sees_another_address(made: dict[Identity, Credentials]) -> None:
    async with home(made) as served, Forwarder(served.address[:2]) as mapped:
        io = socket()
        bound = io.local_address
        seen = await ask(made, mapped.port, io)
    assert seen.address != bound


async def test_a_path_that_loses_long_datagrams_is_found(made: dict[Identity, Credentials]) -> None:
    async with home(made) as served, Forwarder(served.address[:2], most=1300) as narrow:
        seen = await ask(made, narrow.port, search=10.0)
    assert seen.datagram_bytes == 1200


async def test_a_clock_that_is_ahead_is_measured(made: dict[Identity, Credentials]) -> None:
    async with home(made, wall_clock=lambda: datetime.now(UTC) + timedelta(seconds=100)) as served:
        seen = await ask(made, served.address[1])
    assert abs(seen.ahead_ns - 100_000_000_000) <= seen.rtt_ns


async def test_a_link_of_the_same_node_stays_as_it_is(made: dict[Identity, Credentials]) -> None:
    async with home(made) as served:
        worker = endpoint(made[NODE])
        link = worker.link(HOME, addresses=[served.address], dial=True)
        await link.wait_up()
        await ask(made, served.address[1])
        assert link.state is LinkState.UP
        assert served.links[NODE].state is LinkState.UP
        assert served.links[NODE].stats.connections == 1
        await worker.aclose()


async def test_a_certificate_that_the_peer_does_not_take_is_told_apart_from_silence(
    made: dict[Identity, Credentials],
) -> None:
    async with home(made) as served:
        served.deny(made[NODE].fingerprint)
        with pytest.raises(AuthenticationError, match="refuses this certificate"):
            await ask(made, served.address[1])


async def test_another_authoritys_peer_is_not_taken(made: dict[Identity, Credentials]) -> None:
    other = ephemeral("job", [(COORDINATOR, "coordinator")])
    async with home(other) as served:
        with pytest.raises(TransportError, match=r"authorit|certificate|trust"):
            await ask(made, served.address[1])


async def test_where_nobody_listens_the_hosts_word_is_told(made: dict[Identity, Credentials]) -> None:
    free = socket()
    port = free.local_address[1]
    free.close()
    with pytest.raises(LinkLost, match=r"refused|nothing listens"):
        await ask(made, port)


async def test_silence_ends_by_the_deadline(made: dict[Identity, Credentials]) -> None:
    mute = socket()
    with pytest.raises(DeadlineExceeded, match="nothing came back"):
        await ask(made, mute.local_address[1], timeout=0.2)
    mute.close()
