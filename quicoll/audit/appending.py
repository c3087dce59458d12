"""A line at the end of a file, or nothing: what follows half a line would not be read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from quicoll.errors import AuditError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["append_line"]


def append_line(fd: int, line: bytes, path: Path) -> None:
    """Write a line where a file ends.

    Args:
        fd: Of the file; stands at its end, also afterwards.
        line: All of it.
        path: The file's, for the error.
    Raises:
        AuditError: The line was not written, and nothing of it is left.
    """
    try:
        start = os.lseek(fd, 0, os.SEEK_CUR)
        written = os.write(fd, line)
        if written != len(line):
            os.ftruncate(fd, start)
            os.lseek(fd, start, os.SEEK_SET)
    except OSError as error:
        raise AuditError(f"cannot be written: {error.strerror or error}", path=str(path)) from error
    if written != len(line):
        raise AuditError(f"only {written} of {len(line)} bytes of a line were written", path=str(path))
