"""Keys that change again and again while datagrams are lost, doubled and late; a network in memory, a virtual clock.

RFC 9001 section 6. Old keys are kept for three probe timeouts, so what was sent under them and arrives late is opened
all the same. And one bit names the phase: a side two steps ahead could never be understood again (section 6.1), so
losses also come in runs longer than a key lasts. Neither may cost a message or a connection, or deliver anything twice.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from depth import deep
from endpoint_world import session_of
from quicoll_fuzz.virtual import MemoryIO, Net, VirtualLoop, run_virtually, today

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.link.frames import TAG_SIZE
from quicoll_transport.quic import SessionConfig

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.security.credentials import Credentials

MS = 1_000_000
LIMIT, MOST = 4, 1 << 22  # packets under one key: so few that a run of losses covers several keys; the usual limit
DIALLER, ACCEPTOR = ("10.0.0.1", 1), ("10.0.0.2", 1)
ROUNDS = int(os.environ.get("QUICOLL_TEST_KEY_ROUNDS", deep("16", "40")))
CredentialsOf = Callable[..., "Credentials"]


class BadPath:
    """Loses, one by one and in runs, doubles and holds back; `counts` says how often it did."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.counts = {"lost": 0, "runs": 0, "doubled": 0, "late": 0}
        self._until: dict[Address, float] = {}  # when the run of losses in a direction ends

    def __call__(self, data: bytes, source: Address, target: Address) -> list[tuple[float, bytes, Address]]:
        chance = self.rng.random()
        if chance < 0.002:
            self.counts["runs"] += 1
            self._until[target] = self.loop.now + 0.01
        if self.loop.now < self._until.get(target, 0.0):
            self.counts["lost"] += 1
            return []
        if chance < 0.03:
            self.counts["lost"] += 1
            return []
        if chance < 0.06:
            self.counts["doubled"] += 1
            return [(0.0, data, source), (self.rng.random() * 0.02, data, source)]
        if chance < 0.16:  # later than datagrams that were sent after it, also than those under the next keys
            self.counts["late"] += 1
            return [(self.rng.random() * 0.01, data, source)]
        return [(0.0, data, source)]


def phase(link: Link) -> int:
    return int(session_of(link)._plane.keys.send.phase)


@pytest.mark.slow
@pytest.mark.timeout(60 + 2 * ROUNDS)
@pytest.mark.parametrize("limits", [(LIMIT, LIMIT), (LIMIT, MOST), (MOST, LIMIT)], ids=["both", "dialler", "acceptor"])
def test_keys_change_on_a_bad_path_and_every_message_arrives_once(
    virtual_credentials_of: CredentialsOf, limits: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    """QUICOLL_TEST_KEY_ROUNDS=1000 goes through more of them than the 16 rounds."""
    words: dict[str, list[bytes]] = {"a": [], "b": []}

    async def main(loop: VirtualLoop) -> None:
        net, path = Net(loop), BadPath(loop, random.Random(request.node.name))

        def open_endpoint(node: str, address: Address, key_packets: int) -> Endpoint:
            return Endpoint(
                credentials=virtual_credentials_of(node),
                config=EndpointConfig(
                    lost_after_ns=30_000 * MS,
                    connect_ns=30_000 * MS,
                    session=SessionConfig(key_packets=key_packets, datagram_bytes=1400, initial_rtt_ns=2 * MS),
                ),
                io=MemoryIO(net, address),
                loop=loop,
                incarnation=1,
                authorize=lambda identity: None,
                on_link=lambda link: link.listen(lambda _, data: words[node].append(data), lambda link: None),
                wall_clock=today,
            )

        a, b = open_endpoint("a", DIALLER, limits[0]), open_endpoint("b", ACCEPTOR, limits[1])
        try:
            ours = a.link(b.identity, addresses=[ACCEPTOR], dial=True)
            ours.listen(lambda link, data: words["a"].append(data), lambda link: None)
            await ours.wait_up()
            theirs = b.links[a.identity]
            net.tap = path
            for number in range(ROUNDS):
                async with asyncio.timeout(60):
                    await asyncio.gather(exchange(ours, theirs, 2 * number), exchange(theirs, ours, 2 * number + 1))
                await asyncio.sleep(0.2)  # so long, about, old keys are kept, and no new ones asked for
            net.tap = None
            await asyncio.sleep(1)
            sessions: list[Any] = [session_of(ours), session_of(theirs)]
            updates = [session.key_updates for session in sessions]
            assert min(updates) >= ROUNDS
            assert abs(updates[0] - updates[1]) <= 1, "the last step may not have been told yet"
            assert [phase(ours), phase(theirs)] == [count % 2 for count in updates], "every change was seen"
            assert min(path.counts.values()) >= ROUNDS // 4
            assert sum(session.forged_packets for session in sessions) == 0, "nothing came too late for its keys"
            assert ours.stats.connections == theirs.stats.connections == 1
            for link in (ours, theirs):
                assert link.stats.messages_sent == link.stats.messages_received == 2 * ROUNDS
                assert link.stats.corrupt == link.stats.resends == 0
        finally:
            await a.aclose()
            await b.aclose()

    run_virtually(main, seed=request.node.name)
    assert words["b"] == [str(2 * n).encode() for n in range(ROUNDS)]
    assert words["a"] == [str(2 * n + 1).encode() for n in range(ROUNDS)]


async def exchange(source: Link, target: Link, number: int) -> None:
    """A message, a channel's message and a word; each is asked for once, and the link has none left over."""
    data = random.Random(number).randbytes(100_000)
    memory, tag = bytearray(len(data)), number.to_bytes(TAG_SIZE, "big")
    received = target.post(tag, memoryview(memory))
    sent = source.send(tag, memoryview(bytearray(data)))
    queued = source.channel(1).send(data[:20_000])
    source.send_app(str(number).encode())
    await asyncio.gather(sent.future, received.future, queued.future)
    assert memory == data
    assert await target.channel(1).receive() == data[:20_000]
    assert target.stats.credit_held == 0
