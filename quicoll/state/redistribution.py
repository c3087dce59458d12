"""Bring the blocks of sharded states to the ranks that own and keep them in a view, before any step begins in it.

It comes after the replicated state is one on all ranks (synchronisation.py), and with it the record of each sharded
state (pieces.py): so all ranks know the digest of every block as of the last committed step.

    looked     each rank compares what it holds with the record, whatever it is from: a former owner, a copy that it
               keeps, a transfer that broke
    told       a bit for each block that is right here                              all ranks, once
    heard      a digest of what was told, as this rank has heard it                 all ranks, once
    planned    who gives which block to whom (`quicoll.state.layout.moves`): the same on all ranks
    read       blocks that nobody holds, by each rank that is to keep one, from the user's `read`, for the step that the
               record is of. Taken only with the digest of the record. Then told who has failed: ShardLost, on all ranks
    moved      each pair of ranks with something to move has a transfer of its own (transfer.py), all at once: a rank
               gets from many and gives to many. Memory is kept when it breaks; the next one fetches what is missing
    together   nobody goes on before all blocks are in their place

A view that shows a spare (`Member.spare`) ends before this: its state comes to no place in it.

In a view that is there for ranks to hand over what they own before they leave (`View.parting`) these own nothing
afterwards, and the others wait for the next view.

A state of which no step has given values has no record. There each rank reads what it is to keep itself, and nothing
is told.

Invariants. A block counts only with the digest that its owner told in the vote of the step that gave it: never zeros,
never of an aborted or an older step. Nothing that is right is given up here; so a view that fails on the way, at any
point, leaves as much as there was.

    failure                                   what follows
    a rank is lost, or killed                 the view ends; the next one begins at the top, with what has arrived
    a block's owner and all its copies lost   `read`; else ShardLost on all ranks. The view stays; entered again it is
                                              tried again, and where the lost node comes back, found
    a rank tells one and another things       Corrupted, before anything follows from it
    bytes that are not the block's            Corrupted by the transfer; they are in no block
    `read` raises                             as if it had not the step: logged where it happened
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.errors import LocalError, ShardLost
from quicoll.numerics.buffers import source
from quicoll.state.comparison import heard_alike
from quicoll.state.layout import moves
from quicoll.state.manifest import TensorRecord
from quicoll.state.sharded import layout_in
from quicoll.state.transfer import all_done, together, transfer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quicoll.collectives.group import Group
    from quicoll.membership.view import View
    from quicoll.state.layout import Layout
    from quicoll.state.pieces import HeldPieces
    from quicoll.state.sharded import Sharded, ShardedSet

__all__ = ["redistribute"]

log = logging.getLogger("quicoll")


async def redistribute(states: ShardedSet, group: Group, view: View) -> int:
    """Bring all blocks to their places in a view. All its ranks call this, with equal records.

    Args:
        states: Of this rank.
        group: All ranks, with operations numbered apart from the user's.
        view: The view.
    Returns:
        How many blocks have come to this rank.
    Raises:
        ShardLost: A block is nowhere. Every rank raises it.
        LocalError: `read` is missing, or does not give what it has to, for the step at which this job begins.
        PeerError: A rank was lost.
        Corrupted: A rank was told something else than the others; or a block came with other bits than were agreed.
    """
    if all(member.node in view.parting for member in view.members):
        return 0  # nobody stays who could be given anything
    work = [_Work(name, state, layout_in(view, state.pieces.spec)) for name, state in states]
    agreed = [each for each in work if each.pieces.agreed]
    for each in work:
        if not each.pieces.agreed:
            await each.begin(group.rank)
    came = await _gathered(agreed, states, group, view) if agreed else 0
    for each in work:
        each.pieces.settle(each.layout.owned(group.rank))
    return came


async def _gathered(work: Sequence[_Work], states: ShardedSet, group: Group, view: View) -> int:
    """Get what this rank is to keep, and give what others are to."""
    told = await _told(group, np.concatenate([await each.look() for each in work]), view)
    plans = []
    missing = []
    at = 0
    sites = [member.site for member in view.members]
    for each in work:
        here = [row[at : at + each.layout.blocks] for row in told]
        at += each.layout.blocks
        found, nowhere = moves(each.layout, here, sites)
        plans.append((each, found))
        missing.append((each, nowhere))
    if any(nowhere for _, nowhere in missing):
        await _read_lost(missing, group, view)
    pairs: dict[tuple[int, int], list[tuple[_Work, int]]] = {}
    for each, found in plans:
        for move in found:
            pairs.setdefault((move.giver, move.receiver), []).append((each, move.block))
    await all_done(
        [
            _move(giver, receiver, blocks, states, group.rank, view)
            for (giver, receiver), blocks in pairs.items()
            if group.rank in (giver, receiver)
        ]
    )
    if pairs:
        await together(group)
    return sum(len(blocks) for (_, receiver), blocks in pairs.items() if receiver == group.rank)


class _Work:
    """One sharded state, and where its blocks are to be."""

    def __init__(self, name: str, state: Sharded, layout: Layout) -> None:
        self.name = name
        self.state = state
        self.layout = layout

    @property
    def pieces(self) -> HeldPieces:
        return self.state.pieces

    async def begin(self, rank: int) -> None:
        """Read what this rank is to keep, where no step has given it values yet."""
        pieces = self.pieces
        pieces.read_for(pieces.since)
        for block in range(self.layout.blocks):
            if rank in self.layout.keepers(block) and not pieces.has(block):
                self._read(block)
                pieces.keep(block)
                await asyncio.sleep(0)

    async def look(self) -> NDArray[Any]:
        """Return for each block whether it is here as it was agreed. The loop runs between any two."""
        found = np.zeros(self.layout.blocks, bool)
        for block in self.pieces.here:
            found[block] = self.pieces.look(block)
            await asyncio.sleep(0)
        return found

    def recovered(self, block: int) -> bool:
        """Read a block that nobody holds; return whether it is what was agreed."""
        where = f"block {block} of {self.name!r}, as after step {self.pieces.since},"
        if self.state.read is None:
            return False
        try:
            self._read(block)
        except Exception as error:  # whatever the user's function says: it has not that step
            log.warning("%s cannot be read: %s: %s", where, type(error).__name__, error)
            return False
        if not self.pieces.arrived(block):
            log.warning("%s was read, and is not what was agreed in that step", where)
            return False
        return True

    def _read(self, block: int) -> None:
        """Put in a block's place what the user's function gives for it; zeros at the very start where there is none."""
        pieces = self.pieces
        spec, step, read = pieces.spec, pieces.since, self.state.read
        start, stop = spec.bounds(range(block, block + 1))
        for (name, dtype), place in zip(spec.dtypes.items(), pieces.place(block), strict=True):
            if read is None and step:
                raise LocalError(
                    f"the state of this rank is after step {step}, and nobody knows what {self.name}.{name} is then: "
                    "give quicoll.Sharded a read="
                )
            if read is None:
                place[:] = 0
                continue
            came = source(read(step, name, start, stop))
            if came.dtype is not dtype or came.flat.size != stop - start:
                raise LocalError(
                    f"read gave {came.flat.size} elements of {came.dtype} for elements {start} to {stop} of "
                    f"{self.name}.{name}, which is of {dtype}"
                )
            place[:] = came.flat


async def _told(group: Group, mine: NDArray[Any], view: View) -> list[NDArray[Any]]:
    """Return what each rank tells of its blocks, the same on all ranks."""
    gathered = await group.all_gather(np.packbits(mine))
    await heard_alike(group, gathered, nodes=view.nodes, view_id=view.view_id)
    rows = np.asarray(gathered).reshape(view.world_size, -1)
    return [np.unpackbits(row, count=len(mine)).astype(bool) for row in rows]


async def _read_lost(missing: Sequence[tuple[_Work, tuple[int, ...]]], group: Group, view: View) -> None:
    """Read blocks that nobody holds. Raises ShardLost on all ranks where one of them is not got."""
    failed = []
    for each, nowhere in missing:
        bad = np.zeros(each.layout.blocks, bool)
        for block in nowhere:
            if group.rank in each.layout.keepers(block):
                bad[block] = not each.recovered(block)
                await asyncio.sleep(0)
        failed.append(bad)
    told = await _told(group, np.concatenate(failed), view)
    bad = np.any(told, axis=0)
    at = 0
    for each, _ in missing:
        lost = [int(block) for block in np.flatnonzero(bad[at : at + each.layout.blocks])]
        at += each.layout.blocks
        if lost:
            raise _lost(each, lost, view)


def _lost(work: _Work, lost: Sequence[int], view: View) -> ShardLost:
    """Say what is missing: the first run of blocks of one owner."""
    pieces = work.pieces
    before = type(work.layout)(work.layout.blocks, tuple(range(len(pieces.owners))), work.state.backup)
    last = lost[0]
    while last + 1 in lost and before.keepers(last + 1) == before.keepers(lost[0]):
        last += 1
    start, stop = pieces.spec.bounds(range(lost[0], last + 1))
    nodes = tuple(pieces.owners[rank] for rank in before.keepers(lost[0]))
    kept, verb = "which owned them", "is not here, or has them no longer"
    if len(nodes) > 1:
        kept, verb = "which owned them or kept a copy", "are not here, or have them no longer"
    return ShardLost(
        f"elements {start} to {stop} of {work.name!r} ({', '.join(pieces.spec.dtypes)}) as after step {pieces.since} "
        f"are nowhere: {', '.join(nodes)}, {kept}, {verb}, and no checkpoint of that step was read",
        piece=f"{work.name}.{next(iter(pieces.spec.dtypes))}",
        start=start,
        stop=stop,
        nodes=nodes,
        step=pieces.since,
        view=view.view_id,
    )


async def _move(
    giver: int, receiver: int, blocks: Sequence[tuple[_Work, int]], states: ShardedSet, rank: int, view: View
) -> None:
    """One pair's transfer."""
    records: list[TensorRecord] = []
    tensors: list[Any] = []
    for work, block in blocks:
        pieces = work.pieces
        parts = pieces.parts(block) if rank == giver else pieces.place(block)
        start, stop = pieces.spec.bounds(range(block, block + 1))
        digests = pieces.digests_of(block)
        for (name, dtype), part, digest in zip(pieces.spec.dtypes.items(), parts, digests, strict=True):
            path = f"{work.name}.{name}[{start}:{stop}]"
            records.append(TensorRecord(path, dtype.storage.name, (stop - start,), "numpy", digest))
            tensors.append(part)
    await transfer(
        states.groups.between(giver, receiver),
        giver=giver,
        receivers=(receiver,),
        records=records,
        tensors=tensors,
        view_id=view.view_id,
    )
    if rank == receiver:
        for work, block in blocks:
            if not work.pieces.arrived(block):
                raise AssertionError("the transfer has compared every tensor with its digest")
