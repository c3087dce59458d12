"""Top-k in two bits: which numbers are kept is as in `quicoll.numerics.topk`, and each is a sign and one of two sizes.

Of top-k's row two thirds are values of 16 bits, and of the 12 bits of a place most say little. Few bits of many numbers
bring more of a pseudo-gradient over than many bits of few (SparseLoCo, arXiv 2508.15706: "2-bit quantization"), and
what is lost by either is in the residual. With k numbers kept of a chunk of c:

    sizes       two bfloat16. With the kept magnitudes m in descending order and h = k // 4: high = m[h // 2], the
                middle of the largest quarter, and low = m[(h + k) // 2], that of the rest; both rounded towards zero.
                Order statistics, because they are the same bits in whatever order a machine adds
    codes       2 bits for each kept number, in the order of places: its sign, and whether it is high, which it is where
                its magnitude is above (high + low) / 2. Four in a byte, the first in the lowest bits
    places      by Elias and Fano (Elias 1974, "Efficient storage and retrieval by content and address of static files",
                J. ACM 21(2)): the l = floor(log2(c / k)) low bits of each, packed from the lowest bit of the first byte
                on; and before them, of what is above these bits, bit (place >> l) + i for the i-th number, in
                k + ((c - 1) >> l) + 1 bits. So a row has one length, whatever the places are: 2 + l bits each

With n = 16 that is 260 bytes where float32 has 16 KiB: 63 times fewer, for 256 numbers; top-k in 16 bits has the 64 of
n = 64 for that.

What is lost. Nothing grows: |x - y|**2 <= |x|**2 for finite x. In a group of g magnitudes m with the size s, the middle
one rounded down, at least half are s or more, so s <= 2 sum(m) / g, and sum((m - s)**2) = sum(m**2) - s (2 sum(m) -
g s) is no more than sum(m**2); a number that takes the other group's size is nearer to that. It needs a residual
(`quicoll.numerics.feedback`) even more than top-k does. A chunk of which an infinity or NaN is kept comes out with NaN
at all kept places: an overflow is seen. Magnitudes above the largest bfloat16 count as that, and below 2**-126 sizes
are 0.
"""

from __future__ import annotations

import numpy as np

from quicoll.numerics.dtypes import BFLOAT16, FLOAT32, Array, DType, narrow_unguarded, widen_unguarded
from quicoll.numerics.topk import TopKCodec, largest_places

__all__ = ["TwoBitTopKCodec"]

_MOST = (2.0 - 2.0**-7) * 2.0**127


