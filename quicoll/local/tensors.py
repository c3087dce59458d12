"""`quicoll.empty`: tensors that the other ranks of a host read where they stand. Their memory: arena.py."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from quicoll.errors import LocalError
from quicoll.local.arena import arena_here
from quicoll.numerics.buffers import uninitialised, wrap
from quicoll.numerics.natives import asked_dtype

__all__ = ["empty"]


def empty(shape: int | Sequence[int], dtype: Any) -> Any:
    """Return an array or a tensor of undefined contents, in memory that the other ranks of this host may read.

    A large tensor that an operation is given is copied to where the others of its host see it. One of these they
    reduce, or copy, straight from where it is. So make those with it that are given again and again: the flat gradients
    of a model, or what is broadcast. It makes a difference on one host, for more than 64 KiB of a rank; results have
    the same bits, and it may be used for everything else as any other tensor, as may views of it.

    - As of all tensors, what an operation was given must not change until the operation has ended. Here a change is
      found out by those who read it: they raise Corrupted, which names this rank.
    - In the child of a fork it is the child's own from its first change on, and shows what the parent writes before.
    - `share_memory_()` of torch, pickle and copies give memory of another kind.
    - Memory of another kind is what it returns where the system has none that ranks could share, or where the addresses
      of the process are limited (`ulimit -v`).

    Args:
        shape: Elements in each dimension; an int is one dimension.
        dtype: A torch.dtype, for a tensor; a numpy dtype or its name, for an array. One that operations take.
    Returns:
        A contiguous array or tensor on the host, on a page's border; zero elements are allowed.
    Raises:
        LocalError: It is no type or no shape that there are, or there is no memory for it. Nothing was taken.
    """
    kind, known = asked_dtype(dtype)
    try:
        sizes = (operator.index(shape),) if not isinstance(shape, Sequence) else tuple(map(operator.index, shape))
    except TypeError:
        raise LocalError(f"{shape!r} is no shape; pass an int, or a sequence of them") from None
    if any(size < 0 for size in sizes):
        raise LocalError(f"a shape of {sizes} has dimensions below 0")
    count = math.prod(sizes)
    arena = arena_here() if count else None
    if arena is None:
        return wrap(uninitialised(count, known), known, sizes, kind)
    try:
        memory = arena.take(count * known.itemsize)
    except MemoryError as error:
        raise LocalError(f"there is no memory for {count} elements of {known}: {error}") from error
    return wrap(memory.view(known.storage), known, sizes, kind)
