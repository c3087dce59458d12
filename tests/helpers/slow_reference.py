"""Reductions by their definition, one element at a time, in Python: slow, and sharing no code with quicoll.

An element is its bit pattern, an integer. Formats of floats are decoded and rounded by rational arithmetic; what is
added, multiplied or divided in between is one numpy scalar operation in the accumulator's type, as IEEE 754 has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

ARITHMETIC = ("sum", "avg", "product")
BITWISE = ("band", "bor", "bxor")
OPS = (*ARITHMETIC, "min", "max", *BITWISE)


@dataclass(frozen=True)
class Float:
    """A binary format of `size` bits with `digits` of significand, the hidden one included."""

    size: int
    digits: int
    nan: int
    infinite: bool = True

    @property
    def lowest(self) -> int:
        """The exponent of the smallest normal number."""
        return 2 - (1 << (self.size - self.digits - 1))

    @property
    def top(self) -> int:
        """The pattern of infinity, or of the first NaN where there is none."""
        return ((1 << (self.size - self.digits)) - 1) << (self.digits - 1) if self.infinite else self.nan

    def decode(self, bits: int) -> float:
        sign = -1.0 if bits >> (self.size - 1) else 1.0
        pattern = bits & ((1 << (self.size - 1)) - 1)
        if pattern >= self.top:
            return math.copysign(math.inf, sign) if self.infinite and pattern == self.top else math.nan
        exponent, fraction = pattern >> (self.digits - 1), pattern & ((1 << (self.digits - 1)) - 1)
        if exponent:
            fraction += 1 << (self.digits - 1)
        return math.copysign(math.ldexp(fraction, max(exponent, 1) - 1 + self.lowest - self.digits + 1), sign)

    def encode(self, value: float | Fraction, *, negative: bool = False) -> int:
        """Round to nearest, ties to even. negative: the sign of a Fraction that is zero, or comes out as zero."""
        if isinstance(value, Fraction):
            return self._rounded(abs(value)) | (value < 0 or negative) << (self.size - 1)
        value = float(value)
        if math.isnan(value):
            return self.nan
        sign = (math.copysign(1, value) < 0) << (self.size - 1)
        size = (self.top if self.infinite else self.nan) if math.isinf(value) else self._rounded(abs(Fraction(value)))
        return self.nan if size == self.nan else size | sign

    def _rounded(self, size: Fraction) -> int:
        if size == 0:
            return 0
        exponent = size.numerator.bit_length() - size.denominator.bit_length()
        if size < Fraction(2) ** exponent:
            exponent -= 1
        exponent = max(exponent, self.lowest)
        places = round(size / Fraction(2) ** (exponent - self.digits + 1))  # of a Fraction: to even
        pattern = ((exponent - self.lowest) << (self.digits - 1)) + places
        return min(pattern, self.top)


FLOATS = {
    "float8_e4m3fn": Float(8, 4, 0x7F, infinite=False),
    "float8_e5m2": Float(8, 3, 0x7E),
    "float16": Float(16, 11, 0x7E00),
    "bfloat16": Float(16, 8, 0x7FC0),
    "float32": Float(32, 24, 0x7FC0_0000),
    "float64": Float(64, 53, 0x7FF8 << 48),
}
COMPLEX = {"complex64": "float32", "complex128": "float64"}
INTEGERS = {f"{sign}int{size}": (size, sign == "") for sign in ("", "u") for size in (8, 16, 32, 64)}
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, "bool")


def is_defined(op: str, dtype: str, precision: str = "default") -> bool:
    if op in BITWISE:
        return dtype in INTEGERS or dtype == "bool"
    if op in ("min", "max"):
        return dtype not in COMPLEX
    return dtype != "bool" and not (precision == "exact" and op == "product" and dtype not in INTEGERS)


def tree(leaves: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """The canonical order: the left child has the largest power of two of leaves that is below their number."""
    if len(leaves) == 1:
        return leaves[0]
    left = 1
    while 2 * left < len(leaves):
        left *= 2
    return combine(tree(leaves[:left], combine), tree(leaves[left:], combine))


def reduced(op: str, dtype: str, leaves: Sequence[Sequence[int]], precision: str = "default") -> list[int]:
    """The pattern of each element (of each part, for complex numbers, in turns) of the reduction of `leaves`."""
    with np.errstate(all="ignore"):
        if dtype in COMPLEX:
            return _complex(op, COMPLEX[dtype], leaves, precision)
        return [_element(op, dtype, column, precision) for column in zip(*leaves, strict=True)]


def _element(op: str, dtype: str, column: Sequence[int], precision: str) -> int:
    if dtype in FLOATS:
        return _float(op, FLOATS[dtype], column, precision)
    if dtype == "bool":
        bits = {"min": min, "max": max, "band": min, "bor": max, "bxor": lambda a, b: a ^ b}[op]
        return int(tree(column, bits))
    size, signed = INTEGERS[dtype]

    def wrapped(value: int, size: int = size) -> int:
        value &= (1 << size) - 1
        return value - (1 << size) if signed and value >> (size - 1) else value

    values = [wrapped(value) for value in column]
    if op == "avg":
        return wrapped(wrapped(sum(values), 64) // len(values)) & ((1 << size) - 1)
    combine: Callable[[int, int], int] = {
        "sum": lambda a, b: a + b, "product": lambda a, b: a * b, "min": min, "max": max,
        "band": lambda a, b: a & b, "bor": lambda a, b: a | b, "bxor": lambda a, b: a ^ b,
    }[op]  # fmt: skip
    return int(tree(values, combine)) & ((1 << size) - 1)


def _float(op: str, form: Float, column: Sequence[int], precision: str) -> int:
    values = [form.decode(bits) for bits in column]
    if op in ("min", "max"):
        return form.encode(tree(values, lambda a, b: _extreme(op, a, b)))
    if precision == "exact":
        return _exact(form, values, len(values) if op == "avg" else 1)
    wide = np.float64 if precision == "float64" or form.size == 64 else np.float32
    combine = (lambda a, b: a * b) if op == "product" else (lambda a, b: a + b)
    total = tree([wide(value) for value in values], combine)
    return form.encode(float(total / wide(len(values)) if op == "avg" else total))


def _extreme(op: str, a: float, b: float) -> float:
    """NaN before all else; -0.0 is below +0.0."""
    if math.isnan(a) or math.isnan(b):
        return math.nan
    low, high = sorted((a, b), key=lambda x: (x, math.copysign(1, x)))
    return low if op == "min" else high


def _exact(form: Float, values: Sequence[float], divisor: int) -> int:
    if any(not math.isfinite(value) for value in values):
        return form.encode(sum(value for value in values if not math.isfinite(value)))
    total = sum(map(Fraction, values)) / divisor
    if total == 0:
        return form.encode(Fraction(0), negative=all(math.copysign(1, value) < 0 for value in values))
    bits = form.encode(total)
    return form.nan if not form.infinite and bits & (form.top) == form.nan else bits


def _complex(op: str, part: str, leaves: Sequence[Sequence[int]], precision: str) -> list[int]:
    form = FLOATS[part]
    if op != "product":
        return [_float(op, form, column, precision) for column in zip(*leaves, strict=True)]
    wide = np.float64 if precision == "float64" or form.size == 64 else np.float32

    def times(x: tuple[Any, Any], y: tuple[Any, Any]) -> tuple[Any, Any]:
        (a, b), (c, d) = x, y
        return a * c - b * d, a * d + b * c

    found = []
    for at in range(0, len(leaves[0]), 2):
        pairs = [(wide(form.decode(leaf[at])), wide(form.decode(leaf[at + 1]))) for leaf in leaves]
        found += [form.encode(float(value)) for value in tree(pairs, times)]
    return found
