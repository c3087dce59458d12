"""Small calls between ranks of one host: every order of loads and stores that chance finds, and a death at each."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from host_memory import Host, Killed, SteppedMemory

from quicoll.local.layout import CONSUMED, PUBLISHED, SLOTS, SMALL_BYTES
from quicoll.local.small import Differing, SmallCall, SmallCalls, Spoiled

CALLS = 2 * SLOTS + 3


def given(rank: int, number: int) -> bytes:
    return bytes([rank + 1, number % 251]) * (1 + number % 5)


class Rank:
    """Issues CALLS calls, up to `ahead` at a time, and takes them further until they are over or `patience` ends."""

    def __init__(self, memory: SteppedMemory, *, ahead: int = 3, patience: int = 400, signature: str = "sum") -> None:
        self.memory = memory
        self.small = SmallCalls(memory)
        self.results: dict[int, list[bytes]] = {}
        self.ahead = ahead
        self.patience = patience
        self.signature = signature

    def call(self, number: int) -> SmallCall:
        world = self.memory.layout.world
        sizes = [len(given(rank, number)) for rank in range(world)]

        def combine(parts: Sequence[bytes]) -> None:
            self.results[number] = list(parts)

        return SmallCall(number, self.signature, given(self.memory.rank, number), sizes, combine)

    def run(self) -> None:
        issued = idle = 0
        while len(self.results) < CALLS and idle < self.patience:
            if issued < CALLS and issued - len(self.results) < self.ahead:
                self.small.add(self.call(issued))
                issued += 1
            idle = 0 if self.small.advance() else idle + 1


def expected(world: int, number: int) -> list[bytes]:
    return [given(rank, number) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_every_rank_gets_what_all_gave_in_whatever_order_the_stores_are_seen(world: int, seed: int) -> None:
    host = Host(world, seed)
    ranks: dict[int, Rank] = {}

    def work(memory: SteppedMemory) -> None:
        ahead = random.Random(seed * 7 + memory.rank).choice([1, 2, SLOTS, SLOTS + 5])
        ranks[memory.rank] = Rank(memory, ahead=ahead, patience=100_000)
        ranks[memory.rank].run()

    host.run(work)
    assert host.ended == dict.fromkeys(range(world))
    for rank in ranks.values():
        assert rank.results == {number: expected(world, number) for number in range(CALLS)}


def steps_of_a_whole_run(world: int, seed: int) -> list[int]:
    host = Host(world, seed)
    host.run(lambda memory: Rank(memory, patience=100_000).run())
    return host.steps


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_killed_at_any_step_leaves_the_others_with_right_results_and_none_that_it_did_not_call(
    seed: int,
) -> None:
    world = 3
    total = steps_of_a_whole_run(world, seed)[1]
    for step in range(1, total + 1, 1 if seed == 0 else 7):
        host = Host(world, seed, kill=(1, step))
        ranks: dict[int, Rank] = {}

        def work(memory: SteppedMemory, ranks: dict[int, Rank] = ranks) -> None:
            ranks[memory.rank] = Rank(memory)
            ranks[memory.rank].run()

        host.run(work)
        killed = host.ended.pop(1)
        assert killed is None or isinstance(killed, Killed)
        assert host.ended == {0: None, 2: None}, step
        called = int.from_bytes(host.segments[1][8 * PUBLISHED : 8 * PUBLISHED + 8], "little")
        for rank in (0, 2):
            results = ranks[rank].results
            assert list(results) == list(range(len(results)))
            assert len(results) <= called
            assert all(results[number] == expected(world, number) for number in results)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_call_different_things_all_find_out_and_use_nothing(seed: int) -> None:
    host = Host(3, seed)
    ranks: dict[int, Rank] = {}

    def work(memory: SteppedMemory) -> None:
        ranks[memory.rank] = Rank(memory, patience=100_000, signature="max" if memory.rank == 1 else "sum")
        ranks[memory.rank].run()

    host.run(work)
    for rank in range(3):
        error = host.ended[rank]
        assert isinstance(error, Differing)
        assert error.called == {0: (0, "sum"), 1: (0, "max"), 2: (0, "sum")}
        assert ranks[rank].results == {}


def test_ranks_whose_calls_have_other_numbers_have_not_called_the_same() -> None:
    host = Host(2, 1)

    def work(memory: SteppedMemory) -> None:
        rank = Rank(memory)
        rank.small.add(rank.call(memory.rank))
        for _ in range(1000):
            rank.small.advance()

    host.run(work)
    assert all(isinstance(host.ended[rank], Differing) for rank in range(2))


class Quiet(Host):
    """Every store is seen at once, and nobody else has a turn: the test plays the other rank."""

    def step(self, rank: int) -> None:
        self.drain(rank)

    def spoil(self, rank: int, at: int, data: bytes) -> None:
        self.segments[rank][at : at + len(data)] = data


def quiet_pair() -> tuple[Quiet, Rank, Rank]:
    host = Quiet(2, 0)
    return host, Rank(SteppedMemory(host, 0)), Rank(SteppedMemory(host, 1))


def advanced(host: Quiet, rank: Rank) -> list[SmallCall]:
    taken = rank.small.advance()
    host.drain(rank.memory.rank)
    return taken


def test_a_rank_is_ahead_by_as_many_calls_as_there_are_slots_and_goes_on_when_they_are_taken() -> None:
    host, one, other = quiet_pair()
    for number in range(SLOTS + 2):
        one.small.add(one.call(number))
    assert advanced(host, one) == []
    assert one.small.published == SLOTS
    assert one.small.waiting
    for number in range(SLOTS + 2):
        other.small.add(other.call(number))
    assert [call.number for call in advanced(host, other)] == list(range(SLOTS))
    assert [call.number for call in advanced(host, one)] == list(range(SLOTS))
    assert not one.small.waiting
    assert [call.number for call in advanced(host, other)] == [SLOTS, SLOTS + 1]
    assert [call.number for call in advanced(host, one)] == [SLOTS, SLOTS + 1]


def test_payloads_that_differ_from_their_checksum_are_not_used() -> None:
    host, one, other = quiet_pair()
    for rank in (one, other):
        rank.small.add(rank.call(3))
    advanced(host, other)
    host.spoil(1, host.layout.payload(0), b"\xff")
    with pytest.raises(Spoiled) as caught:
        advanced(host, one)
    assert caught.value.rank == 1
    assert caught.value.bits
    assert one.results == {}
    with pytest.raises(Spoiled):  # nothing goes on after a failure
        advanced(host, one)
    assert one.small.consumed == 0


@pytest.mark.parametrize("count", [SLOTS + 1, (1 << 64) - 1])
def test_a_peer_that_counts_more_calls_than_it_can_have_made_is_found_out(count: int) -> None:
    host, one, _ = quiet_pair()
    one.small.add(one.call(0))
    host.spoil(1, 8 * PUBLISHED, count.to_bytes(8, "little"))
    with pytest.raises(Spoiled) as caught:
        advanced(host, one)
    assert not caught.value.bits
    assert one.results == {}


def test_a_peer_that_has_taken_more_calls_than_there_were_is_found_out() -> None:
    host, one, _ = quiet_pair()
    host.spoil(1, 8 * CONSUMED, (SLOTS + 7).to_bytes(8, "little"))
    for number in range(SLOTS + 1):
        one.small.add(one.call(number))
    with pytest.raises(Spoiled, match="has taken 23 of 16 calls"):
        advanced(host, one)


def test_a_count_without_a_call_behind_it_gives_no_result() -> None:
    host, one, _ = quiet_pair()
    for number in range(2):
        one.small.add(one.call(number))
    host.spoil(1, 8 * PUBLISHED, (2).to_bytes(8, "little"))
    with pytest.raises(Differing):  # place 0 has a head of zeros: another digest
        advanced(host, one)
    assert one.results == {}


@pytest.mark.parametrize("size", [1 << 62, 5000])
def test_lengths_that_a_peer_names_are_bounded_before_anything_is_read(size: int) -> None:
    host, one, other = quiet_pair()
    one.small.add(one.call(0))
    other.signature = "max"
    other.small.add(other.call(0))
    advanced(host, other)
    host.spoil(1, host.layout.slot(0) + 40, size.to_bytes(8, "little"))  # of its text
    with pytest.raises(Differing) as caught:
        advanced(host, one)
    assert caught.value.called[1][1].startswith("max")
    assert len(caught.value.called[1][1]) <= 4096


def test_what_has_been_taken_before_a_failure_is_returned_before_it_is_raised() -> None:
    host, one, other = quiet_pair()
    for rank in (one, other):
        rank.small.add(rank.call(0))
    other.signature = "max"
    for rank in (one, other):
        rank.small.add(rank.call(1))
    advanced(host, other)
    assert [call.number for call in advanced(host, one)] == [0]
    with pytest.raises(Differing):
        advanced(host, one)
    assert list(one.results) == [0]


def test_a_payload_that_does_not_fit_is_refused_where_it_is_made() -> None:
    with pytest.raises(AssertionError):
        SmallCall(0, "sum", b"", (SMALL_BYTES + 1, 0), lambda parts: None)
