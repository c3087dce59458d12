"""What a spare has of sharded states: the blocks of the place that it will get, and nobody has to take its word."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lesson_link import Link

from quicoll.engine.block_lessons import BlockTraffic
from quicoll.membership.view import Member, View, natural_key
from quicoll.state.layout import Layout
from quicoll.state.pieces import BlockUpdate
from quicoll.state.sharded import Sharded, ShardedSet
from quicoll.state.warm_blocks import BlockGiver, next_places, places, receive_blocks, wanted

LENGTH, BLOCKS = 23, 6
PIECES = {"m": "float32", "v": "int16"}


def states(backup: int = 1, **others: Sharded) -> ShardedSet:
    groups: Any = None
    return ShardedSet({"a": Sharded(LENGTH, PIECES, blocks=BLOCKS, backup=backup), **others}, groups)


def commit(held: ShardedSet, rank: int, workers: int, step: int) -> None:
    """Give a rank's part the values of a step, and the digests of all."""
    for name, state in held:
        spec = state.pieces.spec
        owned = Layout(spec.blocks, tuple(range(workers)), spec.backup).owned(rank)
        everything = [np.full(spec.length, step + len(name), dtype.storage) for dtype in spec.dtypes.values()]
        all_blocks = range(spec.blocks)
        digests = np.stack([spec.digests(spec.part(everything, all_blocks, block)) for block in all_blocks])
        start, stop = spec.bounds(owned)
        values = tuple(each[start:stop].copy() for each in everything)
        nodes = tuple(f"n{each}" for each in range(workers))
        state.pieces.commit(BlockUpdate(step, nodes, owned, values, {}, digests))


