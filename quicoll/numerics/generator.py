"""Random tensors that all ranks agree on: dropout masks, routing noise, initial weights, the order of samples.

`job.seed` is agreed with the view. From it seeds are derived by name, and a seed gives a generator:

    noise = job.seed.for_layer(3).for_step(step.number).generator("torch").normal((tokens, experts))

Contract: the numbers are a function of the seed, of how many draws the generator made before, and of the draw's own
arguments. They do not depend on the rank, the world size, the view, numpy or torch, their versions, threads or the
processor. Golden values in the tests hold it; a change of any is a breaking change of this package.

The mapping. Bits come from Philox4x32-10 (`quicoll.numerics.philox`):

    key       low and high 32 bits of the seed
    counter   words 0 and 1: number of the block; 2: number of the draw, 0 for a generator's first; 3: attempt

The elements of a draw are numbered in C order. Types up to 32 bits take one word, element i word i % 4 of block i // 4.
All other draws take 64 bits, element i words 2 (i % 2), the low one, and 2 (i % 2) + 1 of block i // 2. So an element
needs none of those before it: `start` gives a part of a draw, for example a rank's share of one mask for all.

    uniform      k / 2**p, where k is the upper p bits, p the digits of the type: 24 for float32, 53, 11, 8
    bernoulli    whether the 64 bits, as a fraction, are below p; p is rounded down to 64 binary places
    integers     64 bits modulo the width, if they are below the largest multiple of it; else attempt 1, 2, ...
    permutation  the order, by a stable sort, of n numbers of 64 bits (two are equal with probability n**2 / 2**65)
    normal       the quantile at (k + 1/2) / 2**52, k the upper 52 bits, as float64, then rounded to the type

A normal number from a library's exp, log or cos would have that library's bits. So the quantile is Wichura's AS241
(1988, Applied Statistics 37(3)), rational functions with an error of 1e-16, and the logarithm that it needs in the
tails is written out as fdlibm's e_log.c has it: nothing but +, -, *, / and square roots, which IEEE 754 fixes, in the
order stated. Numbers reach up to 8.13 in size.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.buffers import ArrayKind, wrap
from quicoll.numerics.dtypes import (
    BFLOAT16,
    BOOL,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT64,
    Array,
    DType,
    NumberKind,
    narrow_unguarded,
    require_ieee,
)
from quicoll.numerics.philox import random_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Generator"]

_PIECE = 1 << 14  # elements that are made at a time; numbers do not depend on it
_MAX_DRAWS = 1 << 32


class Generator:
    """Draws random tensors that are equal on all ranks; `Seed.generator` makes one.

    Each draw has fresh numbers, so all ranks must make the same draws in the same order. In all methods `shape` is an
    int or a tuple of ints; `start` gives elements [start, start + n) of a larger draw, n being the number of elements
    of the shape.

    Args:
        seed: From 0 to 2**64 - 1.
        kind: "numpy" or "torch": what the draws are. The bits are the same.
    Raises:
        LocalError: An argument is out of its range.
    """

    __slots__ = ("_draws", "_key", "_kind")

    def __init__(self, seed: int, *, kind: ArrayKind = "numpy") -> None:
        if not 0 <= seed < 1 << 64:
            raise LocalError(f"a generator's seed has 64 bits, not {seed}")
        if kind not in ("numpy", "torch"):
            raise LocalError(f"kind {kind!r} is not known; use 'numpy' or 'torch'")
        self._key = seed & 0xFFFF_FFFF, seed >> 32
        self._kind: ArrayKind = kind
        self._draws = 0

    @property
    def draws(self) -> int:
        """The number of draws made so far, which is the number of the next."""
        return self._draws

    def uniform(self, shape: int | tuple[int, ...], *, dtype: str = "float32", start: int = 0) -> Any:
        """Draw floats in [0, 1), each a multiple of 2**-p, all equally likely; p is the number of the type's digits.

        Args:
            shape: Of the result.
            dtype: "float16", "bfloat16", "float32" or "float64".
            start: First element in the draw.
        Returns:
            A numpy array or a torch tensor.
        Raises:
            LocalError: An argument is out of its range.
        """
        kind, size, shape = self._begin(dtype, shape, start, (FLOAT16, BFLOAT16, FLOAT32, FLOAT64))
        out, draw = np.empty(size, kind.storage), self._next_draw()
        for a in range(0, size, _PIECE):
            b = min(a + _PIECE, size)
            if kind is FLOAT64:
                numbers = (self._bits64(start + a, b - a, draw) >> np.uint64(11)).astype(np.float64)
                np.multiply(numbers, 2.0**-53, out=out[a:b])
            else:
                places = np.uint32(32 - kind.digits)
                single = (self._bits32(start + a, b - a, draw) >> places).astype(np.float32)
                single *= np.float32(2.0**-kind.digits)
                narrow_unguarded(single, FLOAT32, kind, out[a:b])
        return wrap(out, kind, shape, self._kind)

    def normal(self, shape: int | tuple[int, ...], *, dtype: str = "float32", start: int = 0) -> Any:
        """Draw floats of mean 0 and variance 1.

        Args:
            shape: Of the result.
            dtype: "float16", "bfloat16", "float32" or "float64".
            start: First element in the draw.
        Returns:
            A numpy array or a torch tensor.
        Raises:
            LocalError: An argument is out of its range, or this thread does not compute by IEEE 754.
        """
        kind, size, shape = self._begin(dtype, shape, start, (FLOAT16, BFLOAT16, FLOAT32, FLOAT64))
        require_ieee()
        out, draw = np.empty(size, kind.storage), self._next_draw()
        with np.errstate(all="ignore"):
            for a in range(0, size, _PIECE):
                b = min(a + _PIECE, size)
                numbers = (self._bits64(start + a, b - a, draw) >> np.uint64(12)).astype(np.float64)
                numbers += 0.5
                numbers *= 2.0**-52
                narrow_unguarded(normal_quantile(numbers), FLOAT64, kind, out[a:b])
        return wrap(out, kind, shape, self._kind)

    def integers(
        self, shape: int | tuple[int, ...], *, low: int = 0, high: int, dtype: str = "int64", start: int = 0
    ) -> Any:
        """Draw integers in [low, high), all equally likely.

        Args:
            shape: Of the result.
            low: The smallest.
            high: One above the largest.
            dtype: An integer type that holds them.
            start: First element in the draw.
        Returns:
            A numpy array or a torch tensor.
        Raises:
            LocalError: The type does not hold them, or an argument is out of its range.
        """
        kind, size, shape = self._begin(dtype, shape, start, None)
        limits = np.iinfo(kind.storage) if kind.kind in (NumberKind.INT, NumberKind.UINT) else None
        if limits is None or not limits.min <= low < high <= limits.max + 1:
            raise LocalError(f"integers in [{low}, {high}) are none of {kind}")
        out, draw, width = np.empty(size, kind.storage), self._next_draw(), high - low
        for a in range(0, size, _PIECE):
            b = min(a + _PIECE, size)
            numbers = self._below(width, start + a, b - a, draw)
            # In 64 bits, modulo 2**64, and then the low bits: exact for every type, because the result fits.
            numbers += np.uint64(low % (1 << 64))
            np.copyto(out[a:b], numbers, casting="unsafe")
        return wrap(out, kind, shape, self._kind)

    def bernoulli(self, shape: int | tuple[int, ...], p: float, *, start: int = 0) -> Any:
        """Draw bools, each true with probability p.

        Args:
            shape: Of the result.
            p: From 0 to 1; rounded down to 64 binary places.
            start: First element in the draw.
        Returns:
            A numpy array or a torch tensor.
        Raises:
            LocalError: An argument is out of its range.
        """
        kind, size, shape = self._begin("bool", shape, start, (BOOL,))
        if not 0 <= p <= 1:
            raise LocalError(f"a probability is in [0, 1], not {p}")
        below = math.floor(Fraction(p) * (1 << 64))
        out, draw = np.ones(size, np.bool_), self._next_draw()
        if below < 1 << 64:
            for a in range(0, size, _PIECE):
                b = min(a + _PIECE, size)
                np.less(self._bits64(start + a, b - a, draw), np.uint64(below), out=out[a:b])
        return wrap(out, kind, shape, self._kind)

    def permutation(self, n: int) -> Any:
        """Draw an order of the numbers 0 to n - 1, all orders equally likely.

        Args:
            n: How many.
        Returns:
            int64, of shape (n,).
        Raises:
            LocalError: n is negative.
        """
        _, size, shape = self._begin("int64", n, 0, (INT64,))
        draw = self._next_draw()
        order = np.argsort(self._bits64(0, size, draw), kind="stable").astype(np.int64)
        return wrap(order, INT64, shape, self._kind)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _begin(
        self, dtype: str, shape: int | tuple[int, ...], start: int, allowed: tuple[DType, ...] | None
    ) -> tuple[DType, int, tuple[int, ...]]:
        kind = DType.parse(dtype)
        if allowed is not None and kind not in allowed:
            raise LocalError(f"{dtype} is not drawn here; use one of {', '.join(map(str, allowed))}")
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(extent < 0 for extent in extents) or start < 0:
            raise LocalError(f"a draw of shape {shape} from {start} has a negative number in it")
        return kind, math.prod(extents), extents

    def _next_draw(self) -> int:
        if self._draws == _MAX_DRAWS:
            raise LocalError(f"a generator makes {_MAX_DRAWS} draws; derive another seed")
        self._draws += 1
        return self._draws - 1

    def _bits32(self, start: int, count: int, draw: int) -> NDArray[np.uint32]:
        first = start // 4
        rows = random_words(self._key, first, -(-(start + count) // 4) - first, (draw, 0))
        return rows.reshape(-1)[start - 4 * first :][:count]

    def _bits64(self, start: int, count: int, draw: int, attempt: int = 0) -> NDArray[np.uint64]:
        first = start // 2
        rows = random_words(self._key, first, -(-(start + count) // 2) - first, (draw, attempt)).astype(np.uint64)
        pairs = rows[:, ::2] | rows[:, 1::2] << np.uint64(32)
        return pairs.reshape(-1)[start - 2 * first :][:count]

    def _below(self, width: int, start: int, count: int, draw: int) -> NDArray[np.uint64]:
        """Numbers below `width`, which is at most 2**64."""
        bits = self._bits64(start, count, draw)
        multiple = (1 << 64) // width * width
        attempt = 0
        if multiple < 1 << 64:
            while (again := np.flatnonzero(bits >= np.uint64(multiple))).size:
                # More than half are taken each time, so few are left; the block is made whole for each all the same.
                attempt += 1
                fresh = self._bits64(start, count, draw, attempt)
                bits[again] = fresh[again]
        return bits if width == 1 << 64 else bits % np.uint64(width)


# ---------------------------------------------------------------------------------------------------------------------
# The quantile of the normal distribution, by IEEE 754's basic operations


def normal_quantile(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return x with P(X <= x) = p for standard normal X.

    Args:
        p: In (0, 1), at least 2**-53 away from both ends.
    Returns:
        float64, of the same shape.
    """
    q = p - 0.5
    x = np.empty_like(q)
    middle = np.abs(q) <= 0.425
    some = q[middle]
    r = 0.180625 - some * some
    x[middle] = _polynomial(_A, r) * some / _polynomial(_B, r)
    tails = np.flatnonzero(~middle)
    if tails.size:
        end = p[tails]
        r = np.sqrt(-natural_log(np.minimum(end, 1.0 - end)))
        far = r > 5.0
        near_r, far_r = r - 1.6, r - 5.0
        size = np.where(
            far, _polynomial(_E, far_r) / _polynomial(_F, far_r), _polynomial(_C, near_r) / _polynomial(_D, near_r)
        )
        x[tails] = np.where(q[tails] < 0, -size, size)
    return x


