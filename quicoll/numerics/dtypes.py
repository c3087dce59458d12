"""Element types: how each is stored, widened exactly, and narrowed by one rounding.

Every rank must turn the same wide value into the same narrow bits on every processor. So nothing here is left to a
conversion instruction or to a library's choice of one:

- Widening is exact. A bfloat16 is the upper half of a float32. A float16 is a float32 whose exponent field is 112
  too small, so moving its bits and multiplying by 2**112 gives the value, subnormals included; infinities and NaN
  go through numpy's own cast. A float8 has 256 values, which stand in a table.
- Narrowing rounds to nearest, ties to even, once (IEEE 754-2019, 4.3.1). From float64 to a 16-bit or 8-bit type one
  goes through a float32 rounded to odd, which keeps enough to make the second rounding the only one that matters
  (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd").
- Overflow gives infinity. float8_e4m3fn has none (Micikevicius et al. 2022, "FP8 formats for deep learning"), so
  there it gives NaN, as ml_dtypes' cast does and torch's did before it saturated: a lost value must be visible.
- All NaN become one, quiet and positive. Sign and payload of a computed NaN differ between processors, and on one
  processor between the vector body and the scalar tail of a loop (x86 returns the first operand's payload, and
  which operand is first is the compiler's choice).
- Subnormals are kept. `require_ieee` finds a thread whose mode register says otherwise.

bfloat16 is stored as uint16 and both float8 as uint8, so that neither torch nor ml_dtypes is needed to compute with
them. A complex number is its two parts, each converted, rounded and made the one NaN by itself. To add a type, add a
row to `_ALL` and its two conversions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quicoll.errors import LocalError

__all__ = [
    "BFLOAT16",
    "BOOL",
    "COMPLEX64",
    "COMPLEX128",
    "DTYPES",
    "FLOAT8_E4M3FN",
    "FLOAT8_E5M2",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "INT64",
    "UINT8",
    "UINT64",
    "Array",
    "DType",
    "NumberKind",
    "narrow",
    "narrow_unguarded",
    "require_ieee",
    "stored_as",
    "widen",
    "widen_unguarded",
]

Array: TypeAlias = NDArray[Any]


class NumberKind(StrEnum):
    """Kinds of element."""

    FLOAT = "float"
    COMPLEX = "complex"
    INT = "int"
    UINT = "uint"
    BOOL = "bool"
    EXACT = "exact"  # no tensor's type: accumulators of quicoll.numerics.exact
    BLOCKS = (
        "blocks"  # nor is this: numbers that are encoded together, of quicoll.numerics.codecs, and their accumulators
    )


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type; there is one object for each, so that types are compared by `is`.

    Attributes:
        name: As numpy and torch have it.
        itemsize: Bytes.
        storage: The numpy dtype that holds it, native byte order (uint16 for bfloat16, uint8 for float8).
        kind: What an element is.
        digits: Of a float's significand, in bits, the hidden one included; 0 otherwise.
        top: For floats the bits of the largest value, which is infinity except for float8_e4m3fn; 0 otherwise.
        nan: For floats the bits of the one NaN that results carry; 0 otherwise.
        infinite: Whether there is an infinity.
        part: The type of both parts of a complex number, and of a block's numbers; None otherwise.
    """

    name: str
    itemsize: int
    storage: np.dtype[Any]
    kind: NumberKind
    digits: int = 0
    top: int = 0
    nan: int = 0
    infinite: bool = True
    part: DType | None = None

    @staticmethod
    def parse(name: str) -> DType:
        """Return the type of this name. Raises LocalError that lists the names there are."""
        try:
            return DTYPES[name]
        except KeyError:
            raise LocalError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPES)}") from None

    @property
    def bits(self) -> np.dtype[Any]:
        """The unsigned integer of the same size, to look at an element's bits; of a complex number's part."""
        return np.dtype(f"u{self.itemsize if self.part is None else self.part.itemsize}")

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """A copy of a type is the type itself."""
        return DType.parse, (self.name,)


