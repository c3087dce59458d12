"""Broadcast, all-gather, gather and scatter by site: each element crosses to a remote site once.

The paths between sites are few, far and shared; those inside one are short. So what all ranks of a remote site
need goes to one of them, its head, and from there to the others:

    broadcast    the root sends each chunk to one head in each remote site. Roots and heads give it to their site over a
                 binomial tree. One delay between sites, then ceil(log2(ranks of a site)). Heads change from chunk to
                 chunk, so that no rank's port carries a whole site's share.
    all_gather   every rank does so with its own part, but straight to each of its site, since all of them have parts
                 for each other anyway. The sender decides which rank of a site is head.

What belongs to one rank crosses once on any way; through a head it crosses in fewer messages:

    gather       the parts of a remote site's neighbouring ranks lie one after the other in the root's memory. That run
                 is cut into chunks without regard to the owners, and a chunk's head is the rank with the most of it
                 (the lowest of these). The others send it theirs, and it sends the chunk, whole, to the root. Of small
                 parts a site's go in one message; of large ones a chunk is its head's own and goes straight.
    scatter      the same backwards.

The root's own site, and the ranks of a world of one site, send and receive directly, as in `plan.moves`.

Which rank is head follows from the arguments alone, so all ranks know it. Bits are copied; no way can change them.
Every element of an output is written once, by the message or the copy that brings it: nothing is put together there.
A lane has one chunk (gather, scatter: one of each run), which is on at most two ways at a time, and no step of a lane
waits for another chunk's than its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from quicoll.errors import LocalError
from quicoll.plan.chunks import Piece, chunks, interleaved
from quicoll.plan.lanes import shifted
from quicoll.plan.model import Buf, CopyStep, Lane, PlanStep, RecvStep, Scratch, SendStep, Span
from quicoll.plan.routes import binomial, normal_sites, site_members

__all__ = ["MOVES", "all_gather_lanes", "broadcast_lanes", "by_site", "gather_lanes", "scatter_lanes"]


# The algorithms of each; the first is the default and wins where costs are equal.
MOVES: dict[str, tuple[str, ...]] = {
    "broadcast": ("tree", "hierarchical"),
    "all_gather": ("direct", "hierarchical"),
    "gather": ("direct", "hierarchical"),
    "scatter": ("direct", "hierarchical"),
}


def by_site(collective: str, algorithm: str, world: int, sites: Sequence[int]) -> tuple[int, ...] | None:
    """Return the site of each rank if `algorithm` goes by sites, else None. Raises LocalError for an unknown one."""
    if algorithm not in MOVES[collective]:
        raise LocalError(f"algorithm {algorithm!r} is not known; use one of {', '.join(MOVES[collective])}")
    return normal_sites(sites, world) if algorithm == "hierarchical" else None


def broadcast_lanes(rank: int, root: int, elements: int, limit: int, sites: Sequence[int]) -> tuple[list[Lane], int]:
    """Make the lanes of one rank.

    Args:
        rank: Whose lanes.
        root: The rank that has the elements.
        elements: Of the tensor.
        limit: Elements of a chunk.
        sites: As `normal_sites` returns them.
    Returns:
        The lanes, and how many have to be open at a time.
    """
    members = site_members(sites)
    home = members[sites[rank]]
    lanes: list[Lane] = []
    for index, piece in enumerate(chunks((0, elements), limit)):
        heads = [root if site == sites[root] else ranks[index % len(ranks)] for site, ranks in enumerate(members)]
        # Places in the site's tree are counted from its head.
        first = home.index(heads[sites[rank]])
        parent, below = binomial((home.index(rank) - first) % len(home), len(home))
        children = [home[(first + place) % len(home)] for place in below]
        here = Span(Buf.OUTPUT, 0, *piece)
        if rank == root:
            given = Span(Buf.INPUT, 0, *piece)
            away = [head for head in _after(sites[root], heads) if head != root]
            steps: list[PlanStep] = [SendStep(peer, index, given) for peer in (*away, *children)]
            steps.append(CopyStep(here, given))  # last: no rank waits for it
        else:
            source = root if parent < 0 else home[(first + parent) % len(home)]
            steps = [RecvStep(source, index, here), *(SendStep(child, index, here) for child in children)]
        lanes.append(Lane(tuple(steps)))
    return lanes, 1 + max(len(ranks) for ranks in members).bit_length()


def all_gather_lanes(rank: int, counts: Sequence[int], limit: int, sites: Sequence[int]) -> tuple[list[Lane], int]:
    """As `broadcast_lanes`. A lane has a chunk of one rank's part, and message numbers are those of lanes."""
    members = site_members(sites)
    offsets = [0, *accumulate(counts)]
    home = members[sites[rank]]
    table = interleaved([(origin, (0, count)) for origin, count in enumerate(counts)], limit)
    turn = [0] * len(counts)  # chunks of each rank that have had their heads
    lanes: list[Lane] = []
    for index, (origin, piece) in enumerate(table):
        mine = members[sites[origin]]
        number = mine.index(origin) + turn[origin]
        turn[origin] += 1
        heads = [origin if site == sites[origin] else ranks[number % len(ranks)] for site, ranks in enumerate(members)]
        here = shifted(Buf.OUTPUT, piece, offsets[origin])
        head = heads[sites[rank]]
        if rank == origin:
            given = Span(Buf.INPUT, 0, *piece)
            away = [peer for peer in _after(sites[origin], heads) if peer != origin]
            steps: list[PlanStep] = [SendStep(peer, index, given) for peer in (*away, *_others(rank, home))]
            steps.append(CopyStep(here, given))
        elif rank == head:
            steps = [RecvStep(origin, index, here), *(SendStep(peer, index, here) for peer in _others(rank, home))]
        else:
            steps = [RecvStep(head, index, here)]
        lanes.append(Lane(tuple(steps)))
    return lanes, 2 * max(1, sum(count > 0 for count in counts))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Elements [start, stop) of the root's memory, of or for one site. parts: (rank, elements of these), by rank."""

    head: int
    start: int
    stop: int
    parts: tuple[tuple[int, Piece], ...]


