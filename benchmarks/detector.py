"""How often the failure detector is wrong, and how soon it is right; what an observer costs.

    python benchmarks/detector.py [--hours 50] [--seconds 30] [--seed 1] [--only traces load observer] [--json FILE]

traces: two detectors on a virtual clock over a path with seeded delay, jitter and loss, `--hours` of link time for each
path and setting; then the peer dies at 200 random moments. Heartbeats and answers are sent again after a probe timeout
(RFC 9002 section 6.2) when they are lost; nothing else is sent, which is the hardest case: every silence is the path's.
load: two processes on this machine, four links for each setting, all at the same time under the same load, `--seconds`
for each kind of load. Real sockets, real clocks: these figures depend on the machine. observer: small messages with and
without an observer, in turn.

Figures (Chen, Toueg & Aguilera 2002, section 2): false suspicions and false losses per hour of link time (the mistake
rate), the time from death to verdict (detection time; median and largest).
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import multiprocessing
import os
import platform
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.events import LinkChanged, Stalled, SuspicionChanged, TransportEvent, TransportObserver
from quicoll_transport.link.core import LinkState
from quicoll_transport.link.detector import Detector, DetectorConfig, Liveness
from quicoll_transport.link.frames import TAG_SIZE
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import COORDINATOR, WORKER, Identity

if TYPE_CHECKING:
    from quicoll_transport.security.credentials import Credentials

S, MS, US = 1_000_000_000, 1_000_000, 1_000
HOUR = 3600 * S
SETTINGS: dict[str, int | None] = {"derived": None, "0.5 s": 500 * MS, "1 s": 1 * S, "2 s": 2 * S, "5 s": 5 * S}


# -- traces ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """One way: delay + up to jitter (each packet for itself), loss in runs of `burst` packets on average, and, about
    every `outage_every`, an outage of both ways of up to `outage`."""

    delay_ns: int
    jitter_ns: int
    loss: float
    burst: float = 1.0
    outage_every_ns: int = 0
    outage_ns: int = 0


ROUTES = {
    "lan": Route(100 * US, 100 * US, 0.0001),
    "wan": Route(25 * MS, 5 * MS, 0.005),
    "badwan": Route(75 * MS, 100 * MS, 0.05, burst=4),
    "badwan, outages": Route(75 * MS, 100 * MS, 0.05, burst=4, outage_every_ns=60 * S, outage_ns=2 * S),
}


class Wire:
    """The fate of packets, from one seeded generator; Gilbert's two-state model for each direction."""

    def __init__(self, path: Route, seed: int) -> None:
        self.path = path
        self.rng = random.Random(seed)
        self.bad = [False, False]
        self.outage_from = self.outage_to = -1
        self._next_outage(0)

    def _next_outage(self, now: int) -> None:
        if self.path.outage_every_ns:
            self.outage_from = now + int(self.rng.expovariate(1 / self.path.outage_every_ns))
            self.outage_to = self.outage_from + self.rng.randrange(self.path.outage_ns)

    def delay(self, side: int, now: int) -> int | None:
        """One-way delay, or None for a packet that is lost."""
        path, rng = self.path, self.rng
        while path.outage_every_ns and now > self.outage_to:
            self._next_outage(self.outage_to)
        leave = 1 / path.burst
        enter = leave * path.loss / (1 - path.loss)
        self.bad[side] = rng.random() >= leave if self.bad[side] else rng.random() < enter
        if self.bad[side] or (path.outage_every_ns and now >= self.outage_from):
            return None
        return path.delay_ns + rng.randrange(path.jitter_ns + 1)


