"""Runs of datagrams: taken apart, put together, kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from quicoll_transport.net.runs import DatagramRun, RunsBySender, joined

if TYPE_CHECKING:
    from collections.abc import Sequence

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


TOGETHER_NS = 1_000_000


def taken(pieces: Sequence[tuple[bytes, int, Address, int]]) -> list[tuple[DatagramRun, int]]:
    """Read them one behind the other, each with the size of its datagrams, who sent it, and when it came."""
    slab = memoryview(bytearray(sum(len(data) for data, *_ in pieces)))
    runs = RunsBySender(slab, TOGETHER_NS)
    for data, size, sender, at_ns in pieces:
        slab[runs.filled : runs.filled + len(data)] = data
        runs.add(len(data), size, sender, at_ns)
    return runs.runs(memoryview(bytearray(len(slab))))


def test_what_several_senders_send_in_turn_is_one_run_of_each() -> None:
    found = taken([(b"11", 2, A, 1), (b"xxyy", 2, B, 2), (b"22", 2, A, 3), (b"z", 1, B, 4), (b"33", 2, A, 5)])
    assert shown([run for run, _ in found]) == [([b"11", b"22", b"33"], A), ([b"xx", b"yy", b"z"], B)]
    assert [at_ns for _, at_ns in found] == [5, 4]


def test_what_stands_in_one_place_is_not_copied() -> None:
    slab = memoryview(bytearray(b"1122334xx"))
    runs = RunsBySender(slab, TOGETHER_NS)
    for length, size, sender in ((4, 2, A), (3, 2, A), (2, 2, B)):
        runs.add(length, size, sender, 0)
    first, second = (run for run, _ in runs.runs(memoryview(b"")))
    assert shown([first, second]) == [([b"11", b"22", b"33", b"4"], A), ([b"xx"], B)]
    slab[0] = ord("?")
    assert bytes(first.memory[:2]) == b"?1"


def test_what_came_long_after_the_first_is_another_run() -> None:
    late = TOGETHER_NS + 1
    found = taken([(b"11", 2, A, 1), (b"22", 2, B, 2), (b"33", 2, A, late), (b"44", 2, A, late + 1), (b"5", 1, B, 3)])
    assert shown([run for run, _ in found]) == [([b"11", b"33"], A), ([b"22", b"5"], B), ([b"44"], A)]


@given(
    st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 3), st.integers(1, 7), st.integers(0, 9)), max_size=30)
)
def test_each_sender_s_datagrams_come_in_its_order_whatever_others_send(
    drawn: list[tuple[Address, int, int, int]],
) -> None:
    pieces: list[tuple[bytes, int, Address, int]] = []
    sent: dict[Address, list[bytes]] = {A: [], B: []}
    at_ns = 0
    for number, (sender, size, length, later) in enumerate(drawn):
        at_ns += later * TOGETHER_NS // 4
        data = bytes((number + i) % 256 for i in range(length))
        size = min(size, length)
        pieces.append((data, size, sender, at_ns))
        sent[sender] += [data[start : start + size] for start in range(0, length, size)]
    found = taken(pieces)
    for each in (A, B):
        assert [bytes(data) for run, _ in found if run.address == each for data in run.datagrams()] == sent[each]
