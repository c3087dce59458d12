"""From samples to figures: medians, spreads and ratios of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Figure", "Row", "row_of"]


@dataclass(frozen=True, slots=True)
class Figure:
    """What one contender needed for one call of a case, over the rounds of a run.

    Attributes:
        median_s: Seconds, the median of the rounds.
        least_s: The least of them.
        most_s: The most of them.
        cpu_s: Seconds of processor of all ranks together, the median.
    """

    median_s: float
    least_s: float
    most_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A case with a figure for each contender, quicoll first.

    Attributes:
        name: Of the case.
        size: Bytes of its tensor or message.
        figures: By contender.
        ratios: How many times the seconds of each other contender quicoll took: the median over the rounds, each of
            which is a pair of its own. Below 1 quicoll is faster.
    """

    name: str
    size: int
    figures: Mapping[str, Figure]
    ratios: Mapping[str, float]

    def rate(self, contender: str) -> float:
        """Return MB/s of a contender."""
        return self.size / self.figures[contender].median_s / 1e6

    def cpu_per_gb(self, contender: str) -> float:
        """Return seconds of processor of all ranks for 10^9 bytes; the case has to have some."""
        return self.figures[contender].cpu_s / self.size * 1e9


def row_of(line: Mapping[str, Any]) -> Row:
    """Return the row for a line of a result: {"case": ..., "samples": {contender: [{"seconds", "cpu"}, ...]}}."""
    samples: dict[str, Sequence[Mapping[str, float]]] = dict(line["samples"])
    figures = {name: _figure(rounds) for name, rounds in samples.items()}
    ours = [each["seconds"] for each in samples["quicoll"]]
    ratios = {
        name: median(mine / its["seconds"] for mine, its in zip(ours, rounds, strict=True))
        for name, rounds in samples.items()
        if name != "quicoll"
    }
    return Row(line["case"]["name"], line["case"]["size"], figures, ratios)


def _figure(rounds: Sequence[Mapping[str, float]]) -> Figure:
    seconds = [each["seconds"] for each in rounds]
    return Figure(median(seconds), min(seconds), max(seconds), median(each["cpu"] for each in rounds))
