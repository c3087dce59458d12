"""Links between far hosts, what an operation could take at best there, and the figures of those that were measured.

A *link* is what every host has: a rate both ways, a round trip to any other host, packets that are lost on the way and
a queue in front of the rate. A *cell* is one operation on one link with so many ranks. It is run once for each seed,
from nothing: its first operation begins with the first window of its connections, and is told of by itself. What is
told is each time over the *ideal*, the time that the bytes take at the link's rate and the delays that a ring has one
after the other. Phases that overlap may be a little below it; encryption, headers and resends are above it.

What is measured is bounded: ranks, size and operations of a cell by what `WanCell` takes, and its time by `limit_s`, of
the clock that it runs on: an operation that would not end within it is not begun, and one that has not ended is given
up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from quicoll.errors import LocalError
from quicoll_transport.quic.terms import CONTROLLERS

__all__ = ["LINKS", "WAN_KINDS", "WanCell", "WanFigure", "WanLink", "parse_link", "wan_report"]

WAN_KINDS = ("all_reduce", "transfer")
"""all_reduce over all ranks, or a tensor from rank 0 to rank 1."""

_RANGES = {
    "mbit": (0.1, 100_000.0),
    "rtt_ms": (0.1, 10_000.0),
    "loss": (0.0, 0.3),
    "burst": (1.0, 1000.0),
    "queue": (0.01, 100.0),
    "back_mbit": (0.1, 100_000.0),
}
_LEAST_QUEUE = 64 << 10
_MOST_MIB = 1024  # of all ranks, which are on this machine
_WORD = re.compile(r"(?:(burst|queue|back)=)?(\d+(?:\.\d*)?|\.\d+)(kbit|mbit|gbit|us|ms|s|%)?")
_IN_MBIT = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
_IN_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True, slots=True)
class WanLink:
    """What each host is connected by.

    Attributes:
        name: For people.
        mbit: Mbit/s of the host's access, both ways.
        rtt_ms: Round trip to any other host, without queues.
        loss: Probability that a packet is lost on its way in one direction.
        burst: Mean length of a burst of losses; 1 for independent ones.
        queue: What waits in front of the rate at most, in round trips at that rate, but 64 KiB at least.
        back_mbit: Mbit/s towards rank 0 where it is another rate; 0 where it is not.
    Raises:
        LocalError: A value is out of its range.
    """

    name: str
    mbit: float
    rtt_ms: float
    loss: float = 0.0
    burst: float = 1.0
    queue: float = 1.0
    back_mbit: float = 0.0

    def __post_init__(self) -> None:
        for what, (least, most) in _RANGES.items():
            value = getattr(self, what)
            if not least <= value <= most and (what, value) != ("back_mbit", 0.0):
                raise LocalError(f"link {self.name!r}: {what} is {least:g} to {most:g}, not {value:g}")

    def queue_bytes(self, mbit: float) -> int:
        """Return what the queue in front of a rate of this link holds."""
        return max(int(mbit * 125 * self.rtt_ms * self.queue), _LEAST_QUEUE)


LINKS = {
    link.name: link
    for link in (
        WanLink("metro", 500, 10, 0.0001),
        WanLink("wan", 200, 50, 0.001),
        WanLink("badwan", 100, 100, 0.01),
        WanLink("satellite", 50, 300, 0.001),
        WanLink("loss2", 100, 50, 0.02),
        WanLink("bursts", 100, 50, 0.01, burst=8.0),
        WanLink("asymmetric", 200, 50, 0.001, back_mbit=50),
        WanLink("shallow", 200, 50, 0.001, queue=0.25),
    )
}
"""Links by name. Their queues hold a round trip, as routers' do by the old rule; that of "shallow" a quarter of it."""


def parse_link(text: str) -> WanLink:
    """Return the link that someone has described: rate, round trip, then what he likes, in any order.

    Args:
        text: As "200mbit 50ms 0.1% burst=8 queue=0.25 back=50mbit". The percentage is of packets lost.
    Raises:
        LocalError: It cannot be read, or a value is out of its range.
    """
    found: dict[str, float] = {}
    for word in text.lower().split():
        match = _WORD.fullmatch(word)
        name, value = _value(match) if match is not None else ("", 0.0)
        if not name or name in found:
            raise LocalError(
                "a link is written as '200mbit 50ms 0.1% burst=8 queue=0.25 back=50mbit', of which rate and round trip "
                f"are needed; not {text!r}"
                + (f": {word!r} is there twice" if name else f": {word!r} is nothing of that")
            )
        found[name] = value
    if "mbit" not in found or "rtt_ms" not in found:
        raise LocalError(f"link {text!r} needs a rate and a round trip, as '200mbit 50ms'")
    return WanLink(" ".join(text.lower().split()), **found)


