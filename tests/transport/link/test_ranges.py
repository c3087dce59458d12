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
