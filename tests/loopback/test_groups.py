"""Sub-groups over real QUIC and through the memory of one host: who is in them, their bits, their failures, and that
they do not wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import quicoll.testing
from quicoll import Group, Job, LocalError, Mismatch, PeerError, QuicollError, StepAborted
from quicoll.local.sealing import unusable

Array = np.ndarray[Any, Any]


@pytest.fixture(
    autouse=True,
    params=["network", pytest.param("memory", marks=pytest.mark.skipif(bool(unusable()), reason=unusable() or "here"))],
)
def way(request: pytest.FixtureRequest) -> str:
    """What the ranks of a test hand each other their operations by."""
    WAY.clear()
    if request.param == "memory":
        WAY.update({"local": True, "lost_after": 20.0})
    return str(request.param)


WAY: dict[str, Any] = {}


def cluster(ranks: int, **settings: Any) -> Any:
    return quicoll.testing.cluster(ranks, **{**WAY, **settings})


def values(shape: tuple[int, ...], rank: int) -> Array:
    rng = np.random.default_rng([rank, *shape])
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(np.float32)


def tree(leaves: list[Any]) -> Any:
    """The canonical order, as its definition says it."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1
    while half * 2 < len(leaves):
        half *= 2
    return tree(leaves[:half]) + tree(leaves[half:])


async def everyone(jobs: list[Job], call: Callable[[Job], Any]) -> list[Any]:
    return list(await asyncio.gather(*(call(job) for job in jobs)))


async def outcomes(jobs: list[Job], call: Callable[[Job], Any]) -> list[Any]:
    async def one(job: Job) -> Any:
        return await call(job)

    return list(await asyncio.gather(*(one(job) for job in jobs), return_exceptions=True))


async def split(jobs: list[Job], colors: list[int | None], keys: list[int] | None = None) -> list[Any]:
    keys = [0] * len(jobs) if keys is None else keys
    return await everyone(jobs, lambda job: job.group.split(colors[job.rank], keys[job.rank]))


# ---------------------------------------------------------------------------------------------------------------------
# Who is where


async def test_a_split_numbers_the_ranks_of_each_color_by_key_and_leaves_out_who_names_none() -> None:
    async with cluster(5) as jobs:
        groups = await split(jobs, [7, 0, 7, None, 7], [1, 0, 0, 0, 1])
        assert groups[3] is None
        assert [(g.rank, g.world_size, g.ranks) for g in groups if g is not None] == [
            (1, 3, (2, 0, 4)),
            (0, 1, (1,)),
            (0, 3, (2, 0, 4)),
            (2, 3, (2, 0, 4)),
        ]
        assert [g.name for g in groups if g is not None] == ["0:7", "0:0", "0:7", "0:7"]
        assert jobs[0].group.ranks == (0, 1, 2, 3, 4)
        assert not groups[0].stale
        assert not jobs[0].group.stale


@pytest.mark.parametrize(
    ("color", "key", "said"),
    [(-1, 0, "from 0 to"), (1 << 61, 0, "from 0 to"), (0, 1 << 60, "a key is"), (1.5, 0, "are integers")],
)
async def test_colors_and_keys_out_of_bounds_are_refused_before_anything_is_sent(
    color: Any, key: int, said: str
) -> None:
    async with cluster(2) as jobs:
        with pytest.raises(LocalError, match=said):
            jobs[0].group.split(color, key)
        largest = await split(jobs, [(1 << 61) - 1] * 2, [(1 << 60) - 1, 1 - (1 << 60)])
        assert [g.rank for g in largest] == [1, 0]
        assert [g.name.split(":")[0] for g in largest] == ["0", "0"]  # the refused call was no split


