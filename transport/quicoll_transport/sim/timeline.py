"""Virtual time, and the one order in which everything happens in it.

Time stands still while anything is ready to run, and then moves to the next thing that is due:

    ready     callbacks of all hosts, first in, first out
    timers    by due time, equal ones in the order in which they were set

Equal seeds give equal runs. `rng(label)` gives generators that depend on the seed and the label alone, one for each
purpose, so that more draws in one place change nothing elsewhere. `note` adds an event to a running digest (BLAKE2b)
and passes it to the recorder: two runs with equal digests did the same.

Hosts, loops, sockets and the network depend on this module and not on the world that holds them.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import random
import sys
import threading
from asyncio import _set_running_loop  # asyncio offers it to event loops, under this name
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

from quicoll_transport.sim.errors import Forbidden, Spinning

if TYPE_CHECKING:
    from quicoll_transport.sim.clock import HostClock

__all__ = ["START_NS", "LoopOwner", "ProcessLoop", "Recorder", "Timeline"]

START_NS = 1_000_000_000_000  # not 0, which code may take for "never"
_TURNS = 1_000_000  # callbacks without time passing; honest work needs thousands
_COLLECT = 200_000  # callbacks between collections of garbage
_SWEEP = 4096  # cancelled timers that are carried before they are removed

Recorder = Callable[[int, str, str, Any], None]  # true time since the beginning in ns, kind, who, what (see `note`)


class LoopOwner(Protocol):
    """The host of a process, as far as its callbacks and timers need one."""

    name: str
    clock: HostClock
    lives: int

    def admit(self, handle: asyncio.Handle) -> bool:
        """Return True if the callback may run now; otherwise keep it until it may."""

    def exited(self, error: SystemExit) -> None:
        """Take note that the process asked for its own end."""


class ProcessLoop(Protocol):
    """The event loop of one simulated process, as far as running its callbacks needs one."""

    dead: bool

    @property
    def host(self) -> LoopOwner: ...

    def generator_dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Close an asynchronous generator that was left half way."""

    def close_tasks(self) -> None:
        """Close what was suspended when the process ended."""


