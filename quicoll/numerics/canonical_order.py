"""The canonical order: the tree by which a reduction combines its leaves, and which leaves a rank holds.

Leaves are logical shards 0..L-1. They are reduced by one fixed binary tree: the node over [a, b) combines
the nodes over [a, m) and [m, b), where m = a + the largest power of two below b - a. It depends on L alone. A rank
holds contiguous leaves and may replace them by the nodes that lie wholly inside them (`subtrees`), because a node's
value does not depend on which rank computes it; the rank that finishes combines those nodes upwards as the tree says.
So 1, 2, 3, 5 or 8 ranks give the same bits for L = 8, and so does any chunk size, because an element never meets
another one.

Why a tree. Addition of floats is commutative but not associative, so one order has to be chosen. This one costs no
more than any other, its error grows with log2(L) and not with L (Higham 1993, "The accuracy of floating point
summation", SIAM J. Sci. Comput. 14(4)), and it can be cut between ranks, which a running sum cannot. It fixes the
order, which is the simpler half of the subject: a sum that is the same for every order needs binned accumulators
(Demmel and Nguyen 2013, "Fast reproducible floating-point summation", ARITH-21; Ahrens, Demmel and Nguyen 2020, ACM
TOMS 46(3)) or the whole sum. It is not needed as long as all ranks agree on the leaves; precision="exact" gives it all
the same (`quicoll.numerics.exact`): another accumulator, and nothing else.
"""

from __future__ import annotations

from quicoll.errors import LocalError

__all__ = ["leaves_of", "split", "subtrees"]


def split(start: int, stop: int) -> int:
    """Return where the canonical tree divides the node [start, stop), which holds at least two leaves."""
    if stop - start < 2:
        raise LocalError(f"the node [{start}, {stop}) has no children")
    return start + (1 << ((stop - start - 1).bit_length() - 1))


def subtrees(start: int, stop: int, total: int) -> tuple[tuple[int, int], ...]:
    """Return the fewest nodes of the tree over [0, total) that make up [start, stop); at most 2 log2(total)."""
    if not 0 <= start <= stop <= total:
        raise LocalError(f"leaves [{start}, {stop}) are not among [0, {total})")
    found: list[tuple[int, int]] = []
    pending = [(0, total)] if start < stop else []
    while pending:
        a, b = pending.pop()
        if start <= a and b <= stop:
            found.append((a, b))
        elif a < stop and start < b:
            m = split(a, b)
            pending += [(m, b), (a, m)]  # the left one is taken first
    return tuple(found)


def leaves_of(rank: int, world: int, total: int) -> range:
    """Return the leaves that a rank holds: contiguous, in rank order, their numbers differing by at most one.

    Args:
        rank: Which rank.
        world: Number of ranks.
        total: Number of leaves.
    Returns:
        A range of leaves, perhaps empty.
    Raises:
        LocalError: The rank is not in the world.
    """
    if not 0 <= rank < world:
        raise LocalError(f"rank {rank} is not in a world of {world}")
    return range(rank * total // world, (rank + 1) * total // world)
