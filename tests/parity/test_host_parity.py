"""What ranks ask of their host is answered alike by this one and by a simulated one: one suite, run on both.

The simulated host is worth what it says only if it is a host. So nothing here asks on which of the two it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from parity_hosts import HostTest, Ranks, on_simulated_host, on_this_host

import quicoll
from quicoll.engine.neighbourhood import Neighbourhood
from quicoll.engine.rows import NearCall
from quicoll.local.layout import CONSUMED, PUBLISHED, SLOTS, SMALL_BYTES, STAGE, SegmentLayout
from quicoll.local.meeting import MeetingFailed
from quicoll.local.passages import Passage, Reduced
from quicoll.local.sealing import unusable
from quicoll.local.small import Counts, Differing, SmallCall, Spoiled

if TYPE_CHECKING:
    from quicoll.engine.host import MetHost
    from quicoll.numerics.reduce import After


def on_both(test: HostTest) -> Any:
    """Make it a pytest test on each host."""
    real = [pytest.mark.loopback, pytest.mark.skipif(bool(unusable()), reason=unusable() or "usable")]

    @pytest.mark.parametrize(
        "host",
        [pytest.param(on_this_host, id="real", marks=real), pytest.param(on_simulated_host, id="simulated")],
    )
    def run(host: Callable[[HostTest], None]) -> None:
        host(test)

    run.__doc__ = test.__doc__
    return run


# -- to meet ---------------------------------------------------------------------------------------------------------


@on_both
async def test_what_one_rank_writes_all_others_read_and_only_there(ranks: Ranks) -> None:
    met = await ranks.meet(3)
    for rank, each in enumerate(met):
        memory = each.memory
        assert (memory.rank, memory.layout.world) == (rank, 3)
        at = memory.layout.payload(2)
        memory.write(at, bytes([rank + 1]) * 100)
        np.copyto(memory.view(rank, memory.layout.input(1), 5), np.full(5, rank + 10, np.uint8))
        memory.store(STAGE, 1000 + rank)
        memory.fence()
    for each in met:
        for rank in range(3):
            memory = each.memory
            assert memory.load(rank, STAGE) == 1000 + rank
            assert memory.load(rank, PUBLISHED) == memory.load(rank, CONSUMED) == 0
            assert memory.read(rank, memory.layout.payload(2), 101) == bytes([rank + 1]) * 100 + b"\0"
            assert bytes(memory.view(rank, memory.layout.input(1), 6)) == bytes([rank + 10]) * 5 + b"\0"
            assert each.memory_for_large.load(rank, STAGE) == 1000 + rank


@on_both
async def test_what_stands_in_a_tensor_of_a_rank_all_others_read_where_it_says_and_nowhere_else(ranks: Ranks) -> None:
    met = await ranks.meet(3)
    tensor = quicoll.empty(1000, "uint8")
    place = met[1].memory.place(tensor)
    assert place
    assert met[1].memory_for_large.place(tensor[7:9]) == place + 7
    assert met[1].memory.place(np.empty(1000, np.uint8)) == 0
    for value in (3, 4):
        tensor[:] = value
        for rank in (0, 2):
            for memory in (met[rank].memory, met[rank].memory_for_large):
                found = memory.lent(1, place, 1000)
                assert found is not None
                assert bytes(found) == bytes([value]) * 1000
    for wrong, size in ((0, 1), (1 << 63, 1), (1, 1 << 62)):
        assert met[0].memory.lent(1, wrong, size) is None


@on_both
async def test_who_does_not_know_the_secrets_is_not_met(ranks: Ranks) -> None:
    brought = [ranks.bring(rank, 2) for rank in range(2)]
    told = await asyncio.gather(
        ranks.meeting(0, brought, within=0.3),
        ranks.meeting(1, brought, within=0.3, wrong=True),
        return_exceptions=True,
    )
    assert [type(error) for error in told] == [MeetingFailed] * 2


@on_both
async def test_a_rank_that_does_not_come_is_named_and_nothing_is_kept(ranks: Ranks) -> None:
    before = ranks.held()
    brought = [ranks.bring(rank, 3) for rank in range(3)]
    told = await asyncio.gather(*(ranks.meeting(rank, brought, within=0.3) for rank in (0, 1)), return_exceptions=True)
    assert all("not met" in str(error) for error in told)
    del brought, told
    ranks.close()
    await _given_back(ranks, before)


@on_both
async def test_who_dials_a_place_that_is_gone_is_refused(ranks: Ranks) -> None:
    brought = [ranks.bring(rank, 2) for rank in range(2)]
    brought[0].close()
    with pytest.raises(MeetingFailed, match="rank 0 not met"):
        await ranks.meeting(1, brought)
    ranks.brought.remove(brought[0])


@on_both
async def test_all_that_ranks_brought_is_given_back_at_the_end(ranks: Ranks) -> None:
    before = ranks.held()
    await ranks.meet(3)
    assert ranks.held() > before
    ranks.close()
    await _given_back(ranks, before)


# -- to be woken -----------------------------------------------------------------------------------------------------


class Woken:
    """How often a rank was woken, and whose ends it has heard of."""

    def __init__(self, met: MetHost) -> None:
        self.back = self.front = 0
        self.ended: list[int] = []
        self.event = asyncio.Event()
        self.met = met

    def listen(self) -> Woken:
        self.met.wakes.listen(self._on_back, self._on_ended)
        return self

    def _on_back(self) -> None:
        self.back += 1
        self.event.set()

    def on_front(self) -> None:
        self.front += 1
        self.event.set()

    def _on_ended(self, rank: int) -> None:
        self.ended.append(rank)
        self.event.set()

    async def wait(self) -> None:
        await self.event.wait()
        self.event.clear()


@on_both
async def test_who_is_woken_at_the_back_hears_it_there_and_nobody_else_does(ranks: Ranks) -> None:
    woken = [Woken(met).listen() for met in await ranks.meet(3)]
    woken[0].met.wakes.ring(2, front=False)
    await woken[2].wait()
    assert [(each.front, each.back) for each in woken] == [(0, 0), (0, 0), (0, 1)]


@on_both
async def test_a_mark_that_was_left_before_anybody_listened_is_seen_and_several_may_be_one(ranks: Ranks) -> None:
    met = await ranks.meet(2)
    for _ in range(5):
        met[0].wakes.ring(1, front=True)
        met[0].wakes.ring(1, front=False)
    woken = Woken(met[1]).listen()
    assert met[1].wakes.wait_in(ranks.loop, woken.on_front)
    assert met[1].wakes.wait_in(ranks.loop, woken.on_front)
    while not (woken.front and woken.back):
        await woken.wait()
    assert woken.front <= 5
    assert woken.back <= 5
    assert not met[1].wakes.thread_in_front


@on_both
async def test_a_process_that_ends_is_heard_of_once(ranks: Ranks) -> None:
    met, end = await ranks.beside_one_that_ends()
    woken = Woken(met).listen()
    end()
    await woken.wait()
    await _later()
    assert woken.ended == [1]
    assert met.memory.load(1, PUBLISHED) == 0  # its memory is there as long as somebody has it


@on_both
async def test_who_has_closed_hears_nothing_more_and_nobody_minds(ranks: Ranks) -> None:
    met, end = await ranks.beside_one_that_ends()
    woken = Woken(met).listen()
    met.wakes.close()
    ranks.met.remove(met)
    end()
    await _later()
    assert (woken.ended, woken.back) == ([], 0)


async def _given_back(ranks: Ranks, before: int) -> None:
    """No more is held than before; a thread may be at its very end. The test's limit is that of this wait."""
    while ranks.held() != before:  # noqa: ASYNC110 - the kernel tells nobody of a descriptor that is closed
        await asyncio.sleep(0.01)


