"""Who takes calls further and who is woken, on memory whose every load and store is a step: no wake-up may be lost.

The clock of these ranks stands still, so no tick makes up for one: a rank does something when it calls, when what it
has queued for its loop is due, and when somebody has woken it. Otherwise only the others go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from host_memory import Host, SteppedMemory

import quicoll.local.rooms
from quicoll.engine.host import MetHost
from quicoll.engine.neighbourhood import Neighbourhood
from quicoll.engine.rows import CallRow, NearCall
from quicoll.local.layout import FRONT, ROOM, SLOTS, SMALL_BYTES, WAKE, SegmentLayout
from quicoll.local.passages import Moved, Passage, Routes
from quicoll.local.small import Counts, SmallCall


class Loop:
    """Queues what is to be called; its time does not pass."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []

    def call_later(self, seconds: float, what: Callable[[], None]) -> Any:
        return self

    def cancel(self) -> None:
        """Of a timer."""

    def call_soon(self, what: Callable[..., None], *args: Any) -> None:
        self.queue.append(lambda: what(*args))

    call_soon_threadsafe = call_soon


class Wakes:
    """quicoll.engine.host.HostWakes: marks that a rank finds when it looks. marks: of all ranks, by rank and place."""

    crowded = True
    thread_in_front = False

    def __init__(self, rank: int, marks: dict[tuple[int, bool], bool]) -> None:
        self.rank = rank
        self.marks = marks
        self.on_processor = rank % 2
        self.rings: Callable[[int], None] = lambda rank: None
        self.on_back: Callable[[], None] = lambda: None
        self.on_front: Callable[[], None] = lambda: None

    def now(self) -> float:
        return 0.0

    def now_ns(self) -> int:
        return 0

    def processor(self) -> int:
        return self.on_processor

    def listen(self, on_back: Callable[[], None], on_ended: Callable[[int], None]) -> None:
        self.on_back = on_back

    def ring(self, rank: int, *, front: bool) -> None:
        self.rings(rank)
        self.marks[rank, front] = True

    def wait_in(self, loop: Any, on_front: Callable[[], None]) -> bool:
        self.on_front = on_front
        return True

    def seen(self) -> bool:
        """See the marks that were left for this rank; return whether there were any."""
        back, front = self.marks.pop((self.rank, False), False), self.marks.pop((self.rank, True), False)
        if back:
            self.on_back()
        if front:
            self.on_front()
        return back or front

    def close(self) -> None:
        """Nothing is left."""


class Overseer:
    """Hears of what must not happen."""

    def __getattr__(self, name: str) -> Any:
        def refuse(*args: Any) -> None:
            raise AssertionError(f"{name}{args}")

        return refuse


class Rank:
    """One rank's neighbourhood, its calls and their results."""

    def __init__(self, memory: SteppedMemory, marks: dict[tuple[int, bool], bool]) -> None:
        self.rank = memory.rank
        self.memory = memory
        self.loop = Loop()
        self.wakes = Wakes(memory.rank, marks)
        met = MetHost(memory, memory, cast("Any", self.wakes))
        self.near = Neighbourhood(met, loop=cast("Any", self.loop))
        self.near.attach(cast("Any", Overseer()), lambda rank: None)
        self.results: dict[tuple[int, int], bytes] = {}
        self.over = 0

    def call(self, row: CallRow, *, large: bool = False, attended: bool = False, known: bool = False) -> NearCall:
        number = row.take_number()
        given = bytes([self.rank, number])
        key = row.group, number
        many = len(row.ranks)

        def combine(payloads: Sequence[bytes], counts: Counts) -> None:
            self.results[key] = b"".join(payloads)

        def carried(layout: SegmentLayout, counts: Counts) -> Passage:
            output = np.zeros(2 * many, np.uint8)
            outputs.append(output)
            return Moved(layout, row.rank, Routes([2] * many), np.frombuffer(given, np.uint8), output, reads=True)

        outputs: list[Any] = []
        size = SMALL_BYTES + 1 if large else len(given)
        sizes = [size] * many if known else None
        small = SmallCall(number, f"call of {row.group}", lambda: given, size, combine, carried, sizes=sizes)
        call = NearCall(self.near, row, small, f"call#{number}", timeout=1.0, step=None)

        def settle(number: int | None, error: BaseException | None, idle: bool) -> None:
            assert error is None
            self.over += 1
            if outputs:
                self.results[key] = outputs[0].tobytes()

        call.settle = settle
        assert self.near.begin(call)
        if attended:
            self.near.attend(call, cast("Any", self.loop))
        return call

    def wakes_up(self) -> bool:
        """Do what is due; return whether anything was."""
        queue, self.loop.queue[:] = list(self.loop.queue), []
        for due in queue:
            due()
        return self.wakes.seen() or bool(queue)


GROUPS: dict[int, tuple[int, ...]] = {0: (0, 1, 2), 101: (0, 1), 102: (2, 1), 103: (2, 0), 104: (1, 2, 0)}


