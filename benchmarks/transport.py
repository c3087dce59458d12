"""One message at a time between two processes: this transport and stock aioquic.asyncio, in turn, in the same run.

    python benchmarks/transport.py [--sizes 65536 1048576 ...] [--datagram 1452 8900] [--repeats 3] [--json FILE]

Both get the same datagram size, flow-control windows, cipher and congestion control. For this transport the clock runs
from `send` until the receiver's checksum held and its acknowledgement is here; the buffer is posted before. For stock
aioquic it runs from `write` until a one-byte answer to the whole stream is here; nothing is checked there and the bytes
stay in pieces. The two take turns, size by size, and the best run of each counts: whatever disturbs a run makes it
slower. Both ends share the machine, so with fewer than two free cores the absolute numbers say little; the ratio of the
two stands. A quarter of a second of idle time, and one small message, come before each size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from aioquic import tls
from aioquic.asyncio import QuicConnectionProtocol, connect, serve
from aioquic.quic.configuration import QuicConfiguration

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.link.frames import TAG_SIZE
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.quic import SessionConfig
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import WORKER, Identity

if TYPE_CHECKING:
    from quicoll_transport.security.credentials import Credentials

SIZES = [64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20]
WINDOW = 16 << 20
SENDER, RECEIVER = Identity("bench", WORKER, "sender"), Identity("bench", WORKER, "receiver")


def tag(number: int) -> bytes:
    return number.to_bytes(TAG_SIZE, "big")


# -- this transport --------------------------------------------------------------------------------------------------


def endpoint(credentials: Credentials, datagram: int, links: list[Link]) -> Endpoint:
    loop = asyncio.get_running_loop()
    return Endpoint(
        credentials=credentials,
        config=EndpointConfig(
            lost_after_ns=60_000_000_000, session=SessionConfig(datagram_bytes=datagram, window_bytes=WINDOW)
        ),
        io=UdpSocket("127.0.0.1", 0, loop=loop),
        loop=loop,
        incarnation=time.time_ns(),
        authorize=lambda identity: None,
        on_link=links.append,
    )


async def receive_ours(pipe: Connection, credentials: Credentials, datagram: int) -> None:
    """Posts a buffer for each (number, size) that the pipe names, until the pipe says None."""
    links: list[Link] = []
    host = endpoint(credentials, datagram, links)
    pipe.send(host.address)
    while (order := await asyncio.to_thread(pipe.recv)) is not None:
        number, size = order
        transfer = host.link(SENDER).post(tag(number), memoryview(bytearray(size)))
        pipe.send("posted")
        await transfer.future
    await host.aclose()


@asynccontextmanager
async def send_ours(pipe: Connection, credentials: Credentials, datagram: int) -> AsyncIterator[Link]:
    address = pipe.recv()
    host = endpoint(credentials, datagram, [])
    link = host.link(RECEIVER, addresses=[address], dial=True)
    await link.wait_up()
    yield link
    pipe.send(None)
    await host.aclose()


async def time_ours(pipe: Connection, link: Link, number: int, data: bytearray) -> float:
    pipe.send((number, len(data)))
    await asyncio.to_thread(pipe.recv)
    start = time.perf_counter()
    await link.send(tag(number), memoryview(data)).future
    return time.perf_counter() - start


# -- stock aioquic ---------------------------------------------------------------------------------------------------


def stock_configuration(datagram: int, *, is_client: bool, credentials: Credentials) -> QuicConfiguration:
    made = QuicConfiguration(
        alpn_protocols=["bench"],
        is_client=is_client,
        max_data=WINDOW,
        max_stream_data=WINDOW,
        max_datagram_size=datagram,
        congestion_control_algorithm="cubic",
        cipher_suites=[tls.CipherSuite.AES_128_GCM_SHA256],
        verify_mode=ssl.CERT_NONE if is_client else None,
    )
    if not is_client:
        made.certificate, made.private_key = credentials.certificate, credentials.private_key
    return made


async def receive_stock(pipe: Connection, credentials: Credentials, datagram: int) -> None:
    tasks: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 20):
            pass
        writer.write(b"!")
        writer.write_eof()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(answer(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    configuration = stock_configuration(datagram, is_client=False, credentials=credentials)
    server = await serve("127.0.0.1", 0, configuration=configuration, stream_handler=accept)
    pipe.send(server._transport.get_extra_info("sockname"))  # type: ignore[union-attr]
    await asyncio.to_thread(pipe.recv)
    server.close()


@asynccontextmanager
async def send_stock(
    pipe: Connection, credentials: Credentials, datagram: int
) -> AsyncIterator[QuicConnectionProtocol]:
    host, port = pipe.recv()[:2]
    configuration = stock_configuration(datagram, is_client=True, credentials=credentials)
    async with connect(host, port, configuration=configuration) as client:
        yield client
    pipe.send(None)


async def time_stock(client: QuicConnectionProtocol, data: bytearray) -> float:
    start = time.perf_counter()
    reader, writer = await client.create_stream()
    writer.write(data)
    writer.write_eof()
    assert await reader.read() == b"!"
    return time.perf_counter() - start


# -- the run ---------------------------------------------------------------------------------------------------------


def receiver(pipe: Connection, credentials: Credentials, datagram: int, ours: bool) -> None:
    asyncio.run((receive_ours if ours else receive_stock)(pipe, credentials, datagram))


async def compare(
    pipes: list[Connection], credentials: Credentials, *, datagram: int, sizes: list[int], repeats: int
) -> list[dict[str, object]]:
    """The rows for one datagram size; `pipes` lead to the two receivers, ours first."""
    rows: list[dict[str, object]] = []
    numbers = iter(range(1 << 30))
    async with (
        send_ours(pipes[0], credentials, datagram) as link,
        send_stock(pipes[1], credentials, datagram) as client,
    ):
        for size in sizes:
            data = bytearray((os.urandom(min(size, 1 << 16)) * (size // min(size, 1 << 16) + 1))[:size])
            await asyncio.sleep(0.25)
            await time_ours(pipes[0], link, next(numbers), bytearray(1000))
            await time_stock(client, bytearray(1000))
            ours, stock = [], []
            for _ in range(repeats):
                ours.append(await time_ours(pipes[0], link, next(numbers), data))
                stock.append(await time_stock(client, data))
            rates = {"quicoll": round(size / min(ours) / 1e6, 1), "stock": round(size / min(stock) / 1e6, 1)}
            ratio = round(min(stock) / min(ours), 2)
            runs = {
                name: [round(1e3 * s, 2) for s in seconds] for name, seconds in (("quicoll", ours), ("stock", stock))
            }
            rows.append({"datagram": datagram, "bytes": size, "mb_per_s": rates, "ratio": ratio, "runs_ms": runs})
            print(
                f"{datagram:>6} {size:>10}  quicoll {rates['quicoll']:>7}  stock {rates['stock']:>7} MB/s  x {ratio}",
                file=sys.stderr,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--datagram", type=int, nargs="+", default=[1452, 8900])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    made = ephemeral("bench", [(WORKER, "sender"), (WORKER, "receiver")])
    context = multiprocessing.get_context("fork")  # the children inherit their keys, which nothing can serialize
    rows: list[dict[str, object]] = []
    for datagram in options.datagram:
        pipes, processes = [], []
        for ours in (True, False):
            near, far = context.Pipe()
            processes.append(context.Process(target=receiver, args=(far, made[RECEIVER], datagram, ours), daemon=True))
            processes[-1].start()
            pipes.append(near)
        rows += asyncio.run(
            compare(pipes, made[SENDER], datagram=datagram, sizes=options.sizes, repeats=options.repeats)
        )
        for process in processes:
            process.join()
    report = {
        "benchmark": "transport",
        "rows": rows,
        "repeats": options.repeats,
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "aioquic": version("aioquic"),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
