"""Reductions whose tensors travel encoded: what is sent instead of them, and how it is turned back.

A wire format is another element type, and nothing else is different: leaves are encoded to it before the reduction, the
reduction is one of tensors of that type, and whoever gets the result decodes it. So the rules of
`quicoll.numerics.codecs` hold by themselves, and so does all that is said of canonical order: a leaf is replaced by its
encoded self on every rank, whether or not it travels; the owner rounds to the wire format once, as it would to any
type; everyone, the owner too, decodes those bytes. Partial results are accumulators, as ever: they are not encoded, for
that would make bits depend on who sums up what.

    bfloat16    the elements are bfloat16
    int8        an element is a block: a scale and 256 codes (Kind.BLOCKS). Plans cut between elements, so no cut can
                divide a block; blocks begin where each tensor does, also in a list, and zeros fill up the last.

A complex number is its two parts; sum and avg of complex numbers are those of the parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.codecs import Codec, pack, unpack, wire_dtype
from quicoll.numerics.dtypes import BFLOAT16, FLOAT64, Array, DType, NumberKind
from quicoll.numerics.reduce import Precision, ReduceOp, accumulator, block_accumulator

if TYPE_CHECKING:
    from quicoll.numerics.bundle import Bundle

__all__ = ["Encoding", "encoding_for"]


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """How tensors of one type travel. codec; part: the type of the numbers in them; parts: how many an element has.
    dtype, acc: of what travels, and of its partial results. width: numbers in one element of `dtype`."""

    codec: Codec
    part: DType
    parts: int
    dtype: DType
    acc: DType
    width: int

    def elements(self, sizes: Iterable[int]) -> int:
        """How many elements of `dtype` tensors of `sizes` elements are, one after the other."""
        return sum(-(-size * self.parts // self.width) for size in sizes)

    def encode(self, given: Bundle) -> Array:
        """The tensors of a bundle, one after the other, as they travel."""
        out = np.empty(self.elements(each.flat.size for each in given.sources), self.dtype.storage)
        start = 0
        for each in given.sources:
            numbers = each.flat.view(self.part.storage)
            stop = start + -(-numbers.size // self.width)
            if self.dtype is BFLOAT16:
                self.codec.encode(numbers, self.part, out[start:stop].view(np.uint8))
            else:
                pack(numbers, self.part, out[start:stop])
            start = stop
        return out

    def decode(self, wire: Array, like: Bundle, out: Array) -> None:
        """Write what came into `out`, flat and of the tensors' own type, without gaps between them."""
        target, start, first = out.view(self.part.storage), 0, 0
        for each in like.sources:
            size = each.flat.view(self.part.storage).size
            stop, last = start + -(-size // self.width), first + size
            if self.dtype is BFLOAT16:
                self.codec.decode(wire[start:stop].view(np.uint8), self.part, target[first:last])
            else:
                unpack(wire[start:stop], self.part, target[first:last])
            start, first = stop, last


def encoding_for(name: str, dtype: DType, op: ReduceOp, precision: Precision) -> Encoding:
    """How tensors of `dtype` travel in the wire format `name` in a reduction. Raises LocalError where they cannot."""
    codec = Codec.parse(name)
    part = codec.check(dtype)
    if dtype.kind is NumberKind.COMPLEX and op is ReduceOp.PRODUCT:
        raise LocalError(f"a product of {dtype} is not one of its parts, which is what would travel: leave wire out")
    travels, parts = wire_dtype(codec, part), 1 if dtype.part is None else 2
    if travels.kind is NumberKind.BLOCKS:
        acc = block_accumulator(accumulator(part, op, precision))
        return Encoding(codec, part, parts, travels, acc, codec.block)
    if part is FLOAT64 and precision == "default":
        precision = "float64"
    return Encoding(codec, part, parts, travels, accumulator(travels, op, precision), 1)
