"""The arithmetic of regions, against sets of indices."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.checkpoint.regions import Region, overlap_of, pieces_of, uncovered, without
from quicoll.errors import LocalError


def indices(region: Region) -> set[tuple[int, ...]]:
    pairs = zip(region.offset, region.shape, strict=True)
    return set(product(*(range(begin, begin + length) for begin, length in pairs)))


def regions(dimensions: int) -> st.SearchStrategy[Region]:
    def row(most: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.tuples(*[st.integers(0, most)] * dimensions)

    return st.builds(Region, row(3), row(4))


SOME = st.integers(0, 3).flatmap(lambda n: st.lists(regions(n), min_size=2, max_size=5))


@given(SOME)
@settings(max_examples=150, deadline=None)
def test_what_two_regions_share_and_what_one_leaves_of_the_other_are_those_of_their_indices(some: list[Region]) -> None:
    one, other = some[:2]
    common = overlap_of(one, other)
    assert (indices(common) if common else set()) == indices(one) & indices(other)
    left = list(without(one, other))
    assert set().union(*map(indices, left)) == indices(one) - indices(other)
    assert sum(part.size for part in left) == len(indices(one) - indices(other))  # none twice


@given(SOME)
@settings(max_examples=150, deadline=None)
def test_a_gap_is_found_where_there_is_one_and_nowhere_else(some: list[Region]) -> None:
    whole, pieces = some[0], some[1:]
    missing = indices(whole) - set().union(*map(indices, pieces))
    gap = uncovered(whole, pieces)
    assert (gap is not None) == bool(missing)
    assert gap is None or (indices(gap) and indices(gap) <= missing)


@given(st.integers(0, 4).flatmap(regions), st.integers(1, 4), st.integers(1, 200))
@settings(max_examples=150, deadline=None)
def test_pieces_are_runs_of_the_region_in_order_and_none_is_too_large(region: Region, itemsize: int, most: int) -> None:
    pieces = list(pieces_of(region, itemsize, most))
    assert all(piece.size * itemsize <= most or piece.size == 1 for piece in pieces)
    in_order = [index for piece in pieces for index in sorted(indices(piece))]
    assert in_order == sorted(indices(region))


def test_a_region_beyond_its_tensor_is_refused() -> None:
    for region in (Region((0,), (3,)), Region((0, 3), (1, 2)), Region((-1, 0), (1, 1)), Region((0, 0), (1, -1))):
        with pytest.raises(LocalError, match="tensor 'w'"):
            region.check((2, 4), "tensor 'w'")
    Region((1, 0), (1, 4)).check((2, 4), "tensor 'w'")
    Region((), ()).check((), "a number")
