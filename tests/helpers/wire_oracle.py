"""Wire formats and their error feedback one number at a time: what comes out of one leaf of float32, and what is left.

Written from the definitions at the heads of quicoll.numerics.codecs and quicoll.numerics.feedback, with Python's own
arithmetic and numpy's scalars; no array operation but the sums of `reduced`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.numerics.canonical_order import split

if TYPE_CHECKING:
    from quicoll.numerics.dtypes import Array

__all__ = ["Fed", "passed", "reduced"]


def passed(wire: str, values: Array) -> Array:
    """What comes out of a tensor of float32."""
    numbers = list(values.reshape(-1))
    if wire == "bfloat16":
        out = [_bfloat16(x) for x in numbers]
    elif wire.startswith("topk:1/"):
        out = _in_blocks(numbers, 4096, lambda chunk: _top_k(chunk, int(wire.removeprefix("topk:1/"))))
    else:
        out = _in_blocks(numbers, 64, _int4_block) if wire == "int4" else _in_blocks(numbers, 256, _int8_block)
    return np.array(out, np.float32).reshape(values.shape)


def reduced(wire: str, leaves: Sequence[Array], op: str) -> Array:
    """What an all_reduce gives: of top-k the sum itself, of the others that encoded and decoded once more."""

    def node(a: int, b: int) -> Array:
        if b - a == 1:
            return passed(wire, leaves[a])
        middle = split(a, b)
        total: Array = node(a, middle) + node(middle, b)
        return total

    with np.errstate(all="ignore"):
        total = node(0, len(leaves))
        if op == "avg":
            total = total / np.float32(len(leaves))
    return total if wire.startswith("topk:") else passed(wire, total)


class Fed:
    """A leaf with its residual, over several calls."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.residual = np.zeros(shape, np.float32)

    def given(self, values: Array) -> Array:
        """What is encoded of the leaf's next values."""
        with np.errstate(all="ignore"):
            return np.add(values, self.residual)

    def follow(self, wire: str, values: Array) -> Array:
        """Go on with what the leaf is next; return what is encoded."""
        given = self.given(values)
        with np.errstate(all="ignore"):
            lost = given - passed(wire, given)
        self.residual = np.where(np.isfinite(lost), lost, np.float32(0))
        return given


def _bfloat16(x: Any) -> Any:
    """The nearest of the two neighbours, ties to the even one."""
    if math.isnan(x) or math.isinf(x):
        return x
    low = np.uint32(x.view(np.uint32) & np.uint32(0xFFFF0000))
    below, above = low.view(np.float32), np.uint32(low + np.uint32(0x10000)).view(np.float32)
    # Beyond the largest there is infinity, which stands where the next power of two would. float64 is exact here.
    end = math.copysign(2.0**128, x)
    to_below = abs(float(x) - float(below))
    to_above = abs((end if math.isinf(above) else float(above)) - float(x))
    if to_below == to_above:
        return above if low & np.uint32(0x10000) else below
    return below if to_below < to_above else above


def _in_blocks(numbers: list[Any], size: int, block: Any) -> list[Any]:
    out: list[Any] = []
    for start in range(0, len(numbers), size):
        out += block(numbers[start : start + size])
    return out


def _int8_block(numbers: list[Any]) -> list[Any]:
    largest = max((abs(float(x)) for x in numbers if math.isfinite(x)), default=0.0)
    exact = largest / 126
    scale = np.float32(exact)
    if float(scale) < exact:
        scale = np.nextafter(scale, np.float32(np.inf))
    return [_scaled(x, float(scale)) for x in numbers]


def _scaled(x: Any, scale: float) -> Any:
    """What comes out of x as a code of eight bits."""
    if not math.isfinite(x):
        return x
    top = float(np.finfo(np.float32).max)
    code = round(float(x) / scale) if scale else 0
    return np.float32(min(max(code * scale, -top), top))


def _int4_block(numbers: list[Any]) -> list[Any]:
    largest = max((abs(float(x)) for x in numbers if math.isfinite(x)), default=0.0)
    levels = 7 if all(math.isfinite(x) for x in numbers) else 6
    scale = _next_bfloat16(largest / levels)
    return [_in_sixteenths(x, scale) for x in numbers]


def _in_sixteenths(x: Any, scale: Any) -> Any:
    """What comes out of x as a code of four bits."""
    if not math.isfinite(x):
        return x
    code = round(float(x / scale)) if scale else 0  # the quotient is a float32
    top = float(np.finfo(np.float32).max)
    return np.float32(min(max(code * float(scale), -top), top))


def _next_bfloat16(x: float) -> Any:
    """The smallest bfloat16 that is not below x, which is not negative."""
    bits = int(np.float32(x).view(np.uint32)) >> 16
    while bits and float(np.uint32((bits - 1) << 16).view(np.float32)) >= x:
        bits -= 1
    while float(np.uint32(bits << 16).view(np.float32)) < x:
        bits += 1
    return np.uint32(bits << 16).view(np.float32)


def _top_k(chunk: list[Any], n: int) -> list[Any]:
    """The largest magnitudes, the first of equal ones; NaN above infinity."""

    def rank(at: int) -> tuple[float, int]:
        return (-math.inf, at) if math.isnan(chunk[at]) else (-min(abs(float(chunk[at])), 2.0**128), at)

    kept = set(sorted(range(len(chunk)), key=rank)[: -(-len(chunk) // n)])
    return [_kept(x) if at in kept else np.float32(0) for at, x in enumerate(chunk)]


def _kept(x: Any) -> Any:
    short = _bfloat16(x)
    if math.isinf(short) and not math.isinf(x):
        return np.float32(math.copysign((2 - 2.0**-7) * 2.0**127, x))
    return short