FLOAT8_E4M3FN = DType("float8_e4m3fn", 1, np.dtype(np.uint8), NumberKind.FLOAT, 4, 0x7E, 0x7F, infinite=False)
FLOAT8_E5M2 = DType("float8_e5m2", 1, np.dtype(np.uint8), NumberKind.FLOAT, 3, 0x7C, 0x7E)
FLOAT16 = DType("float16", 2, np.dtype(np.float16), NumberKind.FLOAT, 11, 0x7C00, 0x7E00)
BFLOAT16 = DType("bfloat16", 2, np.dtype(np.uint16), NumberKind.FLOAT, 8, 0x7F80, 0x7FC0)
FLOAT32 = DType("float32", 4, np.dtype(np.float32), NumberKind.FLOAT, 24, 0x7F80_0000, 0x7FC0_0000)
FLOAT64 = DType("float64", 8, np.dtype(np.float64), NumberKind.FLOAT, 53, 0x7FF0 << 48, 0x7FF8 << 48)
COMPLEX64 = DType("complex64", 8, np.dtype(np.complex64), NumberKind.COMPLEX, part=FLOAT32)
COMPLEX128 = DType("complex128", 16, np.dtype(np.complex128), NumberKind.COMPLEX, part=FLOAT64)
INT8 = DType("int8", 1, np.dtype(np.int8), NumberKind.INT)
INT16 = DType("int16", 2, np.dtype(np.int16), NumberKind.INT)
INT32 = DType("int32", 4, np.dtype(np.int32), NumberKind.INT)
INT64 = DType("int64", 8, np.dtype(np.int64), NumberKind.INT)
UINT8 = DType("uint8", 1, np.dtype(np.uint8), NumberKind.UINT)
UINT16 = DType("uint16", 2, np.dtype(np.uint16), NumberKind.UINT)
UINT32 = DType("uint32", 4, np.dtype(np.uint32), NumberKind.UINT)
UINT64 = DType("uint64", 8, np.dtype(np.uint64), NumberKind.UINT)
BOOL = DType("bool", 1, np.dtype(np.bool_), NumberKind.BOOL)

_FLOATS = (FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT16, BFLOAT16, FLOAT32, FLOAT64)
_INTEGERS = (INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64)
_ALL = (*_FLOATS, COMPLEX64, COMPLEX128, *_INTEGERS, BOOL)
DTYPES: Mapping[str, DType] = MappingProxyType({dtype.name: dtype for dtype in _ALL})
# Of two types with one storage the later is found here: never a float8 or a bfloat16, which accumulate for no other.
_BY_STORAGE = {dtype.storage: dtype for dtype in _ALL}


def stored_as(values: Array, dtype: DType) -> DType:
    """Return the type of `values`: `dtype`, or an accumulator for it."""
    return dtype if values.dtype == dtype.storage else _BY_STORAGE[values.dtype]


# Module variables, so that the compiler does not fold the sums in `require_ieee`.
_ONE = 1.0
_MIN_NORMAL = 2.0**-1022
_HALF_ULP = 2.0**-53

_FEW = 16  # elements, for which a loop costs less than a call of numpy's


def require_ieee() -> None:
    """Raise LocalError where this thread does not compute by IEEE 754's default rules.

    A mode register belongs to the thread, and a library may change it (torch.set_flush_denormal, an object linked
    with -ffast-math). Halving the smallest normal and doubling it again comes back only if subnormals are kept, as
    results and as operands; the two sums tell round-to-nearest from the three directed roundings. Costs under 0.2
    microseconds.
    """
    if _MIN_NORMAL * 0.5 * 2.0 != _MIN_NORMAL:
        raise LocalError("this thread flushes subnormal numbers to zero, so its bits would differ from other ranks'")
    if _ONE + _HALF_ULP != _ONE or _ONE - _HALF_ULP * 0.5 != _ONE:
        raise LocalError("this thread does not round to nearest, so its bits would differ from other ranks'")


