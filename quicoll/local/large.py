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

Lent. What a rank gives to one reader, or to all, and has in one piece in its arena (arena.py), it does not write into
the ring. It makes the checksum, and says in the record beside it where it stands:

    0            in the ring
    a place      in the arena: lent. The rank's call does not end before all its peers have done turn n, and with it all
                 their reading; so until then the tensor is not its caller's again
    WITHDRAWN    the rank has given up the call, and its caller may change the tensor. That is written before he hears
                 of it, so a reader who has met with other bytes than the checksum's sees it when he looks once more. It
                 blames nobody then, and goes on with nothing: the view is over, of which it hears as of any end

A rank that is killed changes nothing any more. Whoever changes his tensor during the call is named by its readers,
where the ring would have carried the one or the other without a word.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import xxhash

from quicoll.local.layout import RECORD, STAGE, WITHDRAWN
from quicoll.local.small import Spoiled
from quicoll.numerics.canonical_order import split

if TYPE_CHECKING:
    from quicoll.local.layout import HostMemory
    from quicoll.local.passages import PartTaken, Passage, Reducing
    from quicoll.numerics.dtypes import Array

    Digest: TypeAlias = xxhash.xxh3_64

__all__ = ["canonical_tree", "carry"]


_BLOCK = 256 << 10  # bytes
_NEVER: Final = 1 << 64  # a stage that no rank reaches


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
    n = passage.rounds
    if not n:
        return base
    lent: dict[int, None] = {}  # where the records stand of what may be read in our arena
    through = False
    try:
        for i in range(n + 2 if passage.wants else n + 1):
            yield base + i
            if i < n:
                _give(memory, passage, i, lent)
            if 1 <= i <= n and not _use(memory, passage, i - 1):
                while True:
                    yield _NEVER
            if i >= 2 and passage.wants:
                for piece in passage.results(i - 2):
                    _copy_result(memory, piece, i - 2)
            if i <= n:
                memory.store(STAGE, base + i + 1)
            if i < n:
                passage.keep(i)
        if lent and not passage.wants:
            yield base + n + 1
        through = True
    finally:
        if not through:
            for at in lent:
                memory.withdraw(at)
    return base + n + 1


def _give(memory: HostMemory, passage: Passage, i: int, lent: dict[int, None]) -> None:
    """Give what this rank gives in round i, and write down what of it is lent."""
    layout = memory.layout
    for given in passage.gives(i):
        digest = xxhash.xxh3_64()
        place = memory.place(given.values[0]) if len(given.values) == 1 else 0
        if place:
            values = given.values[0].view(np.uint8)
            for start in range(0, values.size, _BLOCK):
                digest.update(values[start : start + _BLOCK].data)
        else:
            end = 0
            slot = memory.view(memory.rank, layout.input(i) + given.at, sum(each.nbytes for each in given.values))
            for each in given.values:
                _copy_summed(slot[end : end + each.nbytes], each.view(np.uint8), digest)
                end += each.nbytes
        record = layout.input_record(i, given.reader)
        memory.write(record, _sum(digest) + place.to_bytes(8, "little"))
        if place:
            lent[record] = None
        else:
            lent.pop(record, None)


def _use(memory: HostMemory, passage: Passage, i: int) -> bool:
    """Use what the others give in round i. Return False where one of them has given up."""
    for piece in passage.copied(i):
        given = _Given.read(memory, i, piece.writer, piece.reader, piece.at, piece.target.nbytes)
        if given is None:
            return False
        digest = xxhash.xxh3_64()
        _copy_summed(piece.target.view(np.uint8), given.bytes, digest)
        if not given.stands(memory, digest):
            return False
    reducing = passage.reducing(i)
    return reducing is None or _reduce(memory, passage, i, reducing)


