"""Runs of datagrams: taken apart, put together, kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from quicoll_transport.net.runs import DatagramRun, joined

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

A: Address = ("192.0.2.1", 1)
B: Address = ("2001:db8::1", 1, 0, 0)


def run_of(data: bytes, size: int) -> DatagramRun:
    return DatagramRun(memoryview(bytearray(data)), size, A)


def shown(runs: list[DatagramRun]) -> list[tuple[list[bytes], Address]]:
    return [([bytes(each) for each in run.datagrams()], run.address) for run in runs]


def test_a_run_is_its_datagrams_and_only_the_last_may_be_shorter() -> None:
    assert [bytes(each) for each in run_of(b"aabbc", 2).datagrams()] == [b"aa", b"bb", b"c"]
    assert (len(run_of(b"aabbc", 2)), len(run_of(b"aabb", 2)), len(run_of(b"a", 2))) == (3, 2, 1)


def test_a_part_of_a_run_is_the_same_memory() -> None:
    run = run_of(b"aabbccd", 2)
    part = run.part(1, 4)
    assert shown([part]) == [([b"bb", b"cc", b"d"], A)]
    part.memory[0] = ord("x")
    assert bytes(run.memory) == b"aaxbccd"


def test_what_was_kept_stays_when_the_memory_is_used_again() -> None:
    run = run_of(b"aab", 2)
    kept = run.kept()
    run.memory[:] = b"???"
    assert shown([kept]) == [([b"aa", b"b"], A)]


def test_datagrams_of_one_size_to_one_address_are_one_run() -> None:
    assert shown(joined([(b"11", A), (b"22", A), (b"3", A)])) == [([b"11", b"22", b"3"], A)]


def test_a_run_ends_behind_a_shorter_datagram_before_a_longer_one_and_before_another_address() -> None:
    datagrams = [(b"11", A), (b"2", A), (b"3", A), (b"44", A), (b"55", B), (b"66", A)]
    assert shown(joined(datagrams)) == [
        ([b"11", b"2"], A),
        ([b"3"], A),
        ([b"44"], A),
        ([b"55"], B),
        ([b"66"], A),
    ]


def test_empty_datagrams_are_in_no_run() -> None:
    assert joined([(b"", A)]) == []
    assert shown(joined([(b"1", A), (b"", B), (b"2", A)])) == [([b"1", b"2"], A)]


def test_joined_memory_may_be_overwritten_and_is_nobody_elses() -> None:
    data = b"11"
    for run in joined([(data, A), (data, B)]):
        run.memory[:] = b"??"
    assert data == b"11"


@given(st.lists(st.tuples(st.binary(max_size=4), st.sampled_from([A, B]))))
def test_joining_changes_neither_datagrams_nor_their_order(datagrams: list[tuple[bytes, Address]]) -> None:
    runs = joined(datagrams)
    apart = [(bytes(each), run.address) for run in runs for each in run.datagrams()]
    assert apart == [(data, address) for data, address in datagrams if data]
    assert sum(len(run) for run in runs) == len(apart)
    assert shown(joined(apart)) == shown(runs), "the same datagrams make the same runs"
