"""Ranks of one host that hand each other what they can through its memory: the bits, errors and ends of QUIC."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import TOGETHER, Move, cases, moves, reductions
from slow_reference import DTYPES

import quicoll.blocking
import quicoll.testing
from quicoll import Job, LocalError, Mismatch, PeerError, QuicollError
from quicoll.collectives.subgroups import WORLD
from quicoll.engine.host_ways import HostWays
from quicoll.engine.neighbourhood import GROUP
from quicoll.local.layout import ROOMS, SLOTS, SMALL_BYTES, SegmentLayout
from quicoll.local.memory import Segment
from quicoll.local.rooms import KEPT
from quicoll.local.sealing import unusable
from quicoll.numerics.buffers import tensor_digest
from quicoll.plan import ALGORITHMS
from quicoll.testing import cluster
from quicoll_transport.net.udp import UdpSocket

pytestmark = [pytest.mark.loopback, pytest.mark.skipif(bool(unusable()), reason=unusable() or "usable")]

HELPERS = Path(__file__).parents[1] / "helpers"


async def everyone(jobs: list[Job], call: Callable[[Job], Any]) -> list[Any]:
    async def one(job: Job) -> Any:
        return await call(job)

    return list(await asyncio.gather(*(one(job) for job in jobs), return_exceptions=True))


def shares(jobs: list[Job]) -> list[bool]:
    return [job.group._here.near for job in jobs]


@pytest.mark.parametrize("world", [2, 3, 4])
async def test_reductions_of_every_type_and_operation_have_the_bits_of_their_definition(world: int) -> None:
    """With several leaves, lists, exact sums; what goes over QUIC is called between them, many at a time."""
    async with cluster(world, local=True, lost_after=20.0, chunk_bytes=500) as jobs:
        assert shares(jobs) == [True] * world
        chosen = [case for case in cases(world) if case.name == "all_reduce" or case.seed % 5 == 0]
        for at in range(0, len(chosen), TOGETHER):
            results = await everyone(jobs, lambda job, at=at: reductions(job, chosen[at : at + TOGETHER]))
            assert [type(result) for result in results] == [list] * world, results


@pytest.mark.parametrize("world", [2, 3, 4])
async def test_what_is_moved_of_every_type_and_of_uneven_sizes_has_the_bits_that_were_given(world: int) -> None:
    async with cluster(world, local=True, lost_after=20.0) as jobs:
        chosen = [Move(dtype, seed) for seed, dtype in enumerate(DTYPES)]
        for at in range(0, len(chosen), 4):
            results = await everyone(jobs, lambda job, at=at: moves(job, chosen[at : at + 4]))
            assert [type(result) for result in results] == [list] * world, results


REDUCED: dict[str, Callable[[Job, Any, str], Any]] = {
    "reduce": lambda job, x, way: job.group.reduce(x, root=1, algorithm=way),
    "reduce_scatter": lambda job, x, way: job.group.reduce_scatter(x, algorithm=way),
    "uneven reduce_scatter": lambda job, x, way: job.group.reduce_scatter(
        x, counts=[5, 0, len(x) - 5], op="max", algorithm=way
    ),
    "leaves' all_reduce": lambda job, x, way: job.group.all_reduce(
        job.group.shards(5).leaves([x * (i + 1) for i in job.group.shards(5)]), op="avg", algorithm=way
    ),
}
MOVED: dict[str, Callable[[Job, Any, str], Any]] = {
    "broadcast": lambda job, x, way: job.group.broadcast(x, root=2, algorithm=way),
    "all_gather": lambda job, x, way: job.group.all_gather(x, algorithm=way),
    "uneven all_gather": lambda job, x, way: job.group.all_gather(x[: len(x) * job.rank // 2], algorithm=way),
    "all_gather of known counts": lambda job, x, way: job.group.all_gather(
        x[: len(x) * (job.rank % 3) // 2],
        counts=[len(x) * (rank % 3) // 2 for rank in range(job.world_size)],
        algorithm=way,
    ),
    "gather of known counts": lambda job, x, way: job.group.gather(
        x[job.rank :], root=1, counts=[len(x) - rank for rank in range(job.world_size)], algorithm=way
    ),
    "gather": lambda job, x, way: job.group.gather(x[job.rank :], root=1, algorithm=way),
    "scatter": lambda job, x, way: job.group.scatter(x, root=1, algorithm=way),
    "uneven scatter": lambda job, x, way: job.group.scatter(
        x, root=0, counts=[0, 1, len(x) - 1] if job.rank == 0 else None, algorithm=way
    ),
}


@pytest.mark.parametrize(
    ("elements", "lent"),
    [(SMALL_BYTES // 4 - 3, False), (SMALL_BYTES // 4 + 1, True), (700_003, False), (700_003, True)],
)
@pytest.mark.parametrize("what", [*REDUCED, *MOVED])
async def test_every_operation_gives_small_and_large_what_it_gives_over_quic(
    what: str, elements: int, lent: bool
) -> None:
    """Of uneven sizes one rank's payload fits into a slot, and another's does not. What is lent changes as soon as it
    is its caller's again."""

    async def call(job: Job) -> Any:
        rng = np.random.default_rng(job.rank)
        x = rng.standard_normal(elements).astype(np.float32) * np.float32(10.0**job.rank)
        if lent:
            x, values = quicoll.empty(elements, "float32"), x
            x[:] = values
        issue = {**REDUCED, **MOVED}[what]
        handles = [issue(job, x, way) for way in ("local", ALGORITHMS[what.split(" of ")[0].split()[-1]][0], "auto")]
        assert handles[2].pending.operation.small_call(0) is not None
        found = [await handle for handle in handles]
        found = [each.copy() if lent and each is not None else each for each in found]
        x[:] = np.nan
        return found

    async with cluster(3, local=True, lost_after=20.0) as jobs:
        for local, direct, auto in await everyone(jobs, call):
            if direct is None:
                assert local is None
                assert auto is None
            else:
                assert local.shape == direct.shape
                assert local.tobytes() == direct.tobytes() == auto.tobytes()


