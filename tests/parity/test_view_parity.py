"""Views of two hosts with two ranks each do the same over real sockets and memory and in a simulated world.

Within a host long messages are parcels, all else is as over the network. One suite, run on both; so nothing here asks
on which of the two it runs, and where one has longer parcels than the other the layout says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from oracle import Move, cases, moves, reductions
from parity_views import RunRanks, on_real_hosts, on_simulated_hosts, ways_of
from slow_reference import DTYPES

from quicoll.engine import executor, host_ways
from quicoll.engine.host_ways import LEAST
from quicoll.errors import QuicollError
from quicoll.local.layout import PARCELS
from quicoll.local.sealing import unusable

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.local.parcels import Notice

HOST_OF = (0, 0, 1, 1)  # by rank
NEIGHBOUR = (1, 0, 3, 2)

REAL = [pytest.mark.loopback, pytest.mark.skipif(bool(unusable()), reason=unusable() or "usable")]


def on_both(test: Callable[..., None]) -> Any:
    """Make it a pytest test on each cluster."""
    return pytest.mark.parametrize(
        "run",
        [pytest.param(on_real_hosts, id="real", marks=REAL), pytest.param(on_simulated_hosts, id="simulated")],
    )(test)


def given(job: Job) -> int:
    """How many parcels this rank has given."""
    return ways_of(job).parcels.given


# -- who hands whom what ---------------------------------------------------------------------------------------------


@on_both
def test_each_rank_hands_parcels_to_those_of_its_host_alone(run: RunRanks) -> None:
    async def work(job: Job) -> Any:
        engine, view_id = job.group._context.engine, job.view.view_id
        return engine.by_memory(view_id), engine.near(view_id), job.group._here.near

    ran = run(work)
    assert ran.results == [((each,), None, False) for each in NEIGHBOUR]
    assert ran.shared == {"worker-0": [0, 1], "worker-1": [0, 1], "worker-2": [2, 3], "worker-3": [2, 3]}
    assert ran.reasons == []


@on_both
def test_where_one_rank_has_no_memory_those_of_its_host_share_none_and_the_other_host_does(run: RunRanks) -> None:
    async def work(job: Job) -> Any:
        by_memory = job.group._context.engine.by_memory(job.view.view_id)
        return by_memory, float((await job.group.all_reduce(np.full(20_000, job.rank + 1.0)))[-1])

    ran = run(work, short=1)
    assert ran.results == [((), 10.0), ((), 10.0), ((3,), 10.0), ((2,), 10.0)]
    assert ran.shared == {"worker-2": [2, 3], "worker-3": [2, 3]}
    assert len(ran.reasons) == 2
    assert all("No space left" in reason for reason in ran.reasons)


@on_both
def test_messages_of_any_length_arrive_and_are_parcels_where_they_may_be(run: RunRanks) -> None:
    async def work(job: Job) -> Any:
        fits = ways_of(job).parcels.fits
        found = []
        for size in (1, LEAST - 1, LEAST, 65_537, 256 << 10, (256 << 10) + 1, 1 << 20, (1 << 20) + 5):
            for source in range(4):
                for target in (each for each in range(4) if each != source):
                    before = given(job)
                    data = np.random.default_rng(1000 * source + target).integers(0, 256, size, dtype=np.uint8)
                    if job.rank == source:
                        await job.group.send(data, to=target)
                        inside = HOST_OF[source] == HOST_OF[target]
                        chunks = -(-size // (1 << 20))
                        lengths = [size // chunks] * chunks
                        parcels = sum(each >= LEAST and fits(each) for each in lengths) if inside else 0
                        found.append((size, source, target, given(job) - before, parcels))
                    elif job.rank == target:
                        came = await job.group.recv(np.empty_like(data), source=source)
                        assert came.tobytes() == data.tobytes()
        return [each for each in found if each[3] != each[4]], given(job)

    ran = run(work)
    assert [wrong for wrong, _ in ran.results] == [[]] * 4
    assert all(count >= 3 for _, count in ran.results)


@on_both
def test_more_messages_than_there_are_places_all_arrive_and_places_go_round(run: RunRanks) -> None:
    count, size = 3 * PARCELS, 5000

    async def work(job: Job) -> Any:
        peer = NEIGHBOUR[job.rank]
        data = [np.full(size, 7 * job.rank + number % 200, np.uint8) for number in range(count)]
        seen = []
        for _ in range(2):
            before = given(job)
            sending = [job.group.send(each, to=peer) for each in data]
            await job.group.barrier()  # while nobody takes anything
            taking = [job.group.recv(np.empty(size, np.uint8), source=peer) for _ in range(count)]
            for number, handle in enumerate(taking):
                assert ((await handle) == 7 * peer + number % 200).all()
            for sent in sending:
                await sent
            seen.append(given(job) - before)
            await job.group.barrier()
        return seen

    for first, second in run(work).results:
        assert PARCELS <= first <= count
        assert PARCELS <= second <= count, "places that were taken are free again"


# -- the bits --------------------------------------------------------------------------------------------------------


async def every_operation(job: Job) -> list[bytes]:
    """Of all algorithms, with messages that are parcels, and some that are too short or too long."""
    group, found = job.group, []
    draw = np.random.default_rng(job.rank)
    for count in (9, 5_000, 70_000):
        x = draw.standard_normal(count).astype(np.float32) * np.float32(10.0**job.rank)
        rows = x[: count // 4 * 4]
        leaves = group.shards(6).leaves([x * (i + 1) for i in group.shards(6)])
        handles: list[Any] = [
            *(group.all_reduce(x, algorithm=way) for way in ("auto", "direct", "tree", "hierarchical", "exchange")),
            group.all_reduce(leaves, op="avg"),
            *(group.reduce(x, root=1, algorithm=way) for way in ("auto", "direct", "tree", "hierarchical")),
            *(group.reduce_scatter(rows, algorithm=way) for way in ("auto", "direct", "hierarchical")),
            *(group.all_gather(x[: count - job.rank], algorithm=way) for way in ("auto", "direct", "hierarchical")),
            *(group.broadcast(x, root=2, algorithm=way) for way in ("auto", "tree", "hierarchical")),
            *(group.gather(x, root=3, algorithm=way) for way in ("auto", "direct", "hierarchical")),
            *(group.scatter(rows, root=1, algorithm=way) for way in ("auto", "direct", "hierarchical")),
            group.all_to_all([x[: count // (1 + to)] for to in range(4)]),
        ]
        for handle in handles:
            result = await handle
            parts = result if isinstance(result, list) else [] if result is None else [result]
            found.append(b"".join(np.asarray(part).tobytes() for part in parts))
    return found


@on_both
def test_all_operations_have_the_bits_of_the_network(run: RunRanks) -> None:
    async def work(job: Job) -> Any:
        return await every_operation(job), given(job)

    shared = run(work).results
    assert all(count > 20 for _, count in shared), [count for _, count in shared]
    assert [bits for bits, _ in shared] == run(every_operation, apart=True).results


@pytest.mark.loopback
@pytest.mark.skipif(bool(unusable()), reason=unusable() or "usable")
def test_both_clusters_give_the_same_bits() -> None:
    assert on_real_hosts(every_operation).results == on_simulated_hosts(every_operation).results


@on_both
def test_every_type_and_operation_has_its_bits_though_each_message_inside_a_host_is_a_parcel(
    run: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As defined, at the sizes that the definitions are computed at: so the least of a parcel is one byte here."""
    monkeypatch.setattr(host_ways, "LEAST", 1)
    monkeypatch.setattr(executor, "INLINE_BYTES", 0)
    chosen = [case for case in cases(4) if case.seed % 3 == 0]
    moved = [Move(dtype, seed) for seed, dtype in enumerate(DTYPES)]

    async def work(job: Job) -> int:
        for at in range(0, len(chosen), PARCELS):
            await reductions(job, chosen[at : at + PARCELS])
        for at in range(0, len(moved), 4):
            await moves(job, moved[at : at + 4])
        return given(job)

    counts = run(work).results
    assert all(count > 50 for count in counts), counts