class Trace:
    """Two detectors and the wire between them; side 0 is looked at. Side 1 may die."""

    def __init__(self, path: Route, lost_after: int | None, seed: int) -> None:
        self.wire = Wire(path, seed)
        self.config = DetectorConfig.from_lost_after(lost_after)
        self.now = 0
        self.detectors = [Detector(self.config, now_ns=0) for _ in range(2)]
        self.queue: list[tuple[int, int, int, str, int, int]] = []  # when, order, side, what, sent, tries
        self.order = 0
        self.suspicions = self.losses = 0
        self.suspect = False
        self.dead = False

    def push(self, at: int, side: int, what: str, sent: int, tries: int = 0) -> None:
        self.order += 1
        heapq.heappush(self.queue, (at, self.order, side, what, sent, tries))

    def send(self, side: int, what: str, sent: int, tries: int = 0) -> None:
        """From `side`: arrives at the other, or is sent again a probe timeout later, twice as late each time."""
        if self.dead and side == 1:
            return
        delay = self.wire.delay(side, self.now)
        if delay is not None:
            self.push(self.now + delay, 1 - side, what, sent)
        else:
            rto = self.detectors[side].rtt.rto_ns or 100 * MS
            self.push(self.now + ((rto + 25 * MS) << min(tries, 5)), side, "again-" + what, sent, tries + 1)

    def run(self, until: int) -> None:
        """Advance to `until`; where the verdict of side 0 is LOST, a new link begins unless the peer is dead."""
        while True:
            timers = [detector.next_timer() for detector in self.detectors]
            if self.dead:
                timers[1] = 1 << 62
            side = 0 if timers[0] <= timers[1] else 1
            at = min(timers[side], self.queue[0][0] if self.queue else 1 << 62)
            if at > until:
                self.now = until
                return
            self.now = max(self.now, at)
            if self.queue and self.queue[0][0] <= timers[side]:
                self._arrive(*heapq.heappop(self.queue)[2:])
            elif self.detectors[side].handle_timer(self.now):
                self.send(side, "ping", self.now)
            self._judge()
            if self.dead and self.detectors[0].verdict is Liveness.LOST:
                return

    def _arrive(self, side: int, what: str, sent: int, tries: int) -> None:
        if what.startswith("again-"):
            self.send(side, what.removeprefix("again-"), sent, tries)
        elif not (self.dead and side == 1):
            self.detectors[side].heard(self.now)
            if what == "ping":
                self.send(side, "pong", sent)
            else:
                self.detectors[side].pong(sent, self.now)

    def _judge(self) -> None:
        verdict = self.detectors[0].verdict
        suspect = verdict is Liveness.SUSPECT
        self.suspicions += suspect and not self.suspect and not self.dead
        self.suspect = suspect
        if not self.dead and any(detector.verdict is Liveness.LOST for detector in self.detectors):
            self.losses += verdict is Liveness.LOST
            self.detectors = [Detector(self.config, now_ns=self.now) for _ in range(2)]
            self.queue.clear()