def widen(values: Array, dtype: DType, acc: DType, out: Array) -> None:
    """Write `values` (1-D, of `dtype`) into `out` (1-D, of `acc`), exactly. `acc` holds every value of `dtype`."""
    with np.errstate(all="ignore"):
        widen_unguarded(values, dtype, acc, out)


def widen_unguarded(values: Array, dtype: DType, acc: DType, out: Array) -> None:
    """`widen` inside the caller's np.errstate."""
    if dtype in _TO_FLOAT32 and acc is not dtype:
        if acc is FLOAT32:
            _TO_FLOAT32[dtype](values, out)
            return
        single = np.empty(values.size, np.float32)
        widen_unguarded(values, dtype, FLOAT32, single)
        values = single
    np.copyto(out, values, casting="same_kind")


def narrow(values: Array, acc: DType, dtype: DType, out: Array) -> None:
    """Write `values` (1-D, of `acc`) into `out` (1-D, of `dtype`); `out` may be `values` where the types are equal.

    Floats are rounded once, to nearest even, overflow gives infinity, and every NaN becomes `dtype.nan`. Integers
    are cut to the low bits. A bool is 0 or 1, also where a caller has put another byte into its memory.
    """
    with np.errstate(all="ignore"):
        narrow_unguarded(values, acc, dtype, out)


def narrow_unguarded(values: Array, acc: DType, dtype: DType, out: Array) -> None:
    """`narrow` inside the caller's np.errstate."""
    if dtype.part is not None and acc.part is not None:
        parts = values.view(acc.part.storage)
        narrow_unguarded(parts, acc.part, dtype.part, parts if out is values else out.view(dtype.part.storage))
    elif dtype.kind is NumberKind.BOOL:
        np.not_equal(values.view(np.uint8), 0, out=out)
    elif dtype.kind is not NumberKind.FLOAT:
        if out is not values:
            np.copyto(out, values, casting="unsafe")
    elif dtype.itemsize <= 2 and acc is dtype:
        _copy_small(values, dtype, out)
    else:
        # A maximum is NaN exactly if an element is, reads once and writes nothing: far cheaper than an array of
        # isnan. To ask few elements one by one is cheaper than to begin a reduction.
        if values.size <= _FEW:
            any_nan = any(map(math.isnan, values.tolist()))
        else:
            any_nan = math.isnan(values.max())
        where = np.isnan(values) if any_nan else None
        if dtype in _FROM_FLOAT32:
            single = values if acc is FLOAT32 else _float64_to_odd_float32(values)
            _FROM_FLOAT32[dtype](single, out)
        elif out is not values:
            np.copyto(out, values, casting="same_kind")
        if where is not None:
            out.view(dtype.bits)[where] = dtype.nan


# Operands of the conversions. As arrays of no dimension: numpy takes three times as long to make one of a Python
# integer.
def _u16(value: int) -> Array:
    return np.array(value, np.uint16)


def _u32(value: int) -> Array:
    return np.array(value, np.uint32)


_SIZE_8 = np.array(0x7F, np.uint8)
_SIZE_16, _SIGN_16 = _u16(0x7FFF), _u16(0x8000)
_SIZE_32, _EXPONENT_32 = _u32(0x7FFF_FFFF), _u32(0x7F80_0000)
_1, _13, _16 = _u32(1), _u32(13), _u32(16)
_BELOW_HALF_OF_LAST = _u32(0x7FFF)
_TWO_TO_16, _TWO_TO_MINUS_14 = _u32(0x4780_0000), _u32(0x3880_0000)  # as float32 bits
_EXPONENT_OF_TWO_TO_13 = _u32(13 << 23)
_ANCHOR_BIAS = _u16(((113 + 13) << 10) & 0xFFFF)
_WIDENED_16 = _u32(0x8FFF_E000)  # one sign bit, five of exponent, ten of fraction
_TWO_TO_112 = np.array(2.0**112, np.float32)


