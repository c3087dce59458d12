"""SQLite on a simulated disk: its files, its locks, its chance and its clock, by way of apsw's VFS.

A connection belongs to one life of the process that opened it. After a crash or a kill every call raises Halted, and
what SQLite still does while it closes its files reaches no disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import random
import sqlite3
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError
from quicoll.sim.disk.files import Directory, File, Halted, key_of
from quicoll.sim.disk.filesystem import FileSystem

if TYPE_CHECKING:
    import apsw
    from apsw import VFS as _VfsBase
else:
    try:
        import apsw

        _VfsBase = apsw.VFS
    except ImportError:
        apsw, _VfsBase = None, object

__all__ = ["SimConnection", "demand_sqlite"]

_VFS_NAME = "quicoll-sim"
_UNIX_EPOCH_MS = 210_866_760_000_000
"""1970-01-01 as a Julian day, in milliseconds: the unit of SQLite's clock."""


def demand_sqlite() -> None:
    """Raise LocalError where there is no SQLite that can have its files on a simulated disk."""
    if apsw is None:
        raise LocalError("databases on a simulated disk need the package apsw: pip install 'quicoll[sim]'")


class SimConnection:
    """A connection to a database on a simulated disk: what the journal uses of `sqlite3.Connection`, the same errors.

    Rows are fetched at once, so that no statement is left open when the process dies.
    """

    def __init__(self, disk: FileSystem, path: Path) -> None:
        demand_sqlite()
        self._disk = disk
        self._life = disk.life
        self._running = False
        self._database: apsw.Connection | None = None
        _router()
        with self._call():
            self._database = apsw.Connection(key_of(path), vfs=_VFS_NAME)
        disk.databases.append(self)

    @property
    def in_transaction(self) -> bool:
        return self._database is not None and self._life == self._disk.life and self._database.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> SimRows:
        with self._call():
            if self._database is None:
                raise sqlite3.ProgrammingError("Cannot operate on a closed database.")
            return SimRows(self._database.execute(sql, tuple(parameters)))
        raise AssertionError("unreachable")  # for the type checker: _call never swallows an exception

    def close(self) -> None:
        with self._call():
            database, self._database = self._database, None
            if database is not None:
                self._disk.databases.remove(self)
                # What fails while the log is folded into the file is not told: SQLite closes all the same and leaves
                # the log. apsw alone passes on what its callbacks raised.
                with contextlib.suppress(apsw.Error):
                    database.close(force=True)

    def bury(self) -> None:
        """The process is dead: give SQLite's memory free. Its files ignore what it does while it closes them."""
        if not self._running and self._database is not None:
            with _running_on(self._disk, self._life):
                self._database.close(force=True)
            self._database = None

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """One call into SQLite: its errors become those of sqlite3, its death becomes Halted."""
        if self._life != self._disk.life:
            raise Halted("the process that opened this database is dead")
        self._running = True
        try:
            with _running_on(self._disk, self._life):
                yield
        except apsw.Error as error:
            if self._life == self._disk.life:
                raise _sqlite_error(error) from None
        finally:
            self._running = False
            if self._life != self._disk.life:
                self.bury()
                raise Halted("the process was ended within a call to SQLite") from None


