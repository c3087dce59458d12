"""The cost of a plan: every rank's lanes walked on a model of the network; and the choice of the cheapest algorithm.

The model. A message occupies, one after the other, its sender's processor (`message` seconds), its sender's port, the
path between the two, its receiver's port and its receiver's processor. Each carries one message at a time, first come
first served; ports and path overlap, so that a long message costs its bytes once, at the slowest of them, and
`latency` once. Ranks on one site have a path for each pair; all that goes from one site to another shares one path.
Combining occupies a processor for the bytes that are read. A lane's steps wait as `plan.model` says, as many lanes
are open at a time as an executor opens, and as there, a lane ends only when its rank has heard that what it sent has
arrived: one delay more for the rank that sends last. It is LogGP (Alexandrov et al. 1997, J. Parallel Distrib. Comput.
44(1)) with contention: close enough to say which of two plans is faster and by about how much, not a promise of
seconds: there is no loss, no traffic of others, no congestion control.

Beside each figure stands the limit that no plan can beat (`limit`): for an all-reduce of S bytes over N ranks at rate
B, 2 (N - 1) / N * S / B and two one-way delays.

The choice. `choose` predicts each algorithm that keeps the canonical bits and takes the cheapest. It is a function of
its arguments alone and computes with IEEE 754 doubles, in one order, so ranks that hold equal arguments choose alike.
What ranks measure differs, therefore they exchange it, take the elementwise maximum and round up to powers of two
(`agreed`): a difference of less than a factor of two is not worth a disagreement between two runs.

Everything here is pure.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quicoll.errors import LocalError
from quicoll.plan.broadcasts import all_gather, broadcast
from quicoll.plan.chunks import MIB
from quicoll.plan.hierarchical import MOVES
from quicoll.plan.model import CopyStep, Plan, RecvStep, ReduceStep, SendStep, operands
from quicoll.plan.moves import gather, scatter
from quicoll.plan.reductions import CANONICAL, MIN_SHARE_BYTES, all_reduce, reduce, reduce_scatter
from quicoll.plan.routes import normal_sites

__all__ = [
    "FAR",
    "NEAR",
    "Flight",
    "Forecast",
    "NetworkModel",
    "agreed",
    "choose",
    "has_choice",
    "limit",
    "predict",
    "quantised",
]

# Beyond this many ranks a walk takes longer than it can save (0.1 s of the engine's time); see `choose`.
MAX_WALKED = 16
_EXCHANGE_BYTES = (
    1 << 18
)  # beyond, exchange is never the cheapest, having (world - 1) times the bytes, and expensive to walk
# What sites are like where nothing says so: (one-way seconds, bytes/s) within one, and between two.
NEAR, FAR = (1e-4, 125e6), (25e-3, 25e6)
# Where nothing is measured yet.
_DEFAULT_RATE = 1 << 27  # bytes/s: about what one core encrypts and checks
_MESSAGE_S = 100e-6
_COMBINE_RATE = 2e9  # bytes/s read

_PLANNERS: dict[str, Callable[..., Plan]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "gather": gather,
    "scatter": scatter,
}
_KNOWN: dict[str, tuple[str, ...]] = {**CANONICAL, **MOVES}


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """A network as the cost model sees it.

    Attributes:
        latency: latency[a][b] is the one-way seconds from rank a to b.
        rate: rate[a][b] is the bytes a second of the path from a to b.
        sites: A number for each rank; paths between two sites are shared.
        message: Seconds of a processor for each message, at each end.
        combine: Bytes that a processor combines in a second.
    Raises:
        LocalError: The tables have another size than `sites`, or a value is out of its range.
    """

    latency: tuple[tuple[float, ...], ...]
    rate: tuple[tuple[float, ...], ...]
    sites: tuple[int, ...]
    message: float = _MESSAGE_S
    combine: float = _COMBINE_RATE

    def __post_init__(self) -> None:
        world = len(self.sites)
        for name, table in (("latency", self.latency), ("rate", self.rate)):
            if len(table) != world or any(len(row) != world for row in table):
                raise LocalError(f"{name} must be {world} rows of {world}")
        if not all(0 <= value < math.inf for row in self.latency for value in row):
            raise LocalError("a latency is not negative, and finite")
        if not all(0 < value < math.inf for row in self.rate for value in row):
            raise LocalError("a rate is above 0 and finite")

    @property
    def world(self) -> int:
        return len(self.sites)

    @staticmethod
    def between(
        sites: Sequence[int],
        *,
        latency: float,
        rate: float,
        far_latency: float | None = None,
        far_rate: float | None = None,
        message: float = _MESSAGE_S,
    ) -> NetworkModel:
        """Make a network with two kinds of path: within a site, and between any two sites (by default the same).

        Args:
            sites: A number for each rank.
            latency: One-way seconds within a site.
            rate: Bytes a second within a site.
            far_latency: One-way seconds between sites.
            far_rate: Bytes a second between sites.
            message: Seconds of a processor for each message.
        Returns:
            The network.
        Raises:
            LocalError: A value is out of its range.
        """
        across = (latency if far_latency is None else far_latency, rate if far_rate is None else far_rate)
        kinds = [[(latency, rate) if a == b else across for b in sites] for a in sites]
        return NetworkModel(
            tuple(tuple(kind[0] for kind in row) for row in kinds),
            tuple(tuple(kind[1] for kind in row) for row in kinds),
            normal_sites(sites, len(sites)),
            message=message,
        )

    def port(self, rank: int) -> float:
        """Bytes per second of a rank's own port: its fastest path."""
        return max((rate for peer, rate in enumerate(self.rate[rank]) if peer != rank), default=float("inf"))


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


