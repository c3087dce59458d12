"""All that a process does, written down while it runs: one file for each process, for a timeline of the whole run.

The lines are those of a flight recorder's file (`quicoll.observability.flight_record`), but of everything and not of
the last, appended as it happens; `<node>.<process>.trace`. A process that is killed leaves whole lines and one half at
most. A file takes MAX_TRACE bytes, about three hundred thousand operations; then it ends with a line that says so.

Readers take nothing for granted, as with files of flight recorders.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quicoll.errors import LocalError
from quicoll.observability.events import Event
from quicoll.observability.flight import event_record
from quicoll.observability.flight_record import (
    FlightEvent,
    FlightFile,
    FlightFoot,
    FlightHeader,
    FlightRecord,
    decode_flight,
    encode_record,
    printable,
)

if TYPE_CHECKING:
    from quicoll.observability.flight import Streamed
    from quicoll_transport.events import LinkSnapshot

__all__ = ["MAX_TRACE", "TraceFile", "read_traces"]

SUFFIX = ".trace"
MAX_TRACE = 96 << 20
_MOST_LINES = 1 << 20
_MOST_FILES = 2048


class TraceFile:
    """A sink (`quicoll.observability.streaming`) that appends what it gets to a file."""

    def __init__(self, path: Path, header: FlightHeader) -> None:
        """Begin the file.

        Args:
            path: Where, in a directory that is there.
            header: Its first line.
        Raises:
            LocalError: It cannot be written.
        """
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LocalError(f"cannot write a trace to {path}: {error.strerror or error}") from error
        self._file = open(fd, "wb", buffering=0)  # noqa: SIM115 - closed by `close`
        self._room = MAX_TRACE
        self._lines = 0
        self._write([header])

    def take(self, told: Sequence[Streamed]) -> None:
        """Append what happened."""
        self._write([event_record(each) if isinstance(each, Event) else each for each in told])

    def take_links(self, links: Sequence[LinkSnapshot]) -> None:
        """Nothing: a timeline has no figures of links."""

    def close(self, dropped: int) -> None:
        """Write the last line."""
        if self._file.closed:
            return
        if dropped:
            self._write([self._note(f"{dropped} operations were left out: they came faster than they were written")])
        self._file.write(encode_record(FlightFoot(lines=self._lines)) + b"\n")
        self._file.close()

    def _note(self, text: str) -> FlightEvent:
        return FlightEvent(t=0, what="trace_incomplete", text=text)

    def _write(self, records: Sequence[FlightHeader | FlightRecord]) -> None:
        if self._file.closed or not records:
            return
        lines = [encode_record(record) + b"\n" for record in records]
        data = b"".join(lines)
        if len(data) > self._room:
            text = f"all that is later is left out: a trace has {MAX_TRACE >> 20} MiB at most"
            self._file.write(encode_record(self._note(text)) + b"\n")
            self._file.write(encode_record(FlightFoot(lines=self._lines + 1)) + b"\n")
            self._file.close()
            return
        self._room -= len(data)
        self._lines += len(lines)
        self._file.write(data)


def read_traces(directory: str | Path) -> tuple[list[FlightFile], dict[str, str]]:
    """Read the files of all processes in a directory.

    Args:
        directory: It.
    Returns:
        What they say, and by name of those that say nothing why.
    Raises:
        LocalError: It cannot be read, or has no such file.
    """
    found: list[FlightFile] = []
    unread: dict[str, str] = {}
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(SUFFIX))
    except OSError as error:
        raise LocalError(f"cannot read {directory}: {error.strerror or error}") from error
    if not names:
        raise LocalError(f"there is no trace (*{SUFFIX}) in {directory}: had the ranks QUICOLL_TRACE_DIR?")
    for name in names[:_MOST_FILES]:
        try:
            # Not blocking, and no link: what stands under this name may be anything.
            fd = os.open(Path(directory) / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(fd, "rb") as file:
                told = decode_flight(file.read(MAX_TRACE + 4097), most=MAX_TRACE + 4096, most_lines=_MOST_LINES)
        except OSError as error:
            told = f"it cannot be read: {error.strerror or error}"
        if isinstance(told, str):
            unread[printable(name, 256)] = told
        else:
            found.append(told)
            if told.trouble:
                unread[printable(name, 256)] = "; ".join(told.trouble)
    if len(names) > _MOST_FILES:
        unread[f"{len(names) - _MOST_FILES} files more"] = f"more than {_MOST_FILES} are not read"
    return found, unread
