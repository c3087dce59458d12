"""The order of an epoch: each sample at one place, the same on every machine, all orders alike."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.data.order import MAX_SAMPLES, EpochOrder
from quicoll.errors import LocalError
from quicoll.numerics.seed import Seed


@given(length=st.integers(1, 800), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=30, deadline=None)
def test_every_sample_stands_at_one_place(length: int, seed: int) -> None:
    found = EpochOrder(length, Seed(seed)).samples(0, length)
    assert found.dtype == np.int64
    assert sorted(found.tolist()) == list(range(length))


@given(length=st.integers(1, MAX_SAMPLES), start=st.integers(0), count=st.integers(0, 20), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_part_of_an_order_needs_none_of_the_rest(length: int, start: int, count: int, seed: int) -> None:
    start %= length
    stop = min(start + count, length)
    order = EpochOrder(length, Seed(seed))
    together = order.samples(start, stop)
    assert together.tolist() == [int(order.samples(place, place + 1)[0]) for place in range(start, stop)]
    assert len(set(together.tolist())) == stop - start
    assert all(0 <= sample < length for sample in together.tolist())


def test_the_order_is_what_it_was_in_every_version() -> None:
    assert EpochOrder(10, Seed(7)).samples(0, 10).tolist() == [3, 1, 0, 5, 9, 8, 4, 7, 6, 2]
    assert EpochOrder(10**18, Seed(7)).samples(5, 8).tolist() == [
        267915002908831158,
        256788600527833043,
        818763023959697484,
    ]


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_every_order_of_a_few_samples_comes_as_often_as_any_other(length: int) -> None:
    """Chi-squared, at a value that a fair draw exceeds once in 10,000 times; the seeds are fixed."""
    draws, each = 20 * factorial(length), 20
    seen = Counter(tuple(EpochOrder(length, Seed(seed)).samples(0, length).tolist()) for seed in range(draws))
    assert set(seen) == set(permutations(range(length)))
    squares = sum((count - each) ** 2 / each for count in seen.values())
    freedom = factorial(length) - 1
    assert squares < freedom + 3.72 * (2 * freedom) ** 0.5 + 10


def test_places_of_many_samples_are_spread_evenly_and_neighbours_are_not_neighbours() -> None:
    found = EpochOrder(1 << 20, Seed(3)).samples(0, 1 << 14)
    counts = np.bincount(found >> 14, minlength=64)
    assert ((counts - 256.0) ** 2 / 256.0).sum() < 63 + 3.72 * 126**0.5 + 10
    assert (np.abs(np.diff(found)) == 1).sum() < 5
    assert (np.diff(found) > 0).mean() == pytest.approx(0.5, abs=0.02)


def test_another_seed_gives_another_order_and_none_the_samples_own() -> None:
    one, other = (EpochOrder(100, Seed(seed)).samples(0, 100).tolist() for seed in (1, 2))
    assert one != other
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 8
    assert EpochOrder(100, None).samples(3, 6).tolist() == [3, 4, 5]


@pytest.mark.parametrize("length", [0, -1, MAX_SAMPLES + 1])
def test_a_number_of_samples_that_cannot_be_is_refused(length: int) -> None:
    with pytest.raises(LocalError, match="at least one sample"):
        EpochOrder(length, Seed(0))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11)])
def test_places_that_are_none_are_refused(start: int, stop: int) -> None:
    with pytest.raises(LocalError, match="none of an epoch of 10 samples"):
        EpochOrder(10, Seed(0)).samples(start, stop)
