"""A disk in memory that fails as disks do: the real checkpoint code, journal code and SQLite run on it.

What is durable, and what only looks so
---------------------------------------
A file has two contents: what is read (the page cache) and what is on the platter. A write changes the first and is
pending for the second until the file is synced. Names are the same, one level up: a directory's names as they are
seen, and as they are on the platter until the directory is synced. A rename is one pending change, so it is atomic.

`crash()` is a power loss. Pending writes reach the platter in order, each wholly, not at all, or torn: any subset of
its 512-byte sectors, and perhaps zeros where the file had grown before its data came. Each pending change of a name
arrives or not. What was synced is never touched, not even within a sector that a pending write shares with it: SQLite
asks no more than that either ("powersafe overwrite", https://www.sqlite.org/psow.html). `kill()` ends the process
alone: the page cache lives, the locks are gone.

After both nothing works until `restart()`: whatever still runs of the dead process (an `except` or `finally` block, a
finalizer, SQLite closing its files) raises `Halted` or is ignored, and changes nothing. Halted is no Exception, for the
same reason as KeyboardInterrupt: no code must go on after it.

Faults (`arm`, `capacity`, `rot`)
---------------------------------
WRITE_ERROR   EIO; the first sectors of the write may have been taken
SYNC_ERROR    EIO; pending writes count as clean from then on, though only part of them reached the platter, while the
              page cache keeps them all: no later sync writes them (ext4, XFS; Rebello et al. 2020, "Can Applications
              Recover from fsync Failures?", USENIX ATC). Until the power goes nobody can see which are missing.
              Names stay pending: they are in the journal of the file system, which stops rather than forget them.
DISK_FULL     ENOSPC once the files hold `capacity` bytes; the write is taken as far as it fits
LOST_SYNC     a sync that returns and has done nothing: beyond the contract, no program can be right on such a disk
BIT_ROT       a bit of a file flips on the platter: likewise
POWER_LOSS, KILL  the crash comes in the middle of an operation: it has been asked for, and is pending

A run with LOST_SYNC or BIT_ROT has `beyond_contract` set. Then what was acknowledged may be lost, and a checker has to
ask for less: damage is named, or what is read is something that once was true.

Determinism: all chance is drawn from the `rng` given, all time from `now_ns`, SQLite's too. Its generator is one per
process; it is seeded anew for each statement. So a process may have many disks, but use them from one thread only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import random
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError

if TYPE_CHECKING:
    import apsw
    from apsw import VFS as _VfsBase
else:
    try:
        import apsw

        _VfsBase = apsw.VFS
    except ImportError:
        apsw, _VfsBase = None, object

__all__ = ["SECTOR", "DiskFault", "Halted", "SimConnection", "SimDisk"]

SECTOR = 512
"""Bytes that a disk writes as one; what is larger may be torn."""

_VFS_NAME = "quicoll-sim"
_UNIX_EPOCH_MS = 210_866_760_000_000
"""1970-01-01 as a Julian day, in milliseconds: the unit of SQLite's clock."""


class Halted(BaseException):
    """The simulated process is dead: this call, and all that follow until `SimDisk.restart`, did nothing."""


class DiskFault(StrEnum):
    """Kinds of fault; the head of this module says what each does."""

    WRITE_ERROR = "disk_write_error"
    SYNC_ERROR = "disk_sync_error"
    DISK_FULL = "disk_full"
    LOST_SYNC = "disk_lost_sync"
    BIT_ROT = "disk_bit_rot"
    POWER_LOSS = "disk_power_loss"
    KILL = "disk_kill"


_ARMABLE = {
    DiskFault.WRITE_ERROR: ("write",),
    DiskFault.SYNC_ERROR: ("sync",),
    DiskFault.LOST_SYNC: ("sync",),
    DiskFault.POWER_LOSS: ("write", "sync", "name"),
    DiskFault.KILL: ("write", "sync", "name"),
}
"""Which operations each can strike."""