class SimRows:
    """The rows of a statement, as `sqlite3.Cursor` gives them."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = deque(rows)

    def fetchone(self) -> Any:
        return self._rows.popleft() if self._rows else None

    def fetchall(self) -> list[Any]:
        rows = list(self._rows)
        self._rows.clear()
        return rows

    def __iter__(self) -> Iterator[Any]:
        while self._rows:
            yield self._rows.popleft()


# SQLite's side: https://www.sqlite.org/vfs.html, with os_unix.c as the model of what is synced when


class _Handle:
    """An open file of SQLite's. One of a dead process does nothing; what SQLite then concludes is thrown away."""

    def __init__(self, disk: FileSystem, file: File, *, folder: str | None) -> None:
        """folder: the directory to sync with the first sync of the file, for a log that was made just now."""
        self._disk = disk
        self._life = disk.life
        self._file = file
        self._folder = folder
        self._level = 0
        self._id = disk.new_handle()

    @property
    def _dead(self) -> bool:
        return self._life != self._disk.life

    def xRead(self, amount: int, offset: int) -> bytes:
        return b"" if self._dead else bytes(self._file.content[offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:
        if not self._dead:
            with _as_sqlite("IOERR_WRITE"):
                self._disk.write(self._file, offset, bytes(data))

    def xTruncate(self, size: int) -> None:
        if not self._dead:
            self._disk.truncate(self._file, size)

    def xSync(self, flags: int) -> None:
        if self._dead:
            return
        with _as_sqlite("IOERR_FSYNC"):
            self._disk.sync(self._file)
        if self._folder is not None:
            with _as_sqlite("IOERR_DIR_FSYNC"):
                self._disk.sync_names(self._folder)
            self._folder = None

    def xFileSize(self) -> int:
        return 0 if self._dead else len(self._file.content)

    def xLock(self, level: int) -> None:
        """Levels: 1 shared, 2 reserved, 3 pending, 4 exclusive (https://www.sqlite.org/lockingv3.html)."""
        if self._dead or level <= self._level:
            return
        limit = {1: 2, 2: 1}.get(level, 0)  # the highest level that another may hold meanwhile
        if any(held > limit for other, held in self._file.locks.items() if other != self._id):
            raise apsw.exception_for(apsw.SQLITE_BUSY)
        self._level = self._file.locks[self._id] = level

    def xUnlock(self, level: int) -> None:
        if not self._dead and level < self._level:
            self._level = self._file.locks[self._id] = level

    def xCheckReservedLock(self) -> bool:
        return any(held >= 2 for held in self._file.locks.values())

    def xClose(self) -> None:
        if not self._dead:
            self._file.locks.pop(self._id, None)

    def xFileControl(self, op: int, pointer: int) -> bool:
        return False

    def xSectorSize(self) -> int:
        return 4096

    def xDeviceCharacteristics(self) -> int:
        return int(apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE)


class _Vfs(_VfsBase):
    """The files of whichever disk a call into SQLite is running on."""

    def __init__(self) -> None:
        super().__init__(_VFS_NAME)

    def xOpen(self, name: Any, flags: list[int]) -> Any:
        disk = _Current.disk()
        if disk is None or name is None:
            return _Handle(disk or _nowhere(), File(), folder=None)  # a temporary file: in memory, without a name
        key = name.filename() if isinstance(name, apsw.URIFilename) else name
        node, folder = disk.find(key), None
        if node is None and flags[0] & apsw.SQLITE_OPEN_CREATE:
            node = File()
            with _as_sqlite("CANTOPEN"):
                disk.put(disk.vacant(Path(key)), node)
            if flags[0] & (apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL):
                folder = posixpath.dirname(key)
        if not isinstance(node, File):
            raise apsw.exception_for(apsw.SQLITE_CANTOPEN)
        flags[1] = flags[0]
        return _Handle(disk, node, folder=folder)

    def xDelete(self, name: str, syncdir: bool) -> None:
        disk = _Current.disk()
        if disk is None:
            return
        if disk.find(name) is None:
            raise apsw.exception_for(apsw.SQLITE_IOERR_DELETE_NOENT)
        disk.remove(Path(name))
        if syncdir:
            with _as_sqlite("IOERR_DIR_FSYNC"):
                disk.sync_names(posixpath.dirname(name))

    def xAccess(self, name: str, flags: int) -> bool:
        disk = _Current.disk()
        node = None if disk is None else disk.find(name)
        # an empty file does not exist, says os_unix.c: a log without bytes has nothing to recover
        return isinstance(node, Directory) or (isinstance(node, File) and bool(node.content))

    def xFullPathname(self, name: str) -> str:
        return key_of(name)

    def xCurrentTime(self) -> float:
        return self.xCurrentTimeInt64() / 86_400_000

    def xCurrentTimeInt64(self) -> int:
        disk = _Current.disk()
        return _UNIX_EPOCH_MS + (0 if disk is None else disk.now_ns() // 1_000_000)

    def xSleep(self, microseconds: int) -> int:
        return microseconds

    def xGetLastError(self) -> tuple[int, str | None]:
        return 0, None


class _Entropy(_VfsBase):
    """The system's files, with chance from the simulation: SQLite asks its default VFS only, whatever is open."""

    def __init__(self) -> None:
        super().__init__(_VFS_NAME + "-entropy", base="", makedefault=True)

    def xRandomness(self, count: int) -> bytes:
        disk = _Current.disk()
        return os.urandom(count) if disk is None else disk.random_bytes(count)


class _Current:
    """On which disk, and in which of its lives, the call into SQLite is running that is running now."""

    running: tuple[FileSystem, int] | None = None
    registered: tuple[_Vfs, _Entropy] | None = None

    @classmethod
    def disk(cls) -> FileSystem | None:
        """None for a dead process, and for one that is not simulated."""
        if cls.running is None or cls.running[1] != cls.running[0].life:
            return None
        return cls.running[0]


def _router() -> None:
    if _Current.registered is None:
        _Current.registered = (_Vfs(), _Entropy())


def _nowhere() -> FileSystem:
    return FileSystem(random.Random(0), now_ns=lambda: 0, directories=())  # noqa: S311  a simulation


@contextlib.contextmanager
def _running_on(disk: FileSystem, life: int) -> Iterator[None]:
    before, _Current.running = _Current.running, (disk, life)
    apsw.randomness(0)  # forget the state: the next that SQLite draws comes from this disk
    try:
        yield
    finally:
        _Current.running = before
        apsw.randomness(0)


@contextlib.contextmanager
def _as_sqlite(code: str) -> Iterator[None]:
    """The system's errors become SQLite's, as in os_unix.c."""
    try:
        yield
    except OSError as error:
        full = error.errno == errno.ENOSPC
        raise apsw.exception_for(getattr(apsw, f"SQLITE_{'FULL' if full else code}")) from None


_MESSAGES = {
    sqlite3.SQLITE_BUSY: "database is locked",
    sqlite3.SQLITE_IOERR: "disk I/O error",
    sqlite3.SQLITE_FULL: "database or disk is full",
    sqlite3.SQLITE_CANTOPEN: "unable to open database file",
}
"""SQLite's words for the errors that are raised here, and so come back without any."""


def _sqlite_error(error: apsw.Error) -> sqlite3.Error:
    code = int(getattr(error, "extendedresult", apsw.SQLITE_ERROR))
    kind = (
        sqlite3.DatabaseError if code & 0xFF in (apsw.SQLITE_CORRUPT, apsw.SQLITE_NOTADB) else sqlite3.OperationalError
    )
    translated = kind(str(error) or _MESSAGES.get(code & 0xFF, "SQL logic error"))
    translated.sqlite_errorcode = code
    return translated
