"""Values of every operation of the torch backend, against what plain torch computes; and its errors.

torch's own suite does not look at values of most of these. Three ranks are three threads of this process, over sockets.
"""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - after the check that there is a torch
from torch_ranks import Ranks, torch_ranks  # noqa: E402 - likewise

import quicoll  # noqa: E402 - likewise
from quicoll.torch_backend.work import OperationWork, WorkHome  # noqa: E402 - likewise

WORLD = 3
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with torch_ranks(WORLD) as made:
        yield made


def values(dtype: Any, rank: int, size: int = 7) -> Any:
    """Small numbers, whose sums and products are exact in every type."""
    base = torch.arange(size) % 3 + rank + 1
    return (base % 2 == 0) if dtype is torch.bool else base.to(dtype)


def of_all(dtype: Any) -> Any:
    return torch.stack([values(dtype, rank) for rank in range(WORLD)])


def options(kind: Any, **given: Any) -> Any:
    made = kind()
    for name, value in given.items():
        setattr(made, name, value)
    return made


def reducing(op: Any) -> Any:
    return options(dist.AllreduceOptions, reduceOp=op)


def expected(op: Any, stacked: Any) -> Any:
    if stacked.dtype is torch.bool:
        either = op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.BOR)
        if op is dist.ReduceOp.BXOR:
            return stacked.sum(0) % 2 == 1
        return stacked.any(0) if either else stacked.all(0)
    if op is dist.ReduceOp.SUM:
        return stacked.sum(0).to(stacked.dtype)
    if op is dist.ReduceOp.AVG:
        total = stacked.to(torch.float64 if stacked.dtype.is_floating_point else torch.int64).sum(0)
        divided = total / WORLD if stacked.dtype.is_floating_point else total // WORLD
        return divided.to(stacked.dtype)
    if op is dist.ReduceOp.PRODUCT:
        return stacked.prod(0).to(stacked.dtype)
    if op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        return stacked.amin(0) if op is dist.ReduceOp.MIN else stacked.amax(0)
    folded = stacked[0].clone()
    for row in stacked[1:]:
        folded = {dist.ReduceOp.BAND: folded & row, dist.ReduceOp.BOR: folded | row, dist.ReduceOp.BXOR: folded ^ row}[
            op
        ]
    return folded


