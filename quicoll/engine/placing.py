"""The engine's thread sleeps where its caller is.

Of a rank's two threads one works at a time in a small operation: the caller's calls, the engine's sends and takes in,
the caller's goes on. On one processor the next one finds it free, its caches warm and Python's lock there. The kernel
puts who is woken on another one now and then, where another rank's thread happens to work, and then nothing brings
the two together again: two ranks that share both processors crosswise take twice the time (docs/performance.md).

So a caller says on which processor it calls (`called`), and while somebody waits for what the engine does, or has just
been given it and will call again, its thread is woken there (`sleep`, `woke`): once is enough, for then the kernel
leaves it there. Where it is not, as on a machine where other processors idle, it is tried once in `PAUSE_NS`. A caller
that computes while an operation is under way is left alone: nobody waits.

An operation that lasts, longer than `SMALL_NS` since anybody has called, is none of these: there the engine works all
the time, and wants a processor of its own. The callers of two ranks may have called from the same one; their engines
were brought together there again and again, where each had half of it while the other processor idled. (All_reduce of
16 MiB between two ranks at 500 Mbit/s took 1.58 of the ideal in two of three operations, and 1.06 without it.)

To keep each to a processor for good was worse: the kernel parts the caller's thread from the engine's then.

Invariants: the set of processors that the engine's thread may run on is a smaller one only while it sleeps in its
selector, so what it starts, threads and processes, has what it had. It is never empty; where others change it meanwhile
it stays as they want it; no other thread's is changed. Where the system has no such sets, or refuses, nothing is done.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PAUSE_NS", "SMALL_NS", "Placing", "Processors", "system_processors"]

PAUSE_NS = 2_000_000  # to move a thread takes ten microseconds
SMALL_NS = 1_000_000  # small operations take a quarter of that, over links within a machine


class Processors(Protocol):
    """Where the thread that calls runs, and may run; `allowed` and `allow` may raise OSError or ValueError."""

    def here(self) -> int: ...
    def allowed(self) -> set[int]: ...
    def allow(self, processors: set[int]) -> None: ...


class Placing:
    """See the module's head.

    called_ns: when somebody called last, which a caller may say by itself where `look_ns` has not come: until then it
    is taken to be where it was.
    """

    __slots__ = ("_caller", "_next_ns", "_processors", "called_ns", "look_ns")

    def __init__(self, processors: Processors | None) -> None:
        """Begin without a caller.

        Args:
            processors: The system's; None: there is nothing to choose.
        """
        self._processors = processors
        self._caller = -1
        self.called_ns = 0
        self.look_ns = 0
        self._next_ns = 0

    def called(self, now_ns: int) -> None:
        """Note on which processor the thread that calls this runs.

        Args:
            now_ns: The time, by the clock of `sleep`.
        """
        self.called_ns, self.look_ns = now_ns, now_ns + SMALL_NS
        if self._processors is not None:
            self._caller = self._processors.here()

    def sleep(self, now_ns: int, awaited: Callable[[], bool]) -> tuple[set[int], set[int]] | None:
        """Have the thread that calls, and is about to sleep, woken where its caller is, if somebody waits.

        Args:
            now_ns: The time.
            awaited: Returns whether somebody waits for what the thread does, or was given it just now.
        Returns:
            What `woke` needs to undo it; None: nothing is to be undone.
        """
        processors, caller = self._processors, self._caller
        if processors is None or caller < 0 or now_ns < self._next_ns or now_ns - self.called_ns > SMALL_NS:
            return None
        if processors.here() == caller or not awaited():
            return None
        self._next_ns = now_ns + PAUSE_NS
        try:
            before = processors.allowed()
            if caller not in before:
                return None
            processors.allow({caller})
        except (OSError, ValueError):
            self._processors = None
            return None
        return before, {caller}

    def woke(self, kept: tuple[set[int], set[int]]) -> None:
        """Undo `sleep`.

        Args:
            kept: What it returned.
        """
        before, during = kept
        if self._processors is None:
            return
        try:
            if self._processors.allowed() == during:
                self._processors.allow(before)
        except (OSError, ValueError):
            self._processors = None


class _Linux:
    """Processors of the thread that calls."""

    def __init__(self, here: Callable[[], int]) -> None:
        self.here = here

    def allowed(self) -> set[int]:
        return os.sched_getaffinity(0)

    def allow(self, processors: set[int]) -> None:
        os.sched_setaffinity(0, processors)


def system_processors() -> Processors | None:
    """Return the processors of this system's threads; None where a thread cannot choose, or has no choice."""
    if sys.platform != "linux":
        return None
    try:
        here = ctypes.PyDLL(None).sched_getcpu  # with Python's lock: it is no call into the kernel
    except (OSError, AttributeError):  # a C library without it
        return None
    here.argtypes, here.restype = [], ctypes.c_int
    return _Linux(here) if here() >= 0 and len(os.sched_getaffinity(0)) > 1 else None
