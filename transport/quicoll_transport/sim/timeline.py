"""Virtual time, and the one order in which everything happens in it.

Time stands still while anything is ready to run, and then moves to the next thing that is due:

    ready     callbacks of all hosts, first in, first out
    timers    by due time, equal ones in the order in which they were set

What is ready or due for a process is a `PendingCall`, which says whose it is: its `Process`. Everything else that is
due belongs to the world. While a callback of a process runs, `current` is its loop, and so is asyncio's running loop;
that stays set until another process runs or the world has its say, since to set it costs a system call (Python 3.11).

Equal seeds give equal runs. `rng(label)` gives generators that depend on the seed and the label alone, one for each
purpose, so that more draws in one place change nothing elsewhere. `note` adds an event to a running digest (BLAKE2b)
and passes it to the recorder: two runs with equal digests did the same.

Hosts, loops, sockets and the network depend on this module and not on the world that holds them.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import math
import random
import sys
import threading
from asyncio import _set_running_loop  # asyncio offers it to event loops, under this name
from asyncio.format_helpers import _format_callback_source  # how asyncio's own handles show what they call
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from quicoll_transport.sim.errors import Forbidden, Spinning

if TYPE_CHECKING:
    from quicoll_transport.sim.clock import HostClock

__all__ = ["START_NS", "LoopOwner", "PendingCall", "Process", "Recorder", "Timeline", "TimerCall"]

START_NS = 1_000_000_000_000  # not 0, which code may take for "never"
_TURNS = 1_000_000  # callbacks without time passing; honest work needs thousands
_COLLECT = 200_000  # callbacks between collections of garbage
_SWEEP = 4096  # cancelled timers that are carried before they are removed

Recorder = Callable[[int, str, str, Any], None]  # true time since the beginning in ns, kind, who, what (see `note`)


class LoopOwner:
    """The host of a process, as far as its callbacks and timers need one."""

    name: str
    clock: HostClock
    lives: int

    def admit(self, call: PendingCall) -> bool:
        """Return True if the callback may run now; otherwise keep it until it may."""
        raise NotImplementedError

    def exited(self, error: SystemExit) -> None:
        """Take note that the process asked for its own end."""
        raise NotImplementedError


class Process:
    """A simulated process, as far as running its callbacks needs one.

    Attributes:
        host: Where it runs.
        loop: Its event loop, a HostLoop.
        dead: Whether it has ended; nothing of it runs then.
    """

    def __init__(self, timeline: Timeline, host: LoopOwner, loop: Any) -> None:
        self.host = host
        self.loop = loop
        self.dead = False
        self._timeline = timeline

    def time(self) -> float:
        """Return seconds of the host's monotonic clock."""
        return self.host.clock.local(self._timeline.now_ns) / 1e9

    def call_soon(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> PendingCall:
        """Let a callback run when what is ready has run; never in a dead process. context: None: a copy of this one."""
        call = PendingCall(self, callback, args, context)
        if not self.dead:
            self._timeline.ready.append(call)
        return call

    def call_at(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> TimerCall:
        """Let a callback run when the host's clock shows `when`; never in a dead process."""
        timer = TimerCall(self, callback, args, context, when)
        if not self.dead and when != math.inf:
            self._timeline.set_timer(timer)
        return timer

    def timer_cancelled(self) -> None:
        self._timeline.timer_cancelled()


class PendingCall:
    """A callback that waits for its turn. asyncio's own loops have `asyncio.Handle` for it, and this is used like one.

    Attributes:
        process: Whose it is.
        is_cancelled: Whether it does not run any more.
    """

    def __init__(
        self,
        process: Process,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        self.process = process
        self.is_cancelled = False
        self._callback: Callable[..., object] | None = callback
        self._args = args
        self._context: Any = contextvars.copy_context() if context is None else context

    def cancel(self) -> None:
        """Let it not run, and let go of what it would have called."""
        self.is_cancelled = True
        self._callback, self._args = None, ()

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self.is_cancelled

    def get_context(self) -> contextvars.Context:
        """Return the context that it runs in."""
        context: contextvars.Context = self._context
        return context

    def run(self) -> None:
        """Run it in its context. What it raises is its loop's to handle, but for what ends a process."""
        callback, args = self._callback, self._args
        try:
            if len(args) == 1:
                self._context.run(callback, args[0])
            else:
                self._context.run(callback, *args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            what = f"Exception in callback {_format_callback_source(callback, args)}"
            self.process.loop.call_exception_handler({"message": what, "exception": error, "handle": self})

    def __repr__(self) -> str:
        what = "cancelled" if self._callback is None else str(_format_callback_source(self._callback, self._args))
        return f"<{type(self).__name__} {what}>"

    def named(self) -> str:
        """Return what it calls, for people; a task's step by the task."""
        task = getattr(self._callback, "__self__", None)
        return repr(task) if isinstance(task, asyncio.Task) else repr(self)


class TimerCall(PendingCall):
    """A callback that waits for its time, like `asyncio.TimerHandle`."""

    def __init__(
        self,
        process: Process,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
        when: float,
    ) -> None:
        super().__init__(process, callback, args, context)
        self._when = when

    def cancel(self) -> None:
        """Let it not run, and let go of what it would have called."""
        if not self.is_cancelled:
            self.process.timer_cancelled()
        super().cancel()

    def when(self) -> float:
        """Return when it is due, by its host's monotonic clock."""
        return self._when

    def __repr__(self) -> str:
        what = "cancelled" if self._callback is None else str(_format_callback_source(self._callback, self._args))
        return f"<{type(self).__name__} when={self._when} {what}>"


class Timeline:
    """Time, randomness, order of events and trace of one run.

    Attributes:
        now_ns: True time, which no host sees.
        ready: Callbacks that run before time moves.
        failures: (host, text) of errors that nobody waits for, oldest first.
        recorder: Gets every noted event; None for no recording.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_ns = START_NS
        self.ready: deque[PendingCall] = deque()
        self.failures: list[tuple[str, str]] = []
        self.recorder: Recorder | None = None
        self._timers: list[tuple[int, int, TimerCall | _Event]] = []  # a heap: when, in which order, and what
        self._order = 0
        self._cancelled = 0
        self._thread_id = threading.get_ident()
        self._buried: list[Any] = []  # HostLoops
        self._digest = blake2b(digest_size=16)
        self._events = 0
        self._callbacks = 0
        self._turns = 0  # callbacks since time has moved
        # What asked for the end of its process is kept: of a task that is let go of before the process is gone asyncio
        # says that nobody took its error.
        self._exits: list[PendingCall] = []
        self._running: Process | None = None  # whose callback runs
        self._entered: Process | None = None  # whose loop asyncio takes for the running one

    # -- randomness and trace ------------------------------------------------------------------------------------

    def rng(self, label: str) -> random.Random:
        """Return a new generator for this purpose. Seeding hashes by SHA-512, so it is the same in every process."""
        return random.Random(f"{self.seed}/{label}")  # noqa: S311 - a simulation has no secrets

    @property
    def elapsed_ns(self) -> int:
        """True time since the beginning."""
        return self.now_ns - START_NS

    @property
    def events(self) -> int:
        """Number of events noted so far."""
        return self._events

    @property
    def digest(self) -> str:
        """Hex digest of everything noted so far."""
        return self._digest.hexdigest()

    def note(self, kind: str, who: str, what: str, data: bytes = b"", *, detail: object = None) -> None:
        """Add an event to the trace.

        Args:
            kind: Kind of event.
            who: Host or part of the simulation that it happened to.
            what: Text of the event.
            data: Bytes that belong to it.
            detail: What the recorder gets in place of `what`; None for `what` itself. It is no part of the digest, so
                a recorder changes nothing.
        """
        self._events += 1
        self._digest.update(f"{self.now_ns}|{kind}|{who}|{what}|{len(data)}\n".encode() + data)
        if self.recorder is not None:
            self.recorder(self.elapsed_ns, kind, who, what if detail is None else detail)

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Pass every noted event to `recorder` as well, within the `with` block."""
        kept, self.recorder = self.recorder, recorder
        try:
            yield
        finally:
            self.recorder = kept

    def failed(self, host: str, text: str) -> None:
        """Keep an error of code on `host` that nobody waits for."""
        self.failures.append((host, text))

    # -- scheduling ----------------------------------------------------------------------------------------------

    def at(self, when_ns: int, callback: Callable[..., object], *args: Any) -> None:
        """Call at true time `when_ns`, on no host's behalf."""
        self._order += 1
        heapq.heappush(self._timers, (max(when_ns, self.now_ns), self._order, _Event(callback, args)))

    def after(self, delay_ns: int, callback: Callable[..., object], *args: Any) -> None:
        """Call `delay_ns` of true time from now, on no host's behalf."""
        self.at(self.now_ns + delay_ns, callback, *args)

    def carry(self, delay_ns: int, callback: Callable[..., object], *args: Any) -> None:
        """Call as `after` does what never asks for the running loop: the simulated network's own, for each datagram."""
        self._order += 1
        due = self.now_ns + delay_ns if delay_ns > 0 else self.now_ns
        heapq.heappush(self._timers, (due, self._order, _Event(callback, args, is_quiet=True)))

    def set_timer(self, timer: TimerCall) -> None:
        """Schedule a timer of a process; it is due by its host's clock."""
        self._order += 1
        heapq.heappush(self._timers, (self._due(timer), self._order, timer))

    def _due(self, timer: TimerCall) -> int:
        due = timer.process.host.clock.true(_ceil_ns(timer.when()))
        return due if due > self.now_ns else self.now_ns

    def timer_cancelled(self) -> None:
        """Count a cancelled timer. It is dropped when it comes up, or here when there are too many of them."""
        self._cancelled += 1
        if self._cancelled > _SWEEP and self._cancelled * 2 > len(self._timers):
            kept = [
                entry for entry in self._timers if not (isinstance(entry[2], PendingCall) and entry[2].is_cancelled)
            ]
            self._timers[:] = kept  # in place: who takes what is due, one by one, goes on with it
            heapq.heapify(self._timers)
            self._cancelled = 0

    def retime(self, host: LoopOwner) -> None:
        """Schedule the host's timers anew, after its clock changed its speed or leapt."""
        for i, (_, order, what) in enumerate(self._timers):
            if isinstance(what, TimerCall) and what.process.host is host:
                self._timers[i] = (self._due(what), order, what)
        heapq.heapify(self._timers)

    def timers_of(self, process: Process) -> list[TimerCall]:
        """Return the process's timers that are not cancelled, by due time."""
        found = [what for _, _, what in sorted(self._timers, key=_when) if isinstance(what, TimerCall)]
        return [timer for timer in found if timer.process is process and not timer.is_cancelled]

    def bury(self, loop: Any) -> None:
        """Keep the loop of a process that ended; its tasks are closed when the run is over."""
        self._buried.append(loop)

    def check_thread(self) -> None:
        """Raise Forbidden outside the thread of the simulation."""
        if threading.get_ident() != self._thread_id:
            raise Forbidden("called from another thread: a simulation has one")

    # -- running one callback ------------------------------------------------------------------------------------

    @property
    def current(self) -> Any:
        """The loop whose callback runs; None between callbacks."""
        return None if self._running is None else self._running.loop

    def run_call(self, call: PendingCall) -> None:
        """Run one callback as its host's process."""
        process = call.process
        if process.dead or call.is_cancelled:
            return
        self._callbacks += 1
        if self._callbacks % _COLLECT == 0:
            gc.collect()  # at a fixed point of the run; see `confine`
        self._running = process
        if process is not self._entered:
            self._enter(process)
        try:
            call.run()
        except SystemExit as error:  # of one process, not of the one that simulates it
            self._exits.append(call)
            process.host.exited(error)
        finally:
            self._running = None

    def _enter(self, process: Process) -> None:
        """Let asyncio take this process's loop for the running one, and it close the generators that begin from now on.

        A generator keeps the finalizer that was set when it began (PEP 525).
        """
        self._entered = process
        sys.set_asyncgen_hooks(firstiter=None, finalizer=process.loop.generator_dropped)
        _set_running_loop(process.loop)

    def _leave(self) -> None:
        """Let asyncio have no running loop."""
        if self._entered is not None:
            self._entered = None
            _set_running_loop(None)

    def _run_ready(self) -> None:
        ready = self.ready
        while ready:
            call = ready.popleft()
            self._turns += 1
            if self._turns > _TURNS:
                self._spins(call.named())
            process = call.process
            if not process.dead and not call.is_cancelled and process.host.admit(call):
                self.run_call(call)

    def _spins(self, what: str) -> None:
        """Raise Spinning: there are too many callbacks at this very time."""
        at = f"{self.elapsed_ns / 1e9:.6f} s"
        raise Spinning(f"{self._turns} callbacks at {at} and time stands still; the last one: {what}")

    def _next_due(self) -> int | None:
        timers = self._timers
        while timers:
            due, _, what = timers[0]
            if isinstance(what, PendingCall) and (what.is_cancelled or what.process.dead):
                heapq.heappop(timers)
                self._cancelled = max(0, self._cancelled - 1)
                continue
            return due
        return None

    def _move_to(self, due: int) -> None:
        """Move to time `due` and take what is due, in order: events of the world run, callbacks become ready.

        Nothing that is ready runs in between: what arrives together is read together, as from a real socket.
        """
        if due > self.now_ns:
            self._turns = 0
        self.now_ns = due
        timers = self._timers
        while timers and timers[0][0] <= due:
            _, _, what = heapq.heappop(timers)
            if isinstance(what, _Event):
                self._turns += 1
                if self._turns > _TURNS:
                    self._spins(repr(what.callback))
                if not what.is_quiet:
                    self._leave()
                what.callback(*what.args)
            elif not what.is_cancelled:
                self.ready.append(what)


class _Event:
    """What the world itself does at a time. is_quiet: it never asks for the running loop."""

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], *, is_quiet: bool = False) -> None:
        self.callback = callback
        self.args = args
        self.is_quiet = is_quiet


def _when(entry: tuple[int, int, object]) -> tuple[int, int]:
    return entry[0], entry[1]


def _ceil_ns(seconds: float) -> int:
    """Return nanoseconds, rounded up, so that a timer is never early; a float may hold a little more than was meant."""
    whole = int(seconds)
    part = (seconds - whole) * 1e9
    nearest = round(part)
    return whole * 1_000_000_000 + (nearest if abs(part - nearest) < 1e-2 + 1e-6 * abs(seconds) else -int(-part // 1))