def traces(hours: float, seed: int) -> list[dict[str, Any]]:
    rows = []
    for name, path in ROUTES.items():
        for setting, lost_after in SETTINGS.items():
            trace = Trace(path, lost_after, seed)
            trace.run(int(hours * HOUR))
            detection, deadlines = [], []
            for i in range(200):
                one = Trace(path, lost_after, seed + 1 + i)
                died = 30 * S + random.Random(i).randrange(30 * S)
                one.run(died)
                deadlines.append(one.detectors[0].lost_after_ns)
                one.dead = True
                one.run(died + HOUR)
                detection.append(one.now - died)
            rows.append(
                {
                    "path": name,
                    "lost_after": setting,
                    "hours": hours,
                    "suspicions_per_hour": round(trace.suspicions / hours, 3),
                    "losses_per_hour": round(trace.losses / hours, 3),
                    "detection_median_s": round(statistics.median(detection) / S, 3),
                    "detection_max_s": round(max(detection) / S, 3),
                    "deadline_median_s": round(statistics.median(deadlines) / S, 3),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


# -- load ------------------------------------------------------------------------------------------------------------

LINKS = 4
NODES = [(COORDINATOR, "c"), *((WORKER, f"w{i}") for i in range(LINKS * len(SETTINGS)))]


def endpoint(credentials: Credentials, lost_after: int | None, observer: TransportObserver | None) -> Endpoint:
    loop = asyncio.get_running_loop()
    return Endpoint(
        credentials=credentials,
        config=EndpointConfig(lost_after_ns=lost_after, connect_ns=60 * S, handshake_ns=20 * S),
        io=UdpSocket("127.0.0.1", 0, loop=loop),
        loop=loop,
        incarnation=time.time_ns(),
        authorize=lambda identity: None,
        on_link=lambda link: None,
        observer=observer,
    )


def hold_the_lock(stop: threading.Event) -> None:
    """Sorting keeps the interpreter's lock from beginning to end, 0.2 s at a time or more, then a breath."""
    numbers = [random.random() for _ in range(400_000)]
    while not stop.is_set():
        sorted(numbers)
        time.sleep(0.05)


def compute(stop: threading.Event) -> None:
    """A thread that computes in Python competes for the lock at every switch interval."""
    while not stop.is_set():
        sum(i * i for i in range(10_000))


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


async def serve(pipe: Connection, credentials: dict[str, Credentials], hog: Callable[..., None] | None) -> None:
    opened = [endpoint(one, lost_after, None) for one, lost_after in zip(credentials.values(), each(), strict=True)]
    pipe.send([one.address for one in opened])
    stop = threading.Event()
    await asyncio.to_thread(pipe.recv)
    if hog is not None:
        threading.Thread(target=hog, args=(stop,), daemon=True).start()
    await asyncio.to_thread(pipe.recv)
    stop.set()
    await asyncio.gather(*(one.aclose(timeout=0.0) for one in opened))


def each() -> list[int | None]:
    return [lost_after for lost_after in SETTINGS.values() for _ in range(LINKS)]


def serve_process(pipe: Connection, credentials: dict[str, Credentials], hog: Callable[..., None] | None) -> None:
    asyncio.run(serve(pipe, credentials, hog))


async def watch(seconds: float, pipe: Connection, made: dict[Identity, Credentials], load: str) -> list[dict[str, Any]]:
    addresses = await asyncio.to_thread(pipe.recv)
    told: list[list[TransportEvent]] = [[] for _ in addresses]
    opened = [endpoint(made[Identity("bench", COORDINATOR, "c")], each()[i], told[i].append) for i in range(len(told))]
    links: list[Link] = []
    for i, (one, address) in enumerate(zip(opened, addresses, strict=True)):
        links.append(one.link(Identity("bench", WORKER, f"w{i}"), addresses=[address], dial=True))
        await links[-1].wait_up()
    await asyncio.sleep(2.0)
    for events in told:
        events.clear()
    hog, stop = LOADS[load][1], threading.Event()
    pipe.send("go")
    if hog is not None:
        threading.Thread(target=hog, args=(stop,), daemon=True).start()
    spinners = [multiprocessing.Process(target=spin, args=(seconds,)) for _ in range(LOADS[load][0])]
    for spinner in spinners:
        spinner.start()
    await asyncio.sleep(seconds)
    stop.set()
    rows = []
    for n, setting in enumerate(SETTINGS):
        mine = range(n * LINKS, (n + 1) * LINKS)
        events = [event for i in mine for event in told[i]]
        lost = sum(isinstance(event, LinkChanged) and event.state is LinkState.LOST for event in events)
        rows.append(
            {
                "load": load,
                "lost_after": setting,
                "link_seconds": round(seconds * LINKS, 1),
                "suspicions": sum(isinstance(event, SuspicionChanged) and event.suspect for event in events),
                "losses": lost,
                "stalls": sum(isinstance(event, Stalled) for event in events),
                "deadline_s": round(statistics.median(links[i]._core.detector.lost_after_ns for i in mine) / S, 3),
                "rtt_ms": round(statistics.median((links[i].rtt_ns or 0) for i in mine) / MS, 2),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    pipe.send("stop")
    for spinner in spinners:
        spinner.join()
    await asyncio.gather(*(one.aclose(timeout=0.0) for one in opened))
    return rows


CORES = os.cpu_count() or 1
LOADS: dict[str, tuple[int, Callable[..., None] | None]] = {
    "idle": (0, None),
    "4 busy processes a core": (4 * CORES, None),
    "a thread that computes, both processes": (0, compute),
    "a thread that holds the lock, both processes": (0, hold_the_lock),
}


def loads(seconds: float) -> list[dict[str, Any]]:
    rows = []
    context = multiprocessing.get_context("fork")  # keys cannot be pickled
    made = ephemeral("bench", NODES)
    for load in LOADS:
        here, there = context.Pipe()
        theirs = {i.node: one for i, one in made.items() if i.role == WORKER}
        process = context.Process(target=serve_process, args=(there, theirs, LOADS[load][1]), daemon=True)
        process.start()
        rows += asyncio.run(watch(seconds, here, made, load))
        process.join()
    return rows


# -- observer --------------------------------------------------------------------------------------------------------


async def messages_per_second(credentials: dict[Identity, Credentials], observer: TransportObserver | None) -> float:
    ids = list(credentials)
    a, b = (endpoint(credentials[identity], 60 * S, observer) for identity in ids[:2])
    link = a.link(b.identity, addresses=[b.address], dial=True)
    await link.wait_up()
    theirs, count = b.links[a.identity], 1000
    began = time.perf_counter()
    for i in range(count):
        tag = i.to_bytes(TAG_SIZE, "big")
        received = theirs.post(tag, memoryview(bytearray(64)))
        link.send(tag, memoryview(bytes(64)))
        await received.future
    rate = count / (time.perf_counter() - began)
    await asyncio.gather(a.aclose(), b.aclose())
    return rate


def observers() -> dict[str, Any]:
    made = ephemeral("bench", NODES)
    best = {"without": 0.0, "with": 0.0}
    for _ in range(5):
        for name in best:
            observer = (lambda event: None) if name == "with" else None
            best[name] = max(best[name], asyncio.run(messages_per_second(made, observer)))
    row = {f"messages_per_second_{name}": round(rate) for name, rate in best.items()}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hours", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=["traces", "load", "observer"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"python": platform.python_version(), "cores": CORES, "seed": options.seed}
    if "traces" in options.only:
        result["traces"] = traces(options.hours, options.seed)
    if "load" in options.only:
        result["load"] = loads(options.seconds)
    if "observer" in options.only:
        result["observer"] = observers()
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