def _copy_small(values: Array, dtype: DType, out: Array) -> None:
    """Copy narrow floats, every NaN made the one. On the bits: numpy's float16 arithmetic is 30 times slower."""
    if out is not values:
        np.copyto(out, values)
    size = np.bitwise_and(values.view(dtype.bits), _SIZE_16 if dtype.itemsize == 2 else _SIZE_8)
    if size.size and size.max() > dtype.top:
        out.view(dtype.bits)[size > dtype.top] = dtype.nan


def _bfloat16_to_float32(values: Array, out: Array) -> None:
    bits = out.view(np.uint32)
    np.copyto(bits, values)
    np.left_shift(bits, _16, out=bits)


def _float32_to_bfloat16(values: Array, out: Array) -> None:
    """Round to nearest even: add just under half of the last place, and the last place's own bit to break ties.

    The carry may run into the exponent, which is what rounding up to the next power of two, or to infinity, asks
    for.
    """
    bits = values.view(np.uint32)
    rounded = np.right_shift(bits, _16)
    np.bitwise_and(rounded, _1, out=rounded)
    np.add(rounded, _BELOW_HALF_OF_LAST, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, _16, out=rounded)
    np.copyto(out, rounded, casting="unsafe")


def _float16_to_float32(values: Array, out: Array) -> None:
    """numpy's own cast, element by element, is four times slower; it is asked only where an infinity or NaN is."""
    halves = values.view(np.uint16)
    if values.size and np.bitwise_and(halves, _SIZE_16).max() >= FLOAT16.top:
        np.copyto(out, values)
        return
    bits = out.view(np.uint32)
    np.copyto(bits.view(np.int32), values.view(np.int16))  # the sign comes along into bits 16..31
    np.left_shift(bits, _13, out=bits)
    np.bitwise_and(bits, _WIDENED_16, out=bits)
    np.multiply(out, _TWO_TO_112, out=out)


def _float32_to_float16(values: Array, out: Array) -> None:
    """Let the adder round: |x| + 2**(e+13), e the exponent of x, has its last place at 2**(e-10), as float16 has.

    Below 2**-14 float16 keeps that last place, so e stops there. The sum's fraction then counts last places, 1024
    to 2048 of them (0 to 1024 for a subnormal), and adding it to the exponent field lets a carry run on by itself.
    Anything from 65536 up is infinity. NaN is the caller's to put in.
    """
    bits, halves = values.view(np.uint32), out.view(np.uint16)
    size = np.bitwise_and(bits, _SIZE_32)
    np.minimum(size, _TWO_TO_16, out=size)
    anchor = np.maximum(size, _TWO_TO_MINUS_14)
    np.bitwise_and(anchor, _EXPONENT_32, out=anchor)
    np.add(anchor, _EXPONENT_OF_TWO_TO_13, out=anchor)
    total = size.view(np.float32)
    np.add(total, anchor.view(np.float32), out=total)
    np.copyto(halves, size, casting="unsafe")  # the count: the anchor has none of these 16 bits
    np.right_shift(anchor, _13, out=anchor)
    part = anchor.astype(np.uint16)
    np.subtract(part, _ANCHOR_BIAS, out=part)
    np.add(halves, part, out=halves)
    np.right_shift(bits, _16, out=size)
    np.copyto(part, size, casting="unsafe")
    np.bitwise_and(part, _SIGN_16, out=part)
    np.bitwise_or(halves, part, out=halves)


def _float64_to_odd_float32(values: Array) -> Array:
    """Round to odd: of the two float32 around an inexact value the one whose last bit is set; no false tie arises."""
    nearest = values.astype(np.float32)
    back = nearest.astype(np.float64)
    bits = nearest.view(np.uint32)
    other = (back != values) & ((bits & 1) == 0)
    beyond = np.abs(back) > np.abs(values)
    bits[other & beyond] -= 1
    bits[other & ~beyond] += 1
    return nearest


