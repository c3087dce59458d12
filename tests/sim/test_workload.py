"""The built-in workload: all operations over the seeds, above the thresholds, with results that hang on the view."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.plan.reductions import MIN_SHARE_BYTES
from quicoll.sim import Recording, Settings, Simulation, workload
from quicoll.sim.checked import CheckedGroup, collectives
from quicoll.sim.digests import state_digest
from quicoll.sim.operations import OPERATIONS
from quicoll.sim.subgroups import Grouping
from quicoll.sim.workload import Load, Reference

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim import Outcome

SEEDS = range(60)


def run(load: Load, *, ranks: int, steps: int, reference: Reference | None = None) -> tuple[Outcome, Recording]:
    async def life(job: Job, sim: Simulation) -> int:
        return await workload.worker(job, lambda: sim.everyone_at(steps), load=load)

    recording = Recording()
    sim = Simulation(
        life, settings=Settings(ranks=ranks, limit=60.0), replay=reference or Reference(load), recorder=recording.record
    )
    return sim.run(), recording


def test_sixty_seeds_call_every_operation_and_reduce_in_every_way() -> None:
    loads = [Load.of(seed) for seed in SEEDS]
    called = [name for load in loads for step in range(1, 9) for name in [load.operation(step)]]
    assert set(called) == set(OPERATIONS)
    assert min(called.count(name) for name in OPERATIONS) >= 2 * 8 / 3
    assert {load.algorithm for load in loads} == {"auto", "direct", "tree", "exchange", "hierarchical"}
    assert {load.elements for load in loads} == set(workload.SIZES)
    assert {load.groups is not None for load in loads} == {True, False}
    assert loads == [Load.of(seed) for seed in SEEDS]


def test_sizes_are_just_above_those_at_which_a_reduction_has_two_owners_and_three() -> None:
    for owners, elements in zip((2, 3), workload.SIZES, strict=True):
        assert -(-4 * elements // MIN_SHARE_BYTES) == owners
        assert 4 * elements < MIN_SHARE_BYTES * (owners - 1) * 1.02
    for load in map(Load.of, SEEDS):
        assert any(load.reduced(step) == load.elements for step in range(1, 5))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_operation_gives_what_plain_numpy_says(ranks: int) -> None:
    load = Load(elements=131, operations=tuple(OPERATIONS))
    outcome, recording = run(load, ranks=ranks, steps=len(OPERATIONS))
    assert outcome.error is None, outcome.error
    assert outcome.committed >= len(OPERATIONS)
    began = {entry.what["op"] for entry in recording.entries if entry.kind == "collective_began"}
    pairs = {"send", "recv"} if ranks == 1 else set()
    assert began == set(collectives()) - {"split"} - pairs  # which sub-groups call


def test_a_wrong_result_of_an_operation_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Any = CheckedGroup.all_gather

    def swapped(self: CheckedGroup, x: Any, **settings: Any) -> Any:
        return honest(self, x + (self.rank == 1), **settings)

    monkeypatch.setattr(CheckedGroup, "all_gather", swapped)
    outcome, _ = run(Load(elements=131, operations=("all_gather",)), ranks=2, steps=3)
    assert outcome.error is not None
    assert "AssertionError: an all_gather gave" in str(outcome.error)


def test_the_state_hangs_on_the_view_of_every_step() -> None:
    load = Load(elements=131, groups=Grouping(every=1, keeps=False))
    reference = Reference(load)
    histories = ([[1, 4], [1, 4]], [[1, 4], [2, 4]], [[1, 4], [1, 3]], [[2, 4], [1, 4]])
    digests = {reference(2, {"history": np.array(history)}) for history in histories}
    assert len(digests) == len(histories)
    assert reference(1, {"history": np.array([[1, 4]])}) not in digests


def test_the_digest_of_the_beginning_is_that_of_zeros() -> None:
    load = Load(elements=5)
    nothing = {"vector": np.zeros(5, np.float32), "count": np.array([0]), "history": np.empty((0, 2), np.int64)}
    assert Reference(load)(0, nothing) == state_digest(nothing)


def test_steps_of_another_load_are_found_out() -> None:
    load = Load(elements=131, whole_every=100, operations=("barrier",))
    outcome, _ = run(load, ranks=2, steps=3, reference=Reference(replace(load, elements=130)))
    assert outcome.error is not None
    assert outcome.error.kind == "same-bits"
