"""How an epoch is divided into steps and logical shards: nothing twice, nothing missed, and the weights of the rest."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.data.order import EpochOrder
from quicoll.data.portions import Division, Position
from quicoll.errors import LocalError


@st.composite
def divisions(draw: st.DrawFn) -> Division:
    shards = draw(st.integers(1, 9))
    batch = shards * draw(st.integers(1, 5))
    drop_last = draw(st.booleans())
    return Division(draw(st.integers(batch if drop_last else 1, 120)), batch, shards, drop_last)


@given(division=divisions())
@settings(max_examples=60, deadline=None)
def test_the_portions_of_all_steps_are_the_epoch_each_place_once(division: Division) -> None:
    order = EpochOrder(division.length, None)
    places: list[int] = []
    for step in range(division.steps):
        parts = division.portions(order, step, 0, division.shards)
        assert [part.shard for part in parts] == list(range(division.shards))
        assert sum(part.indices.size for part in parts) == division.samples(step) > 0
        sizes = [part.indices.size for part in parts]
        assert max(sizes) - min(sizes) <= 1
        places += [place for part in parts for place in part.indices.tolist()]
    left_out = division.length % division.batch if division.drop_last else 0
    assert places == list(range(division.length - left_out))


@given(division=divisions())
@settings(max_examples=40, deadline=None)
def test_weights_make_the_mean_over_shards_the_mean_over_samples(division: Division) -> None:
    order = EpochOrder(division.length, None)
    for step in range(division.steps):
        parts = division.portions(order, step, 0, division.shards)
        if division.samples(step) == division.batch:
            assert {part.weight for part in parts} == {1.0}
        for part in parts:
            exact = Fraction(part.indices.size * division.shards, division.samples(step))
            assert part.weight == float(exact)


@given(division=divisions(), first=st.integers(0, 8), count=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_a_rank_gets_of_a_step_what_its_shards_have(division: Division, first: int, count: int) -> None:
    first = min(first, division.shards)
    count = min(count, division.shards - first)
    order = EpochOrder(division.length, None)
    step = division.steps - 1
    whole = division.portions(order, step, 0, division.shards)[first : first + count]
    mine = division.portions(order, step, first, count)
    assert [(part.shard, part.indices.tolist(), part.weight) for part in mine] == [
        (part.shard, part.indices.tolist(), part.weight) for part in whole
    ]


def test_after_the_last_step_comes_the_next_epoch() -> None:
    division = Division(10, 4, 2, False)
    assert division.steps == 3
    assert division.after(Position(0, 1)) == Position(0, 2)
    assert division.after(Position(0, 2)) == Position(1, 0)
    assert Division(10, 4, 2, True).after(Position(0, 1)) == Position(1, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 4, 2, False), "at least one sample"),
        ((10, 5, 2, False), "a multiple of the 2 shards, not 5"),
        ((10, 0, 2, False), "a multiple of the 2 shards, not 0"),
        ((10, 4, 0, False), "at least one shard"),
        ((3, 4, 2, True), "3 samples make no batch of 4"),
    ],
)
def test_what_cannot_be_divided_is_refused(arguments: tuple[int, int, int, bool], said: str) -> None:
    with pytest.raises(LocalError, match=said):
        Division(*arguments)
