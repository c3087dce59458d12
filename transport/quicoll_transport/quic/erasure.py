"""Reed-Solomon parity of segments over GF(256): of k segments and m rows of parity, any k bring the segments back.

The code. Row j, column i has the coefficient (x_0 + y_i) / (x_j + y_i), with x_j = 255 - j and y_i = i: a Cauchy matrix
whose columns are divided by their first entry. Every square part of it can be inverted, which is what "any k" takes;
and its first row is all ones, so the first row of parity is the XOR of the segments, whatever the others are. The field
is that of the polynomial 0x11D.

Segments are rows of 64-bit words, eight bytes side by side. A combination of them is taken bit by bit of its
coefficients, the highest first: the sum so far is doubled, and the segments whose coefficient has the bit are added
(XOR). That is numpy's reduction over whole rows, three times as fast here as one look-up in a table for each byte: on
one core, of 200 segments of 1411 bytes, 0.01 ms for the first row of parity and 0.14 ms for each other one (2 GB/s of
segments; benchmarks/parity.py).

Why not a library: zfec is under the GPL; reedsolo corrects bytes of one word, in Python; raptorq has wheels for few
platforms, and codes one object of which it makes all segments itself. What is here is small and has an oracle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

__all__ = ["MOST_PARITY_ROWS", "MOST_SEGMENTS", "parity_row", "repair_segments"]

MOST_SEGMENTS = 224
"""Segments that have parity in common."""
MOST_PARITY_ROWS = 16
"""Rows of parity of them."""

_EXP = [1] * 510
for _i in range(1, 255):
    _doubled = _EXP[_i - 1] << 1
    _EXP[_i] = _doubled ^ 0x11D if _doubled & 0x100 else _doubled
for _i in range(255, 510):
    _EXP[_i] = _EXP[_i - 255]
_LOG = [0] * 256
for _i in range(255):
    _LOG[_EXP[_i]] = _i

_LOW = np.uint64(0x0101010101010101)
_HIGH = np.uint64(0xFEFEFEFEFEFEFEFE)
_ONE, _SEVEN, _REST = np.uint64(1), np.uint64(7), np.uint64(0x1D)


def _times(a: int, b: int) -> int:
    return _EXP[_LOG[a] + _LOG[b]] if a and b else 0


def _inverse(a: int) -> int:
    return _EXP[255 - _LOG[a]]


def _coefficient(j: int, i: int) -> int:
    return _times(255 ^ i, _inverse((255 - j) ^ i))


_COEFFICIENTS: NDArray[np.uint8] = np.array(
    [[_coefficient(j, i) for i in range(MOST_SEGMENTS)] for j in range(MOST_PARITY_ROWS)], np.uint8
)


def _combined(coefficients: NDArray[np.uint8], segments: Words) -> Words:
    """Return the sum of segments, each times its coefficient."""
    total: Words = np.zeros(segments.shape[1], np.uint64)
    for bit in range(int(coefficients.max(initial=0)).bit_length() - 1, -1, -1):
        total = ((total << _ONE) & _HIGH) ^ (((total >> _SEVEN) & _LOW) * _REST)
        chosen = (coefficients >> np.uint8(bit)) & 1 == 1
        total ^= np.bitwise_xor.reduce(segments if chosen.all() else segments[chosen], axis=0)
    return total


def parity_row(segments: Words, j: int) -> Words:
    """Return a row of parity.

    Args:
        segments: MOST_SEGMENTS at most.
        j: Which row, below MOST_PARITY_ROWS.
    """
    return _combined(_COEFFICIENTS[j, : len(segments)], segments)


def repair_segments(segments: Words, missing: Sequence[int], rows: Mapping[int, Words]) -> None:
    """Put segments back that are missing.

    Args:
        segments: All of them; those that are missing are overwritten.
        missing: Their places, ascending, each once.
        rows: Rows of parity by their number, as many as are missing or more.
    Raises:
        ValueError: There are fewer rows than that.
    """
    chosen = sorted(rows)[: len(missing)]
    if len(chosen) < len(missing):
        raise ValueError(f"{len(missing)} segments are missing, and there are {len(rows)} rows of parity")
    if not missing:
        return
    segments[list(missing)] = 0
    rest = np.empty((len(missing), segments.shape[1]), np.uint64)
    for at, j in enumerate(chosen):
        rest[at] = rows[j] ^ parity_row(segments, j)
    inverse = _inverted([[int(_COEFFICIENTS[j, i]) for i in missing] for j in chosen])
    for i, weights in zip(missing, inverse, strict=True):
        segments[i] = _combined(np.array(weights, np.uint8), rest)


def _inverted(matrix: list[list[int]]) -> list[list[int]]:
    """Return the inverse of a square matrix that has one (Gauss-Jordan)."""
    size = len(matrix)
    rows = [[*row, *(1 if i == at else 0 for i in range(size))] for at, row in enumerate(matrix)]
    for c in range(size):
        pivot = next(r for r in range(c, size) if rows[r][c])
        rows[c], rows[pivot] = rows[pivot], rows[c]
        scale = _inverse(rows[c][c])
        rows[c] = [_times(scale, value) for value in rows[c]]
        for r in range(size):
            factor = rows[r][c]
            if r != c and factor:
                rows[r] = [value ^ _times(factor, other) for value, other in zip(rows[r], rows[c], strict=True)]
    return [row[size:] for row in rows]
