"""The passages of large calls: how elements are cut into rounds, for reductions and for what is moved as it is.

    Reduced     every rank gives each other one its part of a round, and reduces its own. all_reduce and reduce cut a
                round between all ranks, and copy the parts' results; in reduce_scatter a rank's part is of its own rows
    Moved       every rank gives what it has to all who read it (all_gather, gather, broadcast), or to each his
                own (scatter, all_to_all)

What follows from the sizes follows on every rank from the same ones, which all have compared: in how many rounds,
which elements are of a round and of whom, and where they stand in a chunk. Everything here is pure but for the copies
to the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from quicoll.local.layout import RING
from quicoll.numerics.bundle import flat_pieces

if TYPE_CHECKING:
    from quicoll.local.layout import SegmentLayout
    from quicoll.numerics.bundle import Joined
    from quicoll.numerics.dtypes import Array
    from quicoll.numerics.reduce import After

__all__ = [
    "MIN_STEP",
    "Moved",
    "PartGiven",
    "PartTaken",
    "Passage",
    "Reduce",
    "Reduced",
    "Reducing",
    "Routes",
    "share_out",
]

_PLACES = 4  # of rounds of a movement in a chunk
MIN_STEP = 16  # elements of a leaf that a chunk has room for, at least: parts of it are cut at so many

Reduce: TypeAlias = "Callable[[Sequence[Array], Array, After], None]"
"""Reduces the values of all leaves, in their order, to a result, and says which elements are done."""


class PartGiven(NamedTuple):
    """What a rank gives in a round. reader: for whom; its own number: for all. at: bytes from the start of the chunk.
    values: flat arrays of one type, put there one after the other."""

    reader: int
    at: int
    values: Sequence[Array]


class PartTaken(NamedTuple):
    """What a rank copies in a round. writer: who gives it. reader: as it is given. at: likewise; of a result 0.
    target: flat memory of the output."""

    writer: int
    reader: int
    at: int
    target: Array


class Reducing(NamedTuple):
    """What a rank reduces in a round, of what all give to it.

    given: for each rank bytes from the start of its chunk, and how many there are: the same elements of its leaves, one
    after the other. own: those of this rank's leaves. elements: of a leaf. target: of the output, None where the
    result is for others alone. shown: whether it is for others.
    """

    given: Sequence[tuple[int, int]]
    own: Sequence[Array]
    elements: int
    target: Array | None
    shown: bool


class Passage(Protocol):
    """The way of one call, as one rank goes it (large.py)."""

    @property
    def rounds(self) -> int:
        """How many there are, on every rank."""
        ...

    @property
    def storage(self) -> np.dtype[Any]:
        """The elements' type."""
        ...

    def gives(self, i: int) -> Sequence[PartGiven]:
        """What this rank writes in round i."""
        ...

    def keep(self, i: int) -> None:
        """Copy to the output what this rank gives itself in round i."""
        ...

    def copied(self, i: int) -> Sequence[PartTaken]:
        """What it copies of what others give in round i."""
        ...

    def reducing(self, i: int) -> Reducing | None:
        """What it reduces in round i."""
        ...

    def reduce(self, values: Sequence[Array], out: Array, after: After) -> None:
        """Reduce the leaves of all ranks, in their order, and say which elements are done (`reduce_tree`)."""
        ...

    def results(self, i: int) -> Sequence[PartTaken]:
        """Which results of the others of round i it copies; asked for only where it `wants` them."""
        ...

    @property
    def wants(self) -> bool:
        """Whether results of the others are a part of this rank's output."""
        ...


