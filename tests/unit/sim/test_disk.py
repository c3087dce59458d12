"""The simulated disk: honest about crashes, the same for the same seed, and what the real journal does on it.

The sweeps end a run at each of its disk operations in turn. QUICOLL_TEST_DISK_SEEDS, 1 by default, is how many seeds
each takes; 60 of them take five minutes.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from depth import deep
from disk_sweep import (
    FOLDER,
    JOURNAL,
    PREFIXES,
    RECORDS,
    append_all,
    checkpoint_operations,
    journal_operations,
    new_disk,
    read_checkpoint,
    read_journal,
    save_all,
    tensors,
    trace,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quicoll import checkpoint
from quicoll.checkpoint.disk import Disk, OsDisk
from quicoll.errors import CheckpointError, JournalError, LocalError
from quicoll.membership.journal import Journal
from quicoll.sim.disk import sqlite as vfs
from quicoll.sim.disk.disk import SimDisk
from quicoll.sim.disk.files import SECTOR, DiskFailure, Halted

if TYPE_CHECKING:
    from quicoll.sim.disk.sqlite import SimConnection

pytestmark = pytest.mark.slow  # ends a run at each of its disk operations in turn
SEEDS = range(int(os.environ.get("QUICOLL_TEST_DISK_SEEDS", deep("1", "2"))))
A, B = Path("/data/a"), Path("/data/b")


def crashed(disk: SimDisk) -> dict[str, bytes]:
    """The files after a power loss."""
    disk.crash()
    disk.restart()
    return disk.files()


def durable(disk: SimDisk, path: Path, data: bytes) -> None:
    disk.create(path, [data])
    disk.sync_directory(path.parent)


# Names


def test_a_name_is_durable_only_after_the_directory_is_synced() -> None:
    outcomes = []
    for seed in range(20):
        disk = new_disk(seed)
        disk.create(A, [b"x"])
        outcomes.append(crashed(disk))
    assert {"/data/a": b"x"} in outcomes
    assert {} in outcomes
    for seed in range(20):
        disk = new_disk(seed)
        durable(disk, A, b"x")
        assert crashed(disk) == {"/data/a": b"x"}


def test_a_rename_is_atomic_and_durable_only_after_the_directory_is_synced() -> None:
    outcomes = []
    for seed in range(20):
        disk = new_disk(seed)
        durable(disk, A, b"old")
        durable(disk, B, b"new")
        disk.replace(B, A)
        assert disk.names(A.parent) == ["a"]
        outcomes.append(crashed(disk))
    before, after = {"/data/a": b"old", "/data/b": b"new"}, {"/data/a": b"new"}
    assert all(outcome in (before, after) for outcome in outcomes)
    assert before in outcomes
    assert after in outcomes


def test_a_removed_file_may_come_back_until_the_directory_is_synced() -> None:
    outcomes = []
    for seed in range(20):
        disk = new_disk(seed)
        durable(disk, A, b"x")
        disk.remove(A)
        assert disk.files() == {}
        outcomes.append(crashed(disk))
    assert {"/data/a": b"x"} in outcomes
    assert {} in outcomes


def test_a_file_in_a_directory_whose_name_is_lost_is_lost() -> None:
    lost = 0
    for seed in range(20):
        disk = new_disk(seed)
        disk.make_directory(Path("/data/d"))
        durable(disk, Path("/data/d/x"), b"x")
        lost += crashed(disk) == {}
    assert 0 < lost < 20


def read_into(disk: Disk, path: Path, start: int, count: int) -> tuple[int, bytes]:
    memory = bytearray(b"." * count)
    came = disk.read_into(path, start, memoryview(memory))
    return came, bytes(memory)


def test_errors_are_those_of_the_system(tmp_path: Path) -> None:
    """The same calls on both disks, with the same answers."""

    def answers(disk: Disk) -> list[object]:
        f, d = tmp_path / "f", tmp_path / "d"
        disk.create(f, [b"abc", memoryview(b"def")])
        disk.make_directory(d)
        calls: list[Callable[[], object]] = [
            lambda: disk.read(f),
            lambda: disk.names(tmp_path),
            lambda: disk.create(f, []),
            lambda: disk.create(tmp_path / "no" / "x", []),
            lambda: disk.create(f / "x", []),
            lambda: disk.make_directory(d),
            lambda: disk.make_directory(tmp_path / "no" / "x"),
            lambda: disk.make_directory(f / "x"),
            lambda: disk.names(f),
            lambda: disk.names(tmp_path / "no"),
            lambda: disk.read(d),
            lambda: disk.read(tmp_path / "no"),
            lambda: disk.remove(tmp_path / "no"),
            lambda: disk.remove(d),
            lambda: disk.replace(tmp_path / "no", f),
            lambda: disk.replace(f, d),
            lambda: disk.sync_directory(tmp_path / "no"),
            lambda: disk.sync_directory(f),
            lambda: disk.age_s(tmp_path / "no"),
            lambda: disk.size(f),
            lambda: disk.size(tmp_path / "no"),
            lambda: [disk.read(f, start, stop) for start, stop in ((1, 4), (4, 99), (9, 12), (3, 2), (2, None))],
            lambda: [read_into(disk, f, start, count) for start, count in ((1, 3), (4, 9), (9, 3), (3, 0), (0, 6))],
            lambda: read_into(disk, d, 0, 3),
            lambda: read_into(disk, tmp_path / "no", 0, 3),
            lambda: disk.replace(f, tmp_path / "g"),
            lambda: disk.names(tmp_path),
        ]
        found: list[object] = []
        for call in calls:
            try:
                found.append(call())
            except OSError as error:
                found.append(error.errno)
        return found

    simulated = answers(SimDisk(random.Random(1), now_ns=lambda: 0, directories=(tmp_path,)))
    assert answers(OsDisk()) == simulated
    assert simulated[:3] == [b"abcdef", ["d", "f"], errno.EEXIST]


# Contents


def test_an_unsynced_write_is_lost_kept_or_torn_at_sectors() -> None:
    data = b"".join(bytes([65 + index]) * SECTOR for index in range(6)) + b"tail"
    kinds = []
    for seed in range(60):
        disk = new_disk(seed)
        disk.arm(DiskFailure.POWER_LOSS, after=2)  # the name, the write, and then the sync, which is struck
        with pytest.raises(Halted):
            disk.create(A, [data])
        found = disk.files().get("/data/a")
        if found is None or found in (b"", data):
            kinds.append({None: "no name", b"": "lost", data: "kept"}[found])
            continue
        kinds.append("torn")
        assert len(found) <= len(data)
        for start in range(0, len(found), SECTOR):
            part = found[start : start + SECTOR]
            assert part in (data[start : start + len(part)], bytes(len(part)))
    assert all(kinds.count(kind) > 1 for kind in ("no name", "lost", "kept", "torn")), kinds


def test_what_was_synced_is_never_touched_not_even_by_a_torn_write_beside_it() -> None:
    for seed in range(40):
        disk = new_disk(seed)
        durable(disk, A, b"s" * 700)
        disk.write(disk.file(A), 700, b"n" * 700)  # shares the second sector
        found = crashed(disk)["/data/a"]
        assert found[:700] == b"s" * 700
        assert bytes(found[700:]).strip(b"n\0") == b""


def test_after_a_kill_nothing_that_was_written_is_lost() -> None:
    disk = new_disk(1)
    disk.arm(DiskFailure.KILL, after=2)
    with pytest.raises(Halted):
        disk.create(A, [b"x" * 2000])
    disk.restart()
    assert disk.files() == {"/data/a": b"x" * 2000}
    assert disk.read(A) == b"x" * 2000


def test_after_a_failed_sync_the_data_is_read_but_no_later_sync_writes_it() -> None:
    lost = 0
    for seed in range(20):
        disk = new_disk(seed)
        durable(disk, A, b"")
        file = disk.file(A)
        disk.write(file, 0, b"x" * 1024)
        disk.arm(DiskFailure.SYNC_ERROR)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            disk.sync(file)
        assert disk.read(A) == b"x" * 1024
        disk.sync(file)
        lost += crashed(disk)["/data/a"] != b"x" * 1024
        assert disk.injected["disk_sync_error"] == 1
        assert not disk.beyond_contract
    assert 0 < lost < 20


def test_a_lying_sync_returns_and_is_beyond_the_contract() -> None:
    lost = 0
    for seed in range(20):
        disk = new_disk(seed)
        disk.arm(DiskFailure.LOST_SYNC)
        durable(disk, A, b"x" * 1024)
        assert disk.beyond_contract
        lost += crashed(disk)["/data/a"] != b"x" * 1024
    assert 0 < lost < 20


def test_a_full_disk_takes_what_fits() -> None:
    disk = new_disk(1)
    durable(disk, A, b"x" * 600)
    disk.capacity = 1000
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        disk.create(B, [b"y" * 300, b"y" * 300])
    assert len(disk.read(B)) == 400
    disk.remove(B)
    durable(disk, B, b"y" * 400)
    assert disk.injected["disk_full"] == 1


def test_a_write_error_is_told() -> None:
    disk = new_disk(1)
    disk.arm(DiskFailure.WRITE_ERROR, after=1)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        disk.create(A, [b"x" * 512, b"y" * 5120])
    assert disk.read(A).rstrip(b"y") == b"x" * 512
    assert disk.injected["disk_write_error"] == 1


def test_rot_flips_one_bit_that_stays() -> None:
    disk = new_disk(1)
    assert disk.rot() is None
    durable(disk, A, bytes(2000))
    where = disk.rot()
    assert where is not None
    assert where.startswith("/data/a:")
    found = disk.read(A)
    assert sum(byte.bit_count() for byte in found) == 1
    assert crashed(disk)["/data/a"] == found
    assert disk.beyond_contract


def test_arming_what_cannot_be_armed_is_a_local_error() -> None:
    disk = new_disk(1)
    for fault in (DiskFailure.DISK_FULL, DiskFailure.BIT_ROT):
        with pytest.raises(LocalError, match="is not armed"):
            disk.arm(fault)
    with pytest.raises(LocalError, match="0 or more"):
        disk.arm(DiskFailure.KILL, after=-1)


# Death


def test_nothing_works_between_a_crash_and_the_restart() -> None:
    disk = new_disk(1)
    durable(disk, A, b"x")
    disk.crash()
    calls: list[Callable[[], object]] = [
        lambda: disk.make_directory(B),
        lambda: disk.sync_directory(A.parent),
        lambda: disk.create(B, []),
        lambda: disk.replace(A, B),
        lambda: disk.remove(A),
        lambda: disk.names(A.parent),
        lambda: disk.read(A),
        lambda: disk.age_s(A),
        lambda: disk.connect(JOURNAL),
    ]
    assert disk.is_down
    for call in calls:
        with pytest.raises(Halted):
            call()
    disk.restart()
    assert disk.files() == {"/data/a": b"x"}


@pytest.mark.parametrize("end", [SimDisk.crash, SimDisk.kill])
def test_a_dead_connection_raises_and_cannot_touch_the_disk(end: Callable[[SimDisk], None]) -> None:
    disk = new_disk(1)
    journal = Journal.open(JOURNAL, job="job", connect=disk.connect)
    for record in RECORDS[:5]:
        journal.append(record)
    journal._database.execute("BEGIN IMMEDIATE")
    journal._database.execute("DELETE FROM commits")
    end(disk)
    disk.restart()
    before, operations = disk.files(), disk.operations
    assert len(before["/data/journal.db-wal"]) > 0  # closing it would fold the log and remove it
    with pytest.raises(Halted):
        journal.append(RECORDS[5])
    with pytest.raises(Halted):
        journal.close()
    assert not journal._database.in_transaction
    del journal
    gc.collect()
    assert (disk.files(), disk.operations) == (before, operations)
    assert read_journal(disk) == 5


def test_a_connection_that_is_dropped_with_its_disk_touches_no_other() -> None:
    other = new_disk(2)
    assert append_all(other, close=False)[1] is None
    before = other.files()
    disk = new_disk(1)
    assert append_all(disk, close=False)[1] is None
    del disk
    gc.collect()
    assert other.files() == before


def test_a_second_coordinator_is_refused_until_the_first_has_ended_or_died() -> None:
    disk = new_disk(1)
    first = Journal.open(JOURNAL, job="job", connect=disk.connect)
    for _ in range(2):
        with pytest.raises(JournalError, match="in use by another coordinator"):
            Journal.open(JOURNAL, job="job", connect=disk.connect)
    first.append(RECORDS[0])
    disk.kill()
    disk.restart()
    with Journal.open(JOURNAL, job="job", connect=disk.connect) as second:
        assert second.load() == PREFIXES[1]
    with Journal.open(JOURNAL, job="job", connect=disk.connect) as third:
        assert third.load() == PREFIXES[1]


# SQLite


def test_errors_of_sqlite_are_those_of_the_standard_library() -> None:
    disk = new_disk(1)
    connection: SimConnection = disk.connect(Path("/data/x.db"))
    with pytest.raises(sqlite3.OperationalError, match="no such table: t") as caught:
        connection.execute("SELECT * FROM t")
    assert caught.value.sqlite_errorcode == sqlite3.SQLITE_ERROR
    connection.execute("CREATE TABLE t (a INTEGER, b BLOB)")
    connection.execute("BEGIN")
    assert connection.in_transaction
    connection.execute("INSERT INTO t VALUES (?, ?)", (1, b"x"))
    connection.execute("INSERT INTO t VALUES (?, ?)", (2, b"y"))
    connection.execute("COMMIT")
    assert not connection.in_transaction
    assert list(connection.execute("SELECT * FROM t")) == [(1, b"x"), (2, b"y")]
    rows = connection.execute("SELECT a FROM t")
    assert [rows.fetchone(), rows.fetchone(), rows.fetchone()] == [(1,), (2,), None]
    disk.capacity = sum(map(len, disk.files().values()))
    with pytest.raises(sqlite3.OperationalError, match="disk is full") as caught:
        connection.execute("INSERT INTO t VALUES (3, zeroblob(100000))")
    assert caught.value.sqlite_errorcode == sqlite3.SQLITE_FULL
    disk.capacity = None
    disk.arm(DiskFailure.SYNC_ERROR)
    with pytest.raises(sqlite3.OperationalError, match="disk I/O error") as caught:
        connection.execute("INSERT INTO t VALUES (3, x'00')")
    assert caught.value.sqlite_errorcode & 0xFF == sqlite3.SQLITE_IOERR
    connection.close()
    connection.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
    with pytest.raises(sqlite3.OperationalError, match="unable to open database file") as caught:
        disk.connect(Path("/nowhere/x.db"))
    assert caught.value.sqlite_errorcode & 0xFF == sqlite3.SQLITE_CANTOPEN


def test_sqlite_takes_time_and_chance_from_the_simulation() -> None:
    def ask(seed: int) -> object:
        disk = SimDisk(random.Random(seed), now_ns=lambda: 86_400_000_000_000)
        connection = disk.connect(Path("/data/x.db"))
        return connection.execute("SELECT datetime('now'), random()").fetchone()

    assert ask(1)[0] == "1970-01-02 00:00:00"
    assert ask(1) == ask(1)
    assert ask(1) != ask(2)


def test_without_apsw_a_connection_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vfs, "apsw", None)
    disk = new_disk(1)
    durable(disk, A, b"files work without it")
    with pytest.raises(LocalError, match=r"quicoll\[sim\]"):
        disk.connect(JOURNAL)


# Determinism


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_in_any_process() -> None:
    script = "import disk_sweep; print(disk_sweep.trace(7))"
    found = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    ]
    assert found == [trace(7)] * 2
    assert trace(8) != trace(7)


# The journal


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", [DiskFailure.POWER_LOSS, DiskFailure.KILL])
def test_a_journal_holds_all_that_was_acknowledged_after_a_crash_at_any_operation(
    fault: DiskFailure, seed: int
) -> None:
    for after in range(journal_operations()):
        disk = new_disk(seed)
        disk.arm(fault, after=after)
        done, ended = append_all(disk)
        assert isinstance(ended, Halted)
        disk.restart()
        assert done <= read_journal(disk) <= done + 1, (seed, after)
        assert append_all(disk) == (len(RECORDS), None)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_crash_while_it_recovers_from_a_crash_loses_nothing_either(seed: int) -> None:
    """With a log that is folded every three pages, so that crashes fall into that too."""

    def run(disk: SimDisk) -> tuple[int, BaseException | None]:
        def connect(path: Path) -> SimConnection:
            connection = SimDisk.connect(disk, path)
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            connection.execute("PRAGMA wal_autocheckpoint=3")
            return connection

        disk.connect = connect
        return append_all(disk)

    whole = new_disk(0)
    assert run(whole)[1] is None
    for first in range(whole.operations):
        disk = new_disk(1000 * seed + first)
        acknowledged = 0
        for after in (first, first % 19):
            disk.arm(DiskFailure.POWER_LOSS, after=after)
            done, ended = run(disk)
            assert ended is None or isinstance(ended, Halted)
            assert done == 0 or done >= acknowledged, (seed, first)  # 0: it did not come as far as to read
            acknowledged = max(done, acknowledged)
            disk.disarm()
            disk.restart()
        assert acknowledged <= read_journal(disk) <= acknowledged + 1, (seed, first)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("close", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("fault", [DiskFailure.SYNC_ERROR, DiskFailure.WRITE_ERROR, DiskFailure.DISK_FULL])
def test_after_a_failed_write_what_the_next_coordinator_reads_stays_true(
    fault: DiskFailure, close: bool, seed: int
) -> None:
    """The page cache may show it what is not on the disk: it must not answer members from that (Rebello et al.)."""
    for after in range(journal_operations()):
        disk = new_disk(1000 * seed + after)
        if fault is DiskFailure.DISK_FULL:
            disk.capacity = 12_000 + 600 * after
        else:
            disk.arm(fault, after=after)
        done, ended = append_all(disk, close=close)
        if ended is None:
            continue
        assert isinstance(ended, JournalError)
        disk.kill()
        disk.restart()
        disk.capacity = None
        journal = Journal.open(JOURNAL, job="job", connect=disk.connect)
        read = PREFIXES.index(journal.load())
        assert done <= read <= done + 1, (seed, after)
        crashed(disk)
        assert read_journal(disk) == read, (seed, after)
        assert disk.injected[fault] >= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_failed_sync_a_kill_and_a_power_loss_while_that_is_settled_never_give_an_untruth(seed: int) -> None:
    """Three faults within moments; the one case in which a disk that keeps its contract can leave a damaged journal."""
    for after in range(2, 20):  # as many syncs
        for later in range(14):
            disk = new_disk(10_000 * seed + 100 * after + later)
            disk.arm(DiskFailure.SYNC_ERROR, after=after)
            done, _ = append_all(disk, close=False)
            disk.kill()
            disk.restart()
            disk.arm(DiskFailure.POWER_LOSS, after=later)
            done = max(done, append_all(disk)[0])
            disk.disarm()
            disk.restart()
            found = outcome(disk)
            assert found is None or done <= found <= done + 1, (seed, after, later)


def outcome(disk: SimDisk) -> int | None:
    """How many records the journal holds; None where it names the damage. What was never true is a ValueError."""
    try:
        return read_journal(disk)
    except JournalError as error:
        message = str(error)
    assert "damaged" in message
    return None


@pytest.mark.parametrize("seed", SEEDS)
def test_on_a_lying_disk_damage_is_named_or_an_older_truth_is_read(seed: int) -> None:
    for after in range(journal_operations()):
        disk = new_disk(1000 * seed + after)
        for later in range(2):
            disk.arm(DiskFailure.LOST_SYNC, after=after % 40 + later)
        disk.arm(DiskFailure.POWER_LOSS, after=after)
        append_all(disk)
        disk.restart()
        outcome(disk)


@given(st.integers(0, 2**32))
@example(689)  # hits the version of SQLite's format
@example(725)  # hits the version of ours
@settings(derandomize=True, deadline=None, max_examples=100)
def test_rot_in_a_journal_that_was_closed_is_named_or_does_no_harm(seed: int) -> None:
    disk = new_disk(seed)
    assert append_all(disk)[1] is None
    assert disk.rot() is not None
    assert outcome(disk) in (None, len(RECORDS))


@given(st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_rot_in_the_log_of_a_killed_coordinator_gives_an_older_truth_at_worst(seed: int) -> None:
    """SQLite takes a flipped bit in its log for the end of it (docs/internals/simulation.md)."""
    disk = new_disk(seed)
    assert append_all(disk, close=False)[1] is None
    disk.kill()
    disk.restart()
    assert disk.rot() is not None
    outcome(disk)


# Checkpoints


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", [DiskFailure.POWER_LOSS, DiskFailure.KILL])
def test_the_newest_acknowledged_checkpoint_is_whole_after_a_crash_at_any_operation(
    fault: DiskFailure, seed: int
) -> None:
    for after in range(checkpoint_operations()):
        disk = new_disk(seed)
        disk.arm(fault, after=after)
        done, ended = save_all(disk)
        assert isinstance(ended, Halted)
        disk.restart()
        found = read_checkpoint(disk)
        assert done <= found <= done + 1, (seed, after)
        # and what the next process saves is durable again, whatever the dead one has left
        checkpoint.save(FOLDER, step=found + 1, tensors=tensors(found + 1), disk=disk)
        crashed(disk)
        assert read_checkpoint(disk) == found + 1, (seed, after)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", [DiskFailure.SYNC_ERROR, DiskFailure.WRITE_ERROR, DiskFailure.DISK_FULL])
def test_a_failed_save_loses_no_checkpoint_and_the_next_one_succeeds(fault: DiskFailure, seed: int) -> None:
    for after in range(checkpoint_operations()):
        disk = new_disk(1000 * seed + after)
        if fault is DiskFailure.DISK_FULL:
            disk.capacity = 300 * after
        else:
            disk.arm(fault, after=after)
        done, ended = save_all(disk)
        assert ended is None or isinstance(ended, CheckpointError)
        disk.capacity = None
        disk.disarm()
        if after % 2:
            crashed(disk)
        assert done <= read_checkpoint(disk) <= done + 1, (seed, after)
        assert save_all(disk, steps=6) == (6, None)
        crashed(disk)
        assert read_checkpoint(disk) == 6, (seed, after)


@given(st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_a_rotten_checkpoint_is_skipped_or_named(seed: int) -> None:
    disk = new_disk(seed)
    assert save_all(disk) == (4, None)
    where = disk.rot()
    assert where is not None
    assert read_checkpoint(disk) == (3 if "step-00000004" in where else 4)
    for step in (3, 4):
        checkpoint.save(FOLDER, step=step, tensors=tensors(step), disk=disk)
        ours = [name for name in disk.names(FOLDER) if name.startswith(f"step-{step:08d}")]
        disk.rot(FOLDER / ours[seed % len(ours)])
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints is whole"):
        read_checkpoint(disk)
