"""Faults between a socket and an endpoint."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicoll_transport.faults.compose import (
    BurstLoss,
    Chain,
    Corrupt,
    Cut,
    Delay,
    Drop,
    Duplicate,
    Faults,
    Hold,
    Rate,
    Reorder,
)
from quicoll_transport.faults.socket import FaultyIO
from quicoll_transport.net.runs import DatagramRun, apart, joined

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.udp import OnRuns, OnUnreachable

MS = 1_000_000
PEER = ("192.0.2.7", 7)


class Recorder:
    """An inner IO that keeps what it is given."""

    local_address: Address = ("192.0.2.1", 1)

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False
        self.push: OnRuns | None = None
        self.moved = asyncio.Event()

    def start(self, on_runs: OnRuns, on_unreachable: OnUnreachable) -> None:
        self.push = on_runs

    def send(self, runs: Sequence[DatagramRun]) -> None:
        assert not self.closed
        self.sent.extend(data for data, _ in apart(runs))
        self.moved.set()

    def close(self) -> None:
        self.closed = True


class Bench:
    """A FaultyIO on the running loop, between a Recorder and a list of what came in."""

    def __init__(self, **settings: int) -> None:
        self.faults = Faults(random.Random(1))
        self.inner = Recorder()
        self.got: list[bytes] = []
        self.io = FaultyIO(self.inner, self.faults, loop=asyncio.get_running_loop(), **settings)
        self.io.start(self._got, lambda address, trouble: None)

    def _got(self, runs: list[DatagramRun]) -> None:
        self.got.extend(data for data, _ in apart(runs))
        self.inner.moved.set()

    def send(self, *numbers: int) -> None:
        self.io.send(joined((bytes([n]), PEER) for n in numbers))

    def receive(self, *numbers: int) -> None:
        assert self.inner.push is not None
        self.inner.push(joined((bytes([n]), PEER) for n in numbers))

    async def settle(self) -> None:
        """Until nothing is under way."""
        while any(self.io._queues.values()):
            self.inner.moved.clear()
            await self.inner.moved.wait()


def numbers(data: Sequence[bytes]) -> list[int]:
    return [each[0] for each in data]


async def test_without_rules_datagrams_pass_at_once() -> None:
    bench = Bench()
    bench.send(1, 2)
    bench.receive(3)
    assert (numbers(bench.inner.sent), numbers(bench.got)) == ([1, 2], [3])
    assert bench.io._timer is None


async def test_jitter_keeps_the_order_in_both_directions() -> None:
    bench = Bench()
    bench.faults.add(Delay(0, jitter_ns=3 * MS))
    for i in range(0, 200, 2):
        bench.send(i, i + 1)
        bench.receive(i, i + 1)
    await bench.settle()
    assert numbers(bench.inner.sent) == numbers(bench.got) == list(range(200))
    assert bench.io._timer is None


async def test_order_is_kept_also_behind_what_is_due_while_the_loop_was_late() -> None:
    bench = Bench()
    rule = bench.faults.add(Delay(1))
    bench.send(1)
    rule.remove()
    bench.send(2)
    assert numbers(bench.inner.sent) == [1, 2]


async def test_reordering_happens_where_it_is_asked_for() -> None:
    bench = Bench()
    bench.faults.add(Reorder(0.3, later_ns=2 * MS))
    bench.send(*range(100))
    await bench.settle()
    assert sorted(numbers(bench.inner.sent)) == list(range(100))
    assert numbers(bench.inner.sent) != list(range(100))


async def test_copies_come_after_their_original() -> None:
    bench = Bench()
    bench.faults.add(Chain(Duplicate(1.0, later_ns=MS), Delay(MS)))
    bench.send(1)
    assert bench.inner.sent == []
    await bench.settle()
    assert numbers(bench.inner.sent) == [1, 1]


async def test_a_hold_keeps_both_directions_and_releases_each_in_order() -> None:
    bench = Bench()
    with bench.faults.add(Hold()) as held:
        bench.send(1, 2)
        bench.receive(3, 4)
        await bench.settle()
        assert (bench.inner.sent, bench.got) == ([], [])
        held.release()
        bench.send(5)
        assert numbers(bench.inner.sent) == [1, 2, 5], "what was held goes before what comes now"
        await bench.settle()
        assert numbers(bench.got) == [3, 4]


async def test_leaving_the_block_of_a_hold_delivers_without_anything_else_happening() -> None:
    bench = Bench()
    with bench.faults.add(Hold()):
        bench.send(1)
        bench.receive(2)
    await bench.settle()
    assert (numbers(bench.inner.sent), numbers(bench.got)) == ([1], [2])


async def test_a_release_inside_a_receive_does_not_enter_the_receiver_twice() -> None:
    bench = Bench()
    held = bench.faults.add(Hold())
    bench.receive(1)
    depth: list[int] = []
    active = 0

    def receive(runs: list[DatagramRun]) -> None:
        nonlocal active
        active += 1
        depth.append(active)
        held.release()
        bench.send(9)
        bench.inner.moved.set()
        active -= 1

    bench.io._on_runs = receive
    bench.faults.add(Drop(0.0))
    held.release()
    bench.send(8)
    await bench.settle()
    assert depth == [1]


async def test_closing_sends_what_is_under_way_and_leaves_nothing_behind() -> None:
    bench = Bench()
    hold = bench.faults.add(Cut(outgoing=False))
    bench.faults.add(Delay(3_600_000 * MS, jitter_ns=MS))
    bench.send(1, 2, 3)
    timer = bench.io._timer
    assert timer is not None
    hold.remove()
    bench.receive(4)
    bench.io.close()
    bench.io.close()
    assert numbers(bench.inner.sent) == [1, 2, 3], "it had left here"
    assert bench.got == [], "nothing is told after the close"
    assert bench.inner.closed
    assert bench.io._timer is None
    assert bench.faults.wake is None
    bench.send(5)
    bench.receive(6)
    assert (numbers(bench.inner.sent), bench.got) == ([1, 2, 3], [])


async def test_what_a_hold_keeps_is_gone_with_the_close() -> None:
    bench = Bench()
    held = bench.faults.add(Hold())
    bench.send(1)
    bench.io.close()
    held.remove()
    await asyncio.sleep(0)
    assert bench.inner.sent == []


@pytest.mark.parametrize("settings", [{"limit": 10}, {"limit_bytes": 10}])
async def test_what_is_under_way_is_bounded(settings: dict[str, int]) -> None:
    bench = Bench(**settings)
    bench.faults.add(Delay(3_600_000 * MS))
    bench.send(*range(30))
    assert bench.io.overflowed == 20
    bench.io.close()
    assert numbers(bench.inner.sent) == list(range(10))


async def test_a_slow_line_serialises_on_the_loops_clock() -> None:
    bench = Bench()
    bench.faults.add(Rate(1000, queue_bytes=8))  # 1 ms a byte
    bench.send(*range(20))
    assert len(bench.io._queues[True]) == 8
    due = sorted(entry[0] for entry in bench.io._queues[True])
    assert [later - earlier for earlier, later in pairwise(due)] == [MS] * 7
    await bench.settle()
    assert numbers(bench.inner.sent) == list(range(8))


# -- batches decide nothing ------------------------------------------------------------------------------------------


class HandLoop:
    """A loop whose clock and one timer a test moves by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timer: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> HandLoop:
        self.timer = when, callback
        return self

    def cancel(self) -> None:
        self.timer = None

    def run(self) -> None:
        while self.timer is not None:
            (self.now, callback), self.timer = self.timer, None
            callback()


