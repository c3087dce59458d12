"""The pacer: never faster than its rate, never slower, bursts whole, the due time exact."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll_transport.quic.pacer import Pacer

fixed = settings(derandomize=True, deadline=None, max_examples=100)
NS = 1_000_000_000
MS = 1_000_000
DATAGRAM = 1452
rates = st.one_of(st.integers(1, 10**6), st.integers(10**6, 10**10))


def bucket_of(rate: int) -> int:
    return max(10 * DATAGRAM, 2 * max(2 * DATAGRAM, rate // 1000))


@fixed
@given(
    rate=rates,
    asked=st.lists(st.tuples(st.integers(0, 5 * MS), st.integers(1, 40 * DATAGRAM)), min_size=1, max_size=60),
)
def test_over_no_stretch_of_time_more_than_the_rate_and_a_bucket(rate: int, asked: list[tuple[int, int]]) -> None:
    pacer, now = Pacer(DATAGRAM, 0), 0
    sent: list[tuple[int, int]] = []
    for wait, wanted in asked:
        now += wait
        allowed = pacer.allowance(rate, wanted, now)
        assert 0 <= allowed <= wanted
        pacer.spend(allowed)
        sent.append((now, allowed))
    for i, (begin, _) in enumerate(sent):
        total = 0
        for end, nbytes in sent[i:]:
            total += nbytes
            assert total * NS <= bucket_of(rate) * NS + rate * (end - begin)


@fixed
@given(
    rate=rates,
    arrears=st.integers(0, 30 * MS),
    asked=st.lists(st.tuples(st.integers(0, 40 * MS), st.integers(1, 400 * DATAGRAM)), min_size=1, max_size=60),
)
def test_over_no_stretch_of_time_more_than_the_rate_a_bucket_and_the_arrears(
    rate: int, arrears: int, asked: list[tuple[int, int]]
) -> None:
    pacer, now = Pacer(DATAGRAM, 0), 0
    sent: list[tuple[int, int]] = []
    for wait, wanted in asked:
        now += wait
        pacer.begin_turn()
        allowed = pacer.allowance(rate, wanted, now, arrears)
        pacer.spend(allowed)
        sent.append((now, allowed))
    for i, (begin, _) in enumerate(sent):
        total = 0
        for end, nbytes in sent[i:]:
            total += nbytes
            assert total * NS <= bucket_of(rate) * NS + rate * (arrears + end - begin)


@fixed
@given(rate=rates, wanted=st.lists(st.integers(1, 40 * DATAGRAM), min_size=2, max_size=40))
def test_what_is_refused_is_allowed_at_the_due_time_and_not_before(rate: int, wanted: list[int]) -> None:
    pacer, now = Pacer(DATAGRAM, 0), 0
    for nbytes in wanted:
        allowed = pacer.allowance(rate, nbytes, now)
        if not allowed:
            due = pacer.due_ns
            assert due is not None
            assert due > now
            assert pacer.allowance(rate, nbytes, due - 1) == 0
            assert pacer.due_ns == due, "asking changes nothing"
            now, allowed = due, pacer.allowance(rate, nbytes, due)
        assert pacer.due_ns is None
        assert allowed == nbytes or allowed >= max(2 * DATAGRAM, rate // 1000), "whole, or a full burst"
        pacer.spend(allowed)


@fixed
@given(
    rate=st.integers(10**5, 10**10),
    arrears=st.integers(0, 30 * MS),
    late=st.lists(st.floats(0, 1), min_size=1, max_size=100),
)
def test_a_sender_that_always_has_more_gets_the_rate_even_if_its_timer_is_late(
    rate: int, arrears: int, late: list[float]
) -> None:
    """By a millisecond, which the bucket holds, and by the arrears."""
    pacer, now, total = Pacer(DATAGRAM, 0), 0, 0
    for part in late:
        pacer.begin_turn()
        while allowed := pacer.allowance(rate, 1 << 40, now, arrears):
            total += allowed
            pacer.spend(allowed)
        assert total * NS <= bucket_of(rate) * NS + rate * now
        assert pacer.due_ns is not None
        burst = max(2 * DATAGRAM, rate // 1000)
        assert (total + burst) * NS >= rate * (now - 1), "less than one burst is outstanding"
        now = pacer.due_ns + int(part * max(arrears, MS))


def refused() -> Pacer:
    """A pacer of 100 MB/s whose turn at 2 ms ends with nothing left, and whose next burst is due at 3 ms."""
    pacer = Pacer(DATAGRAM, 0)
    assert pacer.allowance(100_000_000, 1 << 40, 0) == 0
    pacer.begin_turn()
    assert pacer.allowance(100_000_000, 1 << 40, 2 * MS) == 200_000
    pacer.spend(200_000)
    assert pacer.allowance(100_000_000, 1 << 40, 2 * MS) == 0
    assert pacer.due_ns == 3 * MS
    return pacer


@pytest.mark.parametrize(("at_ms", "allowed"), [(3, 100_000), (7, 500_000), (8, 600_000), (60, 700_000)])
def test_what_was_due_and_missed_is_made_up_for_as_far_as_bucket_and_arrears_go(at_ms: int, allowed: int) -> None:
    pacer = refused()
    pacer.begin_turn()
    assert pacer.allowance(100_000_000, 1 << 40, at_ms * MS, 5 * MS) == allowed


def test_without_arrears_a_late_turn_gets_the_bucket() -> None:
    pacer = refused()
    pacer.begin_turn()
    assert pacer.allowance(100_000_000, 1 << 40, 60 * MS) == 200_000


def test_who_asks_for_nothing_in_a_turn_is_not_late_after_it() -> None:
    pacer = refused()
    pacer.begin_turn()
    pacer.begin_turn()
    assert pacer.allowance(100_000_000, 1 << 40, 60 * MS, 5 * MS) == 200_000


def test_a_full_bucket_to_begin_with_and_after_a_pause() -> None:
    pacer = Pacer(DATAGRAM, 0)
    assert pacer.allowance(1000, 1 << 20, 0) == 10 * DATAGRAM
    pacer.spend(10 * DATAGRAM)
    assert pacer.allowance(1000, 1, 0) == 0
    assert pacer.allowance(1000, 1 << 20, 10**15) == 10 * DATAGRAM


def test_a_run_waits_until_all_of_it_may_leave() -> None:
    pacer, rate = Pacer(DATAGRAM, 0), 100_000_000
    pacer.spend(0)
    assert pacer.allowance(rate, 60_000, 0) == 0, "ten datagrams are there, and not torn off"
    due = pacer.due_ns
    assert due == (60_000 - 14_520) * 10
    assert pacer.allowance(rate, 60_000, due) == 60_000


def test_without_a_rate_everything_leaves() -> None:
    pacer = Pacer(DATAGRAM, 0)
    assert pacer.allowance(None, 1 << 30, 0) == 1 << 30
    pacer.spend(1 << 30)
    assert pacer.allowance(10**6, 1000, 1) == 1000, "what was not paced is not owed"


def test_probes_overdraw_and_what_follows_waits() -> None:
    pacer, rate = Pacer(DATAGRAM, 0), 1_000_000
    assert pacer.allowance(rate, 14_520, 0) == 14_520
    pacer.spend(14_520)
    pacer.spend(2904)
    assert pacer.allowance(rate, 100, 0) == 0
    assert pacer.due_ns == 3_004_000


def test_a_new_rate_holds_from_now_on() -> None:
    pacer = Pacer(DATAGRAM, 0)
    pacer.spend(0)
    assert pacer.allowance(1000, 14_520, 0) == 2904 * 5
    pacer.spend(14_520)
    assert pacer.allowance(10**9, 2904, MS) == 0, "a millisecond at the slow rate gave one byte"
    assert pacer.due_ns == MS + 2903


def test_larger_datagrams_make_larger_bursts() -> None:
    pacer = Pacer(DATAGRAM, 0)
    pacer.on_datagram_size(9000)
    assert pacer.allowance(1000, 1 << 20, 10**15) == 0
    assert pacer.allowance(1000, 1 << 20, 10**18) == 90_000


def test_time_that_stands_still_gives_nothing() -> None:
    pacer = Pacer(DATAGRAM, 100)
    pacer.allowance(10**9, 14_520, 100)
    pacer.spend(14_520)
    assert pacer.allowance(10**9, 2904, 100) == 0
    assert pacer.allowance(10**9, 2904, 50) == 0
    assert pacer.due_ns == 100 + 2904
