"""Who writes what of a checkpoint. Every rank computes it by itself, from what all of them know.

What all ranks hold is cut into pieces, in the order of names and of elements, and the pieces are divided into runs of
about equal bytes, one for each rank: each writes 1/n of it, give or take a piece. A piece has at most MOST bytes, so
that a reader who wants a part reads little more than that, and at most a quarter of a rank's part, but never less than
LEAST. Shards and what is a node's own are written by who holds them, in pieces of at most MOST.

Where each rank writes to a disk of its own, nothing is divided: every rank writes all that it holds, since a disk that
is lost takes what is on it along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quicoll.checkpoint.regions import Region, pieces_of

if TYPE_CHECKING:
    from quicoll.checkpoint.parts import HeldPart

__all__ = ["LEAST", "MOST", "assignment"]

MOST = 64 << 20
LEAST = 64 << 10


def assignment(parts: Sequence[HeldPart], *, rank: int, world_size: int, divide: bool) -> list[tuple[HeldPart, Region]]:
    """Return what one rank writes, in order.

    Args:
        parts: What it holds. Those that all ranks hold are equal on all of them.
        rank: Its number.
        world_size: How many ranks there are.
        divide: Whether what all hold is divided among them.
    """
    common = [part for part in parts if part.replicated]
    total = sum(part.region.size * part.width for part in common)
    most = MOST if not divide else min(MOST, max(LEAST, total // (4 * world_size)))
    begin, mine = 0, []
    for part in parts:
        for region in pieces_of(part.region, part.width, most if part.replicated else MOST):
            if not part.replicated or not divide:
                mine.append((part, region))
                continue
            if begin * world_size // total == rank:
                mine.append((part, region))
            begin += region.size * part.width
    return mine
