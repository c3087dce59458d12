"""Who computes which logical worker of DiLoCo, and who exchanges what with whom. Pure: numbers of a view alone.

A logical worker is computed by a *home*: one rank, or, where a worker's inner steps are divided into `parts`, all ranks
of a site. Workers are dealt to homes in canonical order, each home a run of them. In a home of several ranks:

    parts       the logical shards of a worker, numbered worker * parts + part. Each rank computes a run of the parts of
                each worker of its home. Gradients are the mean over the parts in canonical order, over all ranks of the
                home: the inner, data parallel level
    the worker  is on all ranks of the home, the same bits: parameters, the inner optimizer's state, residuals. They all
                step it, and hold and stage its row (`quicoll.Sharded(by_site=True)`). So as long as one rank of a home
                is there nothing of its workers is lost
    lanes       the outer level. A fragment's pseudo-gradient is cut into lanes, as many as the largest home has ranks.
                Lane l is exchanged between one rank of each home, the one at place l * ranks // lanes of it, and the
                ranks of a home put the lanes together. So what crosses the way between two sites is what it would be
                for sites of one rank, over the access links of all ranks
    the speaker the first rank of a home speaks for its workers where all ranks hear each other

Invariants.
1. Bits depend on the number of workers and of parts, and on no number of ranks or sites: a part is one leaf of the
   inner reduction, a worker one of the outer, wherever they are; lanes are cut between blocks of the wire format
   (`lane_cuts`), where any cut has the bits of none.
2. Each worker has one home, each part in it one rank, each lane one rank in each home. Homes are in the order of their
   first ranks.

A home may have no worker, where there are more homes than workers, and a rank no part: it takes part in everything with
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from quicoll.numerics.canonical_order import leaves_of

if TYPE_CHECKING:
    from quicoll.state.layout import Layout

__all__ = ["WorkerHome", "lane_cuts"]


@dataclass(frozen=True, slots=True)
class WorkerHome:
    """Where a rank stands in a view.

    Attributes:
        homes: The ranks of each home.
        place: Of the home that is this rank's.
        rank: This rank.
        total: How many logical workers there are.
        parts: Those of each worker of its home that this rank computes.
    """

    homes: tuple[tuple[int, ...], ...]
    place: int
    rank: int
    total: int
    parts: range

    @classmethod
    def of(cls, layout: Layout, rank: int, parts: int) -> WorkerHome:
        """Find a rank's home.

        Args:
            layout: Of the workers' rows in the view; the rank owns or computes some of them, if only none.
            rank: The rank.
            parts: Into how many the inner step of a worker is divided.
        Returns:
            The home.
        """
        homes = tuple(layout.together(place) for place in range(len(layout.owners)))
        place = next(number for number, ranks in enumerate(homes) if rank in ranks)
        ranks = homes[place]
        return cls(homes, place, rank, layout.blocks, leaves_of(ranks.index(rank), len(ranks), parts))

    @property
    def workers(self) -> range:
        """The logical workers of this home."""
        return leaves_of(self.place, len(self.homes), self.total)

    def spoken_by(self, rank: int) -> range:
        """Return the workers for which a rank speaks: those of its home where it is the first rank of one.

        Args:
            rank: Any rank.
        """
        for place, ranks in enumerate(self.homes):
            if rank == ranks[0]:
                return leaves_of(place, len(self.homes), self.total)
        return range(0)

    @property
    def spoken(self) -> list[int]:
        """For how many workers each rank speaks."""
        return [len(self.spoken_by(rank)) for rank in range(sum(map(len, self.homes)))]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this home."""
        return self.homes[self.place]

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for the workers of its home."""
        return self.rank == self.ranks[0]

    @property
    def lanes(self) -> int:
        """Into how many lanes an exchange is cut."""
        return max(map(len, self.homes))

    def carriers(self, lane: int) -> tuple[int, ...]:
        """Return the rank of each home that exchanges a lane.

        Args:
            lane: Its number.
        """
        return tuple(ranks[lane * len(ranks) // self.lanes] for ranks in self.homes)

    def carries(self) -> list[int]:
        """Return the lanes that this rank exchanges, ascending; over the ranks of a home all of them, in order."""
        return [lane for lane in range(self.lanes) if self.carriers(lane)[self.place] == self.rank]


def lane_cuts(size: int, block: int, lanes: int) -> list[slice]:
    """Cut a flat tensor into lanes of nearly equal size, of whole blocks but for its end; some may be empty.

    Args:
        size: Its elements.
        block: So many that are encoded together.
        lanes: How many.
    Returns:
        Where each lane is.
    """
    blocks = -(-size // block)
    cuts = [min(size, block * (lane * blocks // lanes)) for lane in range(lanes + 1)]
    return [slice(start, stop) for start, stop in pairwise(cuts)]
