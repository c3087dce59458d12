"""A host's clock: what the head of quicoll_transport.sim.clock states, for any course of drifts, leaps and settings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.sim import HostClock

SECOND = 1_000_000_000
START, MONOTONIC, WALL = 1000 * SECOND, 7 * SECOND, 1_767_225_600 * SECOND

fixed = settings(derandomize=True, deadline=None)

times = st.integers(0, 10**15)
drifts = st.integers(-900_000, 9_000_000)
courses = st.lists(
    st.tuples(
        st.integers(0, 10**12),  # true time that passes before
        st.one_of(
            st.tuples(st.just("drift"), drifts),
            st.tuples(st.just("leap"), st.integers(0, 10**12)),
            st.tuples(st.just("step"), st.integers(-(10**12), 10**12)),
        ),
    ),
    max_size=8,
)


def clock() -> HostClock:
    return HostClock(now_ns=START, monotonic_ns=MONOTONIC, wall_ns=WALL)


def change(made: HostClock, what: str, amount: int, now_ns: int) -> None:
    if what == "drift":
        made.set_drift(amount, now_ns=now_ns)
    elif what == "leap":
        made.leap(amount, now_ns=now_ns)
    else:
        made.step_wall(amount)


def after(course: list[tuple[int, tuple[str, int]]]) -> tuple[HostClock, int]:
    """A clock that went through this, and the true time at its end."""
    made, now_ns = clock(), START
    for passes, (what, amount) in course:
        now_ns += passes
        change(made, what, amount, now_ns)
    return made, now_ns


def test_it_shows_what_it_was_made_with_and_then_true_time() -> None:
    made = clock()
    assert (made.local(START), made.wall(START), made.drift) == (MONOTONIC, WALL, 0)
    assert (made.local(START + 5), made.wall(START + 5), made.true(MONOTONIC + 5)) == (
        MONOTONIC + 5,
        WALL + 5,
        START + 5,
    )


def test_a_drift_is_parts_per_million_from_now_on() -> None:
    made = clock()
    made.set_drift(500, now_ns=START + SECOND)
    assert made.local(START + SECOND) == MONOTONIC + SECOND
    assert made.local(START + 3 * SECOND) == MONOTONIC + 3 * SECOND + 1_000_000
    made.set_drift(-500, now_ns=START + 3 * SECOND)
    assert made.local(START + 5 * SECOND) == MONOTONIC + 5 * SECOND
    assert made.drift == -500


def test_a_leap_moves_both_clocks_and_a_setting_the_wall_alone() -> None:
    made = clock()
    made.leap(SECOND, now_ns=START)
    assert (made.local(START), made.wall(START)) == (MONOTONIC + SECOND, WALL + SECOND)
    made.step_wall(-5 * SECOND)
    assert (made.local(START), made.wall(START)) == (MONOTONIC + SECOND, WALL - 4 * SECOND)


@fixed
@given(courses, st.lists(times, min_size=2))
def test_the_monotonic_clock_never_goes_back(course: list[tuple[int, tuple[str, int]]], later: list[int]) -> None:
    made, now_ns = clock(), START
    shown = made.local(now_ns)
    for passes, (what, amount) in course:
        now_ns += passes
        before = made.local(now_ns)
        change(made, what, amount, now_ns)
        assert shown <= before <= made.local(now_ns)
        shown = made.local(now_ns)
    readings = [made.local(now_ns + passed) for passed in sorted(later)]
    assert readings == sorted(readings)


@fixed
@given(courses, times)
def test_a_timer_is_never_early_by_its_own_clock_and_due_at_the_first_moment(
    course: list[tuple[int, tuple[str, int]]], ahead: int
) -> None:
    made, now_ns = after(course)
    due = made.local(now_ns) + ahead
    at = made.true(due)
    assert made.local(at) >= due
    assert made.local(at - 1) < due


@fixed
@given(courses, times)
def test_what_it_shows_now_was_due_by_now(course: list[tuple[int, tuple[str, int]]], passed: int) -> None:
    made, now_ns = after(course)
    assert made.true(made.local(now_ns + passed)) <= now_ns + passed


@fixed
@given(courses, times)
def test_the_wall_clock_is_the_monotonic_one_plus_what_it_was_set_by(
    course: list[tuple[int, tuple[str, int]]], passed: int
) -> None:
    made, now_ns = after(course)
    steps = sum(amount for _, (what, amount) in course if what == "step")
    assert made.wall(now_ns + passed) - made.local(now_ns + passed) == WALL - MONOTONIC + steps


@pytest.mark.parametrize("ppm", [9_000_001, -900_001, 10**9])
def test_a_drift_beyond_every_real_clock_is_refused_and_changes_nothing(ppm: int) -> None:
    made = clock()
    with pytest.raises(ConfigurationError, match="between -900000 and 9000000 ppm"):
        made.set_drift(ppm, now_ns=START)
    assert made.local(START + 10**12) == MONOTONIC + 10**12


def test_a_leap_back_is_refused_and_changes_nothing() -> None:
    made = clock()
    with pytest.raises(ConfigurationError, match="never goes back"):
        made.leap(-1, now_ns=START)
    assert made.local(START) == MONOTONIC