OPS = [getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")]
BITWISE = OPS[5:]
CASES = [
    *((dtype, op) for dtype in FLOATS for op in OPS[:5]),
    *((dtype, op) for dtype in INTEGERS for op in OPS),
    *((torch.bool, op) for op in OPS if op is not dist.ReduceOp.AVG),
]


def test_every_reduction_of_every_type(ranks: Ranks) -> None:
    for dtype, op in CASES:

        def all_reduce(group: Any, rank: int, dtype: Any = dtype, op: Any = op) -> Any:
            x = values(dtype, rank)
            assert group.allreduce([x], reducing(op)).wait() is True
            return x

        for got in ranks.all(all_reduce):
            assert torch.equal(got, expected(op, of_all(dtype))), (dtype, op, got)


def test_the_same_reduction_again_is_the_same_whatever_the_tensors_shape_and_strides(ranks: Ranks) -> None:
    for dtype, op in CASES:

        def again(group: Any, rank: int, dtype: Any = dtype, op: Any = op) -> Any:
            found = []
            before = group._home.sequence
            for turn in range(6):
                x = values(dtype, rank, 6)
                x = [x, x.reshape(2, 3), x.reshape(3, 2).T.contiguous().T, x.repeat_interleave(2)[::2], x, x][turn]
                if turn == 4 and dtype.is_floating_point:
                    x.requires_grad_()
                group.allreduce(x if turn == 5 else [x], reducing(op) if turn else op).wait()
                found.append(x.detach().reshape(-1))
            assert group._home.sequence == before + 6
            return found

        stacked = torch.stack([values(dtype, rank, 6) for rank in range(WORLD)])
        for got in ranks.all(again):
            for each in got:
                assert torch.equal(each, expected(op, stacked)), (dtype, op, got)


def test_a_reduction_that_differs_is_named_though_each_rank_has_called_its_own_before() -> None:
    def call(group: Any, rank: int) -> Any:
        for size in (4, 5):
            group.allreduce([torch.ones(size)], dist.AllreduceOptions()).wait()
        try:
            group.allreduce([torch.ones(4 + rank % 2)], dist.AllreduceOptions()).wait()
        except RuntimeError as error:
            return str(error)
        return ""

    with torch_ranks(WORLD) as ranks:
        for said in ranks.all(call):
            assert "(4,)" in said
            assert "(5,)" in said


def test_complex_numbers_are_added(ranks: Ranks) -> None:
    for dtype in COMPLEX:

        def all_reduce(group: Any, rank: int, dtype: Any = dtype) -> Any:
            x = values(dtype, rank) * (1 + 2j)
            group.allreduce([x]).wait()
            return x

        for got in ranks.all(all_reduce):
            assert torch.equal(got, of_all(dtype).sum(0) * (1 + 2j))


def test_the_bits_are_those_of_the_library_and_not_of_the_order_of_ranks(ranks: Ranks) -> None:
    given = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(WORLD)]

    def all_reduce(group: Any, rank: int) -> Any:
        x = given[rank].clone()
        group.allreduce([x]).wait()
        (part,) = [torch.empty(1000)]
        group.reduce_scatter_single(part[:4], given[rank][:12].clone()).wait()
        return x, part[:4]

    canonical = (given[0] + given[1]) + given[2]
    for rank, (total, part) in enumerate(ranks.all(all_reduce)):
        assert torch.equal(total, canonical)
        assert torch.equal(part, canonical[4 * rank : 4 * rank + 4])


def test_a_factor_before_the_sum(ranks: Ranks) -> None:
    def premultiplied(group: Any, rank: int) -> Any:
        x, y = values(torch.float32, rank), values(torch.float32, rank, 6)
        out = torch.empty(2)
        group.allreduce([x], reducing(dist._make_nccl_premul_sum(0.5))).wait()
        group.reduce_scatter_single(
            out, y, options(dist.ReduceScatterOptions, reduceOp=dist._make_nccl_premul_sum(0.25))
        ).wait()
        return x, out

    for rank, (x, out) in enumerate(ranks.all(premultiplied)):
        assert torch.equal(x, of_all(torch.float32).sum(0) * 0.5)
        assert torch.equal(out, of_all(torch.float32).sum(0)[2 * rank : 2 * rank + 2] * 0.25)


def test_strides_scalars_and_tensors_without_elements(ranks: Ranks) -> None:
    def each(group: Any, rank: int) -> Any:
        whole = torch.zeros(4, 6)
        view = whole[::2, 1::2]
        view.fill_(rank + 1.0)
        group.allreduce([view]).wait()
        scalar, empty = torch.tensor(rank + 1.0), torch.empty(0, 3)
        group.allreduce([scalar]).wait()
        group.allreduce([empty]).wait()
        transposed = (torch.arange(6.0).view(2, 3) * (rank == 1)).t()
        group.broadcast([transposed], options(dist.BroadcastOptions, rootRank=1)).wait()
        needed = torch.ones(2, requires_grad=True)
        group.allreduce(needed).wait()
        with torch.inference_mode():
            inferred = torch.full((2,), rank + 1.0)
            group.allreduce(inferred).wait()
        empties = [torch.empty(0) for _ in range(WORLD)]
        group.allgather([empties], [torch.empty(0)]).wait()
        return whole, scalar, transposed, needed.detach(), inferred

    for whole, scalar, transposed, needed, inferred in ranks.all(each):
        assert whole.sum() == 6 * 6.0
        assert torch.equal(whole[::2, 1::2], torch.full((2, 3), 6.0))
        assert scalar == 6.0
        assert torch.equal(transposed, torch.arange(6.0).view(2, 3).t())
        assert torch.equal(needed, torch.full((2,), 3.0))
        assert torch.equal(inferred, torch.full((2,), 6.0))


