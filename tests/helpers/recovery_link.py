"""A transfer over a simulated link: the real loss recovery and congestion control, packets without contents.

One direction carries data, the other acknowledgements; both lose and delay packets at random, from a seed. Unless it is
paced, a sender sends at once, as one run, what the window allows: the least favourable case for a path that reorders.
Several transfers may share a line, and its queue: `run_together`. Hosts may come late, with all that came meanwhile.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quicoll_transport.link.ranges import Ranges
from quicoll_transport.quic.pacer import Pacer
from quicoll_transport.quic.recovery import LossRecovery, PacketRun

if TYPE_CHECKING:
    from quicoll_transport.quic.arrival_line import ArrivalShare
    from quicoll_transport.quic.controller import Controller

DATAGRAM = 1452
MS = 1_000_000
_AHEAD_NS = 10**15  # the receiver's clock, of the sender's


@dataclass
class Line:
    """One direction. rate: bytes a second of the bottleneck, 0 for none; queue: bytes that wait before it.

    burst: mean length of a burst of losses (Gilbert and Elliott), 1 for independent losses.
    """

    seed: int
    loss: float = 0.0
    burst: float = 1.0
    delay_ns: int = 2 * MS
    jitter_ns: int = 0
    rate: int = 0
    queue: int = 1 << 30
    dropped: int = 0
    dark: tuple[int, int] = (0, 0)  # nothing passes from .. until
    _free_ns: int = 0
    _is_bad: bool = False
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def arrival(self, nbytes: int, now_ns: int) -> int | None:
        """When a packet that is sent now arrives; None: never."""
        lost = self._loses() or self.dark[0] <= now_ns < self.dark[1]
        delay = self.delay_ns + int(self._random.random() * self.jitter_ns)
        if self.rate:
            begin = max(now_ns, self._free_ns)
            if (begin - now_ns) * self.rate // 10**9 > self.queue:
                lost = True
            else:
                self._free_ns = begin + nbytes * 10**9 // self.rate
                delay += self._free_ns - now_ns
        self.dropped += lost
        return None if lost else now_ns + delay

    def _loses(self) -> bool:
        drawn = self._random.random()
        if self.burst == 1.0:
            return drawn < self.loss
        leave = 1 / self.burst
        self._is_bad = drawn >= leave if self._is_bad else drawn < leave * self.loss / (1 - self.loss)
        return self._is_bad


class BusyHost:
    """A host that does something else now and then: what comes meanwhile is read when it is back.

    every_ns: from the end of one such time to the next, on average. most_ns: the longest; half of that on average.
    stamped: whether it knows when something came that it reads later.
    """

    def __init__(self, seed: int, *, every_ns: int, most_ns: int, stamped: bool = True) -> None:
        self.stamped = stamped
        self._random = random.Random(seed)
        self._every_ns, self._most_ns = every_ns, most_ns
        self._begin_ns = self._end_ns = 0

    def reads(self, at_ns: int) -> int:
        """When it reads what comes at a time; times may go back a little."""
        while self._end_ns <= at_ns:
            self._begin_ns = self._end_ns + int(self._random.expovariate(1 / self._every_ns))
            self._end_ns = self._begin_ns + int(self._random.random() * self._most_ns)
        return self._end_ns if self._begin_ns <= at_ns else at_ns


class Receiver:
    """Acknowledges each second packet at once, and each that comes out of order; others within 25 ms."""

    def __init__(self, delay_ns: int) -> None:
        self.got = Ranges()
        self.largest, self.unacked, self.first_ns = -1, 0, 0
        self.due_ns: int | None = None
        self._delay_ns = delay_ns

    def receive(self, number: int, came_ns: int, now_ns: int) -> bool:
        """Whether to acknowledge now."""
        in_order = number == self.largest + 1
        self.got.add(number)
        self.largest = max(self.largest, number)
        self.unacked += 1
        if not in_order or self.unacked >= 2:
            return True
        if self.due_ns is None:
            self.first_ns, self.due_ns = came_ns, now_ns + self._delay_ns
        return False

    def ranges(self) -> list[tuple[int, int]]:
        """The newest 32 ranges, descending."""
        found = list(itertools.islice(reversed(self.got), 32))
        self.unacked, self.due_ns = 0, None
        return found


class Transfer:
    """`packets` packets from one end to the other; `run` returns the nanoseconds that it took.

    arrived: how many have arrived by now. begin_ns: when the first is sent. hosts: who sends, and who receives; None:
    hosts that have nothing else to do. stamps: whether acknowledgements say when they were sent. arrivals: what comes
    to the receiver of this, and what it allots; None: it allots nothing.
    """

    def __init__(
        self,
        packets: int,
        controller: Controller,
        forth: Line,
        back: Line,
        *,
        recovery: type[LossRecovery[list[int]]] = LossRecovery,
        ack_delay_ns: int = 25 * MS,
        paced: bool = False,
        begin_ns: int = 0,
        hosts: tuple[BusyHost, BusyHost] | None = None,
        stamps: bool = False,
        arrivals: ArrivalShare | None = None,
    ) -> None:
        self._hosts, self._stamps, self._arrivals = hosts, stamps, arrivals
        self.recovery = recovery(controller, rtt_ns=2 * forth.delay_ns, max_ack_delay_ns=ack_delay_ns)
        self._pacer = Pacer(DATAGRAM, begin_ns) if paced else None
        self.now_ns = 0
        self.arrived = 0
        self.timeouts = self.sent = 0
        self._forth, self._back = forth, back
        self._receiver = Receiver(ack_delay_ns)
        self._queue = deque(range(packets))
        self._undelivered = set(range(packets))
        self._asked = packets
        self._number = 0
        self._events: list[tuple[int, int, str, object]] = []
        self._count = 0
        self._schedule("begin", None, begin_ns)

    def run(self, limit_ns: int = 600 * 10**9) -> int:
        while not self.is_done:
            at = self.due_ns()
            assert at is not None, "stuck"
            assert at < limit_ns, "too slow"
            self.step(at)
        return self.now_ns

    def ask(self, packets: int) -> None:
        """Let so many more packets be sent, from now on."""
        more = range(self._asked, self._asked + packets)
        self._asked += packets
        self._queue.extend(more)
        self._undelivered.update(more)
        self._schedule("begin", None, self.now_ns)

    @property
    def is_done(self) -> bool:
        return not self._undelivered

    def due_ns(self) -> int | None:
        """When something happens next; None: never."""
        paced_ns = self._pacer.due_ns if self._pacer is not None else None
        due = [at for at in (self.recovery.deadline(), self._receiver.due_ns, paced_ns) if at is not None]
        if self._hosts is not None and due:
            due = [self._hosts[0].reads(max(self.now_ns, min(due)))]
        due += [self._events[0][0]] if self._events else []
        return max(self.now_ns, min(due)) if due else None

    def step(self, now_ns: int) -> None:
        """Let happen what is due."""
        recovery = self.recovery
        self.now_ns = now_ns
        while self._events and self._events[0][0] <= self.now_ns:
            _, _, kind, what = heapq.heappop(self._events)
            if kind == "data":
                assert isinstance(what, tuple)
                self.arrived += 1
                if self._arrivals is not None:
                    self._arrivals.on_arrived(DATAGRAM, self.recovery.rtt.min_ns, what[1])
                if self._receiver.receive(what[0], what[1], self.now_ns):
                    self._acknowledge(self.now_ns - what[1])
            elif kind == "begin":
                pass
            else:
                assert isinstance(what, tuple)
                outcome = recovery.on_ack(what[0], what[1], self.now_ns, *what[2:])
                for run, start, stop in outcome.acked:
                    self._undelivered.difference_update(run.items[0][start - run.first : stop - run.first])
                self._again(outcome.lost)
        if self._receiver.due_ns is not None and self._receiver.due_ns <= self.now_ns:
            self._acknowledge(self.now_ns - self._receiver.first_ns)
        probes = 0
        deadline = recovery.deadline()
        if deadline is not None and deadline <= self.now_ns:
            timeout = recovery.on_timeout(self.now_ns)
            probes = timeout.probes
            self.timeouts += probes > 0
            self._again(timeout.lost)
            self._again(timeout.again)
        if self._pacer is not None:
            self._pacer.begin_turn()
        while self._send(probes) and self._pacer is not None:
            probes = 0

    def _again(self, pieces: list[tuple[PacketRun[list[int]], int, int]]) -> None:
        for run, start, stop in pieces[::-1]:
            chunks = run.items[0][start - run.first : stop - run.first]
            self._queue.extendleft(chunk for chunk in chunks[::-1] if chunk in self._undelivered)

    def _acknowledge(self, delay_ns: int) -> None:
        came_ns = self._back.arrival(60, self.now_ns)
        ranges = self._receiver.ranges()
        if came_ns is not None:
            read_ns, known_ns = self._read(0, came_ns)
            stamp_ns = self.now_ns + _AHEAD_NS if self._stamps else None
            fair_rate = None if self._arrivals is None else self._arrivals.fair_rate(self.now_ns)
            self._schedule("ack", (ranges, delay_ns, known_ns, stamp_ns, fair_rate), read_ns)

    def _read(self, end: int, came_ns: int) -> tuple[int, int]:
        """When the sender (0) or the receiver (1) reads what comes at a time, and when it thinks that this came."""
        if self._hosts is None:
            return came_ns, came_ns
        host = self._hosts[end]
        read_ns = host.reads(came_ns)
        return read_ns, came_ns if host.stamped else read_ns

    def _schedule(self, kind: str, what: object, at_ns: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_ns, self._count, kind, what))

    def _send(self, probes: int) -> bool:
        """Send what may leave at once as one run; return whether anything did."""
        recovery, chunks = self.recovery, []
        room = recovery.room // DATAGRAM
        if self._pacer is not None and room and self._queue:
            controller = recovery.controller
            rate = controller.rate(recovery.rtt.smoothed_ns)
            wanted = min(room, len(self._queue)) * DATAGRAM
            room = self._pacer.allowance(rate, wanted, self.now_ns, controller.arrears_ns) // DATAGRAM
        room = max(room, probes)
        while self._queue and len(chunks) < room:
            chunk = self._queue.popleft()
            if chunk in self._undelivered and chunk not in chunks:
                chunks.append(chunk)
        if not self._queue:
            recovery.on_app_limited()
        if not chunks:
            return False
        if self._pacer is not None:
            self._pacer.spend(len(chunks) * DATAGRAM)
        first = self._number
        self._number += len(chunks)
        self.sent += len(chunks)
        recovery.on_sent(PacketRun(first, self._number, DATAGRAM, 0, self.now_ns, (chunks,)))
        for number in range(first, self._number):
            came_ns = self._forth.arrival(DATAGRAM, self.now_ns)
            if came_ns is not None:
                read_ns, known_ns = self._read(1, came_ns)
                self._schedule("data", (number, known_ns), read_ns)
        return True


def run_together(transfers: Sequence[Transfer], until_ns: int) -> None:
    """Let transfers that share lines go on until a time, or until none has anything left."""
    heap: list[tuple[int, int]] = []
    for i, transfer in enumerate(transfers):
        if (at := transfer.due_ns()) is not None:
            heapq.heappush(heap, (at, i))
    while heap and heap[0][0] <= until_ns:
        now_ns, i = heapq.heappop(heap)
        transfers[i].step(now_ns)
        if not transfers[i].is_done and (at := transfers[i].due_ns()) is not None:
            heapq.heappush(heap, (at, i))
