"""The rate of a time that slides along, and how a rate is divided."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll_transport.quic.fairness import level_of
from quicoll_transport.quic.sliding_rate import SlidingRate

MS = 1_000_000
fixed = settings(derandomize=True, deadline=None, max_examples=200)


def run(rate: SlidingRate, begin: int, ms: int, each: int, *, within: int = 50) -> int:
    found = 0
    for at in range(begin, begin + ms):
        rate.total += each
        found = rate.measure(at * MS, within * MS)
    return found


def test_an_even_stream_is_measured_within_a_step() -> None:
    rate = SlidingRate()
    assert 97_000 <= run(rate, 1000, 200, 100) <= 100_000


def test_what_is_older_than_the_time_counts_no_more() -> None:
    rate = SlidingRate()
    run(rate, 1000, 200, 100)
    assert rate.measure(1400 * MS, 50 * MS) == 0
    assert 45_000 <= run(rate, 1400, 25, 100) <= 55_000, "half of the time was silent"


def test_times_that_go_back_count_as_the_latest() -> None:
    rate = SlidingRate()
    before = run(rate, 1000, 200, 100)
    rate.total += 100
    assert before <= rate.measure(900 * MS, 50 * MS) <= before + 2000


def test_what_is_kept_is_bounded() -> None:
    rate = SlidingRate()
    for at in range(100_000):
        rate.total += 1
        rate.measure(at * 10_000, 50 * MS)
    assert len(rate._steps) < 70


def test_nothing_before_the_first_look_is_a_rate() -> None:
    rate = SlidingRate()
    assert rate.measure(10 * MS, 50 * MS) == 0


@fixed
@given(claims=st.lists(st.integers(0, 1000), min_size=1, max_size=12), left=st.integers(1, 5000))
def test_a_level_gives_out_what_there_is_and_no_more(claims: list[int], left: int) -> None:
    level = level_of(sorted(claims), left)
    if level is None:
        assert sum(claims) <= left
        return
    had = [min(claim, level) for claim in claims]
    assert level >= max(left // len(claims), 1), "never below an equal part"
    assert sum(had) <= max(left, len(claims))
    assert sum(had) > left - len(claims), "but for what does not divide"
