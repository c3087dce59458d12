"""Bring the blocks of sharded states to the ranks that own and keep them in a view, before any step begins in it.

It comes after the replicated state is one on all ranks (synchronisation.py), and with it the record of each sharded
state (pieces.py): so all ranks know the digest of every block as of the last committed step.

    looked     each rank compares what it holds with the record, whatever it is from: a former owner, a copy that it
               keeps, a transfer that broke
    told       a bit for each block that is right here                              all ranks, once
    heard      a digest of what was told, as this rank has heard it                 all ranks, once
    planned    who gives which block to whom (`quicoll.state.layout.moves`): the same on all ranks
    read       blocks that nobody holds, from the user's `read`, for the step that the record is of: by each rank that
               is to keep one, and where one of these cannot, by any that can (reading.py). Taken only with the digest
               of the record. Told and planned again then: a block that still nobody has is ShardLost, on all ranks
    renewed    or zeros on all that are to keep it, where its user asked for that (`Sharded(renew=True)`): until the
               next commit, which gives all blocks new values; the record is not touched. So a view that fails after
               some ranks have renewed leaves what there was, and in the next one the block is looked for again
    moved      each pair of ranks with something to move has a transfer of its own (transfer.py), all at once: a rank
               gets from many and gives to many. Memory is kept when it breaks; the next one fetches what is missing
    together   nobody goes on before all blocks are in their place

A view that shows a spare (`Member.spare`) ends before this: its state comes to no place in it.

In a view that is there for ranks to hand over what they own before they leave (`View.parting`) these own nothing
afterwards, and the others wait for the next view.

A state of which no step has given values has no record. At the very start, after step 0, each rank reads what it is to
keep itself, and nothing is told. A job that goes on from a checkpoint has its blocks looked for on all ranks' disks:

    read       by each rank what it is to keep, where one cannot, by any that can, for the step of the state that all
               ranks have by now, the newest that any of them has loaded (reading.py)
    told       only where one cannot: what each rank has                            all ranks
    planned    as above; a block that nobody has is ShardLost, on all ranks         the same on all ranks
    said       by each giver, a digest of each block that it gives                  all ranks
    moved      as above, against these digests

Invariants. A block counts only with the digest that its owner told in the vote of the step that gave it: never of an
aborted or an older step, and never zeros, but where these were asked for and all ranks know that it is nowhere. Before
any step has given values it is what a rank has read for the step of the state; where two ranks give one block to
others, both have read the same. Nothing that is right is given up here; so a view that fails on the way, at any point,
leaves as much as there was.

    failure                                   what follows
    a rank is lost, or killed                 the view ends; the next one begins at the top, with what has arrived
    a block's owner and all its copies lost   `read`, on any rank; else zeros, where asked for, or ShardLost on all
                                              ranks. The view stays; entered again it is tried again, and where the lost
                                              node comes back, found
    a begin finds a block on no rank's disk   the same
    two ranks have read the same block, and   Diverged on all ranks: checkpoints of one step that are not one; nobody
    not the same bits                         knows which is right
    a rank tells one and another things       Corrupted, before anything follows from it
    bytes that are not the block's            Corrupted by the transfer; they are in no block
    `read` raises                             as if it had not the block: logged where it happened; at the very start it
                                              is raised there
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.errors import Diverged, ShardLost
from quicoll.state.chunks import DIGEST_BYTES
from quicoll.state.comparison import heard_alike
from quicoll.state.layout import Layout, moves
from quicoll.state.manifest import TensorRecord
from quicoll.state.reading import PlacedState, bits_told, read_anywhere
from quicoll.state.sharded import layout_in
from quicoll.state.transfer import all_done, together, transfer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quicoll.collectives.group import Group
    from quicoll.membership.view import View
    from quicoll.state.layout import Move
    from quicoll.state.sharded import ShardedSet

__all__ = ["redistribute"]

log = logging.getLogger("quicoll")

_Digests = Mapping[tuple[int, str, int], tuple[bytes, ...]]
"""By giver, state and block, what a block's parts are to be."""


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
        Diverged: Ranks have read different things for one block. Every rank raises it.
        LocalError: `read` is missing, or does not give what it has to, for the step at which this job begins.
        PeerError: A rank was lost.
        Corrupted: A rank was told something else than the others; or a block came with other bits than were agreed.
        Exception: What `read` raises where the job begins with step 0.
    """
    if all(member.node in view.parting for member in view.members):
        return 0  # nobody stays who could be given anything
    work = [PlacedState(name, state, layout_in(view, state.pieces.spec)) for name, state in states]
    agreed = [each for each in work if each.pieces.agreed]
    came = await _gathered(agreed, states, group, view) if agreed else 0
    for each in work:
        if not each.pieces.agreed:
            each.pieces.read_for(each.pieces.since)
            if not each.pieces.since:
                await each.begin(group.rank)
    resumed = [each for each in work if not each.pieces.agreed and each.pieces.since]
    came += await _resumed(resumed, states, group, view) if resumed else 0
    for each in work:
        each.pieces.settle(each.layout.held(group.rank))
    return came


async def _gathered(work: Sequence[PlacedState], states: ShardedSet, group: Group, view: View) -> int:
    """Get what this rank is to keep, and give what others are to, of states whose blocks were agreed."""
    for each in work:
        await each.look()
    plans, nowhere = _planned(work, await bits_told(group, _held(work), view), view)
    if nowhere and not await read_anywhere(nowhere, group, view):
        plans, nowhere = _planned(work, await bits_told(group, _held(work), view), view)
        for each, blocks in nowhere:
            if not each.pieces.spec.renew:
                raise _lost(each, blocks, view)
        for each, blocks in nowhere:
            _renew(each, blocks, group.rank, view)
    return await _moved(plans, None, states, group, view)


async def _resumed(work: Sequence[PlacedState], states: ShardedSet, group: Group, view: View) -> int:
    """Have what this rank is to keep of states that go on from a checkpoint, whoever's disk it is on."""
    if await read_anywhere([(each, range(each.layout.blocks)) for each in work], group, view):
        return 0
    plans, nowhere = _planned(work, await bits_told(group, _held(work), view), view)
    if nowhere:
        raise _on_no_disk(*nowhere[0], view)
    return await _moved(plans, await _said(plans, group, view), states, group, view)


