"""The coordinator's journal: an append that has returned survives the process, the machine and the power supply.

Where nobody will read it once the machine has stopped, as with the journal of a `quicoll run` that is removed with the
run's directory, `fsync=False` leaves the disk out: an append survives the process, however it ends, and nothing else.

SQLite, with these settings, each for a reason (https://www.sqlite.org/pragma.html, https://www.sqlite.org/wal.html):

journal_mode=WAL      one fsync per append, where a rollback journal needs several; SQLite also syncs the directory
                      when it makes the files
synchronous=FULL      the log is synced at every commit; NORMAL syncs it at checkpoints only, so that a power loss could
                      undo commits that were announced
locking_mode=EXCLUSIVE, taken at once
                      one process has the journal: a second coordinator would be a second decider. Set before the first
                      access it also lets the log do without shared memory, which network file systems do not have.
fullfsync=ON          where fsync does not reach the platter (macOS); elsewhere it changes nothing
wal_autocheckpoint    small: a log that grows has its new length synced with each append, and SQLite writes over a log
                      from its beginning once it is folded into the file. While it grew, to 1,000 pages by default, an
                      append took 0.4 to 2 ms; one in place takes 0.17

Each row carries a checksum, because SQLite itself does not see a flipped bit inside a value. A journal with damage is
refused as it stands: no row is repaired, cut off or overwritten, so that a person can still read what is there.

After a failed write the journal accepts nothing more. Whether the record is on the disk is known only to a process
that opens it anew (Rebello et al. 2020, "Can Applications Recover from fsync Failures?", USENIX ATC); nothing was
announced, so either is right.

But what the new process reads is in the page cache, and the disk may hold something else: the record of a failed fsync
may be read and not be there, and a log that SQLite removed, without a sync of the directory, may come back with a
record in it that was rolled back. Either way a power loss would change an answer that was given. So `open` settles it
before it returns: it folds the log into the file, which writes and syncs every page of it once more, and begins a new
log with a write that changes nothing, by which SQLite syncs the log's header, its emptiness and the directory.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

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
from quicoll.membership.coordinator.lessons import Lessons
from quicoll.membership.view import View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Database", "Journal", "LeaseLost", "MemoryJournal", "RecordStore", "SqlRows", "connect_sqlite"]

_APPLICATION_ID = 0x71434A31  # "qCJ1": tells `file` and us that this is ours
_SCHEMA = 3
_LOG_PAGES = 64
_PROBE_SECONDS = 0.0  # a lock is never waited for: its owner keeps it

# `facts` holds what is small and is replaced; views and commits grow, and are kept for the audit.
_TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE views (view_id INTEGER PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE commits (
    step INTEGER PRIMARY KEY, view_id INTEGER NOT NULL, digest BLOB NOT NULL, crc INTEGER NOT NULL
);
CREATE TABLE leaves (
    view_id INTEGER NOT NULL, node TEXT NOT NULL, finished INTEGER, forgotten INTEGER NOT NULL, crc INTEGER NOT NULL
);
"""


class LeaseLost(JournalError):
    """This leadership is over, and nothing is wrong with the journal: another coordinator has taken its lease, or the
    database gave no answer for as long as the lease runs. The process may stand by, and lead again by another lease.

    Attributes:
        leader: The address of who has taken it; "" where that is not known.
    """

    def __init__(self, message: str, *, path: str, leader: str = "") -> None:
        super().__init__(message, path=path)
        self.leader = leader


class RecordStore(Protocol):
    """A journal, as far as the coordinator's shell needs one. One process may append at a time.

    No call lasts for ever; each says in its error what it waited for, and since when.
    """

    def load(self) -> History:
        """The history of all records appended so far."""

    def append(self, record: JournalRecord) -> None:
        """Make the record durable before returning. Raises JournalError, after which nothing more may be decided by
        what was read from this store: only who reads the journal anew knows whether the record is in it."""

    def confirm(self) -> None:
        """Raise JournalError, after which it is as after one of `append`, unless nobody else may have appended."""

    def close(self) -> None:
        """Give it free for the next coordinator."""