def test_a_result_is_no_change_that_autograd_sees(ranks: Ranks) -> None:
    def backward(group: Any, rank: int) -> Any:
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        loss = (y * y).sum()
        group.broadcast([y], options(dist.BroadcastOptions, rootRank=0)).wait()
        loss.backward()
        return x.grad

    assert all(torch.equal(grad, torch.full((3,), 8.0)) for grad in ranks.all(backward))


def test_reduce_gives_the_root_alone(ranks: Ranks) -> None:
    def reduce(group: Any, rank: int) -> Any:
        x = values(torch.float32, rank)
        group.reduce([x], options(dist.ReduceOptions, rootRank=2, reduceOp=dist.ReduceOp.MAX)).wait()
        return x

    got = ranks.all(reduce)
    assert torch.equal(got[2], of_all(torch.float32).amax(0))
    assert [torch.equal(got[rank], values(torch.float32, rank)) for rank in (0, 1)] == [True, True]


def test_scattered_reductions(ranks: Ranks) -> None:
    def scatter(group: Any, rank: int) -> Any:
        parts = [torch.full((n + 1,), float(rank + n)) for n in range(WORLD)]
        uneven, single, first, second = torch.empty(rank + 1), torch.empty(2, 2), torch.empty(1), torch.empty(2)
        group.reduce_scatter([uneven], [parts]).wait()
        opts = options(dist.ReduceScatterOptions, reduceOp=dist.ReduceOp.AVG)
        group.reduce_scatter_single(single, torch.arange(12.0).view(6, 2) * (rank + 1), opts).wait()
        group.reduce_scatter_single_coalesced([first, second], [torch.arange(3.0), torch.arange(6.0)]).wait()
        return uneven, single, first, second

    for rank, (uneven, single, first, second) in enumerate(ranks.all(scatter)):
        assert torch.equal(uneven, torch.full((rank + 1,), 3.0 + 3 * rank))
        assert torch.equal(single, torch.arange(12.0).view(6, 2)[2 * rank : 2 * rank + 2] * 2)
        assert torch.equal(first, torch.arange(3.0)[rank : rank + 1] * 3)
        assert torch.equal(second, torch.arange(6.0)[2 * rank : 2 * rank + 2] * 3)


MOVED = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.uint16]


def test_every_type_is_moved(ranks: Ranks) -> None:
    for dtype in MOVED:

        def move(group: Any, rank: int, dtype: Any = dtype) -> Any:
            mine = torch.full((3,), rank).to(torch.float32).to(dtype)
            root, outs, whole = mine.clone(), [mine.clone() for _ in range(WORLD)], mine.repeat(WORLD)
            group.broadcast([root], options(dist.BroadcastOptions, rootRank=2)).wait()
            group.allgather([outs], [mine]).wait()
            group.all_gather_single(whole, mine).wait()
            return root, torch.stack(outs), whole

        all_of = torch.arange(WORLD).to(torch.float32).to(dtype).repeat_interleave(3)
        for root, outs, whole in ranks.all(move):
            assert bytes(root.view(torch.uint8)) == bytes(all_of[6:].view(torch.uint8)), dtype
            assert bytes(outs.view(-1).view(torch.uint8)) == bytes(all_of.view(torch.uint8)), dtype
            assert bytes(whole.view(torch.uint8)) == bytes(all_of.view(torch.uint8)), dtype


