"""What the plans of all ranks take: their lanes walked on a model of the network; and what none can beat.

The model. A message occupies, one after the other, its sender's processor (`message` seconds), its sender's port, the
path between the two, its receiver's port and its receiver's processor. Each carries one message at a time, first come
first served; ports and path overlap, so that a long message costs its bytes once, at the slowest of them, and
`latency` once. What goes through the memory of a host has no port and no path: it is copied by its sender's processor,
and then by its receiver's. Ranks on one site have a path for each pair; all that goes from one site to another shares
one path. Combining occupies a processor for the bytes that are read. A lane's steps wait as `plan.model` says, as many
lanes are open at a time as an executor opens, and as there, a lane ends only when its rank has heard that what it sent
has arrived: one delay more for the rank that sends last. It is LogGP (Alexandrov et al. 1997, J. Parallel Distrib.
Comput. 44(1)) with contention: close enough to say which of two plans is faster and by about how much, not a promise
of seconds: there is no loss, no traffic of others, no congestion control.

Beside each figure stands the limit that no plan can beat (`limit`): for an all-reduce of S bytes over N ranks at rate
B, 2 (N - 1) / N * S / B and two one-way delays.

Everything here is pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from quicoll.errors import LocalError
from quicoll.plan.model import CopyStep, Plan, RecvStep, ReduceStep, SendStep, operands

if TYPE_CHECKING:
    from quicoll.plan.network import NetworkModel

__all__ = ["Flight", "Forecast", "limit", "predict"]


@dataclass(frozen=True, slots=True)
class Flight:
    """One message of a forecast.

    Attributes:
        source: The sending rank.
        to: The receiving rank.
        lane: Its lane in the plans.
        nbytes: Its length.
        start: Seconds at which the sender begins with it.
        end: Seconds at which the receiver is done with it.
    """

    source: int
    to: int
    lane: int
    nbytes: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prediction for a set of plans.

    Attributes:
        seconds: Until the last rank is done.
        done: Seconds until each rank is done.
        flights: All messages, in the order of their start.
        crossing: Bytes that go from one site to another.
        busiest: The most bytes that one rank sends or receives.
    """

    seconds: float
    done: tuple[float, ...]
    flights: tuple[Flight, ...]
    crossing: int
    busiest: int


def predict(plans: Sequence[Plan], network: NetworkModel) -> Forecast:
    """Walk the plans of all ranks on a network.

    Args:
        plans: In rank order.
        network: Of as many ranks.
    Returns:
        Times and bytes.
    Raises:
        LocalError: The network is of another size.
    """
    if len(plans) != network.world:
        raise LocalError(f"a network of {network.world} ranks for {len(plans)} plans")
    walk = _Walk(plans, network)
    walk.run()
    flights = tuple(sorted(walk.flights, key=lambda flight: (flight.start, flight.source, flight.to, flight.lane)))
    crossing = sum(flight.nbytes for flight in flights if network.sites[flight.source] != network.sites[flight.to])
    busiest = max(max(plan.bytes_sent, plan.bytes_received) for plan in plans)
    return Forecast(max(walk.done), tuple(walk.done), flights, crossing, busiest)


# Of (bytes S, world N): the bytes that one port cannot do without, and the delays in a row.
_LIMITS: dict[str, Callable[[int, int], tuple[float, int]]] = {
    "all_reduce": lambda s, n: (2 * (n - 1) / n * s, 2),
    "reduce": lambda s, n: (s, 1),
    "reduce_scatter": lambda s, n: ((n - 1) / n * s, 1),
    "all_gather": lambda s, n: ((n - 1) / n * s, 1),
    "broadcast": lambda s, n: (s, 1),
    "gather": lambda s, n: ((n - 1) / n * s, 1),
    "scatter": lambda s, n: ((n - 1) / n * s, 1),
    "all_to_all": lambda s, n: ((n - 1) / n * s, 1),
    "send": lambda s, n: (s, 1),
    "barrier": lambda s, n: (0, 1),
}


def limit(collective: str, nbytes: int, network: NetworkModel) -> float:
    """Return the seconds that no plan can beat where all ranks and paths are alike: bytes through one port, and delays.

    The all-reduce by exchange takes one delay less, for (N - 1) times the bytes.

    Args:
        collective: Its name.
        nbytes: Of the whole tensor; of all_gather and gather, of the result.
        network: Its fastest port and longest delay count.
    Returns:
        Seconds.
    """
    if network.world == 1:
        return 0.0
    moved, delays = _LIMITS[collective](nbytes, network.world)
    ranks = range(network.world)
    fastest = max(network.port(rank) for rank in ranks)
    return moved / fastest + delays * max(network.latency[a][b] for a in ranks for b in ranks if a != b)


@dataclass(slots=True)
class _Lane:
    """at: the next step. arrived: Recv that are filled. under_way: messages of its own that have not arrived."""

    at: int
    arrived: set[int]
    recvs: int
    under_way: int = 0


