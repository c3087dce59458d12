"""Fewer bytes on the wire, at the price of a stated error: bfloat16, int8 and int4 with shared scales, and top-k.

Contract. `encode` and `decode` are functions of bits: equal input gives equal bytes and equal output on every machine,
because they use IEEE 754's basic operations alone, each rounded once. They lose information, so the same bits on every
rank need two rules from their user:

- One encodes, all decode. The owner of a result encodes it once and sends those bytes to everyone; everyone, the owner
  too, takes the decoded values as the result. No rank keeps the values before encoding.
- What is lossy for one is lossy for all. If leaves travel encoded, every leaf is replaced by its decoded self before
  it is reduced, also one that does not travel because its owner reduces it. Otherwise bits would depend on who owns
  what.

Numbers of a block share a scale, or what of them is kept, so bits depend on where the blocks begin: pieces of a tensor
(chunks, shares of ranks) must begin at multiples of `Codec.block` numbers of the tensor, and only its last may end
elsewhere. Then any such cut gives the same bits. A codec is off unless it is asked for; both ends of a message must ask
for the same.

Error. With x an element, y what comes out, and M the largest finite magnitude among the elements of x's block:

    bfloat16   |x - y| <= 2**-8 |x| + 2**-134; from (2 - 2**-8) 2**127 on y is infinity
    int8       |x - y| <= M / 251 + r, where r is what rounding to the type of the elements itself adds:
               2**-149 for float32, 2**-11 M + 2**-24 for float16, 2**-8 M + 2**-133 for bfloat16
    int4       |x - y| <= M / 13.8 + 2**-133 + r; in a block with infinities or NaN M / 11.8 stands for M / 13.8
    topk:1/n   |x - y| <= 2**-8 |x| + 2**-134 where x is one of the k largest of its chunk, and y = 0 where it is not
    topk-2bit:1/n   |x - y| <= M, and the sum of |x - y|**2 over a chunk is at most that of |x|**2

For int8 (256 numbers, 260 bytes): the scale s is M / 126 rounded up to a float32, hence M / s <= 126, s <= M / 126
(1 + 2**-23) + 2**-149. The code is x / s, rounded to float64 and then to the nearest integer q, ties to even, so
|x - q s| <= s / 2 (1 + 2**-45). q s is exact in float64, and y is that rounded to the elements' type (2**-24 M at most
for float32). The sum of these is below M / 251 + r. `Codec.bound` is the bound as a number, and the tests hold every
element to it. int4 and top-k have theirs in `quicoll.numerics.int4`, `quicoll.numerics.topk` and
`quicoll.numerics.topk_two_bit`.

Special values. bfloat16 keeps them: infinities, signed zeros; any NaN becomes the one NaN. int8 keeps infinities and
NaN too, as the codes 127, -127 and -128, which no finite element has, and computes M without them, so one overflow
does not affect its neighbours. Zeros lose their sign in int8 and int4, and so does what is rounded to zero.

Nearest rounding makes the errors of one element the same each time it has the same value: over many steps they add up,
unless they are fed back (`quicoll.numerics.feedback`).
"""

from __future__ import annotations

import re
from functools import cache
from typing import TypeAlias

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.codec import BlockCodec, BlockType, Codec
from quicoll.numerics.dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    UINT8,
    Array,
    DType,
    narrow_unguarded,
    widen_unguarded,
)
from quicoll.numerics.int4 import Int4Codec, rounding
from quicoll.numerics.topk import LEAST_KEPT, MOST_KEPT_OF, TopKCodec
from quicoll.numerics.topk_two_bit import TwoBitTopKCodec

__all__ = ["BFLOAT16_WIRE", "INT4_WIRE", "INT8_WIRE", "WireFormat", "codec_of", "wire_dtype"]

WireFormat: TypeAlias = str

_LEVELS = 126
_INFINITY, _NAN = 127, -128
_LARGEST = float(np.finfo(np.float32).max)


class Bfloat16Codec(Codec):
    name = "bfloat16"
    block = 1
    parts = (FLOAT32, FLOAT64)

    def bound(self, largest: float, dtype: DType, *, finite: bool = True) -> float:
        self.check(dtype)
        return largest * 2.0**-8 + 2.0**-134

    def _bytes_of(self, numbers: int) -> int:
        return 2 * numbers

    def _encode(self, numbers: Array, part: DType, wire: Array) -> None:
        narrow_unguarded(numbers, part, BFLOAT16, wire.view(np.uint16))

    def _decode(self, wire: Array, part: DType, numbers: Array) -> None:
        widen_unguarded(wire.view(np.uint16), BFLOAT16, part, numbers)