def _float8_values(dtype: DType) -> Array:
    """The float32 of each of the 256 patterns: fraction times a power of two, from the format's definition."""
    fraction_bits = dtype.digits - 1
    bias = (1 << (6 - fraction_bits)) - 1  # of 7 - fraction_bits exponent bits
    values = np.empty(256, np.float32)
    for bits in range(256):
        size = bits & 0x7F
        exponent, fraction = size >> fraction_bits, size & ((1 << fraction_bits) - 1)
        significand = fraction + (1 << fraction_bits if exponent else 0)
        value = math.ldexp(significand, max(exponent, 1) - bias - fraction_bits)
        if size > dtype.top:
            value = math.nan
        elif size == dtype.top and dtype.infinite:
            value = math.inf
        values[bits] = math.copysign(value, -1.0 if bits & 0x80 else 1.0)
    values.flags.writeable = False
    return values


def _float8_to_float32(dtype: DType) -> Callable[[Array, Array], None]:
    table = _float8_values(dtype)

    def convert(values: Array, out: Array) -> None:
        np.take(table, values, out=out, mode="clip")  # the default mode, "raise", would buffer the output

    return convert


def _float32_to_float8(dtype: DType) -> Callable[[Array, Array], None]:
    """Let the adder round, as in `_float32_to_float16`: below the smallest normal 2**lowest the last place stays.

    The count of last places, added to the exponent field, is the pattern; what comes out above the largest finite
    number is infinity, or NaN where there is none. NaN is the caller's to put in.
    """
    fraction_bits = dtype.digits - 1
    lowest = 2 - (1 << (6 - fraction_bits))
    least = _u32((127 + lowest) << 23)
    # From here up everything overflows: the exponent after the largest number's.
    beyond = _u32((127 + lowest + ((dtype.top if dtype.infinite else 0x80) >> fraction_bits) - 1) << 23)
    lift = _u32((23 - fraction_bits) << 23)
    shift, bias = _u32(23 - fraction_bits), _u32((127 + lowest + 23 - fraction_bits) << fraction_bits)
    overflow = _u32(dtype.top if dtype.infinite else dtype.nan)
    low_bits, sign, to_sign = _u32(0x7FFFFF), _u32(0x80), _u32(24)

    def convert(values: Array, out: Array) -> None:
        bits = values.view(np.uint32)
        size = np.bitwise_and(bits, _SIZE_32)
        np.minimum(size, beyond, out=size)
        anchor = np.maximum(size, least)
        np.bitwise_and(anchor, _EXPONENT_32, out=anchor)
        np.add(anchor, lift, out=anchor)
        total = size.view(np.float32)
        np.add(total, anchor.view(np.float32), out=total)
        np.bitwise_and(size, low_bits, out=size)  # the count
        np.right_shift(anchor, shift, out=anchor)
        np.subtract(anchor, bias, out=anchor)
        np.add(size, anchor, out=size)
        np.minimum(size, overflow, out=size)
        np.right_shift(bits, to_sign, out=anchor)
        np.bitwise_and(anchor, sign, out=anchor)
        np.bitwise_or(size, anchor, out=size)
        np.copyto(out, size, casting="unsafe")
        if not dtype.infinite:
            _copy_small(out, dtype, out)  # an overflow is the one NaN, without a sign

    return convert


_TO_FLOAT32: Mapping[DType, Callable[[Array, Array], None]] = {
    FLOAT8_E4M3FN: _float8_to_float32(FLOAT8_E4M3FN),
    FLOAT8_E5M2: _float8_to_float32(FLOAT8_E5M2),
    FLOAT16: _float16_to_float32,
    BFLOAT16: _bfloat16_to_float32,
}
_FROM_FLOAT32: Mapping[DType, Callable[[Array, Array], None]] = {
    FLOAT8_E4M3FN: _float32_to_float8(FLOAT8_E4M3FN),
    FLOAT8_E5M2: _float32_to_float8(FLOAT8_E5M2),
    FLOAT16: _float32_to_float16,
    BFLOAT16: _float32_to_bfloat16,
}