def test_gather_scatter_and_lists_of_gathers(ranks: Ranks) -> None:
    def move(group: Any, rank: int) -> Any:
        mine = torch.full((2, 2), float(rank))
        gathered = [torch.empty(2, 2) for _ in range(WORLD)] if rank == 1 else []
        group.gather([gathered] if rank == 1 else [], [mine], options(dist.GatherOptions, rootRank=1)).wait()
        own = torch.empty(2, 2)
        given = [[torch.full((2, 2), 10.0 + n) for n in range(WORLD)]] if rank == 2 else []
        group.scatter([own], given, options(dist.ScatterOptions, rootRank=2)).wait()
        lists = [[torch.empty(1), torch.empty(2)] for _ in range(WORLD)]
        group.allgather_coalesced(lists, [mine[0, :1].clone(), mine[0].clone()]).wait()
        first, second = torch.empty(WORLD), torch.empty(WORLD, 2)
        group.all_gather_single_coalesced([first, second], [mine[0, :1].clone(), mine[0].clone()]).wait()
        return gathered, own, lists, first, second

    for rank, (gathered, own, lists, first, second) in enumerate(ranks.all(move)):
        assert [float(each[0, 0]) for each in gathered] == ([0.0, 1.0, 2.0] if rank == 1 else [])
        assert torch.equal(own, torch.full((2, 2), 10.0 + rank))
        assert [[float(each.sum()) for each in row] for row in lists] == [[0.0, 0.0], [1.0, 2.0], [2.0, 4.0]]
        assert torch.equal(first, torch.arange(3.0))
        assert torch.equal(second, torch.arange(3.0).repeat_interleave(2).view(3, 2))


def test_rows_for_each_rank(ranks: Ranks) -> None:
    def exchange(group: Any, rank: int) -> Any:
        outs = [torch.empty(n + 1, rank + 1) for n in range(WORLD)]
        group.alltoall(outs, [torch.full((rank + 1, n + 1), float(10 * rank + n)) for n in range(WORLD)]).wait()
        even = torch.empty(WORLD, 2)
        group.all_to_all_single(even, torch.arange(6.0).view(3, 2) + 100 * rank, [], []).wait()
        taken = [rank + 1] * WORLD
        uneven = torch.empty(sum(taken), 2, dtype=torch.int64)
        rows = torch.arange(1 + 2 + 3).repeat_interleave(2).view(6, 2) + 100 * rank
        group.all_to_all_single(uneven, rows, taken, [1, 2, 3]).wait()
        none = torch.empty(3 if rank == 0 else 0)
        group.all_to_all_single(
            none, torch.tensor([float(rank)]), [1, 1, 1] if rank == 0 else [0] * 3, [1, 0, 0]
        ).wait()
        return outs, even, uneven, none

    for rank, (outs, even, uneven, none) in enumerate(ranks.all(exchange)):
        assert [float(out[0, 0]) for out in outs] == [10.0 * n + rank for n in range(WORLD)]
        assert torch.equal(even, torch.stack([torch.arange(6.0).view(3, 2)[rank] + 100 * n for n in range(WORLD)]))
        first = [0, 1, 3][rank]
        assert uneven[:, 0].tolist() == [100 * n + first + k for n in range(WORLD) for k in range(rank + 1)]
        assert none.tolist() == ([0.0, 1.0, 2.0] if rank == 0 else [])


def test_buckets_of_several_tensors(ranks: Ranks) -> None:
    def bucket(group: Any, rank: int) -> Any:
        same = [torch.full((n + 1,), float(rank)) for n in range(3)]
        mixed = [torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int32)]
        group.allreduce_coalesced(same).wait()
        opts = options(dist.AllreduceCoalescedOptions, reduceOp=dist.ReduceOp.SUM)
        group.allreduce_coalesced(mixed, opts).wait()
        return same, mixed

    for same, mixed in ranks.all(bucket):
        assert [each.tolist() for each in same] == [[3.0] * (n + 1) for n in range(3)]
        assert [(each.dtype, each.tolist()) for each in mixed] == [
            (torch.float32, [3, 3]),
            (torch.float64, [3, 3]),
            (torch.int32, [3, 3]),
        ]