@pytest.mark.parametrize("only", [True, False], ids=["the group of all", "sub-groups too"])
@pytest.mark.parametrize("seed", range(40))
def test_every_call_ends_by_wake_ups_alone(seed: int, only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quicoll.local.rooms, "KEPT", 2)
    groups = {0: GROUPS[0]} if only else GROUPS
    order = [group for group in groups for _ in range(2 * SLOTS + 3 if only else 4)]
    draw = random.Random(seed)
    draw.shuffle(order)
    larges = [draw.random() < 0.1 for _ in order]
    known, often = seed % 2 == 0, draw.choice([0.1, 0.4, 1.0])
    host = Host(3, seed, rooms=4)
    marks: dict[tuple[int, bool], bool] = {}
    ranks: dict[int, Rank] = {}
    issued = [0] * 3

    def work(memory: SteppedMemory) -> None:
        rank = ranks[memory.rank] = Rank(memory, marks)
        chance = random.Random(seed * 3 + memory.rank)
        ahead = chance.choice([1, 3, len(order)])
        idle = 0
        for group, large in zip(order, larges, strict=True):
            if memory.rank not in groups[group]:
                continue
            while issued[memory.rank] - rank.over >= ahead and idle < 5000:
                idle = 0 if rank.wakes_up() else idle + 1
                host.step(memory.rank)
            row = rank.near.row if group == 0 else rank.near.row_of(group, groups[group])
            issued[memory.rank] += 1
            rank.call(row, large=large, attended=chance.random() < often, known=known)
        while issued[memory.rank] > rank.over and idle < 5000:
            idle = 0 if rank.wakes_up() else idle + 1
            host.step(memory.rank)

    host.run(work)
    assert host.ended == dict.fromkeys(range(3))
    assert [ranks[rank].over for rank in range(3)] == issued
    for rank in range(3):
        for (group, number), found in ranks[rank].results.items():
            assert found == b"".join(bytes([each, number]) for each in groups[group])


class Scripted(Host):
    """Every store is seen at once but for those of rank 1, which are seen at the next fence of rank 0."""

    def step(self, rank: int) -> None:
        self.drain(0)


class FencedMemory(SteppedMemory):
    def fence(self) -> None:
        self.host.drain(0)
        self.host.drain(1)


def test_the_last_two_that_publish_in_one_moment_both_see_that_all_have() -> None:
    """Rank 0 publishes what has waited for a slot, and does not see yet that rank 1 has: that one has not seen rank 0
    either, and wakes nobody. So rank 0 has to look behind its fence; nothing else would tell it."""
    host = Scripted(2, 0)
    marks: dict[tuple[int, bool], bool] = {}
    first, second = (Rank(memory(host, rank), marks) for rank, memory in enumerate((FencedMemory, SteppedMemory)))
    for _ in range(SLOTS):
        second.call(second.near.row)
    host.drain(1)
    for _ in range(SLOTS + 1):
        first.call(first.near.row)
    assert first.over == SLOTS
    assert first.near.row.small.waiting  # rank 1 has taken nothing yet
    peer = second.near.row.small
    peer.publish()
    assert len(peer.take()) == SLOTS
    host.drain(1)
    number = second.near.row.take_number()
    peer.add(SmallCall(number, "call of 0", lambda: bytes([1, number]), 2, lambda payloads, counts: None, nothing))
    peer.publish()
    assert not peer.take()
    assert peer.published == SLOTS + 1  # its stores are on their way
    marks.clear()
    first.near._on_back()
    assert first.over == SLOTS + 1
    assert first.results[0, SLOTS] == bytes([0, SLOTS, 1, SLOTS])


class Seen(Host):
    """Every store is seen at once."""

    def step(self, rank: int) -> None:
        self.drain(rank)


def test_who_publishes_last_wakes_those_on_other_processors_first_and_takes_the_results_after_that() -> None:
    host = Seen(5, 0)
    marks: dict[tuple[int, bool], bool] = {}
    ranks = [Rank(SteppedMemory(host, rank), marks) for rank in range(5)]
    rung: list[tuple[int, int]] = []
    ranks[4].wakes.rings = lambda rank: rung.append((rank, len(ranks[4].results)))
    for number, order in enumerate([[1, 3, 0, 2], [1, 3, 0, 2], [1, 2, 3, 0]]):
        if number == 2:
            ranks[2].wakes.on_processor = 1  # it was moved
        for rank in ranks:
            rank.call(rank.near.row)
        assert rung == [(rank, number) for rank in order]
        assert len(ranks[4].results) == number + 1
        rung.clear()
        for rank in ranks:
            rank.near.go_on()


def nothing(layout: SegmentLayout, counts: Counts) -> Passage:
    raise AssertionError("all payloads fit")


def test_where_nobody_looks_a_small_call_after_the_first_leaves_the_engine_asleep() -> None:
    """Whoever publishes last wakes the loop in front, awaited or not; the engine only for what may be large."""
    host = Scripted(2, 0)
    marks: dict[tuple[int, bool], bool] = {}
    first, second = (Rank(FencedMemory(host, rank), marks) for rank in range(2))

    def both(*, known: bool, attended: bool) -> dict[tuple[int, bool], bool]:
        marks.clear()
        first.call(first.near.row, attended=attended, known=known)
        second.call(second.near.row, known=known)
        return dict(marks)

    assert both(known=True, attended=False) == {(0, False): True}  # nobody has been in front yet
    assert first.wakes_up()
    assert both(known=True, attended=True) == {(0, True): True}
    assert first.wakes_up()
    for _ in range(3):
        assert both(known=True, attended=False) == {(0, True): True}
        assert first.wakes_up()
    assert both(known=False, attended=False) == {(0, True): True, (0, False): True}
    assert first.wakes_up()
    assert first.over == second.over == 6
    assert both(known=True, attended=False) == {(0, True): True}
    first.near.go_on()  # as where the step is left, before the loop has had a turn
    assert first.over == 7


def test_where_nobody_looks_a_small_call_that_waits_for_a_slot_still_tells_so() -> None:
    host = Scripted(2, 0)
    first, second = (Rank(FencedMemory(host, rank), {}) for rank in range(2))
    first.call(first.near.row, attended=True, known=True)
    for _ in range(SLOTS):
        assert second.memory.load(0, WAKE) == FRONT
        first.call(first.near.row, known=True)
    assert first.near.row.small.waiting
    assert second.memory.load(0, WAKE) & (FRONT | ROOM) == FRONT | ROOM
