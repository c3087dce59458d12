"""A large reduction: chunk by chunk through rings, each rank reducing its share of every chunk.

A generator that never waits: it yields the stage that it needs of all peers, and goes on when it is asked again.
For each chunk i of n, in this order:

    own values of chunk i into inputs[i % RING], all but its own share          STAGE = base + 2 i + 1
    own share of chunk i - 1 reduced from all ranks' inputs, into `output`
    and into results[(i - 1) % RING]                                            STAGE = base + 2 i + 2
    the others' shares of chunk i - 2 copied to `output`

A count of its own kind for each chunk would say the same as STAGE does: all ranks go through the same stages of the
same calls in the same order, so each knows what a value of another's count stands for. That the calls are the same is
compared by those who run this, and nothing of the output is used before.

Why nothing is overwritten that somebody still reads. inputs[i % RING] held chunk i - RING: it is written when all have
published their shares of that one. results[(i - 1) % RING] held chunk i - 1 - RING: whoever has published his values of
chunk i - 1, which are waited for, has copied chunk i - 4, and RING is 4. A call begins with rings that nobody reads:
whoever has published its first stage has ended the call before.

What is read where it stands is checked after it was used: so a checksum that is right says that nobody has changed it
meanwhile either. Results are checked as they stand in `output`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from quicoll.local.layout import RING, STAGE
from quicoll.local.small import Spoiled
from quicoll.numerics.canonical_order import split

if TYPE_CHECKING:
    from quicoll.local.layout import HostMemory
    from quicoll.numerics.bundle import Joined
    from quicoll.numerics.dtypes import Array

__all__ = ["Reduce", "canonical_tree", "reduce_in_chunks", "share_out"]

Reduce = Callable[[Sequence["Array"], "Array"], None]
"""Reduces the values of all ranks, in their order, to a result."""


def share_out(count: int, world: int) -> list[tuple[int, int]]:
    """Divide the elements of a chunk between ranks, at multiples of 16.

    Args:
        count: Elements.
        world: Ranks.
    Returns:
        For each rank the first, and the one after the last.
    """
    cuts = [min(count, -(-count * rank // world // 16) * 16) for rank in range(world)] + [count]
    return list(pairwise(cuts))


def reduce_in_chunks(
    memory: HostMemory, base: int, given: Array | Joined, output: Array, reduce: Reduce
) -> Generator[int, None, int]:
    """Carry out a reduction of all ranks' elements.

    Args:
        memory: The ranks'.
        base: STAGE of all ranks when it begins.
        given: This rank's elements, flat.
        output: Gets the result: as many, of the same type.
        reduce: Computes it.
    Yields:
        The stage that all peers have to have reached before this goes on.
    Returns:
        STAGE of all ranks when it has ended.
    Raises:
        Spoiled: What a peer has written differs from its checksum.
        Exception: What `reduce` raises.
    """
    layout, rank, world = memory.layout, memory.rank, memory.layout.world
    itemsize, total = output.dtype.itemsize, given.size
    step = max(layout.chunk // itemsize, 1)
    count = -(-total // step)

    def chunk(i: int) -> tuple[int, int, list[tuple[int, int]]]:
        first = i * step
        size = min(step, total - first)
        return first, size, share_out(size, world)

    for i in range(count + 2):
        if i < count:
            if i >= RING:
                yield base + 2 * (i - RING + 1) + 2
            first, size, parts = chunk(i)
            own = given[first : first + size]
            for reader, (a, b) in enumerate(parts):
                if reader != rank and b > a:
                    slot = memory.view(rank, layout.input(i) + a * itemsize, (b - a) * itemsize)
                    np.copyto(slot, own[a:b].view(np.uint8))
                    memory.write(layout.input_sum(i, reader), _sum(slot))
            memory.store(STAGE, base + 2 * i + 1)
        if 1 <= i <= count:
            yield base + 2 * (i - 1) + 1
            first, size, parts = chunk(i - 1)
            a, b = parts[rank]
            if b > a:
                at, length = layout.input(i - 1) + a * itemsize, (b - a) * itemsize
                views = {peer: memory.view(peer, at, length) for peer in range(world) if peer != rank}
                own = given[first + a : first + b]
                mine = output[first + a : first + b]
                reduce([own if peer == rank else views[peer].view(output.dtype) for peer in range(world)], mine)
                for peer, view in views.items():
                    if memory.read(peer, layout.input_sum(i - 1, rank), 8) != _sum(view):
                        raise Spoiled(peer, "what it gave differs from its checksum", bits=True)
                slot = memory.view(rank, layout.result(i - 1), length)
                np.copyto(slot, mine.view(np.uint8))
                memory.write(layout.result_sum(i - 1), _sum(mine.view(np.uint8)))
            memory.store(STAGE, base + 2 * i + 2)
        if i >= 2:
            yield base + 2 * (i - 1) + 2
            first, size, parts = chunk(i - 2)
            for peer, (a, b) in enumerate(parts):
                if peer == rank or b == a:
                    continue
                target = output[first + a : first + b].view(np.uint8)
                np.copyto(target, memory.view(peer, layout.result(i - 2), target.size))
                if memory.read(peer, layout.result_sum(i - 2), 8) != _sum(target):
                    raise Spoiled(peer, "what it has reduced differs from its checksum", bits=True)
    return base + 2 * count + 2


def _sum(data: Array) -> bytes:
    return xxhash.xxh3_64_intdigest(data.data).to_bytes(8, "little")


class _Leaf(int):
    """A leaf of a tree, by its number: its values are of the tensor's own type."""

    wide = False


@lru_cache(maxsize=64)
def canonical_tree(leaves: int) -> Any:
    """Return the canonical tree over so many leaves, as `reduce_tree` takes it."""

    def node(start: int, stop: int) -> Any:
        if stop - start == 1:
            return _Leaf(start)
        middle = split(start, stop)
        return node(start, middle), node(middle, stop)

    return node(0, leaves)
