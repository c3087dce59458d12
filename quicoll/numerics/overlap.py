"""Whether elements share memory: two of one tensor, or of two tensors of one list. On any device; nothing is read."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from quicoll.numerics.dtypes import Array

__all__ = ["Reach", "first_shared", "meet", "overlaps_itself", "reach_of"]

Reach: TypeAlias = tuple[int, int]

_MAX_WORK = 100_000  # of numpy, for the exact answer


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether two elements may share memory: unless each dimension steps over all that the ones below it span.

    Views made by slicing and transposing pass; expanded, broadcast and sliding-window ones do not. A few strange
    layouts that interleave without overlapping are refused too: to decide those exactly is NP-hard.

    Args:
        shape: Of an array or tensor.
        strides: In bytes.
        itemsize: In bytes.
    """
    if 0 in shape:
        return False
    span = itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride < span:
            return True
        span += stride * (size - 1)
    return False


def reach_of(place: Any) -> Reach:
    """Return where the memory of an array or tensor begins and ends, as addresses; (0, 0) where it has no elements."""
    return (0, 0) if 0 in place.shape else _reach(place)[:2]


def meet(some: Sequence[Reach], others: Sequence[Reach]) -> bool:
    """Return whether memory of `some` may be memory of `others`: what lies between elements counts as theirs."""
    return any(a < stop and start < b for a, b in some for start, stop in others)


def first_shared(places: Sequence[Any]) -> tuple[int, int] | None:
    """Return two of the places that share memory, by their numbers; None where none do.

    Args:
        places: Arrays or tensors, none of them empty.
    """
    spans = sorted(((*_reach(place), index) for index, place in enumerate(places)), key=itemgetter(0))
    before: list[tuple[int, int, Array, int]] = []  # those that reach beyond where the present one begins
    for low, high, array, index in spans:
        before = [each for each in before if each[1] > low]
        for *_, other, number in before:
            if _share_memory(array, other):
                return number, index
        before.append((low, high, array, index))
    return None


class _Extent:
    """Where elements lie, for numpy to compute with; it is never read, so it may lie on any device."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
        }


def _reach(place: Any) -> tuple[int, int, Array]:
    """The first address of an array or tensor that is not empty, the one behind its last, and its extent."""
    if isinstance(place, np.ndarray):
        address, strides, itemsize = place.__array_interface__["data"][0], place.strides, place.itemsize
    else:
        itemsize = place.element_size()
        address, strides = place.data_ptr(), tuple(step * itemsize for step in place.stride())
    shape = tuple(place.shape)
    spans = [stride * (size - 1) for stride, size in zip(strides, shape, strict=True)]
    low = address + sum(span for span in spans if span < 0)
    high = address + sum(span for span in spans if span > 0) + itemsize
    return low, high, np.asarray(_Extent(address, shape, strides, itemsize))


def _share_memory(one: Array, other: Array) -> bool:
    try:
        # numpy declares only the two extreme values
        return np.shares_memory(one, other, max_work=_MAX_WORK)  # type: ignore[arg-type]
    except RuntimeError:  # numpy's TooHardError: as for one tensor, a layout that is too strange is refused
        return True
