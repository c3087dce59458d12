"""All-reduce on a ring: the fewest bytes, many latencies, and an order of its own.

Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2). The
elements are divided into one segment for each rank; segment s starts at rank s + 1, goes round, collecting each
rank's part, and ends at rank s, which finishes it; then the result goes round again. 2 (p - 1) latencies. The order
of a segment is

    (...((c[s+1] op c[s+2]) op c[s+3]) ... op c[s])        ranks modulo p

where c[r] is rank r's own part: the left fold ((n0 op n1) op n2) ... over its maximal nodes of the canonical tree.
So its bits are fixed by (elements, world, leaves), chunks make no difference, but another world size gives others.
A rank without leaves passes on what it gets. Partials travel in the accumulator's type; only a lone first leaf
travels in the tensor's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.plan.chunks import Piece, interleaved, shares
from quicoll.plan.model import Buf, Lane, Pair, PlanStep, RecvStep, ReduceStep, Scratch, SendStep, Span, Tree

if TYPE_CHECKING:
    from quicoll.plan.canonical import CanonicalTree

__all__ = ["ring_lanes"]


def ring_lanes(canonical: CanonicalTree, elements: int, wide_itemsize: int, chunk_bytes: int) -> tuple[list[Lane], int]:
    """Return the lanes of this rank, and how many have to be open at a time."""
    limit = max(1, chunk_bytes // wide_itemsize)
    segments = shares(elements, canonical.world)
    table = interleaved(list(enumerate(segments)), limit)
    return [_round(canonical, last, piece, 2 * number) for number, (last, piece) in enumerate(table)], len(segments)


def _round(canonical: CanonicalTree, last: int, piece: Piece, index: int) -> Lane:
    """One chunk's way round: message `index` collects, from rank last + 1 to `last`; `index` + 1 brings the result."""
    world, size = canonical.world, piece[1] - piece[0]
    order = [(last + 1 + i) % world for i in range(world)]
    place = order.index(canonical.rank)
    before, after = order[place - 1], order[(place + 1) % world]
    collected = sum(canonical.held[r] for r in order[:place])  # leaves in what arrives here
    steps: list[PlanStep] = []
    scratch: list[Scratch] = []
    parts: list[Tree] = []
    if collected:
        arriving = Span(Buf.SCRATCH, 0, 0, size, wide=collected > 1)
        scratch.append(Scratch(size, wide=collected > 1))
        steps.append(RecvStep(before, index, arriving))
        parts.append(arriving)
    if canonical.held[canonical.rank]:
        parts.append(_left_fold([canonical.tree(node, piece, {}) for node in canonical.nodes[canonical.rank]]))
    result = Span(Buf.OUTPUT, 0, *piece)
    if canonical.rank == last:
        steps.append(ReduceStep(result, _left_fold(parts), finish=True))
    else:
        if parts:
            value = _left_fold(parts)
            if isinstance(value, Pair):
                partial = Span(Buf.SCRATCH, len(scratch), 0, size, wide=True)
                scratch.append(Scratch(size, wide=True))
                steps.append(ReduceStep(partial, value, finish=False))
                value = partial
            steps.append(SendStep(after, index, value))
        steps.append(RecvStep(before, index + 1, result))
    if world > 1 and after != last:
        steps.append(SendStep(after, index + 1, result))
    return Lane(tuple(steps), tuple(scratch))


def _left_fold(trees: list[Tree]) -> Tree:
    value = trees[0]
    for tree in trees[1:]:
        value = Pair(value, tree)
    return value
