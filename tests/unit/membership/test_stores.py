"""What every journal is to the coordinator: one suite for SQLite's and PostgreSQL's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

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
    Scaled,
    Seeded,
    WentOn,
)
from quicoll.membership.coordinator.lease import Following, Taken
from quicoll.membership.coordinator.lessons import Lessons, NodeLesson
from quicoll.membership.journal import Journal, RecordStore
from quicoll.membership.postgresql.journal import PostgresJournal
from quicoll.membership.view import Member, View

if TYPE_CHECKING:
    from postgresql_server import Server

pytestmark = pytest.mark.slow  # it starts a server

LEASE = 30.0

Open = Callable[[str], RecordStore]


def view(view_id: int, nodes: str = "abc", *, committed: int = 0, by: int = 0) -> View:
    members = tuple(
        Member(rank=rank, node=node, incarnation=3, addresses=(("10.0.0.1", 4433),), committed_step=committed)
        for rank, node in enumerate(nodes)
    )
    return View(view_id=view_id, members=members, seed=5, committed_step=committed, committed_view=by)


RECORDS: list[JournalRecord] = [
    Seeded(5),
    Proposed(1),
    Proposed(2),
    InstalledView(view(2, "abcd", committed=90)),
    Committed(91, 2, b"\x00\xff"),
    Committed(92, 2, b""),
    Left("b"),
    Forgotten(("c", "d")),
    Noted(Lessons((NodeLesson("b", 1, 5_000_000_000, 65_000_000_000, 3 << 20),))),
    Scaled(2, ("b", "c")),
    Scaled(2),
    Proposed(3),
    InstalledView(view(3, "ac", committed=92, by=2)),
    Left("c", 133),
    Proposed(4),
    InstalledView(view(4, "a", committed=92, by=2)),
    WentOn(4),
    Committed(93, 4, b"x" * 64),
    Proposed(5),
]


def leading(server: Server, job: str) -> PostgresJournal:
    """A journal whose lease is ours; that of whoever had it before has run out."""
    tables = PostgresJournal(server.url, job=job, lease=LEASE)
    tables.open()  # which makes them
    tables.close()
    server.execute("UPDATE quicoll.leases SET until = clock_timestamp() WHERE job = $1::text", job)
    journal = PostgresJournal(server.url, job=job, lease=LEASE)
    assert isinstance(journal.take("127.0.0.1:1", Following()), Taken)
    journal.load()
    return journal


@pytest.fixture(params=["sqlite", "postgresql"])
def open_journal(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "sqlite":
        return lambda job: Journal.open(tmp_path / "journal.db", job=job)
    server = request.getfixturevalue("postgresql")
    return lambda job: leading(server, f"{request.node.name} {job}")


def test_a_new_journal_is_empty(open_journal: Open) -> None:
    journal = open_journal("job")
    assert journal.load() == History()
    journal.confirm()
    journal.close()


@pytest.mark.parametrize("count", [0, 1, 4, 8, 11, len(RECORDS)])
def test_what_was_appended_is_read_by_the_next_one_which_goes_on(open_journal: Open, count: int) -> None:
    journal = open_journal("job")
    for record in RECORDS[:count]:
        journal.append(record)
    assert journal.load() == History.of(RECORDS[:count])
    journal.close()
    journal = open_journal("job")
    assert journal.load() == History.of(RECORDS[:count])
    for record in RECORDS[count:]:
        journal.append(record)
    assert journal.load() == History.of(RECORDS)
    journal.close()


def test_a_record_that_contradicts_the_journal_is_refused_and_changes_nothing(open_journal: Open) -> None:
    journal = open_journal("job")
    journal.append(Seeded(5))
    with pytest.raises(LocalError, match="the seed is 5 already"):
        journal.append(Seeded(6))
    journal.append(Proposed(1))
    journal.close()
    journal = open_journal("job")
    assert journal.load() == History.of([Seeded(5), Proposed(1)])
    journal.close()


def test_a_closed_journal_accepts_nothing(open_journal: Open) -> None:
    journal = open_journal("job")
    journal.close()
    journal.close()
    with pytest.raises(JournalError):
        journal.append(Seeded(5))


def test_sqlites_second_opener_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    first = Journal.open(tmp_path / "journal.db", job="job")
    first.append(Seeded(5))
    with pytest.raises(JournalError, match="in use by another coordinator"):
        Journal.open(tmp_path / "journal.db", job="job")
    first.confirm()
    first.append(Proposed(1))
    first.close()


def test_postgresqls_first_leader_is_refused_once_its_lease_has_run_out_and_another_has_it(postgresql: Server) -> None:
    first = leading(postgresql, "two")
    first.append(Seeded(5))
    second = leading(postgresql, "two")
    assert second.load() == History.of([Seeded(5)])
    with pytest.raises(JournalError, match="does not lead any more"):
        first.append(Proposed(1))
    with pytest.raises(JournalError):
        first.confirm()
    second.append(Proposed(1))
    first.close()
    second.confirm()
    second.close()
