"""A directory for as long as a process lives; those of processes that are gone are removed by the next that needs one.

A process that SIGKILL ends, or a machine that loses its power, leaves its directory behind, with keys in it. Whether
its process is gone is known by a lock that the kernel gives free with the process: flock(2) on a file in the directory.
A process id would not do, since ids are used again.

The lock file gets its name when it is locked already, so a file of that name whose lock can be had belongs to nobody;
and it is the last thing to go, so a removal that was itself cut short is finished by the next. A directory without it
is just being made, or not ours: it is left alone, and so is that of another user, whoever we are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quicoll.errors import LocalError

__all__ = ["remove_abandoned", "scratch_directory"]

_PREFIX = "quicoll-run-"
_LOCK = "lock"


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a directory in the place for temporary files (mode 0700), and remove it at the end of the block.

    Yields:
        Its path.
    Raises:
        LocalError: It cannot be made.
    """
    try:
        base = Path(tempfile.gettempdir())
        remove_abandoned(base)
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            lock = _locked(directory)
        except OSError:
            _remove(path, directory)
            os.close(directory)
            raise
    except OSError as error:
        raise LocalError(f"cannot make a temporary directory: {error.strerror or error}") from error
    try:
        yield path
    finally:
        _remove(path, directory)
        os.close(directory)
        os.close(lock)


def remove_abandoned(base: Path) -> None:
    """Remove this user's directories whose processes are gone. What cannot be removed stays.

    Args:
        base: Where they are.
    """
    try:
        names = sorted(name for name in os.listdir(base) if name.startswith(_PREFIX))
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError), _abandoned(base / name) as directory:
            _remove(base / name, directory)


def _locked(directory: int) -> int:
    """Make the lock file of a new directory."""
    lock = os.open("unlocked", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename("unlocked", _LOCK, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        os.close(lock)
        raise
    return lock


@contextlib.contextmanager
def _abandoned(path: Path) -> Iterator[int]:
    """Hold the directory, by its descriptor, and its lock. Raises OSError where it is not ours or not abandoned."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(directory)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{path} is somebody else's")
        lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW, dir_fd=directory)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield directory
        finally:
            os.close(lock)
    finally:
        os.close(directory)


def _remove(path: Path, directory: int) -> None:
    """Empty a directory by its descriptor, its lock last, and take it away. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory), key=lambda name: (name == _LOCK, name)):
            if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=directory)
            else:
                os.unlink(name, dir_fd=directory)
        path.rmdir()
