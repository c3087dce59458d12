"""SIGUSR1 asks a process for its flight recorder's file, for who looks at a job that stands still.

Signals belong to the program: one that handles SIGUSR1, or ignores it, keeps it, and so does one that joins outside of
its main thread. Python calls a handler between two steps of its main thread, so a process whose main thread is inside
of a long call of other code answers after that call.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

from quicoll.observability.thread_stacks import thread_stacks

__all__ = ["FlightFace", "sigusr1_records"]


class FlightFace(Protocol):
    """Of a flight recorder, for signal handlers and the end of a program. From any thread."""

    @property
    def node(self) -> str: ...
    def left(self, reason: str) -> None: ...
    def asked(self, why: str) -> None: ...
    def stack(self, node: str, text: str) -> None: ...
    def flush(self) -> object: ...


@contextlib.contextmanager
def sigusr1_records(flight: FlightFace) -> Iterator[None]:
    """Let SIGUSR1 have a recorder's file written, with the stacks of this process in it, until the block ends.

    Args:
        flight: The recorder.
    """

    def asked(number: int, frame: FrameType | None) -> None:
        flight.stack(flight.node, thread_stacks())
        flight.asked("asked for by SIGUSR1")

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGUSR1, asked)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGUSR1) is asked:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