class SqlRows(Protocol):
    """Rows of a statement's result."""

    def fetchone(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


class Database(Protocol):
    """What the journal needs of a connection to SQLite; `sqlite3.Connection` has it.

    Errors are sqlite3.Error, with `sqlite_errorcode`. Transactions begin where a statement says so, and nowhere else.
    """

    @property
    def in_transaction(self) -> bool: ...

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> SqlRows: ...

    def close(self) -> None: ...


def connect_sqlite(path: Path) -> sqlite3.Connection:
    """A connection to the database file on the real disk."""
    if path.is_file() and not os.access(path, os.R_OK | os.W_OK):
        # SQLite would open it for reading, and fail later with something that looks like a broken disk
        raise JournalError("no permission to read and write it", path=str(path))
    return sqlite3.connect(path, timeout=_PROBE_SECONDS, isolation_level=None)


class MemoryJournal:
    """A journal for tests: survives the coordinator that wrote it, not the process."""

    def __init__(self) -> None:
        self.records: list[JournalRecord] = []
        self._history = History()

    def load(self) -> History:
        return self._history

    def append(self, record: JournalRecord) -> None:
        self._history = self._history.apply(record)
        self.records.append(record)

    def confirm(self) -> None:
        """No other process can know of it."""

    def close(self) -> None:
        """Nothing is held."""


class Journal:
    """The journal in the file `path`; made by `open`, which takes it exclusively until `close`."""

    def __init__(self, database: Database, path: Path) -> None:
        self._database = database
        self._path = path
        self._history = History()
        self._usable = True

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        job: str,
        connect: Callable[[Path], Database] = connect_sqlite,
        fsync: bool = True,
    ) -> Journal:
        """Open the journal of `job`, or make it where there is none.

        Raises JournalError, naming the path, when it is in use, belongs to another job, was written by another version,
        is damaged, or cannot be read or written. In none of these cases is the file changed.
        connect: opens the database; whatever disk it is on, all else here is the same.
        fsync: whether an append survives the machine, too.
        """
        path = Path(path)
        with _explained(path):
            database = connect(path)
        journal = cls(database, path)
        try:
            with _explained(path):
                journal._prepare(job, fsync=fsync)
            with _explained(path, otherwise="damaged"):
                journal._history = journal._read(job)
            with _explained(path):
                journal._settle()
        except BaseException:
            database.close()
            raise
        return journal

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Journal {self._path} committed_step={self._history.committed_step}>"

    @property
    def path(self) -> Path:
        return self._path

    def load(self) -> History:
        return self._history

    def append(self, record: JournalRecord) -> None:
        # Without the context managers of the other calls: there is one with each step.
        if not self._usable:
            raise JournalError("closed, or a write has failed; open it anew to see what it holds", path=str(self._path))
        history = self._history.apply(record)  # a record that contradicts the journal is refused before the disk is
        self._usable = False
        try:
            if isinstance(record, Forgotten):
                with self._transaction():
                    self._write(record)
            else:
                self._write(record)  # one statement, which is a transaction by itself
        except _TROUBLE as error:
            raise _explain(error, self._path) from error
        self._usable = True
        self._history = history

    def confirm(self) -> None:
        """The lock is this process's until `close`."""

    def close(self) -> None:
        """Give the journal free; further calls do nothing."""
        self._usable = False
        with _explained(self._path):
            self._database.close()

    # The file

    def _prepare(self, job: str, *, fsync: bool) -> None:
        """Take the lock, check whose file it is, and make the tables in a new one."""
        database = self._database
        database.execute("PRAGMA locking_mode=EXCLUSIVE")
        database.execute(f"PRAGMA synchronous={'FULL' if fsync else 'OFF'}")
        database.execute("PRAGMA fullfsync=ON")
        database.execute(f"PRAGMA wal_autocheckpoint={_LOG_PAGES}")
        database.execute("PRAGMA trusted_schema=OFF")
        if not self._is_empty():
            self._identify()
        # The first access in exclusive mode takes the lock and keeps it; in a rollback-mode file only a write does.
        mode = database.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise JournalError(
                f"the file system does not allow a write-ahead log (SQLite says {mode})", path=str(self._path)
            )
        with self._transaction():
            if self._is_empty():
                for statement in _TABLES.split(";\n"):
                    database.execute(statement)
                database.execute(f"PRAGMA application_id={_APPLICATION_ID}")
                database.execute(f"PRAGMA user_version={_SCHEMA}")
                self._put("job", job)
        self._identify()

    def _settle(self) -> None:
        """Make durable what was read, before any of it is announced; see the head of this module."""
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with self._transaction():
            self._database.execute(f"PRAGMA user_version={_SCHEMA}")

    def _is_empty(self) -> bool:
        """Return whether the database has no table and no owner: then there is nothing in it to lose.

        Not the same as a file without bytes. The mode is written before the tables are, and a coordinator that ends
        between the two leaves a header behind, which the next one takes over.
        """
        ask = self._database.execute
        return not any(
            ask(query).fetchone()[0]
            for query in ("SELECT count(*) FROM sqlite_master", "PRAGMA application_id", "PRAGMA user_version")
        )

    def _identify(self) -> None:
        """Raise unless the file is a journal of a version that we know."""
        application = self._database.execute("PRAGMA application_id").fetchone()[0]
        schema = self._database.execute("PRAGMA user_version").fetchone()[0]
        if application != _APPLICATION_ID:
            raise JournalError("this is a database, but not a quicoll journal", path=str(self._path))
        if schema < 1:
            raise self._damaged(f"it has no schema {schema}")
        if schema != _SCHEMA:
            age = "a newer" if schema > _SCHEMA else "an older"
            raise JournalError(
                f"written by {age} quicoll (schema {schema}, this one knows {_SCHEMA}), or damaged there",
                path=str(self._path),
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            # after some errors SQLite has rolled back by itself
            if self._database.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
            raise

    # Writing

    def _write(self, record: JournalRecord) -> None:
        execute = self._database.execute
        if isinstance(record, Seeded):
            self._put("seed", str(record.seed))
        elif isinstance(record, Proposed):
            self._put("last_view_id", str(record.view_id))
        elif isinstance(record, InstalledView):
            body = msgspec.msgpack.encode(record.view)
            view_id = record.view.view_id
            execute("INSERT INTO views VALUES (?, ?, ?)", (view_id, body, _crc(view_id, body)))
        elif isinstance(record, Committed):
            row = (record.step, record.view_id, record.digest)
            execute("INSERT INTO commits VALUES (?, ?, ?, ?)", (*row, _crc(*row)))
        elif isinstance(record, Left):
            self._put_leave(record.node, record.finished, forgotten=False)
        elif isinstance(record, Forgotten):
            for node in record.nodes:
                self._put_leave(node, None, forgotten=True)
        elif isinstance(record, WentOn):
            self._put("went_on_view_id", str(record.view_id))
        elif isinstance(record, Noted):
            self._put("lessons", msgspec.json.encode(record.lessons).decode())
        elif isinstance(record, Scaled):
            self._put("scaled", msgspec.json.encode(record).decode())

    def _put_leave(self, node: str, finished: int | None, *, forgotten: bool) -> None:
        view_id = self._history.view.view_id if self._history.view is not None else 0
        row = (view_id, node, finished, int(forgotten))
        self._database.execute("INSERT INTO leaves VALUES (?, ?, ?, ?, ?)", (*row, _crc(*row)))

    def _put(self, name: str, value: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", (name, value, _crc(name, value)))

    # Reading

    def _read(self, job: str) -> History:
        found = self._database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise self._damaged(" ".join(found.split()))
        facts: dict[str, str] = dict(self._rows("SELECT name, value, crc FROM facts"))
        if facts.get("job") != job:
            raise JournalError(f"it belongs to the job {facts.get('job')!r}, not to {job!r}", path=str(self._path))
        try:
            return self._replay(facts)
        except LocalError as error:
            raise self._damaged(error.message) from error

    def _replay(self, facts: dict[str, str]) -> History:
        """Fold the rows. Raises LocalError where they contradict each other.

        The order of records across tables is not stored: it follows from the rules of History, by which a row that is
        missing or out of place is found as well.
        """
        leaves: dict[int, list[Left | Forgotten]] = {}
        rows = self._rows("SELECT view_id, node, finished, forgotten, crc FROM leaves ORDER BY rowid")
        for view_id, node, finished, forgotten in rows:
            leaves.setdefault(view_id, []).append(Forgotten((node,)) if forgotten else Left(node, finished))
        went_on_view_id = int(
            facts.get("went_on_view_id", "0")
        )  # of the last one: earlier ones change nothing any more
        history = History()
        if "seed" in facts:
            history = history.apply(Seeded(int(facts["seed"])))
        commits = self._rows("SELECT step, view_id, digest, crc FROM commits ORDER BY step")
        commit = next(commits, None)
        for view_id, body in self._rows("SELECT view_id, body, crc FROM views ORDER BY view_id"):
            view = msgspec.msgpack.decode(body, type=View)
            history = history.apply(Proposed(view_id)).apply(InstalledView(view))
            if view_id == went_on_view_id:
                history = history.apply(WentOn(view_id))
            while commit is not None and commit[1] == view_id:
                history = history.apply(Committed(*commit))
                commit = next(commits, None)
            for gone in leaves.pop(view_id, []):
                history = history.apply(gone)
        if commit is not None or leaves:
            raise LocalError("the view of a commit or of a leave is missing")
        if "lessons" in facts:
            history = history.apply(Noted(msgspec.json.decode(facts["lessons"], type=Lessons)))
        if "scaled" in facts:
            history = history.apply(msgspec.json.decode(facts["scaled"], type=Scaled))
        last_view_id = int(facts.get("last_view_id", "0"))
        if last_view_id == history.last_view_id:
            return history
        return history.apply(Proposed(last_view_id))

    def _rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        """Rows of a query whose last column is the checksum of the others, which is checked and taken off."""
        for *values, crc in self._database.execute(query):
            if _crc(*values) != crc:
                raise self._damaged(f"checksum of the row {values[0]!r} in {query.split(' FROM ')[1].split()[0]}")
            yield tuple(values)

    def _damaged(self, what: object) -> JournalError:
        return JournalError(
            f"damaged: {what}; nothing was changed, restore a copy or begin a new one", path=str(self._path)
        )


@contextlib.contextmanager
def _explained(path: Path, *, otherwise: str = "it cannot be used, or is damaged") -> Iterator[None]:
    """SQLite's and the system's errors become ours, by `_explain`."""
    try:
        yield
    except LocalError:
        raise
    except _TROUBLE as error:
        raise _explain(error, path, otherwise) from error


_TROUBLE = (sqlite3.Error, OSError, msgspec.DecodeError, ValueError, OverflowError)


def _explain(error: Exception, path: Path, otherwise: str = "it cannot be used, or is damaged") -> JournalError:
    """Return what is raised for it. otherwise: what one means that has no code of SQLite's."""
    meaning = otherwise
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code of an extended one
        meaning = _MEANINGS.get(code, otherwise)
    return JournalError(f"{meaning} ({error})", path=str(path))


_MEANINGS = {
    sqlite3.SQLITE_BUSY: "in use by another coordinator",
    sqlite3.SQLITE_LOCKED: "in use by another coordinator",
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "the disk failed",
    sqlite3.SQLITE_CORRUPT: "damaged; nothing was changed, restore a copy or begin a new one",
    sqlite3.SQLITE_NOTADB: "damaged, or not a journal; nothing was changed",
    sqlite3.SQLITE_READONLY: "it cannot be written",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_PERM: "no permission",
}


def _crc(*values: object) -> int:
    """Checksum of a row: its values with their types, so that nothing can move from one column to the next."""
    return zlib.crc32(msgspec.msgpack.encode(values))
