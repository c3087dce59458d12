"""Parcels between ranks of one host: every order of loads and stores that chance finds, and a death at each."""

from __future__ import annotations

import random
from typing import Any

import pytest
from host_memory import Host, Killed, SteppedMemory

from quicoll.local.layout import PARCELS, SegmentLayout
from quicoll.local.parcels import NOTICE_BYTES, Notice, Parcels
from quicoll.local.small import Spoiled

EACH = 2 * PARCELS  # payloads that each rank gives each other one: places go round
PARCEL = 4096


def payload(writer: int, reader: int, number: int) -> bytes:
    return random.Random(f"{writer} {reader} {number}").randbytes(1 + (number * 977) % PARCEL)


class Wires:
    """What notices and payloads travel by, in any order. `sent` is whole: a system's call is a barrier."""

    def __init__(self, world: int) -> None:
        self.sent: dict[tuple[int, int], list[tuple[int, Notice, bytes]]] = {
            (writer, reader): [] for writer in range(world) for reader in range(world) if writer != reader
        }
        self.direct = 0


class Rank:
    """Gives all that it has to give, and takes what has come, until nothing is left or `patience` ends."""

    def __init__(self, memory: SteppedMemory, wires: Wires, *, patience: int, eager: float) -> None:
        self.memory, self.wires, self.patience, self.eager = memory, wires, patience, eager
        self.parcels = Parcels(memory)
        self.got: dict[tuple[int, int], bytes] = {}

    def run(self) -> None:
        memory, wires, rank = self.memory, self.wires, self.memory.rank
        chance = random.Random(f"{rank}")
        others = [each for each in range(memory.layout.world) if each != rank]
        left = [(reader, number) for number in range(EACH) for reader in others]
        while (left or len(self.got) < EACH * len(others)) and self.patience:
            self.patience -= 1
            memory.fence()  # others have their turns
            if left and chance.random() < 0.6:
                reader, number = left.pop(0)
                given = bytearray(payload(rank, reader, number))
                notice = self.parcels.give(reader, memoryview(given))
                if notice is None:
                    self.parcels.taken()
                    notice = self.parcels.give(reader, memoryview(given))
                memory.fence()  # as the system's call does that sends it
                wires.direct += notice is None
                wires.sent[rank, reader].append((number, notice or Notice(0, 0, 0, 0), bytes(given)))
                given[:] = bytes(len(given))  # it is its owner's again
            writer = chance.choice(others)
            waiting = wires.sent[writer, rank]
            if waiting and chance.random() < self.eager:
                number, notice, direct = waiting.pop(chance.randrange(len(waiting)))
                target = bytearray(len(direct))
                if notice.turn:
                    self.parcels.take(writer, Notice.read(notice.packed()), memoryview(target))
                else:
                    target[:] = direct
                self.got[writer, number] = bytes(target)
            self.parcels.taken()


def run(
    seed: int, world: int, *, kill: tuple[int, int] | None = None, patience: int = 100_000, eager: float = 0.7
) -> tuple[Host, Any, Wires]:
    host = Host(world, seed, kill=kill, parcel=PARCEL)
    wires = Wires(world)
    ranks: dict[int, Rank] = {}

    def work(memory: SteppedMemory) -> None:
        ranks[memory.rank] = Rank(memory, wires, patience=patience, eager=eager)
        ranks[memory.rank].run()

    host.run(work)
    return host, ranks, wires


def check(rank: Rank) -> None:
    for (writer, number), got in rank.got.items():
        assert got == payload(writer, rank.memory.rank, number), (writer, number)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_all_payloads_arrive_in_whatever_order_they_are_taken(seed: int, world: int) -> None:
    host, ranks, _ = run(seed, world)
    assert host.ended == dict.fromkeys(range(world))
    for rank in ranks.values():
        assert len(rank.got) == EACH * (world - 1)
        check(rank)