def test_sparse_tensors_are_added(ranks: Ranks) -> None:
    def add(group: Any, rank: int) -> Any:
        given = torch.full((2, 2), rank + 1.0)
        sparse = torch.sparse_coo_tensor([[rank, rank + 1], [0, 1]], given, (5, 2, 2), check_invariants=True)
        dense = sparse.to_dense()
        group.allreduce([sparse]).wait()
        group.allreduce([dense]).wait()
        return sparse, dense

    for sparse, dense in ranks.all(add):
        assert torch.equal(sparse.to_dense(), dense)


def test_messages_between_two_keep_their_order_for_each_tag(ranks: Ranks) -> None:
    def talk(group: Any, rank: int) -> Any:
        if rank == 0:
            sent = [group.send([torch.tensor([n * 1.0])], 1, tag) for n, tag in ((1, 5), (2, 0), (3, 5), (4, 9))]
            assert all(work.wait() for work in sent)
            return None
        if rank == 1:
            got = [torch.empty(1) for _ in range(4)]
            works = [group.recv([got[n]], 0, tag) for n, tag in enumerate((9, 5, 5, 0))]
            assert [work.wait() for work in works] == [True] * 4
            assert works[0].source_rank() == 0
            return [float(each) for each in got]
        return None

    assert ranks.all(talk)[1] == [4.0, 1.0, 3.0, 2.0]


def test_a_receive_from_any_rank_takes_each_message_once(ranks: Ranks) -> None:
    def talk(group: Any, rank: int) -> Any:
        if rank:
            return [group.send([torch.tensor([float(10 * rank + n)])], 0, 3).wait() for n in range(3)]
        got = [torch.empty(1) for _ in range(6)]
        works = [group.recv_anysource([each], 3) for each in got]
        for work in works:
            work.wait(timedelta(seconds=60))
        return [(work.source_rank(), float(each)) for work, each in zip(works, got, strict=True)]

    got = ranks.all(talk)[0]
    assert [value for source, value in got if source == 1] == [10.0, 11.0, 12.0]
    assert [value for source, value in got if source == 2] == [20.0, 21.0, 22.0]


def test_the_older_names_and_plain_arguments(ranks: Ranks) -> None:
    def old(group: Any, rank: int) -> Any:
        x, y, whole, part = torch.ones(2), torch.full((2,), float(rank)), torch.empty(6), torch.empty(2)
        group.allreduce(x, dist.ReduceOp.MAX, timedelta(seconds=60)).wait()
        group.broadcast(y, 1, timedelta(seconds=60)).wait()
        group._allgather_base(whole, x).wait()
        group._reduce_scatter_base(part, whole).wait()
        group.allgather_into_tensor_coalesced([whole], [x]).wait()
        group.reduce_scatter_tensor_coalesced([part], [whole]).wait()
        out = torch.empty(3)
        group.alltoall_base(out, torch.full((3,), float(rank)), [], []).wait()
        z, outs = torch.full((1,), float(rank)), [torch.empty(1) for _ in range(WORLD)]
        group.reduce(z, 0, dist.ReduceOp.SUM).wait()
        group.allgather(outs, y[:1].clone()).wait()
        gathered = [torch.empty(1) for _ in range(WORLD)] if rank == 0 else []
        group.gather(gathered, torch.tensor([float(rank)]), 0).wait()
        own = torch.empty(1)
        group.scatter(own, [torch.tensor([n * 1.0]) for n in range(WORLD)] if rank == 0 else [], 0).wait()
        group.reduce_scatter(own, [own.clone() * 0 + 1 for _ in range(WORLD)]).wait()
        group.barrier(timeout=timedelta(seconds=60)).wait()
        group.monitored_barrier(timedelta(seconds=60))
        return y.tolist(), part.tolist(), out.tolist(), own.tolist(), [float(each) for each in gathered]

    for rank, (y, part, out, own, gathered) in enumerate(ranks.all(old)):
        assert (y, part, out, own) == ([1.0, 1.0], [3.0, 3.0], [0.0, 1.0, 2.0], [3.0])
        assert gathered == ([0.0, 1.0, 2.0] if rank == 0 else [])