OPERATIONS: dict[str, Callable[[Group, Array], Any]] = {
    "all_reduce": lambda g, x: g.all_reduce(x),
    "all_reduce direct": lambda g, x: g.all_reduce(x, algorithm="direct"),
    "all_reduce hierarchical": lambda g, x: g.all_reduce(x, algorithm="hierarchical"),
    "all_reduce ring": lambda g, x: g.all_reduce(x, reduce_order="ring"),
    "reduce": lambda g, x: g.reduce(x, root=g.world_size - 1),
    "reduce_scatter": lambda g, x: g.reduce_scatter(x),
    "broadcast": lambda g, x: g.broadcast(x, root=g.world_size - 1),
    "all_gather": lambda g, x: g.all_gather(x[: g.rank]),
    "gather": lambda g, x: g.gather(x[: 5 - g.rank]),
    "scatter": lambda g, x: g.scatter(x, root=g.world_size - 1),
    "all_to_all": lambda g, x: g.all_to_all(x),
    "broadcast_object": lambda g, x: g.broadcast_object(x.tolist(), root=g.world_size - 1),
    "all_gather_object": lambda g, x: g.all_gather_object(x[:3].tolist()),
    "barrier": lambda g, x: g.barrier(),
    "a list": lambda g, x: g.all_reduce([x, x[:7]]),
    "shards": lambda g, x: g.all_reduce(g.shards(7).leaves([x * s for s in g.shards(7)], like=x)),
}


