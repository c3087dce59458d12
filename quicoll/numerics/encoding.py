"""Reductions whose tensors travel encoded: what is sent instead of them, and how it is decoded.

A wire format is another element type, and nothing else is different: leaves are encoded to it before the reduction, the
reduction is one of tensors of that type, and each rank that gets the result decodes it. So the rules of
`quicoll.numerics.codecs` hold, and so does canonical order: a leaf is replaced by its encoded self on every rank,
whether or not it travels; the owner rounds to the wire format once, as it would to any type; all ranks, the owner too,
decode those bytes. Partial results are accumulators, as always: they are not encoded, because bits would then depend on
which rank sums up what.

    bfloat16    the elements are bfloat16
    int8, int4  an element is a block: a scale and its codes (NumberKind.BLOCKS). Plans cut between elements, so no cut
                can divide a block; blocks begin where each tensor does, also in a list, and zeros fill up the last
    top-k       the elements are bytes. All leaves go to all ranks as they are, and each reduces them for itself
                (`Encoding.reduce`): the result is not encoded, so there is nothing to be decoded

A complex number is its two parts; sum and avg of complex numbers are those of the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.codec import BlockType, Codec
from quicoll.numerics.codecs import codec_of, wire_dtype
from quicoll.numerics.dtypes import FLOAT64, Array, DType, NumberKind
from quicoll.numerics.reduce import REDUCE_BLOCK, Precision, ReduceOp, accumulator, block_accumulator, reduce_tree

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
        acc: The type of its partial results; where leaves are gathered, of those of the numbers.
    """

    codec: Codec
    part: DType
    parts: int
    dtype: DType
    acc: DType

    def elements(self, sizes: Iterable[int]) -> int:
        """Return how many elements of `dtype` travel for tensors of `sizes` elements, one after the other."""
        return sum(self._length(size * self.parts) for size in sizes)

    def _length(self, numbers: int) -> int:
        return self.codec.wire_bytes(numbers, self.part) // self.dtype.itemsize

    def encode(self, given: Bundle) -> Array:
        """Encode the tensors of a bundle, one after the other."""
        return self.encode_numbers([each.view(self.part.storage) for each in given.flats])

    def encode_numbers(self, given: Sequence[Array]) -> Array:
        """Encode tensors that are given as their numbers (1-D, of `part`), one after the other."""
        ends = [0, *accumulate(self._length(each.size) for each in given)]
        out = np.empty(ends[-1], self.dtype.storage)
        for numbers, (start, stop) in zip(given, pairwise(ends), strict=True):
            self.codec.encode(numbers, self.part, out[start:stop].view(np.uint8))
        return out

    def decode(self, wire: Array, like: Bundle, out: Array) -> None:
        """Decode what was received.

        Args:
            wire: 1-D, of `dtype`.
            like: The tensors' sizes.
            out: 1-D, of the tensors' type; written without gaps between them.
        """
        self.decode_numbers(wire, self._numbers(like, out))

    def decode_numbers(self, wire: Array, out: Sequence[Array]) -> None:
        """Decode to the numbers of tensors (1-D, of `part`), one after the other."""
        ends = [0, *accumulate(self._length(each.size) for each in out)]
        for numbers, (start, stop) in zip(out, pairwise(ends), strict=True):
            self.codec.decode(wire[start:stop].view(np.uint8), self.part, numbers)

    def reduce(self, tree: Any, leaves: Sequence[Array], like: Bundle, op: ReduceOp, out: Array) -> None:
        """Reduce encoded leaves that are all here, one stretch of numbers after the other.

        Args:
            tree: Of operands of one element, the leaf's number, in canonical order.
            leaves: Of `dtype`, as they were encoded.
            like: The tensors' sizes.
            op: What is computed.
            out: 1-D, of the tensors' type: gets the result, which is rounded to that type once.
        """
        begin = 0
        for numbers in self._numbers(like, out):
            for start in range(0, numbers.size, REDUCE_BLOCK):
                target = numbers[start : start + REDUCE_BLOCK]
                end = begin + self._length(target.size)

                def decoded(number: int, begin: int = begin, end: int = end, size: int = target.size) -> Array:
                    values = np.empty(size, self.part.storage)
                    self.codec.decode(leaves[number][begin:end].view(np.uint8), self.part, values)
                    return values

                reduce_tree(
                    tree, decoded, op=op, dtype=self.part, acc=self.acc, out=target, final=True, leaves=len(leaves)
                )
                begin = end

    def _numbers(self, like: Bundle, out: Array) -> list[Array]:
        """The numbers of each tensor in `out`."""
        ends = [0, *accumulate(each.size * self.parts for each in like.flats)]
        numbers = out.view(self.part.storage)
        return [numbers[start:stop] for start, stop in pairwise(ends)]


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
    codec = codec_of(name)
    part = codec.check(dtype)
    if dtype.kind is NumberKind.COMPLEX and op is ReduceOp.PRODUCT:
        raise LocalError(f"a product of {dtype} is not one of its parts, which is what would travel: leave wire out")
    travels, parts = wire_dtype(codec, part), 1 if dtype.part is None else 2
    if codec.gathered:
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise LocalError(f"{name} sends zeros for most numbers, of which {op} means nothing: it takes sum and avg")
        return Encoding(codec, part, parts, travels, accumulator(part, op, precision))
    if isinstance(travels, BlockType):
        acc = block_accumulator(accumulator(part, op, precision), travels.numbers)
        return Encoding(codec, part, parts, travels, acc)
    if part is FLOAT64 and precision == "default":
        precision = "float64"
    return Encoding(codec, part, parts, travels, accumulator(travels, op, precision))
