"""Broadcast, all-gather and barrier: collectives that move elements and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from quicoll.errors import LocalError
from quicoll.plan.cut import MIB, chunks, demand, demand_rank
from quicoll.plan.model import Buf, Copy, Lane, Plan, Recv, Scratch, Send, Span, Step

__all__ = ["all_gather", "barrier", "broadcast"]


def broadcast(*, rank: int, world: int, root: int, elements: int, itemsize: int, chunk_bytes: int = MIB) -> Plan:
    """The plan of `rank` to bring the root's INPUT slot 0 into everyone's OUTPUT, the root's own included.

    A binomial tree over the ranks counted from the root, each chunk by itself: a rank's parent is its number
    without the lowest set bit, its children are its number plus each power of two below that bit, the largest first
    because the most ranks wait behind it. ceil(log2(world)) latencies; the root sends as often. Raises LocalError.
    """
    demand_rank(world, rank=rank, root=root)
    demand(0, elements=elements)
    demand(1, itemsize=itemsize, chunk_bytes=chunk_bytes)
    number = (rank - root) % world
    reach = number & -number if number else 1 << (world - 1).bit_length()
    offsets = [1 << bit for bit in reversed(range(reach.bit_length() - 1)) if number + (1 << bit) < world]
    children = [(rank + offset) % world for offset in offsets]
    lanes: list[Lane] = []
    for index, piece in enumerate(chunks((0, elements), max(1, chunk_bytes // itemsize))):
        here = Span(Buf.OUTPUT, 0, *piece)
        steps: list[Step] = []
        source = here
        if number:
            steps.append(Recv((rank - reach) % world, index, here))
        else:
            source = Span(Buf.INPUT, 0, *piece)
        steps += [Send(child, index, source) for child in children]
        if not number:
            steps.append(Copy(here, source))  # last, so that nobody waits for it
        lanes.append(Lane(tuple(steps)))
    return Plan(
        collective="broadcast",
        algorithm="binomial",
        rank=rank,
        world=world,
        lanes=tuple(lanes),
        inputs=() if number else (elements,),
        output=elements,
        leaves=0,
        itemsize=itemsize,
        wide_itemsize=itemsize,
        width=world.bit_length(),  # a chunk is on each level of the tree, and one waits
        parameters=(("root", root), ("elements", elements), ("itemsize", itemsize), ("chunk_bytes", chunk_bytes)),
    )


def all_gather(*, rank: int, world: int, counts: Sequence[int], itemsize: int, chunk_bytes: int = MIB) -> Plan:
    """The plan of `rank` to bring every rank's INPUT slot 0 into everyone's OUTPUT, one after the other in rank
    order.

    counts: elements of each rank, which may differ and be 0. Every rank sends to every other: one latency, and the
    bytes are those of a ring, because each rank must receive all of them anyway. Lane k has the k-th chunk of every
    rank; rank r starts with rank r + 1, so that nobody gets all at once. Raises LocalError.
    """
    demand_rank(world, rank=rank)
    if len(counts) != world:
        raise LocalError(f"counts for {len(counts)} ranks in a world of {world}")
    demand(0, **{f"counts[{r}]": count for r, count in enumerate(counts)})
    demand(1, itemsize=itemsize, chunk_bytes=chunk_bytes)
    offsets = [0, *accumulate(counts)]
    cut = [chunks((0, count), max(1, chunk_bytes // itemsize)) for count in counts]
    others = [(rank + i) % world for i in range(1, world)]
    lanes: list[Lane] = []
    for index in range(max(map(len, cut))):
        steps: list[Step] = []
        if index < len(cut[rank]):
            start, stop = cut[rank][index]
            source = Span(Buf.INPUT, 0, start, stop)
            steps += [Send(peer, index, source) for peer in others]
            steps.append(Copy(Span(Buf.OUTPUT, 0, offsets[rank] + start, offsets[rank] + stop), source))
        for peer in reversed(others):
            if index < len(cut[peer]):
                start, stop = cut[peer][index]
                steps.append(Recv(peer, index, Span(Buf.OUTPUT, 0, offsets[peer] + start, offsets[peer] + stop)))
        lanes.append(Lane(tuple(steps)))
    return Plan(
        collective="all_gather",
        algorithm="direct",
        rank=rank,
        world=world,
        lanes=tuple(lanes),
        inputs=(counts[rank],),
        output=offsets[-1],
        leaves=0,
        itemsize=itemsize,
        wide_itemsize=itemsize,
        width=1,
        parameters=(("counts", tuple(counts)), ("itemsize", itemsize), ("chunk_bytes", chunk_bytes)),
    )


def barrier(*, rank: int, world: int) -> Plan:
    """The plan of `rank` to end only after every rank has begun.

    Hensgen, Finkel and Manber 1988, "Two algorithms for barrier synchronization", Int. J. Parallel Programming
    17(1): in round k a rank tells the rank 2**k further on what it has heard in the rounds before. After
    ceil(log2(world)) rounds everyone has heard, through others, of everyone. Messages are tokens, of no elements.
    Raises LocalError.
    """
    demand_rank(world, rank=rank)
    steps: list[Step] = []
    rounds = (world - 1).bit_length()
    for k in range(rounds):
        # The token that round k - 1 fills: the Send waits for it, and through it for all before.
        heard = Span(Buf.SCRATCH, k - 1, 0, 0) if k else Span(Buf.OUTPUT, 0, 0, 0)
        steps.append(Send((rank + (1 << k)) % world, k, heard))
        steps.append(Recv((rank - (1 << k)) % world, k, Span(Buf.SCRATCH, k, 0, 0)))
    lane = Lane(tuple(steps), (Scratch(0, wide=False),) * rounds)
    return Plan(
        collective="barrier",
        algorithm="dissemination",
        rank=rank,
        world=world,
        lanes=(lane,) if rounds else (),
        inputs=(),
        output=0,
        leaves=0,
        itemsize=1,
        wide_itemsize=1,
        width=1,
        parameters=(),
    )
