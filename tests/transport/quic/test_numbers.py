"""Ranges of packet numbers against plain sets of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll_transport.quic.numbers import KnownNumbers, split_ranges

fixed = settings(derandomize=True, deadline=None, max_examples=150)
Ranges = list[tuple[int, int]]


def ranges_of(values: set[int]) -> Ranges:
    found: Ranges = []
    for value in sorted(values):
        if found and found[-1][1] == value:
            found[-1] = (found[-1][0], value + 1)
        else:
            found.append((value, value + 1))
    return found


def plain(ranges: Ranges) -> set[int]:
    return {value for start, stop in ranges for value in range(start, stop)}


values = st.sets(st.integers(0, 40), min_size=1)


@fixed
@given(steps=st.lists(st.tuples(values, st.integers(0, 45), st.booleans()), max_size=12))
def test_what_is_new_of_an_acknowledgement(steps: list[tuple[set[int], int, bool]]) -> None:
    known, held = KnownNumbers(), set[int]()
    for told, number, forget in steps:
        news = known.learn_all(ranges_of(told)[::-1])
        assert plain(news) == told - held
        assert news == sorted(news)
        held |= told
        if forget:
            known.forget(number)
            held |= set(range(number))
        for start in (0, number // 2, number):
            assert known.overlaps(start, number) == bool(held & set(range(start, number)))
        assert known.learn_all(ranges_of(held)[::-1]) == []


@fixed
@given(pieces=values, ranges=values)
def test_what_lies_in_ranges_and_what_does_not(pieces: set[int], ranges: set[int]) -> None:
    hits, rest = split_ranges(ranges_of(pieces), ranges_of(ranges), 0)
    assert plain(hits) == pieces & ranges
    assert plain(rest) == pieces - ranges
    assert hits == sorted(hits)
    assert rest == sorted(rest)