async def _later() -> None:
    """What was to come at once has come."""
    for _ in range(20):
        await asyncio.sleep(0.01)


# -- calls -----------------------------------------------------------------------------------------------------------


class Side:
    """One rank's neighbourhood, with its calls. failed: by what; late: who was there in time."""

    asks = False  # nobody is asked where he is

    def __init__(self, ranks: Ranks, met: MetHost) -> None:
        ranks.met.remove(met)
        self.near = Neighbourhood(met, loop=ranks.loop)
        self.near.attach(self, self._gone)
        self.loop = ranks.loop
        self.results: dict[int, list[bytes]] = {}
        self.failed: Exception | None = None
        self.present: list[int] | None = None
        self.gone: list[int] = []
        self._ended: dict[int, asyncio.Future[None]] = {}
        self.any: asyncio.Event = asyncio.Event()

    def _gone(self, rank: int) -> None:
        self.gone.append(rank)
        self.any.set()

    def near_failed(self, call: NearCall | None, error: Exception) -> None:
        self.failed = error
        self.any.set()

    def near_cancelled(self, call: NearCall) -> None:
        raise AssertionError("nobody cancels")

    def near_called(self, call: NearCall, arrived_ns: dict[int, int]) -> None:
        """Somebody was waited for."""

    def near_due(self, call: NearCall, present: Sequence[int]) -> None:
        raise AssertionError("it does not want to hear of that")

    def near_late(self, call: NearCall, present: Sequence[int]) -> None:
        self.present = list(present)
        self.any.set()

    def near_tick(self) -> None:
        """Time passes."""

    def call(self, given: bytes, *, timeout: float = 100.0, signature: str = "sum") -> Awaitable[None]:
        number = self.near.row.take_number()
        ended = self._ended[number] = self.loop.create_future()

        def combine(payloads: Sequence[bytes], counts: Counts) -> None:
            self.results[number] = list(payloads)

        def carry(layout: SegmentLayout, counts: Counts) -> Passage:
            raise AssertionError("all payloads fit")

        sizes = [len(given)] * self.near.world
        small = SmallCall(number, signature, lambda: given, len(given), combine, carry, sizes=sizes)
        call = self._begun(small, ended, timeout)
        self.near.attend(call, self.loop)
        return ended

    def _begun(self, small: SmallCall, ended: asyncio.Future[None], timeout: float) -> NearCall:
        call = NearCall(self.near, self.near.row, small, f"call#{small.number}", timeout=timeout, step=None)

        def settle(number: int | None, error: BaseException | None, idle: bool) -> None:
            if not ended.done():
                ended.set_result(None)

        call.settle = settle
        assert self.near.begin(call)
        return call

    def reduce(
        self, given: Any, combine: Callable[[Sequence[Any], Any, After], None] | None = None
    ) -> tuple[Awaitable[None], Any]:
        """A large call, whatever its size."""
        near, output = self.near, np.empty_like(given)
        ended = self.loop.create_future()

        def add(values: Sequence[Any], out: Any, after: After) -> None:
            np.copyto(out, sum(values))
            after(0, out.size)

        def small(payloads: Sequence[bytes], counts: Counts) -> None:
            raise AssertionError("no payload is in a slot")

        def carry(layout: SegmentLayout, counts: Counts) -> Passage:
            return Reduced(
                layout=layout,
                rank=near.rank,
                held=[1] * near.world,
                leaves=[given],
                storage=given.dtype,
                elements=given.size,
                rows=None,
                root=None,
                output=output,
                combine=combine or add,
            )

        self._begun(
            SmallCall(near.row.take_number(), "large", bytes, max(given.nbytes, SMALL_BYTES + 1), small, carry),
            ended,
            100.0,
        )
        return ended, output


