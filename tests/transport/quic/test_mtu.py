"""Path MTU discovery: what passes is found with few probes, black holes are noticed, nothing falls below 1200."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll_transport.quic.mtu import LEAST_DATAGRAM_BYTES, PathMtu

fixed = settings(derandomize=True, deadline=None, max_examples=200)
MINUTE = 60_000_000_000


def search(mtu: PathMtu, carries: int, *, now_ns: int = 0, lost: random.Random | None = None) -> list[int]:
    """Probe until there is nothing to probe; return the sizes of the probes."""
    probes: list[int] = []
    while (size := mtu.probe_size(now_ns)) is not None:
        probes.append(size)
        mtu.on_probe_sent(size)
        assert mtu.probe_size(now_ns) is None, "one at a time"
        if size <= carries and (lost is None or lost.random() > 0.1):
            mtu.on_probe_acked(size, now_ns)
        else:
            mtu.on_probe_lost(size, now_ns)
        assert len(probes) < 100
    return probes


@pytest.mark.parametrize(("most", "carries"), [(65000, 65000), (8900, 8900), (8900, 9000)])
def test_a_path_that_carries_the_most_is_found_with_one_probe(most: int, carries: int) -> None:
    mtu = PathMtu(base=1452, most=most)
    assert mtu.size == 1452
    assert search(mtu, carries) == [most]
    assert mtu.size == most
    assert not mtu.is_searching


def test_no_search_where_there_is_nothing_to_find() -> None:
    mtu = PathMtu(base=1452, most=1452)
    assert mtu.probe_size(0) is None
    assert mtu.probe_size(1000 * MINUTE) is None
    assert not mtu.is_searching


def test_an_ordinary_path_is_found_by_common_sizes_each_tried_three_times() -> None:
    mtu = PathMtu(base=1200, most=8900)
    assert search(mtu, 1452) == [8900] * 3 + [4352] * 3 + [1472] * 3 + [1452]
    assert mtu.size == 1452


@fixed
@given(base=st.integers(1200, 1500), most=st.integers(1200, 65507), carries=st.integers(1200, 65507))
def test_what_a_path_carries_is_found_and_never_exceeded(base: int, most: int, carries: int) -> None:
    base = min(base, carries)
    mtu = PathMtu(base=base, most=most)
    probes = search(mtu, carries)
    assert mtu.size <= max(min(carries, most), base)
    assert min(carries, most) - mtu.size < 24
    assert len(probes) <= 60
    assert mtu.probe_size(MINUTE) is None


@fixed
@given(carries=st.integers(1200, 65000), seed=st.integers(0, 1000))
def test_lost_probes_cost_some_bytes_at_worst(carries: int, seed: int) -> None:
    mtu = PathMtu(base=1200, most=65000)
    search(mtu, carries, lost=random.Random(seed))
    assert 1200 <= mtu.size <= carries


def test_a_probe_that_was_only_late_counts() -> None:
    mtu = PathMtu(base=1452, most=8900)
    for _ in range(3):
        mtu.on_probe_sent(8900)
        mtu.on_probe_lost(8900, 0)
    assert mtu.probe_size(0) != 8900
    mtu.on_probe_acked(8900, 0)
    assert mtu.size == 8900
    assert mtu.probe_size(0) is None


def test_it_looks_again_after_ten_minutes() -> None:
    mtu = PathMtu(base=1452, most=8900)
    search(mtu, 1452)
    assert mtu.size == 1452
    assert mtu.probe_size(10 * MINUTE - 1) is None
    assert search(mtu, 8900, now_ns=10 * MINUTE) == [8900]
    assert mtu.size == 8900


def jumbo() -> PathMtu:
    mtu = PathMtu(base=1452, most=8900)
    search(mtu, 8900)
    mtu.on_acked(8900, 0)
    return mtu


def test_a_black_hole_is_noticed_at_the_third_loss_and_searched_anew() -> None:
    mtu = jumbo()
    assert not mtu.on_lost(8900, 10, 100)
    assert not mtu.on_lost(8900, 20, 100), "noticed together counts once"
    assert not mtu.on_lost(8900, 30, 200)
    assert mtu.on_lost(8900, 40, 300)
    assert mtu.size == 1452
    search(mtu, 4000)
    assert 3976 < mtu.size <= 4000


def test_the_base_itself_may_be_a_black_hole() -> None:
    mtu = PathMtu(base=1452, most=1452)
    for at in range(3):
        mtu.on_lost(1452, at, 100 + at)
    assert mtu.size == LEAST_DATAGRAM_BYTES
    for at in range(10):
        assert not mtu.on_lost(1200, at, 200 + at), "below there is nothing"
    search(mtu, 1300)
    assert 1276 < mtu.size <= 1300


def test_losses_among_arrivals_are_no_black_hole() -> None:
    mtu = jumbo()
    for at in range(100, 200, 2):
        assert not mtu.on_lost(8900, at, at + 50)
        mtu.on_acked(8900, at + 1)
    assert mtu.size == 8900


def test_an_arrival_that_was_sent_before_the_losses_says_nothing() -> None:
    mtu = jumbo()
    mtu.on_lost(8900, 10, 100)
    mtu.on_lost(8900, 20, 200)
    mtu.on_acked(8900, 5)
    assert mtu.on_lost(8900, 30, 300)


def test_small_arrivals_say_nothing_of_large_datagrams() -> None:
    mtu = jumbo()
    for at in range(10, 40, 10):
        mtu.on_acked(1200, at + 1)
        mtu.on_lost(8900, at, at + 100)
    assert mtu.size == 1452


def test_losses_sent_before_the_last_arrival_do_not_count() -> None:
    mtu = jumbo()
    mtu.on_acked(8900, 100)
    for at in range(10):
        assert not mtu.on_lost(8900, at, 200 + at)


def test_the_kernels_word_is_taken_at_once_and_searched_up_to() -> None:
    mtu = jumbo()
    assert mtu.limit(4000)
    assert mtu.size == 1452
    assert search(mtu, 4000) == [4000]
    assert not mtu.limit(6000), "a limit never raises"
    assert mtu.size == 4000
    assert mtu.probe_size(1000 * MINUTE) is None


def test_no_word_makes_datagrams_smaller_than_quic_allows() -> None:
    mtu = jumbo()
    assert mtu.limit(68)
    assert mtu.size == LEAST_DATAGRAM_BYTES
    assert not mtu.limit(68)


def test_a_probe_above_a_limit_that_came_meanwhile_is_not_taken() -> None:
    mtu = PathMtu(base=1452, most=8900)
    mtu.on_probe_sent(8900)
    mtu.limit(4000)
    mtu.on_probe_acked(8900, 0)
    assert mtu.size == 1452
    assert mtu.probe_size(0) == 4000
