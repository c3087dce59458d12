"""The nodes of the canonical tree that each rank holds, and what a set of ranks has to send of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quicoll.numerics.canonical_order import leaves_of, split, subtrees
from quicoll.plan.model import Buf, Pair, Span, Tree

if TYPE_CHECKING:
    from quicoll.plan.chunks import Piece

__all__ = ["CanonicalTree"]


class CanonicalTree:
    """The canonical tree over the leaves of all ranks, as one rank sees it.

    A node inside a loose one is loose too, so a rank that needs a loose node has been sent all its leaves.

    Attributes:
        nodes: By rank, the fewest nodes that make up what it holds.
        held: By rank, how many leaves.
        loose: A node of at most so many leaves is not computed to be sent; its leaves are sent one by one, because they
            are fewer bytes.
    """

    def __init__(self, rank: int, world: int, leaves: int, loose: int = 1) -> None:
        self.rank = rank
        self.world = world
        self.leaves = leaves
        self.loose = loose
        self._shards = [leaves_of(r, world, leaves) for r in range(world)]
        self.first = self._shards[rank].start
        self.nodes = [self._travelling(shard.start, shard.stop) for shard in self._shards]
        self.held = [len(shard) for shard in self._shards]

    def cover(self, ranks: Sequence[int]) -> tuple[Piece, ...]:
        """Return the fewest nodes that make up the leaves of these ranks, in order."""
        if len(ranks) == 1:
            return self.nodes[ranks[0]]
        runs: list[Piece] = []
        for rank in sorted(ranks):
            shard = self._shards[rank]
            if runs and runs[-1][1] == shard.start:
                runs[-1] = (runs[-1][0], shard.stop)
            elif shard:
                runs.append((shard.start, shard.stop))
        return tuple(node for run in runs for node in self._travelling(*run))

    def _travelling(self, start: int, stop: int) -> tuple[Piece, ...]:
        found: list[Piece] = []
        for a, b in subtrees(start, stop, self.leaves):
            found += [(leaf, leaf + 1) for leaf in range(a, b)] if b - a <= self.loose else [(a, b)]
        return tuple(found)

    def tree(self, node: Piece, piece: Piece, known: Mapping[Piece, Span]) -> Tree:
        """Return the tree under `node`, down to the nodes in `known` and to this rank's own leaves."""
        if node in known:
            return known[node]
        if node[1] - node[0] == 1:
            return Span(Buf.INPUT, node[0] - self.first, *piece)
        middle = split(*node)
        return Pair(self.tree((node[0], middle), piece, known), self.tree((middle, node[1]), piece, known))
