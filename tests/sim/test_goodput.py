"""What a job loses by ranks that are killed, on the virtual clock: their own work, and no time of the others."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[2] / "benchmarks" / "goodput.py"
GIVEN = {"ranks": 8, "minutes": 1.5, "compute": 5.0, "restart": 10.0, "spares": 0, "lost_after": 5.0, "seed": 1}


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("goodput", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def longest_s(found: dict[str, Any]) -> float:
    commits = found["commits"]
    return max(after - before for (before, _), (after, _) in pairwise(commits))


def test_a_rank_that_is_killed_and_started_again_costs_its_own_work_and_keeps_nobody_waiting() -> None:
    found = benchmark().run(Namespace(**GIVEN, cuts=0), 2)
    assert longest_s(found) < 5.1
    missed = sum(8 - computed for _, computed in found["commits"][1:])
    assert 0 < missed <= 2 * 4, "ten seconds away, and the steps that it was in the middle of: four of them at most"
    assert found["work"] == sum(computed for _, computed in found["commits"][1:])


def test_of_few_ranks_that_look_at_each_other_seldom_the_killed_one_is_left_out_and_no_other() -> None:
    given = GIVEN | {"ranks": 4, "minutes": 3.0, "seed": 3}  # with a shorter wait for reports all stood still for 5 s
    found = benchmark().run(Namespace(**given, cuts=0), 6)
    assert longest_s(found) < GIVEN["compute"] + GIVEN["lost_after"] / 6 + 0.1


def test_a_warm_spare_does_the_work_of_a_rank_that_is_killed() -> None:
    found = benchmark().run(Namespace(**GIVEN | {"spares": 1}, cuts=0), 2)
    assert longest_s(found) < 5.1
    assert sum(8 - computed for _, computed in found["commits"][1:]) <= 2 * 2


def test_costs_are_laid_to_the_fault_before() -> None:
    commits = [(0.0, 0), (5.0, 4), (10.0, 4), (15.5, 3), (20.5, 3), (25.5, 4), (33.5, 2), (38.5, 4)]
    lines = benchmark().costs(4, [(12.0, "killed"), (26.0, "cut off")], commits, 5.0)
    assert lines[1].startswith("killed: 1 times; all stood still for 0.5 s, 0.50 s each time; 2 steps of one rank")
    assert lines[2].startswith("cut off: 1 times; all stood still for 3.0 s, 3.00 s each time; 2 steps of one rank")
    assert lines[0].startswith("nothing yet: 0 times; all stood still for 0.0 s")
    assert len(lines) == 3
