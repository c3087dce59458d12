"""A large call: chunk by chunk through rings. Who gives what to whom, and who reduces, is its `Passage` (passages.py).

A generator that never waits: it yields the stage that it needs of all peers, and goes on when it is asked again.
In turn i of n + 1, and in one more where results of the others are a part of the output, all peers have done turn
i - 1, and a rank

    writes what it gives in round i into inputs[i % RING]
    copies what the others have given it in round i - 1 to the output, or reduces it with its own, and writes the
    result into results[(i - 1) % RING]
    copies the others' results of round i - 2 to the output
    says so: STAGE = base + i + 1; of turn n + 1 it says nothing

So there is one wait for each round, of all ranks for each other. To wait more often, for each of the three by itself,
would let a rank be ahead by a part of a turn; but where there are more ranks than processors each wait is a change of
processes, and the memory that a longer ring takes does more as longer rounds (docs/performance.md). All ranks go
through the same stages of the same calls in the same order, so each knows what a value of another's STAGE stands for.
That the calls are the same, and of what sizes, all have compared before a passage begins (small.py).

Why nothing is overwritten that somebody still reads. In turn i of a rank each other one has done turn i - 1 and has not
begun turn i + 1, so it is in turn i, or between two. There it reads inputs of round i - 1 and results of round i - 2,
while inputs of round i and results of round i - 1 are written; and RING is 2. Between calls: inputs are first written
in turn 0, which all peers begin with base, the last stage of the call before: its inputs have all been used. Results
are first written in turn 1, when all peers have done turn 0, so have ended the call before.

What is read where it stands is checked after it was used: so a checksum that is right says that nobody has changed it
meanwhile either. What is copied is checked as it stands in the output. Both are done block by block, while the block is
in the processor's cache: memory is what a large call takes its time for.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import xxhash

from quicoll.local.layout import STAGE
from quicoll.local.small import Spoiled
from quicoll.numerics.canonical_order import split

if TYPE_CHECKING:
    from quicoll.local.layout import HostMemory
    from quicoll.local.passages import PartTaken, Passage, Reducing
    from quicoll.numerics.dtypes import Array

    Digest: TypeAlias = xxhash.xxh3_64

__all__ = ["canonical_tree", "carry"]


_BLOCK = 256 << 10  # bytes


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
    if not n:
        return base
    for i in range(n + 2 if passage.wants else n + 1):
        yield base + i
        if i < n:
            for given in passage.gives(i):
                _give(memory, layout.input(i) + given.at, layout.input_sum(i, given.reader), given.values)
        if 1 <= i <= n:
            for piece in passage.copied(i - 1):
                why = "what it gave differs from its checksum"
                at = layout.input(i - 1) + piece.at
                _copy(memory, piece, at, layout.input_sum(i - 1, piece.reader), why)
            reducing = passage.reducing(i - 1)
            if reducing is not None:
                _reduce(memory, passage, i - 1, reducing)
        if i >= 2 and passage.wants:
            for piece in passage.results(i - 2):
                why = "what it has reduced differs from its checksum"
                _copy(memory, piece, layout.result(i - 2), layout.result_sum(i - 2), why)
        if i <= n:
            memory.store(STAGE, base + i + 1)
        if i < n:
            passage.keep(i)
    return base + n + 1


def _give(memory: HostMemory, at: int, sum_at: int, values: Sequence[Array]) -> None:
    slot, end = memory.view(memory.rank, at, sum(each.nbytes for each in values)), 0
    digest = xxhash.xxh3_64()
    for each in values:
        _copy_summed(slot[end : end + each.nbytes], each.view(np.uint8), digest)
        end += each.nbytes
    memory.write(sum_at, _sum(digest))


def _copy(memory: HostMemory, piece: PartTaken, at: int, sum_at: int, why: str) -> None:
    target, digest = piece.target.view(np.uint8), xxhash.xxh3_64()
    _copy_summed(target, memory.view(piece.writer, at, target.size), digest)
    if memory.read(piece.writer, sum_at, 8) != _sum(digest):
        raise Spoiled(piece.writer, why, bits=True)


def _copy_summed(target: Array, source: Array, digest: Digest) -> None:
    """Copy bytes, and add to a checksum what has come to stand there, block by block: out of the processor's cache."""
    for start in range(0, target.size, _BLOCK):
        into = target[start : start + _BLOCK]
        np.copyto(into, source[start : start + _BLOCK])
        digest.update(into.data)


def _reduce(memory: HostMemory, passage: Passage, i: int, reducing: Reducing) -> None:
    layout, rank, itemsize = memory.layout, memory.rank, passage.storage.itemsize
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
        slot = memory.view(rank, layout.result(i), reducing.elements * itemsize)
        target = slot.view(passage.storage) if target is None else target
    if target is None:
        raise AssertionError("a result for nobody")
    digests = {writer: xxhash.xxh3_64() for writer in views}
    digest, result = xxhash.xxh3_64(), target.view(np.uint8)
    # Of one leaf the bytes of some elements are the next ones of the view.
    in_order = [writer for writer, view in views.items() if view.size == reducing.elements * itemsize]

    def after(a: int, b: int) -> None:
        start, stop = a * itemsize, b * itemsize
        for writer in in_order:
            digests[writer].update(views[writer][start:stop].data)
        if slot is not None:
            shown = slot[start:stop]
            if reducing.target is not None:
                np.copyto(shown, result[start:stop])
            digest.update(shown.data)

    passage.reduce(leaves, target, after)
    for writer, view in views.items():
        if writer not in in_order:
            digests[writer].update(view.data)
        if memory.read(writer, layout.input_sum(i, rank), 8) != _sum(digests[writer]):
            raise Spoiled(writer, "what it gave differs from its checksum", bits=True)
    if slot is not None:
        memory.write(layout.result_sum(i), _sum(digest))


def _sum(digest: Digest) -> bytes:
    return digest.intdigest().to_bytes(8, "little")


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