def _held(work: Sequence[PlacedState]) -> NDArray[Any]:
    return np.concatenate([each.held for each in work])


def _planned(
    work: Sequence[PlacedState], told: Sequence[NDArray[Any]], view: View
) -> tuple[list[tuple[PlacedState, Move]], list[tuple[PlacedState, tuple[int, ...]]]]:
    """Return who gives what, and of each state what nobody has."""
    plans, missing = [], []
    at = 0
    sites = [member.site for member in view.members]
    for each in work:
        here = [row[at : at + each.layout.blocks] for row in told]
        at += each.layout.blocks
        found, nowhere = moves(each.layout, here, sites)
        plans += [(each, move) for move in found]
        if nowhere:
            missing.append((each, nowhere))
    return plans, missing


async def _said(plans: Sequence[tuple[PlacedState, Move]], group: Group, view: View) -> _Digests:
    """Have givers tell what the blocks are that they give, where no step has agreed on that; the same on all ranks."""
    given = list({(move.giver, each.name, move.block): each for each, move in plans}.items())
    mine = [
        each.pieces.spec.digests(each.pieces.parts(block)) for (giver, _, block), each in given if giver == group.rank
    ]
    gathered = await group.all_gather(np.concatenate(mine) if mine else np.empty(0, np.uint8))
    await heard_alike(group, gathered, nodes=view.nodes, view_id=view.view_id)
    flat = np.asarray(gathered).tobytes()
    found: dict[tuple[int, str, int], tuple[bytes, ...]] = {}
    first: dict[tuple[str, int], tuple[int, tuple[bytes, ...]]] = {}
    at = 0
    for (giver, name, block), each in sorted(given, key=lambda item: item[0][0]):  # stable: as each has told its own
        size = len(each.pieces.spec.dtypes) * DIGEST_BYTES
        row = flat[at : at + size]
        at += size
        said = tuple(row[start : start + DIGEST_BYTES] for start in range(0, size, DIGEST_BYTES))
        found[giver, name, block] = said
        other, before = first.setdefault((name, block), (giver, said))
        if before != said:
            raise _differ(each, block, (view.nodes[other], view.nodes[giver]), view)
    return found


