"""Reductions: all_reduce, reduce and reduce_scatter, by one way of building lanes over any route.

A lane has a chunk and the rank that owns it. The ranks' values go to the owner along a route (`plan.routes`, which
says why the bits are the same on every one); the owner finishes the canonical tree; then the result goes

    all_reduce       to all ranks, down the route
    reduce           to the root
    reduce_scatter   nowhere: the owner is the rank that gets it

A rank that has several leaves, of its own or from below, sends the fewest nodes of the tree that make them up: one
leaf in the tensor's own type, several reduced to one array of the accumulator's. An accumulator may be as large as many
leaves (44 bytes for an exact sum of float32): a node of at most `loose` leaves therefore travels as these.

    direct        star. All_reduce: the elements are divided into one share for each rank; two delays, and as many bytes
                  as a ring: (p - 1) / p * S out and in for each of the two phases (S bytes, p ranks). Reduce: shares
                  likewise, whose owners send them on to the root, which so receives at most twice S and not (p - 1) S.
    tree          halving. Chunks are not divided into shares, so a small one is one message a level: ceil(log2(p))
                  delays up and down, but no rank handles more than ceil(log2(p)) messages each way.
    hierarchical  sites. As direct, but each value crosses between two sites once; one delay between sites and at
                  most two inside them, each way. Owners of a reduce are in the root's site.
    exchange      all_reduce only. Every rank sends its values to all and finishes the tree itself: one delay, and
                  (p - 1) S out and in. For a few numbers over a long way nothing is faster. The finished bits
                  are equal because they come of the same operands by the same tree.
    ring          all_reduce only, in an order of its own: see `quicoll.plan.ring`.

Another algorithm that keeps the canonical bits is one more line in `ROUTES`: a place for each rank on a tree of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

from quicoll.errors import LocalError
from quicoll.plan.canonical import CanonicalTree
from quicoll.plan.chunks import (
    LONGEST_NUMBER,
    MIB,
    Piece,
    chunks,
    grain_of,
    interleaved,
    require_at_least,
    require_rank,
    shares,
)
from quicoll.plan.model import Buf, Lane, Parameter, Plan, PlanStep, RecvStep, ReduceStep, Scratch, SendStep, Span
from quicoll.plan.ring import ring_lanes
from quicoll.plan.routes import Place, halving, normal_sites, site_members, star, through_sites

__all__ = [
    "CANONICAL",
    "MIN_BLOCKS_SHARE_BYTES",
    "MIN_SHARE_BYTES",
    "REDUCTIONS",
    "ROUTES",
    "Algorithm",
    "Route",
    "all_reduce",
    "reduce",
    "reduce_scatter",
]

Algorithm: TypeAlias = Literal["direct", "tree", "hierarchical", "exchange", "ring"]

# Below this a share costs more as messages of its own (about 100 microseconds each) than it saves by being spread.
MIN_SHARE_BYTES = 16 * 1024
# The same of blocks of a wire format, which take some 25 times as long to be combined. And bytes are dear where one is
# used: of a tensor with one owner that rank sends p / 2 times as many as all do in the mean.
MIN_BLOCKS_SHARE_BYTES = 2 * 1024


@dataclass(frozen=True, slots=True)
class Route:
    """The way in which one algorithm lays its lanes.

    Attributes:
        place: (rank, owner, world, sites) -> the rank's place on the route to the owner.
        shared: Whether chunks of one tensor belong to different owners that work side by side; if not, each chunk is
            one rank's.
        depth: (world) -> lanes in which one chunk is at a time, in messages: so many more keep all ranks busy.
    """

    place: Callable[[int, int, int, Sequence[int]], Place]
    shared: bool
    depth: Callable[[int], int]


ROUTES: dict[str, Route] = {
    "direct": Route(lambda rank, owner, world, _: star(rank, owner, world), shared=True, depth=lambda _: 1),
    "tree": Route(
        lambda rank, owner, world, _: halving(rank, owner, world),
        shared=False,
        depth=lambda world: max(1, 2 * (world - 1).bit_length()),
    ),
    "hierarchical": Route(
        lambda rank, owner, _, sites: through_sites(rank, owner, site_members(sites), sites),
        shared=True,
        depth=lambda _: 2,
    ),
}

# The algorithms of each operation that keep the canonical bits; where costs are equal the first wins.
CANONICAL: dict[str, tuple[str, ...]] = {
    "all_reduce": ("direct", "tree", "hierarchical", "exchange"),
    "reduce": ("direct", "tree", "hierarchical"),
    "reduce_scatter": ("direct", "tree", "hierarchical"),
}
REDUCTIONS: dict[str, tuple[str, ...]] = {**CANONICAL, "all_reduce": (*CANONICAL["all_reduce"], "ring")}


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
    sites: Sequence[int] = (),
    loose: int = 1,
) -> Plan:
    """Plan an all-reduce: OUTPUT of every rank gets the reduction of all leaves.

    Args:
        algorithm: One of `REDUCTIONS["all_reduce"]`.
        rank: Whose plan. All other arguments must be equal on all ranks.
        world: Number of ranks.
        elements: Of the tensor.
        leaves: How many; each rank holds those of `canonical_order.leaves_of`, one INPUT slot for each.
        itemsize: Bytes of an element of the tensor's type.
        wide_itemsize: Bytes of an element of the accumulator's type.
        chunk_bytes: No message is longer, unless one element is.
        sites: A number for each rank, equal for ranks that are near each other; only hierarchical looks at it.
        loose: A node of at most so many leaves travels as these; 1 for ring.
    Returns:
        The plan; without lanes where there are no elements.
    Raises:
        LocalError: An argument is out of its range, or the algorithm is not known.
    """
    order = _Order("all_reduce", algorithm, rank, world, leaves, itemsize, wide_itemsize, chunk_bytes, sites, loose)
    require_at_least(0, elements=elements)
    if algorithm == "ring":
        lanes, width = ring_lanes(order.canonical, elements, wide_itemsize, chunk_bytes)
    elif algorithm == "exchange":
        pieces = chunks((0, elements), order.limit)
        lanes = [_everyone(order.canonical, piece, number * order.stride) for number, piece in enumerate(pieces)]
        width = 1
    else:
        table, width = order.table(elements, list(range(world)))
        lanes = [_lane(order, owner, piece, piece, number) for number, (owner, piece) in enumerate(table)]
    return order.plan(lanes, elements, elements, width, (("elements", elements),))


def reduce(
    *,
    algorithm: str,
    rank: int,
    world: int,
    root: int,
    elements: int,
    leaves: int,
    itemsize: int,
    wide_itemsize: int,
    chunk_bytes: int = MIB,
    sites: Sequence[int] = (),
    loose: int = 1,
) -> Plan:
    """Plan a reduction whose result goes into the root's OUTPUT alone; that of the others has no elements.

    Args:
        algorithm: One of `REDUCTIONS["reduce"]`.
        rank: Whose plan. All other arguments must be equal on all ranks.
        world: Number of ranks.
        root: The rank that gets the result.
        elements: Of the tensor.
        leaves: How many; each rank holds those of `canonical_order.leaves_of`, one INPUT slot for each.
        itemsize: Bytes of an element of the tensor's type.
        wide_itemsize: Bytes of an element of the accumulator's type.
        chunk_bytes: No message is longer, unless one element is.
        sites: A number for each rank, equal for ranks that are near each other; only hierarchical looks at it.
        loose: A node of at most so many leaves travels as these; 1 for ring.
    Returns:
        The plan; without lanes where there are no elements.
    Raises:
        LocalError: An argument is out of its range, or the algorithm is not known.
    """
    order = _Order("reduce", algorithm, rank, world, leaves, itemsize, wide_itemsize, chunk_bytes, sites, loose)
    require_rank(world, root=root)
    require_at_least(0, elements=elements)
    owners = [(root + i) % world for i in range(world)]
    if algorithm == "hierarchical":
        owners = [owner for owner in owners if order.sites[owner] == order.sites[root]]
    elif algorithm == "tree":
        owners = [root]
    table, width = order.table(elements, owners)
    lanes = [_lane(order, owner, piece, piece, number, goal=root) for number, (owner, piece) in enumerate(table)]
    return order.plan(lanes, elements, elements if rank == root else 0, width, (("root", root), ("elements", elements)))


def reduce_scatter(
    *,
    algorithm: str,
    rank: int,
    world: int,
    counts: Sequence[int],
    leaves: int,
    itemsize: int,
    wide_itemsize: int,
    chunk_bytes: int = MIB,
    sites: Sequence[int] = (),
    loose: int = 1,
) -> Plan:
    """Plan a reduction of which rank r gets counts[r] of the sum(counts) elements, in rank order.

    Args:
        algorithm: One of `REDUCTIONS["reduce_scatter"]`.
        rank: Whose plan. All other arguments must be equal on all ranks.
        world: Number of ranks.
        counts: Elements for each rank; any may be 0.
        leaves: How many; each rank holds those of `canonical_order.leaves_of`, one INPUT slot for each.
        itemsize: Bytes of an element of the tensor's type.
        wide_itemsize: Bytes of an element of the accumulator's type.
        chunk_bytes: No message is longer, unless one element is.
        sites: A number for each rank, equal for ranks that are near each other; only hierarchical looks at it.
        loose: A node of at most so many leaves travels as these; 1 for ring.
    Returns:
        The plan; without lanes where there are no elements.
    Raises:
        LocalError: An argument is out of its range, or the algorithm is not known.
    """
    order = _Order("reduce_scatter", algorithm, rank, world, leaves, itemsize, wide_itemsize, chunk_bytes, sites, loose)
    if len(counts) != world:
        raise LocalError(f"counts for {len(counts)} ranks in a world of {world}")
    require_at_least(0, **{f"counts[{r}]": count for r, count in enumerate(counts)})
    offsets = [0, *accumulate(counts)]
    table = interleaved([(r, (offsets[r], offsets[r + 1])) for r in range(world)], order.limit)
    lanes = [
        _lane(order, owner, piece, (piece[0] - offsets[owner], piece[1] - offsets[owner]), number, goal=owner)
        for number, (owner, piece) in enumerate(table)
    ]
    width = max(1, sum(count > 0 for count in counts)) * order.depth
    return order.plan(lanes, offsets[-1], counts[rank], width, (("counts", tuple(counts)),))


class _Order:
    """The arguments that all reductions have in common, checked, and what follows from them."""

    def __init__(
        self,
        collective: str,
        algorithm: str,
        rank: int,
        world: int,
        leaves: int,
        itemsize: int,
        wide_itemsize: int,
        chunk_bytes: int,
        sites: Sequence[int],
        loose: int,
    ) -> None:
        require_rank(world, rank=rank)
        require_at_least(1, leaves=leaves, itemsize=itemsize, chunk_bytes=chunk_bytes, loose=loose)
        require_at_least(itemsize, wide_itemsize=wide_itemsize)
        if algorithm not in REDUCTIONS[collective]:
            raise LocalError(f"algorithm {algorithm!r} is not known; use one of {', '.join(REDUCTIONS[collective])}")
        self.collective, self.algorithm = collective, algorithm
        self.itemsize, self.wide_itemsize, self.chunk_bytes = itemsize, wide_itemsize, chunk_bytes
        self.sites = normal_sites(sites, world)
        if algorithm == "ring" and loose > 1:
            raise LocalError("a ring's order is that of its nodes, so none of them is loose")
        self.canonical = canonical = CanonicalTree(rank, world, leaves, loose)
        self._route = ROUTES.get(algorithm)
        self._places: dict[int, Place] = {}
        # Any of these covers may have to go from one rank to another in a lane. Blocks of a halving hold contiguous
        # leaves, so their covers have a bound that needs no look at each of them: two nodes for each power of two and
        # one other; the loose ones go as leaves, and have fewer than 4 * loose and `loose` of them.
        groups = [(rank,) for rank in range(world)] + list(
            site_members(self.sites) if algorithm == "hierarchical" else ()
        )
        covers = [canonical.cover(ranks) for ranks in groups]
        bound = 2 * leaves.bit_length() + (5 * loose if loose > 1 else 0)
        self.stride = bound if algorithm == "tree" else max(map(len, covers))
        partials = (algorithm == "tree" and leaves > loose) or any(b - a > 1 for cover in covers for a, b in cover)
        partials = partials and world > 1 < leaves
        self.limit = max(1, chunk_bytes // (wide_itemsize if partials else itemsize))

    @property
    def depth(self) -> int:
        return 1 if self._route is None else self._route.depth(self.canonical.world)

    def place(self, owner: int) -> Place:
        """Of this rank, on the route to `owner`."""
        if self._route is None:
            raise AssertionError(f"{self.algorithm} has no routes")
        if owner not in self._places:
            self._places[owner] = self._route.place(self.canonical.rank, owner, self.canonical.world, self.sites)
        return self._places[owner]

    def table(self, elements: int, owners: list[int]) -> tuple[list[tuple[int, Piece]], int]:
        """(owner, chunk) for each lane, and how many lanes have to be open at a time."""
        if self._route is not None and not self._route.shared:
            pieces = chunks((0, elements), self.limit)
            return [(owners[i % len(owners)], piece) for i, piece in enumerate(pieces)], self.depth
        least = MIN_SHARE_BYTES if self.itemsize <= LONGEST_NUMBER else MIN_BLOCKS_SHARE_BYTES
        worth = -(-elements * self.itemsize // least)
        parts = shares(elements, max(1, min(len(owners), worth)), grain_of(self.itemsize))
        return interleaved(list(zip(owners, parts, strict=False)), self.limit), max(1, len(parts)) * self.depth

    def plan(
        self, lanes: list[Lane], elements: int, output: int, width: int, parameters: tuple[Parameter, ...]
    ) -> Plan:
        canonical = self.canonical
        common: list[Parameter] = [
            ("leaves", canonical.leaves),
            ("itemsize", self.itemsize),
            ("wide_itemsize", self.wide_itemsize),
            ("chunk_bytes", self.chunk_bytes),
        ]
        if self.algorithm == "hierarchical":
            common.append(("sites", self.sites))
        if canonical.loose > 1:
            common.append(("loose", canonical.loose))
        return Plan(
            collective=self.collective,
            algorithm=self.algorithm,
            rank=canonical.rank,
            world=canonical.world,
            lanes=tuple(lanes),
            inputs=(elements,) * canonical.held[canonical.rank],
            output=output,
            leaves=canonical.leaves,
            itemsize=self.itemsize,
            wide_itemsize=self.wide_itemsize,
            width=max(1, width),
            parameters=(*parameters, *common),
        )


def _lane(order: _Order, owner: int, piece: Piece, local: Piece, number: int, *, goal: int | None = None) -> Lane:
    """One chunk on its way to its owner, and the result on its way from there.

    piece: of the INPUT. local: of the OUTPUT of the rank that gets the result. goal: that rank; None: all.
    """
    canonical, place = order.canonical, order.place(owner)
    index, size = number * order.stride, piece[1] - piece[0]
    output = Span(Buf.OUTPUT, 0, *local)
    steps: list[PlanStep] = []
    scratch: list[Scratch] = []

    def room(*, wide: bool) -> Span:
        scratch.append(Scratch(size, wide))
        return Span(Buf.SCRATCH, len(scratch) - 1, 0, size, wide)

    known: dict[Piece, Span] = {}
    for child, below in place.children:
        for k, (a, b) in enumerate(canonical.cover(below)):
            known[a, b] = room(wide=b - a > 1)
            steps.append(RecvStep(child, index + k, known[a, b]))
    if place.parent is None:
        result = output if goal in (None, owner) else room(wide=False)
        steps.append(ReduceStep(result, canonical.tree((0, canonical.leaves), piece, known), finish=True))
        if goal is not None and goal != owner:
            steps.append(SendStep(goal, index, result))
    else:
        for k, node in enumerate(canonical.cover(place.below(canonical.rank))):
            value = canonical.tree(node, piece, known)
            if isinstance(value, tuple):
                partial = room(wide=True)
                steps.append(ReduceStep(partial, value, finish=False))
                value = partial
            steps.append(SendStep(place.parent, index + k, value))
        if goal == canonical.rank:
            steps.append(RecvStep(owner, index, output))
    if goal is None:
        if place.parent is not None:
            steps.append(RecvStep(place.parent, index, output))
        steps += [SendStep(child, index, output) for child, _ in place.children]
    return Lane(tuple(steps), tuple(scratch))


def _everyone(canonical: CanonicalTree, piece: Piece, index: int) -> Lane:
    """One chunk of an exchange: every rank's values to all others, the next rank first."""
    size = piece[1] - piece[0]
    steps: list[PlanStep] = []
    scratch: list[Scratch] = []
    known: dict[Piece, Span] = {}
    others = [(canonical.rank + i) % canonical.world for i in range(1, canonical.world)]
    for k, (a, b) in enumerate(canonical.nodes[canonical.rank] if others else ()):
        value = canonical.tree((a, b), piece, {})
        if isinstance(value, tuple):
            known[a, b] = Span(Buf.SCRATCH, len(scratch), 0, size, wide=True)
            scratch.append(Scratch(size, wide=True))
            steps.append(ReduceStep(known[a, b], value, finish=False))
            value = known[a, b]
        steps += [SendStep(peer, index + k, value) for peer in others]
    for peer in reversed(others):
        for k, (a, b) in enumerate(canonical.nodes[peer]):
            known[a, b] = Span(Buf.SCRATCH, len(scratch), 0, size, b - a > 1)
            scratch.append(Scratch(size, b - a > 1))
            steps.append(RecvStep(peer, index + k, known[a, b]))
    steps.append(
        ReduceStep(Span(Buf.OUTPUT, 0, *piece), canonical.tree((0, canonical.leaves), piece, known), finish=True)
    )
    return Lane(tuple(steps), tuple(scratch))