def choose(
    op: str,
    world: int,
    nbytes: int,
    leaves: int,
    sites: Sequence[int],
    network: NetworkModel,
    *,
    chunk_bytes: int = MIB,
    itemsize: int = 4,
    wide_itemsize: int = 4,
    loose: int = 1,
    root: int = 0,
) -> str:
    """Choose the cheapest algorithm.

    Parts count as equal, the size as the next power of two; ties go to the first in `CANONICAL` or `MOVES`. Beyond
    MAX_WALKED ranks nothing is walked: hierarchical if there are several sites; else for a reduction tree where the
    tensor has one owner and its messages to all ranks take longer than the tree's levels; else the first.

    Args:
        op: One of `CANONICAL` or `MOVES`.
        world: Number of ranks.
        nbytes: Of the tensor.
        leaves: Of a reduction.
        sites: A number for each rank.
        network: Equal on all ranks, so that all choose alike.
        chunk_bytes: The longest message.
        itemsize: Bytes of an element.
        wide_itemsize: Bytes of an element of a reduction's accumulator.
        loose: As in `quicoll.plan.reductions`.
        root: Where there is one.
    Returns:
        The algorithm's name.
    Raises:
        LocalError: The operation has one algorithm only.
    """
    known = _KNOWN.get(op, ())
    if not known:
        raise LocalError(f"{op} has one algorithm")
    numbered = normal_sites(sites, world)
    several = max(numbered) > 0
    if not has_choice(op, world, nbytes, sites):
        return known[0]
    if world > MAX_WALKED:
        if several:
            return "hierarchical"
        return "tree" if nbytes <= MIN_SHARE_BYTES and _levels_pay(network) else known[0]
    size = 1 << (nbytes - 1).bit_length()
    return _choose(op, world, size, leaves, numbered, network, chunk_bytes, (itemsize, wide_itemsize, loose, root))


def has_choice(op: str, world: int, nbytes: int, sites: Sequence[int]) -> bool:
    """Return whether `choose` depends on the network: moves differ only where there are several sites."""
    return world > 1 and nbytes > 0 and (op in CANONICAL or (op in MOVES and len(set(sites)) > 1))


def _levels_pay(network: NetworkModel) -> bool:
    """Return whether log2(world) delays in a row are shorter than world messages in a row, for few bytes."""
    world = network.world
    delay = max(map(max, network.latency))
    levels = (world - 1).bit_length()
    return levels * (delay + 2 * network.message) < delay + (world - 1) * network.message