def through_faults(seed: int, batches: Sequence[Sequence[tuple[bytes, Address]]], *, outgoing: bool) -> list[Any]:
    """What comes out, in order, of datagrams that go in as these batches, all at one time."""
    rules = Chain(
        BurstLoss.mean(0.2, burst=2), Corrupt(0.3), Rate(50_000), Delay(MS, 3 * MS), Reorder(0.2), Duplicate(0.3)
    )
    loop, inner, came = HandLoop(), Recorder(), []
    io = FaultyIO(inner, faults := Faults(random.Random(seed)), loop=loop, limit_bytes=300)
    faults.add(Drop(0.1))
    faults.add(rules)
    io.start(lambda runs: came.extend(apart(runs)), lambda address, trouble: None)
    assert inner.push is not None
    for batch in batches:
        (io.send if outgoing else inner.push)(joined(batch))
    loop.run()
    return [inner.sent, came, io.overflowed, faults.rules[0].stats]


@given(
    seed=st.integers(0, 1000),
    datagrams=st.lists(st.tuples(st.binary(min_size=1, max_size=30), st.sampled_from([PEER, ("192.0.2.8", 8)]))),
    cuts=st.sets(st.integers(0, 30)),
    outgoing=st.booleans(),
)
def test_faults_decide_the_same_however_datagrams_were_batched(
    seed: int, datagrams: list[tuple[bytes, Address]], cuts: set[int], outgoing: bool
) -> None:
    ends = [0, *sorted(cut for cut in cuts if 0 < cut < len(datagrams)), len(datagrams)]
    batches = [datagrams[start:end] for start, end in pairwise(ends)]
    alone = [[datagram] for datagram in datagrams]
    result = through_faults(seed, batches, outgoing=outgoing)
    assert result == through_faults(seed, alone, outgoing=outgoing)
    assert result == through_faults(seed, [datagrams], outgoing=outgoing)


async def test_a_run_that_passes_at_once_is_not_taken_apart_nor_one_that_is_late_borrowed() -> None:
    bench = Bench()
    memory = bytearray(b"aabb")
    run = DatagramRun(memoryview(memory), 2, PEER)
    seen: list[DatagramRun] = []
    bench.inner.send = seen.extend
    bench.io.send([run])
    assert seen == [run]
    bench.faults.add(Delay(3_600_000 * MS))
    bench.io.send([run])
    memory[:] = b"????"  # it is the carrier's again
    bench.io.close()
    assert list(apart(seen[1:])) == [(b"aa", PEER), (b"bb", PEER)]