def share_out(count: int, world: int) -> list[tuple[int, int]]:
    """Divide the elements of a chunk between ranks, at multiples of 16.

    Args:
        count: Elements.
        world: Ranks.
    Returns:
        For each rank the first, and the one after the last.
    """
    cuts = [min(count, -(-count * rank // world // MIN_STEP) * MIN_STEP) for rank in range(world)] + [count]
    return list(pairwise(cuts))


@dataclass(slots=True, eq=False, kw_only=True)
class Reduced:
    """A reduction.

    rank: this one. held: leaves of each rank. leaves: those of this rank, flat. storage: their elements' type. rows:
    elements of the result for each rank, where it is divided; else None. root: who gets it; None: all. output: of this
    rank, flat; of no elements where it gets none. combine: computes.
    """

    layout: SegmentLayout
    rank: int
    held: Sequence[int]
    leaves: Sequence[Array | Joined]
    storage: np.dtype[Any]
    elements: int
    rows: Sequence[int] | None
    root: int | None
    output: Array
    combine: Reduce

    @property
    def step(self) -> int:
        """Elements of a leaf in a round: of all ranks' parts, or of one where the result is divided."""
        step = self.layout.chunk // self.storage.itemsize // max(self.held)
        return max(1, step if self.rows is None else step // len(self.held))

    @property
    def rounds(self) -> int:
        return -(-(self.elements if self.rows is None else max(self.rows)) // self.step)

    @property
    def wants(self) -> bool:
        return self.rows is None and self.root in (None, self.rank)

    def _part(self, i: int, reader: int) -> tuple[int, int, int]:
        """Return which elements of each leaf are a reader's part of a round, and which element of a chunk with one
        leaf they begin at."""
        step = self.step
        if self.rows is None:
            first = i * step
            a, b = share_out(min(step, self.elements - first), len(self.held))[reader]
            return first + a, first + b, a
        start = sum(self.rows[:reader])
        a, b = min(i * step, self.rows[reader]), min((i + 1) * step, self.rows[reader])
        return start + a, start + b, reader * step

    def gives(self, i: int) -> Sequence[PartGiven]:
        found: list[PartGiven] = []
        for reader in range(len(self.held)):
            start, stop, at = self._part(i, reader)
            if reader != self.rank and stop > start and self.leaves:
                values = [piece for leaf in self.leaves for piece in flat_pieces(leaf, start, stop)]
                found.append(PartGiven(reader, at * len(self.leaves) * self.storage.itemsize, values))
        return found

    def keep(self, i: int) -> None:
        """What this rank gives itself is reduced."""

    def copied(self, i: int) -> Sequence[PartTaken]:
        return ()

    def reducing(self, i: int) -> Reducing | None:
        start, stop, at = self._part(i, self.rank)
        if start == stop:
            return None
        size = self.storage.itemsize
        given = [(at * many * size, (stop - start) * many * size) for many in self.held]
        target: Array | None = None
        if self.rows is not None:
            target = self.output[i * self.step : i * self.step + stop - start]
        elif self.wants:
            target = self.output[start:stop]
        shown = self.rows is None and self.root != self.rank
        return Reducing(given, [leaf[start:stop] for leaf in self.leaves], stop - start, target, shown)

    def reduce(self, values: Sequence[Array], out: Array, after: After) -> None:
        self.combine(values, out, after)

    def results(self, i: int) -> Sequence[PartTaken]:
        found: list[PartTaken] = []
        for writer in range(len(self.held)):
            start, stop, _ = self._part(i, writer)
            if writer != self.rank and stop > start:
                found.append(PartTaken(writer, writer, 0, self.output[start:stop]))
        return found


@dataclass(slots=True, eq=False)
class Routes:
    """Which elements go from whom to whom. A rank's output is what comes to it, in the order of those who give it.

    given: elements that each rank gives. parts: of them for each rank, one after the other; None: all of them to each
    one that reads.
    """

    given: Sequence[int]
    parts: Sequence[Sequence[int]] | None = None

    def to(self, reader: int) -> list[tuple[int, int]]:
        """Return for each rank that gives the first element that goes to a reader, and the one after the last."""
        if self.parts is None:
            return [(0, size) for size in self.given]
        return [(sum(row[:reader]), sum(row[: reader + 1])) for row in self.parts]

    def times(self, width: int) -> Routes:
        """Return it in elements, where this one counts rows of so many."""
        parts = None if self.parts is None else [[rows * width for rows in row] for row in self.parts]
        return Routes([rows * width for rows in self.given], parts)

    def coming(self, reader: int) -> int:
        """Return how many elements come to a reader."""
        return sum(stop - start for start, stop in self.to(reader))


class Moved:
    """A movement.

    Its rounds are short: who only reads one waits until it is written. Each stands in another one of a chunk's
    _PLACES, so that memory is written again as late as may be.
    """

    wants = False

    def __init__(
        self, layout: SegmentLayout, rank: int, routes: Routes, given: Array | Joined, output: Array, *, reads: bool
    ) -> None:
        """Settle the rounds.

        Args:
            layout: Of all segments.
            rank: This one.
            routes: Which elements go where.
            given: What this rank gives, flat.
            output: What comes to it, flat; of no elements where it reads nothing.
            reads: Whether it does.
        """
        self.storage: np.dtype[Any] = output.dtype
        self._rank, self._routes, self._given, self._output, self._reads = rank, routes, given, output, reads
        self._world = len(routes.given)
        parts = [routes.given] if routes.parts is None else routes.parts
        self._place = layout.chunk // _PLACES
        step = self._place // self.storage.itemsize
        self._step = max(1, step if routes.parts is None else step // self._world)
        self.rounds = -(-max(max(row, default=0) for row in parts) // self._step)
        self._to = routes.to(rank) if reads else []
        self._starts = [0, *accumulate(stop - start for start, stop in self._to)]

    def _at(self, i: int) -> int:
        """Return at which byte of its chunk a round begins."""
        return i // RING % _PLACES * self._place

    def _cut(self, i: int, start: int, stop: int) -> tuple[int, int]:
        return min(start + i * self._step, stop), min(start + (i + 1) * self._step, stop)

    def gives(self, i: int) -> Sequence[PartGiven]:
        parts = self._routes.parts
        if parts is None:
            a, b = self._cut(i, 0, self._routes.given[self._rank])
            return [PartGiven(self._rank, self._at(i), flat_pieces(self._given, a, b))] if b > a else ()
        found: list[PartGiven] = []
        for reader, (start, stop) in enumerate(pairwise([0, *accumulate(parts[self._rank])])):
            a, b = self._cut(i, start, stop)
            if reader != self._rank and b > a:
                at = self._at(i) + reader * self._step * self.storage.itemsize
                found.append(PartGiven(reader, at, flat_pieces(self._given, a, b)))
        return found

    def _coming(self, i: int, writer: int) -> tuple[int, Array]:
        """Return the first of a writer's elements that comes here in a round, and where they go."""
        start, stop = self._to[writer]
        a, b = self._cut(i, start, stop)
        at = self._starts[writer] + a - start
        return a, self._output[at : at + b - a]

    def keep(self, i: int) -> None:
        if self._reads:
            first, target = self._coming(i, self._rank)
            if target.size:
                np.copyto(target, self._given[first : first + target.size])

    def copied(self, i: int) -> Sequence[PartTaken]:
        found: list[PartTaken] = []
        each = self._routes.parts is not None
        at = self._at(i) + (self._rank * self._step * self.storage.itemsize if each else 0)
        for writer in range(len(self._to)):
            _, target = self._coming(i, writer)
            if writer != self._rank and target.size:
                found.append(PartTaken(writer, self._rank if each else writer, at, target))
        return found

    def reducing(self, i: int) -> Reducing | None:
        return None

    def reduce(self, values: Sequence[Array], out: Array, after: After) -> None:
        raise AssertionError("a movement reduces nothing")

    def results(self, i: int) -> Sequence[PartTaken]:
        return ()
