"""Copies of blocks on a spare that is kept warm: what the place that it will get owns and keeps, as of each step.

The ranks of a view stand in the order of their hints and names, and so does whoever comes. So a spare that stands after
k of the present ranks, as the coordinator tells it (`Member.place`), gets place k, or k-1 where one before it is lost
(`next_places`); with as many ranks as before, each place owns and keeps what it does now. So of every sharded state
with `backup` of 1 or more the spare gets the blocks of these two places from their owners, which are `backup + 2` of
the ranks; as the last in order it has one place to expect, and `backup + 1` owners. That is what a backup costs, for so
many of the ranks; the others send nothing. With `backup=0` it gets none: copies were not asked for.

    shown       in the view with the spare all ranks make the same list of what each owner has (`places`); each takes
                the spare before it says a word in that view, so before the spare can ask
    standing    at each entry of a step a rank publishes its blocks as of the last committed one; the spare asks the
    by          owners that it needs for what has become another, and puts it where a transfer that broke would leave
                it (`HeldPieces.offer`)
    at work     when it has the place, the record of the job's last step comes with the replicated state, and a block
                counts if it has the record's digest; what is missing or older comes as for any rank (redistribution.py)

So nothing depends on these copies but time: a spare that was given wrong bytes, or those of an earlier step, or half of
them, fetches them again.

    failure                                            what follows
    an owner is lost, leaves, or owns others now       the spare says that it learns no more, and is shown again
    an owner has come after the spare was shown        it knows of no spare: what it owns comes when the place is taken
    more ranks are lost at once than spares come       bounds are others, and most of the blocks come as for any rank
    two ranks are lost, or two spares come, at once    places are others by one or two, and part of the blocks comes so

Invariants. Only memory of committed blocks is sent. A spare writes nothing but its own fresh memory, on its caller's
loop, and not after its wait is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from quicoll.engine.block_lessons import BlockSupply
from quicoll.state.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quicoll.engine.block_lessons import BlockTraffic
    from quicoll.engine.runtime import Runtime
    from quicoll.membership.view import View
    from quicoll.numerics.dtypes import Array
    from quicoll.state.rank_state import RankState
    from quicoll.state.sharded import Sharded, ShardedSet

__all__ = ["BlockGiver", "Places", "next_places", "places", "receive_blocks", "wanted"]


@dataclass(frozen=True, slots=True)
class Places:
    """What one owner gives a spare.

    Attributes:
        owner: Its rank in the view in which the spare was shown.
        runs: Of each state, by name, the blocks.
        order: Of each place the state, the block, and the number of its piece.
        sizes: Bytes of each place.
        made_of: A digest of all that.
    """

    owner: int
    runs: Mapping[str, range]
    order: tuple[tuple[str, int, int], ...]
    sizes: tuple[int, ...]
    made_of: bytes


def places(states: ShardedSet, workers: int) -> tuple[Places, ...]:
    """Return what each rank owns of which there are copies, by rank; the same on all ranks.

    Args:
        states: Of any of them.
        workers: How many ranks the view has, without spares.
    """
    found = []
    for owner in range(workers):
        runs: dict[str, range] = {}
        order, sizes, said = [], [], xxhash.xxh3_128(f"{workers} {owner}".encode())
        for name, state in states:
            spec = state.pieces.spec
            layout = _layout(state, workers)
            if not layout.copies or spec.by_site:  # what a spare will have depends on its site then
                continue
            runs[name] = layout.owned(owner)
            said.update(f"\n{name} {spec.text}".encode())
            for block in runs[name]:
                for piece, dtype in enumerate(spec.dtypes.values()):
                    order.append((name, block, piece))
                    sizes.append(spec.elements(block) * dtype.storage.itemsize)
        if order:
            found.append(Places(owner, runs, tuple(order), tuple(sizes), said.digest()))
    return tuple(found)


def next_places(view: View, spare: str) -> tuple[int, ...]:
    """Return the ranks of which a spare will have one when one node is lost.

    Args:
        view: The one in which it is shown.
        spare: Its node.
    """
    member = view.member(spare)
    if member is None or not member.spare:
        return ()
    return tuple(place for place in (member.place - 1, member.place) if 0 <= place < view.workers)


def wanted(states: ShardedSet, view: View, spare: str) -> tuple[Places, ...]:
    """Return what a spare asks for, and whom: the owners of what its next places own and keep.

    Args:
        states: Its own.
        view: The one in which it is shown.
        spare: Its node.
    """
    workers = view.workers
    most = max((_layout(state, workers).copies for _, state in states), default=0)
    owners = {(place - copy) % workers for place in next_places(view, spare) for copy in range(most + 1)}
    return tuple(each for each in places(states, workers) if each.owner in owners)


def _layout(state: Sharded, workers: int) -> Layout:
    spec = state.pieces.spec
    return Layout(spec.blocks, tuple(range(workers)), spec.backup)


class BlockGiver:
    """One rank's side of all that it gives to spares, on its caller's loop."""

    def __init__(self, state: RankState, traffic: BlockTraffic, runtime: Runtime) -> None:
        """Begin without a spare.

        Args:
            state: What this rank holds.
            traffic: The engine's.
            runtime: The loop on which the engine lives.
        """
        self._state = state
        self._traffic = traffic
        self._runtime = runtime
        self._spares: dict[str, Places] = {}

    async def take(self, view: View, rank: int, *, timeout: float) -> None:
        """Take the spares that a view shows, if this is none. Before it tells the others anything.

        Args:
            view: The view.
            rank: Of this node in it.
            timeout: Seconds that a place has to arrive.
        """
        sharded = self._state.sharded
        shown = view.members[view.workers :]
        mine = [] if sharded is None or not shown else [p for p in places(sharded, view.workers) if p.owner == rank]
        for each in mine:
            for spare in shown:
                self._spares[spare.node] = each
                await self._runtime.call(
                    self._traffic.open(
                        view.view_id,
                        spare.node,
                        spare.incarnation,
                        made_of=each.made_of,
                        places=len(each.order),
                        timeout=timeout,
                    )
                )

    async def between_steps(self, view: View) -> None:
        """Let the spares have what the last committed step has made of the blocks.

        Args:
            view: The view at work. Who is in it gets no more here.
        """
        if not self._spares:
            return
        for node in [node for node in self._spares if view.rank_of(node) is not None]:
            del self._spares[node]
            await self._runtime.call(self._traffic.close(node))
        supplies = {}
        for node, each in self._spares.items():
            supply = self._supply(each)
            if supply is not None:
                supplies[node] = supply
        live = await self._runtime.call(self._traffic.publish(supplies))
        self._spares = {node: each for node, each in self._spares.items() if node in live}

    def _supply(self, given: Places) -> BlockSupply | None:
        """What is here; None while no step has given any of the states values."""
        sharded = self._state.sharded
        if sharded is None or not all(sharded.states[name].pieces.agreed for name in given.runs):
            return None
        held, rows = {}, []
        for name, run in given.runs.items():
            held[name], digests = sharded.states[name].pieces.snapshot()
            rows.append(digests[run.start : run.stop].reshape(-1, 16))

        def part(place: int) -> Array | None:
            name, block, piece = given.order[place]
            parts = held[name].get(block)
            return None if parts is None else parts[piece]

        return BlockSupply(np.concatenate(rows), part)


async def receive_blocks(
    given: Places, view: View, states: ShardedSet, traffic: BlockTraffic, runtime: Runtime, *, timeout: float
) -> None:
    """Ask one owner for its blocks, again and again. When this ends, however it does, nobody writes any more.

    Args:
        given: What it gives.
        view: The view in which this rank was shown.
        states: Of this rank.
        traffic: The engine's.
        runtime: The loop on which the engine lives.
        timeout: Seconds that a place has to arrive.
    Raises:
        QuicollError: The owner gives no more, or not in time.
    """
    owner = view.members[given.owner]
    number = 0
    try:
        while True:
            number += 1
            came = await runtime.call(
                traffic.ask(
                    owner.node,
                    owner.incarnation,
                    view.view_id,
                    number=number,
                    made_of=given.made_of,
                    sizes=given.sizes,
                    timeout=timeout,
                )
            )
            for place, data in came.items():
                name, block, piece = given.order[place]
                states.states[name].pieces.offer(block, piece, data)
    finally:
        runtime.loop.call_soon_threadsafe(traffic.end, owner.node, owner.incarnation, view.view_id)
