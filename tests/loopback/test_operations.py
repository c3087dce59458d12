"""The operations of a group over real QUIC against plain definitions: a few of each; tests/unit has the plans' bulk."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import quicoll.plan.schedule
from quicoll import Job, LocalError, Mismatch, PeerError, QuicollError
from quicoll.collectives.objects import MAX_OBJECT_BYTES
from quicoll.engine.calls import site_numbers
from quicoll.engine.communicator import Communicator
from quicoll.numerics.bundle import Joined
from quicoll.plan.choice import RULES
from quicoll.testing import cluster

ALGORITHMS = ["auto", "direct", "tree", "hierarchical", "exchange"]
Array = np.ndarray[Any, Any]


def values(shape: tuple[int, ...], rank: int, dtype: str = "float32") -> Array:
    rng = np.random.default_rng([rank, *shape])
    return np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(dtype)


def tree(leaves: list[Any]) -> Any:
    """The canonical order, as its definition says it."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1
    while half * 2 < len(leaves):
        half *= 2
    return tree(leaves[:half]) + tree(leaves[half:])


async def everyone(jobs: list[Job], call: Any) -> list[Any]:
    return list(await asyncio.gather(*(call(job) for job in jobs)))


async def outcomes(jobs: list[Job], call: Any) -> list[Any]:
    async def one(job: Job) -> Any:
        return await call(job)

    return list(await asyncio.gather(*(one(job) for job in jobs), return_exceptions=True))


# ---------------------------------------------------------------------------------------------------------------------
# Reductions


@pytest.mark.parametrize("world", [1, 2, 3, 5])
async def test_every_algorithm_gives_the_canonical_bits(world: int) -> None:
    leaves = [values((9001,), leaf) for leaf in range(8)]
    whole = tree(leaves) / np.float32(8)
    async with cluster(world, chunk_bytes=5000) as jobs:
        for algorithm in ALGORITHMS:

            def call(job: Job, algorithm: str = algorithm, op: str = "all_reduce", **more: Any) -> Any:
                shards = job.group.shards(8)
                mine = shards.leaves([leaves[s] for s in shards], like=leaves[0])
                return getattr(job.group, op)(mine, op="avg", algorithm=algorithm, **more)

            for got in await everyone(jobs, call):
                assert got.tobytes() == whole.tobytes(), algorithm
            if algorithm == "exchange":
                continue
            root = world // 2
            got = await asyncio.gather(*(call(job, algorithm, "reduce", root=root) for job in jobs))
            assert got.pop(root).tobytes() == whole.tobytes()
            assert got == [None] * (world - 1)
            rows = await asyncio.gather(*(call(job, algorithm, "reduce_scatter") for job in jobs))
            assert np.concatenate(rows).tobytes() == whole.tobytes()


async def test_ranks_of_two_sites_agree_on_one_algorithm_and_the_bits_stay() -> None:
    async with cluster(5, sites=["north", "south", "north", "south", "south"]) as jobs:
        assert site_numbers(jobs[0].view) == (0, 1, 0, 1, 1)
        parts = [values((70_000,), rank) for rank in range(5)]
        want = tree(parts).tobytes()
        for algorithm in ALGORITHMS:
            got = await everyone(jobs, lambda job, a=algorithm: job.group.all_reduce(parts[job.rank], algorithm=a))
            assert {array.tobytes() for array in got} == {want}