def test_a_future_gives_the_tensors_and_a_callback_may_start_operations(ranks: Ranks) -> None:
    def chained(group: Any, rank: int) -> Any:
        x = torch.ones(3)

        def again(future: Any) -> Any:
            (total,) = future.value()
            group.allreduce([total]).wait()
            return total

        work = group.allreduce([x])
        future = work.get_future()
        assert work.get_future() is future
        return future.then(again).wait(), work.is_completed(), work.is_success(), work.exception(), work.result()

    for total, completed, success, error, result in ranks.all(chained):
        assert total.tolist() == [9.0] * 3
        assert (completed, success, error) == (True, True, None)
        assert result[0].tolist() == [9.0] * 3


def test_a_future_asked_for_after_the_wait_is_done_at_once(ranks: Ranks) -> None:
    def waited(group: Any, rank: int) -> Any:
        work = group.allreduce([torch.ones(1)])
        work.wait()
        return work.get_future().done()

    assert ranks.all(waited) == [True] * WORLD


def test_a_work_that_torchs_code_alone_holds_ends_there_too(ranks: Ranks) -> None:
    """As DDP's `join` holds one: Python has let go of it, before or after the operation was over."""

    def handed_on(group: Any, rank: int) -> Any:
        found = []
        for over_before in (True, False):
            x = torch.ones(1)
            work = group.allreduce([x])
            if over_before:
                group.barrier().wait()
                while not work._settled:
                    threading.Event().wait(0.001)
            torch._C._distributed_c10d._register_work(x, work)
            del work
            gc.collect()
            torch.ops._c10d_functional.wait_tensor(x)
            found.append(float(x))
        return found

    assert ranks.all(handed_on) == [[3.0, 3.0]] * WORLD


def test_what_nobody_waits_for_is_not_kept_for_ever(ranks: Ranks) -> None:
    def left(group: Any, rank: int) -> Any:
        x = torch.ones(1)
        kept = weakref.ref(group.allreduce([x]))
        for _ in range(1100):
            work = OperationWork(WorkHome(lambda: False), "a part", [], [], None, 60.0)
        work.wait()
        group.barrier().wait()
        until = time.monotonic() + 60
        while kept() is not None and time.monotonic() < until:
            threading.Event().wait(0.01)
            gc.collect()
        return kept() is None, float(x)

    assert ranks.all(left) == [(True, 3.0)] * WORLD


def test_a_profile_shows_operations_as_asynchronous_events(ranks: Ranks) -> None:
    def operations(group: Any) -> None:
        group.allreduce([torch.ones(3)]).wait()
        group.broadcast([torch.ones(2, 2)], 0).wait()
        group.all_gather_single(torch.empty(WORLD), torch.ones(1)).wait()

    def profiled(group: Any, rank: int) -> Any:
        if rank:
            return operations(group)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            operations(group)
        ours = [each for each in profile.events() if each.name.startswith("quicoll:")]
        return [(each.name, each.is_async) for each in ours]

    assert ranks.all(profiled)[0] == [
        ("quicoll:all_reduce", True),
        ("quicoll:broadcast", True),
        ("quicoll:all_gather_into_tensor", True),
    ]


def test_who_only_asks_whether_it_is_over_finds_the_result_there(ranks: Ranks) -> None:
    def poll(group: Any, rank: int) -> Any:
        x = torch.ones(1)
        work = group.allreduce([x])
        until = time.monotonic() + 60
        while not work.is_completed() and time.monotonic() < until:
            threading.Event().wait(0.001)
        return float(x)

    assert ranks.all(poll) == [3.0] * WORLD


def test_operations_that_are_under_way_at_once_do_not_mix_their_parts(ranks: Ranks) -> None:
    def coalesced(group: Any, rank: int) -> Any:
        lists = [[torch.full((2,), k, dtype=dtype) for dtype in (torch.float32, torch.float64)] for k in range(1, 6)]
        works = [group.allreduce_coalesced(xs) for xs in lists]
        return [work.wait() for work in reversed(works)], [[x.tolist() for x in xs] for xs in lists]

    for done, found in ranks.all(coalesced):
        assert done == [True] * 5
        assert found == [[[3.0 * k] * 2] * 2 for k in range(1, 6)]


