"""The journal: what was appended is there whatever happens, and what is not a sound journal is refused untouched."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.errors import JournalError, LocalError
from quicoll.membership.coordinator.history import (
    Committed,
    Forgotten,
    History,
    InstalledView,
    JournalRecord,
    Left,
    Noted,
    Proposed,
    Seeded,
    WentOn,
)
from quicoll.membership.coordinator.lessons import Lessons, NodeLesson
from quicoll.membership.journal import Database, Journal, MemoryJournal, connect_sqlite
from quicoll.membership.view import Member, View
from quicoll.sim.disk.disk import SimDisk


def view(view_id: int, nodes: str = "abc", *, committed: int = 0, by: int = 0) -> View:
    members = tuple(
        Member(
            rank=rank, node=node, incarnation=3, addresses=(("10.0.0.1", 4433),), site="fra", committed_step=committed
        )
        for rank, node in enumerate(nodes)
    )
    return View(view_id=view_id, members=members, seed=5, committed_step=committed, committed_view=by)


RECORDS: list[JournalRecord] = [
    Seeded(5),
    Proposed(1),
    Proposed(2),
    InstalledView(view(2, committed=90)),
    Committed(91, 2, b"\x00\xff"),
    Committed(92, 2, b""),
    Left("b"),
    Forgotten(("a", "c")),
    Noted(Lessons((NodeLesson("b", 1, 5_000_000_000, 65_000_000_000, 3 << 20),))),
    Proposed(3),
    InstalledView(view(3, "ac", committed=92, by=2)),
    Committed(93, 3, b"x" * 64),
    Left("c", 133),
    Proposed(4),
    InstalledView(view(4, "a", committed=93, by=3)),
    WentOn(4),
    Left("a", 7),
    Proposed(5),
    InstalledView(view(5, "ab", committed=93, by=3)),
    Left("b", 134),
    Proposed(6),
    InstalledView(view(6, "a", committed=93, by=3)),
    WentOn(6),
    Committed(94, 6, b""),
    Left("a"),
    Left("a", 135),
    Left("z", 135),
    Noted(Lessons((NodeLesson("b", 9, 0, 1, 0),), ("a", "b"), ("b",), ("a",), ("a", "b"))),
    Proposed(7),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


Connect = Callable[[Path], Database]


@pytest.fixture(params=["real", "simulated"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """The same tests on both disks, so that the simulated one cannot drift."""
    if request.param == "real":
        return connect_sqlite
    return SimDisk(random.Random(1), now_ns=lambda: 0, directories=(tmp_path,)).connect


def written(
    path: Path, records: list[JournalRecord] = RECORDS, *, job: str = "job", connect: Connect = connect_sqlite
) -> Path:
    with Journal.open(path, job=job, connect=connect) as journal:
        for record in records:
            journal.append(record)
    return path


def test_a_new_journal_is_empty(path: Path, connect: Connect) -> None:
    with Journal.open(path, job="job", connect=connect) as journal:
        assert journal.load() == History()
        assert journal.path == path


@pytest.mark.parametrize("count", range(len(RECORDS) + 1))
def test_every_prefix_of_records_is_loaded_as_it_was_written(path: Path, connect: Connect, count: int) -> None:
    """The coordinator may end after any write; see also test_membership_cluster."""
    written(path, RECORDS[:count], connect=connect)
    with Journal.open(path, job="job", connect=connect) as journal:
        assert journal.load() == History.of(RECORDS[:count])
        for record in RECORDS[count:]:
            journal.append(record)
        assert journal.load() == History.of(RECORDS)


@pytest.mark.parametrize("first", ["commit", "leave"])
def test_a_node_beside_the_view_may_leave_before_a_commit_or_after_it(path: Path, connect: Connect, first: str) -> None:
    """The tables do not keep which came first; what follows is the same."""
    held = [Proposed(1), InstalledView(view(1, committed=90)), Committed(91, 1, b"")]
    last: list[JournalRecord] = [Committed(92, 2, b""), Left("c")]
    records = [Seeded(5), *held, Proposed(2), InstalledView(view(2, "ab", committed=91, by=1))]
    records += last if first == "commit" else last[::-1]
    written(path, records, connect=connect)
    with Journal.open(path, job="job", connect=connect) as journal:
        assert journal.load() == History.of(records)
        assert journal.load().holders == ("a", "b")


def test_the_memory_journal_agrees_with_the_one_on_disk() -> None:
    journal = MemoryJournal()
    for record in RECORDS:
        journal.append(record)
    assert journal.load() == History.of(RECORDS)
    assert journal.records == RECORDS
    with pytest.raises(LocalError):
        journal.append(Proposed(7))
    journal.close()
    assert journal.load() == History.of(RECORDS)


def test_each_append_is_synced_to_the_disk_before_it_returns(path: Path, connect: Connect) -> None:
    """Not visible from outside without pulling the plug, so the settings that promise it are asked for."""
    with Journal.open(path, job="job", connect=connect) as journal:
        ask = journal._database.execute
        assert ask("PRAGMA journal_mode").fetchone() == ("wal",)
        assert ask("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert ask("PRAGMA locking_mode").fetchone() == ("exclusive",)
        assert not path.with_name(path.name + "-shm").exists()  # no shared memory: a second process must not get in


def test_where_the_disk_is_left_out_nothing_is_synced(path: Path, connect: Connect) -> None:
    with Journal.open(path, job="job", connect=connect, fsync=False) as journal:
        assert journal._database.execute("PRAGMA synchronous").fetchone() == (0,)  # OFF


WRITER = """
import sys
from quicoll.membership.coordinator.history import Committed, InstalledView, Proposed, Seeded
from quicoll.membership.coordinator.lessons import Lessons, NodeLesson
from quicoll.membership.journal import Journal
from quicoll.membership.view import Member, View
journal = Journal.open(sys.argv[1], job="job", fsync=sys.argv[2] == "True")
view = View(view_id=1, members=(Member(rank=0, node="a", incarnation=1),), seed=5, committed_step=0, committed_view=0)
for record in (Seeded(5), Proposed(1), InstalledView(view)):
    journal.append(record)
