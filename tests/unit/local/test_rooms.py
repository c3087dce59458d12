"""Rooms of sub-groups, fewer than there are groups: every order of loads and stores that chance finds, and a death at
each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from host_memory import Host, Killed, SteppedMemory

import quicoll.local.rooms
from quicoll.engine.rows import CallRow, Large
from quicoll.local.layout import OWNERS, ROOMS, SMALL_BYTES, SegmentLayout
from quicoll.local.passages import Passage, Reduced
from quicoll.local.rooms import Rooms
from quicoll.local.small import Counts, SmallCall, Spoiled

if TYPE_CHECKING:
    from quicoll.engine.rows import NearCall
    from quicoll.numerics.reduce import After

GROUPS: dict[int, tuple[int, ...]] = {
    101: (0, 1),
    102: (1, 2),
    103: (2, 0),
    104: (2, 1, 0),
    105: (0, 1, 2),
}
"""By id, which is none that a group has: ranks of the host, each in four groups."""
EACH = 5  # calls of a group; the third is a large one
LARGE = 2
NOBODY = cast("NearCall", None)  # who waits for a large call is no concern of these


@pytest.fixture(autouse=True)
def few_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quicoll.local.rooms, "KEPT", 2)


def leaf(rank: int, group: int) -> np.ndarray[Any, Any]:
    return np.arange(700, dtype=np.float64) * (rank + 1) + group


class Rank:
    """Calls in its groups in an order, `ahead` at a time, and takes them further until all are over or `patience`
    ends."""

    def __init__(self, memory: SteppedMemory, order: Sequence[int], ahead: int, *, patience: int = 100_000) -> None:
        self.rank = memory.rank
        self.rooms = Rooms(memory)
        self.rows = {
            group: CallRow(group, ranks, ranks, ranks.index(self.rank), memory, memory, self.rooms)
            for group, ranks in GROUPS.items()
            if self.rank in ranks
        }
        self.order = [group for group in order if group in self.rows]
        self.ahead = ahead
        self.results: dict[tuple[int, int], Any] = {}
        self.outputs: dict[int, Any] = {}  # of large calls under way, by group
        self.patience = patience

    def call(self, row: CallRow, number: int) -> SmallCall:
        group = row.group
        given = bytes([self.rank, group, number])

        def combine(payloads: Sequence[bytes], counts: Counts) -> None:
            self.results[group, number] = b"".join(payloads)

        def carried(layout: SegmentLayout, counts: Counts) -> Passage:
            output = np.zeros(700)

            def add(values: Sequence[Any], out: Any, after: After) -> None:
                np.copyto(out, sum(values))
                after(0, out.size)

            self.outputs[group] = output
            return Reduced(
                layout=layout,
                rank=row.rank,
                held=[1] * len(row.ranks),
                leaves=[leaf(self.rank, group)],
                storage=output.dtype,
                elements=700,
                rows=None,
                root=None,
                output=output,
                combine=add,
            )

        nbytes = SMALL_BYTES + 1 if number == LARGE else len(given)
        return SmallCall(number, f"call of {group}", lambda: given, nbytes, combine, carried)

    def run(self) -> None:
        issued = idle = over = 0
        while over < len(self.order) and idle < self.patience:
            if issued < len(self.order) and issued - over < self.ahead:
                row = self.rows[self.order[issued]]
                row.under_way += 1
                row.small.add(self.call(row, row.take_number()))
                issued += 1
            ended = sum(self.further(row) for row in self.rows.values() if row.under_way)
            over += ended
            idle = 0 if ended else idle + 1

    def further(self, row: CallRow) -> int:
        """Take a row as far as it goes; return how many of its calls have ended."""
        ended = 0
        if not row.publish():
            return 0
        for call in row.take():
            if call.passage is None:
                ended += 1
            else:
                row.larges.append(Large(NOBODY, call.passage))
        while row.larges and row.reached(row.larges[0].needs):
            end = row.larges[0].go_on(row)
            if end is not None:
                row.end_large(end)
                self.results[row.group, LARGE] = self.outputs.pop(row.group)
                ended += 1
        row.under_way -= ended
        return ended


def expected(group: int, number: int) -> Any:
    ranks = GROUPS[group]
    if number == LARGE:
        return sum(leaf(rank, group) for rank in ranks)
    return b"".join(bytes([rank, group, number]) for rank in ranks)


def right(found: dict[tuple[int, int], Any]) -> bool:
    return all(np.array_equal(value, expected(*key)) for key, value in found.items() if key[1] == LARGE) and all(
        value == expected(*key) for key, value in found.items() if key[1] != LARGE
    )


def shuffled(seed: int) -> list[int]:
    order = [group for group in GROUPS for _ in range(EACH)]
    random.Random(seed).shuffle(order)  # of one group the calls have their order all the same
    return order


def turns(host: Host, rank: int) -> int:
    """How often rooms of a rank have changed hands."""
    words = np.frombuffer(host.segments[rank], np.uint64, 64 + 2 * host.layout.rooms)
    return int(sum(words[OWNERS + 1 :: 2]))


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_groups_that_share_too_few_rooms_all_get_their_results_in_one_order_of_calls(seed: int, ahead: int) -> None:
    host = Host(3, seed, rooms=2)
    ranks: dict[int, Rank] = {}

    def work(memory: SteppedMemory) -> None:
        ranks[memory.rank] = Rank(memory, shuffled(seed), ahead)
        ranks[memory.rank].run()

    host.run(work)
    assert host.ended == dict.fromkeys(range(3))
    for rank in ranks.values():
        assert len(rank.results) == len(rank.order) == EACH * 4
        assert right(rank.results)
        assert turns(host, rank.rank) > 2


@pytest.mark.parametrize("seed", range(6))
def test_calls_that_are_all_under_way_end_in_whatever_order_each_rank_has_made_them(seed: int) -> None:
    """As many rooms as groups: what waits for a peer in one group takes nothing that another one needs."""
    host = Host(3, seed, rooms=4)
    ranks: dict[int, Rank] = {}

    def work(memory: SteppedMemory) -> None:
        ranks[memory.rank] = Rank(memory, shuffled(seed * 3 + memory.rank), len(GROUPS) * EACH)
        ranks[memory.rank].run()

    host.run(work)
    assert host.ended == dict.fromkeys(range(3))
    for rank in ranks.values():
        assert len(rank.results) == len(rank.order)
        assert right(rank.results)


def test_a_rank_killed_at_any_step_leaves_the_others_with_right_results() -> None:
    def run(kill: tuple[int, int] | None, patience: int) -> tuple[Host, dict[int, Rank]]:
        host = Host(3, 5, rooms=2, kill=kill)
        ranks: dict[int, Rank] = {}

        def work(memory: SteppedMemory) -> None:
            ranks[memory.rank] = Rank(memory, shuffled(5), 2, patience=patience)
            ranks[memory.rank].run()

        host.run(work)
        return host, ranks

    total = run(None, 100_000)[0].steps[1]
    for step in range(1, total + 1, 11):
        host, ranks = run((1, step), 100)
        killed = host.ended.pop(1)
        assert killed is None or isinstance(killed, Killed)
        assert host.ended == {0: None, 2: None}, step
        assert right(ranks[0].results), step
        assert right(ranks[2].results), step


class Quiet(Host):
    """Every store is seen at once, and nobody else has a turn: the test plays all ranks."""

    def step(self, rank: int) -> None:
        for each in range(len(self.segments)):
            self.drain(each)


def test_a_group_whose_only_room_was_another_groups_meanwhile_goes_on_with_its_numbers() -> None:
    host = Quiet(3, 0, rooms=1)
    ranks = [Rank(SteppedMemory(host, rank), (), 1) for rank in range(3)]
    words = np.frombuffer(host.segments[0], np.uint64, 512)
    for turn, (group, number) in enumerate([(101, 0), (104, 0), (101, 1), (103, 0), (101, 2)]):
        members = [rank for rank in ranks if group in rank.rows]
        for rank in members:
            row = rank.rows[group]
            assert row.take_number() == number
            row.under_way += 1
            row.small.add(rank.call(row, number))
        for rank in members * 6:
            rank.further(rank.rows[group])
        assert all(np.array_equal(rank.results[group, number], expected(group, number)) for rank in members) or (
            number != LARGE and all(rank.results[group, number] == expected(group, number) for rank in members)
        )
        assert (int(words[OWNERS]), int(words[OWNERS + 1])) == (group, turn)


def test_a_room_that_a_late_rank_still_reads_is_not_given_away() -> None:
    """Rank 0 has all that it called, and rank 1 has not looked since: the call of another group waits for a room."""
    host = Quiet(3, 0, rooms=1)
    ranks = [Rank(SteppedMemory(host, rank), (), 1) for rank in range(3)]

    def begin(rank: int, group: int) -> int:
        row = ranks[rank].rows[group]
        row.under_way += 1
        row.small.add(ranks[rank].call(row, row.take_number()))
        return ranks[rank].further(row)

    assert begin(1, 101) == 0
    assert begin(0, 101) == 1
    assert begin(2, 103) == 0
    assert begin(0, 103) == 0
    assert ranks[0].rows[103].small.waiting
    assert ranks[1].further(ranks[1].rows[101]) == 1
    assert ranks[0].further(ranks[0].rows[103]) == 1
    assert right(ranks[0].results)
    assert right(ranks[1].results)


@pytest.mark.parametrize("rooms", [3, 1 << 63, (1 << 64) - 1])
def test_a_peer_that_names_more_rooms_than_there_are_is_not_followed(rooms: int) -> None:
    host = Quiet(3, 0, rooms=2)
    rank = Rank(SteppedMemory(host, 0), (), 1)
    row = rank.rows[101]
    host.segments[1][8 * ROOMS : 8 * ROOMS + 8] = rooms.to_bytes(8, "little")
    row.small.add(rank.call(row, row.take_number()))
    row.under_way += 1
    assert rank.further(row) == 0
    assert row.load(1, 8) == 0


def test_a_peer_whose_room_says_what_cannot_be_is_found_out_by_its_rank_in_the_view() -> None:
    host = Quiet(3, 0, rooms=2)
    ranks = [Rank(SteppedMemory(host, rank), (), 1) for rank in range(3)]
    for rank in (ranks[2], ranks[0]):
        row = rank.rows[103]
        row.small.add(rank.call(row, row.take_number()))
        row.under_way += 1
    ranks[2].further(ranks[2].rows[103])
    at = host.layout.room(0) + 8 * 8
    host.segments[2][at : at + 8] = (1 << 40).to_bytes(8, "little")
    with pytest.raises(Spoiled) as caught:
        ranks[0].further(ranks[0].rows[103])
    assert caught.value.rank == 2  # number 0 of the group