INVALID = [
    ("no integer", lambda g: g.allreduce([torch.ones(2)], reducing(dist.ReduceOp.BAND)), "band is bitwise"),
    ("bools have no mean", lambda g: g.allreduce([values(torch.bool, 0)], reducing(dist.ReduceOp.AVG)), "bools"),
    ("a list too short", lambda g: g.allgather([[torch.empty(1)]], [torch.ones(1)]), "1 tensors for 3 ranks"),
    ("outputs differ", lambda g: g.allgather([[torch.empty(2)] * 3], [torch.ones(1)]), "tensors of one call differ"),
    ("another type", lambda g: g.all_gather_single(torch.empty(3, dtype=torch.int8), torch.ones(1)), "is not"),
    ("no multiple", lambda g: g.reduce_scatter_single(torch.empty(2), torch.ones(5)), "gives none of 3 ranks"),
    ("no even rows", lambda g: g.all_to_all_single(torch.empty(4), torch.ones(4), [], []), "do not divide equally"),
    (
        "wrong rows",
        lambda g: g.all_to_all_single(torch.empty(4), torch.ones(4), [1, 1, 1], [1, 1, 1]),
        "are not 4 rows",
    ),
    ("no such root", lambda g: g.broadcast([torch.ones(1)], options(dist.BroadcastOptions, rootRank=7)), "root 7"),
    ("to itself", lambda g: g.send([torch.ones(1)], 0), "cannot send to itself"),
    ("a negative tag", lambda g: g.send([torch.ones(1)], 1, -1), "a tag is"),
    ("a sparse one", lambda g: g.broadcast([torch.ones(2).to_sparse()], None), "layout"),
    (
        "a sparse one elsewhere",
        lambda g: g.allreduce([torch.sparse_coo_tensor([[0]], [1.0], (2,), device="meta", check_invariants=False)]),
        "a sparse tensor on device meta",
    ),
    ("on no device", lambda g: g.broadcast([torch.ones(2, device="meta")], None), "device meta"),
    ("no option", lambda g: g.allreduce([torch.ones(1)], "sum"), "is no option"),
]


@pytest.mark.parametrize(("call", "says"), [case[1:] for case in INVALID], ids=[case[0] for case in INVALID])
def test_what_cannot_be_is_refused_before_anything_is_sent(ranks: Ranks, call: Any, says: str) -> None:
    with pytest.raises(quicoll.LocalError, match=says) as refused:
        call(ranks.groups[0])
    assert isinstance(refused.value, dist.DistBackendError | ValueError)
    assert isinstance(refused.value, RuntimeError)


def test_a_wait_of_its_own_length_ends_and_the_operation_goes_on(ranks: Ranks) -> None:
    go = threading.Event()

    def late(group: Any, rank: int) -> Any:
        x = torch.ones(1)
        if rank == 2:
            go.wait(60)
            group.allreduce([x]).wait()
            return None
        work = group.allreduce([x])
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"Timed out waiting 50ms; it goes on"):
                work.wait(timedelta(seconds=0.05))
            go.set()
        work.wait()
        return float(x)

    assert ranks.all(late) == [3.0, 3.0, None]


def test_a_wait_on_the_engines_own_thread_is_refused(ranks: Ranks) -> None:
    work = ranks.groups[0].recv([torch.empty(1)], 1, 77)
    answered: list[Any] = []
    done = threading.Event()

    def here() -> None:
        for call in (work.wait, ranks.groups[0].barrier):
            try:
                call()
            except BaseException as error:
                answered.append(error)
        done.set()

    async def on_loop() -> None:
        here()

    job = ranks.jobs[0]
    job.internals.runtime.loop.call_soon_threadsafe(lambda: job.internals.runtime.loop.create_task(on_loop()))
    assert done.wait(60)
    ranks.groups[1].send([torch.ones(1)], 0, 77).wait()
    work.wait()
    assert [type(error).__name__ for error in answered] == ["LocalError", "LocalError"]
    assert "engine's own thread" in str(answered[0])


