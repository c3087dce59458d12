"""Who owns which blocks of a sharded state, and what travels when that changes."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quicoll.numerics.canonical_order import leaves_of
from quicoll.state.layout import Layout, block_start, moves

layouts = st.builds(
    Layout,
    blocks=st.integers(1, 40),
    owners=st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True).map(lambda ranks: tuple(sorted(ranks))),
    backup=st.integers(0, 3),
)


def kept(layout: Layout, world: int = 12) -> list[np.ndarray]:
    """What each rank keeps where everything is in its place."""
    return [np.array([rank in layout.keepers(block) for block in range(layout.blocks)]) for rank in range(world)]


@given(layouts)
def test_every_block_has_one_owner_and_its_keepers_are_different_ranks(layout: Layout) -> None:
    owned = [block for rank in range(12) for block in layout.owned(rank)]
    assert owned == list(range(layout.blocks))
    for block in range(layout.blocks):
        keepers = layout.keepers(block)
        assert block in layout.owned(keepers[0])
        assert keepers[0] == layout.owner(block)
        assert len(set(keepers)) == len(keepers) == min(1 + layout.backup, len(layout.owners))


@given(st.integers(0, 10_000), st.integers(1, 97))
def test_blocks_cover_every_element_once_and_differ_in_length_by_one_at_most(length: int, blocks: int) -> None:
    cuts = [block_start(length, blocks, block) for block in range(blocks + 1)]
    assert (cuts[0], cuts[-1]) == (0, length)
    sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 64), st.integers(1, 16))
def test_a_rank_owns_the_blocks_that_are_its_logical_shards(blocks: int, world: int) -> None:
    layout = Layout(blocks, tuple(range(world)))
    assert [layout.owned(rank) for rank in range(world)] == [leaves_of(rank, world, blocks) for rank in range(world)]


@given(layouts)
def test_neighbours_give_and_get_the_copies_that_keepers_keep(layout: Layout) -> None:
    copies = [
        (block, to) for rank in layout.owners for to, _ in layout.neighbours(rank) for block in layout.owned(rank)
    ]
    wanted = [(block, keeper) for block in range(layout.blocks) for keeper in layout.keepers(block)[1:]]
    assert sorted(copies) == sorted(wanted)
    for rank in layout.owners:
        for _, source in layout.neighbours(rank):
            assert rank in [to for to, _ in layout.neighbours(source)]


@given(layouts, layouts, st.lists(st.integers(0, 11), max_size=4))
def test_what_is_missing_travels_once_from_one_that_holds_it_and_nothing_else_does(
    before: Layout, after: Layout, lost: list[int]
) -> None:
    after = Layout(before.blocks, after.owners, after.backup)
    held = [mine & (rank not in lost) for rank, mine in enumerate(kept(before))]
    found, missing = moves(after, held, [""] * 12)
    assert found == moves(after, held, [""] * 12)[0]
    for move in found:
        assert held[move.giver][move.block]
        assert not held[move.receiver][move.block]
    wanted = [
        (block, keeper)
        for block in range(after.blocks)
        for keeper in after.keepers(block)
        if not held[keeper][block] and block not in missing
    ]
    assert sorted((move.block, move.receiver) for move in found) == sorted(wanted)
    assert all(not any(mine[block] for mine in held) for block in missing)


def test_several_holders_share_what_a_newcomer_is_to_get() -> None:
    layout = Layout(12, (0, 1, 2, 3), backup=3)
    held = [np.ones(12, bool)] * 3 + [np.zeros(12, bool)]
    found, missing = moves(layout, held, [""] * 4)
    assert not missing
    assert [sum(move.giver == rank for move in found) for rank in range(3)] == [4, 4, 4]


def test_of_equals_the_one_of_the_receivers_site_gives() -> None:
    layout = Layout(1, (0, 1, 2), backup=2)
    held = [np.ones(1, bool), np.ones(1, bool), np.zeros(1, bool)]
    (move,), _ = moves(layout, held, ["a", "b", "b"])
    assert (move.giver, move.receiver) == (1, 2)


def test_ranks_that_are_about_to_leave_own_nothing() -> None:
    layout = Layout(8, (0, 3))
    assert [len(layout.owned(rank)) for rank in range(4)] == [4, 0, 0, 4]
    assert layout.neighbours(1) == ()


@given(st.integers(1, 12), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 3))
def test_peers_hold_what_their_owner_owns_and_keep_it_beside_further_owners(
    blocks: int, sizes: list[int], backup: int
) -> None:
    ranks = iter(range(sum(sizes)))
    homes = [[next(ranks) for _ in range(size)] for size in sizes]
    layout = Layout(blocks, tuple(home[0] for home in homes), backup, tuple(tuple(home[1:]) for home in homes))
    for place, home in enumerate(homes):
        assert layout.together(place) == tuple(home)
        for rank in home:
            assert layout.held(rank) == layout.owned(home[0]) == leaves_of(place, len(homes), blocks)
        assert all(not layout.owned(peer) and not layout.neighbours(peer) for peer in home[1:])
    for block in range(blocks):
        keepers = layout.keepers(block)
        at = next(place for place, home in enumerate(homes) if home[0] == layout.owner(block))
        assert keepers[: sizes[at]] == tuple(homes[at])
        further = [homes[(at + each) % len(homes)][0] for each in range(1, layout.copies + 1)]
        assert list(keepers[sizes[at] :]) == further
        assert len(set(keepers)) == len(keepers)