async def test_large_parts_for_each_rank_and_objects_come_as_they_were_given() -> None:
    async def call(job: Job) -> Any:
        parts = [np.full((1 + 90_000 * ((job.rank + to) % 3), 2), 10 * job.rank + to) for to in range(3)]
        mine = {"rank": job.rank, "bytes": bytes(70_000 * job.rank)}
        handles = [
            job.group.all_to_all(parts),
            job.group.all_gather_object(mine),
            job.group.broadcast_object(mine, root=2),
        ]
        return [await handle for handle in handles]

    async with cluster(3, local=True, lost_after=20.0) as jobs:
        for rank, (parts, objects, one) in enumerate(await everyone(jobs, call)):
            for source, part in enumerate(parts):
                assert part.shape == (1 + 90_000 * ((rank + source) % 3), 2)
                assert (part == 10 * source + rank).all()
            assert objects == [{"rank": each, "bytes": bytes(70_000 * each)} for each in range(3)]
            assert one == objects[2]


async def test_an_out_that_a_large_result_is_written_to_in_place_is_let_go_of() -> None:
    async with cluster(3, local=True, lost_after=20.0, timeout=60.0) as jobs:
        outs = [np.zeros(1 << 18) for _ in jobs]
        results = await everyone(jobs, lambda job: job.group.all_reduce(np.ones(1 << 18), out=outs[job.rank]))
        assert all(result is out for result, out in zip(results, outs, strict=True))
        assert all((out == 3).all() for out in outs)
        handles = [jobs[rank].group.all_reduce(np.ones(1 << 18), out=outs[rank]) for rank in (0, 1)]  # one never calls
        waits = asyncio.ensure_future(handles[0])
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert handles[0].pending.released is not None
        assert handles[0].pending.released.done()
        with pytest.raises(PeerError, match="cancelled"):
            await handles[1]
        assert handles[1].pending.released.done()


