"""Keys that change in time, who may come in, certificates that are denied or replaced while links live."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from endpoint_world import cut_connection, session_of

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.errors import ConfigurationError, EndpointClosed, LinkLost
from quicoll_transport.events import CredentialsRotated, TransportEvent
from quicoll_transport.link.core import LinkState
from quicoll_transport.link.frames import TAG_SIZE
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.quic import SessionConfig
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.identity import COORDINATOR, WORKER, Identity
from quicoll_transport.security.policy import Policy, parse_fingerprint

MS = 1_000_000
CredentialsOf = Callable[..., Credentials]
OpenEndpoint = Callable[..., Endpoint]
PATIENT = EndpointConfig(lost_after_ns=30_000 * MS, connect_ns=30_000 * MS)
A, B = Identity("j", WORKER, "a"), Identity("j", WORKER, "b")


@pytest.fixture
async def opened(credentials_of: CredentialsOf) -> AsyncIterator[OpenEndpoint]:
    """opened(node, ...): an endpoint on the loopback interface, closed at the end."""
    made: list[Endpoint] = []

    def make(
        node: str,
        *,
        credentials: Credentials | None = None,
        config: EndpointConfig = PATIENT,
        authorize: Callable[[Identity], str | None] = lambda identity: None,
        observer: Callable[[TransportEvent], None] | None = None,
    ) -> Endpoint:
        loop = asyncio.get_running_loop()
        endpoint = Endpoint(
            credentials=credentials or credentials_of(node),
            config=config,
            io=UdpSocket("127.0.0.1", 0, loop=loop),
            loop=loop,
            incarnation=len(made) + 1,
            authorize=authorize,
            on_link=lambda link: None,
            observer=observer,
        )
        made.append(endpoint)
        return endpoint

    yield make
    for endpoint in made:
        await endpoint.aclose(timeout=0.0)


async def connect(a: Endpoint, b: Endpoint) -> tuple[Link, Link]:
    link = a.link(b.identity, addresses=[b.address], dial=True)
    await link.wait_up()
    return link, b.links[a.identity]


async def exchange(source: Link, target: Link, number: int, size: int) -> None:
    data, memory, tag = random.Random(number).randbytes(size), bytearray(size), number.to_bytes(TAG_SIZE, "big")
    received = target.post(tag, memoryview(memory))
    sent = source.send(tag, memoryview(bytearray(data)))
    await asyncio.gather(sent.future, received.future)
    assert memory == data


async def end_of(link: Link) -> LinkLost:
    changed = asyncio.Event()
    link.listen(lambda link, data: None, lambda link: changed.set())
    while not link.ended:
        changed.clear()
        await changed.wait()
    assert link.error is not None
    return link.error


# -- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.loopback
@pytest.mark.parametrize("limits", [(100, 100), (100, 1 << 22), (1 << 22, 100)], ids=["both", "dialler", "acceptor"])
async def test_keys_are_updated_in_time_while_data_flows_both_ways(
    opened: OpenEndpoint, limits: tuple[int, int]
) -> None:
    ours, theirs = (
        EndpointConfig(lost_after_ns=30_000 * MS, session=SessionConfig(key_packets=limit, datagram_bytes=1400))
        for limit in limits
    )
    a, b = await connect(opened("a", config=ours), opened("b", config=theirs))
    first, second = session_of(a), session_of(b)
    number = 0
    async with asyncio.timeout(
        60
    ):  # one update in three probe timeouts at most, which fast machines fill with much data
        while number < 8 or min(first.key_updates, second.key_updates) < 2:
            await asyncio.gather(exchange(a, b, 2 * number, 500_000), exchange(b, a, 2 * number + 1, 500_000))
            number += 1
    assert abs(first.key_updates - second.key_updates) <= 1, "nobody is two steps ahead"
    assert a.stats.connections == b.stats.connections == 1
    for session in (first, second):
        assert session._plane.keys.send.phase == session.key_updates % 2, "every change was seen"


@pytest.mark.loopback
async def test_keys_stay_while_few_packets_were_sent(opened: OpenEndpoint) -> None:
    a, b = await connect(opened("a"), opened("b"))
    await exchange(a, b, 1, 1 << 20)
    assert session_of(a).key_updates == 0


@pytest.mark.parametrize("limit", [0, -1, (1 << 22) + 1, 1 << 23])
def test_a_key_limit_that_is_too_near_to_that_of_the_cipher_is_refused(limit: int) -> None:
    with pytest.raises(ConfigurationError, match="key_packets must be 1 to 4194304"):
        SessionConfig(key_packets=limit)


# -- the policy ------------------------------------------------------------------------------------------------------


def test_only_listed_roles_and_nodes_may_come_in() -> None:
    coordinator = Identity("j", COORDINATOR, "c")
    anybody, nobody, workers = Policy(), Policy(nodes=[]), Policy(roles=[WORKER])
    one = Policy(roles=[WORKER], nodes=["a"])
    assert anybody(A) is anybody(coordinator) is workers(A) is workers(B) is one(A) is None
    assert workers(coordinator) == "role 'coordinator' may not come in here"
    assert one(B) == "node 'b' may not come in here"
    assert nobody(A) is not None


def test_a_policy_takes_collections_of_names_and_not_one_string() -> None:
    for options in ({"roles": "worker"}, {"nodes": "ab"}, {"denied": "ab" * 32}):
        with pytest.raises(ConfigurationError, match="collection"):
            Policy(**options)


def test_denied_fingerprints_come_and_go() -> None:
    first, second = "ab" * 32, "cd" * 32
    policy = Policy(denied=[first])
    colons = ":".join(second[i : i + 2] for i in range(0, 64, 2)).upper()
    assert policy.deny(colons) == second
    assert policy.denied == (first, second)
    assert policy.judge_certificate(second) == "the certificate sha256=cdcdcdcdcdcdcdcd... is denied"
    policy.forgive(second)
    policy.forgive(second)
    assert policy.judge_certificate(second) is None
    assert list(policy.denied) == [first]


@pytest.mark.parametrize("text", ["", "ab", "ab" * 31, "ab" * 33, "zz" * 32])
def test_what_is_no_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="64 hexadecimal digits"):
        parse_fingerprint(text)


@pytest.mark.loopback
async def test_an_endpoint_keeps_to_its_policy(opened: OpenEndpoint) -> None:
    host = opened("b", authorize=Policy(roles=[WORKER], nodes=["a"]))
    honest, theirs = await connect(opened("a"), host)
    quick = EndpointConfig(connect_ns=1000 * MS)
    for node in ("c", "d"):
        stranger = opened(node, config=quick)
        with pytest.raises(LinkLost, match="refused"):
            await connect(stranger, host)
    assert "role 'coordinator' may not come in here (peer=coordinator/c)" in host.refused
    assert "node 'd' may not come in here (peer=worker/d)" in host.refused
    assert list(host.links) == [A]
    await exchange(honest, theirs, 1, 1000)


# -- denied at run time ----------------------------------------------------------------------------------------------


@pytest.mark.loopback
@pytest.mark.parametrize("who_dials", ["the denied", "the denier"])
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "between connections"])
async def test_a_denied_certificate_loses_its_link_at_once_and_gets_no_other_while_honest_links_go_on(
    opened: OpenEndpoint, credentials_of: CredentialsOf, who_dials: str, connected: bool
) -> None:
    host, stolen = opened("b"), opened("d", config=EndpointConfig(lost_after_ns=1000 * MS, connect_ns=1000 * MS))
    honest, theirs = await connect(opened("a"), host)
    pair = await connect(stolen, host) if who_dials == "the denied" else await connect(host, stolen)
    ours = host.links[stolen.identity]
    other = next(link for link in pair if link is not ours)
    pending = ours.send(bytes(TAG_SIZE), memoryview(bytearray(32 << 20)))
    if not connected:
        cut_connection(ours)
    host.deny(credentials_of("d").fingerprint)
    assert ours.ended, "at once"
    assert "its certificate is denied" in ours.cause
    with pytest.raises(LinkLost, match="denied"):
        await pending.future
    assert stolen.identity not in host.links
    assert "denied" not in (await end_of(other)).cause, "it is not told why"
    again = stolen.link(host.identity, addresses=[host.address], dial=True)
    with pytest.raises(LinkLost):
        await again.wait_up()
    assert any("is denied" in reason for reason in host.refused)
    assert list(host.links) == [A]
    await exchange(honest, theirs, 1, 100_000)
    assert honest.stats.connections == 1


@pytest.mark.loopback
async def test_a_node_whose_certificate_is_denied_comes_back_with_another_one(opened: OpenEndpoint) -> None:
    first = ephemeral("j", [(WORKER, "a"), (WORKER, "b")])
    second = ephemeral("j", [(WORKER, "a"), (WORKER, "b")])
    both = (*first[A].trust, *second[A].trust)
    host = opened("b", credentials=trusting(first[B], both))
    a = opened("a", credentials=trusting(first[A], both))
    link, _ = await connect(a, host)
    host.deny(first[A].fingerprint)
    await end_of(link)
    a.rotate(trusting(second[A], both))
    await exchange(*await connect(a, host), 1, 1000)


def trusting(credentials: Credentials, trust: tuple[Any, ...]) -> Credentials:
    return Credentials.from_parts(
        certificate=credentials.certificate, private_key=credentials.private_key, trust=trust, chain=credentials.chain
    )


# -- rotation --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ages() -> tuple[dict[Identity, Credentials], dict[Identity, Credentials]]:
    """The nodes' credentials of two authorities, the old and the new."""
    nodes = [(WORKER, "a"), (WORKER, "b"), (WORKER, "d"), (WORKER, "e")]
    return ephemeral("j", nodes), ephemeral("j", nodes)


