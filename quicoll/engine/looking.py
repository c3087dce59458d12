"""To look for a moment before going to sleep: what the engine's loop does where small operations follow each other.

A thread that sleeps has to be woken, by a kernel that may have to wake a processor first, and then finds its caches
cold: that took a third of an operation of 4 bytes, whose peer answers within a hundred microseconds
(docs/performance.md). So when nothing is ready the loop asks again for `LOOK_NS`, and only then sleeps. Each time it
offers the processor to whoever else waits for it, and while the kernel is asked Python's lock is free.

What is found by looking is what a sleep would have ended with. A look in vain costs processor time, which others on
the machine may need, and a thread that computes may have to give Python's lock up once more; so looks have a budget:

    credit      nanoseconds of looking in vain that are allowed; at most `MOST_NS`
    time passes credit grows by 1/`PART` of it
    found       what was asked for came: credit grows by `FOUND_NS`. So where a fifth of the looks at most is in vain
                there is always a next one, and where more are it is by what time has saved up
    in vain     what it took is taken off the credit, which may leave it below zero
    in the way  one question took longer than `QUESTION_NS`: somebody else had this processor meanwhile, perhaps the
                peer whose answer is awaited. The look ends and counts as a whole one in vain: who sleeps may be put on
                another processor when he wakes, who looks stays. Without this rule two ranks that had come to one of
                two processors stayed there, each in the way of the other, and took twice the time

Nobody looks who has had nothing under way for `LATELY_NS`: signs of life and acknowledgements are waited for by nobody,
and most of an idle rank's processor time went into looking for the next.

Invariants: a look begins only with credit for a whole one; it ends after `LOOK_NS` and one question; looks in
vain take at most T / PART + MOST_NS of any time T, and FOUND_NS for each look that found something, and what the last
one took longer than it should. Where there is one processor nobody looks: it is what the awaited one needs.

Who is awake need not be woken. What other threads have queued for the loop is asked for as well (`called`), at the
beginning of each select, with each look, and once more between saying that the thread is about to sleep (`asleep`) and
the sleep. So who queues something and then finds `asleep` unset knows that it will be seen: to write to a pipe would
give Python's lock up, to a thread that has to be woken for it, in the middle of the caller's turn.

What the loop has settled for other threads in its present turn is handed out at the end of it (`give`), and then there
is no look. Who is given something has to be woken, on another processor perhaps, and needs Python's lock at once. Who
gave it away earlier would have kept that lock to the end of the turn, and who looks takes it again and again: in both
cases who was woken sleeps once more, for the lock. Where the kernel had put the two on two processors, an operation of
4 bytes took three times as long as on one; now it takes half as long again. Where nothing is left to do in the turn but
to acknowledge, it is handed out before that, and whoever gave it offers the lock (`ThreadRuntime.hand_out`).

Nor does it sleep at once then, but dozes (`doze`), for as short as the kernel can, and looks once more whether it was
called. Who was given something has the lock by then, as a rule, and often calls again with it; the thread that comes
back from that waits for that lock, has it as soon as that caller sleeps or computes without it, and finds the
call. Who slept had to be woken in the middle of the call, for nothing: it could not have the lock either. Of a call's
50 us on its caller's thread that was the half, where the two are on two processors, and the way to the engine and back
took 160 us in place of 130 (docs/performance.md). Whatever is selected for ends a doze.

Where it is woken while somebody waits, and after a doze, is where its caller is (quicoll.engine.placing). Without that
a doze would keep apart whom the kernel has parted: who is called in each of them never sleeps.

Before it looks at anything it rests where the engine has taken more than its share beside a thread that computes
(quicoll.engine.share). Who begins to wait for the engine says so and then asks for `resting`; who rests has set that,
and then asks once more whether anybody waits. So one of the two sees the other, and no wait begins with a rest.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import threading
import time
from typing import TYPE_CHECKING

from quicoll.engine.placing import Placing, system_processors
from quicoll.engine.share import REST_NS, EngineShare, Used

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # Windows has no such module, and macOS counts for whole processes alone
    _COUNTS = False
else:
    _COUNTS = True

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "FOUND_NS",
    "LATELY_NS",
    "LOOK_NS",
    "MOST_NS",
    "PART",
    "QUESTION_NS",
    "LookingSelector",
    "Looks",
    "offer",
    "processors",
    "used_by_this_thread",
]

# The kernel adds 50 us of its own to it, in which it may put timers together: in all about what it takes a thread that
# is woken on another processor to get up.
DOZE_NS = 10_000
LOOK_NS = 120_000  # a peer's answer to what was just sent takes about as long where both have nothing else to do
QUESTION_NS = 30_000  # one takes three to five microseconds
FOUND_NS = LOOK_NS // 4
PART = 100
MOST_NS = 5 * LOOK_NS
LATELY_NS = 1_000_000  # from one small call of a program to its next


def _nothing() -> None:
    """Where the system has no such call."""


offer: Callable[[], object] = getattr(os, "sched_yield", _nothing)
"""Lets whoever waits for this processor have it."""


class Looks:
    """The budget of looks; see the module's head."""

    __slots__ = ("_credit", "_seen")

    def __init__(self, now_ns: int) -> None:
        """Begin with the most that can be saved.

        Args:
            now_ns: The time.
        """
        self._credit = MOST_NS
        self._seen = now_ns

    def may(self, now_ns: int) -> bool:
        """Return whether to look, at `now_ns`."""
        self._credit = min(MOST_NS, self._credit + (now_ns - self._seen) // PART)
        self._seen = now_ns
        return self._credit >= LOOK_NS

    def found(self) -> None:
        """Note that a look has found something."""
        self._credit = min(MOST_NS, self._credit + FOUND_NS)

    def in_vain(self, took_ns: int) -> None:
        """Note that a look has found nothing in `took_ns`."""
        self._credit -= took_ns


def used_by_this_thread() -> Used:
    """Return what the thread that calls has used."""
    return Used(time.thread_time_ns(), getrusage(RUSAGE_THREAD).ru_nvcsw if _COUNTS else None)


class LookingSelector(selectors.DefaultSelector):
    """The system's selector, for an event loop; it looks before it sleeps. See the module's head.

    asleep: whether what is queued from now on is seen only after something that is selected for has come. resting:
    whether whoever waits from now on has to `rouse` it. placing: where it sleeps, which callers tell where they call,
    by `clock`.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.perf_counter_ns,
        called: Callable[[], bool] = lambda: False,
        *,
        give: Callable[[], bool] = lambda: False,
        share: float | None = 1.0,
        rest_ns: int = REST_NS,
        awaited: Callable[[], bool] = lambda: False,
        hurried: Callable[[], bool] = lambda: False,
        idle: Callable[[], bool] = lambda: False,
        used: Callable[[], Used] = used_by_this_thread,
        placing: Placing | None = None,
    ) -> None:
        """Make it.

        Args:
            clock: Nanoseconds, monotonic.
            called: Returns whether there is something to do for the loop that was queued by another thread, and sees
                to it that the loop does it in its present turn.
            give: Hands out what the loop has settled for other threads, and returns whether there was anything.
            share: Of the time that it takes at most while other threads compute and nothing is hurried; None: none is
                named (quicoll.engine.share).
            rest_ns: The longest rest for that.
            awaited: Returns whether somebody waits for what the loop does.
            hurried: Returns whether what the loop does may not wait.
            idle: Returns whether nothing is under way for anybody here. Then it does not look; and what the loop does
                counts, hurried or not: else nothing would be known of the thread when a call begins that it may rest
                in.
            used: Gives what the thread that selects has used.
            placing: Of the thread that selects; None: a new one, of the system's processors.
        """
        super().__init__()
        self.asleep = self.resting = False
        self._part = share
        self._rest_ns = rest_ns
        self._share: EngineShare | None = None  # from the first select on, which is in the thread that counts
        self._awaited = awaited
        self._hurried = hurried
        self._idle = idle
        self._used = used
        self._roused = threading.Event()
        self._called = called
        self._give = give
        self.clock = clock
        self._looks = Looks(clock())
        self._busy_ns = clock()  # when there was last something under way, as far as this was asked
        self._alone = processors() == 1
        self.placing = Placing(system_processors()) if placing is None else placing

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As of every selector.

        Args:
            timeout: Seconds to wait at most; None: until there is something, 0 and below: do not wait.
        Returns:
            What is ready, with the events that it is ready for.
        """
        if (self._part is None or self._part < 1) and (self._share is None or self.clock() >= self._share.due_ns):
            self._keep_to_share()
        gave = self._give()
        if self._called():
            return super().select(0)
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        if timeout is not None and timeout * 1e9 < LOOK_NS:
            return self._sleep(timeout, gave=gave)
        began = now = self.clock()
        if gave:
            placed = self.placing.sleep(now, _yes)
            doze(self)
            self._woke(placed)
            if self._called():
                return super().select(0)
        if gave or self._alone:
            return self._sleep(_left(timeout, self.clock() - began))
        ready = super().select(0)
        if ready:
            return ready
        if not self._idle():
            self._busy_ns = now
        if now - self._busy_ns > LATELY_NS or not self._looks.may(now):
            return self._sleep(timeout)
        while now - began < LOOK_NS:
            offer()
            ready = super().select(0)
            if self._called() or ready:
                self._looks.found()
                return ready
            before, now = now, self.clock()
            if now - before > QUESTION_NS:
                self._looks.in_vain(LOOK_NS)
                break
        else:
            self._looks.in_vain(now - began)
        return self._sleep(_left(timeout, now - began))

    def _sleep(self, timeout: float | None, *, gave: bool = False) -> list[tuple[selectors.SelectorKey, int]]:
        self.asleep = True
        placed = self.placing.sleep(self.clock(), _yes if gave else self._awaited)
        try:
            return super().select(0 if self._called() else timeout)
        finally:
            self.asleep = False
            self._woke(placed)

    def _woke(self, placed: tuple[set[int], set[int]] | None) -> None:
        """It has slept of its own will. placed: as `placing` gave it before."""
        if placed is not None:
            self.placing.woke(placed)
        if self._share is not None and self._share.counts:
            self._share.slept(self._used())

    def _keep_to_share(self) -> None:
        """Rest, if it owes that; it is time to ask."""
        now = self.clock()
        if self._share is None:
            self._share = EngineShare(self._part, now, self._used(), rest_ns=self._rest_ns)
            return
        if not self._idle() and self._hurried():
            self._share.pass_over(now)
            return
        rest = self._share.rest(now, self._used(), self._hurried)
        if not rest:
            return
        self.resting = True
        if not self._hurried():
            self._roused.wait(rest / 1e9)
        self.resting = False
        self._roused.clear()
        self._share.slept(self._used())

    def offer(self) -> None:
        """Let whoever was woken have Python's lock, and this processor if he is on it."""
        offer()

    def rouse(self) -> None:
        """End a rest, from another thread; nothing where there is none."""
        if self.resting:
            self._roused.set()


def doze(selector: LookingSelector) -> None:
    """Sleep for DOZE_NS, or until something is there that is selected for; Python's lock is free meanwhile.

    Not where select(2) does not know of the selector: on systems where that is no file, or in a process of a thousand.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):
        select.select([selector], [], [], DOZE_NS / 1e9)


def _left(timeout: float | None, waited_ns: int) -> float | None:
    return None if timeout is None else max(0.0, timeout - waited_ns / 1e9)


def _yes() -> bool:
    return True


def processors() -> int:
    """Return how many processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