@dataclass(frozen=True, slots=True)
class _Write:
    """A pending change of a file: bytes at an offset, or a cut to that length where data is None."""

    offset: int
    data: bytes | None

    def apply(self, content: bytearray) -> None:
        if self.data is None:
            del content[self.offset :]
            return
        if len(content) < self.offset:
            content.extend(bytes(self.offset - len(content)))
        content[self.offset : self.offset + len(self.data)] = self.data

    def sectors(self) -> Iterator[_Write]:
        """The same in parts that a disk writes as one."""
        if self.data is None:
            yield self
            return
        end = self.offset + len(self.data)
        start = self.offset
        while start < end:
            stop = min(end, (start // SECTOR + 1) * SECTOR)
            yield _Write(start, self.data[start - self.offset : stop - self.offset])
            start = stop


@dataclass(slots=True, eq=False)
class _File:
    """content: what is read. durable: what is on the platter. locks: of open handles, in order of opening."""

    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[_Write] = field(default_factory=list)
    written_ns: int = 0
    locks: dict[int, int] = field(default_factory=dict)


class _Directory:
    """A directory has nothing but its name here: the tree is a mapping of whole paths."""


_Node = _File | _Directory


@dataclass(frozen=True, slots=True)
class _Rename:
    """A pending change of names in one directory; None takes the name away. All of it arrives, or nothing."""

    folder: str
    names: tuple[tuple[str, _Node | None], ...]

    def apply(self, tree: dict[str, _Node]) -> None:
        for name, node in self.names:
            if node is None:
                tree.pop(name, None)
            else:
                tree[name] = node


class SimDisk:
    """A file system in memory; it is a `quicoll.disk.Disk`, and `connect` opens SQLite databases on it.

    rng: all chance. now_ns: the clock. directories: there from the beginning, durably, with all above them.
    capacity: bytes that its files may hold together; None is no limit. Change it at any time.
    operations: writes, syncs and changes of names so far; `arm` counts by them.
    on_down: called when an armed crash has come, before the operation that it cut off raises Halted.
    injected: by value of DiskFault, how often each struck; "disk_torn_write", "disk_lost_write": of a crash.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        now_ns: Callable[[], int],
        directories: Iterable[str | os.PathLike[str]] = ("/data",),
        capacity: int | None = None,
    ) -> None:
        self.capacity = capacity
        self.operations = 0
        self.on_down: Callable[[DiskFault], None] | None = None
        self.injected = dict.fromkeys([*(fault.value for fault in DiskFault), "disk_torn_write", "disk_lost_write"], 0)
        self._rng = rng
        # What SQLite draws depends on its version; that must not move the faults that a seed stands for.
        self._names_rng = random.Random(rng.getrandbits(64))  # noqa: S311  a simulation
        self._now_ns = now_ns
        self._tree: dict[str, _Node] = {"/": _Directory()}
        self._pending: list[_Rename] = []
        self._armed: list[tuple[DiskFault, int]] = []
        self._boot = 0
        self._down = False
        self._handles = 0
        self._connections: list[SimConnection] = []
        for directory in directories:
            self._tree.update((folder, _Directory()) for folder in _ancestors(_key(directory)))
        self._durable_tree = dict(self._tree)

    # Faults

    def arm(self, fault: DiskFault, *, after: int = 0) -> None:
        """Let the fault strike, once, the operation that comes after `after` others of those that it can strike."""
        if fault not in _ARMABLE:
            raise LocalError(f"{fault} is not armed: set SimDisk.capacity, or call rot()")
        if after < 0:
            raise LocalError(f"after is 0 or more, not {after}")
        self._armed.append((fault, after))

    def disarm(self) -> None:
        """Take back all that was armed and has not struck; the capacity stays."""
        self._armed.clear()

    @property
    def beyond_contract(self) -> bool:
        """Whether the disk has done what no program can be right on: see the head of this module."""
        return bool(self.injected[DiskFault.LOST_SYNC] or self.injected[DiskFault.BIT_ROT])

    @property
    def is_down(self) -> bool:
        """Between a crash and `restart`."""
        return self._down

    def rot(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Flip one bit on the platter of the file, or of any; return where ("path:offset"), None if all are empty.

        The page cache of the file is dropped as far as it is clean, so that the flipped bit is what is read next.
        """
        names = [_key(path)] if path is not None else sorted(self._tree)
        found = [(name, node) for name in names if isinstance(node := self._tree.get(name), _File) and node.durable]
        if not found:
            return None
        name, file = found[self._rng.randrange(len(found))]
        place = self._rng.randrange(len(file.durable))
        file.durable[place] ^= 1 << self._rng.randrange(8)
        file.content[:] = file.durable
        for write in file.pending:
            write.apply(file.content)
        self.injected[DiskFault.BIT_ROT] += 1
        return f"{name}:{place}"

    def crash(self) -> None:
        """Power loss; see the head of this module. The disk is down until `restart`."""
        self.injected[DiskFault.POWER_LOSS] += 1
        self._halt()
        # Nothing, all, and a mix: a mix alone would hardly ever lose everything of many writes, or nothing.
        luck = (0.0, 1.0, 0.5, 0.5)[self._rng.randrange(4)]
        files = [node for node in self._durable_tree.values() if isinstance(node, _File)]
        for change in self._pending:
            if self._rng.random() < luck:
                change.apply(self._durable_tree)
            files.extend(node for _, node in change.names if isinstance(node, _File))
        self._pending.clear()
        for file in files:
            self._write_back(file, luck)
            file.content[:] = file.durable
        tree: dict[str, _Node] = {}
        for name in sorted(self._durable_tree):  # a directory comes before what is in it
            if name == "/" or isinstance(tree.get(posixpath.dirname(name)), _Directory):
                tree[name] = self._durable_tree[name]
        self._tree, self._durable_tree = tree, dict(tree)

    def kill(self) -> None:
        """The process ends at once, the system goes on: nothing that was written is lost. Down until `restart`."""
        self.injected[DiskFault.KILL] += 1
        self._halt()

    def restart(self) -> None:
        """A new process begins, with what the crash has left. Does nothing when the disk is not down."""
        self._down = False

    # quicoll.disk.Disk

    def make_directory(self, path: Path) -> None:
        self._put(self._vacant(path), _Directory())

    def sync_directory(self, path: Path) -> None:
        self._check()
        name = _key(path)
        if not isinstance(self._node(name), _Directory):
            raise _error(errno.ENOTDIR, name)
        self._sync_names(name)

    def create(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        file = _File(written_ns=self._now_ns())
        self._put(self._vacant(path), file)
        offset = 0
        for chunk in chunks:
            self._write(file, offset, bytes(chunk))
            offset += len(chunk)
        self._sync(file)

    def replace(self, source: Path, target: Path) -> None:
        self._check()
        old, new = _key(source), _key(target)
        if posixpath.dirname(old) != posixpath.dirname(new):
            raise _error(errno.EXDEV, new)  # two directories need two syncs: no code here has a use for that
        if isinstance(self._tree.get(new), _Directory):
            raise _error(errno.EISDIR, new)
        node = self._node(old)
        self._change(_Rename(posixpath.dirname(old), ((old, None), (new, node))))

    def remove(self, path: Path) -> None:
        name = _key(path)
        self._file(path)
        self._change(_Rename(posixpath.dirname(name), ((name, None),)))

    def names(self, path: Path) -> list[str]:
        self._check()
        name = _key(path)
        if not isinstance(self._node(name), _Directory):
            raise _error(errno.ENOTDIR, name)
        return sorted(posixpath.basename(entry) for entry in self._tree if posixpath.dirname(entry) == name != entry)

    def read(self, path: Path) -> bytes:
        return bytes(self._file(path).content)

    def age_s(self, path: Path) -> float:
        return (self._now_ns() - self._file(path).written_ns) / 1e9

    def token(self) -> str:
        return f"{self._names_rng.getrandbits(32):08x}"

    # SQLite

    def connect(self, path: Path) -> SimConnection:
        """Open a SQLite database, as `quicoll.membership.journal.connect_sqlite` does on the real disk.

        Raises LocalError when apsw, the wrapper of SQLite through which its files can be replaced, is not installed.
        """
        if apsw is None:
            raise LocalError("databases on a simulated disk need the package apsw: pip install 'quicoll[sim]'")
        self._check()
        return SimConnection(self, path)

    # What a test looks at

    def files(self) -> dict[str, bytes]:
        """All files as they are read now, by path in order; works while the disk is down, and counts as nothing."""
        return {name: bytes(node.content) for name, node in sorted(self._tree.items()) if isinstance(node, _File)}

    def __repr__(self) -> str:
        state = "down" if self._down else "up"
        return f"<SimDisk {state} operations={self.operations} files={len(self.files())} pending={self._unsynced()}>"

    # Operations: each is counted, may be struck, and is pending afterwards

    def _strike(self, kind: str) -> tuple[DiskFault | None, DiskFault | None]:
        """Count an operation of the kind; the fault and the crash, of those armed, whose turn it is."""
        self.operations += 1
        if not self._armed:
            return None, None
        fault = crash = None
        left: list[tuple[DiskFault, int]] = []
        for armed, after in self._armed:
            if kind not in _ARMABLE[armed]:
                left.append((armed, after))
            elif after:
                left.append((armed, after - 1))
            elif armed in (DiskFault.POWER_LOSS, DiskFault.KILL):
                crash = crash or armed
            else:
                fault = fault or armed
        self._armed = left
        if fault is not None:
            self.injected[fault] += 1
        return fault, crash

    def _finish(self, crash: DiskFault | None) -> None:
        if crash is None:
            return
        if crash is DiskFault.KILL:
            self.kill()
        else:
            self.crash()
        if self.on_down is not None:
            self.on_down(crash)
        raise Halted("the process was ended in the middle of an operation of the disk")

    def _write(self, file: _File, offset: int, data: bytes) -> None:
        fault, crash = self._strike("write")
        room = None if self.capacity is None else self.capacity - self._used() + len(file.content) - offset
        taken, code = data, 0
        if fault is DiskFault.WRITE_ERROR:
            taken, code = data[: self._rng.randrange(len(data) // SECTOR + 1) * SECTOR], errno.EIO
        elif room is not None and offset + len(data) > len(file.content) and room < len(data):
            self.injected[DiskFault.DISK_FULL] += 1
            taken, code = data[: max(room, 0)], errno.ENOSPC
        if taken:
            write = _Write(offset, taken)
            write.apply(file.content)
            file.pending.append(write)
            file.written_ns = self._now_ns()
        self._finish(crash)
        if code:
            raise _error(code)

    def _truncate(self, file: _File, size: int) -> None:
        _, crash = self._strike("write")
        write = _Write(size, None)
        write.apply(file.content)
        file.pending.append(write)
        self._finish(crash)

    def _sync(self, file: _File) -> None:
        fault, crash = self._strike("sync")
        self._finish(crash)
        if fault is DiskFault.SYNC_ERROR:
            self._write_back(file, 0.5)
            raise _error(errno.EIO)
        if fault is not DiskFault.LOST_SYNC:
            for write in file.pending:
                write.apply(file.durable)
            file.pending.clear()

    def _sync_names(self, folder: str) -> None:
        fault, crash = self._strike("sync")
        self._finish(crash)
        if fault is DiskFault.LOST_SYNC:
            return
        if fault is not None:
            raise _error(errno.EIO, folder)  # names stay pending; see the head of this module
        for change in self._pending:
            if change.folder == folder:
                change.apply(self._durable_tree)
        self._pending = [change for change in self._pending if change.folder != folder]

    def _put(self, name: str, node: _Node) -> None:
        self._change(_Rename(posixpath.dirname(name), ((name, node),)))

    def _change(self, change: _Rename) -> None:
        _, crash = self._strike("name")
        change.apply(self._tree)
        self._pending.append(change)
        self._finish(crash)

    # Parts

    def _check(self) -> None:
        if self._down:
            raise Halted("the disk is down: the process that calls is dead, or SimDisk.restart() was forgotten")

    def _node(self, name: str) -> _Node:
        node = self._tree.get(name)
        if node is None:
            # the system tells a missing name from one below a file
            above = self._tree.get(posixpath.dirname(name))
            raise _error(errno.ENOTDIR if isinstance(above, _File) else errno.ENOENT, name)
        return node

    def _file(self, path: Path) -> _File:
        self._check()
        node = self._node(_key(path))
        if not isinstance(node, _File):
            raise _error(errno.EISDIR, str(path))
        return node

    def _vacant(self, path: Path) -> str:
        """The path's name in the tree, where something new can be made."""
        self._check()
        name = _key(path)
        if name in self._tree:
            raise _error(errno.EEXIST, name)
        if not isinstance(self._node(posixpath.dirname(name)), _Directory):
            raise _error(errno.ENOTDIR, name)
        return name

    def _used(self) -> int:
        return sum(len(node.content) for node in self._tree.values() if isinstance(node, _File))

    def _unsynced(self) -> int:
        files = [node for node in self._tree.values() if isinstance(node, _File)]
        return len(self._pending) + sum(len(file.pending) for file in files)

    def _write_back(self, file: _File, luck: float) -> None:
        """What reaches the platter of what is pending when nobody can wait for it; the rest counts as clean."""
        for write in file.pending:
            if self._rng.random() < luck:
                write.apply(file.durable)
            elif luck == 0.0 or write.data is None or self._rng.random() < 0.5:
                self.injected["disk_lost_write"] += 1
            else:
                self.injected["disk_torn_write"] += 1
                end = write.offset + len(write.data)
                if len(file.durable) < end and self._rng.random() < 0.5:
                    file.durable.extend(bytes(end - len(file.durable)))  # its length came before its data
                for sector in write.sectors():
                    if self._rng.random() < 0.5:
                        sector.apply(file.durable)
        file.pending.clear()

    def _halt(self) -> None:
        self._boot += 1
        self._down = True
        self._armed.clear()
        for node in self._tree.values():
            if isinstance(node, _File):
                node.locks.clear()
        connections, self._connections = self._connections, []
        for connection in connections:
            connection._bury()


class SimConnection:
    """A connection to a database on a simulated disk: what the journal uses of `sqlite3.Connection`, the same errors.

    Rows are fetched at once, so that no statement is left open when the process dies.
    """

    def __init__(self, disk: SimDisk, path: Path) -> None:
        self._disk = disk
        self._boot = disk._boot
        self._running = False
        self._database: apsw.Connection | None = None
        _router()
        with self._call():
            self._database = apsw.Connection(_key(path), vfs=_VFS_NAME)
        disk._connections.append(self)

    @property
    def in_transaction(self) -> bool:
        return self._database is not None and self._boot == self._disk._boot and self._database.in_transaction

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
                self._disk._connections.remove(self)
                # What fails while the log is folded into the file is not told: SQLite closes all the same and leaves
                # the log. apsw alone passes on what its callbacks raised.
                with contextlib.suppress(apsw.Error):
                    database.close(force=True)

    def _bury(self) -> None:
        """The process is dead: give SQLite's memory free. Its files ignore what it does while it closes them."""
        if not self._running and self._database is not None:
            with _running_on(self._disk, self._boot):
                self._database.close(force=True)
            self._database = None

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """One call into SQLite: its errors become those of sqlite3, its death becomes Halted."""
        if self._boot != self._disk._boot:
            raise Halted("the process that opened this database is dead")
        self._running = True
        try:
            with _running_on(self._disk, self._boot):
                yield
        except apsw.Error as error:
            if self._boot == self._disk._boot:
                raise _sqlite_error(error) from None
        finally:
            self._running = False
            if self._boot != self._disk._boot:
                self._bury()
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

    def __init__(self, disk: SimDisk, file: _File, *, folder: str | None) -> None:
        """folder: the directory to sync with the first sync of the file, for a log that was made just now."""
        self._disk = disk
        self._boot = disk._boot
        self._file = file
        self._folder = folder
        self._level = 0
        disk._handles += 1
        self._id = disk._handles

    @property
    def _dead(self) -> bool:
        return self._boot != self._disk._boot

    def xRead(self, amount: int, offset: int) -> bytes:
        return b"" if self._dead else bytes(self._file.content[offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:
        if not self._dead:
            with _as_sqlite("IOERR_WRITE"):
                self._disk._write(self._file, offset, bytes(data))

    def xTruncate(self, size: int) -> None:
        if not self._dead:
            self._disk._truncate(self._file, size)

    def xSync(self, flags: int) -> None:
        if self._dead:
            return
        with _as_sqlite("IOERR_FSYNC"):
            self._disk._sync(self._file)
        if self._folder is not None:
            with _as_sqlite("IOERR_DIR_FSYNC"):
                self._disk._sync_names(self._folder)
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
            return _Handle(disk or _nowhere(), _File(), folder=None)  # a temporary file: in memory, without a name
        key = name.filename() if isinstance(name, apsw.URIFilename) else name
        node, folder = disk._tree.get(key), None
        if node is None and flags[0] & apsw.SQLITE_OPEN_CREATE:
            node = _File()
            with _as_sqlite("CANTOPEN"):
                disk._put(disk._vacant(Path(key)), node)
            if flags[0] & (apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL):
                folder = posixpath.dirname(key)
        if not isinstance(node, _File):
            raise apsw.exception_for(apsw.SQLITE_CANTOPEN)
        flags[1] = flags[0]
        return _Handle(disk, node, folder=folder)

    def xDelete(self, name: str, syncdir: bool) -> None:
        disk = _Current.disk()
        if disk is None:
            return
        if name not in disk._tree:
            raise apsw.exception_for(apsw.SQLITE_IOERR_DELETE_NOENT)
        disk.remove(Path(name))
        if syncdir:
            with _as_sqlite("IOERR_DIR_FSYNC"):
                disk._sync_names(posixpath.dirname(name))

    def xAccess(self, name: str, flags: int) -> bool:
        disk = _Current.disk()
        node = None if disk is None else disk._tree.get(name)
        # an empty file does not exist, says os_unix.c: a log without bytes has nothing to recover
        return isinstance(node, _Directory) or (isinstance(node, _File) and bool(node.content))

    def xFullPathname(self, name: str) -> str:
        return _key(name)

    def xCurrentTime(self) -> float:
        return self.xCurrentTimeInt64() / 86_400_000

    def xCurrentTimeInt64(self) -> int:
        disk = _Current.disk()
        return _UNIX_EPOCH_MS + (0 if disk is None else disk._now_ns() // 1_000_000)

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
        return os.urandom(count) if disk is None else disk._names_rng.randbytes(count)


class _Current:
    """On which disk, and in which of its lives, the call into SQLite is running that is running now."""

    running: tuple[SimDisk, int] | None = None
    registered: tuple[_Vfs, _Entropy] | None = None

    @classmethod
    def disk(cls) -> SimDisk | None:
        """None for a dead process, and for one that is not simulated."""
        if cls.running is None or cls.running[1] != cls.running[0]._boot:
            return None
        return cls.running[0]


def _router() -> None:
    if _Current.registered is None:
        _Current.registered = (_Vfs(), _Entropy())


def _nowhere() -> SimDisk:
    return SimDisk(random.Random(0), now_ns=lambda: 0, directories=())  # noqa: S311  a simulation


@contextlib.contextmanager
def _running_on(disk: SimDisk, boot: int) -> Iterator[None]:
    before, _Current.running = _Current.running, (disk, boot)
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


def _key(path: str | os.PathLike[str]) -> str:
    """The path as the tree has it: absolute (the working directory is /) and without detours."""
    return posixpath.normpath(posixpath.join("/", os.fspath(path)))


def _ancestors(name: str) -> list[str]:
    """The directory and all above it, from the root."""
    return [*(_ancestors(posixpath.dirname(name)) if name != "/" else []), name]


def _error(code: int, name: str | None = None) -> OSError:
    return OSError(code, os.strerror(code), name)