async def _sides(ranks: Ranks, world: int) -> list[Side]:
    return [Side(ranks, met) for met in await ranks.meet(world)]


def _end(sides: Sequence[Side]) -> None:
    for side in sides:
        side.near.end()


@on_both
async def test_many_small_calls_at_once_end_on_all_ranks_with_what_all_gave(ranks: Ranks) -> None:
    sides = await _sides(ranks, 3)
    count = 3 * SLOTS
    for number in range(count):
        for rank, side in enumerate(sides):
            last = side.call(bytes([rank, number]))
    del last
    for side in sides:
        await asyncio.gather(*side._ended.values())
        assert side.results == {number: [bytes([rank, number]) for rank in range(3)] for number in range(count)}
        assert side.near.running == 0
    _end(sides)


@on_both
async def test_small_calls_and_large_reductions_do_not_disturb_each_other(ranks: Ranks) -> None:
    sides = await _sides(ranks, 3)
    values = [np.arange(600_000, dtype=np.int64) * (rank + 1) for rank in range(3)]
    begun = [
        (side.reduce(values[rank]), side.call(b"x"), side.reduce(values[rank][:5])) for rank, side in enumerate(sides)
    ]
    for (ended, output), small, (ended_after, output_after) in begun:
        await small
        await ended
        await ended_after
        assert (output == sum(values)).all()
        assert (output_after == sum(each[:5] for each in values)).all()
    _end(sides)


