"""A machine: an address, a clock, and one process at a time.

States and transitions; what is not in the table raises ConfigurationError and changes nothing:

    state       start     pause     resume    kill      power_off     power_on
    OFF         -         -         -         -         -             IDLE
    IDLE        RUNNING   -         -         IDLE      OFF           -
    RUNNING     -         PAUSED    -         IDLE      OFF           -
    PAUSED      -         -         RUNNING   IDLE      OFF           -

IDLE: the machine is up and answers "nothing listens there" (ICMP), as after a kill. OFF: it answers nothing at all.
Either end of a process is abrupt, like SIGKILL or a pulled plug: not one more line of it runs, nothing is flushed.
PAUSED is SIGSTOP: time goes on, datagrams fill the socket's buffer and then are lost, nothing runs. On resumption it
finds its timers overdue.

A process is its event loop and what was scheduled on it. Its tasks stay where they were, suspended, until the world is
closed: Python would run their `finally` blocks, which no killed process does. They are closed at the very end, when
nothing that they do can reach anybody.

on_exit: told of a SystemExit, by which any task or callback asks for the end of its process; what follows is for
whoever starts processes. Without it, it is a failure of the world.

slow_ns: true time that each callback of the process takes, for a slow machine; 0 by default, work takes no time.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.sim.loop import HostLoop
from quicoll_transport.sim.timeline import LoopOwner

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll_transport.sim.clock import HostClock
    from quicoll_transport.sim.network import Interface, OpenSocket
    from quicoll_transport.sim.timeline import PendingCall, Timeline

__all__ = ["Host", "HostState"]


class HostState(enum.Enum):
    OFF = "off"
    IDLE = "idle"
    RUNNING = "running"
    PAUSED = "paused"


class Host(LoopOwner):
    """A machine of a world; `World.host` makes it.

    Attributes:
        name: Unique in the world.
        interface: Where it is attached to the network.
        clock: Its clock; change it by `set_drift` and `leap`, which move the timers with it.
        state: See the head of this module.
        loop: The event loop of the process that runs; None without one.
        lives: Number of processes started here so far.
        slow_ns: True time that each callback takes, for a slow machine; by default work takes no time.
        on_exit: Called with the SystemExit by which a task or callback asks for the end of its process. The process
            is not ended here: the callback does it. None to count an exit as a failure of the world.
    """

    def __init__(self, timeline: Timeline, clock: HostClock, interface: Interface) -> None:
        self.timeline = timeline
        self.name = interface.name
        self.interface = interface
        self.clock = clock
        self.state = HostState.IDLE
        self.loop: HostLoop | None = None
        self.lives = 0
        self.slow_ns = 0
        self.on_exit: Callable[[SystemExit], None] | None = None
        self._backlog: deque[PendingCall] = deque()
        self._busy_until = 0
        self._wakes = False

    def __repr__(self) -> str:
        return f"<Host {self.name} {self.ip} {self.state.value}>"

    @property
    def ip(self) -> str:
        """Its address, the first of several."""
        return self.interface.ip

    @property
    def ips(self) -> tuple[str, ...]:
        """All its addresses, the first one first."""
        return (self.ip, *(each.ip for each in self.interface.further))

    @property
    def sockets(self) -> dict[int, OpenSocket]:
        """Sockets of its process, by port."""
        return self.interface.sockets

    @property
    def up(self) -> bool:
        """False while it is OFF."""
        return self.state is not HostState.OFF

    # -- the process ---------------------------------------------------------------------------------------------

    def start(self) -> HostLoop:
        """Start a process and return its event loop."""
        self._demand("start", HostState.IDLE)
        self.lives += 1
        self.state = HostState.RUNNING
        self._busy_until = 0
        self.loop = HostLoop(self.timeline, self, self.interface)
        self._note("start")
        return self.loop

    def pause(self) -> None:
        self._demand("pause", HostState.RUNNING)
        self.state = HostState.PAUSED
        self._note("pause")

    def resume(self) -> None:
        self._demand("resume", HostState.PAUSED)
        self.state = HostState.RUNNING
        self._note("resume")
        self._let_go()

    def kill(self) -> None:
        """End the process, if there is one."""
        self._demand("kill", HostState.IDLE, HostState.RUNNING, HostState.PAUSED)
        self._end()
        self.state = HostState.IDLE
        self._note("kill")

    def power_off(self) -> None:
        self._demand("power off", HostState.IDLE, HostState.RUNNING, HostState.PAUSED)
        self._end()
        self.state = HostState.OFF
        self.interface.switch(up=False)
        self._note("power_off")

    def power_on(self) -> None:
        self._demand("power on", HostState.OFF)
        self.state = HostState.IDLE
        self.interface.switch(up=True)
        self._note("power_on")

    def exited(self, error: SystemExit) -> None:
        """Its process has asked for its own end."""
        if self.on_exit is not None:
            self.on_exit(error)
        else:
            self.timeline.failed(self.name, f"SystemExit: {error}")

    def _note(self, transition: str) -> None:
        self.timeline.note("host", self.name, f"{transition} {self.lives}", detail=transition)

    def _demand(self, action: str, *states: HostState) -> None:
        if self.state not in states:
            raise ConfigurationError(f"{self.name} is {self.state.value}: it cannot {action}")

    def _end(self) -> None:
        loop, self.loop = self.loop, None
        if loop is None:
            return
        self.interface.sever()
        self._backlog.clear()
        loop.die()

    # -- its clock -----------------------------------------------------------------------------------------------

    def set_drift(self, ppm: int) -> None:
        self.clock.set_drift(ppm, now_ns=self.timeline.now_ns)
        self.timeline.retime(self)

    def leap(self, ns: int) -> None:
        self.clock.leap(ns, now_ns=self.timeline.now_ns)
        self.timeline.retime(self)

    # -- running -------------------------------------------------------------------------------------------------

    def admit(self, call: PendingCall) -> bool:
        """Return whether a callback of this host's process may run now; if not, it is kept until it may."""
        if self.state is HostState.PAUSED or self._backlog or self._busy_until > self.timeline.now_ns:
            self._backlog.append(call)
            self._let_go()
            return False
        if self.slow_ns:
            self._busy_until = self.timeline.now_ns + self.slow_ns
        return True

    def _let_go(self) -> None:
        """See that the backlog is run when the process can run it."""
        if self._backlog and self.state is HostState.RUNNING and not self._wakes:
            self._wakes = True
            self.timeline.at(max(self.timeline.now_ns, self._busy_until), self._wake)

    def _wake(self) -> None:
        self._wakes = False
        if self.state is not HostState.RUNNING or not self._backlog:
            return
        call = self._backlog.popleft()
        if self.slow_ns:
            self._busy_until = self.timeline.now_ns + self.slow_ns
        self.timeline.run_call(call)
        while not self.slow_ns and self._backlog and self.state is HostState.RUNNING:
            self.timeline.run_call(self._backlog.popleft())
        self._let_go()