def _value(match: re.Match[str]) -> tuple[str, float]:
    """Return the attribute that a word of a link stands for, "" for none, and its value."""
    key, unit, number = match[1], match[3], float(match[2])
    if key in ("burst", "queue"):
        return ("" if unit else key), number
    if unit in _IN_MBIT:
        return ("back_mbit" if key else "mbit"), number * _IN_MBIT[unit]
    if key is None and unit in _IN_MS:
        return "rtt_ms", number * _IN_MS[unit]
    if key is None and unit == "%":
        return "loss", number / 100
    return "", number


@dataclass(frozen=True, slots=True)
class WanCell:
    """One operation on one link, done several times.

    Attributes:
        link: Of each host.
        kind: Of WAN_KINDS.
        mib: MiB of the tensor.
        ranks: Each on a host of its own.
        congestion: Congestion control of quicoll's connections.
        operations: How often, with the first.
        limit_s: Seconds for all of them.
    Raises:
        LocalError: A value is out of its range.
    """

    link: WanLink
    kind: str
    mib: int
    ranks: int
    congestion: str
    operations: int
    limit_s: float = 900.0

    def __post_init__(self) -> None:
        if self.kind not in WAN_KINDS:
            raise LocalError(f"measured are {' and '.join(WAN_KINDS)}, not {self.kind!r}")
        if self.congestion not in CONTROLLERS:
            raise LocalError(f"congestion control is one of {', '.join(CONTROLLERS)}, not {self.congestion!r}")
        for what, value, least, most in (
            ("MiB", self.mib, 1, 256),
            ("ranks", self.ranks, 2, 16),
            ("operations", self.operations, 2, 100),
        ):
            if not least <= value <= most:
                raise LocalError(f"{what} are {least} to {most}, not {value}")
        if self.mib * self.ranks > _MOST_MIB:
            raise LocalError(f"the tensors of all ranks have {_MOST_MIB} MiB at most, not {self.mib * self.ranks}")
        if not 1.0 <= self.limit_s <= 3600.0:
            raise LocalError(f"a cell has 1 to 3600 seconds, not {self.limit_s:g}")
        if self.kind == "transfer" and self.ranks != 2:
            raise LocalError(f"transfer is between 2 ranks, not {self.ranks}")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.mib << 20

    @property
    def ideal_s(self) -> float:
        """Seconds of its bytes at the link's rate, and of the delays of a ring, or of the one of a transfer."""
        link = self.link
        delay = link.rtt_ms / 2e3
        if self.kind == "transfer":
            return self.nbytes / (link.mbit * 125_000) + delay
        rate = min(link.mbit, link.back_mbit or link.mbit) * 125_000
        return 2 * (self.ranks - 1) / self.ranks * self.nbytes / rate + 2 * (self.ranks - 1) * delay

    def __str__(self) -> str:
        return f"{self.link.name}, {self.ranks} ranks, {self.kind} of {self.mib} MiB, {self.congestion}"


@dataclass(frozen=True, slots=True)
class WanFigure:
    """What one contender took in a cell, over the ideal.

    Attributes:
        first: The first operation, the median over the seeds.
        median: Of all later ones.
        p90: The 90th percentile of all later ones.
        operations: How many later ones there were.
    """

    first: float
    median: float
    p90: float
    operations: int

    @classmethod
    def of(cls, runs: Sequence[Sequence[float]], ideal_s: float) -> WanFigure | None:
        """Return the figure of the seconds of each seed's operations; None where no seed had a second operation."""
        later = sorted(seconds / ideal_s for run in runs for seconds in run[1:])
        if not later:
            return None
        first = median(run[0] / ideal_s for run in runs if run)
        return cls(first, median(later), later[len(later) * 9 // 10], len(later))


def wan_report(cell: WanCell, samples: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Return a cell as it stands in the report.

    Args:
        cell: What was measured.
        samples: Seconds of the operations of each seed, by contender.
    """
    figures = {name: WanFigure.of(runs, cell.ideal_s) for name, runs in samples.items()}
    return {
        "link": {name: getattr(cell.link, name) for name in ("name", *_RANGES)},
        "kind": cell.kind,
        "mib": cell.mib,
        "ranks": cell.ranks,
        "congestion": cell.congestion,
        "ideal_s": cell.ideal_s,
        "over_ideal": {
            name: figure and {"first": figure.first, "median": figure.median, "p90": figure.p90}
            for name, figure in figures.items()
        },
        "seconds": {name: [list(run) for run in runs] for name, runs in samples.items()},
    }