@on_both
async def test_who_calls_something_else_is_found_by_all_who_see_it(ranks: Ranks) -> None:
    sides = await _sides(ranks, 2)
    for rank, side in enumerate(sides):
        side.call(b"x", signature=f"call of {rank}")
    for side in sides:
        await side.any.wait()
        assert isinstance(side.failed, Differing)
        assert side.failed.called == {0: (0, "call of 0"), 1: (0, "call of 1")}
        assert side.results == {}
    _end(sides)


@on_both
async def test_a_call_that_another_rank_does_not_make_is_late(ranks: Ranks) -> None:
    sides = await _sides(ranks, 3)
    for side in sides[:2]:
        side.call(b"x", timeout=0.1)
    await sides[0].any.wait()
    assert sides[0].present == [0, 1]
    _end(sides)


@on_both
async def test_bits_that_change_after_they_were_written_are_found(ranks: Ranks) -> None:
    met = await ranks.meet(2)
    memory = met[0].memory
    sides = [Side(ranks, each) for each in met]
    sides[0].call(b"given")
    memory.write(memory.layout.payload(0), b"giveN")
    sides[1].call(b"other")
    await sides[1].any.wait()
    assert isinstance(sides[1].failed, Spoiled)
    assert (sides[1].failed.rank, sides[1].failed.bits) == (0, True)
    assert sides[1].results == {}
    _end(sides)


@on_both
async def test_a_large_reduction_that_has_failed_is_not_gone_on_with_and_neither_is_one_after_it(ranks: Ranks) -> None:
    met = await ranks.meet(2)
    sides = [Side(ranks, each) for each in met]
    troubles: list[Any] = []
    ranks.loop.set_exception_handler(lambda loop, context: troubles.append(context))
    values = np.ones(600_000)

    def refuse(values: Sequence[Any], out: Any, after: After) -> None:
        raise MemoryError("no room for it")

    sides[0].reduce(values, refuse)
    sides[0].reduce(values)
    sides[1].reduce(values)
    sides[1].reduce(values)
    await sides[0].any.wait()
    for _ in range(5):  # it is woken, and time passes
        met[1].wakes.ring(0, front=False)
        await _later()
    assert isinstance(sides[0].failed, MemoryError)
    assert len(sides[0].near.end()) == 2
    _end(sides)
    assert troubles == []


@on_both
async def test_counts_that_cannot_be_are_found(ranks: Ranks) -> None:
    met = await ranks.meet(2)
    met[0].memory.store(PUBLISHED, 10_000)
    sides = [Side(ranks, each) for each in met]
    sides[1].call(b"x")
    await sides[1].any.wait()
    assert isinstance(sides[1].failed, Spoiled)
    assert not sides[1].failed.bits
    _end(sides)


@on_both
async def test_a_neighbour_that_ends_is_gone_a_moment_later_and_calls_under_way_are_handed_back(ranks: Ranks) -> None:
    met, end = await ranks.beside_one_that_ends()
    side = Side(ranks, met)
    side.call(b"x")
    end()
    await side.any.wait()
    assert side.gone == [1]
    assert [call.name for call in side.near.end()] == ["call#0"]
    assert side.near.end() == []
