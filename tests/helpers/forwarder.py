"""A mapped port, as a router or a container's host has it: what comes to its address goes to another one, and back.

Each sender gets a socket of its own on the far side, as with NAT, so the target sees the forwarder and not the sender.
"""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["Forwarder"]


class Forwarder:
    """`async with Forwarder(target) as forwarder`: `forwarder.port` on 127.0.0.1 stands for `target`.

    target may be set later, when it is known. most: longer datagrams are lost. count: those that went to the target.
    """

    def __init__(self, target: tuple[str, int] | None = None, *, most: int = 65535) -> None:
        self.target = target
        self.most = most
        self.port = 0
        self.count = 0
        self._front: asyncio.DatagramTransport | None = None
        self._backs: dict[Any, asyncio.DatagramTransport] = {}
        self._opening: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Forwarder:
        loop = asyncio.get_running_loop()
        self._front, _ = await loop.create_datagram_endpoint(lambda: _Side(self._arrived), local_addr=("127.0.0.1", 0))
        self.port = self._front.get_extra_info("sockname")[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._opening):
            task.cancel()
        for transport in (self._front, *self._backs.values()):
            if transport is not None:
                transport.close()
        await asyncio.sleep(0)

    def _arrived(self, data: bytes, sender: Any) -> None:
        if len(data) > self.most:
            return
        if (back := self._backs.get(sender)) is not None:
            self.count += 1
            back.sendto(data)
            return
        task = asyncio.ensure_future(self._open(data, sender))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, data: bytes, sender: Any) -> None:
        def answered(answer: bytes, _: Any) -> None:
            if self._front is not None:
                self._front.sendto(answer, sender)

        back, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _Side(answered), remote_addr=self.target
        )
        if sender in self._backs:  # another of its datagrams was faster
            back.close()
        self._backs.setdefault(sender, back)
        self._arrived(data, sender)


class _Side(asyncio.DatagramProtocol):
    def __init__(self, on_data: Any) -> None:
        self._on_data = on_data

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._on_data(data, addr)

    def error_received(self, exc: Exception) -> None:
        pass  # nobody listens behind it; QUIC will notice by itself
