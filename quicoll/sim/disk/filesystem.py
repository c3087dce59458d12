"""A file system in memory that fails as disks do: the real checkpoint code, journal code and SQLite run on it.

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

import errno
import os
import posixpath
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from quicoll.errors import LocalError
from quicoll.sim.disk.files import (
    ARMABLE,
    SECTOR,
    Directory,
    DiskFailure,
    File,
    FileNode,
    Halted,
    Rename,
    Write,
    ancestors,
    key_of,
    os_error,
)

__all__ = ["FileSystem", "OpenDatabase"]


class OpenDatabase(Protocol):
    """What a file system asks of a database that has files on it."""

    def bury(self) -> None:
        """Let go of everything: the process that opened it is dead."""


class FileSystem:
    """Files and names in memory, their faults and crashes; a `quicoll.checkpoint.disk.Disk`.

    Args:
        rng: All randomness.
        now_ns: The clock.
        directories: Directories that are there from the beginning, durably, with all above them.
        capacity: Bytes that the files may hold together; None for no limit.

    Attributes:
        capacity: As above; change it at any time.
        operations: Writes, syncs and changes of names so far; `arm` counts by them.
        on_down: Called when an armed crash has come, before the operation that it cut off raises Halted.
        injected: By value of DiskFailure, how often each struck; and "disk_torn_write", "disk_lost_write" of a crash.
        life: Number of crashes and kills so far. What was opened in another life is dead.
        databases: Open databases of the running process.
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
        self.on_down: Callable[[DiskFailure], None] | None = None
        self.injected = dict.fromkeys(
            [*(fault.value for fault in DiskFailure), "disk_torn_write", "disk_lost_write"], 0
        )
        self._rng = rng
        # What SQLite draws depends on its version; that must not move the faults that a seed stands for.
        self._outside_rng = random.Random(rng.getrandbits(64))  # noqa: S311  a simulation
        self.now_ns = now_ns
        self._tree: dict[str, FileNode] = {"/": Directory()}
        self._pending: list[Rename] = []
        self._armed: list[tuple[DiskFailure, int]] = []
        self.life = 0
        self.databases: list[OpenDatabase] = []
        self._down = False
        self._handles = 0
        for directory in directories:
            self._tree.update((folder, Directory()) for folder in ancestors(key_of(directory)))
        self._durable_tree = dict(self._tree)

    # Faults

    def arm(self, fault: DiskFailure, *, after: int = 0) -> None:
        """Make the fault strike, once, the operation that comes after `after` others of those that it can strike."""
        if fault not in ARMABLE:
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
        return bool(self.injected[DiskFailure.LOST_SYNC] or self.injected[DiskFailure.BIT_ROT])

    @property
    def is_down(self) -> bool:
        """Between a crash and `restart`."""
        return self._down

    def rot(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Flip one bit on the platter of the file, or of any; return where ("path:offset"), None if all are empty.

        The page cache of the file is dropped as far as it is clean, so that the flipped bit is what is read next.
        """
        names = [key_of(path)] if path is not None else sorted(self._tree)
        found = [(name, node) for name in names if isinstance(node := self._tree.get(name), File) and node.durable]
        if not found:
            return None
        name, file = found[self._rng.randrange(len(found))]
        place = self._rng.randrange(len(file.durable))
        file.durable[place] ^= 1 << self._rng.randrange(8)
        file.content[:] = file.durable
        for write in file.pending:
            write.apply(file.content)
        self.injected[DiskFailure.BIT_ROT] += 1
        return f"{name}:{place}"

    def crash(self) -> None:
        """Power loss; see the head of this module. The disk is down until `restart`."""
        self.injected[DiskFailure.POWER_LOSS] += 1
        self._halt()
        # Nothing, all, and a mix: a mix alone would hardly ever lose everything of many writes, or nothing.
        luck = (0.0, 1.0, 0.5, 0.5)[self._rng.randrange(4)]
        files = [node for node in self._durable_tree.values() if isinstance(node, File)]
        for change in self._pending:
            if self._rng.random() < luck:
                change.apply(self._durable_tree)
            files.extend(node for _, node in change.names if isinstance(node, File))
        self._pending.clear()
        for file in files:
            self._write_back(file, luck)
            file.content[:] = file.durable
        tree: dict[str, FileNode] = {}
        for name in sorted(self._durable_tree):  # a directory comes before what is in it
            if name == "/" or isinstance(tree.get(posixpath.dirname(name)), Directory):
                tree[name] = self._durable_tree[name]
        self._tree, self._durable_tree = tree, dict(tree)

    def kill(self) -> None:
        """The process ends at once, the system goes on: nothing that was written is lost. Down until `restart`."""
        self.injected[DiskFailure.KILL] += 1
        self._halt()

    def restart(self) -> None:
        """A new process begins, with what the crash has left. Does nothing when the disk is not down."""
        self._down = False

    # quicoll.checkpoint.disk.Disk

    def make_directory(self, path: Path) -> None:
        self.put(self.vacant(path), Directory())

    def sync_directory(self, path: Path) -> None:
        self.check_up()
        name = key_of(path)
        if not isinstance(self._node(name), Directory):
            raise os_error(errno.ENOTDIR, name)
        self.sync_names(name)

    def create(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        file = File(written_ns=self.now_ns())
        self.put(self.vacant(path), file)
        offset = 0
        for chunk in chunks:
            self.write(file, offset, bytes(chunk))
            offset += len(chunk)
        self.sync(file)

    def replace(self, source: Path, target: Path) -> None:
        self.check_up()
        old, new = key_of(source), key_of(target)
        if posixpath.dirname(old) != posixpath.dirname(new):
            raise os_error(errno.EXDEV, new)  # two directories need two syncs: no code here has a use for that
        if isinstance(self._tree.get(new), Directory):
            raise os_error(errno.EISDIR, new)
        node = self._node(old)
        self._change(Rename(posixpath.dirname(old), ((old, None), (new, node))))

    def remove(self, path: Path) -> None:
        name = key_of(path)
        self.file(path)
        self._change(Rename(posixpath.dirname(name), ((name, None),)))

    def names(self, path: Path) -> list[str]:
        self.check_up()
        name = key_of(path)
        if not isinstance(self._node(name), Directory):
            raise os_error(errno.ENOTDIR, name)
        return sorted(posixpath.basename(entry) for entry in self._tree if posixpath.dirname(entry) == name != entry)

    def read(self, path: Path, start: int = 0, stop: int | None = None) -> bytes:
        return bytes(self.file(path).content[start:stop])

    def read_into(self, path: Path, start: int, memory: memoryview) -> int:
        found = self.read(path, start, start + len(memory))
        memory[: len(found)] = found
        return len(found)

    def size(self, path: Path) -> int:
        return len(self.file(path).content)

    def age_s(self, path: Path) -> float:
        return (self.now_ns() - self.file(path).written_ns) / 1e9

    def token(self) -> str:
        return f"{self._outside_rng.getrandbits(32):08x}"

    # For databases, which have their own way of opening files

    def find(self, name: str) -> FileNode | None:
        """Return what has this name in the tree; None where nothing has."""
        return self._tree.get(name)

    def new_handle(self) -> int:
        """Return a number that no open file had before."""
        self._handles += 1
        return self._handles

    def random_bytes(self, count: int) -> bytes:
        """Return random bytes; they depend on the seed, and move none of the faults."""
        return self._outside_rng.randbytes(count)

    # What a test looks at

    def files(self) -> dict[str, bytes]:
        """All files as they are read now, by path in order; works while the disk is down, and counts as nothing."""
        return {name: bytes(node.content) for name, node in sorted(self._tree.items()) if isinstance(node, File)}

    # What a person does who has the disk in his hands: nothing strikes, nothing counts, and it may be down

    def copy(self) -> FileSystem:
        """Return another disk that is up, with all that is read of this one now."""
        found = FileSystem(random.Random(0), now_ns=self.now_ns)  # noqa: S311  a simulation
        for name, node in self._tree.items():
            found._tree[name] = Directory() if isinstance(node, Directory) else File(bytearray(node.content))
        return found

    def erase(self, path: str | os.PathLike[str]) -> None:
        """Take a file away, so that no crash brings it back; nothing where there is none."""
        name = key_of(path)
        self._tree.pop(name, None)
        self._durable_tree.pop(name, None)
        self._pending = [change for change in self._pending if name not in dict(change.names)]

    def __repr__(self) -> str:
        state = "down" if self._down else "up"
        counts = f"operations={self.operations} files={len(self.files())} pending={self._unsynced()}"
        return f"<{type(self).__name__} {state} {counts}>"

    # Operations: each is counted, may be struck, and is pending afterwards

    def _strike(self, kind: str) -> tuple[DiskFailure | None, DiskFailure | None]:
        """Count an operation of the kind; the fault and the crash, of those armed, whose turn it is."""
        self.operations += 1
        if not self._armed:
            return None, None
        fault = crash = None
        left: list[tuple[DiskFailure, int]] = []
        for armed, after in self._armed:
            if kind not in ARMABLE[armed]:
                left.append((armed, after))
            elif after:
                left.append((armed, after - 1))
            elif armed in (DiskFailure.POWER_LOSS, DiskFailure.KILL):
                crash = crash or armed
            else:
                fault = fault or armed
        self._armed = left
        if fault is not None:
            self.injected[fault] += 1
        return fault, crash

    def _finish(self, crash: DiskFailure | None) -> None:
        if crash is None:
            return
        if crash is DiskFailure.KILL:
            self.kill()
        else:
            self.crash()
        if self.on_down is not None:
            self.on_down(crash)
        raise Halted("the process was ended in the middle of an operation of the disk")

    def write(self, file: File, offset: int, data: bytes) -> None:
        fault, crash = self._strike("write")
        room = None if self.capacity is None else self.capacity - self._used() + len(file.content) - offset
        taken, code = data, 0
        if fault is DiskFailure.WRITE_ERROR:
            taken, code = data[: self._rng.randrange(len(data) // SECTOR + 1) * SECTOR], errno.EIO
        elif room is not None and offset + len(data) > len(file.content) and room < len(data):
            self.injected[DiskFailure.DISK_FULL] += 1
            taken, code = data[: max(room, 0)], errno.ENOSPC
        if taken:
            write = Write(offset, taken)
            write.apply(file.content)
            file.pending.append(write)
            file.written_ns = self.now_ns()
        self._finish(crash)
        if code:
            raise os_error(code)

    def truncate(self, file: File, size: int) -> None:
        _, crash = self._strike("write")
        write = Write(size, None)
        write.apply(file.content)
        file.pending.append(write)
        self._finish(crash)

    def sync(self, file: File) -> None:
        fault, crash = self._strike("sync")
        self._finish(crash)
        if fault is DiskFailure.SYNC_ERROR:
            self._write_back(file, 0.5)
            raise os_error(errno.EIO)
        if fault is not DiskFailure.LOST_SYNC:
            for write in file.pending:
                write.apply(file.durable)
            file.pending.clear()

    def sync_names(self, folder: str) -> None:
        fault, crash = self._strike("sync")
        self._finish(crash)
        if fault is DiskFailure.LOST_SYNC:
            return
        if fault is not None:
            raise os_error(errno.EIO, folder)  # names stay pending; see the head of this module
        for change in self._pending:
            if change.folder == folder:
                change.apply(self._durable_tree)
        self._pending = [change for change in self._pending if change.folder != folder]

    def put(self, name: str, node: FileNode) -> None:
        self._change(Rename(posixpath.dirname(name), ((name, node),)))

    def _change(self, change: Rename) -> None:
        _, crash = self._strike("name")
        change.apply(self._tree)
        self._pending.append(change)
        self._finish(crash)

    # Parts

    def check_up(self) -> None:
        """Raise Halted while the disk is down."""
        if self._down:
            raise Halted("the disk is down: the process that calls is dead, or SimDisk.restart() was forgotten")

    def _node(self, name: str) -> FileNode:
        node = self._tree.get(name)
        if node is None:
            # the system tells a missing name from one below a file
            above = self._tree.get(posixpath.dirname(name))
            raise os_error(errno.ENOTDIR if isinstance(above, File) else errno.ENOENT, name)
        return node

    def file(self, path: Path) -> File:
        self.check_up()
        node = self._node(key_of(path))
        if not isinstance(node, File):
            raise os_error(errno.EISDIR, str(path))
        return node

    def vacant(self, path: Path) -> str:
        """The path's name in the tree, where something new can be made."""
        self.check_up()
        name = key_of(path)
        if name in self._tree:
            raise os_error(errno.EEXIST, name)
        if not isinstance(self._node(posixpath.dirname(name)), Directory):
            raise os_error(errno.ENOTDIR, name)
        return name

    def _used(self) -> int:
        return sum(len(node.content) for node in self._tree.values() if isinstance(node, File))

    def _unsynced(self) -> int:
        files = [node for node in self._tree.values() if isinstance(node, File)]
        return len(self._pending) + sum(len(file.pending) for file in files)

    def _write_back(self, file: File, luck: float) -> None:
        """Write back some of what is pending, as a disk does that nobody waits for; the rest counts as clean."""
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
        self.life += 1
        self._down = True
        self._armed.clear()
        for node in self._tree.values():
            if isinstance(node, File):
                node.locks.clear()
        databases, self.databases = self.databases, []
        for database in databases:
            database.bury()