class _Given:
    """What a rank gives in a round, where it stands. bytes: of it."""

    __slots__ = ("_at", "_place", "_sum", "_writer", "bytes")

    def __init__(self, writer: int, at: int, checksum: bytes, place: int, values: Array) -> None:
        self.bytes = values
        self._writer, self._at, self._sum, self._place = writer, at, checksum, place

    @classmethod
    def read(cls, memory: HostMemory, i: int, writer: int, reader: int, at: int, nbytes: int) -> _Given | None:
        """Look where it is. Return None where its writer has given up. Raises Spoiled where it cannot be.

        Args:
            memory: The ranks'.
            i: The round.
            writer: Whose it is.
            reader: For whom.
            at: Bytes from the start of the chunk.
            nbytes: How many.
        """
        record_at = memory.layout.input_record(i, reader)
        record = memory.read(writer, record_at, RECORD)
        place = int.from_bytes(record[8:], "little")
        if place == WITHDRAWN:
            return None
        if place:
            found = memory.lent(writer, place, nbytes)
            if found is None:
                raise Spoiled(writer, f"lends {nbytes} bytes at {place}, where it has none", bits=False)
        else:
            found = memory.view(writer, memory.layout.input(i) + at, nbytes)
        return cls(writer, record_at, record[:8], place, found)

    def stands(self, memory: HostMemory, digest: Digest) -> bool:
        """Return True where its checksum is that of what was used, False where its writer has given up meanwhile.
        Raises Spoiled."""
        if self._sum == _sum(digest):
            return True
        if not self._place:
            raise Spoiled(self._writer, "what it gave differs from its checksum", bits=True)
        record = memory.read(self._writer, self._at, RECORD)
        if int.from_bytes(record[8:], "little") == WITHDRAWN:
            return False
        why = "what it lent, a tensor of quicoll.empty, is not what it was: was it changed before the call had ended?"
        raise Spoiled(self._writer, why, bits=True)


def _copy_result(memory: HostMemory, piece: PartTaken, i: int) -> None:
    target, digest = piece.target.view(np.uint8), xxhash.xxh3_64()
    _copy_summed(target, memory.view(piece.writer, memory.layout.result(i) + piece.at, target.size), digest)
    if memory.read(piece.writer, memory.layout.result_sum(i), 8) != _sum(digest):
        raise Spoiled(piece.writer, "what it has reduced differs from its checksum", bits=True)


def _copy_summed(target: Array, source: Array, digest: Digest) -> None:
    """Copy bytes, and add to a checksum what has come to stand there, block by block: out of the processor's cache."""
    for start in range(0, target.size, _BLOCK):
        into = target[start : start + _BLOCK]
        np.copyto(into, source[start : start + _BLOCK])
        digest.update(into.data)


def _reduce(memory: HostMemory, passage: Passage, i: int, reducing: Reducing) -> bool:
    """Reduce what all give in round i. Return False where one of them has given up."""
    layout, rank, itemsize = memory.layout, memory.rank, passage.storage.itemsize
    given: dict[int, _Given] = {}
    leaves: list[Array] = []
    for writer, (at, nbytes) in enumerate(reducing.given):
        if writer == rank:
            leaves += reducing.own
        elif nbytes:
            found = _Given.read(memory, i, writer, rank, at, nbytes)
            if found is None:
                return False
            given[writer] = found
            values, many = found.bytes.view(passage.storage), reducing.elements
            leaves += [values[start : start + many] for start in range(0, values.size, many)]
    target, slot = reducing.target, None
    if reducing.shown:
        slot = memory.view(rank, layout.result(i), reducing.elements * itemsize)
        target = slot.view(passage.storage) if target is None else target
    if target is None:
        raise AssertionError("a result for nobody")
    digests = {writer: xxhash.xxh3_64() for writer in given}
    digest, result = xxhash.xxh3_64(), target.view(np.uint8)
    # Of one leaf the bytes of some elements are the next ones of the view.
    in_order = [writer for writer, each in given.items() if each.bytes.size == reducing.elements * itemsize]

    def after(a: int, b: int) -> None:
        start, stop = a * itemsize, b * itemsize
        for writer in in_order:
            digests[writer].update(given[writer].bytes[start:stop].data)
        if slot is not None:
            shown = slot[start:stop]
            if reducing.target is not None:
                np.copyto(shown, result[start:stop])
            digest.update(shown.data)

    passage.reduce(leaves, target, after)
    for writer, each in given.items():
        if writer not in in_order:
            digests[writer].update(each.bytes.data)
        if not each.stands(memory, digests[writer]):
            return False
    if slot is not None:
        memory.write(layout.result_sum(i), _sum(digest))
    return True


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
