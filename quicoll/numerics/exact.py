"""Sums that do not depend on any order: the exact sum of all leaves, rounded once to the leaves' own type.

Contract. For float8, float16, bfloat16, float32, float64, and both parts of complex64 and complex128:

    sum   the real number x_0 + x_1 + ... + x_{L-1}, rounded once to nearest, ties to even
    avg   the real number (x_0 + ... + x_{L-1}) / L, rounded once likewise

A real number has no order, so neither has the result: any order, any grouping, any number of ranks, and any number
of leaves that add up to the same gives the same bits. Nothing overflows on the way; only what rounds to beyond the
largest number is infinity (NaN for float8_e4m3fn). Then

- any NaN, or infinities of both signs, give the one NaN; infinities of one sign give that infinity;
- a sum that is exactly zero is +0.0, but -0.0 if every leaf is -0.0 (IEEE 754-2019, 6.3, for any number of terms);
- an avg that rounds to zero keeps the sign of the sum.

At most `MAX_LEAVES` = 2**28 leaves.

The accumulator. Every finite value of a type is a whole multiple of its smallest subnormal u. So a sum is one integer
in units of u, and adding integers is associative (Kulisch 1971; Neal 2015, "Fast exact summation using small and large
superaccumulators", arXiv:1505.05571). On the wire and at rest an accumulator is that integer in two's complement, in
32-bit words, least first, and one word of flags: whether there was a NaN, either infinity, or anything but
-0.0. The integer has room for 2**28 leaves of the largest size, so it cannot overflow, and there is one encoding for
each sum, so partial results can be compared by their bytes. Bytes of an element:

    float8 12, float16 16, bfloat16 and float32 44, float64 272, complex64 88, complex128 544

During a computation each word is held in an int64, limb by limb, so that carries wait until the end: an operand
adds less than 2**34 to a limb in magnitude, 2**28 operands less than 2**62.

The short way. Most sums do not need this. Leaves are added up in float64, and beside each addition goes its exact
rounding error (TwoSum: Knuth, TAOCP 2, 4.2.2, theorem B), whose bits are gathered in a mask. Where no addition erred,
the float64 is the exact sum, and one rounding of it is the answer. Formats so narrow that no float64 sum can err skip
even that. float64 itself takes two levels: the errors of the first are added up with their own errors watched, and if
those are none the exact sum is the sum of two numbers, which IEEE 754 rounds correctly. Elements that erred, or are not
finite, go the long way one by one. Which way was taken cannot be seen in the result, for both are correctly rounded.

For avg the quotient q = s / L is rounded to float64 and then to the leaves' type. The second rounding could only go
wrong where the first gives m, midway between two neighbours, and s / L is not m. It never does: m has 25 bits at most
and L 28, so m * L is a float64, as s is, and if they differ they do so by ulp(s) at least; then |s / L - m| >=
ulp(s) / L > ulp(q) / 2, because s < 2**53 ulp(s) and q >= 2**52 ulp(q). For float64 the quotient of the leading part
is put right by what is left of both parts, computed to 2**-50 of itself; where an error of that size could matter (Ziv
1991, ACM TOMS 17(3)), and for more than 2**25 leaves, the element goes the long way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.dtypes import FLOAT64, Array, DType, NumberKind, narrow_unguarded, widen_unguarded

__all__ = ["MAX_LEAVES", "Accumulator", "exact_accumulator"]

MAX_LEAVES = 1 << 28

_NAN, _PLUS_INFINITY, _MINUS_INFINITY, _NOT_MINUS_ZERO = 1, 2, 4, 8

# Elements that are worked on at a time: a few float64 arrays of them stay in a core's second-level cache. Bits do not
# depend on it.
_BLOCK = 4096
_REGISTER_BYTES = 1 << 18


@cache
def exact_accumulator(dtype: DType) -> Accumulator:
    """Return the accumulator of exact sums of `dtype`, one object for each. LocalError for integers and bools."""
    part = dtype.part or dtype
    if part.kind is not NumberKind.FLOAT:
        raise LocalError(f"exact sums of {dtype} need no accumulator: integers wrap, which is free of order already")
    exponents = part.top >> (part.digits - 1)  # of infinity, or of the largest number where there is none
    span = exponents - (1 if part.infinite else 0) - 1 + part.digits
    words = -(-(span + MAX_LEAVES.bit_length() - 1 + 1) // 32)
    itemsize = 4 * (words + 1) * (1 if dtype.part is None else 2)
    wide = DType(f"exact_{dtype}", itemsize, np.dtype(f"V{itemsize}"), NumberKind.EXACT)
    return Accumulator(dtype, part, wide, words, span)


@dataclass(frozen=True, slots=True, eq=False)
class Accumulator:
    """Exact sums of elements of one type, on flat arrays.

    Attributes:
        dtype: The elements' type.
        part: `dtype`, or the type of both parts of a complex number.
        wide: The accumulator as an element type: `wide.itemsize` bytes, little-endian words.
        words: 32-bit words of the integer.
        span: Bits of the largest finite value in units of the smallest.
    """

    dtype: DType
    part: DType
    wide: DType
    words: int
    span: int

    def from_leaf(self, values: Array, out: Array) -> None:
        """Write the accumulators of single leaves (1-D, of `dtype`) into `out` (of `wide`, the same size)."""
        self.reduce([(values, False)], out, final=False)

    def combine(self, left: Array, right: Array, out: Array) -> None:
        """Add two arrays of accumulators; associative and commutative, to the byte.

        Args:
            left: 1-D, of `wide`.
            right: The same size.
            out: Gets the sums; may be `left` or `right` itself.
        """
        self.reduce([(left, True), (right, True)], out, final=False)

    def finish(self, total: Array, out: Array, *, leaves: int = 1, avg: bool = False) -> None:
        """Round accumulators to numbers.

        Args:
            total: 1-D, of `wide`.
            out: 1-D, of `dtype`, the same size.
            leaves: How many were added up.
            avg: Divide by `leaves`.
        """
        self.reduce([(total, True)], out, final=True, leaves=leaves, avg=avg)

    def reduce(
        self,
        operands: Sequence[tuple[Array, bool]],
        out: Array,
        *,
        final: bool,
        leaves: int = 1,
        avg: bool = False,
    ) -> None:
        """Add up operands. Takes under 2 MiB of memory.

        Args:
            operands: At least one pair (values, wide), in any order: 1-D arrays as long as `out`, of `self.wide` where
                wide and of `dtype` where not.
            out: Gets the sum; apart from every operand, or the very memory of wide ones.
            final: Round and write `dtype`; otherwise write `self.wide`.
            leaves: How many leaves are added up.
            avg: Divide by `leaves`; only where final.
        Raises:
            LocalError: More than MAX_LEAVES leaves.
        """
        if not 1 <= leaves <= MAX_LEAVES or len(operands) > MAX_LEAVES:
            raise LocalError(f"an exact sum has 1 to {MAX_LEAVES} leaves, not {max(leaves, len(operands))}")
        narrow = [values.view(self.part.storage) for values, wide in operands if not wide]
        wides = [values.view(np.uint32).reshape(-1, self.words + 1) for values, wide in operands if wide]
        divisor = leaves if avg else 1
        registers = bool(wides) or not final
        target = out.view(self.part.storage) if final else out.view(np.uint32).reshape(-1, self.words + 1)
        size = len(target)
        block = max(256, min(_BLOCK, _REGISTER_BYTES // (8 * self.words))) if registers else _BLOCK
        with np.errstate(all="ignore"):
            for a in range(0, size, block):
                b = min(a + block, size)
                leaves_here = [values[a:b] for values in narrow]
                if registers:
                    self._through_register(leaves_here, [rows[a:b] for rows in wides], divisor, target[a:b], final)
                else:
                    self._at_once(leaves_here, divisor, target[a:b])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _at_once(self, leaves: list[Array], divisor: int, out: Array) -> None:
        """Sum and round, all leaves being here: the short way, and the long one for the elements that need it."""
        total, low, long_way = self._short_sum(leaves)
        if low is not None:
            long_way |= _joined(total, low, divisor)
        elif divisor > 1:
            np.divide(total, divisor, out=total)
        narrow_unguarded(total, FLOAT64, self.part, out)
        where = np.flatnonzero(long_way)
        if where.size:
            step = max(256, _REGISTER_BYTES // (8 * self.words))
            for a in range(0, where.size, step):
                some = where[a : a + step]
                out.view(self.part.bits)[some] = self._rounded(self._long_sum(leaves, some), divisor)

    def _through_register(self, leaves: list[Array], wides: list[Array], divisor: int, out: Array, final: bool) -> None:
        register = _Register(self, len(out))
        if leaves:
            total, low, long_way = self._short_sum(leaves)
            where = np.flatnonzero(long_way)
            total[where] = 0
            register.add(total)
            if low is not None:
                low[where] = 0
                register.add(low, flags=False)
            if where.size:
                register.add_at(where, self._long_sum(leaves, where))
        for rows in wides:
            register.add_rows(rows)
        if final:
            out.view(self.part.bits)[:] = self._rounded(register, divisor)
        else:
            register.store(out)

    def _short_sum(self, leaves: list[Array]) -> tuple[Array, Array | None, Array]:
        """The sum in float64; what it lacks (float64 only); for which elements the two together are not exact."""
        size = leaves[0].size
        total, leaf, following = np.empty(size), np.empty(size), np.empty(size)
        scratch, error = np.empty(size), np.empty(size)
        widen_unguarded(leaves[0], self.part, FLOAT64, total)
        erred = np.zeros(size, np.uint64)
        low = np.zeros(size) if self.part is FLOAT64 else None
        watched = self.span + len(leaves).bit_length() > FLOAT64.digits
        for values in leaves[1:]:
            if self.part is FLOAT64:
                leaf = values
            else:
                widen_unguarded(values, self.part, FLOAT64, leaf)
            if not watched:
                np.add(total, leaf, out=total)
                continue
            _two_sum(total, leaf, following, error, scratch)
            total, following = following, total
            if low is not None:
                _two_sum(low, error, following, scratch, np.empty(size))
                low, following, error, scratch = following, low, scratch, error
            np.bitwise_or(erred, error.view(np.uint64), out=erred)
        long_way = np.left_shift(erred, np.uint64(1)) != 0  # an error of -0.0 is none
        long_way |= ~np.isfinite(total)
        return total, low, long_way

    def _long_sum(self, leaves: list[Array], where: Array) -> _Register:
        register, wide = _Register(self, where.size), np.empty(where.size)
        for values in leaves:
            widen_unguarded(values[where], self.part, FLOAT64, wide)
            register.add(wide)
        return register

    def _rounded(self, register: _Register, divisor: int) -> Array:
        """The bits of the register's sums, divided and rounded once. The register is used up.

        From the highest word that is not zero 64 bits are taken, the first of them set, with one bit to say whether
        anything follows. All but `digits` are rounded off; more are where the smallest subnormal is the last place, so
        that what remains, with the number of places cut off above that, is the pattern: a carry out of the significand
        runs into the exponent as it should.
        """
        digits, limbs, flags = self.part.digits, register.limbs, register.flags
        negative = register.make_positive()
        below, sticky = 0, np.zeros(limbs.shape[1], np.bool_)
        if divisor > 1:
            below = 32
            limbs, sticky = _divided(limbs, divisor)
        used = limbs != 0
        columns = np.arange(limbs.shape[1])
        top = np.where(used.any(axis=0), len(limbs) - 1 - used[::-1].argmax(axis=0), 0)
        first, second, third = (
            np.where(top >= back, limbs[np.maximum(top - back, 0), columns], 0).astype(np.uint64) for back in range(3)
        )
        length = np.frexp(first.astype(np.float64))[1].astype(np.uint64)
        window = _left(first, 64 - length) | _left(second, 32 - length) | (third >> length)
        sticky |= (third & (_left(np.uint64(1), length) - np.uint64(1))) != 0
        sticky |= used.argmax(axis=0) < top - 2
        last_place = 32 * top + length.astype(np.int64) - 64
        drop = np.maximum(64 - digits, below - last_place)
        cut = drop.astype(np.uint64)
        kept = window >> cut
        rest = window & (_left(np.uint64(1), cut) - np.uint64(1))
        half = _left(np.uint64(1), cut - np.uint64(1))
        up = (rest > half) | ((rest == half) & (sticky | (kept & np.uint64(1) != 0)))
        up &= drop <= 64  # beyond, even half of the last place is more than the number
        places = (last_place + drop - below).astype(np.uint64)
        bits = (places << np.uint64(digits - 1)) + kept + up
        overflow = self.part.top if self.part.infinite else self.part.nan
        np.minimum(bits, np.uint64(overflow), out=bits)
        sign = np.uint64(1 << (8 * self.part.itemsize - 1))
        bits[negative | (flags & _NOT_MINUS_ZERO == 0)] |= sign
        bits[flags & _PLUS_INFINITY != 0] = self.part.top
        bits[flags & _MINUS_INFINITY != 0] = self.part.top | int(sign)
        both = _PLUS_INFINITY | _MINUS_INFINITY
        nan = (flags & _NAN != 0) | (flags & both == both)
        if not self.part.infinite:
            nan |= (bits & ~sign) == self.part.nan
        bits[nan] = self.part.nan
        narrow: Array = bits.astype(self.part.bits)
        return narrow


class _Register:
    """Sums that are being computed: `limbs[k]` counts 2**(32 k) units, in int64 that may exceed 32 bits."""

    __slots__ = ("_lowest", "_words", "flags", "limbs")

    def __init__(self, accumulator: Accumulator, size: int) -> None:
        part = accumulator.part
        self._words = accumulator.words
        bias = (part.top >> (part.digits - 1)) // 2
        # The exponent field of a float64 whose last place is the smallest subnormal of `part`.
        self._lowest = 1075 - (bias + part.digits - 2)
        self.limbs = np.zeros((self._words, size), np.int64)
        self.flags = np.zeros(size, np.uint32)

    def add(self, values: Array, *, flags: bool = True) -> None:
        """Add float64 that are multiples of the unit. flags: whether to note what kind of values they are."""
        bits = values.view(np.int64)
        field = (bits >> 52) & 0x7FF
        significand = bits & ((1 << 52) - 1)
        significand |= np.where(field > 0, 1 << 52, 0)
        place = np.maximum(field, 1) - self._lowest
        special = field == 0x7FF
        if special.any():
            significand[special] = 0
            place[special] = 0
            self.flags[np.isnan(values)] |= _NAN
            self.flags[values == np.inf] |= _PLUS_INFINITY
            self.flags[values == -np.inf] |= _MINUS_INFINITY
        if flags:
            self.flags |= np.where(bits != np.iinfo(np.int64).min, np.uint32(_NOT_MINUS_ZERO), np.uint32(0))
        # Below the unit there are only zero bits to shift out.
        significand >>= np.clip(-place, 0, 63)
        np.maximum(place, 0, out=place)
        # What would stand above the last word is zero, and is added to the last.
        limb, shift = place >> 5, place & 31
        sign = np.where(bits < 0, -1, 1)
        low = (significand & 0xFFFF_FFFF) << shift
        high = (significand >> 32) << shift
        columns = np.arange(values.size)
        for up, piece in enumerate((low & 0xFFFF_FFFF, (low >> 32) + (high & 0xFFFF_FFFF), high >> 32)):
            self.limbs[np.minimum(limb + up, self._words - 1), columns] += piece * sign

    def add_rows(self, rows: Array) -> None:
        """Add accumulators as they travel: one row of words for each element."""
        words = rows.T
        self.limbs[:-1] += words[: self._words - 1]
        self.limbs[-1] += words[self._words - 1].view(np.int32)
        self.flags |= words[self._words]

    def add_at(self, where: Array, other: _Register) -> None:
        self.limbs[:, where] += other.limbs
        self.flags[where] |= other.flags

    def store(self, rows: Array) -> None:
        self._carry()
        np.copyto(rows.T[: self._words], self.limbs, casting="unsafe")
        rows.T[self._words] = self.flags

    def make_positive(self) -> Array:
        """Turn the sums into their absolute values, in words of 32 bits; tell which were negative."""
        self._carry()
        negative: Array = self.limbs[-1] < 0
        if negative.any():
            np.negative(self.limbs, out=self.limbs, where=negative)
            self._carry()
        return negative

    def _carry(self) -> None:
        """Bring all limbs but the last, which has the sign, to 0 .. 2**32 - 1."""
        carry = np.empty(self.limbs.shape[1], np.int64)
        for k in range(self._words - 1):
            np.right_shift(self.limbs[k], 32, out=carry)
            self.limbs[k] &= 0xFFFF_FFFF
            self.limbs[k + 1] += carry


def _two_sum(a: Array, b: Array, total: Array, error: Array, scratch: Array) -> None:
    """total + error = a + b exactly, total being a + b rounded; error is NaN where total is not finite."""
    np.add(a, b, out=total)
    np.subtract(total, a, out=scratch)
    np.subtract(total, scratch, out=error)
    np.subtract(a, error, out=error)
    np.subtract(b, scratch, out=scratch)
    np.add(error, scratch, out=error)


def _joined(total: Array, low: Array, divisor: int) -> Array:
    """Make `total` (total + low) / divisor, rounded once; tell for which elements that was not possible here."""
    size = total.size
    high, rest = np.empty(size), np.empty(size)
    _two_sum(total, low, high, rest, np.empty(size))
    np.copyto(high, total, where=low == 0)  # adding 0.0 would turn a sum of -0.0 into 0.0
    unsure: Array = ~np.isfinite(high)
    if divisor == 1:
        np.copyto(total, high)
        return unsure
    if divisor > 1 << 25:
        return np.ones(size, np.bool_)
    quotient = high / divisor
    # 26 bits and 27: their products with the divisor are exact, and so are the differences, for little is left.
    upper = (quotient.view(np.uint64) & np.uint64(~((1 << 27) - 1) & ((1 << 64) - 1))).view(np.float64)
    left = high - upper * divisor
    left -= (quotient - upper) * divisor
    numerator, lost = np.empty(size), np.empty(size)
    _two_sum(left, rest, numerator, lost, np.empty(size))
    np.divide(numerator, divisor, out=left)
    np.add(quotient, left, out=total)
    close = quotient + left * (1 - 2.0**-50) != quotient + left * (1 + 2.0**-50)
    # Real ties, which are common, are seen exactly: `left` is half a last place, so short that its product is exact.
    short = left.view(np.uint64) & np.uint64((1 << 28) - 1) == 0
    close &= ~(short & (left * divisor == numerator) & (lost == 0))
    unsure |= close
    unsure |= (np.abs(quotient) < 2.0**-900) & (high != 0)  # there `left` may have lost bits itself
    np.copyto(total, quotient, where=left == 0)
    return unsure


def _divided(limbs: Array, divisor: int) -> tuple[Array, Array]:
    """Digits of the quotient, one word of them below the unit; whether there is a remainder."""
    quotient = np.zeros((len(limbs) + 1, limbs.shape[1]), np.int64)
    rest = np.zeros(limbs.shape[1], np.int64)
    for k in range(len(limbs), -1, -1):
        rest <<= 32
        if k:
            rest |= limbs[k - 1]
        quotient[k], rest = np.divmod(rest, divisor)
    return quotient, rest != 0


def _left(value: Any, by: Any) -> Any:
    """A shift of uint64 that leaves nothing from 64 places up, as numpy's does."""
    return np.left_shift(value, by, dtype=np.uint64)