async def test_an_out_that_does_not_fit_is_told_to_its_caller_and_ends_the_view_for_all() -> None:
    async with cluster(2, local=True, lost_after=20.0, timeout=60.0) as jobs:
        errors = await everyone(
            jobs, lambda job: job.group.all_gather(np.ones(3), out=np.zeros(6 + job.rank) if job.rank else None)
        )
        assert type(errors[1]) is LocalError, errors
        # The other one may have its result, which is right; but nobody goes on in this view.
        later = await everyone(jobs, lambda job: job.group.all_reduce(np.ones(3)))
        assert all(isinstance(error, QuicollError) for error in later), later


@pytest.mark.parametrize("dtype", [*DTYPES, "torch.bfloat16"])
async def test_a_lent_tensor_of_every_type_gives_the_bits_of_another_one(dtype: str) -> None:
    """Straight from where it is, whole and in parts; and what it is changed to afterwards, in place as well."""
    name = dtype.removeprefix("torch.")
    native: Any = getattr(torch, name) if dtype != name else name
    spread = [0] if name == "bool" else [0, 1, 2]

    async def call(job: Job) -> Any:
        rng = np.random.default_rng(job.rank)
        values = rng.integers(0, 2, 300_001).astype(np.float32) + spread[job.rank % len(spread)]
        lent = quicoll.empty(300_001, native)
        if dtype == name:
            lent[:] = values.astype(lent.dtype)
        else:
            lent.copy_(torch.from_numpy(values))
        op = "max" if name == "bool" else "sum"
        other = lent.copy() if dtype == name else lent.clone()
        found = []
        for x in (lent, other):
            group, bits = job.group, []
            for each in (x, x[1:250_002]):
                bits.append(tensor_digest(await group.all_reduce(each, op=op)))
                bits.append(tensor_digest(await group.all_gather(each)))
            await group.all_reduce(x, op=op, out=x)
            bits.append(tensor_digest(await group.broadcast(x, root=1)))
            found.append(bits)
        return found

    async with cluster(3, local=True, lost_after=20.0) as jobs:
        results = await everyone(jobs, call)
        for lent, other in results:
            assert lent == other == results[0][0]


