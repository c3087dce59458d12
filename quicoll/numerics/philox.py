"""Philox4x32-10: 128 random bits for every counter and key, without state, the same on every machine.

Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", SC11. A block cipher's shape (ten
rounds of two 32-bit multiplications) made cheap: it passes BigCrush for any key and any counter, so numbers made from
neighbouring counters are as good as any. What matters here: the n-th number needs none of those before it, so every
rank computes those that it needs, and they are integers, so they are equal on every processor. The tests compare it
with the known answers of the authors' Random123.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["random_words"]

_MULTIPLIERS = np.array(0xD2511F53, np.uint64), np.array(0xCD9E8D57, np.uint64)
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW, _32 = np.array(0xFFFF_FFFF, np.uint64), np.array(32, np.uint64)


def random_words(key: tuple[int, int], first: int, count: int, high: tuple[int, int]) -> NDArray[np.uint32]:
    """Return random words: a row of four for each block.

    Args:
        key: Two 32-bit words.
        first: Number of the first block, the two lower words of its counter.
        count: How many blocks.
        high: The two upper words of the counter.
    Returns:
        uint32, of shape (count, 4).
    """
    number = np.arange(count, dtype=np.uint64)
    number += np.uint64(first)
    a, b = number & _LOW, number >> _32
    c, d = (np.full(count, word, np.uint64) for word in high)
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            (right >> _32) ^ b ^ np.uint64(k0),
            right & _LOW,
            (left >> _32) ^ d ^ np.uint64(k1),
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFF_FFFF, (k1 + _WEYL[1]) & 0xFFFF_FFFF
    rows = np.empty((count, 4), np.uint32)
    for place, word in enumerate((a, b, c, d)):
        rows[:, place] = word
    return rows
