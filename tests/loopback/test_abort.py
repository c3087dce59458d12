"""Every operation, broken in its middle: one kind of error everywhere, the culprit named, no buffer changed.

The three take turns over the operations, which end in the same way whatever they do; a deep run
(tests/helpers/depth.py) has all three for each.

Three ranks inside a step; rank 2 breaks it while all have the operation under way: its network is cut, it cancels its
call, or what it sends arrives with other bits every time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from depth import some

from quicoll import Corrupted, Group, Job, PeerError, QuicollError, StepAborted
from quicoll.numerics.buffers import reach
from quicoll.testing import cluster, corrupt_payloads, disturb_network
from quicoll_transport.faults.compose import Datagram, Delivery, PayloadCorrupt, Rng

Array = np.ndarray[Any, Any]

CULPRIT = 2
ROWS = 60_000  # 480 kB: hundreds of datagrams, several chunks
CHUNK = 100_000


@dataclass
class Buffers:
    """A rank's own: inputs, which nothing may change, and outputs, which only success may, but for what of them is
    written in place (`given`): that has to stay as it is from the moment at which the caller hears (`heard`)."""

    x: Array = field(default_factory=lambda: np.arange(float(ROWS)))
    tensor: torch.Tensor = field(default_factory=lambda: torch.arange(float(ROWS)))
    out: Array = field(default_factory=lambda: np.full(3 * ROWS, -1.0))
    in_place: Array = field(default_factory=lambda: np.zeros(3 * ROWS, bool))
    known: bytes | None = None

    def given(self, handles: list[Any]) -> list[Any]:
        for handle in handles:
            if handle.pending.operation.in_place:
                low, high = (address - reach(self.out)[0] for address in reach(handle.pending.operation.given[-1]))
                self.in_place[low // 8 : high // 8] = True
        return handles

    def heard(self) -> None:
        self.known = self.out.tobytes()

    def untouched(self) -> bool:
        ramp = np.arange(float(ROWS))
        return bool(
            (self.x == ramp).all()
            and (self.tensor.numpy() == ramp.astype("float32")).all()
            and (self.out[~self.in_place] == -1).all()
            and self.known in (None, self.out.tobytes())
        )


@dataclass(frozen=True)
class Groups:
    """all: ranks 0, 1, 2. pair: 2 and 1, in this order; 0 has none."""

    all: Group
    pair: Group | None


def mine(b: Buffers, rows: int = ROWS) -> Array:
    return b.out[:rows]


def message(g: Group, b: Buffers) -> list[Any]:
    """The culprit sends to 0 and receives from 1."""
    if g.rank == CULPRIT:
        return [g.send(b.x, to=0), g.recv(b.x, source=1, out=mine(b))]
    return [g.recv(b.x, source=CULPRIT, out=mine(b))] if g.rank == 0 else [g.send(b.x, to=CULPRIT)]


def in_flight(g: Group, b: Buffers) -> list[Any]:
    """Four at once, the culprit in each of them."""
    return [
        g.all_reduce(b.x, out=b.out[:ROWS]),
        g.broadcast(b.x, root=CULPRIT, out=b.out[ROWS : 2 * ROWS] if g.rank != CULPRIT else None),
        g.all_gather(b.x),
        g.all_reduce(b.tensor),
    ]


def by_site(g: Group, b: Buffers) -> Any:
    """Of the culprit's site one chunk is made up of two ranks' parts."""
    out = mine(b, 2 * ROWS + ROWS // 3) if g.rank == 0 else None
    return g.gather(b.x[: ROWS // 3] if g.rank == 1 else b.x, out=out, algorithm="hierarchical")


def root_out(g: Group, b: Buffers, rows: int) -> Array | None:
    return mine(b, rows) if g.rank == CULPRIT else None


def in_pair(call: Callable[[Group, Buffers], Any]) -> Callable[[Groups, Buffers], list[Any]]:
    return lambda groups, b: [] if groups.pair is None else [call(groups.pair, b)]


def in_all(call: Callable[[Group, Buffers], Any]) -> Callable[[Groups, Buffers], list[Any]]:
    def started(groups: Groups, b: Buffers) -> list[Any]:
        handles = call(groups.all, b)
        return handles if isinstance(handles, list) else [handles]

    return started


OPERATIONS: dict[str, Callable[[Groups, Buffers], list[Any]]] = {
    "all_reduce": in_all(lambda g, b: g.all_reduce(b.x, out=mine(b))),
    **{
        f"all_reduce {name}": in_all(lambda g, b, name=name: g.all_reduce(b.x, out=mine(b), algorithm=name))
        for name in ("direct", "tree", "hierarchical", "exchange")
    },
    "all_reduce ring": in_all(lambda g, b: g.all_reduce(b.x, out=mine(b), reduce_order="ring")),
    "all_reduce in place": in_all(lambda g, b: g.all_reduce(b.x, out=b.x)),
    "all_reduce of a tensor": in_all(lambda g, b: g.all_reduce(b.tensor, out=b.tensor)),
    "all_reduce of a list": in_all(lambda g, b: g.all_reduce([b.x, b.x[:9]], out=[mine(b), b.out[-9:]])),
    "reduce": in_all(lambda g, b: g.reduce(b.x, root=CULPRIT, out=root_out(g, b, ROWS))),
    "reduce_scatter": in_all(lambda g, b: g.reduce_scatter(b.x, out=mine(b, ROWS // 3))),
    "broadcast": in_all(lambda g, b: g.broadcast(b.x, root=CULPRIT, out=mine(b))),
    "all_gather": in_all(lambda g, b: g.all_gather(b.x, out=b.out)),
    "gather": in_all(lambda g, b: g.gather(b.x, root=CULPRIT, out=root_out(g, b, 3 * ROWS))),
    "scatter": in_all(lambda g, b: g.scatter(b.x, root=CULPRIT, out=mine(b, ROWS // 3))),
    "broadcast by site": in_all(lambda g, b: g.broadcast(b.x, out=mine(b), algorithm="hierarchical")),
    "all_gather by site": in_all(lambda g, b: g.all_gather(b.x, out=b.out, algorithm="hierarchical")),
    "gather by site": in_all(by_site),
    "scatter by site": in_all(lambda g, b: g.scatter(b.x, out=mine(b, ROWS // 3), algorithm="hierarchical")),
    "all_to_all": in_all(lambda g, b: g.all_to_all(b.x, out=mine(b))),
    "all_to_all of a list": in_all(lambda g, b: g.all_to_all([b.x, b.x[:0], b.x] if g.rank else [b.x] * 3)),
    "send and recv": in_all(message),
    "broadcast_object": in_all(lambda g, b: g.broadcast_object(bytes(400_000), root=CULPRIT)),
    "all_gather_object": in_all(lambda g, b: g.all_gather_object(bytes(200_000))),
    "several in flight": in_all(in_flight),
    "all_reduce in a sub-group": in_pair(lambda g, b: g.all_reduce(b.x, out=mine(b))),
    "all_gather in a sub-group": in_pair(lambda g, b: g.all_gather(b.x, out=mine(b, 2 * ROWS))),
    "all_to_all in a sub-group": in_pair(lambda g, b: g.all_to_all(b.x, out=mine(b))),
    "broadcast in a sub-group": in_pair(lambda g, b: g.broadcast(b.x, root=0, out=mine(b))),
}
SMALL: dict[str, Callable[[Groups, Buffers], list[Any]]] = {  # no payload: broken from its first datagram
    "barrier": in_all(lambda g, b: g.barrier()),
    "split": in_all(lambda g, b: g.split(0)),
    "barrier in a sub-group": in_pair(lambda g, b: g.barrier()),
    "split of a sub-group": in_pair(lambda g, b: g.split(0)),
}


def sites(name: str) -> list[str] | None:
    """The culprit is not alone on its site, and root 0 is on the other."""
    return ["north", "south", "south"] if name.endswith("by site") else None


class Break:
    """Drops every datagram from the k-th large one on that it sees once armed, and says that it has begun."""

    def __init__(self, large: int, begun: Callable[[], None]) -> None:
        self.armed = False
        self._left = large
        self._begun = begun

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        if not self.armed:
            return None
        if self._left > 0:
            self._left -= len(datagram.data) > 1000
            return None
        self._begun()
        return []


async def broken_step(
    jobs: list[Job],
    call: Callable[[Groups, Buffers], list[Any]],
    *,
    wait: Callable[[Job, list[Any]], Awaitable[None]],
    rule: Break | None = None,
) -> tuple[list[Any], list[Any]]:
    """What every rank's operations and every rank's step raised. Nothing was committed, and no buffer was changed but
    by an operation that had ended well on its rank before the others' was broken.

    rule: armed once all are inside the step and before anybody calls, so that what it counts is of the operation.
    """
    await asyncio.gather(*(job.ready() for job in jobs))
    color = [None, 0, 0]
    pairs = await asyncio.gather(*(job.group.split(color[job.rank], -job.rank) for job in jobs))
    buffers = [Buffers() for _ in jobs]
    raised: list[Any] = [None] * 3
    through = [False] * 3
    inside = asyncio.Barrier(3)

    async def step(job: Job) -> None:
        rank = job.rank
        async with job.step() as step:
            step.on_commit(lambda: pytest.fail("nothing may be committed"))
            await job.group.barrier()
            await inside.wait()
            if rule is not None:
                rule.armed = True
            try:
                await wait(job, buffers[rank].given(call(Groups(job.group, pairs[rank]), buffers[rank])))
                through[rank] = True
                await job.group.barrier()  # who has no part in it, or is through with its own, hears of it here
            except BaseException as error:
                raised[rank] = error
                buffers[rank].heard()
                raise

    results = asyncio.gather(*(step(job) for job in jobs), return_exceptions=True)
    steps = await asyncio.wait_for(results, 100)  # far below the deadline of an operation, 300 s
    assert all(each.untouched() for rank, each in enumerate(buffers) if not through[rank])
    assert not all(through)
    assert [job.committed_step for job in jobs] == [0, 0, 0]
    return raised, steps


async def all_of(job: Job, handles: list[Any]) -> None:
    for handle in handles:
        await handle


@pytest.mark.parametrize("name", [*some(OPERATIONS, 3), *some(SMALL, 2)])
async def test_a_rank_that_is_cut_off_in_the_middle_is_named_by_all_others(name: str) -> None:
    async with cluster(3, lost_after=0.6, sites=sites(name), chunk_bytes=CHUNK) as jobs:
        rule = Break(0 if name in SMALL else 8, lambda: None)

        async with disturb_network(jobs[CULPRIT], rule):
            raised, steps = await broken_step(jobs, {**OPERATIONS, **SMALL}[name], wait=all_of, rule=rule)
        for rank in (0, 1):
            assert type(raised[rank]) is PeerError, raised
            assert (raised[rank].rank, raised[rank].node, raised[rank].lost) == (2, "worker-2", ("worker-2",))
            assert type(steps[rank]) is StepAborted
            assert (steps[rank].node, steps[rank].lost) == ("worker-2", ("worker-2",))
        assert isinstance(raised[CULPRIT], QuicollError)
        assert type(steps[CULPRIT]) is StepAborted


@pytest.mark.parametrize("name", [*some(OPERATIONS, 3, 1), *some(SMALL, 2, 1)])
async def test_a_call_that_is_cancelled_in_the_middle_ends_it_for_all_and_names_who_did(name: str) -> None:
    async with cluster(3, lost_after=20.0, sites=sites(name), chunk_bytes=CHUNK) as jobs:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        rule = Break(0 if name in SMALL else 8, lambda: loop.call_soon_threadsafe(begun.set))

        async with disturb_network(jobs[CULPRIT], rule) as held:

            async def wait(job: Job, handles: list[Any]) -> None:
                if job.rank != CULPRIT:
                    await all_of(job, handles)
                    return
                await begun.wait()  # nothing of it arrives any more: it cannot have ended here
                waiting = asyncio.ensure_future(all_of(job, handles))
                await asyncio.sleep(0)
                waiting.cancel()
                held.remove()
                await waiting

            raised, steps = await broken_step(jobs, {**OPERATIONS, **SMALL}[name], wait=wait, rule=rule)
        assert isinstance(raised[CULPRIT], asyncio.CancelledError)
        for rank in (0, 1):
            assert type(raised[rank]) is PeerError, raised
            assert raised[rank].node == "worker-2"
            # "was cancelled" by the operation, or "left its step: CancelledError" by the step, whichever is told first.
            assert "ancelled" in raised[rank].message
            assert type(steps[rank]) is StepAborted
            assert steps[rank].node == "worker-2"


@pytest.mark.parametrize(("local", "count"), [(False, 1500), (False, 200_000), (True, 300_000)])
async def test_what_a_caller_writes_when_he_has_cancelled_is_nobodys_result(local: bool, count: int) -> None:
    """His engine is held up meanwhile, and sends what it was given after that."""
    async with cluster(2, local=local, lost_after=20.0) as jobs:
        first = asyncio.ensure_future(jobs[0].group.broadcast(np.empty(count), root=1))
        await asyncio.sleep(0.1)  # rank 1 hears of it: so it sends as soon as it has called itself
        given = np.full(count, 2.0)
        held_up, goes_on = threading.Event(), threading.Event()

        def hold_up() -> None:
            held_up.set()
            goes_on.wait(10.0)

        jobs[1].group._context.runtime.post(hold_up)
        await asyncio.to_thread(held_up.wait)
        second = asyncio.ensure_future(jobs[1].group.broadcast(given, root=1))
        await asyncio.sleep(0)
        second.cancel()
        # Long after a wait that is not for the engine would have ended.
        asyncio.get_running_loop().call_later(0.2, goes_on.set)
        with pytest.raises(asyncio.CancelledError):
            await second
        given[:] = np.nan
        (got,) = await asyncio.gather(first, return_exceptions=True)
        assert "cancelled" in str(got) if isinstance(got, QuicollError) else (got == 2).all()


@pytest.mark.parametrize("name", some(OPERATIONS, 3, 2))
async def test_bits_that_never_arrive_right_are_corruption_everywhere(name: str) -> None:
    """The memory of ranks 1 and 2 changes whatever comes in, so every operation meets it somewhere."""
    async with cluster(3, sites=sites(name), chunk_bytes=CHUNK) as jobs:
        rules = [PayloadCorrupt(min_bytes=1000, times=1 << 30) for _ in range(2)]
        async with corrupt_payloads(jobs[1], rules[0]), corrupt_payloads(jobs[2], rules[1]):
            raised, steps = await broken_step(jobs, OPERATIONS[name], wait=all_of)
        assert [type(error) for error in raised] == [Corrupted] * 3, raised
        assert [type(error) for error in steps] == [StepAborted] * 3
        told = {(error.rank, error.node, error.message) for error in raised}
        assert len(told) == 1, told
        ((rank, node, message),) = told
        assert node == f"worker-{rank}"
        assert "came spoiled again and again" in message
        assert {error.node for error in steps} == {node}


async def test_a_rank_whose_memory_spoils_what_it_gets_from_everybody_is_named_by_all() -> None:
    async with cluster(4, chunk_bytes=20_000) as jobs:
        for job in jobs:  # each link has carried spoiled bits of rank 2's before the first that cannot be mended
            assert job.view.view_id == 1
        rule = PayloadCorrupt(min_bytes=1000, times=1 << 30)

        async def step(job: Job) -> None:
            async with job.step():
                await job.group.all_reduce(np.ones(100_000), algorithm="direct")

        async with corrupt_payloads(jobs[CULPRIT], rule):
            raised = await asyncio.wait_for(asyncio.gather(*map(step, jobs), return_exceptions=True), 100)
        assert [type(error) for error in raised] == [StepAborted] * 4
        assert {(error.rank, error.node) for error in raised if isinstance(error, StepAborted)} == {(2, "worker-2")}


async def test_ranks_that_lost_each_other_are_told_of_one_culprit() -> None:
    """Ranks 0 and 1 hear the coordinator and rank 2, and not each other: each end of the pair would name the other."""
    async with cluster(3, lost_after=0.6) as jobs:
        ports = {job._engine.endpoint.address[1] for job in jobs[:2]}

        class Apart(Break):
            def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
                between = {datagram.source[1], datagram.destination[1]}
                return super().decide(datagram, now_ns, rng) if between == ports else None

        rule = Apart(0, lambda: None)
        async with disturb_network(jobs[0], rule):
            raised, steps = await broken_step(
                jobs, lambda g, b: [g.all.all_reduce(b.x, out=mine(b))], wait=all_of, rule=rule
            )
        assert [type(error) for error in raised] == [PeerError] * 3
        assert {(error.rank, error.node, error.lost) for error in raised} == {(1, "worker-1", ("worker-1",))}
        assert {error.node for error in steps} == {"worker-1"}


async def test_a_rank_lost_outside_of_a_sub_group_ends_the_operations_in_it() -> None:
    async with cluster(3, lost_after=0.6) as jobs:
        groups = await asyncio.gather(*(job.group.split(0 if job.rank < 2 else None) for job in jobs))
        rule = Break(0, lambda: None)
        done = [0, 0]

        async def work(job: Job) -> None:
            group = groups[job.rank]
            assert group is not None
            while True:
                await group.all_reduce(np.ones(10))
                done[job.rank] += 1
                if done[job.rank] == 3:
                    rule.armed = True

        async with disturb_network(jobs[CULPRIT], rule):
            got = await asyncio.wait_for(asyncio.gather(work(jobs[0]), work(jobs[1]), return_exceptions=True), 100)
        assert [type(error) for error in got] == [PeerError] * 2
        assert [error.lost for error in got if isinstance(error, PeerError)] == [("worker-2",)] * 2
        assert all(count >= 3 for count in done)