@pytest.mark.loopback
async def test_credentials_are_rotated_without_a_restart_and_living_links_go_on(
    opened: OpenEndpoint, ages: tuple[dict[Identity, Credentials], dict[Identity, Credentials]]
) -> None:
    old, new = ages
    events: list[TransportEvent] = []
    d, e = Identity("j", WORKER, "d"), Identity("j", WORKER, "e")
    host = opened("b", credentials=old[B], observer=events.append)
    living, theirs = await connect(opened("a", credentials=old[A]), host)
    host.rotate(new[B])
    rotated = [event for event in events if isinstance(event, CredentialsRotated)]
    assert [event.fingerprint for event in rotated] == [new[B].fingerprint]
    newcomer, at_host = await connect(opened("d", credentials=new[d]), host)
    assert newcomer.fingerprint == new[B].fingerprint, "the new certificate is shown"
    await exchange(newcomer, at_host, 1, 1000)
    await exchange(living, theirs, 1, 100_000)
    assert living.stats.connections == 1
    assert living.fingerprint == old[B].fingerprint
    assert theirs.state is LinkState.UP
    dialled, _ = await connect(host, opened("e", credentials=new[e]))
    assert dialled.fingerprint == new[e].fingerprint, "dialling uses the new trust too"
    late = opened("a", credentials=old[A], config=EndpointConfig(connect_ns=1000 * MS))
    with pytest.raises(LinkLost):
        await connect(late, host)


@pytest.mark.loopback
async def test_a_rotation_keeps_the_identity(
    opened: OpenEndpoint, ages: tuple[dict[Identity, Credentials], dict[Identity, Credentials]]
) -> None:
    old, new = ages
    host = opened("b", credentials=old[B])
    with pytest.raises(ConfigurationError, match=r"is for spiffe://quicoll/j/worker/a, not spiffe://.*/b"):
        host.rotate(new[A])
    assert host.credentials is old[B]
    await host.aclose()
    with pytest.raises(EndpointClosed):
        host.rotate(new[B])
