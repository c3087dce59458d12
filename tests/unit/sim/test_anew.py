"""What a person does with the checkpoints of ranks that have stopped by Diverged."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quicoll import checkpoint
from quicoll.errors import Diverged
from quicoll.sim.anew import leave_one
from quicoll.sim.disk.disk import SimDisk

DIRECTORY = "/data/checkpoints"


def disk_with(*saved: tuple[int, float]) -> SimDisk:
    """A disk with a checkpoint of each step, of this value."""
    disk = SimDisk(random.Random(1), now_ns=lambda: 0)
    for step, value in saved:
        checkpoint.save(DIRECTORY, step=step, tensors={"w": np.full(5, value)}, disk=disk)
    return disk


def disks_with(*values: float) -> dict[str, SimDisk]:
    """Disks of nodes, each with a checkpoint of step 3 of this value, and all with the same one of step 2."""
    return {f"worker-{rank}": disk_with((2, 0.0), (3, value)) for rank, value in enumerate(values)}


def diverged(*ranks: int, step: int = 3) -> Diverged:
    return Diverged("two states", step=step, view=1, nodes=tuple(f"worker-{rank}" for rank in ranks), tensor="w")


def newest(disks: dict[str, SimDisk]) -> list[tuple[int, float] | None]:
    found = []
    for disk in disks.values():
        disk.restart()
        latest = checkpoint.latest(DIRECTORY, disk=disk)
        found.append(None if latest is None else (latest.step, float(latest.tensors["w"][0])))
    return found


def test_of_two_checkpoints_that_differ_that_of_the_first_rank_is_left() -> None:
    disks = disks_with(1.0, 2.0)
    assert leave_one(diverged(0, 1), disks) == "worker-0"
    assert newest(disks) == [(3, 1.0), (2, 0.0)]


def test_what_is_taken_away_is_gone_after_a_power_loss_too() -> None:
    disks = disks_with(1.0, 2.0)
    leave_one(diverged(0, 1), disks)
    for disk in disks.values():
        disk.crash()
    assert newest(disks) == [(3, 1.0), (2, 0.0)]


def test_disks_may_be_down_and_no_fault_strikes_what_a_person_does() -> None:
    disks = disks_with(1.0, 2.0)
    operations = [disk.operations for disk in disks.values()]
    for disk in disks.values():
        disk.kill()
    assert leave_one(diverged(0, 1), disks) == "worker-0"
    assert [disk.operations for disk in disks.values()] == operations


def test_those_that_have_the_same_keep_it_together() -> None:
    disks = disks_with(1.0, 2.0, 2.0, 1.0)
    assert leave_one(diverged(0, 1, 2, 3), disks) == "worker-0"
    assert newest(disks) == [(3, 1.0), (2, 0.0), (2, 0.0), (3, 1.0)]


def test_who_is_not_named_keeps_what_he_has() -> None:
    disks = disks_with(3.0, 1.0, 2.0)
    assert leave_one(diverged(1, 2), disks) == "worker-1"
    assert newest(disks) == [(3, 3.0), (3, 1.0), (2, 0.0)]


@pytest.mark.parametrize(
    ("disks", "error"),
    [
        pytest.param(disks_with(1.0, 2.0, 2.0), diverged(0, 1, 2), id="most have the same"),
        pytest.param(disks_with(1.0, 1.0), diverged(0, 1), id="all have the same"),
        pytest.param(disks_with(1.0, 2.0), diverged(0, 1, step=4), id="none of that step"),
        pytest.param(disks_with(1.0, 2.0), diverged(0, 7), id="one has one"),
    ],
)
def test_what_processes_come_to_an_end_of_by_themselves_is_left_to_them(
    disks: dict[str, SimDisk], error: Diverged
) -> None:
    before = newest(disks)
    assert leave_one(error, disks) == ""
    assert newest(disks) == before


def test_a_checkpoint_that_is_not_whole_is_none() -> None:
    disks = disks_with(1.0, 2.0)
    name = next(name for name in disks["worker-1"].files() if "step-00000003" in name and name.endswith("safetensors"))
    disks["worker-1"].rot(name)
    assert leave_one(diverged(0, 1), disks) == ""
