"""What two endpoints send each other under a seed, as one digest: of every datagram's time, ends and bytes.

`PYTHONPATH=tests/helpers python -m quicoll_fuzz.transcript --seed 1 --algorithm p256` prints the digest and the number
of datagrams. Messages go both ways on several channels at once, and one datagram in twenty is lost, so that much is
sent again.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import sys
from typing import TYPE_CHECKING

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.security.authority import KeyAlgorithm, ephemeral
from quicoll_transport.security.identity import WORKER

from .virtual import MemoryIO, Net, VirtualLoop, run_virtually, today

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

__all__ = ["transcript"]

CHANNELS = 6
MESSAGES = 8  # on each channel, each way
LOSS = 0.05


async def _exchange(loop: VirtualLoop, net: Net, seed: int, algorithm: KeyAlgorithm) -> None:
    draw = random.Random(f"{seed}/certificates").randbytes
    made = ephemeral("j", [(WORKER, "a"), (WORKER, "b")], algorithm=algorithm, now=today(), entropy=draw)
    accepted: asyncio.Future[Link] = loop.create_future()
    a, b = (
        Endpoint(
            credentials=credentials,
            config=EndpointConfig(lost_after_ns=20 * 10**9, connect_ns=60 * 10**9),
            io=MemoryIO(net, (f"10.0.0.{number}", 4433)),
            loop=loop,
            incarnation=1,
            authorize=lambda identity: None,
            on_link=accepted.set_result,
            wall_clock=today,
        )
        for number, credentials in enumerate(made.values(), 1)
    )
    link = a.link(b.identity, addresses=[b.address], dial=True)
    await link.wait_up()
    rng = random.Random(seed)
    words = [[rng.randbytes(rng.choice([10, 3000, 90_000])) for _ in range(MESSAGES)] for _ in range(CHANNELS)]
    ends = (link, await accepted)

    async def say(end: Link, number: int) -> None:
        for transfer in [end.channel(number).send(word) for word in words[number]]:
            await transfer.future

    async def hear(end: Link, number: int) -> None:
        for word in words[number]:
            if await end.channel(number).receive(timeout=600) != word:
                raise AssertionError(f"channel {number} altered a message")

    await asyncio.gather(*(work(end, number) for number in range(CHANNELS) for end in ends for work in (say, hear)))
    await a.aclose()
    await b.aclose()


def transcript(seed: int, algorithm: KeyAlgorithm = "ed25519") -> tuple[str, int]:
    """The digest, and the number of datagrams that were sent. Raises what the exchange raises."""
    rng, digest, sent = random.Random(f"{seed}/loss"), hashlib.sha256(), 0

    async def main(loop: VirtualLoop) -> None:
        def tap(data: bytes, source: Address, destination: Address) -> list[tuple[float, bytes, Address]]:
            nonlocal sent
            sent += 1
            digest.update(f"{loop.now!r} {source} {destination} {len(data)} ".encode() + data)
            return [] if rng.random() < LOSS else [(0.0, data, source)]

        net = Net(loop)
        net.tap = tap
        await _exchange(loop, net, seed, algorithm)

    run_virtually(main, seed=str(seed))
    return digest.hexdigest(), sent


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="quicoll_fuzz.transcript", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--algorithm", choices=["ed25519", "p256"], default="ed25519")
    options = parser.parse_args()
    sys.stdout.write("{} {}\n".format(*transcript(options.seed, options.algorithm)))