@pytest.mark.parametrize("backup", [1, 2, 5])
@pytest.mark.parametrize("workers", [2, 3, 4, 7])
def test_whichever_rank_is_lost_a_spare_has_what_its_place_owns_and_keeps_from_those_that_own_it(
    workers: int, backup: int
) -> None:
    layout = Layout(BLOCKS, tuple(range(workers)), backup)
    nodes = [f"n{2 * rank}" for rank in range(workers)]
    for spare in ("n0-", "n1", "n5", "n99"):
        got: dict[int, int] = {}
        for each in wanted(states(backup), members(*nodes, spare), spare):
            assert [piece for _, _, piece in each.order] == [0, 1] * (len(each.order) // 2)
            got |= {block: each.owner for _, block, _ in each.order}
        for lost in nodes:
            place = sorted({*nodes, spare} - {lost}, key=natural_key).index(spare)
            for block in range(BLOCKS):
                if place in layout.keepers(block):
                    assert got[block] == layout.owner(block)


def test_the_last_in_order_expects_one_place_and_the_others_send_it_nothing() -> None:
    given = wanted(states(1), members("n0", "n1", "n2", "n3", "n4", "s"), "s")
    assert [each.owner for each in given] == [3, 4]


def test_a_spare_goes_by_the_place_that_the_coordinator_has_told_whatever_the_names_are() -> None:
    found = [next_places(members("c", "a", "e", "b", place=place), "b") for place in range(4)]
    assert found == [(0,), (0, 1), (1, 2), (2,)]
    assert next_places(members("c", "a", "e", "b", place=0), "a") == ()
    assert next_places(members("c", "a", "e", "b", place=0), "x") == ()


def test_no_copies_are_made_of_a_state_without_a_backup_nor_where_there_is_one_rank() -> None:
    assert places(states(0), 3) == ()
    assert places(states(1), 1) == ()
    kept = places(states(0, b=Sharded(8, {"m": "float64"}, blocks=8, backup=1)), 4)
    assert {name for each in kept for name, _, _ in each.order} == {"b"}
    assert [each.sizes for each in kept] == [(8, 8)] * 4
    assert wanted(states(0), members("n0", "n1", "n2"), "n2") == ()


def test_who_divides_otherwise_asks_for_something_else() -> None:
    nobody: Any = None
    mine = places(states(), 3)
    assert [each.made_of for each in mine] == [each.made_of for each in places(states(), 3)]
    other = ShardedSet({"a": Sharded(LENGTH, {**PIECES, "v": "int32"}, blocks=BLOCKS, backup=1)}, nobody)
    makes = [each.made_of for them in (mine, places(states(), 4), places(other, 3)) for each in them]
    assert len(set(makes)) == len(makes)


class Runtime:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def call(self, work: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        return asyncio.ensure_future(work)


class Owner:
    """Rank `rank` of three, which gives to the spare "s"; and the spare's end of their link."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.runtime: Any = Runtime()
        self.to_spare, self.to_owner = Link("s", 9), Link(f"n{rank}", rank + 1)
        self.to_spare.other, self.to_owner.other = self.to_owner, self.to_spare
        links: dict[str, Any] = {"s": self.to_spare, f"n{rank}": self.to_owner}
        self.traffic, self.spare = (
            BlockTraffic(loop=self.runtime.loop, link_to=lambda node: links.get(node)) for _ in range(2)
        )
        self.to_spare.to, self.to_owner.to = self.traffic, self.spare
        self.held = states()
        state: Any = SimpleNamespace(sharded=self.held)
        self.giver = BlockGiver(state, self.traffic, self.runtime)


def members(*nodes: str, place: int | None = None) -> View:
    """A view whose last node is a spare; by its name where no place is given."""
    *workers, spare = nodes
    at = sum(natural_key(node) < natural_key(spare) for node in workers) if place is None else place
    found = [Member(rank=rank, node=node, incarnation=rank + 1) for rank, node in enumerate(workers)]
    found.append(Member(rank=len(found), node=spare, incarnation=9, spare=True, place=at))
    return View(view_id=7, members=tuple(found), seed=0, committed_step=5, committed_view=6)


def shown() -> View:
    return members("n0", "n1", "n2", "s")


def at_work(*nodes: str) -> View:
    members = tuple(Member(rank=rank, node=node, incarnation=rank + 1) for rank, node in enumerate(nodes))
    return View(view_id=8, members=members, seed=0, committed_step=5, committed_view=6)


async def turns() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_a_spare_has_the_blocks_of_each_committed_step_and_those_of_an_older_one_do_not_count() -> None:
    owner, here = Owner(2), states()
    await owner.giver.take(shown(), 2, timeout=5.0)
    (given,) = [each for each in places(here, 3) if each.owner == 2]
    receiving = asyncio.ensure_future(receive_blocks(given, shown(), here, owner.spare, owner.runtime, timeout=5.0))
    mine = at_work("n0", "n1", "n2")
    await owner.giver.between_steps(mine)  # no step has given values yet
    await turns()
    pieces = here.states["a"].pieces
    assert pieces.here == ()
    for step in (1, 2):
        commit(owner.held, 2, 3, step)
        await owner.giver.between_steps(mine)
        await turns()
        pieces.take(owner.held.states["a"].pieces.record())
        assert [pieces.look(block) for block in range(BLOCKS)] == [False] * 4 + [True] * 2
    commit(owner.held, 2, 3, 3)  # committed, and the owner is killed before it gives anything of it
    pieces.take(owner.held.states["a"].pieces.record())
    assert not any(pieces.look(block) for block in range(BLOCKS))
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    await turns()
    assert owner.to_owner.discarded


async def test_a_spare_takes_no_spare() -> None:
    owner = Owner(0)
    await owner.giver.take(shown(), 3, timeout=5.0)
    assert await owner.traffic.publish({}) == ()


async def test_a_spare_that_has_a_place_gets_no_more() -> None:
    owner = Owner(2)
    await owner.giver.take(shown(), 2, timeout=5.0)
    commit(owner.held, 2, 3, 1)
    await owner.giver.between_steps(at_work("n0", "n2", "s"))
    assert await owner.traffic.publish({}) == ()