# -- what goes wrong -------------------------------------------------------------------------------------------------


async def _told(job: Job) -> tuple[str, str] | None:
    """How a reduction ends: the error's kind, and whom it names."""
    try:
        await job.group.all_reduce(np.ones(30_000), algorithm="direct")
    except QuicollError as error:
        return type(error).__name__, error.node
    return None


@on_both
def test_a_parcel_with_another_bit_ends_the_view_and_all_name_its_writer(run: RunRanks) -> None:
    async def work(job: Job) -> Any:
        parcels = ways_of(job).parcels
        give = parcels.give

        def spoil(reader: int, payload: memoryview) -> Notice | None:
            notice = give(reader, payload)
            if notice is not None:
                memory = parcels._memory
                memory.view(memory.rank, memory.layout.parcel_at(notice.place), notice.nbytes)[-9] ^= 4
            return notice

        if job.rank == 2:
            monkeyed: Any = parcels
            monkeyed.give = spoil
        await job.group.barrier()
        return await _told(job)

    assert set(run(work).results) == {("Corrupted", "worker-2")}


@on_both
def test_a_notice_that_cannot_be_ends_the_view_and_all_name_who_sent_it(run: RunRanks) -> None:
    async def work(job: Job) -> Any:
        parcels = ways_of(job).parcels
        give = parcels.give

        def lie(reader: int, payload: memoryview) -> Notice | None:
            notice = give(reader, payload)
            return None if notice is None else notice._replace(place=PARCELS)

        if job.rank == 1:
            monkeyed: Any = parcels
            monkeyed.give = lie
        await job.group.barrier()
        return await _told(job)

    assert set(run(work).results) == {("PeerError", "worker-1")}


@on_both
def test_a_rank_that_has_no_memory_for_a_place_sends_over_the_network(run: RunRanks) -> None:
    async def work(job: Job) -> Any:
        parcels = ways_of(job).parcels
        if job.rank == 0:
            changed: Any = parcels
            changed._memory.make = _refuse
        await job.group.barrier()
        sums = [float((await job.group.all_reduce(np.full(30_000, job.rank + 1.0)))[7]) for _ in range(3)]
        await asyncio.sleep(0)
        return sums, given(job) > 0

    assert run(work).results == [([10.0] * 3, rank != 0) for rank in range(4)]


def _refuse(at: int, size: int) -> None:
    raise OSError(28, "No space left on device")
