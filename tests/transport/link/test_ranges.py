"""Ranges against what it stands for: a plain set of integers."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll_transport.link.ranges import Ranges

fixed = settings(derandomize=True, deadline=None, max_examples=150)
small = st.integers(0, 60)


@fixed
@given(additions=st.lists(st.tuples(small, small), max_size=30))
def test_holds_exactly_what_was_added(additions: list[tuple[int, int]]) -> None:
    ranges, plain = Ranges(), set[int]()
    for start, stop in additions:
        ranges.add(start, stop)
        plain.update(range(start, stop))
        assert [value for value in range(62) if value in ranges] == sorted(plain)
        tuples = ranges.tuples()
        assert len(ranges) == len(tuples)
        assert all(a < b for a, b in tuples), "no range is empty"
        assert all(b < c for (_, b), (c, _) in itertools.pairwise(tuples)), "ranges are merged and sorted"
        assert ranges.upto == min(set(range(62)) - plain)


@fixed
@given(values=st.lists(small, max_size=60))
def test_single_integers_in_any_order(values: list[int]) -> None:
    ranges = Ranges()
    for value in values:
        ranges.add(value)
    assert [value for start, stop in ranges.tuples() for value in range(start, stop)] == sorted(set(values))


@fixed
@given(additions=st.lists(st.tuples(small, small), max_size=30))
def test_its_tuples_make_it_again(additions: list[tuple[int, int]]) -> None:
    ranges = Ranges(additions)
    assert Ranges(ranges.tuples()).tuples() == ranges.tuples()


def test_empty() -> None:
    ranges = Ranges()
    assert not ranges
    assert 0 not in ranges
    assert ranges.upto == 0
    assert ranges.tuples() == ()
    ranges.add(5, 5)
    ranges.add(5, 3)
    assert not ranges


def test_negative_and_huge_values_are_only_numbers() -> None:
    ranges = Ranges([(1 << 62, 1 << 63)])
    assert (1 << 62) in ranges
    assert (1 << 63) not in ranges
    assert -1 not in ranges


@fixed
@given(steps=st.lists(st.tuples(st.booleans(), small, small), max_size=30))
def test_what_is_taken_out_is_gone_and_nothing_else(steps: list[tuple[bool, int, int]]) -> None:
    ranges, plain = Ranges(), set[int]()
    for adds, start, stop in steps:
        if adds:
            ranges.add(start, stop)
            plain |= set(range(start, stop))
        else:
            ranges.subtract(start, stop)
            plain -= set(range(start, stop))
        assert [value for start, stop in ranges for value in range(start, stop)] == sorted(plain)
        assert list(reversed(ranges)) == list(ranges)[::-1]
        if plain:
            assert (ranges.first[0], ranges.last[1]) == (min(plain), max(plain) + 1)


@fixed
@given(additions=st.lists(st.tuples(small, small), max_size=10), upto=small)
def test_what_is_absorbed_is_no_longer_there(additions: list[tuple[int, int]], upto: int) -> None:
    ranges = Ranges(additions)
    plain = {value for start, stop in ranges for value in range(start, stop)} | set(range(upto))
    reached = ranges.absorb(upto)
    assert reached == min(set(range(62)) - plain)
    assert {value for start, stop in ranges for value in range(start, stop)} == {v for v in plain if v >= reached}
