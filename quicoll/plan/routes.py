"""Ways of partial results through the ranks: the shape of an algorithm, apart from what travels.

A route is a tree of ranks with the chunk's owner at its root. Each rank sends the part of the reduction that lies
below it to its parent; what all ranks are to know comes down the same way. Routes decide cost and nothing else:

Why any route gives the same bits. What lies below a rank is a set of leaves. The rank may replace some of them by one
value exactly where they make up a whole node of the canonical tree (`quicoll.numerics.canonical_order`), because a
node's value does not depend on which rank computes it. Everything else it passes on as it is. So the owner gets values
of nodes that together make up all leaves, each leaf once, and combines them upwards as the tree says. No route can make
it combine anything else.

Why a route has a price then. A set of leaves that is not a node travels as several values, its *cover*: the fewest
nodes that make it up. Contiguous leaves have a cover of at most 2 log2(leaves) nodes.

    star     every rank sends to the owner. One delay up, one down; the owner handles world - 1 messages each way.
    halving  the block of ranks is split as the canonical tree splits its leaves. The half without the block's head
             gets a head of its own, its first rank, which sends to the block's. At most ceil(log2(world)) delays
             up and as many down, and no rank handles more messages than that. With one leaf for each rank every
             block is a node of the tree: each message is one value, for every world size and owner. (A
             binomial tree over ranks counted from the owner has that only when the owner is rank 0.)
    sites    each site but the owner's has a head, which collects from its site and sends the site's cover to the
             owner; so each value crosses between two sites once, and so does the result. Heads change with the
             owner, so that all ranks of a site carry the same share. Where the leaves of a site make up a whole
             node, one value crosses; where they do not, their cover does. 3 + 3 ranks with a leaf each: the tree is
             ((0 1)(2 3))(4 5); the second site sends 3 and (4 5), the first (0 1) and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quicoll.errors import LocalError
from quicoll.numerics.canonical_order import split

__all__ = ["Place", "binomial", "halving", "normal_sites", "site_members", "star", "through_sites"]


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place on a route.

    parent: None at the owner. children: in the order in which results go down, each with all ranks below it, itself
    included.
    """

    parent: int | None
    children: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def below(self, rank: int) -> tuple[int, ...]:
        """All ranks at or below `rank`, whose place this is."""
        return (rank, *(each for _, ranks in self.children for each in ranks))


def star(rank: int, owner: int, world: int) -> Place:
    """Every rank is a child of the owner; the next rank comes first, so that not all owners send to one at once."""
    if rank != owner:
        return Place(owner)
    return Place(None, tuple((peer, (peer,)) for peer in _after(owner, range(world))))


def halving(rank: int, owner: int, world: int) -> Place:
    """Blocks of ranks, split as the canonical tree splits its leaves; the largest half comes first."""
    start, stop, head = 0, world, owner
    parent: int | None = None
    children: list[tuple[int, tuple[int, ...]]] = []
    while stop - start > 1:
        middle = split(start, stop)
        near, far = ((start, middle), (middle, stop)) if head < middle else ((middle, stop), (start, middle))
        if far[0] <= rank < far[1]:
            if rank == far[0]:
                parent = head
            start, stop, head = far[0], far[1], far[0]
            continue
        if rank == head:
            children.append((far[0], tuple(range(*far))))
        start, stop = near
    return Place(parent, tuple(children))


def through_sites(rank: int, owner: int, members: Sequence[Sequence[int]], sites: Sequence[int]) -> Place:
    """One head for each site; the owner is its own site's. Other sites come first: they are furthest away.

    members: the ranks of each site, ascending. sites: the site of each rank.
    """

    def head(site: int) -> int:
        return owner if site == sites[owner] else members[site][owner % len(members[site])]

    home = sites[rank]
    if rank != head(home):
        return Place(head(home))
    near = tuple((peer, (peer,)) for peer in _after(rank, members[home]))
    if rank != owner:
        return Place(owner, near)
    away = _after(home, range(len(members)))
    return Place(None, (*((head(site), tuple(_first(head(site), members[site]))) for site in away), *near))


def binomial(place: int, size: int) -> tuple[int, list[int]]:
    """(parent, children) of `place` in a binomial tree over places 0..size-1, whose root is 0 and has the parent -1.

    A place's parent is its number without the lowest set bit, its children are its number plus each power of two below
    that bit, the largest first because the most places wait behind it. For what goes down alone: nothing is combined.
    """
    reach = place & -place if place else 1 << (size - 1).bit_length()
    offsets = [1 << bit for bit in reversed(range(reach.bit_length() - 1))]
    return place - reach if place else -1, [place + offset for offset in offsets if place + offset < size]


def normal_sites(sites: Sequence[int], world: int) -> tuple[int, ...]:
    """Site numbers counted from 0 in the order in which they appear, one for each rank; none given: all in one.

    Raises LocalError when there is not one for each rank.
    """
    if not sites:
        return (0,) * world
    if len(sites) != world:
        raise LocalError(f"sites for {len(sites)} ranks in a world of {world}")
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(site, len(numbers)) for site in sites)


def site_members(sites: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each site, ascending. sites: as `normal_sites` gives them."""
    members: list[list[int]] = [[] for _ in range(max(sites) + 1)]
    for rank, site in enumerate(sites):
        members[site].append(rank)
    return tuple(map(tuple, members))


def _after(this: int, among: Sequence[int]) -> list[int]:
    """The others of `among`, which ascends, from the one after `this` round to the one before it."""
    return [one for one in among if one > this] + [one for one in among if one < this]


def _first(head: int, ranks: Sequence[int]) -> list[int]:
    return [head, *(rank for rank in ranks if rank != head)]
