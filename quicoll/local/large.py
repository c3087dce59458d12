"""A large call: chunk by chunk through rings. Who gives what to whom, and who reduces, is its `Passage` (passages.py).

A generator that never waits: it yields the stage that it needs of all peers, and goes on when it is asked again.
For each round i of n, in this order:

    what it gives in round i into inputs[i % RING]                              STAGE = base + 2 i + 1
    what the others have given it in round i - 1, copied to the output, or
    reduced with its own, and the result into results[(i - 1) % RING]           STAGE = base + 2 i + 2
    where results of the others are a part of the output: theirs of round i - 2, copied there

A count of its own kind for each round would say the same as STAGE does: all ranks go through the same stages of the
same calls in the same order, so each knows what a value of another's count stands for. That the calls are the same,
and of what sizes, all have compared before a passage begins (small.py).

Why nothing is overwritten that somebody still reads. inputs[i % RING] held round i - RING: it is written when all have
published stage base + 2 (i - RING) + 4, so have used that one; and round 0 when all have published the last stage of
the call before, so have used all of it. results[(i - 1) % RING] held round i - 1 - RING: whoever has published what he
gives in round i - 1, which is waited for, has copied round i - 4, and RING is 4. Results of the call before: whoever
has published the first stage of this one has ended that one.

What is read where it stands is checked after it was used: so a checksum that is right says that nobody has changed it
meanwhile either. What is copied is checked as it stands in the output.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from quicoll.local.layout import RING, STAGE
from quicoll.local.small import Spoiled
from quicoll.numerics.canonical_order import split

if TYPE_CHECKING:
    from quicoll.local.layout import HostMemory
    from quicoll.local.passages import PartTaken, Passage, Reducing
    from quicoll.numerics.dtypes import Array

__all__ = ["canonical_tree", "carry"]


def carry(memory: HostMemory, base: int, passage: Passage) -> Generator[int, None, int]:
    """Carry out a call.

    Args:
        memory: The ranks'.
        base: STAGE of all ranks when it begins.
        passage: Its way.
    Yields:
        The stage that all peers have to have reached before this goes on.
    Returns:
        STAGE of all ranks when it has ended.
    Raises:
        Spoiled: What a peer has written differs from its checksum.
        Exception: What reducing raises.
    """
    layout, n = memory.layout, passage.rounds
    wants = passage.wants
    for i in range(n + 2 if wants else n + 1):
        if i < n:
            if i == 0 or i >= RING:
                yield base if i == 0 else base + 2 * (i - RING) + 4
            for given in passage.gives(i):
                _give(memory, layout.input(i) + given.at, layout.input_sum(i, given.reader), given.values)
            memory.store(STAGE, base + 2 * i + 1)
            passage.keep(i)
        if 1 <= i <= n:
            yield base + 2 * (i - 1) + 1
            for piece in passage.copied(i - 1):
                why = "what it gave differs from its checksum"
                at = layout.input(i - 1) + piece.at
                _copy(memory, piece, at, layout.input_sum(i - 1, piece.reader), why)
            reducing = passage.reducing(i - 1)
            if reducing is not None:
                _reduce(memory, passage, i - 1, reducing)
            memory.store(STAGE, base + 2 * i + 2)
        if wants and i >= 2:
            yield base + 2 * (i - 1) + 2
            for piece in passage.results(i - 2):
                why = "what it has reduced differs from its checksum"
                _copy(memory, piece, layout.result(i - 2), layout.result_sum(i - 2), why)
    return base + 2 * n + 2 if n else base


def _give(memory: HostMemory, at: int, sum_at: int, values: Sequence[Array]) -> None:
    slot = memory.view(memory.rank, at, sum(each.nbytes for each in values))
    end = 0
    for each in values:
        np.copyto(slot[end : end + each.nbytes], each.view(np.uint8))
        end += each.nbytes
    memory.write(sum_at, _sum(slot))


def _copy(memory: HostMemory, piece: PartTaken, at: int, sum_at: int, why: str) -> None:
    target = piece.target.view(np.uint8)
    np.copyto(target, memory.view(piece.writer, at, target.size))
    if memory.read(piece.writer, sum_at, 8) != _sum(target):
        raise Spoiled(piece.writer, why, bits=True)


def _reduce(memory: HostMemory, passage: Passage, i: int, reducing: Reducing) -> None:
    layout, rank = memory.layout, memory.rank
    views: dict[int, Array] = {}
    leaves: list[Array] = []
    for writer, (at, nbytes) in enumerate(reducing.given):
        if writer == rank:
            leaves += reducing.own
        elif nbytes:
            view = views[writer] = memory.view(writer, layout.input(i) + at, nbytes)
            values, each = view.view(passage.storage), reducing.elements
            leaves += [values[start : start + each] for start in range(0, values.size, each)]
    target, slot = reducing.target, None
    if reducing.shown:
        slot = memory.view(rank, layout.result(i), reducing.elements * passage.storage.itemsize)
        target = slot.view(passage.storage) if target is None else target
    if target is None:
        raise AssertionError("a result for nobody")
    passage.reduce(leaves, target)
    for writer, view in views.items():
        if memory.read(writer, layout.input_sum(i, rank), 8) != _sum(view):
            raise Spoiled(writer, "what it gave differs from its checksum", bits=True)
    if slot is not None:
        if reducing.target is not None:
            np.copyto(slot, reducing.target.view(np.uint8))
        memory.write(layout.result_sum(i), _sum(slot))


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
