"""How much the engine's thread takes while the program's own threads compute.

Beside a thread that computes the engine's thread costs more than the time for which it runs: each of them hands
Python's lock to the other, and is woken for it. A loop of short numpy calls took 1.6 to 2.9 times as long beside an
all_reduce (docs/performance.md). So there the engine holds itself to a share of the time, and rests in between. What
it does not do meanwhile it does at full speed as soon as the program waits for it.

    time passes    credit grows by `share` of it, up to `MOST_NS`
    it runs        what it takes of a processor is taken off the credit, which may leave a debt
    contended      it had to wait for Python's lock: of late, so within the last `BELIEVED_NS`. A thread that does not
                   sleep of its own will is put to sleep by nothing else, so the kernel's count of voluntary switches,
                   less its own sleeps, says so
    at ease        not contended, or somebody waits for what the engine does (`awaited`). Debts are forgiven
    it rests       contended, with a debt, and nobody waits: until time has paid the debt, for at most REST_NS at a
                   time, and at most a part of `lost_after`

Invariants: it never rests while somebody is known to wait, and goes on at once when somebody begins to; no rest is
longer than a quarter of the time between two heartbeats, so that nobody misses one; between two rests it does all that
is ready. In contended time T without a wait it takes at most share * T + MOST_NS and what one turn of its loop takes.
Nothing but pace depends on it: no order, no bits.

Failure cases. A wait that the engine is not told of (C++ that waits for a future of torch's) holds no lock: contention
ends, and with it the rests, `BELIEVED_NS` later. A system that does not count switches (`switches` is None): it never
rests. A computation that never gives the lock up by itself keeps the engine waiting for as long as the interpreter's
switch interval (sys.setswitchinterval, 5 ms) whenever the engine has let go of it; then the engine takes less than its
share, and rests for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["BELIEVED_NS", "LEAST_NS", "MOST_NS", "REST_NS", "REST_PART", "EngineShare", "Used"]

LEAST_NS = 200_000  # between two looks at the thread's figures, which take half a microsecond
MOST_NS = 2_000_000  # of credit: what waits for the lock have saved, and small operations, are not made to wait
REST_NS = 50_000_000  # ten times what a turn of the engine's loop takes with 1 MiB to read
REST_PART = 32  # of `lost_after`: a quarter of the time between two heartbeats
BELIEVED_NS = 10_000_000


class Used(NamedTuple):
    """What a thread has used until now. cpu_ns: of processors. switches: how often it has gone to sleep, or waited for
    a lock; None where nobody counts."""

    cpu_ns: int
    switches: int | None


class EngineShare:
    """The engine's part of the time; see the module's head."""

    __slots__ = ("_contended_ns", "_cpu_ns", "_credit", "_rest_ns", "_seen_ns", "_share", "_switches")

    def __init__(self, share: float, now_ns: int, used: Used, *, rest_ns: int = REST_NS) -> None:
        """Begin with all the credit that there can be.

        Args:
            share: Of the time, above 0; 1 is no bound.
            rest_ns: The longest rest.
            now_ns: The time.
            used: By the engine's thread until now.
        """
        self._share = share
        self._rest_ns = rest_ns
        self._credit = MOST_NS
        self._contended_ns = now_ns - BELIEVED_NS - 1
        self._seen_ns = now_ns
        self._cpu_ns, self._switches = used

    def is_due(self, now_ns: int) -> bool:
        """Return whether to call `rest` now: not more often than pays."""
        return now_ns - self._seen_ns >= LEAST_NS

    def rest(self, now_ns: int, used: Used, awaited: Callable[[], bool]) -> int:
        """Return for how long to rest now, in nanoseconds; `slept` follows where that is not 0.

        Args:
            now_ns: The time.
            used: By the engine's thread until now.
            awaited: Whether somebody waits; asked only where it matters.
        """
        passed, took = now_ns - self._seen_ns, used.cpu_ns - self._cpu_ns
        if self._switches is not None and used.switches is not None and used.switches > self._switches:
            self._contended_ns = now_ns
        self._seen_ns = now_ns
        self._cpu_ns, self._switches = used
        self._credit = min(MOST_NS, self._credit + round(passed * self._share) - took)
        if self._credit >= 0:
            return 0
        if now_ns - self._contended_ns > BELIEVED_NS or self._share >= 1 or awaited():
            self._credit = 0
            return 0
        return min(self._rest_ns, round(-self._credit / self._share))

    def slept(self, used: Used) -> None:
        """Take note that the thread has slept of its own will, which is no contention.

        Args:
            used: By the engine's thread until now.
        """
        self._switches = used.switches
