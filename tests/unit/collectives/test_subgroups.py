"""Who goes where in a split, and that no two groups have one id."""

from __future__ import annotations

from itertools import product

import numpy as np

from quicoll.collectives.subgroups import STATE, WORLD, derived_id, divide, is_derived


def test_ranks_of_a_color_are_ordered_by_key_and_then_by_rank() -> None:
    chosen = [(1, 5), (0, 0), (1, -5), (None, 0), (1, 5), (0, 0)]
    assert divide(chosen) == {0: (1, 5), 1: (2, 0, 4)}
    assert divide([(None, 3)] * 4) == {}
    assert divide([(7, -rank) for rank in range(4)]) == {7: (3, 2, 1, 0)}


def test_a_division_agrees_with_a_sort_of_all_ranks_whatever_the_choices() -> None:
    rng = np.random.default_rng(8)
    for _ in range(300):
        world = int(rng.integers(1, 9))
        chosen = [
            (None if rng.random() < 0.2 else int(rng.integers(3)), int(rng.integers(-2, 3))) for _ in range(world)
        ]
        everybody = sorted(range(world), key=lambda rank: (chosen[rank][1], rank))
        for color in range(3):
            want = tuple(rank for rank in everybody if chosen[rank][0] == color)
            assert divide(chosen).get(color, ()) == want


def test_sub_groups_are_named_after_the_splits_that_led_to_them() -> None:
    outer = WORLD.sub(2, 1, (3, 0), 1, view_id=9)
    inner = outer.sub(0, 5, (3,), 0, view_id=9)
    assert (outer.name, outer.depth, outer.ranks, outer.rank, outer.view_id) == ("2:1", 1, (3, 0), 1, 9)
    assert (inner.name, inner.depth) == ("2:1/0:5", 2)
    assert inner.watched
    assert not STATE.sub(0, 0, (0,), 0, view_id=1).watched


def test_ids_differ_by_group_split_color_and_channel_and_are_clear_of_the_given_ones() -> None:
    ids = {0, 1}
    parents = [WORLD.group_id, STATE.group_id, WORLD.sub(0, 0, (0,), 0, view_id=1).group_id]
    expected = len(ids)
    for parent, kind, a, b in product(parents, ("split", "send"), range(40), range(40)):
        ids.add(derived_id(parent, kind, a, b))
        expected += 1
    assert len(ids) == expected
    assert all(is_derived(each) and each < 1 << 62 for each in ids if each > 1)
    assert not is_derived(WORLD.group_id)
    assert not is_derived(STATE.group_id)


def test_ids_are_the_same_in_every_process_and_version() -> None:
    """Ranks of one job may run different builds: what they agree on without a word must not move."""
    assert derived_id(0, "split", 0, 0) == GOLDEN[0]
    assert derived_id(1, "send", 2, 3) == GOLDEN[1]


GOLDEN = (3471385914047261047, 4516327057220431131)


def test_a_sub_group_that_its_members_name_is_theirs_by_name_and_ranks() -> None:
    made = WORLD.named("evens", (4, 0, 2), 1, view_id=7)
    assert (made.name, made.ranks, made.rank, made.view_id) == ("evens", (4, 0, 2), 1, 7)
    assert made.group_id == WORLD.named("evens", (4, 0, 2), 0, view_id=7).group_id
    others = [WORLD.named("evens", (0, 2, 4), 0, view_id=7), WORLD.named("odds", (4, 0, 2), 1, view_id=7)]
    assert len({made.group_id, *(each.group_id for each in others)}) == 3
    assert is_derived(made.group_id)
    assert made.named("first", (4,), 0, view_id=7).name == "evens/first"