class Int8Codec(BlockCodec):
    """256 numbers to one scale: 1.6 % more bytes, and few enough that one large element costs little precision."""

    name = "int8"
    block = 256
    row = 4 + 256
    parts = (FLOAT32, FLOAT16, BFLOAT16)

    def bound(self, largest: float, dtype: DType, *, finite: bool = True) -> float:
        part = self.check(dtype)
        return float(np.nextafter(largest / 251 + rounding(largest, part), np.inf))

    def _encode_blocks(self, values: Array, part: DType, rows: Array) -> None:
        wide = np.empty(values.shape)
        widen_unguarded(values.reshape(-1), part, FLOAT64, wide.reshape(-1))
        size = np.abs(wide)
        special = None
        if not np.isfinite(size.max()):
            special = wide.copy()
            lost = ~np.isfinite(wide)
            wide[lost] = size[lost] = 0
        exact = size.max(axis=1) / _LEVELS
        scale = exact.astype(np.float32)
        scale = np.where(scale < exact, np.nextafter(scale, np.float32(np.inf)), scale)
        rows[:, :4] = scale.view(np.uint8).reshape(-1, 4)
        # A scale of 0 has only zeros in its block; by 1 they give zeros.
        divisor = np.where(scale == 0, 1.0, scale.astype(np.float64))
        np.divide(wide, divisor[:, None], out=wide)
        np.rint(wide, out=wide)
        if special is not None:
            wide[np.isposinf(special)] = _INFINITY
            wide[np.isneginf(special)] = -_INFINITY
            wide[np.isnan(special)] = _NAN
        np.copyto(rows[:, 4:].view(np.int8), wide, casting="unsafe")

    def _decode_blocks(self, rows: Array, part: DType, out: Array) -> None:
        codes = rows[:, 4:].view(np.int8)
        scale = np.ascontiguousarray(rows[:, :4]).view(np.float32)
        wide = codes.astype(np.float64)
        wide *= scale.astype(np.float64)
        # Rounding the scale up may lift the largest element of a block by a place, which must not make it infinite.
        np.clip(wide, -_LARGEST, _LARGEST, out=wide)
        wide[codes == _INFINITY] = np.inf
        wide[codes == -_INFINITY] = -np.inf
        wide[codes == _NAN] = np.nan
        narrow_unguarded(wide.reshape(-1), FLOAT64, part, out.reshape(-1))


BFLOAT16_WIRE = Bfloat16Codec()
INT8_WIRE = Int8Codec()
INT4_WIRE = Int4Codec()
_FIXED: dict[str, Codec] = {codec.name: codec for codec in (BFLOAT16_WIRE, INT8_WIRE, INT4_WIRE)}


def codec_of(name: str) -> Codec:
    """Return the codec of this name: the same object each time.

    Args:
        name: "bfloat16", "int8", "int4", or "topk:1/n" or "topk-2bit:1/n" with n from 2 to 4096.
    Returns:
        The codec.
    Raises:
        LocalError: There is none; lists the names.
    """
    if isinstance(name, str):
        if name in _FIXED:
            return _FIXED[name]
        asked = re.fullmatch(r"topk(-2bit)?:1/([1-9][0-9]{0,3})", name, re.ASCII)
        if asked is not None and LEAST_KEPT <= int(asked[2]) <= MOST_KEPT_OF:
            return _top_k(int(asked[2]), asked[1] is not None)
    names = ", ".join([*_FIXED, f"topk:1/n or topk-2bit:1/n with n from {LEAST_KEPT} to {MOST_KEPT_OF}"])
    raise LocalError(f"wire format {name!r} is not known; use one of {names}")


@cache
def _top_k(n: int, two_bits: bool) -> TopKCodec:
    return TwoBitTopKCodec(n) if two_bits else TopKCodec(n)


@cache
def wire_dtype(codec: Codec, part: DType) -> DType:
    """Return the element type as which numbers of `part` travel: bfloat16, blocks of a scale and its codes, or bytes
    that no plan takes apart."""
    if isinstance(codec, BlockCodec):
        return BlockType(f"{codec.name}_blocks_of_{part}", codec.row, part, codec.block, codec)
    return BFLOAT16 if codec is BFLOAT16_WIRE else UINT8