async def test_every_operation_of_a_sub_group_gives_what_a_world_of_its_ranks_gives() -> None:
    """Ranks 4, 0, 2 in this order, and 1, 3, at the same time, against clusters of three and of two."""

    def bits(value: Any) -> Any:
        if isinstance(value, list):
            return [bits(each) for each in value]
        return (value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    async def all_of(group: Group, x: Array) -> dict[str, Any]:
        return {name: bits(await call(group, x)) for name, call in OPERATIONS.items()}

    apart: dict[int, dict[str, Any]] = {}
    for ranks in ((4, 0, 2), (1, 3)):
        async with cluster(len(ranks), chunk_bytes=3000) as jobs:
            got = await everyone(jobs, lambda job, r=ranks: all_of(job.group, values((3001,), r[job.rank])))
            apart.update(zip(ranks, got, strict=True))
    async with cluster(5, chunk_bytes=3000, sites=["n", "n", "s", "s", "n"]) as jobs:
        groups = await split(jobs, [0, 1, 0, 1, 0], [1, 0, 2, 0, 0])
        assert groups[0].ranks == (4, 0, 2)
        got = await everyone(jobs, lambda job: all_of(groups[job.rank], values((3001,), job.rank)))
    for rank, results in enumerate(got):
        for name in OPERATIONS:
            assert results[name] == apart[rank][name], (rank, name)


async def test_sends_in_a_sub_group_go_to_its_own_ranks_and_are_apart_from_those_of_all() -> None:
    async with cluster(3) as jobs:
        groups = await split(jobs, [0, None, 0], [1, 0, 0])  # 2 is its rank 0, 0 its rank 1

        async def first(job: Job) -> None:
            a, b = groups[0].send(np.full(4, 1.0), to=0), job.group.send(np.full(4, 2.0), to=2)
            await asyncio.gather(a, b)

        async def third(job: Job) -> list[float]:
            everybodys = await job.group.recv(np.empty(4), source=0)
            return [float(everybodys[0]), float((await groups[2].recv(np.empty(4), source=1))[0])]

        assert (await asyncio.gather(first(jobs[0]), third(jobs[2])))[1] == [2.0, 1.0]


async def test_a_sub_group_of_one_and_one_of_all_work() -> None:
    async with cluster(3) as jobs:
        alone = await split(jobs, [0, 1, 2])
        turned = await split(jobs, [5, 5, 5], [0, -1, -2])
        x = [values((50,), rank) for rank in range(3)]
        assert [y.tobytes() for y in await everyone(jobs, lambda job: alone[job.rank].all_reduce(x[job.rank]))] == [
            each.tobytes() for each in x
        ]
        want = tree([x[2], x[1], x[0]]).tobytes()
        got = await everyone(jobs, lambda job: turned[job.rank].all_reduce(x[job.rank]))
        assert {y.tobytes() for y in got} == {want}


async def test_splits_of_splits_and_equal_colors_of_different_splits_are_groups_of_their_own() -> None:
    """A grid of 2 x 3: rows, columns, and the first two of each row again, all of them at work at the same time."""
    async with cluster(6) as jobs:

        async def work(job: Job) -> tuple[str, list[float]]:
            row = await job.group.split(job.rank // 3)
            column = await job.group.split(job.rank % 3)
            assert row is not None
            assert column is not None
            inner = await row.split(0 if row.rank < 2 else None)
            handles = []
            for k in range(3):
                handles.append(row.all_reduce(np.full(3, 10.0**k * (job.rank + 1))))
                handles.append(column.all_reduce(np.full(3, 10.0**k * (job.rank + 1))))
                if inner is not None:
                    handles.append(inner.all_reduce(np.full(3, 10.0**k * (job.rank + 1))))
            got = [float((await handle)[0]) for handle in reversed(handles)]
            return (inner.name if inner is not None else ""), got[::-1]

        rows, columns, inners = [6.0, 15.0], [5.0, 7.0, 9.0], [3.0, 9.0]
        for rank, (name, got) in enumerate(await everyone(jobs, work)):
            parts = [rows[rank // 3], columns[rank % 3]] + ([inners[rank // 3]] if rank % 3 < 2 else [])
            assert name == (f"0:{rank // 3}/0:0" if rank % 3 < 2 else "")
            assert got == [part * 10.0**k for k in range(3) for part in parts]


# ---------------------------------------------------------------------------------------------------------------------
# Overlapping groups


async def test_operations_of_overlapping_groups_may_be_issued_in_any_order_even_when_large() -> None:
    """Three groups of two that form a circle; every rank issues its two in another order and awaits them in another.

    The payloads are larger than what a link holds for memory that is not posted (32 MiB): an operation that has been
    issued by one side alone must not keep those behind it on the same link.
    """
    big, small = np.ones(6 << 20), np.ones(1000)  # 48 MiB
    async with cluster(2, lost_after=20.0) as jobs:
        one, two = await split(jobs, [0, 0]), await split(jobs, [0, 0])

        async def first(job: Job) -> None:
            large = one[0].broadcast(big, root=0)
            assert (await two[0].all_reduce(small))[0] == 2.0
            await large

        async def second(job: Job) -> None:
            assert (await two[1].all_reduce(small))[0] == 2.0
            assert (await one[1].broadcast(big, root=0)).tobytes() == big.tobytes()

        await asyncio.gather(first(jobs[0]), second(jobs[1]))
    async with cluster(3) as jobs:

        async def circle(job: Job) -> list[float]:
            pairs = [await job.group.split(0 if job.rank in pair else None) for pair in ((0, 1), (1, 2), (2, 0))]
            mine = [pair for pair in pairs if pair is not None]
            handles = [pair.all_reduce(np.full(40_000, job.rank + 1.0)) for pair in mine]
            if job.rank == 1:
                handles.reverse()
            return sorted([float((await handle)[0]) for handle in handles])

        assert await everyone(jobs, circle) == [[3.0, 4.0], [3.0, 5.0], [4.0, 5.0]]


async def test_two_ranks_that_await_operations_of_two_groups_in_opposite_order_both_hear_what_the_other_called() -> (
    None
):
    async with cluster(3) as jobs:
        await everyone(jobs, lambda job: job.ready())
        a, b = await split(jobs, [0, 0, 0]), await split(jobs, [0, 0, None])
        out = [np.zeros(3) for _ in jobs]

        async def crossed(job: Job) -> None:
            if job.rank == 0:
                await a[0].all_reduce(np.ones(3), out=out[0], timeout=0.6)
                await b[0].all_reduce(np.ones(3), out=out[0], timeout=0.6)
            elif job.rank == 1:
                await b[1].all_reduce(np.ones(3), out=out[1], timeout=0.6)
                await a[1].all_reduce(np.ones(3), out=out[1], timeout=0.6)
            else:
                await a[2].all_reduce(np.ones(3), out=out[2], timeout=0.6)

        got = await outcomes(jobs, crossed)
        assert [type(error) for error in got] == [PeerError] * 3, got
        assert any(
            "did not call all_reduce#0@0:0 within 0.6 s; rank 1 called all_reduce" in str(e) for e in got
        ) or any("did not call all_reduce#0@1:0 within 0.6 s; rank 0 called all_reduce" in str(e) for e in got), got
        assert not any(x.any() for x in out)


# ---------------------------------------------------------------------------------------------------------------------
# Views and votes


async def test_a_sub_group_belongs_to_its_view_and_says_so_in_the_next_one() -> None:
    async with cluster(3) as jobs:
        await everyone(jobs, lambda job: job.ready())
        groups = await split(jobs, [0, 0, 1])
        with pytest.raises(PeerError):
            await jobs[2].group.barrier(timeout=0.1)  # nobody else calls it: the view ends

        async def again(job: Job) -> None:
            view = job.view.view_id
            while job.view.view_id == view:
                with suppress(StepAborted):
                    async with job.step():
                        await job.group.barrier()

        await everyone(jobs, again)
        for job, group in zip(jobs, groups, strict=True):
            assert group.stale
            with pytest.raises(LocalError, match="split again in every view"):
                group.all_reduce(np.ones(1))
            for call in (lambda g: g.shards(3), lambda g: g.split(0), lambda g: g.barrier()):
                with pytest.raises(LocalError, match="split again"):
                    call(group)
            assert job.group.world_size == 3
        groups = await split(jobs, [0, 0, 1])
        got = await everyone(jobs, lambda job: groups[job.rank].all_reduce(np.ones(1)))
        assert [y.tolist() for y in got] == [[2.0], [2.0], [1.0]]


async def test_groups_made_before_the_first_step_are_of_the_view_in_which_it_runs() -> None:
    async with cluster(2) as jobs:
        before = await split(jobs, [0, 0])

        async def step(job: Job) -> str:
            async with job.step():
                now = await job.group.split(0)
                assert now is not None
                await asyncio.gather(before[job.rank].barrier(), now.barrier())
            return now.name

        assert await everyone(jobs, step) == ["1:0", "1:0"]


async def test_steps_commit_with_results_that_differ_between_sub_groups() -> None:
    async with cluster(4) as jobs:
        groups = await split(jobs, [0, 0, 1, None])

        async def step(job: Job) -> int:
            async with job.step() as step:
                group = groups[job.rank]
                if group is not None:
                    await group.all_reduce(np.full(3, float(job.rank)))
                    inner = await group.split(0, -job.rank)
                    await inner.all_gather_object([job.rank])
                await job.group.all_reduce(np.ones(2))
            return step.number

        for number in (1, 2):
            assert await everyone(jobs, step) == [number] * 4


async def test_different_bits_within_a_sub_group_keep_the_step_from_being_committed_anywhere() -> None:
    async with cluster(4) as jobs:
        groups = await split(jobs, [0, 0, 0, None])
        wrong, record = jobs[1]._context, jobs[1]._context.record
        # As if memory had changed under the result of one rank.
        wrong.record = lambda group, seq, digest: record(group, seq, bytes([digest[0] ^ 1, *digest[1:]]))

        async def step(job: Job) -> None:
            async with job.step() as step:
                step.on_commit(lambda: pytest.fail("nothing may be committed"))
                group = groups[job.rank]
                if group is None:
                    return
                await group.all_reduce(np.ones(3))

        got = await outcomes(jobs, step)
        assert [type(error) for error in got] == [StepAborted] * 4, got
        assert all("digests of a sub-group's results" in str(error) for error in got)
        assert {error.node for error in got} == {"worker-1"}


async def test_shards_of_another_group_are_refused() -> None:
    async with cluster(3) as jobs:
        groups = await split(jobs, [0, 0, None])
        shards = jobs[1].group.shards(6)
        with pytest.raises(LocalError, match="not those of this rank in this group"):
            groups[1].all_reduce(shards.leaves([np.ones(1)] * len(shards)))
        assert list(groups[1].shards(6)) == [3, 4, 5]


# ---------------------------------------------------------------------------------------------------------------------
# Failures


MISMATCHES: dict[str, tuple[Callable[[Group], Any], Callable[[Group], Any]]] = {
    "operation": (lambda g: g.all_reduce(np.ones(3)), lambda g: g.barrier()),
    "shape": (lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce(np.ones(4))),
    "dtype": (lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce(np.ones(3, np.float32))),
    "order": (lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce(np.ones(3), reduce_order="ring")),
    "op": (lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce(np.ones(3), op="max")),
    "root": (lambda g: g.broadcast(np.ones(3)), lambda g: g.broadcast(np.ones(3), root=1)),
    "split and all_gather": (lambda g: g.split(0), lambda g: g.all_gather(np.ones(2))),
    "length of a message": (lambda g: g.send(np.ones(3), to=1), lambda g: g.recv(np.ones(4), source=0)),
}


@pytest.mark.parametrize("calls", MISMATCHES.values(), ids=MISMATCHES.keys())
async def test_different_calls_in_a_sub_group_are_a_mismatch_on_all_ranks_of_the_view(calls: Any) -> None:
    async with cluster(3) as jobs:
        groups = await split(jobs, [None, 0, 0])

        async def step(job: Job) -> None:
            async with job.step() as step:
                step.on_commit(lambda: pytest.fail("nothing may be committed"))
                if job.rank:
                    await calls[job.rank - 1](groups[job.rank])

        got = await asyncio.wait_for(outcomes(jobs, step), 100)
        assert all(isinstance(error, Mismatch) for error in got), got


async def test_an_operation_of_all_against_one_of_a_sub_group_ends_by_the_deadline_and_says_both() -> None:
    async with cluster(2) as jobs:
        groups = await split(jobs, [0, 0])
        got = await outcomes(jobs, lambda job: (job.group if job.rank else groups[0]).barrier(timeout=0.5))
        assert all(isinstance(error, PeerError) for error in got), got
        assert any("did not call barrier#" in str(error) and "called barrier" in str(error) for error in got), got


async def test_a_member_that_never_calls_is_named_within_the_deadline() -> None:
    async with cluster(3) as jobs:
        groups = await split(jobs, [None, 0, 0], [0, 1, 0])
        out = np.full(3, -1.0)
        with pytest.raises(PeerError) as caught:
            await groups[1].all_reduce(np.ones(3), out=out, timeout=0.4)
        assert (caught.value.rank, caught.value.node, caught.value.op) == (2, "worker-2", "all_reduce#0@0:0")
        assert out.tolist() == [-1.0] * 3
        with pytest.raises(QuicollError):
            await jobs[0].group.barrier()  # the view is over for ranks outside of the sub-group too


async def test_a_rank_that_does_not_split_is_named_and_nobody_gets_a_group() -> None:
    async with cluster(3, timeout=0.4) as jobs:
        got = await outcomes(jobs[:2], lambda job: job.group.split(0))
        assert all(isinstance(error, PeerError) for error in got)
        assert any("rank 2 (worker-2) did not call split#0" in str(error) for error in got)


async def test_a_call_from_outside_of_a_sub_group_breaks_the_view_and_names_who_made_it() -> None:
    async with cluster(3) as jobs:
        groups = await split(jobs, [0, 0, None])
        stranger = Group(jobs[2]._context, groups[0]._scope)
        waiting = asyncio.ensure_future(groups[0].all_reduce(np.ones(3))._wait())
        got = await asyncio.gather(waiting, stranger.all_reduce(np.ones(3))._wait(), return_exceptions=True)
        assert all(isinstance(error, PeerError) for error in got), got
        assert any("a group that it is not in" in str(error) and error.rank == 2 for error in got), got


async def test_two_groups_with_one_id_are_refused_and_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quicoll.collectives.subgroups.derived_id", lambda parent, *what: 1 << 61)
    async with cluster(2) as jobs:
        await split(jobs, [0, 0])
        got = await outcomes(jobs, lambda job: job.group.split(0))
        assert all(isinstance(error, LocalError) and "have the same id" in str(error) for error in got)


async def test_a_step_uses_no_more_sub_groups_than_a_vote_tells_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quicoll.collectives.context.MAX_GROUPS", 2)
    async with cluster(1) as jobs:
        groups = [await jobs[0].group.split(0) for _ in range(3)]
        async with jobs[0].step():
            for group in (*groups[:2], *groups[:2]):
                assert group is not None
                await group.all_reduce(np.ones(1))
            with pytest.raises(LocalError, match="at most 2 sub-groups"):
                groups[2].all_reduce(np.ones(1))
            for group in groups[:2]:  # which does no harm to those that are used already
                assert group is not None
                await group.all_reduce(np.ones(1))
        assert jobs[0].committed_step == 1


async def test_a_split_that_is_refused_does_not_count() -> None:
    async with cluster(2) as jobs:
        with pytest.raises(LocalError, match="timeout"):
            jobs[0].group.split(0, timeout=-1.0)
        groups = await outcomes(jobs, lambda job: job.group.split(0))
        assert [group.name for group in groups] == ["0:0", "0:0"]


async def test_splits_nest_to_a_bounded_depth() -> None:
    async with cluster(1) as jobs:
        group: Any = jobs[0].group
        for _ in range(32):
            group = await group.split(0)
        assert (await group.all_reduce(np.ones(1))).tolist() == [1.0]
        with pytest.raises(LocalError, match="32 deep"):
            group.split(0)
