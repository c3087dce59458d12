"""A rank that is done leaves the job without taking from the others what it has been part of."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from depth import deep

from quicoll.engine.communicator import Communicator
from quicoll.engine.messages import Announce, Farewell, decode_message, encode_message
from quicoll.errors import PeerError
from quicoll.sim import Conditions, Settings, Simulation

if TYPE_CHECKING:
    from quicoll.job import Job

WAN = Conditions(latency_ns=5_000_000, jitter_ns=30_000_000, loss=0.02)
SITES = ("north", "north", "south", "south")

ONCE: dict[str, Callable[[Job], Any]] = {
    **{
        f"all_reduce {algorithm}": lambda job, how=algorithm: job.group.all_reduce(np.ones(5_000), algorithm=how)
        for algorithm in ("direct", "tree", "hierarchical", "exchange")
    },
    "broadcast": lambda job: job.group.broadcast(np.ones(5_000), root=1),
    "all_gather": lambda job: job.group.all_gather(np.ones(2_000 + job.rank)),
    "scatter": lambda job: job.group.scatter(np.ones((20, 250)), root=2),
    "all_to_all": lambda job: job.group.all_to_all(np.ones((12, 250))),
    "barrier": lambda job: job.group.barrier(),
    "objects": lambda job: job.group.all_gather_object("x" * 10_000),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_single_operation_ends_well_on_all_ranks_though_each_leaves_when_it_is_through(name: str) -> None:
    async def worker(job: Job) -> int:
        await ONCE[name](job)
        return job.rank

    for seed in range(deep(1, 3)):
        settings = Settings(ranks=4, sites=SITES, limit=30.0, conditions=WAN)
        outcome = Simulation(worker, seed=seed, settings=settings).run()
        assert outcome.error is None, outcome.error
        assert outcome.results == (0, 1, 2, 3)  # each at its first try: nobody was started again


@pytest.mark.parametrize("seed", [12, 32, 42])
def test_a_rank_joins_the_view_that_the_others_have_left_by_then(seed: int) -> None:
    """On these links the last of two ranks hears of the view, and that it is over, at one moment."""

    async def worker(job: Job) -> tuple[int, int]:
        seen = (job.view.view_id, job.world_size)
        if job.rank == 0:
            await job.aclose(patience=0.0)
            return seen
        with pytest.raises(PeerError):
            await job.group.all_reduce(np.ones(1))
        return seen

    lossy = Conditions(latency_ns=5_000_000, jitter_ns=30_000_000, loss=0.2)
    settings = Settings(ranks=2, limit=60.0, timeout=30.0, conditions=lossy)
    outcome = Simulation(worker, seed=seed, settings=settings).run()
    assert outcome.error is None, outcome.error
    assert outcome.results == ((1, 2), (1, 2))


@pytest.mark.parametrize("hosts", [(), ("one",) * 4], ids=["network", "memory"])
def test_ranks_of_overlapping_groups_leave_one_by_one(hosts: tuple[str, ...]) -> None:
    async def worker(job: Job) -> int:
        pair = await job.group.split(job.rank // 2)
        turned = await job.group.split(0, key=-job.rank)
        assert pair is not None
        assert turned is not None
        handles = [pair.all_reduce(np.ones(9_000)), turned.all_gather(np.ones(3_000))]
        for handle in handles[:: 1 if job.rank % 2 else -1]:
            await handle
        return job.rank

    settings = Settings(ranks=4, limit=30.0, conditions=WAN, hosts=hosts)
    outcome = Simulation(worker, seed=1, settings=settings).run()
    assert outcome.error is None, outcome.error
    assert outcome.results == (0, 1, 2, 3)


@pytest.mark.parametrize("hosts", [(), ("one",) * 4], ids=["network", "memory"])
@pytest.mark.parametrize("how", ["split", "named"])
def test_pairs_that_end_seconds_apart_leave_each_other_the_view(how: str, hosts: tuple[str, ...]) -> None:
    async def worker(job: Job) -> int:
        if how == "split":
            pair = await job.group.split(job.rank // 2)
            assert pair is not None
        else:
            await job.group.barrier()
            pair = job.group.subgroup([0, 1] if job.rank < 2 else [2, 3], "pair")
        for _ in range(3):
            if job.rank < 2:
                await asyncio.sleep(2.0)
            await pair.all_reduce(np.ones(9_000))
        return job.rank

    outcome = Simulation(worker, seed=1, settings=Settings(ranks=4, limit=30.0, hosts=hosts)).run()
    assert outcome.error is None, outcome.error
    assert outcome.results == (0, 1, 2, 3)


def test_a_line_of_ranks_that_hand_on_what_they_got_leaves_one_by_one() -> None:
    async def worker(job: Job) -> float:
        got = np.zeros(1)
        await asyncio.sleep(4.0 * job.rank)
        if job.rank:
            got = await job.group.recv(got, source=job.rank - 1)
        if job.rank + 1 < job.world_size:
            await job.group.send(got + 1, to=job.rank + 1)
        return float(got[0])

    outcome = Simulation(worker, seed=1, settings=Settings(ranks=4, limit=30.0)).run()
    assert outcome.error is None, outcome.error
    assert outcome.results == (0.0, 1.0, 2.0, 3.0)


def test_who_has_ended_its_work_is_let_go_when_the_others_take_a_step_without_it() -> None:
    gone: list[float] = []

    async def worker(job: Job, sim: Simulation) -> int:
        pair = await job.group.split(job.rank // 2)
        assert pair is not None
        await pair.all_reduce(np.ones(9))
        if job.rank == 3:
            await job.aclose()
            gone.append(sim.now)
            return 0
        await asyncio.sleep(4.0)
        async with job.step() as step:
            await step.group.all_reduce(np.ones(9))
        return step.number

    Simulation(worker, seed=1, settings=Settings(ranks=4, timeout=60.0, limit=30.0)).run()
    assert len(gone) == 1
    assert 4.0 < gone[0] < 10.0


def test_who_gets_no_answer_leaves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def worker(job: Job) -> int:
        await job.group.barrier()
        return job.rank

    monkeypatch.setattr(Communicator, "farewell", lambda *_: None)
    outcome = Simulation(worker, seed=1, settings=Settings(ranks=2, timeout=3.0, limit=30.0)).run()
    assert outcome.error is None, outcome.error
    assert 3.0 < outcome.virtual_s < 10.0


def test_who_fails_waits_a_moment_for_the_others_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[float] = []

    async def worker(job: Job, sim: Simulation) -> None:
        await job.group.barrier()
        if job.rank == 1:
            ended.append(sim.now)
            raise PeerError("had enough")
        with contextlib.suppress(PeerError):
            await job.group.barrier()
        ended.append(sim.now)

    monkeypatch.setattr(Communicator, "farewell", lambda *_: None)
    Simulation(worker, seed=1, settings=Settings(ranks=2, timeout=20.0, limit=10.0)).run()
    assert 1.0 < ended[1] - ended[0] < 2.0


@pytest.mark.parametrize("word", [Announce(3, 1, 7, "all_reduce", (4, 5)), Farewell(3), Farewell(3, done=True)])
def test_a_word_is_what_it_was(word: Announce | Farewell) -> None:
    assert decode_message(encode_message(word), node="a") == word


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([3, 1]),
        msgspec.msgpack.encode([2, -1, False]),
        msgspec.msgpack.encode([2, 1 << 62, True]),
        msgspec.msgpack.encode([2, 1, 1]),
        msgspec.msgpack.encode([1, 1, 0, -1, "x"]),
        msgspec.msgpack.encode([1, 1, 0, 1, "x" * 5000]),
        msgspec.msgpack.encode([1, 1, 0, 1, "x", [1 << 63]]),
    ],
)
def test_a_word_that_no_rank_would_say_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode_message(data, node="a")
