"""All-reduce: every rank gets the reduction over all leaves.

direct. The elements are divided into one share for each rank, the shares into chunks. Every rank sends its part of
a chunk to the chunk's owner, which finishes the canonical tree and sends the result to all. Two latencies, and as
many bytes as a ring: (p - 1) / p * S out and in for each of the two phases (S bytes, p ranks). A rank that holds
several leaves sends the maximal nodes of the tree that lie inside them: one leaf in the tensor's own type, several
reduced to one array of the accumulator's. Bits are those of `quicoll.reduce`: they depend on the leaves in order,
and not on the number of ranks or on chunks.

ring. Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2).
The elements are divided into one segment for each rank; segment s starts at rank s + 1, goes round, collecting each
rank's part, and ends at rank s, which finishes it; then the result goes round again. 2 (p - 1) latencies. The order
of a segment is

    (...((c[s+1] op c[s+2]) op c[s+3]) ... op c[s])        ranks modulo p

where c[r] is rank r's own part: the left fold ((n0 op n1) op n2) ... over its maximal nodes of the canonical tree.
So its bits are fixed by (elements, world, leaves), chunks make no difference, but another world size gives others.
A rank without leaves passes on what it gets. Partials travel in the accumulator's type; only a lone first leaf
travels in the tensor's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from quicoll.errors import LocalError
from quicoll.plan.cut import MIB, Piece, chunks, demand, shares
from quicoll.plan.model import Buf, Lane, Plan, Recv, Reduce, Scratch, Send, Span, Step, Tree
from quicoll.reduce import held, split, subtrees

__all__ = ["MIN_SHARE_BYTES", "Algorithm", "all_reduce"]

Algorithm: TypeAlias = Literal["direct", "ring"]

# Below this a share costs more as messages of its own (about 100 microseconds each) than it saves by being spread.
MIN_SHARE_BYTES = 16 * 1024


def all_reduce(
    *,
    algorithm: str,
    rank: int,
    world: int,
    elements: int,
    leaves: int,
    itemsize: int,
    wide_itemsize: int,
    chunk_bytes: int = MIB,
) -> Plan:
    """The plan of `rank` for an all-reduce of `elements` elements over `leaves` leaves, held as `reduce.held` says.

    algorithm: "direct" or "ring". itemsize, wide_itemsize: bytes of an element of the tensor's and of the
    accumulator's type. chunk_bytes: no message is longer, unless one element is. All but `rank` must be equal on
    all ranks. INPUT has one slot of `elements` for each leaf of this rank, in order. No elements make a plan
    without lanes. Raises LocalError.
    """
    if not 0 <= rank < world:
        raise LocalError(f"rank {rank} is not in a world of {world}")
    demand(0, elements=elements)
    demand(1, leaves=leaves, itemsize=itemsize, chunk_bytes=chunk_bytes)
    demand(itemsize, wide_itemsize=wide_itemsize)
    job = _Job(rank, world, leaves)
    if algorithm == "direct":
        lanes, width = _direct(job, elements, itemsize, wide_itemsize, chunk_bytes)
    elif algorithm == "ring":
        lanes, width = _ring(job, elements, wide_itemsize, chunk_bytes)
    else:
        raise LocalError(f"algorithm {algorithm!r} is not known; use 'direct' or 'ring'")
    return Plan(
        collective="all_reduce",
        algorithm=algorithm,
        rank=rank,
        world=world,
        lanes=tuple(lanes),
        inputs=(elements,) * len(held(rank, world, leaves)),
        output=elements,
        leaves=leaves,
        itemsize=itemsize,
        wide_itemsize=wide_itemsize,
        width=width,
        parameters=(
            ("elements", elements),
            ("leaves", leaves),
            ("itemsize", itemsize),
            ("wide_itemsize", wide_itemsize),
            ("chunk_bytes", chunk_bytes),
        ),
    )


class _Job:
    """Who holds which nodes of the canonical tree."""

    def __init__(self, rank: int, world: int, leaves: int) -> None:
        self.rank = rank
        self.world = world
        self.leaves = leaves
        self.first = held(rank, world, leaves).start
        shards = [held(r, world, leaves) for r in range(world)]
        self.nodes = [subtrees(shard.start, shard.stop, leaves) for shard in shards]
        self.held = [len(shard) for shard in shards]

    def tree(self, node: Piece, piece: Piece, known: Mapping[Piece, Span]) -> Tree:
        """The canonical tree under `node`, down to the nodes in `known` and to this rank's own leaves."""
        if node in known:
            return known[node]
        if node[1] - node[0] == 1:
            return Span(Buf.INPUT, node[0] - self.first, *piece)
        middle = split(*node)
        return self.tree((node[0], middle), piece, known), self.tree((middle, node[1]), piece, known)

    def part(self, piece: Piece) -> Tree:
        """The left fold of this rank's own nodes; it holds at least one."""
        return _left_fold([self.tree(node, piece, {}) for node in self.nodes[self.rank]])


