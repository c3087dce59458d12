"""Copies of blocks on a spare that is kept warm: what the place that it will get owns and keeps, as of each step.

A spare takes a free place as the last rank (quicoll.membership.coordinator.formation): those that stay keep their
order, and whoever comes stands behind them. With as many ranks as before it owns what the last rank owns now, and keeps
what that one keeps. So of every sharded state with `backup` of 1 or more the spare gets these blocks from their owners:
the last rank and the `backup` ranks before it. That is what a backup costs, for as many of the ranks; the others send
nothing. With `backup=0` it gets none: copies were not asked for.

    shown       in the view with the spare both ends make the same list of places: for each owner its blocks, state by
                state, piece by piece (`places`); an owner takes the spare before it says a word in that view, so before
                the spare can ask
    standing    at each entry of a step the owner publishes the blocks of the last committed one; the spare asks for
    by          what has become another, and puts it where a transfer that broke would leave it (`HeldPieces.offer`)
    at work     when it has the place, the record of the job's last step comes with the replicated state, and a block
                counts if it has the record's digest; what is missing or older comes as for any rank (redistribution.py)

So nothing depends on these copies but time: a spare that was given wrong bytes, or those of an earlier step, or half of
them, fetches them again.

    failure                                            what follows
    an owner is lost, leaves, or owns others now       the spare says that it learns no more, and is shown again
    a rank that came later is one of the last          it knows of no spare: what it owns comes when the place is taken
    more ranks are lost at once than spares come       bounds are others, and most of the blocks come as for any rank
    two spares take places at once                     the first of them is the last but one, and has part of its blocks

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
    from quicoll.state.sharded import ShardedSet

__all__ = ["BlockGiver", "Places", "places", "receive_blocks"]


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
    """Return what each owner gives to a spare, for the place of the last rank; the same on all ranks.

    Args:
        states: Of any of them.
        workers: How many ranks the view has, without spares.
    """
    runs: dict[int, dict[str, range]] = {}
    for name, state in states:
        spec = state.pieces.spec
        layout = Layout(spec.blocks, tuple(range(workers)), spec.backup)
        if layout.copies:
            for owner in range(workers - 1 - layout.copies, workers):
                runs.setdefault(owner, {})[name] = layout.owned(owner)
    found = []
    for owner in sorted(runs):
        order, sizes, said = [], [], xxhash.xxh3_128(f"{workers} {owner}".encode())
        for name, run in runs[owner].items():
            spec = states.states[name].pieces.spec
            said.update(f"\n{name} {spec.text}".encode())
            for block in run:
                for piece, dtype in enumerate(spec.dtypes.values()):
                    order.append((name, block, piece))
                    sizes.append(spec.elements(block) * dtype.storage.itemsize)
        if order:
            found.append(Places(owner, runs[owner], tuple(order), tuple(sizes), said.digest()))
    return tuple(found)


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
        """Take the spares that a view shows, where this rank has anything to give. Before it tells the others anything.

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
