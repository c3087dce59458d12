"""What all wire formats have in common. The formats, their contract and their errors: `quicoll.numerics.codecs`."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.dtypes import Array, DType, NumberKind, require_ieee

__all__ = ["BlockCodec", "BlockType", "Codec"]

_STRETCH = 1 << 14  # numbers that are worked on at a time, to stay in a core's cache; bits do not depend on it


class Codec:
    """A wire format; there is one object for each, so that codecs are compared by `is`.

    Attributes:
        name: As callers write it.
        block: Numbers that are encoded together; a piece of a tensor must begin at a multiple of it.
        parts: Types that may be encoded, and of which the parts of complex numbers may be.
        gathered: Whether a reduction gives all leaves to all ranks and its result is not encoded again.
    """

    name: str
    block: int
    parts: tuple[DType, ...]
    gathered: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    def check(self, dtype: DType) -> DType:
        """Check that a type can be encoded.

        Args:
            dtype: The elements' type.
        Returns:
            The type of the numbers in it, of which a complex one has two.
        Raises:
            LocalError: It cannot.
        """
        part = dtype.part or dtype
        if part not in self.parts:
            names = ", ".join(str(known) for known in self.parts)
            raise LocalError(f"{dtype} cannot travel as {self.name}; that takes {names} and complex numbers of these")
        return part

    def wire_bytes(self, elements: int, dtype: DType) -> int:
        """Return the bytes that `elements` elements of `dtype` take; they depend on nothing else."""
        self.check(dtype)
        return self._bytes_of(elements * (1 if dtype.part is None else 2))

    def encode(self, values: Array, dtype: DType, out: Array) -> None:
        """Encode numbers.

        Args:
            values: 1-D, of `dtype`.
            dtype: Their type.
            out: 1-D, uint8, `wire_bytes` long, apart from `values`.
        Raises:
            LocalError: Another type or size, or this thread does not compute by IEEE 754.
        """
        part, numbers = self._checked(values, dtype, out)
        with np.errstate(all="ignore"):
            self._encode(numbers, part, out)

    def decode(self, wire: Array, dtype: DType, out: Array) -> None:
        """Decode numbers. Any bytes stand for some.

        Args:
            wire: 1-D, uint8.
            dtype: The type of the numbers.
            out: 1-D, of `dtype`.
        Raises:
            LocalError: Another type or size, or this thread does not compute by IEEE 754.
        """
        part, numbers = self._checked(out, dtype, wire)
        with np.errstate(all="ignore"):
            self._decode(wire, part, numbers)

    def bound(self, largest: float, dtype: DType, *, finite: bool = True) -> float:
        """Return a bound of the error |x - y| of one element, rounded up.

        Args:
            largest: The largest finite magnitude in the block of x; for bfloat16, whose blocks are single elements,
                |x|, which must not be so large that y is infinity.
            dtype: The elements' type.
            finite: Whether all numbers of the block are.
        Returns:
            The bound.
        """
        raise NotImplementedError

    def _bytes_of(self, numbers: int) -> int:
        raise NotImplementedError

    def _encode(self, numbers: Array, part: DType, wire: Array) -> None:
        raise NotImplementedError

    def _decode(self, wire: Array, part: DType, numbers: Array) -> None:
        raise NotImplementedError

    def _checked(self, values: Array, dtype: DType, wire: Array) -> tuple[DType, Array]:
        require_ieee()
        part = self.check(dtype)
        if values.ndim != 1 or values.dtype != dtype.storage:
            raise LocalError(f"values of shape {values.shape} and {values.dtype} are not flat {dtype}")
        expected = self.wire_bytes(values.size, dtype)
        if wire.ndim != 1 or wire.dtype != np.uint8 or wire.size != expected:
            raise LocalError(
                f"{values.size} elements of {dtype} are {expected} bytes as {self.name}, "
                f"not {wire.size} of {wire.dtype} in {wire.ndim} dimensions"
            )
        return part, values.view(part.storage)


class BlockCodec(Codec):
    """A format in which a block of numbers becomes a row of bytes, in which its scale stands first. Rows are of one
    length, so that they are elements of a type (`BlockType`); zeros fill up a tensor's last block.

    row: bytes of a block.
    """

    row: int

    def _bytes_of(self, numbers: int) -> int:
        return self.row * -(-numbers // self.block)

    def _encode(self, numbers: Array, part: DType, wire: Array) -> None:
        rows = wire.reshape(-1, self.row)
        whole = numbers.size // self.block
        blocks = numbers[: whole * self.block].reshape(whole, self.block)
        step = max(1, _STRETCH // self.block)
        for a in range(0, whole, step):
            self._encode_blocks(blocks[a : a + step], part, rows[a : min(a + step, whole)])
        rest = numbers.size - whole * self.block
        if rest:
            last = np.zeros((1, self.block), part.storage)
            last[0, :rest] = numbers[whole * self.block :]
            self._encode_blocks(last, part, rows[whole:])

    def _decode(self, wire: Array, part: DType, numbers: Array) -> None:
        rows = wire.reshape(-1, self.row)
        whole = numbers.size // self.block
        blocks = numbers[: whole * self.block].reshape(whole, self.block)
        step = max(1, _STRETCH // self.block)
        for a in range(0, whole, step):
            self._decode_blocks(rows[a : min(a + step, whole)], part, blocks[a : a + step])
        rest = numbers.size - whole * self.block
        if rest:
            last = np.empty((1, self.block), part.storage)
            self._decode_blocks(rows[whole:], part, last)
            numbers[whole * self.block :] = last[0, :rest]

    def _encode_blocks(self, values: Array, part: DType, rows: Array) -> None:
        """Encode blocks, a row of `values` each."""
        raise NotImplementedError

    def _decode_blocks(self, rows: Array, part: DType, out: Array) -> None:
        raise NotImplementedError


class BlockType(DType):
    """The type of an element that is a block of numbers: a row of bytes of a codec, or, without one, the accumulators
    of as many numbers."""

    __slots__ = ("codec", "numbers")

    codec: BlockCodec | None
    numbers: int

    def __init__(self, name: str, itemsize: int, part: DType, numbers: int, codec: BlockCodec | None = None) -> None:
        super().__init__(name, itemsize, np.dtype(f"V{itemsize}"), NumberKind.BLOCKS, part=part)
        object.__setattr__(self, "numbers", numbers)  # a DType is frozen
        object.__setattr__(self, "codec", codec)
