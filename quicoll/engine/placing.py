"""To get out of each other's way: two ranks on one processor while another one idles.

Who is woken is put near who wakes it, by a kernel that knows that the one is about to sleep. A datagram on its way
to a rank of the same host wakes that rank's thread from the sender's, so now and then all threads of two ranks come to
one processor, and stay there: one after the other they are never two that could run, so nothing seems to be out of
balance. An operation of 4 bytes then takes two to three times as long (docs/performance.md).

A rank sees it when it looks for an answer (quicoll.engine.looking) and somebody else has its processor meanwhile, who
is not of its own process. Then its thread keeps off that processor: it may not be woken there. Its caller comes after
it, for who wakes whom brings those two together as well.

    anywhere    the thread is woken wherever the kernel likes
    away        for `AWAY_NS` it is not woken on one processor; then anywhere again. Where somebody is in its way all
                the same it is anywhere again at once. If that is so within `HELPS_NS`, moving did not help, and the
                pause until the next try doubles, up to `MOST_PAUSE_NS`: where there are more ranks than processors
                next to nothing is tried. If it is later, it did, and the next try may come at once

Two that are in each other's way see it at the same time, and would both go to where they are in each other's way
again: a coin decides, by chance of each one's own.

Invariants: the set of processors that the thread may run on is a smaller one only while it sleeps in its selector; what
it starts, threads and processes, has what it had. It is never empty, and what others change it to while the thread
sleeps stays. Where the system has no such sets, or refuses, nothing is done.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import random

__all__ = ["AWAY_NS", "FIRST_PAUSE_NS", "HELPS_NS", "MOST_PAUSE_NS", "Placing", "Processors", "system_processors"]

AWAY_NS = 500_000_000
FIRST_PAUSE_NS = 5_000_000
HELPS_NS = 25_000_000  # ranks that share a processor see that of each other in half of the time, or less
MOST_PAUSE_NS = 2_000_000_000


class Processors(Protocol):
    """Where the thread that calls runs, and may run. Each may raise OSError or ValueError."""

    def here(self) -> int: ...
    def allowed(self) -> set[int]: ...
    def allow(self, processors: set[int]) -> None: ...


class Placing:
    """See the module's head. away: whether there is a processor to keep off."""

    __slots__ = ("_avoided", "_chance", "_next_ns", "_pause_ns", "_processors", "_since_ns", "away")

    def __init__(self, processors: Processors | None, chance: random.Random) -> None:
        """Begin anywhere.

        Args:
            processors: Those of the thread that is placed; None: there is nothing to choose.
            chance: The thread's own.
        """
        self.away = False
        self._processors = processors
        self._chance = chance
        self._avoided = 0
        self._since_ns = self._next_ns = 0
        self._pause_ns = FIRST_PAUSE_NS

    def in_the_way(self, now_ns: int) -> None:
        """Note that another process has had this thread's processor while the thread looked for an answer.

        Args:
            now_ns: The time.
        """
        processors = self._processors
        if processors is None:
            return
        if self.away:
            self.away = False
            if now_ns - self._since_ns < HELPS_NS:
                self._pause_ns = min(2 * self._pause_ns, MOST_PAUSE_NS)
                self._next_ns = now_ns + self._pause_ns
                return
            self._pause_ns = FIRST_PAUSE_NS
        if now_ns >= self._next_ns and self._chance.random() < 0.5:
            try:
                self._avoided = processors.here()
            except (OSError, ValueError):
                self._processors = None
                return
            self.away = True
            self._since_ns = now_ns

    def sleep(self, now_ns: int) -> set[int] | None:
        """Keep off the processor, if there is one to keep off.

        Args:
            now_ns: The time.
        Returns:
            What `woke` needs to undo it; None: nothing is to be undone.
        """
        processors = self._processors
        if processors is None:
            return None
        if not self.away:
            return None
        if now_ns - self._since_ns >= AWAY_NS:
            self.away = False
            self._pause_ns = FIRST_PAUSE_NS
            return None
        try:
            allowed = processors.allowed()
            others = allowed - {self._avoided}
            if not others or others == allowed:
                return None
            processors.allow(others)
        except (OSError, ValueError):
            self._processors = None
            return None
        return allowed

    def woke(self, allowed: set[int]) -> None:
        """Undo `sleep`.

        Args:
            allowed: What it returned.
        """
        if self._processors is None:
            return
        try:
            if self._processors.allowed() == allowed - {self._avoided}:
                self._processors.allow(allowed)
        except (OSError, ValueError):
            self._processors = None


class _Linux:
    """Processors of the thread that calls."""

    def here(self) -> int:
        with open("/proc/thread-self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[36])

    def allowed(self) -> set[int]:
        return os.sched_getaffinity(0)

    def allow(self, processors: set[int]) -> None:
        os.sched_setaffinity(0, processors)


def system_processors() -> Processors | None:
    """Return the processors of this system's threads; None where a thread cannot choose."""
    return _Linux() if sys.platform == "linux" else None
