"""int4: sixteen codes for a number, and one scale for 64 of them. 34 bytes where float32 has 256: 7.53 times fewer.

    a block      2 bytes of scale, 32 bytes of codes: of byte i the low half is the code of number i, the high half that
                 of number i + 32
    the scale    s = M / 7, rounded up to a bfloat16; M is the largest finite magnitude in the block. Its sign bit is
                 free, and says that there are infinities or NaN in the block: then it is M / 6
    a code       an integer q from -7 to 7, the nearest to x / s, ties to even; of a block with such values from -6 to
                 6, and 7, -7 and -8 are +infinity, -infinity and NaN. So an overflow is seen, and costs its 63
                 neighbours a seventh of their precision and nothing else

64 numbers and a scale of 2 bytes were chosen by measuring: docs/internals/determinism.md has the figures.

Error. M / s <= 7, and s <= M / 7 (1 + 2**-7) (1 + 2**-23) + 2**-133. x / s is rounded to float32, |x / s| <= 7, and so
|x - q s| <= s (1 / 2 + 2**-21) <= M / 13.8 + 2**-133. q s has 3 + 8 digits: it is exact in float32, and rounding it to
a 16-bit type adds what `rounding` says. Where 7 s is beyond the type's largest number y is that, which is no farther
from x. With 6 for 7 it is M / 11.8.

Encoding again what was decoded to float32 gives the same bytes, where 2**-120 <= M <= 2**127: the largest code of a
block is 7 (6), because M / s > 7 / (1 + 2**-6), so M / 7 of what came out is s, exactly; and q s / s is q.
"""

from __future__ import annotations

import numpy as np

from quicoll.numerics.codec import BlockCodec
from quicoll.numerics.dtypes import BFLOAT16, FLOAT16, FLOAT32, Array, DType, narrow_unguarded, widen_unguarded

__all__ = ["Int4Codec", "rounding"]

_LARGEST = {FLOAT32: float(np.finfo(np.float32).max), FLOAT16: 65504.0, BFLOAT16: (2 - 2.0**-7) * 2.0**127}
_INFINITY, _NAN = 7, -8
_STRANGE = np.uint16(0x8000)


def rounding(largest: float, part: DType) -> float:
    """Return what rounding a number of at most this size to the type of the elements adds to its error."""
    return {FLOAT32: 2.0**-149, FLOAT16: largest * 2.0**-11 + 2.0**-24, BFLOAT16: largest * 2.0**-8 + 2.0**-133}[part]


class Int4Codec(BlockCodec):
    name = "int4"
    block = 64
    row = 2 + 32
    parts = (FLOAT32, FLOAT16, BFLOAT16)

    def bound(self, largest: float, dtype: DType, *, finite: bool = True) -> float:
        part = self.check(dtype)
        own = largest / (13.8 if finite else 11.8) + 2.0**-133
        return float(np.nextafter(own + rounding(largest, part), np.inf))

    def _encode_blocks(self, values: Array, part: DType, rows: Array) -> None:
        wide = values
        if part is not FLOAT32:
            wide = np.empty(values.shape, np.float32)
            widen_unguarded(values.reshape(-1), part, FLOAT32, wide.reshape(-1))
        largest = np.abs(wide).max(axis=1)
        strange, given = None, wide
        levels: Array | float = 7.0
        if not np.isfinite(largest).all():
            strange = ~np.isfinite(given)
            wide = np.where(strange, np.float32(0), given)
            largest = np.abs(wide).max(axis=1)
            levels = np.where(strange.any(axis=1), 6.0, 7.0)
        exact = largest.astype(np.float64) / levels
        single = exact.astype(np.float32)
        single = np.where(single < exact, np.nextafter(single, np.float32(np.inf)), single)
        # A bfloat16 is the upper half of a float32; of what is not negative, the next one up is one more.
        scale = ((single.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)
        divisor = _widened(scale)
        divisor[divisor == 0] = 1  # such a block has only zeros
        codes = np.divide(wide, divisor[:, None])
        np.rint(codes, out=codes)
        if strange is not None:
            codes[strange & (given > 0)] = _INFINITY
            codes[strange & (given < 0)] = -_INFINITY
            codes[np.isnan(given)] = _NAN
            scale[strange.any(axis=1)] |= _STRANGE
        rows[:, :2] = scale.view(np.uint8).reshape(-1, 2)
        halves = codes.astype(np.int8).view(np.uint8)
        np.bitwise_or(halves[:, :32] & np.uint8(15), halves[:, 32:] << np.uint8(4), out=rows[:, 2:])

    def _decode_blocks(self, rows: Array, part: DType, out: Array) -> None:
        stored = np.ascontiguousarray(rows[:, :2]).view(np.uint16)[:, 0]
        scale = _widened(stored & ~_STRANGE)
        packed = rows[:, 2:].view(np.int8)
        codes = np.empty(out.shape, np.int8)
        np.right_shift(packed << np.int8(4), np.int8(4), out=codes[:, :32])
        np.right_shift(packed, np.int8(4), out=codes[:, 32:])
        wide = out if part is FLOAT32 else np.empty(out.shape, np.float32)
        np.multiply(codes, scale[:, None], out=wide)
        top = _LARGEST[part]
        if not scale.max() <= top / 8:
            np.clip(wide, -top, top, out=wide)
        strange = stored >= _STRANGE
        if strange.any():
            of_these = codes[strange]
            found = wide[strange]
            found[of_these == _INFINITY] = np.inf
            found[of_these == -_INFINITY] = -np.inf
            found[of_these == _NAN] = np.nan
            wide[strange] = found
        if part is not FLOAT32 or not np.isfinite(scale).all():  # that is no encoder's; its NaN become the one
            narrow_unguarded(wide.reshape(-1), FLOAT32, part, out.reshape(-1))


def _widened(bits: Array) -> Array:
    """bfloat16 as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