class _Walk:
    """Events in the order of time; those of one moment in the order in which they came to be known."""

    def __init__(self, plans: Sequence[Plan], network: NetworkModel) -> None:
        self.plans, self.network = plans, network
        world = len(plans)
        self.done = [0.0] * world
        self.flights: list[Flight] = []
        self._next = [0] * world
        self._lanes: list[dict[int, _Lane]] = [{} for _ in range(world)]
        self._early: dict[tuple[int, int, int], None] = {}
        self._busy = [0.0] * world
        self._out = [0.0] * world
        self._in = [0.0] * world
        self._paths: dict[tuple[int, int, bool], float] = {}
        self._ports = [network.port(rank) for rank in range(world)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._where = [
            {
                (step.peer, step.index): (number, position)
                for number, lane in enumerate(plan.lanes)
                for position, step in enumerate(lane.steps)
                if isinstance(step, RecvStep)
            }
            for plan in plans
        ]

    def run(self) -> None:
        for rank in range(len(self.plans)):
            self._open(rank, 0.0)
        while self._events:
            time, _, event = heapq.heappop(self._events)
            event(time)

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event))

    def _open(self, rank: int, time: float) -> None:
        plan, lanes = self.plans[rank], self._lanes[rank]
        while self._next[rank] < len(plan.lanes) and len(lanes) < plan.open_lanes:
            number = self._next[rank]
            self._next[rank] += 1
            steps = plan.lanes[number].steps
            recvs = {position: step for position, step in enumerate(steps) if isinstance(step, RecvStep)}
            arrived = {at for at, step in recvs.items() if (step.peer, rank, step.index) in self._early}
            lanes[number] = _Lane(0, arrived, len(recvs))
            self._at(time, partial(self._go, rank, number))

    def _go(self, rank: int, number: int, now: float) -> None:
        """Take the steps of a lane until one has to wait or to compute."""
        lane, plan = self._lanes[rank].get(number), self.plans[rank]
        if lane is None:
            return
        made = plan.lanes[number]
        while lane.at < len(made.steps):
            if not lane.arrived.issuperset(made.waits[lane.at]):
                return
            step = made.steps[lane.at]
            lane.at += 1
            if isinstance(step, SendStep):
                self._send(rank, number, step, plan.nbytes(step.src), now)
                lane.under_way += 1
            elif isinstance(step, ReduceStep | CopyStep):
                spans = operands(step.tree) if isinstance(step, ReduceStep) else (step.src,)
                ready = max(now, self._busy[rank]) + sum(map(plan.nbytes, spans)) / self.network.combine
                self._busy[rank] = ready
                self._at(ready, lambda then: self._go(rank, number, then))
                return
        if lane.under_way == 0 and len(lane.arrived) == lane.recvs:
            del self._lanes[rank][number]
            self.done[rank] = max(self.done[rank], now)
            self._open(rank, now)

    def _send(self, rank: int, number: int, step: SendStep, nbytes: int, now: float) -> None:
        network, to = self.network, step.peer
        begin = max(now, self._busy[rank])
        copied = nbytes / network.rate[rank][to] if network.shared(rank, to) else 0.0
        self._busy[rank] = begin + network.message + copied
        latency = network.latency[rank][to]

        def comes(then: float) -> None:
            """The first byte is there: the receiver's port is taken in the order of these."""
            full = max(max(then, self._in[to]) + nbytes / self._ports[to], tail)
            self._in[to] = full
            self._at(full, taken)

        def taken(then: float) -> None:
            ready = max(then, self._busy[to]) + network.message + copied
            self._busy[to] = ready
            self._at(ready, arrives)

        def arrives(then: float) -> None:
            self.flights.append(Flight(rank, to, number, nbytes, begin, then))
            key = (rank, to, step.index)
            lane_number, position = self._where[to][rank, step.index]
            lane = self._lanes[to].get(lane_number)
            if lane is None:
                self._early[key] = None
            else:
                lane.arrived.add(position)
                self._go(to, lane_number, then)
            self._at(then + network.latency[to][rank], told)

        def told(then: float) -> None:
            """The sender hears that it has arrived."""
            self._lanes[rank][number].under_way -= 1
            self._go(rank, number, then)

        if copied:
            self._at(self._busy[rank] + latency, taken)
            return
        start = max(self._busy[rank], self._out[rank])
        self._out[rank] = start + nbytes / self._ports[rank]
        here, there = network.sites[rank], network.sites[to]
        path = (rank, to, True) if here == there else (here, there, False)
        enter = max(start, self._paths.get(path, 0.0))
        leave = max(enter + nbytes / network.rate[rank][to], self._out[rank])
        self._paths[path] = leave
        head, tail = enter + latency, leave + latency
        self._at(head, comes)
