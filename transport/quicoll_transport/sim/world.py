"""A simulated world: hosts and the network between them, on one timeline, from one seed.

An hour of virtual time passes as fast as what happens in it can be computed, and equal seeds give equal hours.

A run ends when its condition holds. It fails, with an error that says who waits for what, when nothing is ready or due
(Deadlock), when callbacks follow each other and time stands still (Spinning), or at its limit of virtual time
(OutOfTime): so no run lasts for ever. What a process passes to its loop's exception handler is kept in `failures`.
"""

from __future__ import annotations

import sys
from asyncio import _get_running_loop, _set_running_loop  # asyncio offers them to event loops, under these names
from collections.abc import Callable
from typing import Any

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.sim.clock import HostClock
from quicoll_transport.sim.confine import WALL_EPOCH_NS, confined
from quicoll_transport.sim.errors import Deadlock, OutOfTime
from quicoll_transport.sim.host import Host, HostState
from quicoll_transport.sim.network import Network
from quicoll_transport.sim.timeline import START_NS, Timeline

__all__ = ["World"]


class World(Timeline):
    """Hosts, and the network between them. While it is open (`with World(seed) as world`), it keeps the real world out.

    Args:
        seed: Determines everything that happens in it.

    Attributes:
        hosts: By name, in the order in which they were made.
        network: The paths between them.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.hosts: dict[str, Host] = {}
        self.network = Network(self)
        self._confined: Any = None

    def host(self, name: str, *, addresses: int = 1) -> Host:
        """Add a host with an address of its own.

        Args:
            name: Its name, by which others also resolve it.
            addresses: How many it has, up to 4, each in a network of its own.
        Raises:
            ConfigurationError: There is a host of this name, or the world is full.
        """
        if name in self.hosts:
            raise ConfigurationError(f"there is a host {name!r} already")
        number = len(self.hosts) + 1
        if number > 0xFFFF:
            raise ConfigurationError("a world has room for 65535 hosts")
        clock = HostClock(
            now_ns=self.now_ns,
            # Machines that were started at different times: no code may compare the monotonic clocks of two.
            monotonic_ns=START_NS + number * 1_000_000_000,
            wall_ns=WALL_EPOCH_NS + self.elapsed_ns,
        )
        host = Host(self, clock, self.network.attach(name, f"10.0.{number >> 8}.{number & 255}"))
        self.hosts[name] = host
        for network in range(1, addresses):
            self.network.attach_further(name, f"10.{network}.{number >> 8}.{number & 255}")
        return host

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool] | None = None, *, limit_ns: int) -> None:
        """Run until a condition holds, or, without one, until the limit.

        Args:
            until: The condition; evaluated whenever all that was ready has run, on no process's behalf.
            limit_ns: True time from now at which the run ends at the latest.
        Raises:
            Deadlock: Nothing is ready or due, and the condition does not hold.
            Spinning: Callback follows callback and time stands still.
            OutOfTime: The limit is reached, and the condition does not hold.
        """
        self.check_thread()
        end = self.now_ns + limit_ns
        outer = _get_running_loop()
        hooks = sys.get_asyncgen_hooks()
        self._entered = None
        self._turns = 0
        try:
            _set_running_loop(None)
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
                self._move_to(due)
        finally:
            self._entered = None
            _set_running_loop(outer)
            sys.set_asyncgen_hooks(*hooks)

    def waiting(self) -> str:
        """Return who waits for what, for an error's text."""
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
        self._exits.clear()
        buried, self._buried = self._buried, []
        for loop in buried:
            loop.close_tasks()


def _where(coroutine: Any) -> str:
    """Return where a coroutine is suspended: the innermost await that can be seen, and the function that began it."""
    frames = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            frames.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return " in ".join([frames[-1], frames[0]][: len(frames)]) if frames else "?"