def _interleaved(pieces: list[Piece], limit: int) -> list[tuple[int, Piece]]:
    """(owner, chunk) in lane order: the first chunk of each owner, then the second of each, so that all are busy."""
    cut = [chunks(piece, limit) for piece in pieces]
    rounds = max(map(len, cut), default=0)
    return [(owner, row[j]) for j in range(rounds) for owner, row in enumerate(cut) if j < len(row)]


def _direct(job: _Job, elements: int, itemsize: int, wide_itemsize: int, chunk_bytes: int) -> tuple[list[Lane], int]:
    partials = job.world > 1 and any(b - a > 1 for nodes in job.nodes for a, b in nodes)
    limit = max(1, chunk_bytes // (max(itemsize, wide_itemsize) if partials else itemsize))
    worth = -(-elements * itemsize // MIN_SHARE_BYTES)
    owners = shares(elements, max(1, min(job.world, worth)))
    # At most so many messages go from one rank to another in a lane: a rank's nodes to the owner, or the one
    # result.
    stride = max(map(len, job.nodes))
    lanes = [
        (_own if owner == job.rank else _give)(job, owner, piece, number * stride)
        for number, (owner, piece) in enumerate(_interleaved(owners, limit))
    ]
    return lanes, max(1, len(owners))


def _own(job: _Job, owner: int, piece: Piece, index: int) -> Lane:
    """Gather the other ranks' nodes, finish the tree, send the result to all, the next rank first."""
    size = piece[1] - piece[0]
    steps: list[Step] = []
    scratch: list[Scratch] = []
    known: dict[Piece, Span] = {}
    others = [(owner + i) % job.world for i in range(1, job.world)]
    for peer in others:
        for k, (a, b) in enumerate(job.nodes[peer]):
            known[a, b] = Span(Buf.SCRATCH, len(scratch), 0, size, b - a > 1)
            steps.append(Recv(peer, index + k, known[a, b]))
            scratch.append(Scratch(size, b - a > 1))
    result = Span(Buf.OUTPUT, 0, *piece)
    steps.append(Reduce(result, job.tree((0, job.leaves), piece, known), finish=True))
    steps += [Send(peer, index, result) for peer in others]
    return Lane(tuple(steps), tuple(scratch))


def _give(job: _Job, owner: int, piece: Piece, index: int) -> Lane:
    """Send this rank's nodes to the owner, receive the result."""
    size = piece[1] - piece[0]
    steps: list[Step] = []
    scratch: list[Scratch] = []
    for k, (a, b) in enumerate(job.nodes[job.rank]):
        tree = job.tree((a, b), piece, {})
        if isinstance(tree, Span):
            steps.append(Send(owner, index + k, tree))
        else:
            partial = Span(Buf.SCRATCH, len(scratch), 0, size, wide=True)
            scratch.append(Scratch(size, wide=True))
            steps += [Reduce(partial, tree, finish=False), Send(owner, index + k, partial)]
    steps.append(Recv(owner, index, Span(Buf.OUTPUT, 0, *piece)))
    return Lane(tuple(steps), tuple(scratch))


def _ring(job: _Job, elements: int, wide_itemsize: int, chunk_bytes: int) -> tuple[list[Lane], int]:
    limit = max(1, chunk_bytes // wide_itemsize)
    segments = shares(elements, job.world)
    lanes = [_round(job, last, piece, 2 * number) for number, (last, piece) in enumerate(_interleaved(segments, limit))]
    return lanes, max(1, len(segments))


def _round(job: _Job, last: int, piece: Piece, index: int) -> Lane:
    """One chunk's way round: message `index` collects, from rank last + 1 to `last`; `index` + 1 brings the result."""
    world, size = job.world, piece[1] - piece[0]
    order = [(last + 1 + i) % world for i in range(world)]
    place = order.index(job.rank)
    before, after = order[place - 1], order[(place + 1) % world]
    collected = sum(job.held[r] for r in order[:place])  # leaves in what arrives here
    steps: list[Step] = []
    scratch: list[Scratch] = []
    parts: list[Tree] = []
    if collected:
        arriving = Span(Buf.SCRATCH, 0, 0, size, wide=collected > 1)
        scratch.append(Scratch(size, wide=collected > 1))
        steps.append(Recv(before, index, arriving))
        parts.append(arriving)
    if job.held[job.rank]:
        parts.append(job.part(piece))
    result = Span(Buf.OUTPUT, 0, *piece)
    if job.rank == last:
        steps.append(Reduce(result, _left_fold(parts), finish=True))
    else:
        if parts:
            value = _left_fold(parts)
            if isinstance(value, tuple):
                partial = Span(Buf.SCRATCH, len(scratch), 0, size, wide=True)
                scratch.append(Scratch(size, wide=True))
                steps.append(Reduce(partial, value, finish=False))
                value = partial
            steps.append(Send(after, index, value))
        steps.append(Recv(before, index + 1, result))
    if world > 1 and after != last:
        steps.append(Send(after, index + 1, result))
    return Lane(tuple(steps), tuple(scratch))


def _left_fold(trees: list[Tree]) -> Tree:
    value = trees[0]
    for tree in trees[1:]:
        value = (value, tree)
    return value