def gather_lanes(
    rank: int, root: int, counts: Sequence[int], limit: int, sites: Sequence[int]
) -> tuple[list[Lane], int]:
    """As `broadcast_lanes`. Lane k has the k-th chunk of every run, so that the root's memory of what has come early
    is bounded."""
    offsets = [0, *accumulate(counts)]
    lanes: list[Lane] = []
    for index, row in enumerate(_rows(root, counts, limit, sites)):
        steps: list[PlanStep] = []
        scratch: list[Scratch] = []
        for chunk in row:
            own = dict(chunk.parts).get(rank)
            given = None if own is None else shifted(Buf.INPUT, own, -offsets[rank])
            if rank == root:
                here = Span(Buf.OUTPUT, 0, chunk.start, chunk.stop)
                steps.append(RecvStep(chunk.head, index, here) if given is None else CopyStep(here, given))
            elif rank == chunk.head and given is not None:
                if len(chunk.parts) > 1:
                    whole = Span(Buf.SCRATCH, len(scratch), 0, chunk.stop - chunk.start)
                    scratch.append(Scratch(whole.elements, wide=False))
                    for peer, piece in chunk.parts:
                        place = Span(Buf.SCRATCH, whole.slot, piece[0] - chunk.start, piece[1] - chunk.start)
                        steps.append(CopyStep(place, given) if peer == rank else RecvStep(peer, index, place))
                    given = whole
                steps.append(SendStep(root, index, given))
            elif given is not None:
                steps.append(SendStep(chunk.head, index, given))
        lanes.append(Lane(tuple(steps), tuple(scratch)))
    return lanes, 2


def scatter_lanes(
    rank: int, root: int, counts: Sequence[int], limit: int, sites: Sequence[int]
) -> tuple[list[Lane], int]:
    """As `gather_lanes`, backwards."""
    offsets = [0, *accumulate(counts)]
    lanes: list[Lane] = []
    for index, row in enumerate(_rows(root, counts, limit, sites)):
        steps: list[PlanStep] = []
        scratch: list[Scratch] = []
        for chunk in row:
            own = dict(chunk.parts).get(rank)
            wanted = None if own is None else shifted(Buf.OUTPUT, own, -offsets[rank])
            if rank == root:
                given = Span(Buf.INPUT, 0, chunk.start, chunk.stop)
                steps.append(SendStep(chunk.head, index, given) if wanted is None else CopyStep(wanted, given))
            elif rank == chunk.head and wanted is not None:
                if len(chunk.parts) == 1:
                    steps.append(RecvStep(root, index, wanted))
                    continue
                whole = Span(Buf.SCRATCH, len(scratch), 0, chunk.stop - chunk.start)
                scratch.append(Scratch(whole.elements, wide=False))
                steps.append(RecvStep(root, index, whole))
                for peer, piece in chunk.parts:
                    place = Span(Buf.SCRATCH, whole.slot, piece[0] - chunk.start, piece[1] - chunk.start)
                    if peer != rank:
                        steps.append(SendStep(peer, index, place))
                mine = own or (0, 0)
                place = Span(Buf.SCRATCH, whole.slot, mine[0] - chunk.start, mine[1] - chunk.start)
                steps.append(CopyStep(wanted, place))
            elif wanted is not None:
                steps.append(RecvStep(chunk.head, index, wanted))
        lanes.append(Lane(tuple(steps), tuple(scratch)))
    return lanes, 2


def _rows(root: int, counts: Sequence[int], limit: int, sites: Sequence[int]) -> list[list[_Chunk]]:
    """By lane: the k-th chunk of each rank of the root's site, and of each run of neighbours on another."""
    offsets = [0, *accumulate(counts)]
    runs: list[list[int]] = []
    for rank in _from(root, len(counts)):
        near = sites[rank] == sites[root]
        if not counts[rank]:
            continue
        before = runs[-1][-1] if runs else None
        joins = not near and before is not None and sites[before] == sites[rank]
        if joins and before is not None and offsets[before + 1] == offsets[rank]:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    rows: list[list[_Chunk]] = []
    for run in runs:
        for k, (start, stop) in enumerate(chunks((offsets[run[0]], offsets[run[-1] + 1]), limit)):
            parts = [(rank, (max(start, offsets[rank]), min(stop, offsets[rank + 1]))) for rank in run]
            kept = tuple((rank, piece) for rank, piece in parts if piece[0] < piece[1])
            head = max(kept, key=lambda part: (part[1][1] - part[1][0], -part[0]))[0]
            if k == len(rows):
                rows.append([])
            rows[k].append(_Chunk(head, start, stop, kept))
    return rows


def _from(first: int, world: int) -> list[int]:
    """All ranks, from `first` round: the root hears from, or sends to, the next one first."""
    return [(first + i) % world for i in range(world)]


def _after(home: int, heads: Sequence[int]) -> list[int]:
    """Heads from the site after `home` round to `home`: they are far, so they come first."""
    return [heads[(home + i) % len(heads)] for i in range(1, len(heads) + 1)]


def _others(rank: int, ranks: Sequence[int]) -> list[int]:
    """The other ranks of a site, from the next one round."""
    at = ranks.index(rank)
    return [*ranks[at + 1 :], *ranks[:at]]