def natural_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log(x) to within one unit in the last place, as fdlibm's e_log.c computes it.

    x = 2**k (1 + f) with sqrt(1/2) < 1 + f < sqrt(2); log(1 + f) = 2 s + s R(s**2) with s = f / (2 + f).

    Args:
        x: Positive normal numbers.
    Returns:
        float64, of the same shape.
    """
    significand, exponent = np.frexp(x)
    low = significand < math.sqrt(0.5)
    f = np.where(low, significand * 2.0, significand) - 1.0
    k = (exponent - low).astype(np.float64)
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    r = w * (_LG[1] + w * (_LG[3] + w * _LG[5])) + z * (_LG[0] + w * (_LG[2] + w * (_LG[4] + w * _LG[6])))
    half = 0.5 * f * f
    result: NDArray[np.float64] = k * _LN2_HIGH - ((half - (s * (half + r) + k * _LN2_LOW)) - f)
    return result


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    """Horner's rule, the highest power first."""
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value *= x
        value += coefficient
    return value


_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LG = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)

# AS241: numerator and denominator of the middle, the tails to r = 5, and beyond.
_A = (
    2.5090809287301226727e3,
    3.3430575583588128105e4,
    6.7265770927008700853e4,
    4.5921953931549871457e4,
    1.3731693765509461125e4,
    1.9715909503065514427e3,
    1.3314166789178437745e2,
    3.3871328727963666080e0,
)
_B = (
    5.2264952788528545610e3,
    2.8729085735721942674e4,
    3.9307895800092710610e4,
    2.1213794301586595867e4,
    5.3941960214247511077e3,
    6.8718700749205790830e2,
    4.2313330701600911252e1,
    1.0,
)
_C = (
    7.74545014278341407640e-4,
    2.27238449892691845833e-2,
    2.41780725177450611770e-1,
    1.27045825245236838258e0,
    3.64784832476320460504e0,
    5.76949722146069140550e0,
    4.63033784615654529590e0,
    1.42343711074968357734e0,
)
_D = (
    1.05075007164441684324e-9,
    5.47593808499534494600e-4,
    1.51986665636164571966e-2,
    1.48103976427480074590e-1,
    6.89767334985100004550e-1,
    1.67638483018380384940e0,
    2.05319162663775882187e0,
    1.0,
)
_E = (
    2.01033439929228813265e-7,
    2.71155556874348757815e-5,
    1.24266094738807843860e-3,
    2.65321895265761230930e-2,
    2.96560571828504891230e-1,
    1.78482653991729133580e0,
    5.46378491116411436990e0,
    6.65790464350110377720e0,
)
_F = (
    2.04426310338993978564e-15,
    1.42151175831644588870e-7,
    1.84631831751005468180e-5,
    7.86869131145613259100e-4,
    1.48753612908506148525e-2,
    1.36929880922735805310e-1,
    5.99832206555887937690e-1,
    1.0,
)
