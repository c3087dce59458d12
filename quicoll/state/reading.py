"""Blocks that no rank holds, read from where their user has them: his function `read`, on whatever rank can.

At the beginning of a job that goes on from a checkpoint these are all blocks; later those that were lost with the ranks
that held them. Where each rank has a disk of its own, what one is to keep may be on another one's alone: ranks are more
or fewer than those that wrote it, a node was replaced and its disk is empty, a file is damaged. So

    by keepers  each rank reads what it is to keep; then told what it cannot, a bit for each block          all ranks
    index       where anything is missing: what `read` needs to find pieces on a disk (`PieceIndex`: a checkpoint's
                manifest) goes to the ranks that have none, of what is there the one that most have         all ranks
    by all      each rank reads whatever is missing and is not here, whoever is to keep it

and the caller (redistribution.py) has told again who holds what, and moves it as any block. What was read for others
stays until the next commit, as blocks that a rank no longer owns do.

Invariants. Who reads what follows from what all ranks have heard alike. A block that was agreed in a step is taken with
its digest alone; one that no step has given yet as `read` gives it, which has compared it with what was saved.

    failure                                   what follows
    `read` raises                             it has not that block: logged, the first of each state; another rank's is
                                              looked for
    `read` gives other elements or types      at a begin LocalError, the program is wrong; of a lost block as if it had
                                              raised
    an index that cannot be understood        logged; that rank reads what it can without it
    a rank tells one and another things       Corrupted, before anything follows from it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.errors import LocalError, PeerError
from quicoll.numerics.buffers import begun_digest, source
from quicoll.numerics.dtypes import DType
from quicoll.state.comparison import heard_alike
from quicoll.state.manifest import TensorRecord
from quicoll.state.sharded import MAX_INDEX_BYTES
from quicoll.state.transfer import together, transfer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quicoll.collectives.group import Group
    from quicoll.membership.view import View
    from quicoll.state.layout import Layout
    from quicoll.state.pieces import HeldPieces
    from quicoll.state.sharded import Sharded

__all__ = ["PlacedState", "bits_told", "read_anywhere"]

log = logging.getLogger("quicoll")

_BYTES = DType.parse("uint8")


class _NotHere(Exception):
    """`read` has not that block."""


class PlacedState:
    """One sharded state, and where its blocks are to be.

    Attributes:
        name: Its name.
        state: What it is.
        layout: Who owns and keeps what.
    """

    def __init__(self, name: str, state: Sharded, layout: Layout) -> None:
        self.name = name
        self.state = state
        self.layout = layout
        self._trouble = ""

    @property
    def pieces(self) -> HeldPieces:
        """What is held here."""
        return self.state.pieces

    @property
    def held(self) -> NDArray[Any]:
        """Whether each block is here; after `look`, or at a begin."""
        return np.array([self.pieces.has(block) for block in range(self.layout.blocks)], bool)

    def kept_by(self, rank: int) -> list[int]:
        """Return the blocks that a rank is to keep."""
        return [block for block in range(self.layout.blocks) if rank in self.layout.keepers(block)]

    async def look(self) -> NDArray[Any]:
        """Return for each block whether it is here as it was agreed. The loop runs between any two."""
        found = np.zeros(self.layout.blocks, bool)
        for block in self.pieces.here:
            found[block] = self.pieces.look(block)
            await asyncio.sleep(0)
        return found

    async def begin(self, rank: int) -> None:
        """Read what this rank is to keep where the job has just begun: from step 0, which needs no checkpoint.

        Raises:
            LocalError: `read` does not give what it has to.
            Exception: What `read` raises.
        """
        for block in self.kept_by(rank):
            if not self.pieces.has(block):
                try:
                    self._read(block)
                except _NotHere as error:
                    raise error.__cause__ or error from None
                self.pieces.keep(block)
                await asyncio.sleep(0)

    async def read(self, blocks: Sequence[int]) -> None:
        """Read blocks as far as they can be read here. The loop runs between any two.

        Raises:
            LocalError: At a begin: `read` is missing, or does not give what it has to.
        """
        for block in blocks:
            self._take(block)
            await asyncio.sleep(0)
        if self._trouble:
            log.warning("%s", self._trouble)
            self._trouble = ""

    def _take(self, block: int) -> None:
        pieces = self.pieces
        try:
            self._read(block)
        except _NotHere as error:
            self._trouble = self._trouble or f"{self._where(block)} cannot be read here: {error}"
            return
        except LocalError as error:
            if not pieces.agreed:
                raise
            self._trouble = self._trouble or f"{self._where(block)} cannot be read here: {error}"
            return
        if not pieces.agreed:
            pieces.keep(block)
        elif not pieces.arrived(block):
            self._trouble = (
                self._trouble or f"{self._where(block)} was read here, and is not what was agreed in that step"
            )

    def _where(self, block: int) -> str:
        return f"block {block} of {self.name!r}, as after step {self.pieces.since},"

    def _read(self, block: int) -> None:
        """Put in a block's place what the user's function gives for it; zeros at the very start where there is none."""
        pieces = self.pieces
        spec, step, read = pieces.spec, pieces.since, self.state.read
        if read is None and step:
            raise LocalError(
                f"the state of this rank is after step {step}, and nobody knows what {self.name}."
                f"{next(iter(spec.dtypes))} is then: give quicoll.Sharded a read="
            )
        start, stop = spec.bounds(range(block, block + 1))
        for (name, dtype), place in zip(spec.dtypes.items(), pieces.place(block), strict=True):
            if read is None:
                place[:] = 0
                continue
            try:
                given = read(step, name, start, stop)
            except Exception as error:  # whatever the user's function says: it has not that
                raise _NotHere(f"{type(error).__name__}: {error}") from error
            came = source(given)
            if came.dtype is not dtype or came.flat.size != stop - start:
                raise LocalError(
                    f"read gave {came.flat.size} elements of {came.dtype} for elements {start} to {stop} of "
                    f"{self.name}.{name}, which is of {dtype}"
                )
            place[:] = came.flat


async def bits_told(group: Group, mine: NDArray[Any], view: View) -> list[NDArray[Any]]:
    """Return the bits that each rank tells, the same on all ranks.

    Args:
        group: All ranks.
        mine: This rank's; as many on all.
        view: The view.
    Raises:
        Corrupted: A rank was told something else than another.
        PeerError: A rank was lost.
    """
    gathered = await group.all_gather(np.packbits(mine))
    await heard_alike(group, gathered, nodes=view.nodes, view_id=view.view_id)
    rows = np.asarray(gathered).reshape(view.world_size, -1)
    return [np.unpackbits(row, count=len(mine)).astype(bool) for row in rows]


async def read_anywhere(wanted: Sequence[tuple[PlacedState, Sequence[int]]], group: Group, view: View) -> bool:
    """Have blocks read on the ranks that are to keep them; where one of these cannot, on all that can.

    Args:
        wanted: Of each state the blocks; the same on all ranks.
        group: All ranks.
        view: The view.
    Returns:
        Whether all ranks have read what they are to keep of these. Otherwise every rank has read what it can.
    Raises:
        LocalError: At a begin: `read` is missing, or does not give what it has to.
        Corrupted: A rank was told something else than another.
        PeerError: A rank was lost.
    """
    lacking = []
    for each, blocks in wanted:
        mine = [block for block in blocks if group.rank in each.layout.keepers(block)]
        await each.read([block for block in mine if not each.pieces.has(block)])
        lacks = np.zeros(each.layout.blocks, bool)
        lacks[[block for block in mine if not each.pieces.has(block)]] = True
        lacking.append(lacks)
    missing = np.any(await bits_told(group, np.concatenate(lacking), view), axis=0)
    if not missing.any():
        return True
    at = 0
    for each, _ in wanted:
        blocks = [int(block) for block in np.flatnonzero(missing[at : at + each.layout.blocks])]
        at += each.layout.blocks
        if blocks:
            await _indexed(each, group, view)
            await each.read([block for block in blocks if not each.pieces.has(block)])
    return False


async def _indexed(each: PlacedState, group: Group, view: View) -> None:
    """Give the index of a state's pieces to the ranks that have none, from one that has."""
    index, step = each.state.index, each.pieces.since
    data = np.frombuffer((index.of_step(step) if index is not None else None) or b"", np.uint8)
    digest = begun_digest(_BYTES, (data.size,))
    digest.update(data.data)
    mine = np.array([data.size, *np.frombuffer(digest.digest(), np.int64)], np.int64)
    gathered = await group.all_gather(mine)
    await heard_alike(group, gathered, nodes=view.nodes, view_id=view.view_id)
    told = [tuple(int(number) for number in row) for row in np.asarray(gathered).reshape(view.world_size, -1)]
    having = [row for row in told if row[0]]
    if not having or len(having) == len(told):
        return
    chosen = max(having, key=having.count)  # of equals that of the lowest rank
    giver, size = told.index(chosen), chosen[0]
    if not 0 < size <= MAX_INDEX_BYTES:
        raise PeerError(
            f"tells of an index of {size} bytes for {each.name!r}",
            rank=giver,
            node=view.nodes[giver],
            view=view.view_id,
        )
    memory = data if data.size else np.empty(size, np.uint8)
    lacking = tuple(rank for rank, row in enumerate(told) if not row[0])
    record = TensorRecord(f"index of {each.name}", "uint8", (size,), "numpy", np.array(chosen[1:], np.int64).tobytes())
    if group.rank == giver or group.rank in lacking:
        await transfer(group, giver=giver, receivers=lacking, records=[record], tensors=[memory], view_id=view.view_id)
    await together(group)
    if group.rank in lacking and index is not None:
        try:
            index.take(step, memory.tobytes())
        except Exception as error:  # whatever the user's says
            log.warning("%r as after step %s has an index that cannot be used here: %s", each.name, step, error)