@pytest.mark.parametrize("elements", [SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, 300_001, 2_000_003])
async def test_every_size_gives_the_bits_that_it_gives_over_quic(elements: int) -> None:
    def leaf(rank: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(rank).standard_normal(elements).astype(np.float32) * np.float32(10.0**rank)

    async def call(job: Job) -> Any:
        x = leaf(job.rank)
        halves = [x[: elements // 3], x[elements // 3 :]]
        handles = [job.group.all_reduce(x, algorithm=name) for name in ("local", "direct", "auto")]
        handles.append(job.group.all_reduce(halves))
        return [await handle for handle in handles]

    async with cluster(3, local=True, lost_after=20.0) as jobs:
        for local, direct, auto, (first, second) in await everyone(jobs, call):
            assert local.tobytes() == direct.tobytes() == auto.tobytes()
            assert np.concatenate([first, second]).tobytes() == direct.tobytes()


async def test_more_calls_in_flight_than_there_are_slots_end_in_their_order() -> None:
    async def call(job: Job) -> Any:
        handles = [job.group.all_reduce(np.full(2, float(number))) for number in range(3 * SLOTS)]
        barrier = job.group.barrier()
        last = await handles[-1]  # in any order
        await barrier
        return [float((await handle)[0]) for handle in handles], float(last[0])

    async with cluster(2, local=True, lost_after=20.0) as jobs:
        for found, last in await everyone(jobs, call):
            assert found == [2.0 * number for number in range(3 * SLOTS)]
            assert last == found[-1]


async def test_a_call_that_nobody_awaits_ends_where_the_others_need_it() -> None:
    async with cluster(2, local=True, lost_after=20.0, timeout=20.0) as jobs:
        forgotten = [jobs[0].group.all_reduce(np.ones(1)) for _ in range(2 * SLOTS)]
        handles = [jobs[1].group.all_reduce(np.ones(1)) for _ in range(2 * SLOTS)]
        assert [float((await handle)[0]) for handle in handles] == [2.0] * (2 * SLOTS)
        del forgotten


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("stage", ["publish", "take"])
async def test_a_call_that_a_signal_interrupts_ends_at_once_and_so_do_those_around_it(
    stage: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by its deadline, which is far away: nobody has a handle of it, and the others wait for its share."""
    async with cluster(2, local=True, lost_after=20.0, timeout=500.0) as jobs:
        groups = [job.group for job in jobs]
        context = groups[0]._context
        near, hold, futures = context.near(jobs[0].view.view_id), context.runtime.hold, []
        assert near is not None
        small, here = near.row.small, threading.current_thread()
        whole = getattr(small, stage)

        def held(begun: Any, *, in_loop: bool) -> Any:
            answer = hold(begun, in_loop=in_loop)
            futures.append(answer.future)
            return answer

        def interrupted() -> Any:
            if threading.current_thread() is not here:
                return whole()
            if moment == "after":
                whole()
            raise KeyboardInterrupt

        monkeypatch.setattr(context.runtime, "hold", held)
        first = groups[0].all_reduce(np.ones(1))
        peers = [groups[1].all_reduce(np.ones(1)) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(small, stage, interrupted)
            with pytest.raises(KeyboardInterrupt):
                groups[0].all_reduce(np.ones(1))
        results = await asyncio.gather(first, *peers, return_exceptions=True)
        assert all(isinstance(each, np.ndarray | QuicollError) for each in results), results
        if (stage, moment) == ("take", "after"):
            assert isinstance(results[0], np.ndarray)  # which it had before the interruption
        await asyncio.wait(futures)  # all of both ranks', that of the interrupted call too
        assert futures[-1].cancelled()
        with pytest.raises(QuicollError):  # in the words of whichever end of the view is heard of first
            await groups[0].all_reduce(np.ones(1))


CALLED: dict[str, tuple[Callable[[Job], Any], type[QuicollError], str]] = {
    "another type": (
        lambda job: job.group.all_reduce(np.ones(2, np.float32 if job.rank else np.float64)),
        Mismatch,
        r"dtype float64 on rank 0, float32 on ranks 1, 2",
    ),
    "a large and a small one": (
        lambda job: job.group.all_reduce(np.ones(2 if job.rank else 1 << 20)),
        Mismatch,
        r"shape \(1048576,\) on rank 0",
    ),
    "another operation": (
        lambda job: job.group.all_reduce(np.ones(2)) if job.rank else job.group.all_gather(np.ones(2)),
        Mismatch,
        r"rank 0 called all_gather",
    ),
    "another operation, both large": (
        lambda job: (job.group.broadcast if job.rank else job.group.reduce)(np.ones(1 << 17)),
        Mismatch,
        r"rank 0 called reduce",
    ),
    "a small one over QUIC": (
        lambda job: job.group.all_gather(np.ones(2), algorithm="auto" if job.rank else "direct"),
        Mismatch,
        r"rank 0",
    ),
    "a large one over QUIC": (
        lambda job: job.group.broadcast(np.ones(1 << 17), algorithm="auto" if job.rank else "tree"),
        Mismatch,
        r"rank 0",
    ),
    "what always goes over QUIC": (
        lambda job: job.group.all_gather(np.ones(2)) if job.rank else job.group.split(0),
        Mismatch,
        r"rank 0 called split",
    ),
    "a barrier": (
        lambda job: job.group.all_reduce(np.ones(2)) if job.rank else job.group.barrier(),
        Mismatch,
        r"rank 0 called barrier",
    ),
    "nothing": (
        lambda job: job.group.all_reduce(np.ones(2)) if job.rank else asyncio.sleep(0),
        PeerError,
        r"rank 0 \(worker-0\) did not call all_reduce#0 within 5 s",
    ),
    "nothing large": (
        lambda job: job.group.all_reduce(np.ones(1 << 20)) if job.rank else asyncio.sleep(0),
        PeerError,
        r"rank 0 \(worker-0\) did not call all_reduce#0 within 5 s",
    ),
}


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("what", CALLED)
async def test_who_calls_something_else_is_named_to_all_as_over_quic(what: str, local: bool) -> None:
    call, kind, text = CALLED[what]
    timeout = 5.0 if what.startswith("nothing") else 100.0
    async with cluster(3, local=local, lost_after=20.0, timeout=timeout) as jobs:
        assert shares(jobs) == [local] * 3
        for rank, error in enumerate(await everyone(jobs, call)):
            if rank == 0 and what.startswith("nothing"):
                assert error is None
                continue
            assert type(error) is kind, error
            assert error.rank == 0
            assert error.node == "worker-0"
            assert re.search(text, error.message), error
            assert not error.usable


@pytest.mark.parametrize("elements", [1, 700_003])
async def test_two_ways_to_divide_the_ranks_give_the_bits_of_quic_many_calls_at_a_time(elements: int) -> None:
    """Pairs along both sides of a square, and all four: each rank in three groups, whose calls overlap."""

    async def call(job: Job) -> Any:
        row = await job.group.split(job.rank // 2)
        column = job.group.subgroup([2 + job.rank % 2, job.rank % 2], "column")
        assert row is not None
        assert row._here.near
        assert column._here.near
        x = np.random.default_rng(job.rank).standard_normal(elements).astype(np.float32) * np.float32(10.0**job.rank)
        groups = [row, column, job.group]
        turned = groups[job.rank % 3 :] + groups[: job.rank % 3]  # nobody awaits anything before all is called
        issued = {id(group): [group.all_reduce(x * i, algorithm="local") for i in range(1, 4)] for group in turned}
        gathered = {id(group): group.all_gather(x[: 1 + group.rank]) for group in turned}
        direct = {id(group): [group.all_reduce(x * i, algorithm="direct") for i in range(1, 4)] for group in turned}
        found = []
        for group in groups:
            near = [(await handle).tobytes() for handle in issued[id(group)]]
            assert near == [(await handle).tobytes() for handle in direct[id(group)]]
            found.append((near, (await gathered[id(group)]).tobytes()))
        return found

    async with cluster(4, local=True, lost_after=20.0) as jobs:
        found = await everyone(jobs, call)
        assert [type(each) for each in found] == [list] * 4, found
        assert found[0][0] == found[1][0]
        assert found[2][0] == found[3][0]
        assert found[0][1] == found[2][1]
        assert found[1][1] == found[3][1]
        assert found[0][2] == found[1][2] == found[2][2] == found[3][2]


async def test_a_member_of_a_sub_group_that_does_not_call_is_named_to_those_outside_of_it_too() -> None:
    async def call(job: Job) -> Any:
        pair = await job.group.split(0 if job.rank < 2 else None)
        if job.rank == 1:
            return None
        return await (job.group if pair is None else pair).all_reduce(np.ones(3), timeout=0.5 if pair else 100.0)

    async with cluster(3, local=True, lost_after=20.0) as jobs:
        found = await everyone(jobs, call)
        assert [(type(error), error.rank) for error in (found[0], found[2])] == [(PeerError, 1)] * 2, found
        assert found[0].op == "all_reduce#0@0:0"


async def test_calls_of_a_sub_group_through_memory_and_over_quic_in_each_others_place_are_a_mismatch() -> None:
    async def call(job: Job) -> Any:
        pair = await job.group.split(0)
        assert pair is not None
        return await pair.all_reduce(np.ones(1), algorithm="direct" if job.rank else "auto")

    async with cluster(2, local=True, lost_after=20.0, timeout=100.0) as jobs:
        for error in await everyone(jobs, call):
            assert isinstance(error, Mismatch), error
            assert "algorithm" in error.message


async def test_a_program_that_splits_again_and_again_takes_no_more_than_some_rooms() -> None:
    async def call(job: Job) -> Any:
        for turn in range(3 * KEPT):
            group = await job.group.split(0, key=-job.rank if turn % 2 else 0)
            assert group is not None
            assert (await group.all_gather(np.array([job.rank]))).tolist() == list(group.ranks)
        near = job.group._context.near(job.view.view_id)
        assert near is not None
        return near._memory.load(near.rank, ROOMS)

    async with cluster(3, local=True, lost_after=20.0) as jobs:
        assert await everyone(jobs, call) == [KEPT] * 3


async def test_a_call_that_comes_after_one_that_others_did_not_make_is_a_mismatch() -> None:
    async def call(job: Job) -> Any:
        if job.rank == 0:
            await job.group.send(np.ones(1), to=1)  # of a channel of its own: no number of the group's
            job.group.all_gather(np.ones(1))
        elif job.rank == 1:
            await job.group.recv(np.ones(1), source=0)
        return await job.group.all_reduce(np.ones(1))

    async with cluster(2, local=True, lost_after=20.0, timeout=100.0) as jobs:
        for error in await everyone(jobs, call):
            assert isinstance(error, Mismatch), error


async def test_a_call_that_is_cancelled_ends_the_view_for_all() -> None:
    async with cluster(3, local=True, lost_after=20.0, timeout=20.0) as jobs:  # the third never calls
        waits = asyncio.ensure_future(jobs[0].group.all_reduce(np.ones(1)))
        other = asyncio.ensure_future(jobs[1].group.all_reduce(np.ones(1)))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        with pytest.raises(PeerError, match="cancelled"):
            await other


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - nobody tells of what a rank has noted
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("elements", [1, 1 << 17])
async def test_a_rank_that_calls_late_is_a_straggler_to_those_who_have_waited(elements: int) -> None:
    told: list[dict[str, Any]] = []
    late = asyncio.Event()

    def observe(event: Any) -> None:
        if event.kind == "straggler" and event.fields["op"] == "all_gather#0":
            told.append(event.fields)

    def waited(job: Job) -> bool:
        """Whether this rank has seen who is there, and who is not."""
        near = job.group._context.near(job.view.view_id)
        assert near is not None
        return any(len(call.arrived_ns or ()) == 2 for call in near._calls.values())

    async def call(job: Job) -> Any:
        if job.rank == 2:
            await late.wait()
        return await job.group.all_gather(np.ones(elements))

    async with cluster(3, local=True, lost_after=20.0, straggler_after=0.1, observer=observe) as jobs:
        calls = asyncio.ensure_future(everyone(jobs, call))
        await until(lambda: waited(jobs[0]) and waited(jobs[1]))
        await asyncio.sleep(0.2)  # so late it is then, at least
        late.set()
        assert [len(result) for result in await calls] == [3 * elements] * 3
        await until(lambda: len(told) == 2)
        assert [each["rank"] for each in told] == [2, 2], told


async def test_steps_are_committed_and_the_next_view_meets_anew() -> None:
    async def step(job: Job) -> tuple[int, bytes]:
        async with job.step() as step:
            result = await job.group.all_reduce(np.full(3, float(job.rank)))
            large = await job.group.all_reduce(np.full(100_000, float(job.rank)))
        return step.number, result.tobytes() + large.tobytes()

    async with cluster(3, local=True, lost_after=20.0) as jobs:
        first = await everyone(jobs, step)
        assert first == [first[0]] * 3
        assert first[0][0] == 1
        different = await everyone(jobs, lambda job: job.group.all_reduce(np.ones(1), op="max" if job.rank else "sum"))
        assert [type(error) for error in different] == [Mismatch] * 3
        second = await everyone(jobs, step)
        assert second == [(2, first[0][1])] * 3
        assert shares(jobs) == [True] * 3
        assert {job.view.view_id for job in jobs} != {1}


async def test_local_by_name_is_refused_where_it_cannot_be() -> None:
    async with cluster(2) as jobs:
        with pytest.raises(LocalError, match="do not share a host's memory"):
            jobs[0].group.all_reduce(np.ones(1), algorithm="local")
    async with cluster(2, local=True, lost_after=20.0) as jobs:
        alone = await everyone(jobs, lambda job: job.group.split(job.rank))
        with pytest.raises(LocalError, match="do not share a host's memory"):
            alone[0].all_reduce(np.ones(1), algorithm="local")
        with pytest.raises(LocalError, match="do not share a host's memory"):
            alone[0].all_gather(np.ones(1), algorithm="local")
        leaves = jobs[0].group.shards(32768).leaves([np.ones(2)] * 16384)
        with pytest.raises(LocalError, match="it has 16384 leaves on a rank"):
            jobs[0].group.all_reduce(leaves, algorithm="local")
        assert all((await everyone(jobs, lambda job: job.group.all_reduce(np.ones(1))))[0] == 2)


async def test_threads_that_block_get_their_results_each_other_way() -> None:
    async with cluster(2, local=True, lost_after=20.0) as jobs:
        found: dict[int, list[float]] = {}

        def work(rank: int) -> None:
            group = quicoll.blocking.Group(jobs[rank].group)
            handles = [group.all_reduce(np.full(1, float(i)), async_op=True) for i in range(40)]
            sums = [float(group.all_reduce(np.full(1, float(i)))[0]) for i in range(40)]
            found[rank] = sums + [float(handle.wait()[0]) for handle in handles]
            group.barrier()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        assert found == dict.fromkeys(range(2), [2.0 * i for i in range(40)] * 2)


@pytest.mark.parametrize("without", ["memory", "a setting"])
async def test_where_one_rank_cannot_share_memory_none_does_and_an_event_says_why(
    without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []

    def observe(event: Any) -> None:
        if event.kind == "shared_memory":
            told.append(event.fields)

    made = 0
    make = Segment.make.__func__

    def refuse(layout: SegmentLayout, on_short: Callable[[OSError], None]) -> tuple[Segment, int]:
        nonlocal made
        made += 1
        if made == 2:
            raise OSError(28, "No space left on device")
        return make(Segment, layout, on_short)

    if without == "memory":
        monkeypatch.setattr(Segment, "make", refuse)
    else:
        monkeypatch.setattr(quicoll.testing, "unusable", iter(["", "off", ""]).__next__)
    async with cluster(3, local=True, lost_after=20.0, observer=observe) as jobs:
        assert shares(jobs) == [False] * 3
        results = await everyone(jobs, lambda job: job.group.all_reduce(np.ones(3)))
        assert [float(result[0]) for result in results] == [3.0] * 3
        assert told
        assert not any(each["used"] for each in told)
        reason = "No space left" if without == "memory" else "shared memory is off"
        assert all(reason in each["reason"] for each in told), told


def test_the_group_that_is_numbered_here_is_that_of_all_ranks() -> None:
    assert WORLD.group_id == GROUP


def run(world: int, what: str, size: int, tmp_path: Path, each: int = 0, before: tuple[str, ...] = ()) -> list[str]:
    command = "from quicoll.cli.main import main; main()"
    options = ["-n", str(world), "--restarts", "1", "--lost-after", "10"]
    script = [str(HELPERS / "local_ranks.py"), what, str(size), str(each)]
    done = subprocess.run(
        [*before, sys.executable, "-c", command, "run", *options, *script],
        env={**os.environ, "QUICOLL_LOCAL": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return [re.sub(r"^\[[^]]*\] ", "", line) for line in (done.stdout + done.stderr).splitlines()]


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_rank_that_is_killed_is_named_to_all_others(size: int, tmp_path: Path) -> None:
    said = run(3, "killed", size, tmp_path)
    assert said.count("shares memory: True") == 3, said
    got = sorted(line for line in said if line.startswith("rank"))
    assert got == [f"rank {rank} got PeerError of worker-1 lost ('worker-1',)" for rank in (0, 2)], said


def test_ranks_of_two_hosts_share_memory_by_host_and_name_the_one_that_is_killed(tmp_path: Path) -> None:
    said = run(4, "killed", 1 << 18, tmp_path, each=2)
    for ranks in ("[0, 1]", "[2, 3]"):
        assert said.count(f"ranks {ranks}: True") == 2, said
    got = sorted(line for line in said if line.startswith("rank "))
    assert got == [f"rank {rank} got PeerError of worker-1 lost ('worker-1',)" for rank in (0, 2, 3)], said


@pytest.fixture
def two_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first cluster ranks 0 and 1 have one address, 2 and 3 another; the coordinator is the first to ask."""
    hosts = iter(["127.0.0.1"] * 3 + ["127.0.0.2"] * 2)
    monkeypatch.setattr(
        quicoll.testing, "UdpSocket", lambda host, port, loop: UdpSocket(next(hosts, host), port, loop=loop)
    )


def parcels(jobs: list[Job]) -> list[int]:
    """How many parcels each rank has given."""
    found = []
    for job in jobs:
        communicator = job.group._context.engine._views.communicator
        assert communicator is not None
        (ways,) = communicator.ways
        assert isinstance(ways, HostWays)
        found.append(ways.parcels.given)
    return found


@pytest.mark.usefixtures("two_by_two")
async def test_every_type_and_operation_has_its_bits_where_parcels_go_inside_two_hosts() -> None:
    async with cluster(4, local=True, lost_after=20.0) as jobs:
        assert shares(jobs) == [False] * 4
        assert {job.group._here.sites for job in jobs} == {(0, 0, 1, 1)}
        chosen = [case for case in cases(4) if case.seed % 5 == 0]
        for at in range(0, len(chosen), TOGETHER):
            results = await everyone(jobs, lambda job, at=at: reductions(job, chosen[at : at + TOGETHER]))
            assert [type(result) for result in results] == [list] * 4, results
        moved = [Move(dtype, seed) for seed, dtype in enumerate(DTYPES)]
        for at in range(0, len(moved), 4):
            results = await everyone(jobs, lambda job, at=at: moves(job, moved[at : at + 4]))
            assert [type(result) for result in results] == [list] * 4, results


@pytest.mark.usefixtures("two_by_two")
async def test_parcels_change_no_bit_of_what_the_network_carries() -> None:
    works = {name: call for name, call in {**REDUCED, **MOVED}.items() if not name.startswith("uneven")}

    async def work(job: Job) -> list[bytes]:
        x = np.random.default_rng(job.rank).standard_normal(300_003).astype(np.float32)
        found = []
        for name, call in works.items():
            for way in ("auto", "hierarchical", "tree" if name in ("broadcast", *REDUCED) else "direct"):
                given = x[:300_000] if name in ("reduce_scatter", "scatter") else x
                result = await call(job, given, way)
                found.append(b"" if result is None else result.tobytes())
        return found

    async with cluster(4, local=True, lost_after=20.0) as jobs:
        results = await everyone(jobs, work)
        assert [type(result) for result in results] == [list] * 4, results
        assert all(given > 0 for given in parcels(jobs))
    async with cluster(4, lost_after=20.0) as jobs:
        assert await everyone(jobs, work) == results


@pytest.mark.parametrize(("world", "size", "each"), [(2, 1, 0), (4, 1 << 18, 2)])
def test_a_child_of_a_fork_takes_no_part_and_does_no_harm(world: int, size: int, each: int, tmp_path: Path) -> None:
    """As the processes of a data loader are; where calls go through memory, and where messages do."""
    said = run(world, "forks", size, tmp_path, each=each)
    assert sorted(line for line in said if line.startswith("rank ")) == [
        f"rank {rank} is done" for rank in range(world)
    ], said


@pytest.mark.parametrize("each", [0, 2])
def test_where_the_system_gives_no_memory_all_go_on_over_the_network(each: int, tmp_path: Path) -> None:
    """A file of memory has the length of a segment or is refused by the system itself, not by a stand-in of it."""
    said = run(
        4, "nothing", 1 << 14, tmp_path, each=each, before=("prlimit", f"--fsize={SegmentLayout.of_ranks(2).base}")
    )
    assert said.count("shares memory: False") == 4, said
    assert sum("False" in line for line in said if line.startswith("ranks ")) == (4 if each else 0), said
    assert sorted(line for line in said if line.startswith("rank ")) == [f"rank {rank} is done" for rank in range(4)], (
        said
    )
