"""The division of elements between ranks and into chunks.

Boundaries are multiples of a grain. Of numbers it is GRAIN of them: a cache line or more of every type, so that no two
pieces share one, and a handful of elements is not cut at all. An element that is longer than any number is a block of
a wire format, many numbers in itself: it is its own grain, for with GRAIN of them the last of four equal shares of 400
blocks would have a tenth of the bytes and the others three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from quicoll.errors import LocalError

__all__ = [
    "GRAIN",
    "LONGEST_NUMBER",
    "MIB",
    "Piece",
    "chunks",
    "grain_of",
    "interleaved",
    "require_at_least",
    "require_rank",
    "shares",
]

MIB = 1 << 20
GRAIN = 64
LONGEST_NUMBER = 16
"""Bytes of an element; longer ones are blocks of a wire format."""

Piece: TypeAlias = tuple[int, int]


def grain_of(itemsize: int) -> int:
    """Return of how many elements of so many bytes a boundary is a multiple."""
    return GRAIN if itemsize <= LONGEST_NUMBER else 1


def shares(elements: int, parts: int, grain: int = GRAIN) -> list[Piece]:
    """Divide [0, elements) into at most `parts` pieces [start, stop), in order, none empty, equal but for the last."""
    return _cut(0, elements, _up(-(-elements // parts), grain))


def chunks(piece: Piece, limit: int) -> list[Piece]:
    """Divide a piece into the fewest near-equal pieces of at most `limit` elements; none for an empty piece."""
    start, stop = piece
    if start == stop:
        return []
    count = -(-(stop - start) // limit)
    even = _up(-(-(stop - start) // count), GRAIN)
    return _cut(start, stop, even if even <= limit else limit)


def interleaved(pieces: Sequence[tuple[int, Piece]], limit: int) -> list[tuple[int, Piece]]:
    """Return (owner, chunk): the first chunk of each owner, then the second of each, so that all are busy."""
    cut = [(owner, chunks(piece, limit)) for owner, piece in pieces]
    rounds = max((len(row) for _, row in cut), default=0)
    return [(owner, row[j]) for j in range(rounds) for owner, row in cut if j < len(row)]


def require_at_least(lowest: int, **values: int) -> None:
    """Raise LocalError that names the first value below `lowest`."""
    for name, value in values.items():
        if value < lowest:
            raise LocalError(f"{name}={value} is below {lowest}")


def require_rank(world: int, **ranks: int) -> None:
    """Raise LocalError that names the first of `ranks` that is not in a world of `world`."""
    for name, rank in ranks.items():
        if not 0 <= rank < world:
            raise LocalError(f"{name} {rank} is not in a world of {world}")


def _cut(start: int, stop: int, size: int) -> list[Piece]:
    return [(at, min(at + size, stop)) for at in range(start, stop, max(size, 1))]


def _up(value: int, grain: int) -> int:
    return -(-value // grain) * grain
