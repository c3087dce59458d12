"""Gather, scatter, all-to-all and send: elements that go from one rank to another as they are.

What each rank sends is cut into chunks of its own, and both ends know the cut from the arguments alone. Parts of no
elements take no message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from quicoll.errors import LocalError
from quicoll.plan.chunks import MIB, Piece, chunks, require_at_least, require_rank
from quicoll.plan.hierarchical import by_site, gather_lanes, scatter_lanes
from quicoll.plan.lanes import move_plan, part_chunks, shifted
from quicoll.plan.model import Buf, CopyStep, Lane, Plan, PlanStep, RecvStep, SendStep, Span

__all__ = ["all_to_all", "gather", "scatter", "send"]


def gather(
    *,
    rank: int,
    world: int,
    root: int,
    counts: Sequence[int],
    itemsize: int,
    chunk_bytes: int = MIB,
    algorithm: str = "direct",
    sites: Sequence[int] = (),
) -> Plan:
    """Plan a gather: INPUT slot 0 of every rank goes into the root's OUTPUT, in rank order.

    Args:
        rank: Whose plan. All other arguments must be equal on all ranks.
        world: Number of ranks.
        root: The rank that gets the elements.
        counts: Elements of each rank; they may differ and be 0.
        itemsize: Bytes of an element.
        chunk_bytes: No message is longer, unless one element is.
        algorithm: "direct", every rank sends to the root: one delay. "hierarchical" goes by sites
            (`quicoll.plan.hierarchical`).
        sites: A number for each rank.
    Returns:
        The plan; without lanes where there are no elements.
    Raises:
        LocalError: An argument is out of its range, or the algorithm is not known.
    """
    require_rank(world, rank=rank, root=root)
    offsets, cut = part_chunks(world, counts, itemsize, chunk_bytes)
    normal = by_site("gather", algorithm, world, sites)
    if normal is None:
        lanes, width = _gather_lanes(rank, root, offsets, cut), 1
    else:
        lanes, width = gather_lanes(rank, root, counts, max(1, chunk_bytes // itemsize), normal)
    return move_plan(
        "gather",
        algorithm=algorithm,
        rank=rank,
        world=world,
        lanes=lanes,
        width=width,
        given=counts[rank],
        output=offsets[-1] if rank == root else 0,
        itemsize=itemsize,
        chunk_bytes=chunk_bytes,
        parameters=[("root", root), ("counts", tuple(counts))],
        sites=normal,
    )


def scatter(
    *,
    rank: int,
    world: int,
    root: int,
    counts: Sequence[int],
    itemsize: int,
    chunk_bytes: int = MIB,
    algorithm: str = "direct",
    sites: Sequence[int] = (),
) -> Plan:
    """Plan a scatter: each rank gets its counts[rank] elements of the root's INPUT slot 0, parts in rank order.

    Args:
        rank: Whose plan. All other arguments must be equal on all ranks.
        world: Number of ranks.
        root: The rank that has the elements.
        counts: Elements of each rank; they may differ and be 0.
        itemsize: Bytes of an element.
        chunk_bytes: No message is longer, unless one element is.
        algorithm: "direct", the root sends to every rank. "hierarchical" goes by sites (`quicoll.plan.hierarchical`).
        sites: A number for each rank.
    Returns:
        The plan; without lanes where there are no elements.
    Raises:
        LocalError: An argument is out of its range, or the algorithm is not known.
    """
    require_rank(world, rank=rank, root=root)
    offsets, cut = part_chunks(world, counts, itemsize, chunk_bytes)
    normal = by_site("scatter", algorithm, world, sites)
    if normal is None:
        lanes, width = _scatter_lanes(rank, root, offsets, cut), 1
    else:
        lanes, width = scatter_lanes(rank, root, counts, max(1, chunk_bytes // itemsize), normal)
    return move_plan(
        "scatter",
        algorithm=algorithm,
        rank=rank,
        world=world,
        lanes=lanes,
        width=width,
        given=offsets[-1] if rank == root else None,
        output=counts[rank],
        itemsize=itemsize,
        chunk_bytes=chunk_bytes,
        parameters=[("root", root), ("counts", tuple(counts))],
        sites=normal,
    )


def all_to_all(
    *, rank: int, world: int, counts: Sequence[Sequence[int]], itemsize: int, chunk_bytes: int = MIB
) -> Plan:
    """Plan an all-to-all: part r of a rank's INPUT slot 0 goes to rank r; OUTPUT has what arrived, by sender.

    Pairwise exchange: in round i a rank sends to the one i further on and receives from the one i before, so that each
    rank has one sender and one receiver at a time. A round has a lane for each chunk of its longest part. Round 0
    copies.

    Args:
        rank: Whose plan. All other arguments must be equal on all ranks.
        world: Number of ranks.
        counts: counts[s][r] elements go from rank s to rank r; any may be 0.
        itemsize: Bytes of an element.
        chunk_bytes: No message is longer, unless one element is.
    Returns:
        The plan.
    Raises:
        LocalError: An argument is out of its range.
    """
    require_rank(world, rank=rank)
    if len(counts) != world or any(len(row) != world for row in counts):
        raise LocalError(f"counts must be {world} rows of {world}")
    require_at_least(0, **{f"counts[{s}][{r}]": count for s, row in enumerate(counts) for r, count in enumerate(row)})
    require_at_least(1, itemsize=itemsize, chunk_bytes=chunk_bytes)
    limit = max(1, chunk_bytes // itemsize)
    away = [0, *accumulate(counts[rank])]
    home = [0, *accumulate(row[rank] for row in counts)]
    lanes: list[Lane] = []
    for distance in range(world):
        to, source = (rank + distance) % world, (rank - distance) % world
        longest = max(counts[each][(each + distance) % world] for each in range(world))
        out, coming = chunks((0, counts[rank][to]), limit), chunks((0, counts[source][rank]), limit)
        for k in range(len(chunks((0, longest), limit))):
            steps: list[PlanStep] = []
            index = len(lanes)
            if not distance:
                if k < len(out):
                    steps.append(
                        CopyStep(shifted(Buf.OUTPUT, out[k], home[rank]), shifted(Buf.INPUT, out[k], away[rank]))
                    )
            else:
                if k < len(out):
                    steps.append(SendStep(to, index, shifted(Buf.INPUT, out[k], away[to])))
                if k < len(coming):
                    steps.append(RecvStep(source, index, shifted(Buf.OUTPUT, coming[k], home[source])))
            lanes.append(Lane(tuple(steps)))
    flat = tuple(count for row in counts for count in row)
    return move_plan(
        "all_to_all",
        algorithm="pairwise",
        rank=rank,
        world=world,
        lanes=lanes,
        width=2,
        given=away[-1],
        output=home[-1],
        itemsize=itemsize,
        chunk_bytes=chunk_bytes,
        parameters=[("counts", flat)],
    )


def send(*, rank: int, world: int, source: int, to: int, elements: int, itemsize: int, chunk_bytes: int = MIB) -> Plan:
    """Plan a send: INPUT of rank `source` goes into OUTPUT of rank `to`. Only these two ranks need to run it.

    Args:
        rank: Whose plan. All other arguments must be equal on all ranks.
        world: Number of ranks.
        source: The sender.
        to: The receiver.
        elements: Of the tensor.
        itemsize: Bytes of an element.
        chunk_bytes: No message is longer, unless one element is.
    Returns:
        The plan; without steps for other ranks.
    Raises:
        LocalError: An argument is out of its range.
    """
    require_rank(world, rank=rank, source=source, to=to)
    if source == to:
        raise LocalError(f"rank {source} cannot send to itself")
    require_at_least(0, elements=elements)
    require_at_least(1, itemsize=itemsize, chunk_bytes=chunk_bytes)
    lanes: list[Lane] = []
    for index, piece in enumerate(chunks((0, elements), max(1, chunk_bytes // itemsize))):
        steps: tuple[PlanStep, ...] = ()
        if rank == source:
            steps = (SendStep(to, index, Span(Buf.INPUT, 0, *piece)),)
        elif rank == to:
            steps = (RecvStep(source, index, Span(Buf.OUTPUT, 0, *piece)),)
        lanes.append(Lane(steps))
    return move_plan(
        "send",
        algorithm="direct",
        rank=rank,
        world=world,
        lanes=lanes,
        width=1,
        given=elements if rank == source else None,
        output=elements if rank == to else 0,
        itemsize=itemsize,
        chunk_bytes=chunk_bytes,
        parameters=[("source", source), ("to", to), ("elements", elements)],
    )


def _gather_lanes(rank: int, root: int, offsets: list[int], cut: list[list[Piece]]) -> list[Lane]:
    lanes: list[Lane] = []
    for index in range(max(map(len, cut))):
        steps: list[PlanStep] = []
        own = cut[rank][index] if index < len(cut[rank]) else None
        if rank == root:
            steps += [
                RecvStep(peer, index, shifted(Buf.OUTPUT, cut[peer][index], offsets[peer]))
                for peer in ((root + i) % len(cut) for i in range(1, len(cut)))
                if index < len(cut[peer])
            ]
            if own is not None:
                steps.append(CopyStep(shifted(Buf.OUTPUT, own, offsets[root]), Span(Buf.INPUT, 0, *own)))
        elif own is not None:
            steps.append(SendStep(root, index, Span(Buf.INPUT, 0, *own)))
        lanes.append(Lane(tuple(steps)))
    return lanes


def _scatter_lanes(rank: int, root: int, offsets: list[int], cut: list[list[Piece]]) -> list[Lane]:
    lanes: list[Lane] = []
    for index in range(max(map(len, cut))):
        steps: list[PlanStep] = []
        own = cut[rank][index] if index < len(cut[rank]) else None
        if rank == root:
            steps += [
                SendStep(peer, index, shifted(Buf.INPUT, cut[peer][index], offsets[peer]))
                for peer in ((root + i) % len(cut) for i in range(1, len(cut)))
                if index < len(cut[peer])
            ]
            if own is not None:
                steps.append(CopyStep(Span(Buf.OUTPUT, 0, *own), shifted(Buf.INPUT, own, offsets[root])))
        elif own is not None:
            steps.append(RecvStep(root, index, Span(Buf.OUTPUT, 0, *own)))
        lanes.append(Lane(tuple(steps)))
    return lanes
