"""Top-k: of each chunk of 4096 numbers the largest, one of every n, with their places; the others are zeros.

    a chunk      4096 numbers, where each tensor begins anew; the last has what is left, c of them
    kept         k = ceil(c / n): those of the largest magnitude, and of equal ones the first. NaN is above infinity,
                 and that above all numbers, whatever bits a NaN has
    a row        their values as bfloat16, then their places, 12 bits each, in order: the low 8 bits of a place come
                 first, then its high 4 with the low 4 of the next, then that one's high 8. Half a byte may be left over

With n = 64 that is 224 bytes where float32 has 16 KiB: 73 times fewer. Values are rounded as the wire format bfloat16
has it, with signed zeros and the one NaN, except that a finite one stays finite: beyond the largest bfloat16 it is
that. So infinities and NaN are seen, where there are no more than k of them in a chunk; of more, k are.

What is lost. With x a chunk and y what comes out, |x - y|**2 <= (1 - (1 - 2**-16) k / c) |x|**2 for finite x below
2**127 and above 2**-126: top-k is a contraction (Stich et al. 2018, arXiv 1809.07599), which is what error feedback
needs to converge; without that (`quicoll.numerics.feedback`) the small numbers would never arrive.

What a sum does. The numbers of several leaves stand at several places, so the sum of two has up to 2 k: encoded again
it would lose most of the second, and no leaf's residual would know. Hence a reduction gives all leaves to all ranks,
and each reduces them, dense and in canonical order, with nothing lost (`Codec.gathered`). That is fewer bytes than
owners who collect leaves and send their whole sums, for worlds of less than about 2 n ranks; and one delay, not two.

Any cut between chunks gives the same bits: whole chunks have rows of one length.
"""

from __future__ import annotations

import numpy as np

from quicoll.numerics.codec import Codec
from quicoll.numerics.dtypes import (
    BFLOAT16,
    FLOAT32,
    FLOAT64,
    Array,
    DType,
    narrow_unguarded,
    widen_unguarded,
)

__all__ = ["LEAST_KEPT", "MOST_KEPT_OF", "TOP_K_CHUNK", "TopKCodec", "largest_places"]

TOP_K_CHUNK = 4096
"""Numbers of a chunk: places have 12 bits."""
LEAST_KEPT, MOST_KEPT_OF = 2, TOP_K_CHUNK
"""Of so many numbers one may be kept: at the least two, at the most a chunk's."""

_STRETCH = 8  # chunks that are worked on at a time
_SIZE, _TOP = np.uint16(0x7FFF), np.uint16(BFLOAT16.top)