step = 0
while True:
    step += 1
    journal.append(Committed(step, 1, b"%d" % step))
    print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "fsync"), [(1, True), (7, True), (40, True), (7, False), (200, False)])
def test_a_killed_process_loses_nothing_that_it_has_announced(path: Path, steps: int, fsync: bool) -> None:
    command = [sys.executable, "-c", WRITER, str(path), str(fsync)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        announced = [int(writer.stdout.readline()) for _ in range(steps)][-1]
        with pytest.raises(JournalError, match="in use by another coordinator"):
            Journal.open(path, job="job")
        writer.kill()
        announced = max([announced, *map(int, writer.stdout.read().split("\n")[:-1])])
    with Journal.open(path, job="job") as journal:
        history = journal.load()
        assert history.committed_step >= announced >= steps
        assert history.committed_digest == b"%d" % history.committed_step
        journal.append(Committed(history.committed_step + 1, 1, b"on"))


def test_a_second_coordinator_is_refused_until_the_first_has_ended(path: Path, connect: Connect) -> None:
    first = Journal.open(path, job="job", connect=connect)
    with pytest.raises(JournalError, match="in use by another coordinator") as caught:
        Journal.open(path, job="job", connect=connect)
    assert str(path) in str(caught.value)
    first.append(Seeded(5))
    first.close()
    with Journal.open(path, job="job", connect=connect) as second:
        assert second.load().seed == 5


def test_another_jobs_journal_is_refused(path: Path, connect: Connect) -> None:
    written(path, job="other", connect=connect)
    with pytest.raises(JournalError, match="it belongs to the job 'other', not to 'job'") as caught:
        Journal.open(path, job="job", connect=connect)
    assert caught.value.path == str(path)
    with Journal.open(path, job="other", connect=connect) as journal:
        assert journal.load() == History.of(RECORDS)


@pytest.mark.parametrize(("schema", "age"), [(2, "an older"), (4, "a newer")])
def test_another_schema_is_refused(path: Path, schema: int, age: str) -> None:
    written(path)
    alter(path, f"PRAGMA user_version={schema}")
    with pytest.raises(JournalError, match=rf"written by {age} quicoll \(schema {schema}, this one knows 3\)"):
        Journal.open(path, job="job")


def test_some_other_database_is_refused_and_left_as_it_is(path: Path) -> None:
    alter(path, "CREATE TABLE precious (x)")
    before = path.read_bytes()
    with pytest.raises(JournalError, match="not a quicoll journal"):
        Journal.open(path, job="job")
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(path: Path) -> None:
    path.write_bytes(b"dear diary, " * 1000)
    with pytest.raises(JournalError, match="damaged, or not a journal"):
        Journal.open(path, job="job")
    assert path.read_bytes() == b"dear diary, " * 1000


def test_a_header_without_tables_becomes_a_journal(path: Path) -> None:
    """A coordinator leaves one that was killed between setting the mode and making the tables."""
    alter(path, "PRAGMA journal_mode=WAL")
    assert path.stat().st_size > 0
    with Journal.open(path, job="job") as journal:
        assert journal.load() == History()


def test_an_empty_file_becomes_a_journal(path: Path) -> None:
    """mktemp makes one, and so does a coordinator that was killed before its first write."""
    path.touch()
    with Journal.open(path, job="job") as journal:
        assert journal.load() == History()


@pytest.mark.parametrize("where", ["missing/journal.db", "."])
def test_a_path_that_cannot_be_a_file_is_named(tmp_path: Path, connect: Connect, where: str) -> None:
    with pytest.raises(JournalError, match="it cannot be opened") as caught:
        Journal.open(tmp_path / where, job="job", connect=connect)
    assert str(tmp_path) in str(caught.value)


def alter(path: Path, *statements: str) -> None:
    database = sqlite3.connect(path)
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE commits SET digest = x'0000' WHERE step = 91",
        "UPDATE commits SET view_id = 3 WHERE step = 92",
        "UPDATE commits SET step = 99 WHERE step = 93",
        "DELETE FROM commits WHERE step = 92",
        # The newest rows can be missing without a contradiction: only a later view shows that they were there.
        "DELETE FROM commits WHERE step = 93",
        "UPDATE leaves SET finished = NULL WHERE node = 'z'",
        "DELETE FROM views WHERE view_id = 2",
        "DELETE FROM views WHERE view_id = 3",
        "UPDATE views SET body = substr(body, 1, 20) WHERE view_id = 2",
        "UPDATE leaves SET node = 'x' WHERE node = 'b'",
        "UPDATE facts SET value = '6' WHERE name = 'seed'",
        "UPDATE facts SET value = '{}' WHERE name = 'lessons'",
        "UPDATE facts SET value = '1' WHERE name = 'last_view_id'",
        "DELETE FROM facts WHERE name = 'last_view_id'",
        "DROP TABLE leaves",
    ],
)
def test_rows_that_were_changed_or_lost_are_found(path: Path, statement: str) -> None:
    written(path)
    alter(path, statement)
    before = path.read_bytes()
    with pytest.raises(JournalError) as caught:
        Journal.open(path, job="job")
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("sound") / "journal.db")


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_flipped_bit_is_found_or_does_no_harm(sound: Path, data: st.DataObject) -> None:
    """A byte of unused space may change unseen; a record may not."""
    content = bytearray(sound.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    damaged = sound.with_name("damaged.db")
    damaged.write_bytes(content)
    found = None
    try:
        with Journal.open(damaged, job="job") as journal:
            found = journal.load()
    except JournalError as error:
        message = str(error)
    else:
        message = str(damaged)
    for file in sound.parent.glob("damaged.db*"):
        file.unlink()
    assert found in (None, History.of(RECORDS))
    assert str(damaged) in message


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_a_file_that_was_cut_off_is_refused(sound: Path, tmp_path: Path, pages: int) -> None:
    cut = tmp_path / "cut.db"
    cut.write_bytes(sound.read_bytes()[: -4096 * pages])
    with pytest.raises(JournalError, match="damaged"):
        Journal.open(cut, job="job")


def fill(journal: Journal) -> None:
    """From now on SQLite gets no more space, as on a full disk."""
    pages = journal._database.execute("PRAGMA page_count").fetchone()[0]
    journal._database.execute(f"PRAGMA max_page_count={pages}")


def commit_for_ever(journal: Journal) -> None:
    for step in itertools.count(journal.load().committed_step + 1):
        journal.append(Committed(step, 2, b"x" * 64))


def test_a_full_disk_is_told_and_loses_nothing(path: Path, connect: Connect) -> None:
    written(path, RECORDS[:4], connect=connect)
    with Journal.open(path, job="job", connect=connect) as journal:
        fill(journal)
        with pytest.raises(JournalError, match="the disk is full") as caught:
            commit_for_ever(journal)
        announced = journal.load().committed_step
        assert str(path) in str(caught.value)
        # the coordinator is ahead of its journal now, and must not go on
        with pytest.raises(JournalError, match="open it anew"):
            journal.append(Committed(announced + 1, 2, b""))
    with Journal.open(path, job="job", connect=connect) as journal:
        assert journal.load().committed_step == announced
        journal.append(Committed(announced + 1, 2, b""))


def test_a_write_that_fails_is_the_last(path: Path, connect: Connect) -> None:
    """After a failed fsync nobody knows what is on the disk (Rebello et al. 2020); the process has to end."""
    journal = Journal.open(path, job="job", connect=connect)
    journal._database.execute("PRAGMA query_only=ON")
    with pytest.raises(JournalError, match="it cannot be written"):
        journal.append(Seeded(5))
    journal._database.execute("PRAGMA query_only=OFF")
    with pytest.raises(JournalError, match="open it anew"):
        journal.append(Seeded(5))
    journal.close()


def test_a_record_that_contradicts_the_journal_is_refused_and_does_no_harm(path: Path, connect: Connect) -> None:
    with Journal.open(path, job="job", connect=connect) as journal:
        journal.append(Seeded(5))
        with pytest.raises(LocalError, match="the seed is 5 already"):
            journal.append(Seeded(6))
        journal.append(Proposed(1))
    with Journal.open(path, job="job", connect=connect) as journal:
        assert journal.load() == History.of([Seeded(5), Proposed(1)])


def test_a_closed_journal_takes_nothing(path: Path, connect: Connect) -> None:
    journal = Journal.open(path, job="job", connect=connect)
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.append(Seeded(5))


def test_a_journal_that_is_not_ours_to_write_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may write everything; so the system's answer is given here."""
    written(path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(JournalError, match="no permission to read and write it"):
        Journal.open(path, job="job")


def test_a_copy_made_after_the_end_is_a_whole_journal(path: Path, tmp_path: Path) -> None:
    written(path)
    assert list(tmp_path.iterdir()) == [path]  # the log was folded into the file
    copy = tmp_path / "copy.db"
    shutil.copy(path, copy)
    with Journal.open(copy, job="job") as journal:
        assert journal.load() == History.of(RECORDS)


def test_a_long_run_stays_small_in_memory(path: Path, connect: Connect) -> None:
    """One entry for all steps of a view, however many they are."""
    with Journal.open(path, job="job", connect=connect) as journal:
        for record in RECORDS[:4]:
            journal.append(record)
        for step in range(91, 391):
            journal.append(Committed(step, 2, b"d"))
    with Journal.open(path, job="job", connect=connect) as journal:
        assert journal.load().commits == ((2, 91, 390),)
