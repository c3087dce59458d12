"""Gather, scatter, all-to-all and send: elements that go from one rank to another as they are.

Whatever is to come from a rank is cut into chunks of its own, and both ends know the cut from the numbers alone. Parts
of no elements take no message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from quicoll.errors import LocalError
from quicoll.plan.cut import MIB, Piece, chunks, demand, demand_rank
from quicoll.plan.model import Buf, Copy, Lane, Parameter, Plan, Recv, Send, Span, Step

__all__ = ["all_to_all", "gather", "scatter", "send"]


def gather(*, rank: int, world: int, root: int, counts: Sequence[int], itemsize: int, chunk_bytes: int = MIB) -> Plan:
    """The plan of `rank` to bring every rank's INPUT slot 0 into the root's OUTPUT, one after the other in rank order.

    counts: elements of each rank, which may differ and be 0. Every rank sends to the root: one delay. Lane k has the
    k-th chunk of every rank, so that the root's memory of what has come early is bounded. Raises LocalError.
    """
    offsets, cut = _parts(world, rank, root, counts, itemsize, chunk_bytes)
    lanes: list[Lane] = []
    for index in range(max(map(len, cut))):
        steps: list[Step] = []
        if rank != root:
            if index < len(cut[rank]):
                steps.append(Send(root, index, Span(Buf.INPUT, 0, *cut[rank][index])))
        else:
            steps += [
                Recv(peer, index, _shifted(Buf.OUTPUT, cut[peer][index], offsets[peer]))
                for peer in ((root + i) % world for i in range(1, world))
                if index < len(cut[peer])
            ]
            if index < len(cut[root]):
                own = cut[root][index]
                steps.append(Copy(_shifted(Buf.OUTPUT, own, offsets[root]), Span(Buf.INPUT, 0, *own)))
        lanes.append(Lane(tuple(steps)))
    return _plan(
        "gather", "direct", rank, world, lanes, counts[rank], offsets[-1] if rank == root else 0, itemsize, 1,
        (("root", root), ("counts", tuple(counts)), ("itemsize", itemsize), ("chunk_bytes", chunk_bytes)),
    )  # fmt: skip


def scatter(*, rank: int, world: int, root: int, counts: Sequence[int], itemsize: int, chunk_bytes: int = MIB) -> Plan:
    """The plan of `rank` to get its counts[rank] elements of the root's INPUT slot 0, parts in rank order, as OUTPUT.

    The root sends each part to whom it belongs: one delay. Lane k has the k-th chunk of every part. Raises LocalError.
    """
    offsets, cut = _parts(world, rank, root, counts, itemsize, chunk_bytes)
    lanes: list[Lane] = []
    for index in range(max(map(len, cut))):
        steps: list[Step] = []
        if rank != root:
            if index < len(cut[rank]):
                steps.append(Recv(root, index, Span(Buf.OUTPUT, 0, *cut[rank][index])))
        else:
            steps += [
                Send(peer, index, _shifted(Buf.INPUT, cut[peer][index], offsets[peer]))
                for peer in ((root + i) % world for i in range(1, world))
                if index < len(cut[peer])
            ]
            if index < len(cut[root]):
                own = cut[root][index]
                steps.append(Copy(Span(Buf.OUTPUT, 0, *own), _shifted(Buf.INPUT, own, offsets[root])))
        lanes.append(Lane(tuple(steps)))
    return _plan(
        "scatter", "direct", rank, world, lanes, offsets[-1] if rank == root else None, counts[rank], itemsize, 1,
        (("root", root), ("counts", tuple(counts)), ("itemsize", itemsize), ("chunk_bytes", chunk_bytes)),
    )  # fmt: skip


def all_to_all(
    *, rank: int, world: int, counts: Sequence[Sequence[int]], itemsize: int, chunk_bytes: int = MIB
) -> Plan:
    """The plan of `rank` to send part r of its INPUT slot 0 to rank r; OUTPUT has what came, by rank it came from.

    counts: counts[s][r] elements go from rank s to rank r; any may be 0. Pairwise exchange: in round i a rank sends to
    the one i further on and hears from the one i before, so that each rank has one sender and one receiver at a time
    and none is flooded. A round has a lane for each chunk of its longest part. Round 0 is the copy to oneself.
    Raises LocalError.
    """
    demand_rank(world, rank=rank)
    if len(counts) != world or any(len(row) != world for row in counts):
        raise LocalError(f"counts must be {world} rows of {world}")
    demand(0, **{f"counts[{s}][{r}]": count for s, row in enumerate(counts) for r, count in enumerate(row)})
    demand(1, itemsize=itemsize, chunk_bytes=chunk_bytes)
    limit = max(1, chunk_bytes // itemsize)
    away = [0, *accumulate(counts[rank])]
    home = [0, *accumulate(row[rank] for row in counts)]
    lanes: list[Lane] = []
    for distance in range(world):
        to, source = (rank + distance) % world, (rank - distance) % world
        longest = max(counts[each][(each + distance) % world] for each in range(world))
        out, coming = chunks((0, counts[rank][to]), limit), chunks((0, counts[source][rank]), limit)
        for k in range(len(chunks((0, longest), limit))):
            steps: list[Step] = []
            index = len(lanes)
            if not distance:
                if k < len(out):
                    steps.append(
                        Copy(_shifted(Buf.OUTPUT, out[k], home[rank]), _shifted(Buf.INPUT, out[k], away[rank]))
                    )
            else:
                if k < len(out):
                    steps.append(Send(to, index, _shifted(Buf.INPUT, out[k], away[to])))
                if k < len(coming):
                    steps.append(Recv(source, index, _shifted(Buf.OUTPUT, coming[k], home[source])))
            lanes.append(Lane(tuple(steps)))
    flat = tuple(count for row in counts for count in row)
    return _plan(
        "all_to_all", "pairwise", rank, world, lanes, away[-1], home[-1], itemsize, 2,
        (("counts", flat), ("itemsize", itemsize), ("chunk_bytes", chunk_bytes)),
    )  # fmt: skip


def send(*, rank: int, world: int, source: int, to: int, elements: int, itemsize: int, chunk_bytes: int = MIB) -> Plan:
    """The plan of `rank` to bring the INPUT of rank `source` into the OUTPUT of rank `to`; others do nothing.

    One message a chunk, one delay. Only the two ranks need to run it. Raises LocalError.
    """
    demand_rank(world, rank=rank, source=source, to=to)
    if source == to:
        raise LocalError(f"rank {source} cannot send to itself")
    demand(0, elements=elements)
    demand(1, itemsize=itemsize, chunk_bytes=chunk_bytes)
    lanes: list[Lane] = []
    for index, piece in enumerate(chunks((0, elements), max(1, chunk_bytes // itemsize))):
        steps: tuple[Step, ...] = ()
        if rank == source:
            steps = (Send(to, index, Span(Buf.INPUT, 0, *piece)),)
        elif rank == to:
            steps = (Recv(source, index, Span(Buf.OUTPUT, 0, *piece)),)
        lanes.append(Lane(steps))
    return _plan(
        "send", "direct", rank, world, lanes,
        elements if rank == source else None, elements if rank == to else 0, itemsize, 1,
        (("source", source), ("to", to), ("elements", elements), ("itemsize", itemsize), ("chunk_bytes", chunk_bytes)),
    )  # fmt: skip


def _parts(
    world: int, rank: int, root: int, counts: Sequence[int], itemsize: int, chunk_bytes: int
) -> tuple[list[int], list[list[Piece]]]:
    """Where each rank's part begins, and its chunks."""
    demand_rank(world, rank=rank, root=root)
    if len(counts) != world:
        raise LocalError(f"counts for {len(counts)} ranks in a world of {world}")
    demand(0, **{f"counts[{r}]": count for r, count in enumerate(counts)})
    demand(1, itemsize=itemsize, chunk_bytes=chunk_bytes)
    return [0, *accumulate(counts)], [chunks((0, count), max(1, chunk_bytes // itemsize)) for count in counts]


def _shifted(buf: Buf, piece: Piece, offset: int) -> Span:
    return Span(buf, 0, piece[0] + offset, piece[1] + offset)


def _plan(
    collective: str,
    algorithm: str,
    rank: int,
    world: int,
    lanes: list[Lane],
    given: int | None,
    output: int,
    itemsize: int,
    width: int,
    parameters: tuple[Parameter, ...],
) -> Plan:
    return Plan(
        collective=collective,
        algorithm=algorithm,
        rank=rank,
        world=world,
        lanes=tuple(lanes),
        inputs=() if given is None else (given,),
        output=output,
        leaves=0,
        itemsize=itemsize,
        wide_itemsize=itemsize,
        width=width,
        parameters=parameters,
    )
