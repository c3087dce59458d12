"""Fewer bytes on the wire, at the price of a stated error: bfloat16, and int8 with one scale for every 256 elements.

Contract. `encode` and `decode` are functions of bits: equal input gives equal bytes and equal output on every machine,
because they use IEEE 754's basic operations alone, each rounded once. They lose information, so the same bits on every
rank need two rules from their user:

- One encodes, all decode. The owner of a result encodes it once and sends those bytes to everyone; everyone, the owner
  too, takes the decoded values as the result. No rank keeps the values before encoding.
- What is lossy for one is lossy for all. If leaves travel encoded, every leaf is replaced by its decoded self before
  it is reduced, also one that does not travel because its owner reduces it. Otherwise bits would depend on who owns
  what.

A block of int8 shares a scale, so its bits depend on where the blocks begin: pieces of a tensor (chunks, shares of
ranks) must begin at multiples of `Codec.block` numbers of the tensor, and only its last may end elsewhere. Then any
such cut gives the same bits. A codec is off unless it is asked for; both ends of a message must ask for the same.

Error. With x an element, y what comes out, and M the largest finite magnitude among the elements of x's block:

    bfloat16   |x - y| <= 2**-8 |x| + 2**-134; from (2 - 2**-8) 2**127 on y is infinity
    int8       |x - y| <= M / 251 + r, where r is what rounding to the type of the elements itself adds:
               2**-149 for float32, 2**-11 M + 2**-24 for float16, 2**-8 M + 2**-133 for bfloat16

For int8: the scale s is M / 126 rounded up to a float32, hence M / s <= 126, s <= M / 126 (1 + 2**-23) + 2**-149. The
code is x / s, rounded to float64 and then to the nearest integer q, ties to even, so |x - q s| <= s / 2 (1 + 2**-45).
q s is exact in float64, and y is that rounded to the elements' type (2**-24 M at most for float32). The sum of these
is below M / 251 + r. `Codec.bound` is the bound as a number, and the tests hold every element to it.

Special values. bfloat16 keeps them: infinities, signed zeros; any NaN becomes the one NaN. int8 keeps infinities and
NaN too, as the codes 127, -127 and -128, which no finite element has, and computes M without them, so one overflow
does not affect its neighbours. Zeros lose their sign in int8, and so does what is rounded to zero.

Nearest rounding makes the errors of one element the same each time it has the same value. Error feedback (Seide et
al. 2014, "1-bit stochastic gradient descent", Interspeech) is left to the user: the rank that encoded knows x - y.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    Array,
    DType,
    NumberKind,
    narrow_unguarded,
    require_ieee,
    widen_unguarded,
)

__all__ = ["CODECS", "WIRE_BLOCK", "Codec", "WireFormat", "pack", "unpack", "wire_dtype"]

WireFormat: TypeAlias = Literal["bfloat16", "int8"]

WIRE_BLOCK = (
    256  # elements to one scale of int8: 1.6 % more bytes, and few enough that one large element costs little precision
)

_LEVELS = 126
_INFINITY, _NAN = 127, -128
_LARGEST = float(np.finfo(np.float32).max)
_PIECE = 64 * WIRE_BLOCK  # elements that are worked on at a time, to stay in a core's cache; bits do not depend on it


@dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """A wire format; there is one object for each, so that codecs are compared by `is`.

    Attributes:
        name: "bfloat16" or "int8".
        block: Numbers that are encoded together; a piece of a tensor must begin at a multiple of it.
        parts: Types that may be encoded, and of which the parts of complex numbers may be.
    """

    name: WireFormat
    block: int
    parts: tuple[DType, ...]

    @staticmethod
    def parse(name: str) -> Codec:
        """Return the codec of this name.

        Args:
            name: "bfloat16" or "int8".
        Returns:
            The codec.
        Raises:
            LocalError: There is none; lists the names.
        """
        try:
            return CODECS[name]
        except (KeyError, TypeError):
            raise LocalError(f"wire format {name!r} is not known; use one of {', '.join(CODECS)}") from None

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
        numbers = elements * (1 if dtype.part is None else 2)
        return 2 * numbers if self is BFLOAT16_WIRE else numbers + 4 * -(-numbers // WIRE_BLOCK)

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
            if self is BFLOAT16_WIRE:
                narrow_unguarded(numbers, part, BFLOAT16, out.view(np.uint16))
            else:
                scales, codes = _parts(out, numbers.size)
                for a in range(0, numbers.size, _PIECE):
                    b = a + _PIECE
                    _encode_int8(numbers[a:b], part, scales[a // WIRE_BLOCK : b // WIRE_BLOCK], codes[a:b])

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
            if self is BFLOAT16_WIRE:
                widen_unguarded(wire.view(np.uint16), BFLOAT16, part, numbers)
            else:
                scales, codes = _parts(wire, numbers.size)
                for a in range(0, numbers.size, _PIECE):
                    b = a + _PIECE
                    _decode_int8(scales[a // WIRE_BLOCK : b // WIRE_BLOCK], codes[a:b], part, numbers[a:b])

    def bound(self, largest: float, dtype: DType) -> float:
        """Return a bound of the error |x - y| of one element, rounded up.

        Args:
            largest: The largest magnitude in the block of x; for bfloat16, whose blocks are single elements, |x|, which
                must not be so large that y is infinity.
            dtype: The elements' type.
        Returns:
            The bound.
        """
        part = self.check(dtype)
        if self is BFLOAT16_WIRE:
            return largest * 2.0**-8 + 2.0**-134
        rounding = {FLOAT32: 2.0**-149, FLOAT16: largest * 2.0**-11 + 2.0**-24, BFLOAT16: largest * 2.0**-8 + 2.0**-133}
        return float(np.nextafter(largest / 251 + rounding[part], np.inf))

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


BFLOAT16_WIRE = Codec("bfloat16", 1, (FLOAT32, FLOAT64))
INT8_WIRE = Codec("int8", WIRE_BLOCK, (FLOAT32, FLOAT16, BFLOAT16))
CODECS: dict[str, Codec] = {codec.name: codec for codec in (BFLOAT16_WIRE, INT8_WIRE)}


@cache
def wire_dtype(codec: Codec, part: DType) -> DType:
    """Return the element type as which numbers of `part` travel: bfloat16, or blocks of a scale and its codes."""
    if codec is BFLOAT16_WIRE:
        return BFLOAT16
    itemsize = codec.wire_bytes(WIRE_BLOCK, part)
    return DType(f"int8_blocks_of_{part}", itemsize, np.dtype(f"V{itemsize}"), NumberKind.BLOCKS, part=part)


def pack(values: Array, part: DType, out: Array) -> None:
    """Encode numbers (1-D, of `part`) as int8 blocks into `out` (1-D, of `wire_dtype`); zeros fill up the last."""
    whole = np.zeros(out.size * WIRE_BLOCK, part.storage)
    whole[: values.size] = values
    wire = np.empty(INT8_WIRE.wire_bytes(whole.size, part), np.uint8)
    INT8_WIRE.encode(whole, part, wire)
    cut = 4 * out.size
    rows = out.view(np.uint8).reshape(out.size, 4 + WIRE_BLOCK)
    rows[:, :4] = wire[:cut].reshape(-1, 4)
    rows[:, 4:] = wire[cut:].reshape(-1, WIRE_BLOCK)


def unpack(blocks: Array, part: DType, out: Array) -> None:
    """Decode int8 blocks into `out` (1-D, of `part`), as many numbers as it takes."""
    rows = blocks.view(np.uint8).reshape(blocks.size, 4 + WIRE_BLOCK)
    wire = np.concatenate([rows[:, :4].reshape(-1), rows[:, 4:].reshape(-1)])
    whole = out if out.size == blocks.size * WIRE_BLOCK else np.empty(blocks.size * WIRE_BLOCK, part.storage)
    INT8_WIRE.decode(wire, part, whole)
    if whole is not out:
        np.copyto(out, whole[: out.size])


def _parts(wire: Array, numbers: int) -> tuple[Array, Array]:
    """The scales, then the codes, in their place."""
    cut = 4 * -(-numbers // WIRE_BLOCK)
    return wire[:cut].view(np.float32), wire[cut:].view(np.int8)


def _encode_int8(values: Array, part: DType, scales: Array, codes: Array) -> None:
    wide = np.empty(values.size)
    widen_unguarded(values, part, FLOAT64, wide)
    size = np.abs(wide)
    special = None
    if not np.isfinite(size.max()):
        special = wide.copy()
        lost = ~np.isfinite(wide)
        wide[lost] = size[lost] = 0
    starts = np.arange(0, values.size, WIRE_BLOCK)
    exact = np.maximum.reduceat(size, starts) / _LEVELS
    scale = exact.astype(np.float32)
    scale = np.where(scale < exact, np.nextafter(scale, np.float32(np.inf)), scale)
    scales[:] = scale
    # A scale of 0 has only zeros in its block; by 1 they give zeros.
    divisor = np.where(scale == 0, 1.0, scale.astype(np.float64))
    np.divide(wide, np.repeat(divisor, WIRE_BLOCK)[: wide.size], out=wide)
    np.rint(wide, out=wide)
    if special is not None:
        wide[np.isposinf(special)] = _INFINITY
        wide[np.isneginf(special)] = -_INFINITY
        wide[np.isnan(special)] = _NAN
    np.copyto(codes, wide, casting="unsafe")


def _decode_int8(scales: Array, codes: Array, part: DType, out: Array) -> None:
    wide = codes.astype(np.float64)
    wide *= np.repeat(scales.astype(np.float64), WIRE_BLOCK)[: wide.size]
    # Rounding the scale up may lift the largest element of a block by a place, which must not make it infinite.
    np.clip(wide, -_LARGEST, _LARGEST, out=wide)
    wide[codes == _INFINITY] = np.inf
    wide[codes == -_INFINITY] = -np.inf
    wide[codes == _NAN] = np.nan
    narrow_unguarded(wide, FLOAT64, part, out)
