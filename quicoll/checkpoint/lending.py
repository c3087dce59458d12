"""Memory for the copy that a checkpoint is written from, used again by the next one. Pure; used on one thread.

New memory costs more than the copy itself: the system clears each page when it is first touched, and the training waits
for the copy. So the memory stays when a file is written, for the next save of as many bytes.

    none --lend--> lent --given back--> free --lend, of as many bytes--> lent
                    |                     '----lend, of another number--> none
                    '--never given back: forgotten; it goes when nobody refers to it any more

Invariants.
1. Memory is lent to one borrower at a time. What is lent and not given back is lent to nobody else: a second borrower
   at the same time gets memory of its own.
2. At most one is free. So what is kept between two saves is what one save takes, and nothing where sizes change.
3. Who gives back knows that nobody reads or writes it any more. Where that is not certain, after an error or a
   cancelled wait for a thread, nothing is given back: a thread that still writes a file keeps what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quicoll.errors import LocalError

__all__ = ["CopyMemory", "Loan"]

_ALIGNMENT = 64
"""Of each piece: that of the widest element, and of a line of the cache."""


class Loan:
    """Memory that is lent, in pieces.

    Attributes:
        pieces: The memory of each, in the order in which they were asked for.
    """

    def __init__(self, owner: CopyMemory, whole: np.ndarray[tuple[int], np.dtype[np.uint8]], sizes: Sequence[int]):
        """Cut it. For CopyMemory."""
        self._owner = owner
        self._whole = whole
        self._lent = True
        self.pieces: list[memoryview] = []
        at = 0
        for nbytes in sizes:
            self.pieces.append(whole[at : at + nbytes].data)
            at += _aligned(nbytes)

    def give_back(self) -> None:
        """Nobody reads or writes it any more: it may be lent again. Once."""
        if not self._lent:
            raise AssertionError("memory was given back twice")
        self._lent = False
        self._owner.take_back(self._whole)


class CopyMemory:
    """See the module's head."""

    def __init__(self) -> None:
        """Begin without any."""
        self._free: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None

    def lend(self, sizes: Sequence[int]) -> Loan:
        """Lend memory for pieces.

        Args:
            sizes: Bytes of each.
        Raises:
            LocalError: There is no memory for them.
        """
        total = sum(map(_aligned, sizes))
        whole, self._free = self._free, None
        if whole is None or whole.size != total:
            del whole  # what does not fit goes before new memory is taken
            try:
                whole = np.empty(total, np.uint8)
            except (MemoryError, ValueError) as error:
                raise LocalError(f"there is no memory for a copy of {total} bytes: {error}") from error
        return Loan(self, whole, sizes)

    def take_back(self, whole: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """For Loan."""
        self._free = whole


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
