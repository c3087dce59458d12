"""Small calls between ranks of one host: every order of loads and stores that chance finds, and a death at each."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from host_memory import Host, Killed, SteppedMemory

from quicoll.local.layout import CONSUMED, MAX_WORLD, PUBLISHED, SLOTS, SMALL_BYTES, SegmentLayout
from quicoll.local.passages import Moved, Passage, Routes
from quicoll.local.small import Counts, Differing, SmallCall, SmallCalls, Spoiled

CALLS = 2 * SLOTS + 3


def given(rank: int, number: int) -> bytes:
    """Of a length that differs from rank to rank, but for every third call; of some one rank gives nothing."""
    return bytes([rank + 1, number % 251]) * (
        1 + number % 5 + (0 if number % 3 == 0 else rank * (number % 2) - number % 2)
    )


def counts(rank: int, number: int) -> tuple[int, ...]:
    """What a rank says of its sizes: nothing where all know them."""
    return () if number % 3 == 0 else (rank, len(given(rank, number)), (1 << 64) - 1 - number)


def no_passage(layout: SegmentLayout, counts: Counts) -> Passage:
    raise AssertionError("all payloads fit")


class Rank:
    """Issues CALLS calls, up to `ahead` at a time, and takes them further until they are over or `patience` ends."""

    def __init__(self, memory: SteppedMemory, *, ahead: int = 3, patience: int = 400, signature: str = "sum") -> None:
        self.memory = memory
        self.small = SmallCalls(memory)
        self.results: dict[int, tuple[list[bytes], list[tuple[int, ...]]]] = {}
        self.ahead = ahead
        self.patience = patience
        self.signature = signature

    def call(self, number: int) -> SmallCall:
        world, rank = self.memory.layout.world, self.memory.rank
        sizes = [len(given(each, number)) for each in range(world)]

        def combine(payloads: Sequence[bytes], counts: Counts) -> None:
            self.results[number] = list(payloads), list(counts)

        return SmallCall(
            number,
            self.signature,
            lambda: given(rank, number),
            len(given(rank, number)),
            combine,
            no_passage,
            counts=counts(rank, number),
            sizes=sizes if number % 3 == 0 else None,
        )

    def run(self) -> None:
        issued = idle = 0
        while len(self.results) < CALLS and idle < self.patience:
            if issued < CALLS and issued - len(self.results) < self.ahead:
                self.small.add(self.call(issued))
                issued += 1
            idle = 0 if advanced(self.small) else idle + 1


def advanced(small: SmallCalls) -> list[SmallCall]:
    small.publish()
    return small.take()


def expected(world: int, number: int) -> tuple[list[bytes], list[tuple[int, ...]]]:
    return [given(rank, number) for rank in range(world)], [counts(rank, number) for rank in range(world)]


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
            advanced(rank.small)

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


def quietly(host: Quiet, rank: Rank) -> list[SmallCall]:
    taken = advanced(rank.small)
    host.drain(rank.memory.rank)
    return taken


def test_a_rank_is_ahead_by_as_many_calls_as_there_are_slots_and_goes_on_when_they_are_taken() -> None:
    host, one, other = quiet_pair()
    for number in range(SLOTS + 2):
        one.small.add(one.call(number))
    assert quietly(host, one) == []
    assert one.small.published == SLOTS
    assert one.small.waiting
    for number in range(SLOTS + 2):
        other.small.add(other.call(number))
    assert [call.number for call in quietly(host, other)] == list(range(SLOTS))
    assert [call.number for call in quietly(host, one)] == list(range(SLOTS))
    assert not one.small.waiting
    assert [call.number for call in quietly(host, other)] == [SLOTS, SLOTS + 1]
    assert [call.number for call in quietly(host, one)] == [SLOTS, SLOTS + 1]


def test_payloads_that_differ_from_their_checksum_are_not_used() -> None:
    host, one, other = quiet_pair()
    for rank in (one, other):
        rank.small.add(rank.call(3))
    quietly(host, other)
    host.spoil(1, host.layout.payload(0), b"\xff")
    with pytest.raises(Spoiled) as caught:
        quietly(host, one)
    assert caught.value.rank == 1
    assert caught.value.bits
    assert one.results == {}
    with pytest.raises(Spoiled):  # nothing goes on after a failure
        quietly(host, one)
    assert one.small.consumed == 0


@pytest.mark.parametrize("count", [SLOTS + 1, (1 << 64) - 1])
def test_a_peer_that_counts_more_calls_than_it_can_have_made_is_found_out(count: int) -> None:
    host, one, _ = quiet_pair()
    one.small.add(one.call(0))
    host.spoil(1, 8 * PUBLISHED, count.to_bytes(8, "little"))
    with pytest.raises(Spoiled) as caught:
        quietly(host, one)
    assert not caught.value.bits
    assert one.results == {}


def test_a_peer_that_has_taken_more_calls_than_there_were_is_found_out() -> None:
    host, one, _ = quiet_pair()
    host.spoil(1, 8 * CONSUMED, (SLOTS + 7).to_bytes(8, "little"))
    for number in range(SLOTS + 1):
        one.small.add(one.call(number))
    with pytest.raises(Spoiled, match="has taken 23 of 16 calls"):
        quietly(host, one)


def test_a_count_without_a_call_behind_it_gives_no_result() -> None:
    host, one, _ = quiet_pair()
    for number in range(2):
        one.small.add(one.call(number))
    host.spoil(1, 8 * PUBLISHED, (2).to_bytes(8, "little"))
    with pytest.raises(Differing):  # place 0 has a head of zeros: another digest
        quietly(host, one)
    assert one.results == {}


@pytest.mark.parametrize("size", [1 << 62, 5000])
def test_the_length_of_a_text_that_a_peer_names_is_bounded_before_anything_is_read(size: int) -> None:
    host, one, other = quiet_pair()
    one.small.add(one.call(0))
    other.signature = "max"
    other.small.add(other.call(0))
    quietly(host, other)
    host.spoil(1, host.layout.slot(0) + 48, size.to_bytes(8, "little"))  # of its text
    with pytest.raises(Differing) as caught:
        quietly(host, one)
    assert caught.value.called[1][1].startswith("max")
    assert len(caught.value.called[1][1]) <= 4096


def test_what_has_been_taken_before_a_failure_is_returned_before_it_is_raised() -> None:
    host, one, other = quiet_pair()
    for rank in (one, other):
        rank.small.add(rank.call(0))
    other.signature = "max"
    for rank in (one, other):
        rank.small.add(rank.call(1))
    quietly(host, other)
    assert [call.number for call in quietly(host, one)] == [0]
    with pytest.raises(Differing):
        quietly(host, one)
    assert list(one.results) == [0]


@pytest.mark.parametrize(("at", "number"), [(32, MAX_WORLD + 1), (32, 1 << 62), (40, SMALL_BYTES), (40, 1)])
def test_counts_and_sizes_that_cannot_be_are_found_out_before_anything_is_read(at: int, number: int) -> None:
    host, one, other = quiet_pair()
    for rank in (one, other):
        rank.small.add(rank.call(0))
    quietly(host, other)
    host.spoil(1, host.layout.slot(0) + at, number.to_bytes(8, "little"))
    with pytest.raises(Spoiled, match="gives") as caught:
        quietly(host, one)
    assert caught.value.rank == 1
    assert not caught.value.bits
    assert one.results == {}


@pytest.mark.parametrize("at", [0, 8, 24])
def test_counts_that_differ_from_their_checksum_are_not_used(at: int) -> None:
    host, one, other = quiet_pair()
    for rank in (one, other):
        rank.small.add(rank.call(1))
    quietly(host, other)
    host.spoil(1, host.layout.payload(0) + at, b"\xfe")
    with pytest.raises(Spoiled, match="checksum") as caught:
        quietly(host, one)
    assert caught.value.bits
    assert one.results == {}


@pytest.mark.parametrize("large", [0, 1])
def test_where_the_payload_of_one_rank_does_not_fit_all_take_the_way_of_large_ones(large: int) -> None:
    """Only that rank knows it before; the slots of the others, and the calls before and after, are as ever."""
    host, one, other = quiet_pair()
    ways: dict[int, list[tuple[int, ...]]] = {}
    for rank in (one, other):
        mine = rank.memory.rank
        payload = bytes(SMALL_BYTES + 1) if mine == large else b"small"

        def carry(layout: SegmentLayout, counts: Counts, mine: int = mine) -> Passage:
            ways[mine] = list(counts)
            return Moved(layout, mine, Routes([0, 0]), np.empty(0), np.empty(0), reads=True)

        def combine(payloads: Sequence[bytes], counts: Counts) -> None:
            raise AssertionError("not all payloads are there")

        rank.small.add(rank.call(0))
        given = (len(payload),)
        rank.small.add(
            SmallCall(1, "gather", lambda payload=payload: payload, len(payload), combine, carry, counts=given)
        )
        rank.small.add(rank.call(2))
    for rank in (other, one, other):
        quietly(host, rank)
    sizes = [(SMALL_BYTES + 1,) if rank == large else (5,) for rank in range(2)]
    assert ways == {0: sizes, 1: sizes}
    for rank in (one, other):
        assert rank.small.consumed == 3
        assert rank.results == {number: expected(2, number) for number in (0, 2)}


def test_who_uses_nothing_of_the_others_compares_and_reads_no_payload() -> None:
    host, one, other = quiet_pair()
    combined: list[tuple[int, int]] = []
    for rank in (one, other):
        rank.small.add(
            SmallCall(
                0,
                "gather",
                lambda: b"given",
                5,
                lambda payloads, counts, mine=rank.memory.rank: combined.append((mine, len(payloads))),
                no_passage,
                reads=rank is other,
            )
        )
    quietly(host, other)
    host.spoil(1, host.layout.payload(0), b"\xff")
    quietly(host, one)
    quietly(host, other)
    assert combined == [(0, 0), (1, 2)]


def test_more_counts_than_there_are_ranks_are_refused_where_they_are_made() -> None:
    with pytest.raises(AssertionError):
        SmallCall(0, "sum", bytes, 0, lambda payloads, counts: None, no_passage, counts=(1,) * (MAX_WORLD + 1))