class Timeline:
    """Time, randomness, order of events and trace of one run.

    Attributes:
        now_ns: True time, which no host sees.
        ready: Callbacks that run before time moves.
        current: The loop whose callback runs; None between callbacks.
        failures: (host, text) of errors that nobody waits for, oldest first.
        recorder: Gets every noted event; None for no recording.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_ns = START_NS
        self.ready: deque[asyncio.Handle] = deque()
        self.current: ProcessLoop | None = None
        self.failures: list[tuple[str, str]] = []
        self.recorder: Recorder | None = None
        self._timers: list[tuple[int, int, LoopOwner | None, Any, tuple[Any, ...]]] = []
        self._order = 0
        self._cancelled = 0
        self._thread_id = threading.get_ident()
        self._buried: list[ProcessLoop] = []
        self._digest = blake2b(digest_size=16)
        self._events = 0
        self._callbacks = 0
        self._turns = 0  # callbacks since time has moved
        self._hooked: ProcessLoop | None = None  # owns asynchronous generators that begin now

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
        heapq.heappush(self._timers, (max(when_ns, self.now_ns), self._order, None, callback, args))

    def after(self, delay_ns: int, callback: Callable[..., object], *args: Any) -> None:
        """Call `delay_ns` of true time from now, on no host's behalf."""
        self.at(self.now_ns + delay_ns, callback, *args)

    def set_timer(self, host: LoopOwner, handle: asyncio.TimerHandle) -> None:
        """Schedule a timer of a process; it is due by its host's clock."""
        self._order += 1
        due = max(self.now_ns, host.clock.true(_ceil_ns(handle.when())))
        heapq.heappush(self._timers, (due, self._order, host, handle, ()))

    def timer_cancelled(self) -> None:
        """Count a cancelled timer. It is dropped when it comes up, or here when there are too many of them."""
        self._cancelled += 1
        if self._cancelled > _SWEEP and self._cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if entry[2] is None or not entry[3].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def retime(self, host: LoopOwner) -> None:
        """Schedule the host's timers anew, after its clock changed its speed or leapt."""
        for i, (due, order, owner, handle, args) in enumerate(self._timers):
            if owner is host:
                due = max(self.now_ns, host.clock.true(_ceil_ns(handle.when())))
                self._timers[i] = (due, order, owner, handle, args)
        heapq.heapify(self._timers)

    def timers_of(self, loop: ProcessLoop) -> list[asyncio.TimerHandle]:
        """Return the process's timers that are not cancelled, by due time."""
        entries = sorted(self._timers, key=lambda each: each[:2])
        handles = [handle for _, _, owner, handle, _ in entries if owner is not None and not handle.cancelled()]
        return [handle for handle in handles if handle._loop is loop]  # noqa: SLF001 - as in run_handle

    def bury(self, loop: ProcessLoop) -> None:
        """Keep the loop of a process that ended; its tasks are closed when the run is over."""
        self._buried.append(loop)

    def check_thread(self) -> None:
        """Raise Forbidden outside the thread of the simulation."""
        if threading.get_ident() != self._thread_id:
            raise Forbidden("called from another thread: a simulation has one")

    # -- running one callback ------------------------------------------------------------------------------------

    def run_handle(self, handle: asyncio.Handle) -> None:
        """Run one callback as its host's process."""
        loop: ProcessLoop = handle._loop  # type: ignore[attr-defined]  # noqa: SLF001 - no public way to it
        if loop.dead or handle.cancelled():
            return
        self._callbacks += 1
        if self._callbacks % _COLLECT == 0:
            gc.collect()  # at a fixed point of the run; see `confine`
        self.current = loop
        if loop is not self._hooked:  # a generator keeps the finalizer that was set when it began (PEP 525)
            self._hooked = loop
            sys.set_asyncgen_hooks(firstiter=None, finalizer=loop.generator_dropped)
        _set_running_loop(loop)  # type: ignore[arg-type]  # a HostLoop is one; the type says only what is used here
        try:
            handle._run()  # noqa: SLF001 - as asyncio's own loops do
        except SystemExit as error:  # of one process, not of the one that simulates it
            loop.host.exited(error)
        finally:
            _set_running_loop(None)
            self.current = None

    def _run_ready(self) -> None:
        ready = self.ready
        while ready:
            handle = ready.popleft()
            self._turn(handle)
            loop: ProcessLoop = handle._loop  # type: ignore[attr-defined]  # noqa: SLF001 - the same
            if not loop.dead and not handle.cancelled() and loop.host.admit(handle):
                self.run_handle(handle)

    def _turn(self, callback: object) -> None:
        """Count one more callback at this very time. Raises Spinning when there are too many."""
        self._turns += 1
        if self._turns > _TURNS:
            at = f"{self.elapsed_ns / 1e9:.6f} s"
            raise Spinning(f"{self._turns} callbacks at {at} and time stands still; the last one: {_named(callback)}")

    def _next_due(self) -> int | None:
        timers = self._timers
        while timers:
            due, _, owner, handle, _ = timers[0]
            if owner is not None and (handle.cancelled() or handle._loop.dead):  # noqa: SLF001 - the same
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
            _, _, owner, handle, args = heapq.heappop(timers)
            if owner is None:
                self._turn(handle)
                handle(*args)
            elif not handle.cancelled():
                handle._scheduled = False  # noqa: SLF001 - as asyncio's own loops do
                self.ready.append(handle)


def _named(callback: Any) -> str:
    """Return a callback's text for people; a task's step by the task."""
    task = getattr(getattr(callback, "_callback", None), "__self__", None)
    return repr(task) if isinstance(task, asyncio.Task) else repr(callback)


def _ceil_ns(seconds: float) -> int:
    """Return nanoseconds, rounded up, so that a timer is never early; a float may hold a little more than was meant."""
    whole = int(seconds)
    part = (seconds - whole) * 1e9
    nearest = round(part)
    return whole * 1_000_000_000 + (nearest if abs(part - nearest) < 1e-2 + 1e-6 * abs(seconds) else -int(-part // 1))
