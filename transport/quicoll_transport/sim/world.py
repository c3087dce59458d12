"""Virtual time, and the one order in which everything in it happens.

Time stands still while anything is ready to run, and then goes to the next thing that is due. So an hour passes as fast
as what happens in it can be computed, and the same seed gives the same hour.

    ready     callbacks of all hosts, first in, first out
    timers    by due time, equal ones in the order in which they were set

A run ends when its condition holds. It fails, with an error that says who waits for what, when nothing is ready or due
(Deadlock), when callbacks follow each other and time stands still (Spinning), or at its limit of virtual time
(OutOfTime): so no run lasts for ever. What a process throws at its loop's exception handler is kept in `failures`.

Randomness: `rng(label)` gives generators that depend on the seed and the label alone, one for each purpose, so that
more draws in one place change nothing elsewhere.

The trace: `note` adds to a running digest (BLAKE2b), and to whoever records. Two runs with equal digests have done the
same.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.sim.clock import HostClock
from quicoll_transport.sim.confine import WALL_EPOCH_NS, collect, confined
from quicoll_transport.sim.errors import Deadlock, Forbidden, OutOfTime, Spinning
from quicoll_transport.sim.host import Host, HostState
from quicoll_transport.sim.network import Network

if TYPE_CHECKING:
    from quicoll_transport.sim.loop import HostLoop

__all__ = ["Recorder", "World"]

_START_NS = 1_000_000_000_000  # not 0, which code may take for "never"
_TURNS = 1_000_000  # callbacks without time passing; honest work needs thousands
_COLLECT = 200_000  # callbacks between collections of garbage
_SWEEP = 4096  # cancelled timers that are carried before they are looked for

Recorder = Callable[[int, str, str, Any], None]  # true time since the beginning in ns, kind, who, what (see `note`)


class World:
    """Time, hosts and the network between them, from one seed.

    with World(seed) as world: ...   keeps the real world out while it is open, and cleans up.
    now_ns: true time, which no host sees. current: the loop whose callback runs.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_ns = _START_NS
        self.ready: deque[asyncio.Handle] = deque()
        self.current: HostLoop | None = None
        self.hosts: dict[str, Host] = {}
        self.failures: list[tuple[str, str]] = []
        self.recorder: Recorder | None = None
        self.network = Network(self)
        self._timers: list[tuple[int, int, Host | None, Any, tuple[Any, ...]]] = []
        self._order = 0
        self._cancelled = 0
        self._thread = threading.get_ident()
        self._buried: list[HostLoop] = []
        self._digest = blake2b(digest_size=16)
        self._events = 0
        self._confined: Any = None
        self._callbacks = 0
        self._turns = 0  # callbacks since time has moved
        self._hooked: HostLoop | None = None  # to which asynchronous generators that begin now belong

    # -- what there is -------------------------------------------------------------------------------------------

    def rng(self, label: str) -> random.Random:
        """A generator of its own for this purpose. The seeding hashes by SHA-512 and is the same in every process."""
        return random.Random(f"{self.seed}/{label}")  # noqa: S311 - a simulation has no secrets

    def host(self, name: str) -> Host:
        """A new host with an address of its own."""
        if name in self.hosts:
            raise ConfigurationError(f"there is a host {name!r} already")
        number = len(self.hosts) + 1
        if number > 0xFFFF:
            raise ConfigurationError("a world has room for 65535 hosts")
        clock = HostClock(
            now_ns=self.now_ns,
            # Machines that were started at different times: no code may compare the monotonic clocks of two.
            monotonic_ns=_START_NS + number * 1_000_000_000,
            wall_ns=WALL_EPOCH_NS + self.now_ns - _START_NS,
        )
        host = Host(self, name, f"10.0.{number >> 8}.{number & 255}", clock)
        self.hosts[name] = host
        return host

    def resolve(self, name: str) -> str | None:
        host = self.hosts.get(name)
        return None if host is None else host.ip

    def host_at(self, ip: str) -> Host | None:
        return self.network.by_ip(ip)

    @property
    def elapsed_ns(self) -> int:
        """True time since the beginning."""
        return self.now_ns - _START_NS

    @property
    def events(self) -> int:
        return self._events

    @property
    def digest(self) -> str:
        """Of everything that was noted so far, in hex."""
        return self._digest.hexdigest()

    def note(self, kind: str, who: str, what: str, data: bytes = b"", *, detail: object = None) -> None:
        """Something happened: part of the trace. detail: what the recorder is told instead of `what`, if it is there;
        `what` and `data` alone make the digest, so a recorder changes nothing."""
        self._events += 1
        self._digest.update(f"{self.now_ns}|{kind}|{who}|{what}|{len(data)}\n".encode() + data)
        if self.recorder is not None:
            self.recorder(self.elapsed_ns, kind, who, what if detail is None else detail)

    def failed(self, host: Host, text: str) -> None:
        """Code on a host failed where nobody waits for it."""
        self.failures.append((host.name, text))

    # -- scheduling ----------------------------------------------------------------------------------------------

    def at(self, when_ns: int, callback: Callable[..., object], *args: Any) -> None:
        """Call at true time `when_ns`, on no host's behalf."""
        self._order += 1
        heapq.heappush(self._timers, (max(when_ns, self.now_ns), self._order, None, callback, args))

    def after(self, delay_ns: int, callback: Callable[..., object], *args: Any) -> None:
        self.at(self.now_ns + delay_ns, callback, *args)

    def set_timer(self, host: Host, handle: asyncio.TimerHandle) -> None:
        self._order += 1
        due = max(self.now_ns, host.clock.true(_ceil_ns(handle.when())))
        heapq.heappush(self._timers, (due, self._order, host, handle, ()))

    def timer_cancelled(self) -> None:
        """Cancelled timers are dropped when they come up, or here when there are too many of them."""
        self._cancelled += 1
        if self._cancelled > _SWEEP and self._cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if entry[2] is None or not entry[3].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def retime(self, host: Host) -> None:
        """A host's clock has changed its course: its timers are due at other true times."""
        for i, (due, order, owner, handle, args) in enumerate(self._timers):
            if owner is host:
                due = max(self.now_ns, host.clock.true(_ceil_ns(handle.when())))
                self._timers[i] = (due, order, owner, handle, args)
        heapq.heapify(self._timers)

    def timers_of(self, host: Host) -> list[asyncio.TimerHandle]:
        """Timers of the host's present process that are not cancelled, by due time."""
        entries = [entry for entry in sorted(self._timers, key=lambda each: each[:2]) if entry[2] is host]
        return [handle for *_, handle, _ in entries if not handle.cancelled() and handle._loop is host.loop]

    def bury(self, loop: HostLoop) -> None:
        self._buried.append(loop)

    def check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise Forbidden("called from another thread: a simulation has one")

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool] | None = None, *, limit_ns: int) -> None:
        """Run until `until()` holds, or, without it, until the limit. limit_ns: true time from now.

        `until` is asked whenever all that was ready has run. Raises Deadlock, Spinning, OutOfTime.
        """
        self.check_thread()
        end = self.now_ns + limit_ns
        outer = asyncio._get_running_loop()
        hooks = sys.get_asyncgen_hooks()
        self._hooked = None
        self._turns = 0
        try:
            asyncio._set_running_loop(None)
            while True:
                self._run_ready()
                if until is not None and until():
                    return
                due = self._next_due()
                if due is None:
                    if until is None:
                        self.now_ns = end
                        return
                    raise Deadlock(f"nothing is ready or scheduled, and the run has not ended; {self.waiting()}")
                if due > end:
                    self.now_ns = end
                    if until is None:
                        return
                    raise OutOfTime(f"not done after {limit_ns / 1e9:g} s of simulated time; {self.waiting()}")
                if due > self.now_ns:
                    self._turns = 0
                self.now_ns = due
                self._take_due()
        finally:
            asyncio._set_running_loop(outer)
            sys.set_asyncgen_hooks(*hooks)

    def _run_ready(self) -> None:
        ready = self.ready
        while ready:
            handle = ready.popleft()
            self._turn(handle)
            self._run_one(handle)

    def _turn(self, doing: object) -> None:
        """One more callback at this very time, of a host or of the world."""
        self._turns += 1
        if self._turns > _TURNS:
            at = f"{self.elapsed_ns / 1e9:.6f} s"
            raise Spinning(f"{self._turns} callbacks at {at} and time stands still; the last one: {_named(doing)}")

    def _run_one(self, handle: asyncio.Handle) -> None:
        loop: HostLoop = handle._loop  # type: ignore[attr-defined]
        if loop.dead or handle.cancelled():
            return
        if loop.host.admit(handle):
            self.run_handle(handle)

    def run_handle(self, handle: asyncio.Handle) -> None:
        """Run one callback as its host's process."""
        loop: HostLoop = handle._loop  # type: ignore[attr-defined]
        if loop.dead or handle.cancelled():
            return
        self._callbacks += 1
        if self._callbacks % _COLLECT == 0:
            collect()
        self.current = loop
        if loop is not self._hooked:  # a generator keeps the finalizer that was set when it began (PEP 525)
            self._hooked = loop
            sys.set_asyncgen_hooks(firstiter=None, finalizer=loop.generator_dropped)
        asyncio._set_running_loop(loop)
        try:
            handle._run()
        except SystemExit as error:  # of one process, not of the one that simulates it
            loop.host.exited(error)
        finally:
            asyncio._set_running_loop(None)
            self.current = None

    def _next_due(self) -> int | None:
        timers = self._timers
        while timers:
            due, _, owner, handle, _ = timers[0]
            if owner is not None and (handle.cancelled() or handle._loop.dead):
                heapq.heappop(timers)
                self._cancelled = max(0, self._cancelled - 1)
                continue
            return due
        return None

    def _take_due(self) -> None:
        """What is due at this very time, in order. World events run at once, callbacks of hosts become ready.

        Nothing that is ready runs in between: what arrives together is read together, as from a real socket.
        """
        timers = self._timers
        now = self.now_ns
        while timers and timers[0][0] <= now:
            _, _, owner, handle, args = heapq.heappop(timers)
            if owner is None:
                self._turn(handle)
                handle(*args)
            elif not handle.cancelled():
                handle._scheduled = False
                self.ready.append(handle)

    def waiting(self) -> str:
        """Who waits for what, for an error's text."""
        lines = []
        for name in self.hosts:
            host = self.hosts[name]
            tasks = host.loop.tasks if host.loop is not None else ()
            lines += [f"{name} ({host.state.value}): {task.get_name()} at {_where(task.get_coro())}" for task in tasks]
        shown = "; ".join(lines[:12])
        return f"waiting: {shown}{' ...' if len(lines) > 12 else ''}" if lines else "nobody waits"

    # -- the end -------------------------------------------------------------------------------------------------

    def __enter__(self) -> World:
        self._confined = confined(self)
        self._confined.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.close()
        finally:
            self._confined.__exit__(*exc)

    def close(self) -> None:
        """End every process and close what it left. The run is over: nothing of this is recorded."""
        self.recorder = None
        for name in self.hosts:
            host = self.hosts[name]
            if host.state is not HostState.OFF:
                host.power_off()
        self.ready.clear()
        self._timers.clear()
        buried, self._buried = self._buried, []
        for loop in buried:
            loop.close_tasks()

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Have every noted event told to `recorder` as well."""
        kept, self.recorder = self.recorder, recorder
        try:
            yield
        finally:
            self.recorder = kept


def _where(coroutine: Any) -> str:
    """Where it is suspended: the innermost await that can be seen, and whose it is."""
    frames = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            frames.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return " in ".join([frames[-1], frames[0]][: len(frames)]) if frames else "?"


def _named(callback: Any) -> str:
    """A callback for people; a task's step by the task."""
    task = getattr(getattr(callback, "_callback", None), "__self__", None)
    return repr(task) if isinstance(task, asyncio.Task) else repr(callback)


def _ceil_ns(seconds: float) -> int:
    """Up, so that a timer is never early; a float may hold a little more than was meant."""
    whole = int(seconds)
    part = (seconds - whole) * 1e9
    nearest = round(part)
    return whole * 1_000_000_000 + (nearest if abs(part - nearest) < 1e-2 + 1e-6 * abs(seconds) else -int(-part // 1))
