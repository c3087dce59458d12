"""Which rank gives which piece of a checkpoint to whom, where each has a disk of its own. Pure.

A restore goes in rounds, in which each rank tells which pieces it lacks. All ranks compute the same plan from what all
have told: for each piece the rank that gives it is one whose disk has it or a copy of it, of these the one that has
least to give so far, of equals one of the receiver's site, then the lowest rank. So sources share the work.

Bounds. In a round a rank is given PORTION bytes and gives PORTION bytes, or one piece if that is larger: no rank holds
more of what is on its way. What does not fit is for the next round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quicoll.checkpoint.manifest import CheckpointManifest
    from quicoll.checkpoint.regions import Region

__all__ = ["PORTION", "PieceMove", "PieceSources", "planned_moves"]

PORTION = 128 << 20


@dataclass(frozen=True, slots=True)
class PieceMove:
    """A piece that one rank gives to another. piece: the one that was asked for. copy: the one on the giver's disk."""

    piece: int
    copy: int
    giver: int
    receiver: int


class PieceSources:
    """Which ranks have which pieces on their disks."""

    def __init__(self, manifest: CheckpointManifest, held: Sequence[Sequence[int]]) -> None:
        """Take in what all ranks have told.

        Args:
            manifest: Of the checkpoint.
            held: By rank, the numbers of the manifest's files that are on its disk.
        """
        self._manifest = manifest
        ranks: list[list[int]] = [[] for _ in manifest.files]
        for rank, files in enumerate(held):
            for file in files:
                ranks[file].append(rank)
        self._copies: dict[tuple[int, Region, str], list[tuple[int, int]]] = {}
        for number, piece in enumerate(manifest.pieces):
            key = piece.tensor, piece.region, piece.digest
            self._copies.setdefault(key, []).extend((rank, number) for rank in ranks[piece.file])

    def of(self, number: int) -> list[tuple[int, int]]:
        """Return the ranks that have a piece or a copy of it, with the number of what they have, in order."""
        piece = self._manifest.pieces[number]
        return self._copies[piece.tensor, piece.region, piece.digest]

    def strike(self, rank: int, number: int) -> None:
        """Take note that a rank cannot read what it has of a piece."""
        found = self.of(number)
        if (rank, number) in found:
            found.remove((rank, number))


def planned_moves(
    manifest: CheckpointManifest,
    sources: PieceSources,
    asked: Mapping[int, Sequence[int]],
    sites: Sequence[str],
) -> tuple[list[PieceMove], list[tuple[int, int]]]:
    """Return who gives what in a round, and the (rank, piece) that nobody can give.

    Args:
        manifest: Of the checkpoint.
        sources: Who has what.
        asked: By rank, the pieces that it lacks, in its order; never one twice.
        sites: Of each rank.
    """
    found: list[PieceMove] = []
    nowhere: list[tuple[int, int]] = []
    given = [0] * len(sites)
    for receiver in sorted(asked):
        taken = 0
        for number in asked[receiver]:
            holders = [each for each in sources.of(number) if each[0] != receiver]
            if not holders:
                nowhere.append((receiver, number))
                continue
            size = manifest.pieces[number].nbytes
            free = [each for each in holders if not given[each[0]] or given[each[0]] + size <= PORTION]
            if not free or (taken and taken + size > PORTION):
                continue
            giver, copy = min(free, key=lambda each: (given[each[0]], sites[each[0]] != sites[receiver], each))
            given[giver] += size
            taken += size
            found.append(PieceMove(number, copy, giver, receiver))
    return found, nowhere
