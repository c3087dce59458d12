"""A network as the cost of a plan sees it, and how ranks make one out of what each has measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quicoll.errors import LocalError
from quicoll.plan.model import LANES_PER_WIDTH
from quicoll.plan.routes import normal_sites

__all__ = ["FAR", "MEMORY_RATE", "NEAR", "NetworkModel", "agreed", "messages", "quantised"]

# What sites are like where nothing says so: (one-way seconds, bytes/s) within one, and between two.
NEAR, FAR = (1e-4, 125e6), (25e-3, 25e6)
MEMORY_RATE = 1 << 32
"""Bytes a second at which a processor copies and sums what goes through a host's memory; of no other path, so a path of
this rate is one of these."""

# Where nothing is measured yet.
_DEFAULT_RATE = 1 << 27  # bytes/s: about what one core encrypts and checks
_MESSAGE_S = 100e-6
_COMBINE_RATE = 2e9  # bytes/s read
# Of a long path; see `messages`.
_LONG_S = 0.01
_LONG_CHUNK = 128 << 10
_LEAST_OPEN, _MOST_OPEN = 4 << 20, 64 << 20
_MOST_LANES = 512


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
        """Bytes per second of a rank's own port: its fastest path to another host."""
        paths = [rate for peer, rate in enumerate(self.rate[rank]) if peer != rank]
        return max([rate for rate in paths if rate != MEMORY_RATE] or paths, default=float("inf"))

    def shared(self, a: int, b: int) -> bool:
        """Return whether what goes from rank a to b goes through the memory of a host."""
        return self.rate[a][b] == MEMORY_RATE


def quantised(value: int) -> int:
    """Return the next power of two; 0 for 0, which is not known."""
    return 1 << (value - 1).bit_length() if value > 0 else 0


def agreed(measured: Sequence[Sequence[int]], sites: Sequence[int]) -> NetworkModel:
    """Make the network that all ranks use for their choice out of what each has measured.

    Args:
        measured: By rank: latency to each rank in microseconds, then rate to each in bytes a second, 0 where not known;
            as `quantised` returns them.
        sites: A number for each rank.
    Returns:
        The elementwise maximum, of both directions. A path whose rate neither end knows is as fast as the fastest that
        is known of its kind, within a site or between two, through no memory: one that was not asked yet is neither
        avoided nor preferred.
    Raises:
        LocalError: A row has the wrong length or a value out of bounds.
    """
    world = len(measured)
    if any(len(row) != 2 * world or not all(0 <= value < 1 << 62 for value in row) for row in measured):
        raise LocalError("measurements of another world size")
    ranks = range(world)
    latency = [[max(1, measured[a][b], measured[b][a]) / 1e6 if a != b else 0.0 for b in ranks] for a in ranks]
    rate = [[max(measured[a][world + b], measured[b][world + a]) for b in ranks] for a in ranks]
    fastest = [0, 0]  # between two sites, and within one
    for a in ranks:
        for b in ranks:
            if rate[a][b] != MEMORY_RATE:
                near = sites[a] == sites[b]
                fastest[near] = max(fastest[near], rate[a][b])
    return NetworkModel(
        tuple(map(tuple, latency)),
        tuple(tuple(float(rate[a][b] or fastest[sites[a] == sites[b]] or _DEFAULT_RATE) for b in ranks) for a in ranks),
        normal_sites(sites, world),
    )


def messages(network: NetworkModel, chunk_bytes: int) -> tuple[int, int]:
    """Return the longest message of a plan on a network, and how many lanes are open for each of its width.

    A lost packet holds up the message that it is of for a round trip, and what follows from that; so where a delay is
    _LONG_S or more messages are short. (At 5 ms, and one packet of 10,000 lost, short ones took a tenth longer.) To
    keep such a path busy more bytes have to be open than twice what it holds, since a lane ends at the other end.

    Args:
        network: Equal on all ranks, so that their plans fit.
        chunk_bytes: The longest message that was asked for.
    """
    delay = max(map(max, network.latency))
    if delay < _LONG_S or chunk_bytes <= 0:
        return chunk_bytes, LANES_PER_WIDTH
    chunk = min(chunk_bytes, _LONG_CHUNK)
    held = 2 * max(
        2 * late * rate
        for latencies, rates in zip(network.latency, network.rate, strict=True)
        for late, rate in zip(latencies, rates, strict=True)
    )
    lanes = -(-int(min(max(held, _LEAST_OPEN), _MOST_OPEN)) // chunk)
    return chunk, min(max(lanes, LANES_PER_WIDTH), _MOST_LANES)
