"""What one rank holds of a sharded state: blocks, and the record by which anybody knows them.

    record    of the last committed step that gave the state new values: its number, who owned what then, and a digest
              of each block of each piece. It is replicated: part of what `save` gives, compared and handed over with it
    blocks    what is here: those that this rank owns, those that it keeps for others, and those that it has kept from
              before. A block is of the committed step if, and only if, it has the record's digest

So nobody has to remember which version a block is of, or from whom it came: a stale block has another digest, one that
a cut has left half here as well, and one that comes from a checkpoint is as good as its owner's.

    unagreed   from the start, or a checkpoint that was loaded: no step has given the state values yet. Each owner reads
               its blocks itself, from the user's function `read`; nothing travels
    agreed     a step was committed with new values: the record has their digests

Invariants. Blocks change in one of three ways. `commit`, when a step that gave new values is committed: the blocks are
those values, the copies that came with them, and no others. `arrived`, when a block that was missing is here with the
digest of the record. `renew`, when all ranks have found it nowhere and its user asked for zeros then. No memory of a
block is written while it is one: new values come in new memory. What a commit replaces was of the step before it, and
of no use after it. Everything else stays: blocks that this rank owns no longer are kept until the next commit, since a
view that fails may need them again.

Failure cases. A step that is aborted: its values were never blocks. A commit whose callback fails: the record here is
the old one; it is handed the new one, and finds which of its blocks that describes. A transfer that broke: memory of
the blocks that were coming is kept (`place`), and the next one fetches what is missing in it. A spare's copies
(`offer`) are no blocks either until it has the record and has compared them with it (`look`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.buffers import begun_digest, zeros
from quicoll.numerics.dtypes import DType
from quicoll.state.chunks import DIGEST_BYTES
from quicoll.state.layout import block_start

if TYPE_CHECKING:
    from quicoll.numerics.dtypes import Array

__all__ = ["BlockUpdate", "HeldPieces", "PieceSpec"]


@dataclass(frozen=True, slots=True)
class PieceSpec:
    """What a sharded state is made of; equal on all ranks.

    length: elements of each piece. blocks: into which they are cut. dtypes: of the pieces, by name. backup: further
    ranks that keep each block. renew: whether a block that is nowhere is zeros. by_site: whether the ranks of a site
    compute the same blocks.
    """

    length: int
    blocks: int
    dtypes: Mapping[str, DType]
    backup: int
    renew: bool = False
    by_site: bool = False

    @property
    def text(self) -> str:
        pieces = ", ".join(f"{name}: {dtype}" for name, dtype in self.dtypes.items())
        renew = ", renewed where they are lost" if self.renew else ""
        by_site = ", the same on all ranks of a site" if self.by_site else ""
        return f"{self.length} elements in {self.blocks} blocks of ({pieces}), backup={self.backup}{renew}{by_site}"

    def bounds(self, blocks: range) -> tuple[int, int]:
        """Return the first element of a run of blocks, and the one after its last."""
        return block_start(self.length, self.blocks, blocks.start), block_start(self.length, self.blocks, blocks.stop)

    def elements(self, block: int) -> int:
        start, stop = self.bounds(range(block, block + 1))
        return stop - start

    def empty(self, blocks: range) -> tuple[Array, ...]:
        """Return memory for a run of blocks, one flat array for each piece. Raises LocalError where there is none."""
        start, stop = self.bounds(blocks)
        return tuple(zeros(stop - start, dtype) for dtype in self.dtypes.values())

    def part(self, memory: Sequence[Array], blocks: range, block: int) -> tuple[Array, ...]:
        """Return one block of the memory of a run of them."""
        first = self.bounds(blocks)[0]
        start, stop = self.bounds(range(block, block + 1))
        return tuple(each[start - first : stop - first] for each in memory)

    def digests(self, parts: Sequence[Array]) -> Array:
        """Return the digests of a block, one after the other: those of a tensor's record (manifest.py), as stored."""
        found = []
        for part, dtype in zip(parts, self.dtypes.values(), strict=True):
            digest = begun_digest(DType.parse(dtype.storage.name), (part.size,))
            digest.update(part.view(np.uint8).data)
            found.append(digest.digest())
        return np.frombuffer(b"".join(found), np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    """See the module's head. since: the step, or that of the state with which this process began. owners: the nodes
    that owned blocks when it was committed, in their order, each with its peers; none before. digests: a row for each
    block."""

    since: int
    owners: tuple[tuple[str, ...], ...]
    digests: Array


@dataclass(frozen=True, slots=True, eq=False)
class BlockUpdate:
    """What a step gives the state, and this rank, if it is committed. owners: as in the record. owned: what this rank
    owns, or a peer of it. copies: blocks of others, by number."""

    step: int
    owners: tuple[tuple[str, ...], ...]
    owned: range
    values: tuple[Array, ...]
    copies: Mapping[int, tuple[Array, ...]]
    digests: Array


class HeldPieces:
    """See the module's head.

    Attributes:
        spec: What it is made of.
        owned: The blocks that this rank owns, or a peer of it, as they were laid out last.
        region: Their memory, one flat array for each piece.
    """

    def __init__(self, spec: PieceSpec) -> None:
        self.spec = spec
        self.owned = range(0)
        self.region = spec.empty(self.owned)
        self._record = _Record(0, (), np.zeros((spec.blocks, len(spec.dtypes) * DIGEST_BYTES), np.uint8))
        self._blocks: dict[int, tuple[Array, ...]] = {}
        self._coming: dict[int, tuple[Array, ...]] = {}
        self._read_at: int | None = None  # unagreed: the step for which the blocks here were read

    # -- the record ------------------------------------------------------------------------------------------------

    @property
    def agreed(self) -> bool:
        """Whether a step was committed that gave the state values."""
        return bool(self._record.owners)

    @property
    def since(self) -> int:
        """The step that gave the state its values; that with which this process began, while none has."""
        return self._record.since

    @property
    def owners(self) -> tuple[tuple[str, ...], ...]:
        """The nodes that owned the blocks then, in their order, each with its peers; none before."""
        return self._record.owners

    def digests_of(self, block: int) -> tuple[bytes, ...]:
        """Return the digests that were agreed of a block, one for each piece."""
        row = self._record.digests[block].tobytes()
        return tuple(row[at : at + DIGEST_BYTES] for at in range(0, len(row), DIGEST_BYTES))

    def begin_at(self, step: int) -> None:
        """Take note of the step of the state with which this process begins."""
        if not self.agreed:
            self._record = replace(self._record, since=step)

    def record(self) -> dict[str, Any]:
        """Return the record as part of a state."""
        record = self._record
        owners = "\n".join(map("\t".join, record.owners))
        return {"made_of": self.spec.text, "since": record.since, "owners": owners, "digests": record.digests}

    def take(self, record: Mapping[str, Any]) -> None:
        """Take the record that another rank gave.

        Raises:
            LocalError: It is of a state that is made of other things.
        """
        made_of, digests = record.get("made_of"), record.get("digests")
        if made_of != self.spec.text or not isinstance(digests, np.ndarray):
            raise LocalError(f"the job's is of {made_of}, this rank's of {self.spec.text}")
        owners = tuple(tuple(each.split("\t")) for each in str(record["owners"]).split("\n") if record["owners"])
        self._record = _Record(int(record["since"]), owners, np.array(digests, np.uint8))

    # -- blocks ----------------------------------------------------------------------------------------------------

    @property
    def here(self) -> tuple[int, ...]:
        """The blocks of which there is anything here, right or not, ascending."""
        return tuple(sorted({**self._blocks, **self._coming}))

    def look(self, block: int) -> bool:
        """Return whether a block is here as it was agreed; reads it. One that is here and is not right is dropped."""
        for memory in (self._blocks, self._coming):
            parts = memory.get(block)
            if parts is not None and self._right(block, parts):
                self._blocks[block] = parts
                self._coming.pop(block, None)
                return True
        wrong = self._blocks.pop(block, None)
        if wrong is not None:
            self._coming.setdefault(block, tuple(part.copy() for part in wrong))  # perhaps much of it is right
        return False

    def parts(self, block: int) -> tuple[Array, ...]:
        """Return the memory of a block that is here; not to be written."""
        return self._blocks[block]

    def place(self, block: int) -> tuple[Array, ...]:
        """Return the memory in which a block that is not here is to end. Raises LocalError where there is none."""
        if block not in self._coming:
            self._coming[block] = self.spec.empty(range(block, block + 1))
        return self._coming[block]

    def offer(self, block: int, piece: int, data: Array) -> None:
        """Take bytes that may be one piece of a block that is not here: fresh memory, and nobody's word on it."""
        parts = list(self.place(block))
        parts[piece] = data.view(parts[piece].dtype)
        self._coming[block] = tuple(parts)

    def snapshot(self) -> tuple[Mapping[int, tuple[Array, ...]], Array]:
        """Return the blocks that are here now and the digests that were agreed: what a commit makes of them is not
        in it. A block that is not as agreed may be among them."""
        return self._blocks, self._record.digests

    def arrived(self, block: int) -> bool:
        """Take in that a block was written to its place; return whether it is what was agreed. Only then it is here."""
        if not self._right(block, self._coming[block]):
            return False
        self._blocks[block] = self._coming.pop(block)
        return True

    def read_for(self, step: int) -> bool:
        """Unagreed: return whether what is here was read for this step; if not, it is dropped."""
        if self._read_at != step:
            self._blocks, self._coming, self._read_at = {}, {}, step
        return bool(self._blocks)

    def has(self, block: int) -> bool:
        """Return whether a block is here, without reading it."""
        return block in self._blocks

    def keep(self, block: int) -> None:
        """Unagreed: take what was read to a block's place as it is."""
        self._blocks[block] = self._coming.pop(block)

    def renew(self, block: int) -> None:
        """Make zeros of a block that is nowhere, for the steps of this view.

        The record stays: with it a node that comes back has the block still. In a view that follows before a step has
        given new values it is not as agreed (`look`), so it is looked for again, and renewed where it is not found.
        """
        self._coming.pop(block, None)
        self._blocks[block] = self.spec.empty(range(block, block + 1))

    def settle(self, owned: range) -> None:
        """Lay out what this rank owns now in one piece of memory. All of it is here; nothing is given up."""
        if owned == self.owned and all(self._in_region(block) for block in owned):
            self.owned = owned  # of equal empty runs each has its own place on the axis
            return
        region = self.spec.empty(owned)
        for block in owned:
            parts = self.spec.part(region, owned, block)
            for target, source in zip(parts, self._blocks[block], strict=True):
                target[:] = source
            self._blocks[block] = parts
        self.owned, self.region = owned, region

    def commit(self, update: BlockUpdate) -> None:
        """A step that gave the state values is committed."""
        spec = self.spec
        self._blocks = {block: spec.part(update.values, update.owned, block) for block in update.owned}
        self._blocks.update(update.copies)
        self._coming = {}
        self.owned, self.region = update.owned, update.values
        self._record = _Record(update.step, update.owners, update.digests)

    def _in_region(self, block: int) -> bool:
        parts = self._blocks.get(block)
        own = self.spec.part(self.region, self.owned, block)
        return parts is not None and all(
            mine.ctypes.data == part.ctypes.data for mine, part in zip(own, parts, strict=True)
        )

    def _right(self, block: int, parts: Sequence[Array]) -> bool:
        return bool(np.array_equal(self.spec.digests(parts), self._record.digests[block]))
