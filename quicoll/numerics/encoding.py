"""Reductions whose tensors travel encoded: what is sent instead of them, and how it is decoded.

A wire format is another element type, and nothing else is different: leaves are encoded to it before the reduction, the
reduction is one of tensors of that type, and each rank that gets the result decodes it. So the rules of
`quicoll.numerics.codecs` hold, and so does canonical order: a leaf is replaced by its encoded self on every rank,
whether or not it travels; the owner rounds to the wire format once, as it would to any type; all ranks, the owner too,
decode those bytes. Partial results are accumulators, as always: they are not encoded, because bits would then depend on
which rank sums up what.

    bfloat16    the elements are bfloat16 int8        an element is a block: a scale and 256 codes (NumberKind.BLOCKS).
    Plans cut between elements, so no cut can
                divide a block; blocks begin where each tensor does, also in a list, and zeros fill up the last.

A complex number is its two parts; sum and avg of complex numbers are those of the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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
    """The form in which tensors of one type travel in a wire format.

    Attributes:
        codec: The wire format.
        part: The type of the numbers in an element.
        parts: How many numbers an element has: 2 for complex ones.
        dtype: The type of what travels.
        acc: The type of its partial results.
        width: Numbers in one element of `dtype`.
    """

    codec: Codec
    part: DType
    parts: int
    dtype: DType
    acc: DType
    width: int

    def elements(self, sizes: Iterable[int]) -> int:
        """Return how many elements of `dtype` travel for tensors of `sizes` elements, one after the other."""
        return sum(-(-size * self.parts // self.width) for size in sizes)

    def encode(self, given: Bundle) -> Array:
        """Encode the tensors of a bundle, one after the other."""
        return self.encode_numbers([each.view(self.part.storage) for each in given.flats])

    def encode_numbers(self, given: Sequence[Array]) -> Array:
        """Encode tensors that are given as their numbers (1-D, of `part`), one after the other."""
        out = np.empty(sum(-(-each.size // self.width) for each in given), self.dtype.storage)
        start = 0
        for numbers in given:
            stop = start + -(-numbers.size // self.width)
            if self.dtype is BFLOAT16:
                self.codec.encode(numbers, self.part, out[start:stop].view(np.uint8))
            else:
                pack(numbers, self.part, out[start:stop])
            start = stop
        return out

    def decode(self, wire: Array, like: Bundle, out: Array) -> None:
        """Decode what was received.

        Args:
            wire: 1-D, of `dtype`.
            like: The tensors' sizes.
            out: 1-D, of the tensors' type; written without gaps between them.
        """
        ends = [0, *accumulate(each.size * self.parts for each in like.flats)]
        numbers = out.view(self.part.storage)
        self.decode_numbers(wire, [numbers[a:b] for a, b in pairwise(ends)])

    def decode_numbers(self, wire: Array, out: Sequence[Array]) -> None:
        """Decode to the numbers of tensors (1-D, of `part`), one after the other."""
        start = 0
        for numbers in out:
            stop = start + -(-numbers.size // self.width)
            if self.dtype is BFLOAT16:
                self.codec.decode(wire[start:stop].view(np.uint8), self.part, numbers)
            else:
                unpack(wire[start:stop], self.part, numbers)
            start = stop


def encoding_for(name: str, dtype: DType, op: ReduceOp, precision: Precision) -> Encoding:
    """Choose how tensors travel in a reduction.

    Args:
        name: The wire format.
        dtype: The tensors' type.
        op: What is computed.
        precision: As in `Group.all_reduce`.
    Returns:
        The encoding.
    Raises:
        LocalError: They cannot travel so.
    """
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
