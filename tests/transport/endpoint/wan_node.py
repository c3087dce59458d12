"""One end of a link, as a program of its own for a network namespace; test_wanem starts two and talks to them.

Prints one JSON object a line: {"event": ..., "at": monotonic seconds, ...}. Reads one command a line:

    link         make the link (node 1 dials) and wait until it is up                     -> up | failed
    transfer     send COUNT messages of SIZE bytes, by tag and by channel, and receive the peer's; what arrives is
                 compared byte by byte                                                   -> received (each), done
    quit         close and end
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import threading
import time

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.errors import TransportError
from quicoll_transport.link.frames import TAG_SIZE
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.identity import WORKER, Identity

_PORT = 4433


def _say(event: str, **more: object) -> None:
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **more}) + "\n")
    sys.stdout.flush()


def _payload(node: int, number: int, size: int) -> bytes:
    return random.Random(f"{node}/{number}/{size}").randbytes(size)


class Node:
    def __init__(self, options: argparse.Namespace) -> None:
        self.me = options.node
        self.count, self.size = options.count, options.size
        self.begun = 0
        self.words: list[bytes] = []
        config = EndpointConfig(lost_after_ns=int(options.lost_after * 1e9), connect_ns=30_000_000_000)
        loop = asyncio.get_running_loop()
        self.endpoint = Endpoint(
            credentials=Credentials.from_directory(options.certificates, role=WORKER, node=f"n{self.me}"),
            config=config,
            io=UdpSocket(f"10.77.0.{self.me + 1}", _PORT, loop=loop),
            loop=loop,
            incarnation=1,
            authorize=lambda identity: None,
            on_link=self.take,
        )
        self.links: asyncio.Queue[Link] = asyncio.Queue()

    def take(self, link: Link) -> None:
        link.listen(lambda link, data: self.words.append(data), self.state)
        self.links.put_nowait(link)

    def state(self, link: Link) -> None:
        if link.error is not None:
            _say("ended", cause=link.error.cause, kind=type(link.error).__name__)

    async def link(self) -> Link:
        if self.me == 0:
            link = await self.links.get()
        else:
            peer = Identity("wan", WORKER, "n0")
            link = self.endpoint.link(peer, addresses=[("10.77.0.1", _PORT)], dial=True)
            link.listen(lambda link, data: self.words.append(data), self.state)
        await link.wait_up()
        _say("up")
        return link

    async def transfer(self, link: Link) -> None:
        you, first = 1 - self.me, self.begun
        self.begun += self.count
        numbers = range(first, self.begun)
        memories = {number: bytearray(self.size) for number in numbers}
        received = {n: link.post((n << 1 | you).to_bytes(TAG_SIZE, "big"), memoryview(memories[n])) for n in numbers}
        mine = {number: _payload(self.me, number, self.size) for number in numbers}
        sent = [link.send((n << 1 | self.me).to_bytes(TAG_SIZE, "big"), memoryview(mine[n])) for n in numbers]
        channel = link.channel(1)
        for number in numbers:
            sent.append(channel.send(_payload(self.me, -number, 1000)))
            link.send_app(number.to_bytes(8, "big"))
        wrong = 0
        for number in numbers:
            await received[number].future
            wrong += memories[number] != _payload(you, number, self.size)
            wrong += await channel.receive() != _payload(you, -number, 1000)
            _say("received", number=number)
        for transfer in sent:
            await transfer.future
        while len(self.words) < self.begun:  # noqa: ASYNC110 - a program that has no more to do
            await asyncio.sleep(0.01)
        wrong += self.words != [number.to_bytes(8, "big") for number in range(self.begun)]
        stats = link.stats
        _say(
            "done",
            wrong=wrong,
            messages=stats.messages_received,
            received=stats.bytes_received,
            connections=stats.connections,
            corrupt=stats.corrupt,
        )


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--certificates", required=True)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--lost-after", type=float, default=2.0)
    node = Node(parser.parse_args())
    commands: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(commands.put_nowait, line.strip())
        loop.call_soon_threadsafe(commands.put_nowait, "quit")

    threading.Thread(target=read, daemon=True).start()
    _say("ready")
    link: Link | None = None
    while (command := await commands.get()) != "quit":
        try:
            if command == "link":
                link = await node.link()
            elif command == "transfer" and link is not None:
                await node.transfer(link)
        except TransportError as error:
            _say("failed", kind=type(error).__name__, text=str(error))
    await node.endpoint.aclose(timeout=2.0)


if __name__ == "__main__":
    asyncio.run(_main())
