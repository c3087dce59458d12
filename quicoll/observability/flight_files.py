"""Flight recorders and the disk: one file for each process in a directory, written by a thread of its own, and read.

A recorder says that there is something to write down (`FlightWriter.wanted`), from any thread, from a signal handler
too, and goes on at once. The thread takes a snapshot and writes it beside the file of that name, then renames it: a
reader finds a whole file or none. What is wanted meanwhile is in the next one, PAUSE_S later; who ends waits for the
last one, END_S at most.

    a disk that is full, or gone     one call of `unwritten` with the reason, and the thread goes on trying: the next
                                     failure may find room. The job hears of it and is not held up
    a disk that does not answer      the thread waits for it, nobody else does
    many lives of one node           each has a file, named after node and process; of a node KEPT_LIVES are kept
    a child of a fork                has no such thread, and writes nothing

Invariants: nobody waits for a disk but this thread, and who ends, for END_S; a directory gets no more than KEPT_LIVES
files for each node, of MAX_FILE bytes at most.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from quicoll.errors import LocalError
from quicoll.observability.flight_record import MAX_FILE, FlightFile, decode_flight, encode_flight, printable
from quicoll.observability.thread_stacks import FLIGHT_THREAD

if TYPE_CHECKING:
    from quicoll.observability.flight import FlightRecorder

__all__ = [
    "FlightWriter",
    "ReadFlights",
    "flight_file",
    "monotonic_clock",
    "read_flights",
    "write_flight",
]

SUFFIX = ".flight"
KEPT_LIVES = 4
PAUSE_S = 0.25
END_S = 1.0
_MOST_FILES = 8192
_BOOT = "/proc/sys/kernel/random/boot_id"
_TIME = "/proc/self/ns/time"


def flight_file(directory: str | Path, node: str, process: str) -> Path:
    """Return where a process writes.

    Args:
        directory: Of the run.
        node: The node's name.
        process: What tells it from earlier processes of the node.
    """
    return Path(directory) / f"{re.sub(r'[^A-Za-z0-9._-]', '_', node)[:128]}.{process}{SUFFIX}"


def monotonic_clock() -> str:
    """Return which monotonic clock this process reads: the same text in all processes that share it."""
    parts = []
    with contextlib.suppress(OSError), open(_BOOT) as file:
        parts.append(file.read().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink(_TIME))
    said = "/".join(parts) or f"{socket.gethostname()}/{os.getpid()}"  # one that nobody is known to share
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


def write_flight(path: Path, file: FlightFile) -> None:
    """Write a file, whole or not at all.

    Args:
        path: Where.
        file: What.
    Raises:
        OSError: It cannot be written; what was there stays.
    """
    unfinished = path.with_name(f".{path.name}.new")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as out:
            out.write(encode_flight(file))
        unfinished.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


class FlightWriter:
    """Writes what a recorder has, whenever that says so. See the module's head."""

    def __init__(self, recorder: FlightRecorder, path: Path) -> None:
        """Begin to listen to a recorder.

        Args:
            recorder: It; `keep`, `flush` and `close` of it are taken, and `unwritten` is called once, on the thread
                that writes, where nothing can be written.
            path: Its file, in a directory that is there.
        """
        self._recorder = recorder
        self._path = path
        self._failed = False
        self._closing = threading.Event()
        self._closed = False
        self._pid = os.getpid()
        # Its `put` may be interrupted by a signal handler that puts, which no lock of threading's allows. Of what waits
        # for a file: what is set when there is one, None where nobody waits.
        self._asks: SimpleQueue[threading.Event | None] = SimpleQueue()
        _forget_lives(path)
        recorder.keep, recorder.flush, recorder.close = self.wanted, self.flush, self.close
        self._thread = threading.Thread(target=self._run, name=FLIGHT_THREAD, daemon=True)
        self._thread.start()

    def wanted(self) -> None:
        """There is something to write down. Never waits."""
        if not self._closed and os.getpid() == self._pid:  # nobody takes it out otherwise
            self._asks.put(None)

    def flush(self, timeout: float = END_S) -> bool:
        """Write a file now, and wait until that is done, or cannot be. Return whether that came in time."""
        if self._closed or os.getpid() != self._pid:
            return False
        written = threading.Event()
        self._asks.put(written)
        return written.wait(timeout)

    def close(self) -> None:
        """Write what is wanted, for END_S at most, and stop."""
        if self._closed or os.getpid() != self._pid:
            return
        answers = self._asks.empty() or self.flush()
        self._closed = True
        self._closing.set()
        self._asks.put(None)
        if answers:
            self._thread.join(END_S)

    def _run(self) -> None:
        while True:
            asks = [self._asks.get()]
            if self._closed:
                return
            while not self._asks.empty():
                asks.append(self._asks.get())
            try:
                write_flight(self._path, self._recorder.snapshot())
            except Exception as error:  # whatever it is, the job goes on
                if not self._failed:
                    self._failed = True
                    self._recorder.unwritten(f"{getattr(error, 'strerror', None) or error} ({self._path})")
            for written in asks:
                if written is not None:
                    written.set()
            if all(written is None for written in asks):
                self._closing.wait(PAUSE_S)


def _forget_lives(path: Path) -> None:
    """Remove the files of the node's earlier processes, but for the last ones."""
    node = path.name.removesuffix(SUFFIX).rpartition(".")[0]
    with contextlib.suppress(OSError):
        lives = [
            (each.stat().st_mtime_ns, each)
            for each in path.parent.glob(f"*{SUFFIX}")
            if each.name.removesuffix(SUFFIX).rpartition(".")[0] == node
        ]
        for _, each in sorted(lives)[: -(KEPT_LIVES - 1)]:
            each.unlink()


class ReadFlights:
    """The files of a directory. files: by name, what they say. unread: by name, in a sentence why they say nothing."""

    def __init__(self) -> None:
        """Begin with none."""
        self.files: dict[str, FlightFile] = {}
        self.unread: dict[str, str] = {}


def read_flights(directory: str | Path) -> ReadFlights:
    """Read the files of all flight recorders in a directory.

    Args:
        directory: It.
    Raises:
        LocalError: It cannot be read, or has no such file.
    """
    found = ReadFlights()
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(SUFFIX) and not name.startswith("."))
    except OSError as error:
        raise LocalError(f"cannot read {directory}: {error.strerror or error}") from error
    for name in names[:_MOST_FILES]:
        told = _read(Path(directory) / name)
        if isinstance(told, str):
            found.unread[printable(name, 256)] = told
        else:
            found.files[name] = told
    if len(names) > _MOST_FILES:
        found.unread[f"{len(names) - _MOST_FILES} files more"] = f"more than {_MOST_FILES} are not read"
    if not names:
        raise LocalError(
            f"there is no file of a flight recorder (*{SUFFIX}) in {directory}: nothing has failed, or the ranks had "
            "no QUICOLL_FLIGHT_DIR"
        )
    return found


def _read(path: Path) -> FlightFile | str:
    try:
        # Not blocking, and no link: what stands under this name may be anything.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            return decode_flight(file.read(MAX_FILE + 1))
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
