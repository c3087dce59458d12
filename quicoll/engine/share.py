"""How much the engine's thread takes while the program's own threads compute.

Beside a thread that computes the engine's thread costs more than the time for which it runs: each of them hands
Python's lock to the other, and is woken for it. A loop of short numpy calls took 1.6 to 2.9 times as long beside an
all_reduce (docs/performance.md). So there the engine holds itself to a share of the time, and rests in between. What
it does not do meanwhile it does at full speed as soon as the program waits for it.

Who joins names a share, or none. Then it is `SHARE`, for what lasts no longer than `PATIENCE_NS` and goes through the
memory of a host alone. Work that is put off there is only done later. An acknowledgement that is put off costs a link
its rate, and what goes on for longer is a stream whose pace its peers share: gradients in buckets over 200 Mbit/s need
an eighth of the time, and with 7 % of it they took as long as without any overlap (docs/performance.md).

    time passes    credit grows by `share` of it, up to `MOST_NS`
    it runs        what it takes of a processor is taken off the credit, which may leave a debt
    contended      it had to wait for Python's lock: of late, so within the last `BELIEVED_NS`. A thread that does not
                   sleep of its own will is put to sleep by nothing else, so the kernel's count of voluntary switches,
                   less its own sleeps, says so
    hurried        what the engine does may not wait: somebody waits for it, or no share is named and not only calls
                   through memory are under way
    at ease        not contended, or hurried. Debts are forgiven
    uncounted      hurried, with calls under way: until that is over, and `HURRIED_NS` longer at most, nothing is asked
                   of the system, which took a twentieth of the engine's time in an empty step
    owing          from the first debt until there is all the credit again; where no share is named it rests no longer
                   once that has lasted for `PATIENCE_NS`
    it rests       contended, with a debt, and nothing is hurried: until time has paid the debt, for at most REST_NS
                   at a time, and at most a part of `lost_after`

Invariants: it never rests while somebody is known to wait, and goes on at once when somebody begins to; no rest is
longer than a quarter of the time between two heartbeats, so that nobody misses one; between two rests it does all that
is ready. In contended time T without a wait it takes at most share * T + MOST_NS and what one turn of its loop takes,
for all T where a share is named and up to PATIENCE_NS where none is; T begins up to HURRIED_NS after a wait.
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

__all__ = [
    "BELIEVED_NS",
    "HURRIED_NS",
    "LEAST_NS",
    "MOST_NS",
    "PATIENCE_NS",
    "REST_NS",
    "REST_PART",
    "SHARE",
    "EngineShare",
    "Used",
]

SHARE = 0.07
PATIENCE_NS = 200_000_000  # 16 MiB of two ranks take 0.1 to 0.14 s with that share
LEAST_NS = 200_000  # between two looks at the thread's figures, which take half a microsecond,
HURRIED_NS = 1_000_000  # and from the one that found that what it does is hurried to the next
MOST_NS = 2_000_000  # of credit: what waits for the lock have saved, and small operations, are not made to wait
REST_NS = 50_000_000  # ten times what a turn of the engine's loop takes with 1 MiB to read
REST_PART = 32  # of `lost_after`: a quarter of the time between two heartbeats
# A loop whose calls spend most of their time outside of the lock is met at it now and then: with 10 ms here the engine
# took 18 % beside one where 10 % was its share, with this 11 %.
BELIEVED_NS = 100_000_000


class Used(NamedTuple):
    """What a thread has used until now. cpu_ns: of processors. switches: how often it has gone to sleep, or waited for
    a lock; None where nobody counts."""

    cpu_ns: int
    switches: int | None


class EngineShare:
    """The engine's part of the time; see the module's head.

    due_ns: when to call `rest` or `pass_over`, and not before: not more often than pays. counts: whether its own sleeps
    are to be told (`slept`).
    """

    __slots__ = (
        "_contended_ns",
        "_cpu_ns",
        "_credit",
        "_owing_ns",
        "_patience_ns",
        "_rest_ns",
        "_seen_ns",
        "_share",
        "_switches",
        "counts",
        "due_ns",
    )

    def __init__(self, share: float | None, now_ns: int, used: Used, *, rest_ns: int = REST_NS) -> None:
        """Begin with all the credit that there can be.

        Args:
            share: Of the time, above 0; 1 is no bound. None: none is named.
            rest_ns: The longest rest.
            now_ns: The time.
            used: By the engine's thread until now.
        """
        self._share = SHARE if share is None else share
        self._patience_ns = PATIENCE_NS if share is None else None
        self._owing_ns: int | None = None  # since when it has been owing
        self._rest_ns = rest_ns
        self._credit = MOST_NS
        self._contended_ns = now_ns - BELIEVED_NS - 1
        self._seen_ns = now_ns
        self.due_ns = now_ns + LEAST_NS
        self.counts = True
        self._cpu_ns, self._switches = used

    def pass_over(self, now_ns: int) -> None:
        """Take note that what it does now is not counted."""
        self.due_ns = now_ns + HURRIED_NS
        self._credit = max(self._credit, 0)
        self.counts = False

    def rest(self, now_ns: int, used: Used, hurried: Callable[[], bool]) -> int:
        """Return for how long to rest now, in nanoseconds; `slept` follows where that is not 0.

        Args:
            now_ns: The time.
            used: By the engine's thread until now.
            hurried: Whether what it does may not wait; asked only where it matters.
        """
        passed, took = now_ns - self._seen_ns, used.cpu_ns - self._cpu_ns
        counted, self.counts = self.counts, True
        before = self._switches if counted else None  # what it slept while that did not count was not told
        if before is not None and used.switches is not None and used.switches > before:
            self._contended_ns = now_ns
        self._seen_ns, self.due_ns = now_ns, now_ns + LEAST_NS
        self._cpu_ns, self._switches = used
        self._credit = min(MOST_NS, self._credit + round(passed * self._share) - took)
        if not counted:
            self._credit = max(self._credit, 0)
        if self._credit >= 0:
            if self._credit == MOST_NS:
                self._owing_ns = None
            return 0
        if self._owing_ns is None:
            self._owing_ns = now_ns
        tired = self._patience_ns is not None and now_ns - self._owing_ns > self._patience_ns
        if tired or now_ns - self._contended_ns > BELIEVED_NS or self._share >= 1 or hurried():
            self._credit = 0
            return 0
        return min(self._rest_ns, round(-self._credit / self._share))

    def slept(self, used: Used) -> None:
        """Take note that the thread has slept of its own will, which is no contention.

        Args:
            used: By the engine's thread until now.
        """
        self._switches = used.switches
