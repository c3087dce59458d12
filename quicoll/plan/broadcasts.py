"""Broadcast, all-gather and barrier: collectives that move elements and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence

from quicoll.plan.chunks import MIB, Piece, chunks, require_at_least, require_rank
from quicoll.plan.hierarchical import all_gather_lanes, broadcast_lanes, by_site
from quicoll.plan.lanes import move_plan, part_chunks, shifted
from quicoll.plan.model import Buf, CopyStep, Lane, Plan, PlanStep, RecvStep, SendStep, Span
from quicoll.plan.routes import binomial

__all__ = ["all_gather", "barrier", "broadcast"]


def broadcast(
    *,
    rank: int,
    world: int,
    root: int,
    elements: int,
    itemsize: int,
    chunk_bytes: int = MIB,
    algorithm: str = "tree",
    sites: Sequence[int] = (),
) -> Plan:
    """Plan a broadcast: the root's INPUT slot 0 goes into OUTPUT of every rank, its own included.

    Args:
        rank: Whose plan. All other arguments must be equal on all ranks.
        world: Number of ranks.
        root: The rank that has the elements.
        elements: Of the tensor.
        itemsize: Bytes of an element.
        chunk_bytes: No message is longer, unless one element is.
        algorithm: "tree", a binomial tree over the ranks counted from the root, for each chunk by itself:
            ceil(log2(world)) delays, and the root sends as often. "hierarchical" goes by sites
            (`quicoll.plan.hierarchical`).
        sites: A number for each rank.
    Returns:
        The plan; without lanes where there are no elements.
    Raises:
        LocalError: An argument is out of its range, or the algorithm is not known.
    """
    require_rank(world, rank=rank, root=root)
    require_at_least(0, elements=elements)
    require_at_least(1, itemsize=itemsize, chunk_bytes=chunk_bytes)
    limit = max(1, chunk_bytes // itemsize)
    normal = by_site("broadcast", algorithm, world, sites)
    if normal is None:
        lanes, width = _tree_lanes(rank, world, root, elements, limit)
    else:
        lanes, width = broadcast_lanes(rank, root, elements, limit, normal)
    return move_plan(
        "broadcast",
        algorithm=algorithm,
        rank=rank,
        world=world,
        lanes=lanes,
        width=width,
        given=elements if rank == root else None,
        output=elements,
        itemsize=itemsize,
        chunk_bytes=chunk_bytes,
        parameters=[("root", root), ("elements", elements)],
        sites=normal,
    )


def all_gather(
    *,
    rank: int,
    world: int,
    counts: Sequence[int],
    itemsize: int,
    chunk_bytes: int = MIB,
    algorithm: str = "direct",
    sites: Sequence[int] = (),
) -> Plan:
    """Plan an all-gather: INPUT slot 0 of every rank goes into OUTPUT of every rank, in rank order.

    Args:
        rank: Whose plan. All other arguments must be equal on all ranks.
        world: Number of ranks.
        counts: Elements of each rank; they may differ and be 0.
        itemsize: Bytes of an element.
        chunk_bytes: No message is longer, unless one element is.
        algorithm: "direct", every rank sends to every other: one delay, and the bytes of a ring, because each rank must
            receive all of them anyway. "hierarchical" goes by sites (`quicoll.plan.hierarchical`).
        sites: A number for each rank.
    Returns:
        The plan; without lanes where there are no elements.
    Raises:
        LocalError: An argument is out of its range, or the algorithm is not known.
    """
    require_rank(world, rank=rank)
    offsets, cut = part_chunks(world, counts, itemsize, chunk_bytes)
    normal = by_site("all_gather", algorithm, world, sites)
    if normal is None:
        lanes, width = _direct_lanes(rank, world, offsets, cut), 1
    else:
        lanes, width = all_gather_lanes(rank, counts, max(1, chunk_bytes // itemsize), normal)
    return move_plan(
        "all_gather",
        algorithm=algorithm,
        rank=rank,
        world=world,
        lanes=lanes,
        width=width,
        given=counts[rank],
        output=offsets[-1],
        itemsize=itemsize,
        chunk_bytes=chunk_bytes,
        parameters=[("counts", tuple(counts))],
        sites=normal,
    )


def barrier(*, rank: int, world: int) -> Plan:
    """Plan a barrier: nothing is sent for it.

    No operation ends on a rank before all ranks have announced that they called it (quicoll.engine.calls), which is all
    that a barrier promises.

    Args:
        rank: Whose plan. All other arguments must be equal on all ranks.
        world: Number of ranks.
    Returns:
        The plan, without a lane.
    Raises:
        LocalError: An argument is out of its range.
    """
    require_rank(world, rank=rank)
    return Plan(
        collective="barrier",
        algorithm="announced",
        rank=rank,
        world=world,
        lanes=(),
        inputs=(),
        output=0,
        leaves=0,
        itemsize=1,
        wide_itemsize=1,
        width=1,
        parameters=(),
    )


def _tree_lanes(rank: int, world: int, root: int, elements: int, limit: int) -> tuple[list[Lane], int]:
    number = (rank - root) % world
    parent, below = binomial(number, world)
    children = [(root + place) % world for place in below]
    lanes: list[Lane] = []
    for index, piece in enumerate(chunks((0, elements), limit)):
        here = Span(Buf.OUTPUT, 0, *piece)
        if number:
            steps: list[PlanStep] = [RecvStep((root + parent) % world, index, here)]
            steps += [SendStep(child, index, here) for child in children]
        else:
            given = Span(Buf.INPUT, 0, *piece)
            steps = [SendStep(child, index, given) for child in children]
            steps.append(CopyStep(here, given))  # last: no rank waits for it
        lanes.append(Lane(tuple(steps)))
    return lanes, world.bit_length()  # a chunk is on each level of the tree, and one waits


def _direct_lanes(rank: int, world: int, offsets: list[int], cut: list[list[Piece]]) -> list[Lane]:
    others = [(rank + i) % world for i in range(1, world)]
    lanes: list[Lane] = []
    for index in range(max(map(len, cut))):
        steps: list[PlanStep] = []
        if index < len(cut[rank]):
            own = cut[rank][index]
            given = Span(Buf.INPUT, 0, *own)
            steps += [SendStep(peer, index, given) for peer in others]
            steps.append(CopyStep(shifted(Buf.OUTPUT, own, offsets[rank]), given))
        for peer in reversed(others):
            if index < len(cut[peer]):
                steps.append(RecvStep(peer, index, shifted(Buf.OUTPUT, cut[peer][index], offsets[peer])))
        lanes.append(Lane(tuple(steps)))
    return lanes
