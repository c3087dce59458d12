"""The one timer of an endpoint: deadlines are met, and putting them off costs next to nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from quicoll_fuzz.virtual import MemoryIO, Net, VirtualLoop, run_virtually, today

from quicoll_transport.endpoint import Endpoint, EndpointConfig

if TYPE_CHECKING:
    from quicoll_transport.endpoint import Link
    from quicoll_transport.security.credentials import Credentials

MS = 1_000_000
SERVER, CLIENT = ("10.0.0.1", 1), ("10.0.0.2", 1)


def test_a_conversation_does_not_set_the_timer_for_each_datagram(
    virtual_credentials_of: Callable[..., Credentials],
) -> None:
    exchanges, times_set = 200, [0]

    async def main(loop: VirtualLoop) -> None:
        net = Net(loop)

        def opened(name: str, address: tuple[str, int]) -> Endpoint:
            return Endpoint(
                credentials=virtual_credentials_of(name),
                config=EndpointConfig(lost_after_ns=2_000 * MS, connect_ns=2_000 * MS),
                io=MemoryIO(net, address),
                loop=loop,
                incarnation=1,
                authorize=lambda identity: None,
                on_link=lambda link: None,
                wall_clock=today,
            )

        server, client = opened("b", SERVER), opened("a", CLIENT)
        ours = client.link(server.identity, addresses=[SERVER], dial=True)
        await ours.wait_up()
        theirs = server.links[client.identity]
        over = loop.create_future()
        told = [0]

        def answered(link: Link, data: bytes) -> None:
            told[0] += 1
            if told[0] < exchanges:
                link.send_app(data)
            else:
                over.set_result(None)

        ours.listen(answered, lambda link: None)
        theirs.listen(lambda link, data: link.send_app(data), lambda link: None)
        call_at = loop.call_at

        def counted(when: float, callback: Callable[..., object], *arguments: Any, **how: Any) -> asyncio.TimerHandle:
            times_set[0] += callback.__qualname__ == "Endpoint._on_timer"
            return call_at(when, callback, *arguments, **how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_at", counted)
            ours.send_app(b"ball")
            await over
        # Nothing was lost by that: a peer that falls silent is noticed in time.
        net.hosts.pop(SERVER)
        began, lost = loop.time(), asyncio.Event()
        ours.listen(answered, lambda link: lost.set() if link.ended else None)
        await lost.wait()
        assert 1.0 < loop.time() - began < 2.1
        await client.aclose()
        await server.aclose()

    run_virtually(main, seed="timer")
    assert times_set[0] < exchanges / 2
