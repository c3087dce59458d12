"""The built-in workload in sub-groups: which seeds have them, and that their results are what plain numpy says."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
from depth import deep, some

from quicoll.sim import Recording, Settings, Simulation, workload
from quicoll.sim.runner import run_seed
from quicoll.sim.subgroups import Grouping, after, beginning, grouping

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim import Outcome

STEPS = 4


def run(ranks: int, groups: Grouping, expected: Grouping | None = None) -> tuple[Outcome, int]:
    """And how many times a rank called split."""

    load = workload.Load(groups=groups, algorithm="tree", elements=131, operations=("barrier",))
    replay = workload.Reference(replace(load, groups=expected or groups))

    async def life(job: Job, sim: Simulation) -> int:
        return await workload.worker(job, lambda: sim.everyone_at(STEPS), load=load)

    recording = Recording()
    settings = Settings(ranks=ranks, chunk_bytes=100)
    outcome = Simulation(life, settings=settings, replay=replay, recorder=recording.record).run()
    began = [entry for entry in recording.entries if entry.kind == "collective_began"]
    return outcome, sum(entry.what["op"] == "split" for entry in began)


def test_a_third_of_the_seeds_work_in_groups_each_in_its_own_way() -> None:
    found = [grouping(seed) for seed in range(1000)]
    drawn = [each for each in found if each is not None]
    assert 250 < len(drawn) < 350
    kinds = {(each.every, each.keeps) for each in drawn}
    assert kinds == {(every, keeps) for every in (1, 2, 3) for keeps in (False, True)}
    assert found == [grouping(seed) for seed in range(1000)]


@pytest.mark.parametrize(
    ("ranks", "keeps"),
    deep([(1, True), (2, False), (3, True), (5, False)], list(product((1, 2, 3, 5, 8), (False, True)))),
)
def test_groups_of_any_size_give_the_bits_of_plain_numpy(ranks: int, keeps: bool) -> None:
    outcome, splits = run(ranks, Grouping(every=2, keeps=keeps))
    assert outcome.error is None, outcome.error
    attempts = (outcome.committed + outcome.aborted) // 2
    assert splits >= 4 * ranks * (1 if keeps else 2)
    assert splits <= 4 * ranks * (outcome.views if keeps else attempts + 1)


def test_steps_that_should_work_in_groups_and_do_not_are_found_out() -> None:
    outcome, _ = run(3, Grouping(every=3, keeps=True), Grouping(every=2, keeps=True))
    assert outcome.error is not None
    assert outcome.error.kind == "same-bits"
    assert "reference" in str(outcome.error)


def test_the_rows_depend_on_what_was_before_and_on_the_step() -> None:
    first = after(beginning(), 1)
    assert first.dtype == np.float32
    assert not np.array_equal(first, after(beginning(), 2))
    assert not np.array_equal(after(first, 2) - first, after(beginning(), 2))
    assert len({row.tobytes() for row in first}) == len(first)


@pytest.mark.parametrize("seed", some([10, 33], 2))
def test_a_seed_that_splits_in_every_such_step_holds_all_invariants(seed: int) -> None:
    found = grouping(seed)
    assert found is not None
    assert not found.keeps
    outcome = run_seed(seed)
    assert outcome.error is None, outcome.error
    assert outcome.views > 2
