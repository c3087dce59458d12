"""Which blocks of a sharded state each rank owns and keeps a copy of, and who gives what to whom. Pure.

A sharded state has one axis, of `length` elements. It is cut into `blocks` of nearly equal length, as many on any
number of ranks: a block never changes, only who owns it.

    owned       each rank a run of blocks, in the order of ranks, numbers differing by at most one: those of
                `job.group.shards(blocks)`. Ranks that are about to leave own none
    computed    where ranks compute the same blocks together (`peers`), one of them is the owner, and the others hold
                them too: nothing is copied for that
    backed up   the blocks of a rank are kept by the `backup` owners after it too, round and round, each of them once
    moved       whoever is to keep a block and does not hold it is given it by one that does. Whoever holds it keeps it,
                so nothing travels that need not. Of several holders the one gives that has least to give so far, of
                equals one of the receiver's site, then the lowest rank: sources share the work

Invariants: every block has just one owner, and beside its peers `min(1 + backup, owners)` keepers, no two of them one
rank. The same arguments give the same layout and the same moves on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.numerics.canonical_order import leaves_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Layout", "Move", "block_start", "moves"]


def block_start(length: int, blocks: int, block: int) -> int:
    """Return the element at which a block begins; that of block number `blocks` is the length."""
    return block * length // blocks


@dataclass(frozen=True, slots=True)
class Layout:
    """Who owns and keeps which blocks.

    Attributes:
        blocks: How many there are.
        owners: The ranks that own blocks, ascending.
        backup: How many further owners keep each block.
        peers: For each owner the other ranks that hold what it owns, since they compute it too; (): nobody does.
    """

    blocks: int
    owners: tuple[int, ...]
    backup: int = 0
    peers: tuple[tuple[int, ...], ...] = ()

    @property
    def copies(self) -> int:
        """How many further ranks keep each block, as there are ranks."""
        return min(self.backup, len(self.owners) - 1)

    def owned(self, rank: int) -> range:
        """Return the blocks that a rank owns."""
        if rank not in self.owners:
            return range(0)
        return leaves_of(self.owners.index(rank), len(self.owners), self.blocks)

    def held(self, rank: int) -> range:
        """Return the blocks that a rank computes: those that it owns, or whose owner is a peer of it."""
        for owner, peers in zip(self.owners, self.peers, strict=False):
            if rank in peers:
                return self.owned(owner)
        return self.owned(rank)

    def together(self, place: int) -> tuple[int, ...]:
        """Return an owner and its peers.

        Args:
            place: Which of the owners.
        """
        return (self.owners[place], *(self.peers[place] if self.peers else ()))

    def owner(self, block: int) -> int:
        """Return the rank that owns a block."""
        return self.owners[self._place(block)]

    def keepers(self, block: int) -> tuple[int, ...]:
        """Return the ranks that keep a block, its owner first, then its peers."""
        place, world = self._place(block), len(self.owners)
        copies = tuple(self.owners[(place + each) % world] for each in range(1, self.copies + 1))
        return self.together(place) + copies

    def neighbours(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return for each copy the owner to whom this one gives its blocks, and the one whose blocks it gets."""
        if rank not in self.owners:
            return ()
        place, world = self.owners.index(rank), len(self.owners)
        return tuple(
            (self.owners[(place + each) % world], self.owners[(place - each) % world])
            for each in range(1, self.copies + 1)
        )

    def _place(self, block: int) -> int:
        """The inverse of `leaves_of`."""
        return ((block + 1) * len(self.owners) - 1) // self.blocks


@dataclass(frozen=True, slots=True)
class Move:
    """A block that goes from one rank to another."""

    block: int
    giver: int
    receiver: int


def moves(
    layout: Layout, held: Sequence[NDArray[Any]], sites: Sequence[str]
) -> tuple[tuple[Move, ...], tuple[int, ...]]:
    """Return who gives which block to whom, and the blocks that nobody holds.

    Args:
        layout: What is to be.
        held: Of each rank, whether it holds each block.
        sites: Of each rank.
    """
    found: list[Move] = []
    missing: list[int] = []
    load = [0] * len(held)
    here = np.stack([np.asarray(each, bool) for each in held])
    for block in range(layout.blocks):
        needy = [rank for rank in layout.keepers(block) if not here[rank, block]]
        if not needy:
            continue
        holders = [int(rank) for rank in np.flatnonzero(here[:, block])]
        if not holders:
            missing.append(block)
            continue
        for receiver in needy:
            giver = min(holders, key=lambda rank: (load[rank], sites[rank] != sites[receiver], rank))
            load[giver] += 1
            found.append(Move(block, giver, receiver))
    return tuple(found), tuple(missing)
