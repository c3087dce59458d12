"""Lanes that are processes of this system: what goes by them, what becomes of it when they fail, and what is left."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from quicoll import StepAborted
from quicoll.lanes.memory import lanes_unusable
from quicoll.testing import Event, cluster

if TYPE_CHECKING:
    from quicoll import Job

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.skipif(bool(lanes_unusable()), reason=lanes_unusable() or "there can be lanes"),
]

ELEMENTS = 1 << 20


class Heard:
    """The events of all ranks, and who waits for some of them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._loop = asyncio.get_running_loop()
        self._change = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._loop.call_soon_threadsafe(self._change.set)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._change.clear()
            await self._change.wait()

    async def paired(self, count: int) -> None:
        await self.until(lambda: len(self.of("lane_used")) >= count)


def lanes_of(process: int) -> list[int]:
    """The numbers of the lanes that a process has started."""
    return [pid for pid, parent in lanes_alive() if parent == process]


def lanes_alive() -> Iterator[tuple[int, int]]:
    """The numbers of all lanes of this system, and of who has started them."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                command = (path / "cmdline").read_bytes()
                status = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if b"quicoll.lanes.process" in command and status[0] != "Z":
                yield int(path.name), int(status[1])


async def all_reduce(jobs: list[Job]) -> None:
    """Add what all ranks have, and look at every bit."""
    given = [np.random.default_rng(job.rank).standard_normal(ELEMENTS).astype(np.float32) for job in jobs]
    found = await asyncio.gather(*(job.group.all_reduce(x) for job, x in zip(jobs, given, strict=True)))
    expected = given[0] + given[1]
    assert all(np.array_equal(each, expected) for each in found)


def sent(jobs: list[Job]) -> int:
    """Payload bytes that went over the ranks' own links."""
    return sum(link.stats.bytes_sent for job in jobs for link in job._engine.worker_links().values())


async def test_long_messages_go_by_lanes_and_nothing_is_left_of_these() -> None:
    heard = Heard()
    async with cluster(2, observer=heard, lanes=2) as jobs:
        await heard.paired(4)
        assert len(lanes_of(os.getpid())) == 4
        before = sent(jobs)
        await all_reduce(jobs)
        assert sent(jobs) - before < ELEMENTS  # a quarter of what one rank gives
    assert lanes_of(os.getpid()) == []
    assert heard.of("lane_lost") == heard.of("lane_shut") == []


async def test_lanes_listen_and_meet_at_the_addresses_that_they_are_given() -> None:
    heard = Heard()
    async with cluster(2, observer=heard, lane_addresses="127.0.0.1,127.0.0.2") as jobs:
        await heard.paired(4)
        used = {(event.node, event.fields["lane"], event.fields["address"]) for event in heard.of("lane_used")}
        assert used == {(f"worker-{rank}", lane, f"127.0.0.{lane + 1}") for rank in range(2) for lane in range(2)}
        before = sent(jobs)
        await all_reduce(jobs)
        assert sent(jobs) - before < ELEMENTS
    assert lanes_of(os.getpid()) == []


async def test_a_lane_whose_address_is_of_another_host_is_lost_by_name_and_the_others_carry_on() -> None:
    heard = Heard()
    async with cluster(2, observer=heard, lane_addresses="127.0.0.1,192.0.2.7") as jobs:
        await heard.until(lambda: len(heard.of("lane_lost")) == 2 and len(heard.of("lane_used")) == 2)
        await all_reduce(jobs)
        assert {event.fields["lane"] for event in heard.of("lane_lost")} == {1}
        assert all("192.0.2.7" in event.fields["reason"] for event in heard.of("lane_lost"))
    assert lanes_of(os.getpid()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lane_that_is_killed_or_stands_still_costs_no_view_and_no_bit(number: signal.Signals) -> None:
    heard = Heard()
    async with cluster(2, observer=heard, lanes=1, lost_after=5.0) as jobs:
        await heard.paired(2)
        first, _ = lanes_of(os.getpid())
        process = os.pidfd_open(first)
        await all_reduce(jobs)
        under_way = asyncio.ensure_future(all_reduce(jobs))
        os.kill(first, number)
        await under_way
        await heard.until(lambda: bool(heard.of("lane_lost")) and len(heard.of("lane_shut")) == 2)
        await asyncio.to_thread(_wait, process)  # what does not answer is told of as it is killed, which takes a moment
        os.close(process)
        await all_reduce(jobs)
        (lost,) = heard.of("lane_lost")
        assert lost.fields["reason"] == (
            "its process has ended (signal 9)" if number == signal.SIGKILL else "it does not answer"
        )
        assert {event.node for event in heard.of("lane_shut")} == {"worker-0", "worker-1"}
    assert len([event for event in heard.of("view_installed") if event.node == "worker-0"]) == 1
    assert lanes_of(os.getpid()) == []


async def test_the_lanes_of_a_view_that_follows_are_those_that_there_were() -> None:
    heard = Heard()
    async with cluster(2, observer=heard, lanes=1) as jobs:
        await heard.paired(2)
        processes = sorted(lanes_of(os.getpid()))
        ends = await asyncio.gather(*(_step(job, fails=job.rank == 1) for job in jobs), return_exceptions=True)
        assert {type(end) for end in ends} == {StepAborted, ValueError}
        await heard.paired(4)
        await asyncio.gather(*(_step(job, fails=False) for job in jobs))
        assert sorted(lanes_of(os.getpid())) == processes
        assert {event.fields["view"] for event in heard.of("lane_used")} == {1, 2}
    assert heard.of("lane_lost") == []


async def _step(job: Job, *, fails: bool) -> None:
    async with job.step():
        if fails:
            raise ValueError("on purpose")
        x = np.full(ELEMENTS, job.rank + 1, np.float32)
        assert np.array_equal(await job.group.all_reduce(x), np.full(ELEMENTS, 3, np.float32))


RANK = """
import os, sys, time
import numpy as np
import quicoll.testing, asyncio

async def main():
    used = []
    async with quicoll.testing.cluster(2, lanes=1, observer=lambda event: used.append(event.kind)) as jobs:
        while used.count("lane_used") < 2:
            await asyncio.sleep(0.01)
        if os.fork() == 0:  # as a data loader, which outlives us and has copies of all descriptors
            os.setsid()
            os.close(1)
            time.sleep(120)
            os._exit(0)
        print("there", flush=True)
        time.sleep(60)

asyncio.run(main())
"""


def test_a_rank_that_is_killed_leaves_no_lane_behind_even_where_a_child_of_it_goes_on() -> None:
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True) as rank:
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "there\n"
            lanes = lanes_of(rank.pid)
            assert len(lanes) == 2
            handles = [os.pidfd_open(pid) for pid in lanes]
            children = [int(each) for each in Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()]
        finally:
            rank.kill()
    for handle in handles:
        _wait(handle)
        os.close(handle)
    for child in set(children) - set(lanes):
        os.kill(child, signal.SIGKILL)


def _wait(handle: int) -> None:
    """Wait for the end of a process; a test that waits in vain has its own end."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    assert poll.poll(60_000)