async def test_ranks_of_two_versions_that_choose_differently_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(communicator: Communicator, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return RULES + communicator.rank, *(1 for _ in ranks), *(1 << 30 for _ in ranks)

    monkeypatch.setattr(Communicator, "_measured", measure)
    async with cluster(2) as jobs:
        x = np.ones(1 << 20, np.float32)
        ends = await asyncio.gather(*(job.group.all_reduce(x) for job in jobs), return_exceptions=True)
    assert [type(end) for end in ends] == [Mismatch] * 2
    assert "rank 1 (worker-1) chooses algorithms by rules" in str(ends[0])
    assert "different versions of quicoll" in str(ends[0])


async def test_ranks_that_measure_different_things_choose_alike_and_agree_once_in_a_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[int] = []
    chosen: dict[int, list[str]] = {}
    networks: list[Any] = []
    real = quicoll.plan.schedule.choose

    def measure(communicator: Communicator, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Rank 1 is the only one that sees how far away it is."""
        measured.append(communicator.rank)
        far = [1 << 17 if communicator.rank == 1 and rank != 1 else 1 for rank in ranks]
        return RULES, *far, *(1 << 30 - communicator.rank for _ in far)

    def watch(op: str, world: int, nbytes: int, *rest: Any, **options: Any) -> str:
        networks.append(rest[2])
        taken = real(op, world, nbytes, *rest, **options)
        chosen.setdefault(nbytes, []).append(taken)
        return taken

    monkeypatch.setattr(Communicator, "_measured", measure)
    monkeypatch.setattr("quicoll.plan.schedule.choose", watch)
    async with cluster(3) as jobs:

        async def many(job: Job) -> None:
            handles = [job.group.all_reduce(np.ones(8 << k)) for k in range(0, 18, 3)]
            for handle in reversed(handles):
                await handle
            await job.group.reduce(np.ones(500))

        await everyone(jobs, many)
    assert sorted(measured) == [0, 1, 2]
    assert len(set(networks)) == 1
    assert networks[0].latency[0] == (0.0, 0.131072, 1e-6)
    assert all(len(taken) == 3 and len(set(taken)) == 1 for taken in chosen.values())
    assert 64 not in chosen  # it travels in the announcements, wherever who is
    assert chosen[4096] == ["exchange"] * 3


@pytest.mark.parametrize(
    ("name", "far", "taken"),
    [
        *((name, 1 << 20, "hierarchical") for name in ("all_gather", "scatter", "all_gather_object")),
        *((name, 1, "direct") for name in ("all_gather", "gather", "scatter", "all_gather_object")),
    ],
)
async def test_a_gather_goes_by_what_is_measured_and_the_group_agrees_on_it_by_the_first_such_operation(
    monkeypatch: pytest.MonkeyPatch, name: str, far: int, taken: str
) -> None:
    """Two sites that are far apart, or side by side after all."""
    measured: list[int] = []
    chosen: list[tuple[str, Any]] = []
    real = quicoll.plan.schedule.choose

    def measure(communicator: Communicator, ranks: tuple[int, ...]) -> tuple[int, ...]:
        measured.append(communicator.rank)
        latency = [far if communicator.rank // 2 != rank // 2 else 1 for rank in ranks]
        return RULES, *latency, *(1 << 30 for _ in ranks)

    def watch(op: str, world: int, nbytes: int, *rest: Any, **options: Any) -> str:
        chosen.append((real(op, world, nbytes, *rest, **options), rest[2]))
        return chosen[-1][0]

    async def call(job: Job) -> None:
        match name:
            case "all_gather_object":
                assert await job.group.all_gather_object([job.rank]) == [[rank] for rank in range(4)]
            case "scatter":
                assert (await job.group.scatter(np.arange(8), root=3)).tolist() == [2 * job.rank, 2 * job.rank + 1]
            case _:
                got = await getattr(job.group, name)(np.full(job.rank, job.rank))
                if got is not None:
                    assert got.tolist() == [1, 2, 2, 3, 3, 3]

    async with cluster(4, sites=["north", "north", "south", "south"]) as jobs:
        monkeypatch.setattr(Communicator, "_measured", measure)
        monkeypatch.setattr("quicoll.plan.schedule.choose", watch)
        await everyone(jobs, call)
        assert ([algorithm for algorithm, _ in chosen], sorted(measured)) == ([taken] * 4, [0, 1, 2, 3])
        await everyone(jobs, call)
        await everyone(jobs, lambda job: job.group.all_reduce(np.ones(3)))
    assert sorted(measured) == [0, 1, 2, 3], "once in a view"
    assert len({network for _, network in chosen}) == 1
    assert chosen[0][1].latency[0][2] == far / 1e6


async def test_moves_by_site_give_the_same_bits_as_those_that_do_not_look_at_sites() -> None:
    """Uneven sites whose ranks are no neighbours, parts of all sizes, a list, and out=."""
    async with cluster(5, sites=["north", "south", "south", "north", "south"]) as jobs:
        rows = [0, 90_001, 3, 1, 40_000]
        parts = [values((rows[rank], 2), rank) for rank in range(5)]
        whole = np.concatenate(parts)
        for algorithm in ("auto", "direct", "hierarchical"):
            got = await everyone(jobs, lambda job, a=algorithm: job.group.all_gather(parts[job.rank], algorithm=a))
            assert {array.tobytes() for array in got} == {whole.tobytes()}
            gathered = await everyone(
                jobs, lambda job, a=algorithm: job.group.gather(parts[job.rank], root=3, algorithm=a)
            )
            assert gathered.pop(3).tobytes() == whole.tobytes()
            assert gathered == [None] * 4
            scattered = await everyone(
                jobs,
                lambda job, a=algorithm: job.group.scatter(
                    whole if job.rank == 3 else whole[:0], root=3, counts=rows if job.rank == 3 else None, algorithm=a
                ),
            )
            assert [array.tobytes() for array in scattered] == [part.tobytes() for part in parts]
        for algorithm in ("auto", "tree", "hierarchical"):
            for root in range(5):
                given = [values((9, 2), root), values((90_001, 2), root + 1)]
                outs = [[np.empty_like(each) for each in given] for _ in jobs]
                await everyone(
                    jobs,
                    lambda job, a=algorithm, r=root, o=outs, x=given: job.group.broadcast(
                        x if job.rank == r else o[job.rank], root=r, out=o[job.rank], algorithm=a
                    ),
                )
                for out in outs:
                    assert [each.tobytes() for each in out] == [each.tobytes() for each in given]
        names = await everyone(jobs, lambda job: job.group.all_gather_object(f"rank {job.rank}"))
        assert names == [[f"rank {rank}" for rank in range(5)]] * 5
        assert await everyone(jobs, lambda job: job.group.broadcast_object([job.rank], root=4)) == [[4]] * 5


async def test_reduce_scatter_gives_the_rows_that_were_asked_for() -> None:
    async with cluster(3) as jobs:
        parts = [values((7, 2), rank) for rank in range(3)]
        whole = tree(parts)
        even = await everyone(jobs, lambda job: job.group.reduce_scatter(parts[job.rank]))
        assert [rows.shape for rows in even] == [(3, 2), (3, 2), (1, 2)]
        assert np.concatenate(even).tobytes() == whole.tobytes()
        given = await everyone(jobs, lambda job: job.group.reduce_scatter(parts[job.rank], counts=[0, 6, 1]))
        assert [rows.shape for rows in given] == [(0, 2), (6, 2), (1, 2)]
        assert np.concatenate(given).tobytes() == whole.tobytes()
        outs = [np.zeros((3 - 2 * (rank == 2), 2), np.float32) for rank in range(3)]
        await everyone(jobs, lambda job: job.group.reduce_scatter(parts[job.rank], out=outs[job.rank]))
        assert np.concatenate(outs).tobytes() == whole.tobytes()


async def test_a_list_is_one_operation_with_the_bits_of_one_call_for_each_tensor() -> None:
    shapes = [(), (0,), (3, 5), (40_000,), (1,), (257,)]
    async with cluster(3, chunk_bytes=10_000) as jobs:
        parts = [[values(shape, rank) for shape in shapes] for rank in range(3)]
        apart = await everyone(jobs, lambda job: asyncio.gather(*map(job.group.all_reduce, parts[job.rank])))
        for algorithm in ALGORITHMS:
            got = await everyone(
                jobs, lambda job, a=algorithm: job.group.all_reduce(parts[job.rank], algorithm=a, op="sum")
            )
            for each in got:
                assert [x.shape for x in each] == shapes
                assert [x.tobytes() for x in each] == [np.asarray(x).tobytes() for x in apart[0]]
        tensors = [[torch.from_numpy(np.array(x)) for x in row] for row in parts]
        outs = [[torch.zeros(shape) for shape in shapes] for _ in range(3)]
        got = await everyone(jobs, lambda job: job.group.all_reduce(tensors[job.rank], out=outs[job.rank]))
        for row, given in zip(outs, got, strict=True):
            assert all(x is y for x, y in zip(row, given, strict=True))
            assert [x.numpy().tobytes() for x in row] == [np.asarray(x).tobytes() for x in apart[0]]
        told = await everyone(jobs, lambda job: job.group.broadcast(parts[job.rank], root=1))
        assert all([x.tobytes() for x in row] == [x.tobytes() for x in parts[1]] for row in told)


def test_a_joined_array_copies_only_what_spans_two_parts() -> None:
    parts = [np.arange(5.0), np.empty(0), np.arange(5.0, 8.0), np.arange(8.0, 20.0)]
    whole = Joined(parts)
    assert whole.size == 20
    for a in range(21):
        for b in range(a, 21):
            assert whole[a:b].tolist() == [float(i) for i in range(a, b)]
    assert np.shares_memory(whole[0:5], parts[0])
    assert np.shares_memory(whole[9:20], parts[3])
    assert not np.shares_memory(whole[4:6], parts[0])
    assert Joined([np.empty(0), np.empty(0)])[0:0].size == 0


# ---------------------------------------------------------------------------------------------------------------------
# Moves


@pytest.mark.parametrize("world", [1, 2, 3, 5])
async def test_gather_scatter_and_all_to_all_move_uneven_and_empty_parts(world: int) -> None:
    async with cluster(world, chunk_bytes=64) as jobs:
        rows = [(3 * rank) % 4 for rank in range(world)]
        parts = [values((n, 2), rank, "float64") for rank, n in enumerate(rows)]
        whole = np.concatenate(parts)
        for root in range(world):
            got = await everyone(jobs, lambda job, r=root: job.group.gather(parts[job.rank], root=r))
            assert got.pop(root).tobytes() == whole.tobytes()
            assert got == [None] * (world - 1)
            like = np.empty((0, 2))

            def deal(job: Job, root: int = root, like: Array = like) -> Any:
                return job.group.scatter(whole if job.rank == root else like, root=root, counts=rows)

            got = await everyone(jobs, deal)
            assert [x.tobytes() for x in got] == [x.tobytes() for x in parts]
        table = [[values(((s + 2 * r) % 5, 3), 10 * s + r) for r in range(world)] for s in range(world)]
        got = await everyone(jobs, lambda job: job.group.all_to_all(table[job.rank]))
        for r, received in enumerate(got):
            assert [x.tobytes() for x in received] == [table[s][r].tobytes() for s in range(world)]
            assert [x.shape for x in received] == [table[s][r].shape for s in range(world)]
        flat = await everyone(
            jobs,
            lambda job: job.group.all_to_all(
                np.concatenate(table[job.rank]), counts=[len(part) for part in table[job.rank]]
            ),
        )
        assert [x.tobytes() for x in flat] == [np.concatenate(received).tobytes() for received in got]


async def test_scatter_divides_evenly_and_torch_stays_torch() -> None:
    async with cluster(3) as jobs:
        x = torch.arange(7.0)
        got = await everyone(jobs, lambda job: job.group.scatter(x if job.rank == 0 else torch.empty(0)))
        assert [part.tolist() for part in got] == [[0, 1, 2], [3, 4, 5], [6]]
        swapped = await everyone(jobs, lambda job: job.group.all_to_all(torch.arange(3.0) + 10 * job.rank))
        assert [part.tolist() for part in swapped] == [[k, 10 + k, 20 + k] for k in range(3)]


async def test_sends_between_two_ranks_are_counted_for_each_pair_and_direction() -> None:
    async with cluster(3, chunk_bytes=1000) as jobs:
        x = [values((3000,), k) for k in range(4)]

        async def first(job: Job) -> Any:
            ways = [job.group.send(x[0], to=1), job.group.send(x[1], to=1), job.group.send([x[2], x[3]], to=2)]
            back = job.group.recv(x[0], source=1)
            for handle in ways:
                assert await handle is None
            return await back

        async def second(job: Job) -> Any:
            one, two = job.group.recv(x[0], source=0), job.group.recv(x[0], source=0)
            assert (await two).tobytes() == x[1].tobytes()
            await job.group.send(await one, to=0)
            return None

        async def third(job: Job) -> Any:
            out = [np.zeros(3000, np.float32), np.zeros(3000, np.float32)]
            assert (await job.group.recv([x[0], x[0]], source=0, out=out))[0] is out[0]
            return out

        got = await asyncio.gather(first(jobs[0]), second(jobs[1]), third(jobs[2]))
        assert got[0].tobytes() == x[0].tobytes()
        assert [each.tobytes() for each in got[2]] == [x[2].tobytes(), x[3].tobytes()]
        assert [int(y[0]) for y in await everyone(jobs, lambda job: job.group.all_reduce(np.ones(1)))] == [3] * 3


async def test_objects_are_what_msgpack_makes_of_them() -> None:
    async with cluster(3) as jobs:
        value = {"name": "x", "shape": [2, 3], "none": None, "raw": b"\0\1", "deep": [{"a": 1.5}]}
        got = await everyone(jobs, lambda job: job.group.broadcast_object(value if job.rank == 1 else None, root=1))
        assert got == [value] * 3
        got = await everyone(jobs, lambda job: job.group.all_gather_object("r" * job.rank))
        assert got == [["", "r", "rr"]] * 3
        with pytest.raises(LocalError, match="msgpack cannot carry"):
            jobs[0].group.all_gather_object(object())
        with pytest.raises(LocalError, match="is the most"):
            jobs[0].group.all_gather_object(b"x" * (MAX_OBJECT_BYTES + 1))


@pytest.mark.parametrize(
    "call",
    [lambda g: g.all_gather(np.ones(5)), lambda g: g.gather(np.ones(5)), lambda g: g.scatter(np.ones(5)),
     lambda g: g.all_to_all(np.ones(5))],
)  # fmt: skip
async def test_sizes_that_a_peer_names_are_bounded_before_memory_is_taken(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(2) as jobs:
        monkeypatch.setattr("quicoll.collectives.movements.MAX_BYTES", 39)
        got = await outcomes(jobs, lambda job: call(job.group))
        assert all(isinstance(error, PeerError) for error in got), got
        assert any("announces 40 bytes; 39 is the most" in str(error) and error.node == "worker-0" for error in got)


# ---------------------------------------------------------------------------------------------------------------------
# Handles


async def test_handles_may_be_awaited_in_any_order_and_twice() -> None:
    async with cluster(2) as jobs:

        async def many(job: Job) -> list[float]:
            handles = [job.group.all_reduce(np.full(20_000, k + job.rank)) for k in range(6)]
            later = [float((await handle)[0]) for handle in reversed(handles)]
            assert all(handle.done() for handle in handles)
            assert (await handles[0]) is (await handles[0])
            return later

        assert await everyone(jobs, many) == [[2.0 * k + 1 for k in reversed(range(6))]] * 2


async def test_an_operation_starts_when_it_is_called_and_not_when_it_is_awaited() -> None:
    """Rank 0 awaits in another order than it calls; the calls decide what meets what."""
    async with cluster(2) as jobs:

        async def call(job: Job) -> tuple[float, float]:
            a = job.group.all_reduce(np.full(3, 1.0))
            b = job.group.all_reduce(np.full(3, 10.0))
            if job.rank:
                return float((await a)[0]), float((await b)[0])
            second = float((await b)[0])
            return float((await a)[0]), second

        assert await everyone(jobs, call) == [(2.0, 20.0)] * 2


async def test_a_dropped_handle_counts_for_the_vote_and_leaves_out_as_it_was() -> None:
    async with cluster(2) as jobs:
        outs = [np.full(5, -1.0) for _ in range(2)]

        async def step(job: Job) -> bool:
            async with job.step() as step:
                dropped = job.group.all_reduce(np.ones(5), out=outs[job.rank])
                await job.group.barrier()
                await asyncio.wait({dropped.pending.future})
                if job.rank == 0:
                    await dropped  # the other rank never does: both votes hold its digest all the same
                done: list[bool] = []
                step.on_commit(lambda: done.append(True))
            return bool(done)

        assert await everyone(jobs, step) == [True, True]
        assert outs[0].tolist() == [2.0] * 5
        assert outs[1].tolist() == [-1.0] * 5


async def test_a_dropped_handle_keeps_nothing_alive_once_its_operation_has_ended() -> None:
    async with cluster(2) as jobs:

        class Marked(np.ndarray[Any, Any]):
            """An array that can be watched."""

        inputs = [np.ones(1000).view(Marked) for _ in jobs]
        watched = [weakref.ref(x) for x in inputs]
        for job, x in zip(jobs, inputs, strict=True):
            job.group.all_reduce(x)
        inputs.clear()
        del x
        # A barrier does not wait for the operations before it: these end when their last bytes have come.
        async with asyncio.timeout(100):
            while any(ref() is not None for ref in watched):
                await everyone(jobs, lambda job: job.group.barrier())
                gc.collect()


async def test_a_failure_that_nobody_awaits_is_told_by_the_next_operation() -> None:
    async with cluster(2) as jobs:
        out = np.zeros(3)
        jobs[0].group.all_reduce(np.ones(3), out=out, timeout=0.2)  # the other never calls
        with pytest.raises(QuicollError):
            await jobs[0].group.barrier()
        gc.collect()
        assert not out.any()


async def test_a_call_outside_of_a_loop_says_what_to_use() -> None:
    async with cluster(1) as jobs:
        with pytest.raises(LocalError, match=r"quicoll\.blocking"):
            await asyncio.to_thread(jobs[0].group.barrier)


# ---------------------------------------------------------------------------------------------------------------------
# Calls that do not match


MISMATCHES: dict[str, tuple[Any, Any]] = {
    "operation": (lambda g, x: g.reduce(x), lambda g, x: g.all_reduce(x)),
    "root of reduce": (lambda g, x: g.reduce(x, root=0), lambda g, x: g.reduce(x, root=1)),
    "root of gather": (lambda g, x: g.gather(x, root=0), lambda g, x: g.gather(x, root=1)),
    "root of scatter": (lambda g, x: g.scatter(x, root=0), lambda g, x: g.scatter(x, root=1)),
    "root of an object": (lambda g, x: g.broadcast_object(1, root=0), lambda g, x: g.broadcast_object(1, root=1)),
    "algorithm": (lambda g, x: g.all_reduce(x, algorithm="tree"), lambda g, x: g.all_reduce(x, algorithm="direct")),
    "auto here, direct there": (lambda g, x: g.all_reduce(x), lambda g, x: g.all_reduce(x, algorithm="direct")),
    "algorithm of a broadcast": (
        lambda g, x: g.broadcast(x, algorithm="tree"),
        lambda g, x: g.broadcast(x, algorithm="hierarchical"),
    ),
    "algorithm of an all_gather": (
        lambda g, x: g.all_gather(x),
        lambda g, x: g.all_gather(x, algorithm="hierarchical"),
    ),
    "counts of an all_gather": (
        lambda g, x: g.all_gather(x, counts=[len(x), len(x) + 1]),
        lambda g, x: g.all_gather(x, counts=[len(x), len(x)]),
    ),
    "counts of a gather that one rank knows": (
        lambda g, x: g.gather(x, counts=[len(x), len(x)]),
        lambda g, x: g.gather(x),
    ),
    "algorithm of a gather": (lambda g, x: g.gather(x), lambda g, x: g.gather(x, algorithm="direct")),
    "algorithm of a scatter": (lambda g, x: g.scatter(x), lambda g, x: g.scatter(x, algorithm="hierarchical")),
    "order": (lambda g, x: g.all_reduce(x), lambda g, x: g.all_reduce(x, reduce_order="ring")),
    "counts": (
        lambda g, x: g.reduce_scatter(x, counts=[4, 0]),
        lambda g, x: g.reduce_scatter(x, counts=[0, 4]),
    ),
    "op": (lambda g, x: g.all_reduce(x, op="avg"), lambda g, x: g.all_reduce(x, op="product")),
    "precision": (
        lambda g, x: g.all_reduce(x.astype("float32"), precision="float64"),
        lambda g, x: g.all_reduce(x.astype("float32")),
    ),
    "number of leaves": (
        lambda g, x: g.all_reduce(g.shards(4).leaves([x, x])),
        lambda g, x: g.all_reduce(g.shards(3).leaves([x, x])),
    ),
    "barrier and split": (lambda g, x: g.barrier(), lambda g, x: g.split(0)),
    "split and objects": (lambda g, x: g.split(None), lambda g, x: g.all_gather_object([0, 0])),
    "dtype of a gather": (lambda g, x: g.gather(x), lambda g, x: g.gather(x.astype("int64"))),
    "dtype of a scatter": (lambda g, x: g.scatter(x), lambda g, x: g.scatter(x.astype("int64"))),
    "dtype of a broadcast": (lambda g, x: g.broadcast(x), lambda g, x: g.broadcast(x.astype("int64"))),
    "shape of a reduce": (lambda g, x: g.reduce(x), lambda g, x: g.reduce(x[1:])),
    "shape of a reduce_scatter": (lambda g, x: g.reduce_scatter(x), lambda g, x: g.reduce_scatter(x[1:])),
    "dtype of a message": (lambda g, x: g.send(x, to=1), lambda g, x: g.recv(x.astype("int64"), source=0)),
    "order of calls": (
        lambda g, x: asyncio.gather(g.all_reduce(x)._wait(), g.all_gather(x)._wait()),
        lambda g, x: asyncio.gather(g.all_gather(x)._wait(), g.all_reduce(x)._wait()),
    ),
    "dtype": (lambda g, x: g.all_to_all(x), lambda g, x: g.all_to_all(x.astype("float32"))),
    "list and tensor": (lambda g, x: g.all_reduce([x, x]), lambda g, x: g.all_reduce(np.concatenate([x, x]))),
    "shapes in a list": (lambda g, x: g.all_reduce([x, x[1:]]), lambda g, x: g.all_reduce([x[1:], x])),
    "trailing shape": (
        lambda g, x: g.all_to_all(x.reshape(2, 2)),
        lambda g, x: g.all_to_all(x.reshape(4, 1)),
    ),
    "length of a message": (lambda g, x: g.send(x, to=1), lambda g, x: g.recv(x[1:], source=0)),
    "object and tensor": (lambda g, x: g.all_gather_object(1), lambda g, x: g.all_gather(x)),
}


@pytest.mark.parametrize("calls", MISMATCHES.values(), ids=MISMATCHES.keys())
async def test_different_calls_are_a_mismatch_at_both_ranks_and_never_hang(calls: tuple[Any, Any]) -> None:
    async with cluster(2) as jobs:
        x = np.ones(4)
        got = await outcomes(jobs, lambda job: calls[job.rank](job.group, x))
        assert all(isinstance(error, Mismatch) for error in got), got
        assert x.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "call",
    [
        lambda g, x, out: g.all_reduce(x, out=out, algorithm="tree"),
        lambda g, x, out: g.reduce(x, out=out, root=g.rank),
        lambda g, x, out: g.reduce_scatter(x, out=out[:2], counts=[2, 2]),
        lambda g, x, out: g.gather(x, root=g.rank),
        lambda g, x, out: g.scatter(x, root=1 - g.rank),
        lambda g, x, out: g.all_to_all(x),
        lambda g, x, out: g.recv(x, source=1 - g.rank, out=out),
        lambda g, x, out: g.send(np.ones(10_000_000), to=1 - g.rank),
        lambda g, x, out: g.broadcast_object(1),
        lambda g, x, out: g.all_gather_object(1),
        lambda g, x, out: g.broadcast(x, out=out, root=1 - g.rank),
        lambda g, x, out: g.all_gather(x[:2], out=out),
        lambda g, x, out: g.all_reduce([x, x], out=[out, out.copy()], reduce_order="ring"),
        lambda g, x, out: g.barrier(),
        lambda g, x, out: g.split(0),
    ],
)
@pytest.mark.parametrize("absent", [0, 1])
async def test_a_rank_that_never_calls_is_named_within_the_deadline_and_out_is_untouched(
    call: Any, absent: int
) -> None:
    async with cluster(2, timeout=0.3) as jobs:
        out = np.full(4, -1.0)
        with pytest.raises(PeerError) as caught:
            await call(jobs[1 - absent].group, np.ones(4), out)
        assert caught.value.node == f"worker-{absent}"
        assert out.tolist() == [-1.0] * 4


async def test_a_step_whose_ranks_call_different_things_is_committed_nowhere() -> None:
    async with cluster(3) as jobs:
        out = np.zeros(4)

        async def step(job: Job) -> None:
            async with job.step() as step:
                handles = [job.group.reduce_scatter(np.ones(3)), job.group.all_to_all(np.ones(3))]
                await (job.group.all_reduce(np.ones(4), out=out) if job.rank else job.group.barrier())
                await asyncio.gather(*handles)
                step.on_commit(lambda: pytest.fail("nothing may be committed"))

        got = await outcomes(jobs, step)
        assert all(isinstance(error, Mismatch) for error in got), got
        assert {error.rank for error in got if isinstance(error, Mismatch)} == {0}  # the other two called the same
        assert not out.any()


# ---------------------------------------------------------------------------------------------------------------------
# What cannot work


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda g: g.all_reduce(np.ones(3), algorithm="fast"),
            "algorithm 'fast' is not known; use one of auto, direct",
        ),
        (lambda g: g.reduce(np.ones(3), algorithm="exchange"), "algorithm 'exchange' is not known"),
        (lambda g: g.all_reduce(np.ones(3), algorithm="tree", reduce_order="ring"), "algorithm of its own"),
        (lambda g: g.all_reduce(np.ones(3), algorithm="ring"), "algorithm 'ring' is not known"),
        (lambda g: g.broadcast(np.ones(3), algorithm="direct"), "use one of auto, tree, hierarchical"),
        (lambda g: g.all_gather(np.ones(3), algorithm="tree"), "use one of auto, direct, hierarchical"),
        (lambda g: g.gather(np.ones(3), algorithm="exchange"), "use one of auto, direct, hierarchical"),
        (lambda g: g.scatter(np.ones(3), algorithm="fast"), "use one of auto, direct, hierarchical"),
        (lambda g: g.all_reduce([]), "a list of no tensors"),
        (lambda g: g.all_reduce([np.ones(1), torch.ones(1, dtype=torch.float64)]), "make a call for each type"),
        (lambda g: g.all_reduce([np.ones(1), np.ones(1, np.float32)]), "make a call for each type"),
        (lambda g: g.all_reduce([np.ones(1)], out=np.ones(1)), "out must be a list of 1"),
        (lambda g: g.reduce(np.ones(1), root=2), "root 2 is not a rank"),
        (lambda g: g.reduce_scatter(np.ones(())), "0-dim"),
        (lambda g: g.reduce_scatter([np.ones(2)]), "not a list"),
        (lambda g: g.reduce_scatter(np.ones(3), counts=[1, 1]), "do not divide 3 rows"),
        (lambda g: g.reduce_scatter(np.ones(3), counts=[4, -1]), "do not divide 3 rows"),
        (lambda g: g.gather(np.ones(3), root=-1), "root -1"),
        (lambda g: g.all_gather(np.ones(3), counts=[3]), r"counts \(3,\) are not those of 2 ranks"),
        (lambda g: g.all_gather(np.ones(3), counts=[2, 2]), "has 3 rows"),
        (lambda g: g.gather(np.ones(3), counts=[3 - 7 * g.rank, 3 - 7 * (1 - g.rank)]), "are not those of 2 ranks"),
        (lambda g: g.all_gather(np.ones(3), counts=3), "one for each rank"),
        (lambda g: g.all_gather(np.ones(3), counts=[3, 3], algorithm="tree"), "use one of auto, direct, hierarchical"),
        (lambda g: g.scatter(np.ones(3), root=g.rank, counts=[3]), "do not divide 3 rows"),
        (lambda g: g.scatter(np.ones(())), "0-dim"),
        (lambda g: g.all_to_all([np.ones(3)]), "1 parts for 2 ranks"),
        (lambda g: g.all_to_all([np.ones((1, 2)), np.ones((1, 3))]), "differ in n alone"),
        (lambda g: g.all_to_all([np.ones(1), np.ones(2)], counts=[1, 2]), "leave counts and out out"),
        (lambda g: g.send(np.ones(1), to=g.rank), "cannot send to itself"),
        (lambda g: g.send(np.ones(1), to=2), "to 2 is not a rank"),
        (lambda g: g.recv(np.ones(1), source=7), "source 7 is not a rank"),
    ],
)
async def test_what_cannot_work_is_refused_by_the_call_itself(call: Any, said: str) -> None:
    async with cluster(2) as jobs:
        with pytest.raises(LocalError, match=said):
            call(jobs[0].group)
        assert [int(y[0]) for y in await everyone(jobs, lambda job: job.group.all_reduce(np.ones(1)))] == [2, 2]


@pytest.mark.parametrize("operation", ["broadcast", "scatter"])
async def test_none_where_the_root_alone_has_a_tensor_is_refused_with_what_to_pass(operation: str) -> None:
    async with cluster(1) as jobs:
        with pytest.raises(LocalError, match=rf"{operation} takes a tensor on every rank: .* of the same .*, not None"):
            getattr(jobs[0].group, operation)(None)


async def test_tags_tell_messages_apart_and_the_first_sender_is_found() -> None:
    async with cluster(3) as jobs:
        first, second, third = (job.group for job in jobs)
        sent = [second.send(np.ones(3), to=0, tag=7), second.send(np.full(3, 2.0), to=0)]
        assert await first.next_sender(tag=7) == 1
        assert (await first.recv(np.empty(3), source=1)).tolist() == [2.0] * 3
        assert (await first.recv(np.empty(3), source=1, tag=7)).tolist() == [1.0] * 3
        for handle in sent:
            await handle
        waiting = first.next_sender(tag=9)
        late = third.send(np.ones(1), to=0, tag=9)
        assert await waiting == 2
        await first.recv(np.empty(1), source=2, tag=9)
        await late
        abandoned = first.next_sender()
        abandoned.cancel()  # nothing was called, so the view goes on
        evens = [job.group.subgroup([2, 0], "evens") for job in (jobs[2], jobs[0])]
        found = await asyncio.gather(*(group.all_gather(np.array([group.rank])) for group in evens))
        assert [each.tolist() for each in found] == [[0, 1]] * 2
        for ranks, name in (([0, 0], "x"), ([1, 2], "x"), ([0, 3], "x"), ([0, 1], "a:b"), ([0, 1], "")):
            with pytest.raises(LocalError):
                first.subgroup(ranks, name)
        with pytest.raises(LocalError, match="a tag is"):
            first.send(np.ones(1), to=1, tag=-1)
        with pytest.raises(PeerError, match="no rank has sent"):
            await first.next_sender(timeout=0.2)
        with pytest.raises(PeerError, match="no rank has sent"):
            await second.barrier()


async def test_a_rank_whose_prepared_call_is_another_one_is_told_and_nobody_gets_a_result() -> None:
    """Both have called both often: what differs is which of them a rank calls next."""
    async with cluster(2) as jobs:
        x = [np.full(3, rank + 1, np.float32) for rank in range(2)]
        for _ in range(3):
            await asyncio.gather(*(job.group.all_reduce(x[job.rank]) for job in jobs))
            await asyncio.gather(*(job.group.all_reduce(x[job.rank], op="max") for job in jobs))
        handles = [job.group.all_reduce(x[job.rank], op=("sum", "max")[job.rank]) for job in jobs]
        got = await asyncio.gather(*handles, return_exceptions=True)
        for error in got:
            assert isinstance(error, Mismatch)
            assert "the ranks called all_reduce differently: op sum on rank 0, max on rank 1" in str(error)