def test_what_finds_no_place_goes_by_the_network_and_places_go_round() -> None:
    host, ranks, wires = run(3, 2, eager=0.02)
    assert host.ended == {0: None, 1: None}
    assert 0 < wires.direct < 2 * EACH
    for rank in ranks.values():
        assert len(rank.got) == EACH
        check(rank)


def test_a_rank_killed_at_any_step_has_given_whole_payloads_or_none() -> None:
    steps = run(1, 2)[0].steps[0]
    for at in range(1, steps, 7):
        host, ranks, _ = run(1, 2, kill=(0, at), patience=300)
        assert isinstance(host.ended[0], Killed)
        assert host.ended[1] is None
        check(ranks[1])


@pytest.mark.parametrize(
    "lie",
    [
        {"place": PARCELS},
        {"place": 1 << 63},
        {"nbytes": 9},
        {"nbytes": 1 << 40},
    ],
)
def test_a_notice_that_cannot_be_is_refused_before_anything_is_read(lie: dict[str, int]) -> None:
    host = Host(2, 1, parcel=PARCEL)
    notice = Notice(0, 1, 8, 0)._replace(**lie)
    found: list[Exception] = []

    def work(memory: SteppedMemory) -> None:
        if memory.rank == 0:
            parcels = Parcels(memory)
            before = host.steps[0]
            try:
                parcels.take(1, notice, memoryview(bytearray(8)))
            except Spoiled as error:
                found.append(error)
            assert host.steps[0] == before

    host.run(work)
    assert host.ended == {0: None, 1: None}
    assert [(error.rank, error.bits) for error in found if isinstance(error, Spoiled)] == [(1, False)]


def test_another_bit_is_found_and_its_writer_named_and_the_place_is_kept() -> None:
    host = Host(2, 1, parcel=PARCEL)
    found: list[Spoiled] = []
    left: list[int] = []
    notices: list[Notice] = []

    def work(memory: SteppedMemory) -> None:
        parcels = Parcels(memory)
        if memory.rank == 0:
            notice = parcels.give(1, memoryview(b"something"))
            assert notice is not None
            memory.fence()
            host.segments[0][memory.layout.parcel_at(notice.place) + 3] ^= 4
            notices.append(notice)
            return
        while not notices:
            memory.fence()
        try:
            parcels.take(0, notices[0], memoryview(bytearray(9)))
        except Spoiled as error:
            found.append(error)
        left.append(memory.load(1, memory.layout.taken(0, notices[0].place)))

    host.run(work)
    assert host.ended == {0: None, 1: None}
    assert [(error.rank, error.bits) for error in found] == [(0, True)]
    assert left == [0]


def test_where_there_is_no_memory_for_a_place_there_is_none() -> None:
    class Full(SteppedMemory):
        def make(self, at: int, size: int) -> None:
            if at != self.layout.taken_at:
                raise OSError(28, "No space left on device")

    given: list[Notice | None] = []
    host = Host(2, 1, parcel=PARCEL)
    host.run(
        lambda memory: given.append(Parcels(Full(memory.host, memory.rank)).give(1 - memory.rank, memoryview(b"x")))
    )
    assert host.ended == {0: None, 1: None}
    assert given == [None, None]


def test_a_table_and_places_are_behind_all_else_in_a_segment() -> None:
    for world in (2, 5, 64):
        layout = SegmentLayout.of_ranks(world)
        assert layout.taken_at == layout.room(layout.rooms)
        assert 8 * layout.taken(0, 0) == layout.taken_at
        assert 8 * layout.taken(world - 1, PARCELS - 1) + 8 <= layout.parcel_at(0)
        assert layout.parcel_at(PARCELS - 1) + layout.parcel == layout.size
        assert layout.parcel_at(0) % 4096 == 0


def test_a_notice_is_read_as_it_was_sent() -> None:
    notice = Notice(3, 1 << 40, 5, (1 << 64) - 1)
    assert len(notice.packed()) == NOTICE_BYTES
    assert Notice.read(bytearray(notice.packed())) == notice
