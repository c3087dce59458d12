"""The order of an epoch: a permutation of n samples that is computed place by place, in no memory of its size.

Which sample stands at a place is a function of (seed, n, place) alone. So a rank that comes back, or a job that starts
again, finds its samples without the order before them, and a billion samples take no more memory than a batch.

The permutation is a Feistel network (Luby and Rackoff 1988, SIAM J. Comput. 17(2)) on pairs (left, right) of numbers
below a and b, with addition in place of exclusive or, and a * b the smallest such rectangle with a = ceil(sqrt(n)) that
has n places: the "generalized Feistel cipher" of Black and Rogaway 2002, "Ciphers with arbitrary finite domains",
CT-RSA. Places of the rectangle that are no samples, fewer than a, are left by "cycle walking" (the same paper): the
permutation is applied again until a sample is met. That ends, because the walk is on a cycle through a sample, and it
is a permutation of the samples again.

    round 0, 2, ...   left  = (left  + F(right)) mod a
    round 1, 3, ...   right = (right + F(left))  mod b

F mixes its argument with the round's key by the finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable
pseudorandom number generators", OOPSLA; constants of Stafford's variant 13). The keys are numbers of the job's
generator (quicoll.numerics.generator). ROUNDS is 12, where three or four would do for secrecy on large domains: in
small ones few rounds reach few orders. That every order of up to five samples comes as often as any other is tested.
It is no cipher: who sees the order may find the seed.

Exact integers below 2**64 throughout, so the same on every machine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from quicoll.errors import LocalError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quicoll.numerics.seed import Seed

__all__ = ["MAX_SAMPLES", "EpochOrder"]

MAX_SAMPLES = 1 << 60
ROUNDS = 12

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


class EpochOrder:
    """The order of n samples. See the module's head."""

    def __init__(self, length: int, seed: Seed | None) -> None:
        """Make an order.

        Args:
            length: The number of samples, 1 to MAX_SAMPLES.
            seed: Of the epoch; None: the samples stand in their own order.
        Raises:
            LocalError: There cannot be so many samples.
        """
        if not 1 <= length <= MAX_SAMPLES:
            raise LocalError(f"there must be at least one sample and at most 2**60, not {length}")
        self.length = length
        self._keys: NDArray[np.uint64] | None = None
        if seed is not None:
            self._keys = seed.generator().integers(ROUNDS, high=1 << 64, dtype="uint64")
        left = math.isqrt(length - 1) + 1
        self._left, self._right = np.uint64(left), np.uint64(-(-length // left))

    def samples(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at places [start, stop).

        Args:
            start: The first place, 0 or more.
            stop: The place after the last, at most `length`.
        Returns:
            int64, of shape (stop - start,), each below `length`.
        Raises:
            LocalError: There are no such places.
        """
        if not 0 <= start <= stop <= self.length:
            raise LocalError(f"places {start} to {stop} are none of an epoch of {self.length} samples")
        places = np.arange(start, stop, dtype=np.int64)
        if self._keys is None or not places.size:
            return places
        found = self._permuted(places.astype(np.uint64), self._keys)
        last = np.uint64(self.length - 1)
        while (beyond := np.flatnonzero(found > last)).size:
            found[beyond] = self._permuted(found[beyond], self._keys)
        return found.astype(np.int64)

    def _permuted(self, places: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = places // self._right, places % self._right
        for number, key in enumerate(keys):
            if number % 2:
                right = (right + _mixed(left, key) % self._right) % self._right
            else:
                left = (left + _mixed(right, key) % self._left) % self._left
        found: NDArray[np.uint64] = left * self._right + right
        return found


def _mixed(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Array arithmetic of uint64 wraps without a warning, and is meant to."""
    mixed: NDArray[np.uint64] = (numbers + np.uint64(1)) * _GOLDEN + key
    mixed = (mixed ^ (mixed >> _SHIFT_1)) * _MIX_1
    mixed = (mixed ^ (mixed >> _SHIFT_2)) * _MIX_2
    return mixed ^ (mixed >> _SHIFT_3)
