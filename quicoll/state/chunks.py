"""A state as chunks: what is asked for, sent, checked and put in place as one.

The tensors, in the manifest's order, are cut into pieces of at most `limit` bytes, and neighbours are put together as
long as they fit. So a large tensor is chunks of its own, and thousands of small ones are one chunk. Both ends compute
the same from the manifest; nothing about chunks is sent but their digests.

A chunk is known by the digest of its bytes (xxh3-128; no defence against an adversary, who is a member and could hand
over any state it likes). A chunk whose digest is right at the receiver need not be sent, whoever put it there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from quicoll.numerics.dtypes import Array
    from quicoll.state.tensor_memory import TensorMemory

__all__ = ["DIGEST_BYTES", "ChunkTable", "ChunkedState", "Piece", "chunk_digest"]

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a tensor, by its number in the manifest."""

    tensor: int
    start: int
    stop: int


def chunk_digest(data: Array) -> bytes:
    """Return the digest of a chunk's bytes (1-D uint8)."""
    return xxhash.xxh3_128_digest(data.data)


class ChunkTable:
    """Which pieces each chunk consists of. Pure; takes 24 bytes for each piece."""

    def __init__(self, sizes: Sequence[tuple[int, int]], limit: int) -> None:
        """Cut tensors into chunks.

        Args:
            sizes: Elements and bytes of an element, of each tensor.
            limit: No chunk has more bytes, unless one element has.
        """
        self._numbers = array("q")  # of each piece: tensor, start, stop
        self._ends = array("q", [0])  # pieces before each chunk
        self._nbytes = array("q")
        filled = 0
        for tensor, (elements, itemsize) in enumerate(sizes):
            most = max(limit // itemsize, 1)
            for start in range(0, elements, most):
                stop = min(start + most, elements)
                nbytes = (stop - start) * itemsize
                if filled and filled + nbytes > limit:
                    self._close(filled)
                    filled = 0
                self._numbers.extend((tensor, start, stop))
                filled += nbytes
        if filled:
            self._close(filled)

    def _close(self, nbytes: int) -> None:
        self._ends.append(len(self._numbers) // 3)
        self._nbytes.append(nbytes)

    def __len__(self) -> int:
        return len(self._nbytes)

    def nbytes(self, chunk: int) -> int:
        """Return the bytes of a chunk."""
        return self._nbytes[chunk]

    def pieces(self, chunk: int) -> Iterator[Piece]:
        """Return the pieces of a chunk, in order."""
        for at in range(3 * self._ends[chunk], 3 * self._ends[chunk + 1], 3):
            yield Piece(*self._numbers[at : at + 3])


class ChunkedState:
    """The memory of a state, by chunks."""

    def __init__(self, tensors: Sequence[TensorMemory], table: ChunkTable) -> None:
        """Look at a state by its chunks.

        Args:
            tensors: Its tensors, in the manifest's order.
            table: Of the manifest.
        """
        self.tensors = tensors
        self.table = table

    def read(self, chunk: int) -> Array:
        """Return the bytes of a chunk: memory of the tensor's own where it can be, else a copy of the chunk."""
        parts = [self.tensors[piece.tensor].read(piece.start, piece.stop) for piece in self.table.pieces(chunk)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def write(self, chunk: int, data: Array) -> None:
        """Put the bytes of a chunk in place."""
        at = 0
        for piece in self.table.pieces(chunk):
            tensor = self.tensors[piece.tensor]
            end = at + (piece.stop - piece.start) * tensor.dtype.itemsize
            tensor.write(piece.start, piece.stop, data[at:end])
            at = end

    def digest(self, chunk: int) -> bytes:
        """Return the digest of a chunk as it is in memory now."""
        state = xxhash.xxh3_128()
        for piece in self.table.pieces(chunk):
            state.update(self.tensors[piece.tensor].read(piece.start, piece.stop).data)
        return state.digest()

    def names(self, chunk: int) -> str:
        """Return, for people, the tensors that a chunk is of."""
        pieces = list(self.table.pieces(chunk))
        names = list(dict.fromkeys(self.tensors[piece.tensor].name for piece in (pieces[0], pieces[-1])))
        return " to ".join(map(repr, names))
