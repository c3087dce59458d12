"""Regions of a tensor: boxes of indices. Who holds, writes or wants which part of it is told in these.

A region is where it begins in each dimension, and how far it goes. Its elements are in row-major order. The tensor of
no dimensions has one region, with one element. All functions are exact, for empty regions too: these hold no element,
meet nothing, and are covered by nothing at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quicoll.errors import LocalError

__all__ = ["Region", "overlap_of", "pieces_of", "uncovered", "without"]


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A box of indices of a tensor. offset: its first index. shape: its size."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """Return the region that is all of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    def slices(self, base: Region | None = None) -> tuple[slice, ...]:
        """Return the indices that take it out of an array that holds `base`, or the whole tensor."""
        offset = (0,) * len(self.offset) if base is None else base.offset
        return tuple(
            slice(begin - first, begin - first + length)
            for begin, length, first in zip(self.offset, self.shape, offset, strict=True)
        )

    def check(self, shape: tuple[int, ...], what: str) -> None:
        """Raise LocalError unless it lies within a tensor of this shape. what: the tensor, for the error."""
        if not len(self.offset) == len(self.shape) == len(shape):
            raise LocalError(f"{what} has {len(shape)} dimensions; its region {self} has others")
        for begin, length, total in zip(self.offset, self.shape, shape, strict=True):
            if begin < 0 or length < 0 or begin + length > total:
                raise LocalError(f"{what} has shape {shape}; the region {self} goes beyond it")

    def __str__(self) -> str:
        pairs = zip(self.offset, self.shape, strict=False)
        return "[" + ", ".join(f"{begin}:{begin + length}" for begin, length in pairs) + "]"


def overlap_of(one: Region, other: Region) -> Region | None:
    """Return what two regions have in common; None where that is nothing."""
    begins = tuple(max(pair) for pair in zip(one.offset, other.offset, strict=True))
    ends = [min(a + m, b + n) for a, m, b, n in zip(one.offset, one.shape, other.offset, other.shape, strict=True)]
    lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return Region(begins, lengths) if all(length > 0 for length in lengths) else None


def without(region: Region, taken: Region) -> Iterator[Region]:
    """Yield what is left of a region, in boxes that do not overlap, when another one is taken from it."""
    common = overlap_of(region, taken)
    if common is None:
        if region.size:
            yield region
        return
    offset, shape = list(region.offset), list(region.shape)
    for axis, (begin, length) in enumerate(zip(common.offset, common.shape, strict=True)):
        before = begin - offset[axis]
        after = offset[axis] + shape[axis] - begin - length
        if before:
            yield Region(tuple(offset), (*shape[:axis], before, *shape[axis + 1 :]))
        if after:
            first = (*offset[:axis], begin + length, *offset[axis + 1 :])
            yield Region(first, (*shape[:axis], after, *shape[axis + 1 :]))
        offset[axis], shape[axis] = begin, length


def uncovered(region: Region, pieces: Iterable[Region]) -> Region | None:
    """Return a part of the region that no piece covers; None where they cover all of it."""
    left = [region] if region.size else []
    for piece in pieces:
        if not left:
            break
        left = [part for each in left for part in without(each, piece)]
    return left[0] if left else None


def pieces_of(region: Region, itemsize: int, most: int) -> Iterator[Region]:
    """Yield the region in pieces of at most `most` bytes each, in order; each is one run of the region's elements.

    Args:
        region: What is cut; nothing is yielded of an empty one.
        itemsize: Bytes of an element.
        most: 1 or more. A single element may be larger.
    """
    if not region.size:
        return
    axis = next((axis for axis, length in enumerate(region.shape) if length > 1), None)
    if axis is None or region.size * itemsize <= most:
        yield region
        return
    offset, shape = region.offset, region.shape
    row = itemsize * math.prod(shape[axis + 1 :])
    rows = max(1, most // row)
    for begin in range(0, shape[axis], rows):
        length = min(rows, shape[axis] - begin)
        part = Region(
            (*offset[:axis], offset[axis] + begin, *offset[axis + 1 :]), (*shape[:axis], length, *shape[axis + 1 :])
        )
        yield from pieces_of(part, itemsize, most) if row > most else (part,)
