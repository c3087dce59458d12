"""Fault rules as a user's test applies them: collectives give the same bits over networks that lose, wait and lie."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from quicoll import LocalError
from quicoll.testing import cluster, corrupt_payloads, cut_network, disturb_network, network_clock_ns
from quicoll_transport.faults.compose import (
    Between,
    BurstLoss,
    Chain,
    Corrupt,
    Cut,
    Datagram,
    Delay,
    Delivery,
    Duplicate,
    Hold,
    PayloadCorrupt,
    Rate,
    Reorder,
    Rng,
    Rule,
)

MS = 1_000_000
SIZE = 60_000


def bad_line() -> Rule:
    """20 ms with jitter, bursts of loss, 20 MB/s with a queue, copies, overtaking, flipped bits."""
    return Chain(
        BurstLoss.mean(0.01, burst=3),
        Delay(10 * MS, jitter_ns=2 * MS),
        Rate(20_000_000, queue_bytes=512 << 10),
        Duplicate(0.01),
        Reorder(0.01, later_ns=3 * MS),
        Corrupt(0.005),
    )


async def test_a_bad_line_changes_no_bit_of_a_sum() -> None:
    async with cluster(3, lost_after=20.0) as jobs, disturb_network(jobs[1], bad_line()) as line:
        x = [np.arange(float(SIZE)) * (rank + 1) for rank in range(3)]
        got = await asyncio.gather(*(job.group.all_reduce(x[job.rank]) for job in jobs))
        assert all(result.tobytes() == (x[0] + x[1] + x[2]).tobytes() for result in got)
        assert line.stats.delayed > 100


async def test_what_was_held_arrives_at_the_release_and_the_step_goes_on() -> None:
    async with cluster(2, lost_after=20.0) as jobs:
        loop, large = asyncio.get_running_loop(), asyncio.Event()

        class Watch:
            """No opinion; tells of the first datagram of tensor data, from the engine's thread."""

            def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
                if len(datagram.data) > 1000:
                    loop.call_soon_threadsafe(large.set)
                return None

        async with disturb_network(jobs[1], Chain(Watch(), Hold())) as held:
            sums = [asyncio.ensure_future(job.group.all_reduce(np.ones(SIZE), algorithm="direct")) for job in jobs]
            await large.wait()
            assert not any(each.done() for each in sums)
        assert held.stats.dropped > 0
        assert [(await each).tobytes() for each in sums] == [np.full(SIZE, 2.0).tobytes()] * 2


async def test_a_fault_of_some_time_is_over_by_itself() -> None:
    async with cluster(2, lost_after=20.0) as jobs:
        now = network_clock_ns(jobs[0])
        async with disturb_network(jobs[0], Between(now, now + 300 * MS, Hold(until_ns=now + 300 * MS))):
            got = await asyncio.gather(*(job.group.all_reduce(np.ones(SIZE)) for job in jobs))
        assert network_clock_ns(jobs[0]) >= now + 300 * MS
        assert all(result.tobytes() == np.full(SIZE, 2.0).tobytes() for result in got)


async def test_a_cut_network_is_back_after_its_seconds() -> None:
    async with cluster(2, lost_after=20.0) as jobs:
        with pytest.raises(LocalError, match="how long the network is cut"):
            cut_network(jobs[0], 0.0)
        now = network_clock_ns(jobs[0])
        cut_network(jobs[0], 0.3)
        got = await asyncio.gather(*(job.group.all_reduce(np.ones(SIZE)) for job in jobs))
        assert network_clock_ns(jobs[0]) >= now + 300 * MS
        assert all(result.tobytes() == np.full(SIZE, 2.0).tobytes() for result in got)


async def test_corrupt_payloads_are_mended_and_counted() -> None:
    async with cluster(2) as jobs, corrupt_payloads(jobs[1], PayloadCorrupt(min_bytes=1000, times=2, bits=3)) as memory:
        got = await asyncio.gather(*(job.group.all_reduce(np.ones(SIZE)) for job in jobs))
        assert all(result.tobytes() == np.full(SIZE, 2.0).tobytes() for result in got)
        assert memory.changed == 2


async def test_a_short_tensor_may_change_as_soon_as_its_operation_has_ended_here() -> None:
    """It has been copied: what goes again to a peer who has not got it is not what its memory holds by then."""
    async with cluster(2, lost_after=20.0) as jobs:
        first, second = jobs
        x = np.full(4, 1.0, np.float32)
        await asyncio.gather(*(job.group.all_reduce(x) for job in jobs))  # by which they agree on the network
        async with disturb_network(first, Cut(outgoing=True)):
            theirs = second.group.all_reduce(np.full(4, 2.0, np.float32))
            mine = await first.group.all_reduce(x)  # has what the peer sent; the peer has nothing of it yet
            assert mine.tolist() == [3.0] * 4
            x[:] = 99.0
            assert not theirs.done()
        assert (await theirs).tolist() == [3.0] * 4
