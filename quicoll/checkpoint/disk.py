"""The file operations on which durability rests, behind a seam, so that a simulated disk can replace the real one.

Only what `quicoll.checkpoint` needs, and cut where a disk can fail: each method is one promise of POSIX, and none does
two things that a power loss could separate without the caller knowing. What POSIX promises, and this
module repeats (Pillai et al. 2014, "All File Systems Are Not Created Equal", OSDI):

- written bytes are durable after fsync of the file, and names after fsync of the directory that holds them;
- a rename is atomic: the target is the old file or the new one, never none and never a mix;
- after a failed fsync it is not known what is on the disk, and a second fsync proves nothing (Rebello et al. 2020, "Can
  Applications Recover from fsync Failures?", USENIX ATC): the file has to be written anew under another name.

Every method raises OSError as the system does; callers turn it into their own error, once. The clock and the source of
unused names belong to the disk too: both come from outside, and a simulation must own them.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

__all__ = ["Disk", "OsDisk"]


class Disk(Protocol):
    """The file operations that checkpoints need. Every method blocks and raises OSError."""

    def make_directory(self, path: Path) -> None:
        """Make one directory in one that is there; durable after `sync_directory(path.parent)`."""

    def sync_directory(self, path: Path) -> None:
        """Make the names in the directory durable: all that was made, renamed or removed in it."""

    def create(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        """Make a file that is not there, write the chunks in order and sync it.

        Its bytes are durable on return, its name is not. One call, as a failed fsync is reported to the descriptor that
        wrote. After an error the file may be there with anything in it.
        """

    def replace(self, source: Path, target: Path) -> None:
        """Rename within a directory, over what is there; atomic, durable after `sync_directory`."""

    def remove(self, path: Path) -> None:
        """Take the file away. FileNotFoundError when there is none."""

    def names(self, path: Path) -> list[str]:
        """The names in the directory, sorted."""

    def read(self, path: Path, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of the file from `start` to before `stop`, or to its end; fewer where it is shorter."""

    def read_into(self, path: Path, start: int, memory: memoryview) -> int:
        """Read from `start` on into memory, as much as it takes; how many bytes came, fewer at the file's end."""

    def size(self, path: Path) -> int:
        """How many bytes the file has."""

    def age_s(self, path: Path) -> float:
        """Seconds since the file was last written, by the disk's clock."""

    def token(self) -> str:
        """Eight hexadecimal digits that no other writer has; for names of temporary files."""


class OsDisk:
    """The real disk, through the operating system."""

    def make_directory(self, path: Path) -> None:
        path.mkdir()

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def create(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        with open(path, "xb", buffering=1 << 20) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        path.unlink()

    def names(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def read(self, path: Path, start: int = 0, stop: int | None = None) -> bytes:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else max(stop - start, 0))

    def read_into(self, path: Path, start: int, memory: memoryview) -> int:
        came = 0
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while came < len(memory):  # the system reads 2 GiB at a time at most
                count = file.readinto(memory[came:])
                if not count:
                    break
                came += count
        return came

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def age_s(self, path: Path) -> float:
        return time.time() - path.stat().st_mtime

    def token(self) -> str:
        return secrets.token_hex(4)