class TwoBitTopKCodec(TopKCodec):
    """n: of so many numbers one is kept."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.name = f"topk-2bit:1/{n}"

    def _row(self, numbers: int) -> int:
        return self._ends(numbers)[-1] if numbers else 0

    def _ends(self, numbers: int) -> tuple[int, int, int]:
        """Where codes, upper and lower bits of places end in the row of a chunk."""
        kept, low = self.kept(numbers), self._low(numbers)
        codes = 4 + -(-2 * kept // 8)
        upper = codes + -(-(kept + ((numbers - 1) >> low) + 1) // 8)
        return codes, upper, upper + -(-kept * low // 8)

    def _low(self, numbers: int) -> int:
        return (numbers // self.kept(numbers)).bit_length() - 1

    def _encode_chunks(self, chunks: Array, part: DType, rows: Array) -> None:
        numbers = chunks.shape[1]
        kept, low = self.kept(numbers), self._low(numbers)
        codes, upper, _ = self._ends(numbers)
        places = largest_places(chunks, part, kept)
        chosen = _wide(np.take_along_axis(chunks, places, axis=1).reshape(-1), part).reshape(-1, kept)
        sizes = np.minimum(np.abs(chosen), _MOST)  # NaN stays NaN
        ordered, high = -np.sort(-sizes, axis=1), kept // 4
        levels = _towards_zero(ordered[:, [high // 2, (high + kept) // 2]])
        strange = ~np.isfinite(chosen).all(axis=1)
        levels[strange] = np.nan
        bits = np.stack([np.signbit(chosen), sizes + sizes > levels.sum(axis=1, keepdims=True)], axis=2)
        short = np.empty(levels.size, np.uint16)
        narrow_unguarded(levels.astype(np.float32).reshape(-1), FLOAT32, BFLOAT16, short)
        rows[:, :4] = short.reshape(-1, 2).view(np.uint8)
        rows[:, 4:codes] = np.packbits(bits.reshape(-1, 2 * kept), axis=1, bitorder="little")
        marks = np.zeros((len(rows), 8 * (upper - codes)), np.uint8)
        np.put_along_axis(marks, (places >> low) + np.arange(kept), 1, axis=1)
        rows[:, codes:upper] = np.packbits(marks, axis=1, bitorder="little")
        if low:
            rest = (places[:, :, None] >> np.arange(low)) & 1
            packed = rest.astype(np.uint8).reshape(-1, kept * low)
            rows[:, upper:] = np.packbits(packed, axis=1, bitorder="little")

    def _decode_chunks(self, rows: Array, numbers: int, part: DType, out: Array) -> None:
        kept, low = self.kept(numbers), self._low(numbers)
        codes, upper, _ = self._ends(numbers)
        levels = np.empty(2 * len(rows), np.float32)
        short = rows[:, :4].copy().view(np.uint16).reshape(-1)
        narrow_unguarded(short, BFLOAT16, BFLOAT16, short)  # any NaN is the one
        widen_unguarded(short, BFLOAT16, FLOAT32, levels)
        both = levels.reshape(-1, 2)
        bits = np.unpackbits(rows[:, 4:codes], axis=1, count=2 * kept, bitorder="little").reshape(-1, kept, 2)
        values = np.where(bits[:, :, 1] == 1, both[:, :1], both[:, 1:])
        values = np.where((bits[:, :, 0] == 1) & ~np.isnan(values), -values, values)
        places = _marked(np.unpackbits(rows[:, codes:upper], axis=1, bitorder="little"), kept) << low
        if low:
            rest = np.unpackbits(rows[:, upper:], axis=1, count=kept * low, bitorder="little")
            places |= (rest.reshape(-1, kept, low).astype(np.intp) << np.arange(low)).sum(axis=2)
        out[:] = 0
        found = np.empty(values.size, part.storage)
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        if part is BFLOAT16:
            narrow_unguarded(flat, FLOAT32, BFLOAT16, found)
        else:
            found[:] = flat
        np.put_along_axis(out, np.minimum(places, numbers - 1), found.reshape(-1, kept), axis=1)


def _marked(marks: Array, kept: int) -> Array:
    """The upper bits of the places that are marked; bytes that no encoder wrote may mark more of them, or fewer."""
    if (np.count_nonzero(marks, axis=1) == kept).all():
        return np.nonzero(marks)[1].reshape(-1, kept) - np.arange(kept)
    found = np.zeros((len(marks), kept), np.intp)
    for row, each in zip(marks, found, strict=True):
        some = np.flatnonzero(row)[:kept]
        each[: some.size] = some - np.arange(some.size)
    return found


def _wide(values: Array, part: DType) -> Array:
    """Numbers as float64, exactly."""
    if part is BFLOAT16:
        wide = np.empty(values.size, np.float32)
        widen_unguarded(values, BFLOAT16, FLOAT32, wide)
        values = wide
    return values.astype(np.float64)


def _towards_zero(sizes: Array) -> Array:
    """Numbers that are not negative, rounded down to bfloat16; 0 where they are below its normal ones."""
    cut = (np.ascontiguousarray(sizes).view(np.uint64) & ~np.uint64((1 << 45) - 1)).view(np.float64)
    return np.where(cut < 2.0**-126, 0.0, cut)