def test_groups_of_the_members_alone(ranks: Ranks) -> None:
    def sub(group: Any, rank: int) -> Any:
        if rank == 1:
            return None
        made = ranks.methods(group._group.subgroup([2, 0], "pair"), ranks.jobs[rank])
        x = torch.tensor([float(rank)])
        out = torch.empty(2)
        made.all_gather_single(out, x).wait()
        return out.tolist()

    assert ranks.all(sub) == [[2.0, 0.0], None, [2.0, 0.0]]


# -- failures: each has ranks of its own -----------------------------------------------------------------------------


def test_different_calls_are_named_on_all_ranks() -> None:
    with torch_ranks(2) as two:

        def differ(group: Any, rank: int) -> Any:
            group.allreduce([torch.ones(2 + rank)]).wait()

        errors = two.each(differ)
    for error in errors:
        assert isinstance(error, quicoll.Mismatch)
        assert isinstance(error, dist.DistBackendError)
        assert "shape (2,) on rank 0, (3,) on rank 1" in str(error)
    assert errors[0] is not errors[1]


def test_who_does_not_come_is_named_when_the_time_has_passed() -> None:
    with torch_ranks(2) as two:
        opts = options(dist.AllreduceOptions, timeout=timedelta(seconds=0.5))

        def absent(group: Any, rank: int) -> Any:
            if rank == 0:
                work = group.allreduce([torch.ones(2)], opts)
                failing = work.get_future()
                with pytest.raises(RuntimeError, match="did not call"):
                    failing.wait()
                assert not work.is_success()
                assert isinstance(work.exception(), quicoll.PeerError)
                work.wait()

        found = two.each(absent)[0]
        assert isinstance(found, quicoll.PeerError)
        assert "rank 1 (worker-1) did not call all_reduce" in str(found)
        assert "Timed out waiting 500ms" in str(found)
        later = two.each(lambda group, rank: group.barrier().wait())
    assert [type(error).__name__ for error in later] == ["PeerError", "PeerError"]


@pytest.mark.parametrize(("every", "says"), [(False, "Rank 1"), (True, "Ranks 1, 2")])
def test_a_monitored_barrier_says_who_has_not_come_in_gloos_words_and_ours(every: bool, says: str) -> None:
    with torch_ranks(4) as four:

        def come(group: Any, rank: int) -> Any:
            if rank in (0, 3):
                group.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=every)

        first, _, _, last = four.each(come)
    # In whose words, depends on whether those that all ranks are told come before this rank's deadline is over.
    ours = r"(worker-[03]: )?rank 1 \(worker-1\), rank 2 \(worker-2\) did not call barrier"
    assert re.search(f"{says} failed to pass monitoredBarrier in 500ms: {ours}", str(first))
    assert "Rank 3 successfully reached monitoredBarrier, but received errors while waiting for send/recv" in str(last)
    assert all(isinstance(error, quicoll.PeerError) for error in (first, last))


def test_a_lost_rank_ends_all_operations_of_the_others() -> None:
    with torch_ranks(3, lost_after=0.6) as three:
        waiting = threading.Barrier(3)

        def lose(group: Any, rank: int) -> Any:
            if rank == 2:
                waiting.wait(60)  # the others' operations have begun
                quicoll.testing.cut_network(three.jobs[2], seconds=600)
                return None
            work = group.recv_anysource([torch.empty(1)], 0) if rank else group.allreduce([torch.ones(1)])
            waiting.wait(60)
            began = time.monotonic()
            try:
                work.wait()
            except quicoll.PeerError as error:
                return error.node, error.lost, time.monotonic() - began < 30
            return None

        found = three.each(lose)
    assert found[:2] == [("worker-2", ("worker-2",), True)] * 2
