"""Endpoints whose process dies and is started anew on the same port: its peers hear of it at once. Virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest
from quicoll_fuzz.virtual import MemoryIO, Net, VirtualLoop, run_virtually, today

from quicoll_transport.carrier import CLOSE_FORGOTTEN
from quicoll_transport.endpoint import Endpoint, EndpointConfig
from quicoll_transport.errors import LinkLost
from quicoll_transport.events import ConnectionDown, TransportEvent
from quicoll_transport.link.frames import TAG_SIZE
from quicoll_transport.security.credentials import Credentials

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun

S = 1_000_000_000
SERVER, CLIENT = ("10.0.0.1", 1), ("10.0.0.2", 1)
CONFIG = EndpointConfig(lost_after_ns=20 * S, connect_ns=20 * S)
CredentialsOf = Callable[..., Credentials]


class Mortal(MemoryIO):
    """A socket whose process may die: nothing goes out any more, and the port is free."""

    dead = False

    def send(self, runs: Sequence[DatagramRun]) -> None:
        if not self.dead:
            super().send(runs)

    def die(self) -> None:
        self.dead = True
        del self.net.hosts[self.local_address]

    def close(self) -> None:
        if not self.dead:
            super().close()


@pytest.mark.parametrize("dialler_dies", [False, True], ids=["who was dialled", "who had dialled"])
@pytest.mark.parametrize("rotated", [False, True], ids=["", "after a rotation"])
def test_the_peers_of_a_process_that_was_started_anew_hear_of_it_at_once(
    virtual_credentials_of: CredentialsOf, request: pytest.FixtureRequest, dialler_dies: bool, rotated: bool
) -> None:
    async def main(loop: VirtualLoop) -> None:
        net, events, opened = Net(loop), list[TransportEvent](), []

        def start(node: str, address: Address, incarnation: int = 1) -> tuple[Endpoint, Mortal]:
            io = Mortal(net, address)
            opened.append(
                Endpoint(
                    credentials=virtual_credentials_of(node),
                    config=CONFIG,
                    io=io,
                    loop=loop,
                    incarnation=incarnation,
                    authorize=lambda identity: None,
                    on_link=lambda link: None,
                    observer=events.append,
                    wall_clock=today,
                )
            )
            return opened[-1], io

        server, server_io = start("b", SERVER)
        client, client_io = start("a", CLIENT)
        if rotated:
            client.rotate(virtual_credentials_of("a"))
            server.rotate(virtual_credentials_of("b"))
        ours = client.link(server.identity, addresses=[SERVER], dial=True)
        await ours.wait_up()
        theirs = server.links[client.identity]
        await asyncio.sleep(1)
        events.clear()
        (client_io if dialler_dies else server_io).die()
        start(*(("a", CLIENT) if dialler_dies else ("b", SERVER)), incarnation=2)
        began = loop.time()
        watched = theirs if dialler_dies else ours
        while not any(isinstance(event, ConnectionDown) for event in events):  # noqa: ASYNC110 - time is virtual
            await asyncio.sleep(0.01)
        assert loop.time() - began < CONFIG.lost_after_ns / 1e9 / 4
        (down,) = [event for event in events if isinstance(event, ConnectionDown)]
        assert (down.code, down.by_peer) == (CLOSE_FORGOTTEN, True)
        assert not watched.ended
        if not dialler_dies:
            with pytest.raises(LinkLost, match="unknown link"):
                await watched.send(bytes(TAG_SIZE), memoryview(b"text")).future
            assert loop.time() - began < CONFIG.lost_after_ns / 1e9 / 4
        for endpoint in opened:
            await endpoint.aclose(timeout=0)

    run_virtually(main, seed=request.node.name)
