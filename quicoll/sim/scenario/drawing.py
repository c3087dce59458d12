"""How scenarios are drawn from seeds, by a generator of its own for each part that is to change nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["SwarmDraw", "drawn_for"]

T = TypeVar("T")


def drawn_for(what: str, seed: int) -> SwarmDraw:
    """Return what one part of a scenario is drawn by. what: the part; "" for what has no part of its own."""
    name = f"{what}/{seed}" if what else str(seed)
    return SwarmDraw(random.Random(f"quicoll.sim/swarm/{name}"))  # noqa: S311 - a simulation has no secrets


class SwarmDraw:
    """Draws from a generator. rng: whose `random` alone is called."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._random()

    def log_between(self, low: float, high: float) -> float:
        """With equal chance for equal ratios."""
        return low * math.exp(self._random() * math.log(high / low))

    def one_of(self, values: Sequence[T]) -> T:
        return values[int(self._random() * len(values))]

    def some_of(self, values: Sequence[T]) -> list[T]:
        """Some, not none, in their order."""
        return [value for value in values if self.chance(0.5)] or [self.one_of(values)]

    def sides(self, values: Sequence[T]) -> tuple[list[T], list[T]]:
        """Two sides, neither empty. Of values, two at least."""
        first = self.one_of(values)
        rest = [value for value in values if value is not first]
        second = self.one_of(rest)
        one, other = [first], [second]
        if self.chance(0.3):  # these two alone
            return one, other
        single = self.chance(0.4)  # one against all others
        for value in rest:
            if value is not second:
                (one if not single and self.chance(0.5) else other).append(value)
        return one, other