@lru_cache(maxsize=256)
def _choose(
    op: str,
    world: int,
    nbytes: int,
    leaves: int,
    sites: tuple[int, ...],
    network: NetworkModel,
    chunk_bytes: int,
    item: tuple[int, int, int, int],
) -> str:
    best = ("", float("inf"))
    for algorithm in _KNOWN[op]:
        if algorithm == "hierarchical" and max(sites) == 0:
            continue  # it is direct then
        if algorithm == "exchange" and nbytes > _EXCHANGE_BYTES:
            continue
        seconds = predict(_sketch(op, algorithm, world, nbytes, leaves, sites, chunk_bytes, item), network).seconds
        if seconds < best[1]:
            best = (algorithm, seconds)
    return best[0]


def _sketch(
    op: str,
    algorithm: str,
    world: int,
    nbytes: int,
    leaves: int,
    sites: tuple[int, ...],
    chunk_bytes: int,
    item: tuple[int, int, int, int],
) -> list[Plan]:
    """Plans in at most two chunks for each owner: enough to tell costs apart, quickly walked."""
    itemsize, wide_itemsize, loose, root = item
    elements = -(-nbytes // itemsize)
    counts = [elements // world + (rank < elements % world) for rank in range(world)]
    given: dict[str, Any] = {
        "algorithm": algorithm,
        "world": world,
        "itemsize": itemsize,
        "chunk_bytes": max(chunk_bytes, -(-nbytes // (2 * world))),
        "sites": sites,
    }
    if op in CANONICAL:
        given |= {"leaves": leaves, "wide_itemsize": wide_itemsize, "loose": loose}
    given |= {"elements": elements} if op in ("all_reduce", "reduce", "broadcast") else {"counts": counts}
    if op in ("reduce", "broadcast", "gather", "scatter"):
        given["root"] = root
    return [_PLANNERS[op](rank=rank, **given) for rank in range(world)]


def quantised(value: int) -> int:
    """Return the next power of two, at least 1."""
    return 1 << max(0, value - 1).bit_length()


def agreed(measured: Sequence[Sequence[int]], sites: Sequence[int]) -> NetworkModel:
    """Make the network that all ranks use for their choice out of what each has measured.

    Args:
        measured: By rank: latency to each rank in microseconds, then rate to each in bytes a second, 0 where not known;
            as `quantised` returns them.
        sites: A number for each rank.
    Returns:
        The elementwise maximum, of both directions.
    Raises:
        LocalError: A row has the wrong length or a value out of bounds.
    """
    world = len(measured)
    if any(len(row) != 2 * world or not all(0 <= value < 1 << 62 for value in row) for row in measured):
        raise LocalError("measurements of another world size")
    ranks = range(world)
    latency = [[max(1, measured[a][b], measured[b][a]) / 1e6 if a != b else 0.0 for b in ranks] for a in ranks]
    rate = [[max(measured[a][world + b], measured[b][world + a]) for b in ranks] for a in ranks]
    return NetworkModel(
        tuple(map(tuple, latency)),
        tuple(tuple(float(value or _DEFAULT_RATE) for value in row) for row in rate),
        normal_sites(sites, world),
    )


# ---------------------------------------------------------------------------------------------------------------------
# The walk


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
            self._at(time, lambda now, number=number: self._go(rank, number, now))  # type: ignore[misc]

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
        self._busy[rank] = begin + network.message
        start = max(self._busy[rank], self._out[rank])
        self._out[rank] = start + nbytes / self._ports[rank]
        here, there = network.sites[rank], network.sites[to]
        path = (rank, to, True) if here == there else (here, there, False)
        enter = max(start, self._paths.get(path, 0.0))
        leave = max(enter + nbytes / network.rate[rank][to], self._out[rank])
        self._paths[path] = leave
        latency = network.latency[rank][to]
        head, tail = enter + latency, leave + latency

        def comes(then: float) -> None:
            """The first byte is there: the receiver's port is taken in the order of these."""
            full = max(max(then, self._in[to]) + nbytes / self._ports[to], tail)
            self._in[to] = full
            self._at(full, taken)

        def taken(then: float) -> None:
            ready = max(then, self._busy[to]) + network.message
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

        self._at(head, comes)