async def _moved(
    plans: Sequence[tuple[PlacedState, Move]], said: _Digests | None, states: ShardedSet, group: Group, view: View
) -> int:
    """Move what was planned: against these digests, or those that were agreed. Return how many blocks came here."""
    pairs: dict[tuple[int, int], list[tuple[PlacedState, int]]] = {}
    for each, move in plans:
        pairs.setdefault((move.giver, move.receiver), []).append((each, move.block))
    await all_done(
        [
            _move(giver, receiver, blocks, said, states, group.rank, view)
            for (giver, receiver), blocks in pairs.items()
            if group.rank in (giver, receiver)
        ]
    )
    if pairs:
        await together(group)
    return sum(len(blocks) for (_, receiver), blocks in pairs.items() if receiver == group.rank)


def _run(work: PlacedState, lost: Sequence[int], before: Layout | None) -> tuple[int, int]:
    """The elements of the first run of lost blocks; of one owner, where that is known."""
    last = lost[0]
    while last + 1 in lost and (before is None or before.keepers(last + 1) == before.keepers(lost[0])):
        last += 1
    return work.pieces.spec.bounds(range(lost[0], last + 1))


def _on_no_disk(work: PlacedState, lost: Sequence[int], view: View) -> ShardLost:
    """Say what is missing at a begin: the first run of blocks."""
    pieces = work.pieces
    start, stop = _run(work, lost, None)
    return ShardLost(
        f"elements {start} to {stop} of {work.name!r} ({', '.join(pieces.spec.dtypes)}) as after step {pieces.since}, "
        f"from which the job goes on, can be read on none of {', '.join(view.nodes)}: each has logged why",
        piece=f"{work.name}.{next(iter(pieces.spec.dtypes))}",
        start=start,
        stop=stop,
        nodes=(),
        step=pieces.since,
        view=view.view_id,
    )


def _differ(work: PlacedState, block: int, nodes: tuple[str, str], view: View) -> Diverged:
    pieces = work.pieces
    start, stop = pieces.spec.bounds(range(block, block + 1))
    return Diverged(
        f"elements {start} to {stop} of {work.name!r} as after step {pieces.since} were read with other bits on "
        f"{nodes[0]} than on {nodes[1]}: there are two checkpoints of that step, and nobody knows which is right",
        step=pieces.since,
        view=view.view_id,
        nodes=nodes,
        tensor=f"{work.name}.{next(iter(pieces.spec.dtypes))}",
    )


def _renew(work: PlacedState, lost: Sequence[int], rank: int, view: View) -> None:
    """Begin anew what is nowhere, on the ranks that are to keep it."""
    log.warning("begun anew, as zeros: %s", _lost(work, lost, view).message)
    for block in lost:
        if rank in work.layout.keepers(block):
            work.pieces.renew(block)


def _lost(work: PlacedState, lost: Sequence[int], view: View) -> ShardLost:
    """Say what is missing: the first run of blocks of one owner."""
    pieces = work.pieces
    before = Layout(work.layout.blocks, tuple(range(len(pieces.owners))), work.state.backup)
    start, stop = _run(work, lost, before)
    nodes = tuple(node for place in before.keepers(lost[0]) for node in pieces.owners[place])
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
    giver: int,
    receiver: int,
    blocks: Sequence[tuple[PlacedState, int]],
    said: _Digests | None,
    states: ShardedSet,
    rank: int,
    view: View,
) -> None:
    """One pair's transfer."""
    records: list[TensorRecord] = []
    tensors: list[Any] = []
    for work, block in blocks:
        pieces = work.pieces
        parts = pieces.parts(block) if rank == giver else pieces.place(block)
        start, stop = pieces.spec.bounds(range(block, block + 1))
        digests = pieces.digests_of(block) if said is None else said[giver, work.name, block]
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
            if said is not None:
                work.pieces.keep(block)
            elif not work.pieces.arrived(block):
                raise AssertionError("the transfer has compared every tensor with its digest")
