"""Where checkpoints lie: a directory of a disk, or a place that fsspec knows. Every method blocks and raises OSError.

    a path, file://...     `DiskStorage`: written to a temporary name, synced, renamed, the directory synced
    any other URL          `UrlStorage`, by fsspec: one put for each file, as object stores have it. A put is atomic and
                           durable on an object store; what another file system promises is for it to say. A manifest
                           that is torn is found by its seal all the same

file:// goes to the disk and not through fsspec, whose local files are not synced.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from quicoll.checkpoint.catalogue import TEMPORARY
from quicoll.checkpoint.disk import Disk, OsDisk
from quicoll.errors import LocalError

__all__ = ["DiskStorage", "Place", "Storage", "UrlStorage", "os_reason", "split_place", "storage_at"]

Place = str | os.PathLike[str]
"""A directory's path, or an fsspec URL."""

_OS_DISK = OsDisk()
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:://|::)")
_STALE_AFTER_S = 3600.0
"""Age in seconds after which a temporary file is taken for one whose writer was killed."""


class Storage(Protocol):
    """Files by name in one place. Every method blocks and raises OSError."""

    @property
    def where(self) -> str:
        """The place, for people."""

    def path(self, name: str) -> str:
        """The whole name of a file, for people and for `checkpoint.load`."""

    def names(self) -> list[str]:
        """All names, sorted. FileNotFoundError where there is no such place."""

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Make a file, or replace it: whole, and durable on return. After an error it is as it was before."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of a file from `start` to before `stop`, or to its end; fewer where it is shorter."""

    def read_into(self, name: str, start: int, memory: memoryview) -> int:
        """Read from `start` on into memory, as much as it takes; how many bytes came, fewer at the file's end."""

    def size(self, name: str) -> int:
        """How many bytes a file has."""

    def remove(self, names: Sequence[str]) -> None:
        """Take files away, durably. One that is not there is no error."""

    def clean(self) -> None:
        """Take away what killed writers have left of single files."""

    def token(self) -> str:
        """Hexadecimal digits that no other writer has."""


class DiskStorage:
    """A directory of a disk; made when something is written."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk

    @property
    def where(self) -> str:
        return str(self._folder)

    def path(self, name: str) -> str:
        return str(self._folder / name)

    def names(self) -> list[str]:
        return self._disk.names(self._folder)

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        temporary = self._folder / f".{name}.{self._disk.token()}.tmp"
        _make_folder(self._disk, self._folder)
        try:
            self._disk.create(temporary, chunks)
            self._disk.replace(temporary, self._folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                self._disk.remove(temporary)
            raise
        self._disk.sync_directory(self._folder)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._disk.read(self._folder / name, start, stop)

    def read_into(self, name: str, start: int, memory: memoryview) -> int:
        return self._disk.read_into(self._folder / name, start, memory)

    def size(self, name: str) -> int:
        return self._disk.size(self._folder / name)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(self._folder / name)
        if names:
            self._disk.sync_directory(self._folder)

    def clean(self) -> None:
        for name in self._disk.names(self._folder):
            path = self._folder / name
            with contextlib.suppress(FileNotFoundError):
                if TEMPORARY.fullmatch(name) and self._disk.age_s(path) > _STALE_AFTER_S:
                    self._disk.remove(path)

    def token(self) -> str:
        return self._disk.token()


class UrlStorage:
    """A place that fsspec knows: s3://bucket/run, memory://run."""

    def __init__(self, url: str) -> None:
        """Find the file system.

        Args:
            url: Of the place.
        Raises:
            LocalError: fsspec is not installed, or knows no such place, or lacks a package for it.
        """
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise LocalError(f"{url} needs fsspec: pip install quicoll[fsspec]") from error
        try:
            self._files, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise LocalError(f"fsspec cannot use {url}: {error}") from error
        self._url = url.rstrip("/")
        self._root = self._root.rstrip("/")

    @property
    def where(self) -> str:
        return self._url

    def path(self, name: str) -> str:
        return f"{self._url}/{name}"

    def names(self) -> list[str]:
        with _as_os_errors():
            # what is listed may be another process's: a name from before is no answer
            self._files.invalidate_cache()
            found = self._files.ls(self._root, detail=False)
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        path = self._path(name)
        with _as_os_errors():
            # An object store has no directories, and makes none of this; others need theirs.
            self._files.makedirs(self._root, exist_ok=True)
            try:
                with self._files.open(path, "wb") as file:
                    for chunk in chunks:
                        file.write(chunk)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._files.rm_file(path)
                raise

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with _as_os_errors():
            data: bytes = self._files.cat_file(self._path(name), start=start, end=stop)
        return data

    def read_into(self, name: str, start: int, memory: memoryview) -> int:
        found = self.read(name, start, start + len(memory))
        memory[: len(found)] = found
        return len(found)

    def size(self, name: str) -> int:
        with _as_os_errors():
            self._files.invalidate_cache()
            return int(self._files.size(self._path(name)))

    def remove(self, names: Sequence[str]) -> None:
        with _as_os_errors():
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(self._path(name))

    def clean(self) -> None:
        """Nothing is written under another name."""

    def token(self) -> str:
        return secrets.token_hex(8)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def storage_at(place: Place, disk: Disk | None = None) -> Storage:
    """Return the storage of a place.

    Args:
        place: A directory's path, or a URL.
        disk: Where paths lead; None: the real disk.
    Raises:
        LocalError: It is a URL that cannot be used here.
    """
    text = os.fspath(place)
    if not _URL.match(text):
        return DiskStorage(Path(text), disk or _OS_DISK)
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return DiskStorage(Path(unquote(parts.path)), disk or _OS_DISK)
    return UrlStorage(text)


def split_place(path: Place) -> tuple[str, str]:
    """Return the place of a file, and its name there."""
    text = os.fspath(path)
    place, slash, name = text.rpartition("/")
    return (place or "/") if slash else ".", name


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise what fsspec's file systems raise, of many packages, as OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # each store has errors of its own, and no common one
        raise OSError(f"{type(error).__name__}: {error}") from error


def _make_folder(disk: Disk, folder: Path) -> None:
    """Make the folder and what is missing above it, durably: a checkpoint in a directory that is lost is lost.

    A directory that is there may have been made by a process that was killed before it could sync; so the name of one
    that is found is synced too. None of ours has a child before its own name is synced, so no more than one is behind.
    """
    try:
        disk.make_directory(folder)
    except FileExistsError:
        pass
    except FileNotFoundError:
        if folder.parent == folder:  # the working directory itself was removed
            raise
        _make_folder(disk, folder.parent)
        # Ranks that share it make it at the same time.
        with contextlib.suppress(FileExistsError):
            disk.make_directory(folder)
    else:
        _sync_name(disk, folder.parent)
    _sync_name(disk, folder)


def _sync_name(disk: Disk, folder: Path) -> None:
    # A directory that may be passed through but not read cannot be opened for fsync; then its owner made it, not we.
    with contextlib.suppress(PermissionError):
        disk.sync_directory(folder.parent)


def os_reason(error: OSError) -> str:
    """Return why a file could not be written or read."""
    return error.strerror or str(error)
