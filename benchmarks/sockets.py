"""Datagrams per second of CPU time through two UDP sockets on loopback, with and without the system's help.

    python benchmarks/sockets.py [--sizes 100 1452 8900] [--rounds 15] [--mib 16] [--json FILE]

Runs of datagrams go from one `UdpSocket` to another in the same process, as an endpoint would send them: up to 64 KiB,
then the receiver reads. CPU time is that of the process, so it has the kernel's part of both sides too. In each round
all ways take their turn: GSO and GRO, GSO alone, GRO alone, neither; the ratio to "neither" is taken within the round.
Printed are medians over the rounds, and from where to where the middle half of the ratios lies. What arrives is
counted; a round that loses a datagram ends the run with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from unittest.mock import patch

from quicoll_transport.net import offload
from quicoll_transport.net.offload import Offload
from quicoll_transport.net.runs import DatagramRun
from quicoll_transport.net.udp import UdpSocket

WAYS = {
    "GSO and GRO": Offload(sends=True, receives=True),
    "GSO alone": Offload(sends=True, receives=False),
    "GRO alone": Offload(sends=False, receives=True),
    "neither": Offload(sends=False, receives=False),
}
_BURST = 64 << 10  # bytes under way at a time: below what any kernel's receive buffer holds, its overhead included


async def measure(way: Offload, size: int, total: int) -> float:
    """Return datagrams per second of CPU time, sent and received."""
    loop = asyncio.get_running_loop()
    with patch.object(offload, "supported", lambda: way):
        sender, receiver = UdpSocket("127.0.0.1", 0, loop=loop), UdpSocket("127.0.0.1", 0, loop=loop)
    arrived = 0

    def count(runs: list[DatagramRun]) -> None:
        nonlocal arrived
        arrived += sum(len(run) for run in runs)

    receiver.start(count, lambda address, trouble: None)
    burst = min(128, max(1, _BURST // size))
    run = DatagramRun(memoryview(bytearray(burst * size)), size, receiver.local_address)
    sent = 0
    began = time.process_time()
    while sent * size < total:
        sender.send([run])
        sent += burst
        deadline = time.monotonic() + 2.0
        while arrived < sent:
            await asyncio.sleep(0)
            if time.monotonic() > deadline:
                raise SystemExit(f"{sent - arrived} of {sent} datagrams of {size} bytes did not arrive")
    spent = time.process_time() - began
    sender.close()
    receiver.close()
    return sent / spent


def compare(size: int, rounds: int, total: int) -> dict[str, dict[str, float]]:
    """Return for each way: datagrams per second of CPU time, and the ratio to "neither" with its quartiles."""
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            rates[name].append(asyncio.run(measure(way, size, total)))
    figures: dict[str, dict[str, float]] = {}
    for name, found in rates.items():
        ratios = sorted(rate / plain for rate, plain in zip(found, rates["neither"], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        figures[name] = {
            "datagrams per CPU second": round(statistics.median(found)),
            "ratio": round(middle, 2),
            "ratio, lower quartile": round(low, 2),
            "ratio, upper quartile": round(high, 2),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1452, 8900])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=16, help="in each turn; a tenth below 1000 bytes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if offload.supported() != WAYS["GSO and GRO"]:
        raise SystemExit(f"this system has not both of GSO and GRO: {offload.supported()}")
    results = {}
    for size in options.sizes:
        results[size] = compare(size, options.rounds, (options.mib << 20) // (10 if size < 1000 else 1))
        for name, figures in results[size].items():
            rate, ratio = figures["datagrams per CPU second"], figures["ratio"]
            spread = f"{figures['ratio, lower quartile']} to {figures['ratio, upper quartile']}"
            sys.stdout.write(f"{size:6} bytes  {name:12} {rate:10,.0f} /s  {ratio:6.2f} ({spread})\n")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
