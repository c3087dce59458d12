"""Files and names on a simulated disk: what is read, what is durable, and the faults that there are.

`disk` says what happens to them.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "ARMABLE",
    "SECTOR",
    "Directory",
    "DiskFailure",
    "File",
    "FileNode",
    "Halted",
    "Rename",
    "Write",
    "ancestors",
    "key_of",
    "os_error",
]

SECTOR = 512
"""Bytes that a disk writes as one; what is larger may be torn."""


class Halted(BaseException):
    """The simulated process is dead: this call, and all that follow until `SimDisk.restart`, did nothing."""


class DiskFailure(StrEnum):
    """Kinds of fault; the head of this module says what each does."""

    WRITE_ERROR = "disk_write_error"
    SYNC_ERROR = "disk_sync_error"
    DISK_FULL = "disk_full"
    LOST_SYNC = "disk_lost_sync"
    BIT_ROT = "disk_bit_rot"
    POWER_LOSS = "disk_power_loss"
    KILL = "disk_kill"


ARMABLE = {
    DiskFailure.WRITE_ERROR: ("write",),
    DiskFailure.SYNC_ERROR: ("sync",),
    DiskFailure.LOST_SYNC: ("sync",),
    DiskFailure.POWER_LOSS: ("write", "sync", "name"),
    DiskFailure.KILL: ("write", "sync", "name"),
}
"""Which operations each can strike."""


@dataclass(frozen=True, slots=True)
class Write:
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

    def sectors(self) -> Iterator[Write]:
        """The same in parts that a disk writes as one."""
        if self.data is None:
            yield self
            return
        end = self.offset + len(self.data)
        start = self.offset
        while start < end:
            stop = min(end, (start // SECTOR + 1) * SECTOR)
            yield Write(start, self.data[start - self.offset : stop - self.offset])
            start = stop


@dataclass(slots=True, eq=False)
class File:
    """content: what is read. durable: what is on the platter. locks: of open handles, in order of opening."""

    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[Write] = field(default_factory=list)
    written_ns: int = 0
    locks: dict[int, int] = field(default_factory=dict)


class Directory:
    """A directory has nothing but its name here: the tree is a mapping of whole paths."""


FileNode = File | Directory


@dataclass(frozen=True, slots=True)
class Rename:
    """A pending change of names in one directory; None takes the name away. All of it arrives, or nothing."""

    folder: str
    names: tuple[tuple[str, FileNode | None], ...]

    def apply(self, tree: dict[str, FileNode]) -> None:
        for name, node in self.names:
            if node is None:
                tree.pop(name, None)
            else:
                tree[name] = node


def key_of(path: str | os.PathLike[str]) -> str:
    """The path as the tree has it: absolute (the working directory is /) and without detours."""
    return posixpath.normpath(posixpath.join("/", os.fspath(path)))


def ancestors(name: str) -> list[str]:
    """The directory and all above it, from the root."""
    return [*(ancestors(posixpath.dirname(name)) if name != "/" else []), name]


def os_error(code: int, name: str | None = None) -> OSError:
    return OSError(code, os.strerror(code), name)
