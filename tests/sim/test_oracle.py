"""Every operation on every type at every world size, bit for bit against definitions in slow Python, on networks that
lose, double, delay, spoil and split, while a rank dies and comes back.

A step issues many operations at once. One that the faults abort is tried again, in whatever view comes next, and what
was compared counts only where all ranks were in that view. The cases, and QUICOLL_TEST_ORACLE for more of them, are
those of tests/helpers/oracle.py; their turns begin elsewhere than those of the cases over sockets.

tests/loopback/test_oracle.py compares them without faults, up to 8 ranks. Here each case meets faults at one world
size: half of them at 2 ranks, a quarter at 3 and a quarter at 4, since a case costs the more the more ranks there are.
A deep run, or QUICOLL_TEST_ORACLE=2 or more, takes all cases at seven world sizes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from oracle import DEFINED, MOVES, TOGETHER, WHOLE, WORLDS, Case, Move, cases, moves, reductions, shared
from slow_reference import DTYPES

from quicoll.errors import LocalError, QuicollError
from quicoll.sim import Conditions, Settings, Simulation

if TYPE_CHECKING:
    from quicoll.job import Job

TURN = 500
SHARES = {1: (0, 8), 2: (0, 2), 3: (1, 4), 4: (3, 4)} if not WHOLE else dict.fromkeys(WORLDS, (0, 1))
"""World sizes, with which of the cases each begins and how many there are for one that it takes."""
COMPUTE_S = 0.05
BAD = Conditions(latency_ns=2_000_000, jitter_ns=5_000_000, loss=0.02, duplicate=0.05, reorder=0.05, corrupt=0.01)

Batch = Callable[["Job"], Awaitable[Sequence[Any]]]


def reductions_of(ranks: int) -> list[Case]:
    return shared(list(cases(ranks, TURN)), ranks, SHARES)


def moves_of(ranks: int) -> list[Move]:
    return shared([Move(dtype, TURN + ranks + turn) for turn, dtype in enumerate(DTYPES)], ranks, SHARES)


def batches_of(ranks: int) -> list[Batch]:
    """What the steps do, one after the other: as many steps as with all cases, so that the faults meet as many."""
    reduced, moved = reductions_of(ranks), moves_of(ranks)
    many = TOGETHER // SHARES[ranks][1]
    few = max(1, many // len(MOVES))
    return [
        *(partial(reductions, chosen=reduced[at : at + many]) for at in range(0, len(reduced), many)),
        *(partial(moves, chosen=moved[at : at + few]) for at in range(0, len(moved), few)),
    ]


class Trial:
    """What the ranks of one simulated cluster do, and who has compared what."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.batches = batches_of(ranks)
        self.compared: dict[Any, set[str]] = {}
        self.cut_off = 0  # operations under way that failed
        self.over_at: int | None = None  # the step after which all batches are done

    async def worker(self, job: Job, sim: Simulation) -> None:
        """The state is how many batches are done with all ranks there; who comes back is told of it."""
        done = 0

        def load(state: Mapping[str, Any]) -> None:
            nonlocal done
            done = int(state["done"][0])

        job.register_state(lambda: {"done": np.array([done])}, load)
        while self.over_at is None or not sim.everyone_at(self.over_at):
            try:
                async with job.step() as step:
                    await asyncio.sleep(COMPUTE_S)
                    if done < len(self.batches):
                        await self.compare(job, self.batches[done])

                    def commit(whole: bool = job.world_size == self.ranks, number: int = step.number) -> None:
                        nonlocal done
                        done += whole
                        if done == len(self.batches):
                            self.over_at = number

                    step.on_commit(commit)
            except LocalError:
                raise
            except QuicollError:
                continue

    async def compare(self, job: Job, batch: Batch) -> None:
        try:
            found = await batch(job)
        except QuicollError:
            self.cut_off += 1
            raise
        if job.world_size == self.ranks:
            for what in found:
                self.compared.setdefault(what, set()).add(job.node)


def broken(ranks: int, trial: Trial) -> Simulation:
    sites = tuple(f"site-{3 * rank // ranks}" for rank in range(ranks))
    settings = Settings(ranks=ranks, conditions=BAD, timeout=5.0, chunk_bytes=500, sites=sites)
    sim = Simulation(trial.worker, seed=ranks, settings=settings)
    sim.every(0.3, start=0.2, until=2.4).corrupt(0)
    if ranks > 1:
        sim.at(0.5).partition({0}, {1}, one_way=True)
        sim.at(1.8).repair()
        sim.at(2.5).crash(ranks - 1)
        sim.at(2.7).restart(ranks - 1)
    sim.at(3.0).heal()
    return sim


@pytest.mark.parametrize("ranks", SHARES)
def test_every_operation_under_faults_gives_the_bits_of_its_definition(ranks: int) -> None:
    trial = Trial(ranks)
    outcome = broken(ranks, trial).run()
    assert outcome.error is None, outcome.error

    alone = ranks == 1
    everyone = {f"worker-{rank}" for rank in range(ranks)}
    reduced = {(case.name, case.op, case.dtype) for case in reductions_of(ranks)}
    assert SHARES[ranks][1] > 1 or reduced == set(DEFINED)
    dtypes = [move.dtype for move in moves_of(ranks)]
    moved = [(name, dtype) for name in MOVES for dtype in dtypes if not (alone and name == "send and recv")]
    assert set(trial.compared) == {*reduced, *moved}
    assert [what for what, nodes in trial.compared.items() if nodes != everyone] == []

    faults = {"datagram_loss", "datagram_duplicate", "datagram_corrupt", "payload"}
    if not alone:
        faults |= {"datagram_partition", "one_way", "crash", "restart"}
        assert trial.cut_off > 0
        assert outcome.aborted > 1
        assert outcome.views > 2
    assert faults <= set(outcome.injected)


def test_every_operation_meets_the_faults_with_every_type_at_some_size_with_several_ranks() -> None:
    several = [ranks for ranks in SHARES if ranks > 1]
    assert {(case.name, case.op, case.dtype) for ranks in several for case in reductions_of(ranks)} == set(DEFINED)
    assert {move.dtype for ranks in several for move in moves_of(ranks)} == set(DTYPES)