class TopKCodec(Codec):
    """n: of so many numbers one is kept."""

    block = TOP_K_CHUNK
    parts = (FLOAT32, FLOAT64, BFLOAT16)
    gathered = True

    def __init__(self, n: int) -> None:
        self.name = f"topk:1/{n}"
        self.n = n

    def kept(self, numbers: int) -> int:
        """Return how many numbers are kept of a chunk of so many."""
        return -(-numbers // self.n)

    def bound(self, largest: float, dtype: DType, *, finite: bool = True) -> float:
        self.check(dtype)
        return largest

    def _row(self, numbers: int) -> int:
        kept = self.kept(numbers)
        return 2 * kept + -(-3 * kept // 2)

    def _bytes_of(self, numbers: int) -> int:
        whole, rest = divmod(numbers, self.block)
        return whole * self._row(self.block) + self._row(rest)

    def _encode(self, numbers: Array, part: DType, wire: Array) -> None:
        whole, rest = divmod(numbers.size, self.block)
        cut, row = whole * self.block, self._row(self.block)
        chunks, rows = numbers[:cut].reshape(whole, self.block), wire[: whole * row].reshape(whole, row)
        for a in range(0, whole, _STRETCH):
            self._encode_chunks(chunks[a : a + _STRETCH], part, rows[a : a + _STRETCH])
        if rest:
            self._encode_chunks(numbers[cut:].reshape(1, rest), part, wire[whole * row :].reshape(1, -1))

    def _decode(self, wire: Array, part: DType, numbers: Array) -> None:
        whole, rest = divmod(numbers.size, self.block)
        cut, row = whole * self.block, self._row(self.block)
        chunks, rows = numbers[:cut].reshape(whole, self.block), wire[: whole * row].reshape(whole, row)
        for a in range(0, whole, _STRETCH):
            self._decode_chunks(rows[a : a + _STRETCH], self.block, part, chunks[a : a + _STRETCH])
        if rest:
            last = np.empty((1, self.block), part.storage)  # bytes that no encoder wrote may name any place in it
            self._decode_chunks(wire[whole * row :].reshape(1, -1), rest, part, last)
            numbers[cut:] = last[0, :rest]

    def _encode_chunks(self, chunks: Array, part: DType, rows: Array) -> None:
        kept = self.kept(chunks.shape[1])
        places = largest_places(chunks, part, kept)
        chosen = np.take_along_axis(chunks, places, axis=1).reshape(-1)
        short = np.empty(chosen.size, np.uint16)
        narrow_unguarded(chosen, part, BFLOAT16, short)
        beyond = (short & _SIZE) == _TOP
        if part is not BFLOAT16 and beyond.any():
            short[beyond & np.isfinite(chosen)] -= np.uint16(1)
        rows[:, : 2 * kept] = short.reshape(-1, kept).view(np.uint8)
        _pack_places(places, rows[:, 2 * kept :])

    def _decode_chunks(self, rows: Array, numbers: int, part: DType, out: Array) -> None:
        """Decode chunks of so many numbers; `out` has room for at least as many in each row."""
        kept = self.kept(numbers)
        short = rows[:, : 2 * kept].copy().view(np.uint16).reshape(-1)
        narrow_unguarded(short, BFLOAT16, BFLOAT16, short)  # any NaN is the one
        values = short
        if part is not BFLOAT16:
            values = np.empty(short.size, part.storage)
            widen_unguarded(short, BFLOAT16, part, values)
        out[:] = 0
        np.put_along_axis(out, _unpack_places(rows[:, 2 * kept :], kept), values.reshape(-1, kept), axis=1)


def largest_places(chunks: Array, part: DType, kept: int) -> Array:
    """Return the places of the largest numbers of each chunk, in order.

    The smallest that is kept is a number whatever way it is found, so the answer does not depend on how a library
    selects; which ones of those equal to it are kept is settled here.
    """
    bits = part.bits.type
    keys = chunks.view(part.bits) & bits((1 << (8 * part.itemsize - 1)) - 1)
    np.minimum(keys, bits(part.top + 1), out=keys)
    count = chunks.shape[1]
    least = np.partition(keys, count - kept, axis=1)[:, count - kept, None]
    taken = keys >= least
    many = np.flatnonzero(np.count_nonzero(taken, axis=1) > kept)
    if many.size:
        above, equal = keys[many] > least[many], keys[many] == least[many]
        room = kept - np.count_nonzero(above, axis=1)[:, None]
        taken[many] = above | (equal & (np.cumsum(equal, axis=1) <= room))
    places: Array = np.nonzero(taken)[1].reshape(-1, kept)
    return places


def _pack_places(places: Array, out: Array) -> None:
    count, kept = places.shape
    pairs = np.zeros((count, -(-kept // 2), 2), np.uint16)
    pairs.reshape(count, -1)[:, :kept] = places
    low, high = pairs[:, :, 0], pairs[:, :, 1]
    packed = np.empty((count, pairs.shape[1], 3), np.uint8)
    packed[:, :, 0] = low & 255
    packed[:, :, 1] = (low >> 8) | ((high & 15) << 4)
    packed[:, :, 2] = high >> 4
    out[:] = packed.reshape(count, -1)[:, : out.shape[1]]


def _unpack_places(packed: Array, kept: int) -> Array:
    count = packed.shape[0]
    triples = np.zeros((count, -(-kept // 2), 3), np.intp)
    triples.reshape(count, -1)[:, : packed.shape[1]] = packed
    places = np.empty((count, triples.shape[1], 2), np.intp)
    places[:, :, 0] = triples[:, :, 0] | ((triples[:, :, 1] & 15) << 8)
    places[:, :, 1] = (triples[:, :, 1] >> 4) | (triples[:, :, 2] << 4)
    return places.reshape(count, -1)[:, :kept]
