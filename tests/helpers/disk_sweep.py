"""Runs of the journal and of checkpoints on a simulated disk, and what must hold after any end of them."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np

from quicoll import checkpoint
from quicoll.errors import CheckpointError, JournalError
from quicoll.membership.coordinator.history import (
    Committed,
    History,
    InstalledView,
    JournalRecord,
    Left,
    Proposed,
    Seeded,
)
from quicoll.membership.journal import Journal
from quicoll.membership.view import Member, View
from quicoll.sim.disk.disk import SimDisk
from quicoll.sim.disk.files import DiskFailure, Halted

JOURNAL = Path("/data/journal.db")
FOLDER = Path("/data/job/checkpoints")


def view(view_id: int, nodes: str = "abc", *, committed: int = 0, by: int = 0) -> View:
    members = tuple(Member(rank=rank, node=node, incarnation=3) for rank, node in enumerate(nodes))
    return View(view_id=view_id, members=members, seed=5, committed_step=committed, committed_view=by)


RECORDS: list[JournalRecord] = [
    Seeded(5),
    Proposed(1),
    Proposed(2),
    InstalledView(view(2, committed=90)),
    Committed(91, 2, b"\x00\xff"),
    Committed(92, 2, b""),
    Left("b"),
    Proposed(3),
    InstalledView(view(3, "ac", committed=92, by=2)),
    Committed(93, 3, b"x" * 64),
    Left("c"),
    Left("a"),
    Proposed(4),
]
PREFIXES = [History.of(RECORDS[:count]) for count in range(len(RECORDS) + 1)]


def new_disk(seed: int) -> SimDisk:
    return SimDisk(random.Random(seed), now_ns=lambda: 1_000_000_000)


def append_all(disk: SimDisk, *, close: bool = True) -> tuple[int, BaseException | None]:
    """Open the journal and append what is missing of RECORDS. How many are acknowledged, and what ended it.

    close: whether the journal is closed, after an error too; a process that is killed does not come to that.
    """
    done = 0
    try:
        journal = Journal.open(JOURNAL, job="job", connect=disk.connect)
        try:
            done = PREFIXES.index(journal.load())
            for record in RECORDS[done:]:
                journal.append(record)
                done += 1
        finally:
            if close:
                journal.close()
    except (Halted, JournalError) as error:
        return done, error
    return done, None


def read_journal(disk: SimDisk) -> int:
    """How many of RECORDS the journal holds. Raises JournalError, and ValueError for what was never written."""
    with Journal.open(JOURNAL, job="job", connect=disk.connect) as journal:
        return PREFIXES.index(journal.load())


def journal_operations() -> int:
    disk = new_disk(0)
    assert append_all(disk) == (len(RECORDS), None)
    return disk.operations


def tensors(step: int) -> dict[str, Any]:
    return {"x": np.full(700, step, np.float32), "y": np.arange(step, dtype=np.int64)}


def save_all(disk: SimDisk, *, steps: int = 4) -> tuple[int, BaseException | None]:
    """Save steps 1, 2, ... from after the newest. The newest step that is acknowledged, and what ended it."""
    done = 0
    try:
        found = checkpoint.latest(FOLDER, disk=disk)
        done = found.step if found is not None else 0
        for step in range(done + 1, steps + 1):
            checkpoint.save(FOLDER, step=step, tensors=tensors(step), keep=2, disk=disk)
            done = step
    except (Halted, CheckpointError) as error:
        return done, error
    return done, None


def read_checkpoint(disk: SimDisk) -> int:
    """The newest whole checkpoint's step, 0 for none. Raises CheckpointError."""
    found = checkpoint.latest(FOLDER, disk=disk)
    if found is None:
        return 0
    assert found.digest == checkpoint.digest(tensors(found.step))
    return found.step


def checkpoint_operations() -> int:
    disk = new_disk(0)
    assert save_all(disk)[1] is None
    return disk.operations


def trace(seed: int) -> str:
    """A digest of all bytes after a run with every kind of fault, two of them at once, in the journal and beside it."""
    digest = hashlib.blake2b()
    for after in (3, 11, 20):
        disk = new_disk(seed)
        for fault in (DiskFailure.WRITE_ERROR, DiskFailure.SYNC_ERROR, DiskFailure.LOST_SYNC, DiskFailure.POWER_LOSS):
            disk.arm(fault, after=after)
            ended = [repr(append_all(disk)), repr(save_all(disk)) if not disk.is_down else ""]
            disk.restart()
            digest.update(repr((disk.rot(), ended, disk.files(), disk.injected, disk.operations)).encode())
            disk.kill()
            disk.restart()
    return digest.hexdigest()
