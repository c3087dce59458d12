"""One node of a simulated cluster: its host, its disk, its process and who starts it again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from quicoll.sim.disk.disk import SimDisk
from quicoll.sim.disk.files import DiskFailure
from quicoll_transport.sim import HostState

if TYPE_CHECKING:
    from quicoll.engine.engine import Engine
    from quicoll.observability.flight_record import FlightFile
    from quicoll_transport.endpoint import Endpoint
    from quicoll_transport.faults.compose import Faults
    from quicoll_transport.sim import Host, HostLoop

__all__ = ["Departed", "Machine"]


_DISK_FAULTS = {
    "write": DiskFailure.WRITE_ERROR,
    "fsync": DiskFailure.SYNC_ERROR,
    "power": DiskFailure.POWER_LOSS,
    "kill": DiskFailure.KILL,
}


class Departed(BaseException):
    """The worker leaves its job, in order. No `except Exception` of the code that it leaves holds it."""


class Machine:
    """life(machine): the process, a coroutine made anew for every start. ended: it has ended by itself.
    was_cut_off(machine, while): its disk or its host has ended it.

    done: the process ended by itself and well; it is not started again. error: by which the last one ended, None if
    well; failures: how many ended by one. trouble: the last error of a collective or a process here, and its true time.
    commits: steps that its processes applied.
    disturbances: how often its time was interfered with; disturbed: it is so now. engine, endpoint, faults: of the
    process; the first only of a worker's. awaited: it comes later, by a fault, and nothing else starts it. departs: its
    process leaves the job where it would enter a step. terminated: it was asked to end, and a process that ends so is
    not done. dismissed: it was told to leave the job.
    lies_to: nodes that get other bits from it; lied_by_lanes: what its lanes have made for them, on its way (Lies).
    alarm_ns: between its alarms; 0: it raises none.
    forges: what it forges of its state; "": nothing. forgeries: how often it has, by what.
    on_vote: called at each vote of its process, before it is cast. on_sigterm: what its process does at SIGTERM.
    on_end: called when its process has ended, however.
    flights: what its flight recorders wrote last, by the number of the life; they outlive processes, as a disk does.
    flip_bit: flips a bit of its registered state (CheckedJob.flip_bit); None where it has not joined.
    """

    def __init__(
        self,
        host: Host,
        life: Callable[[Machine], Coroutine[Any, Any, Any]],
        *,
        ended: Callable[[Machine], None],
        was_cut_off: Callable[[Machine, str], None],
        awaited: bool = False,
    ) -> None:
        self.host = host
        self.disk = SimDisk(host.timeline.rng(f"disk/{host.name}"), now_ns=lambda: host.timeline.now_ns)
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.failures = 0
        self.trouble: tuple[BaseException, float] | None = None
        self.commits = 0
        self.commits_at_heal = 0
        self.disturbances = 0
        self.stays_down = False  # it was crashed by a fault, and waits for a restart
        self.awaited = awaited
        self.departs = False
        self.terminated = False
        self.dismissed = False
        self.lies_to: dict[str, None] = {}
        self.lied_by_lanes: dict[int, int] = {}
        self.alarm_ns = 0
        self.forges = ""
        self.forgeries: dict[str, int] = {}
        self.on_vote: Callable[[], None] = lambda: None
        self.on_cast: Callable[[int, int], None] = lambda view_id, index: None
        self.on_sigterm: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self.engine: Engine | None = None
        self.engine_loop: asyncio.AbstractEventLoop | None = None
        self.endpoint: Endpoint | None = None
        self.faults: Faults | None = None
        self.flights: dict[int, FlightFile] = {}
        self.flip_bit: Callable[[int], str] | None = None
        self.disk.on_down = self._cut_off
        self.host.on_exit = self._exited
        self._life = life
        self._ended = ended
        self._was_cut_off = was_cut_off
        self._task: asyncio.Task[Any] | None = None
        self._exiting = False

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def loop(self) -> HostLoop:
        loop = self.host.loop
        if loop is None:
            raise AssertionError(f"{self.name} has no process")
        return loop

    @property
    def runs(self) -> bool:
        return self.host.state in (HostState.RUNNING, HostState.PAUSED)

    @property
    def disturbed(self) -> bool:
        return self.host.state is HostState.PAUSED or self.host.slow_ns > 0

    def start(self) -> None:
        """Start the process, the machine too if it is off; nothing if it runs, is done, or is still to come."""
        self.stays_down = False
        if self.done or self.runs or self.awaited:
            return
        self._exiting = self.terminated = False
        self.on_sigterm = lambda: None
        if self.host.state is HostState.OFF:
            self.host.power_on()
        self.disk.restart()
        loop = self.host.start()
        self.disturbances += 1
        loop.call_soon(self._begin, loop)

    def _begin(self, loop: HostLoop) -> None:
        task = loop.create_task(self._life(self), name=f"{self.name}#{self.host.lives}")
        self._task = task
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        if task is not self._task or self._exiting:
            return
        try:
            self.error = task.exception()
        except asyncio.CancelledError as error:  # nobody but the process itself cancels it: `end` is abrupt
            self.error = error
        if self.error is None:
            self.result = task.result()
            self.done = not self.terminated
        # Not from within the callback: what the process still does in this turn of its loop belongs to it.
        self.host.timeline.after(0, self._reap, task)

    def _exited(self, error: SystemExit) -> None:
        """Something in the process has asked for its end, in whatever task or callback."""
        self._exiting = True
        self.error = error
        self.host.timeline.after(0, self._reap, self._task)

    def _reap(self, task: asyncio.Task[Any] | None) -> None:
        if task is self._task and self.runs:
            self._ended(self)

    def terminate(self) -> None:
        """Ask the process to end, as by SIGTERM: by what it made for that when it started."""
        self.terminated = self.stays_down = True
        self.loop.call_soon(self.on_sigterm)

    def end(self, *, power: bool = False) -> None:
        """Abruptly."""
        if self.host.state is HostState.OFF:
            return
        self._task = self.engine = self.endpoint = self.faults = self.flip_bit = None
        self.lied_by_lanes.clear()
        if power:
            self.host.power_off()
        else:
            self.host.kill()
        self.on_end()
        if not self.disk.is_down:
            (self.disk.crash if power else self.disk.kill)()

    def _cut_off(self, crash: DiskFailure) -> None:
        """In the middle of an operation of the disk; what called it hears Halted, and nothing of it runs any more."""
        self.end(power=crash is DiskFailure.POWER_LOSS)
        self._was_cut_off(self, "while it wrote to its disk")

    def cut_off_in_memory(self) -> None:
        """In the middle of what it does on a host that it shares; likewise."""
        self.end()
        self._was_cut_off(self, "while it used its host's memory")

    def fail_disk(self, what: str) -> None:
        """Let the disk fail: see scenario.Disk."""
        if what == "full":
            self.disk.capacity = sum(map(len, self.disk.files().values()))
        else:
            self.disk.arm(_DISK_FAULTS[what])

    def mend_disk(self) -> None:
        self.disk.disarm()
        self.disk.capacity = None

    def troubled(self, error: BaseException) -> None:
        """Something failed here, which may be why a run does not come to its end."""
        self.trouble = error, self.host.timeline.elapsed_ns / 1e9

    def note(self, kind: str, **fields: Any) -> None:
        """Into the trace: something that the process does, unless it is gone (its remains run at the very end)."""
        if self.host.loop is not None:
            what = " ".join(f"{name}={value}" for name, value in fields.items())
            self.host.timeline.note(kind, self.name, what, detail=fields)

    def leftovers(self) -> list[str]:
        """Return tasks, sockets and timers that a process left behind when it ended by itself."""
        loop = self.host.loop
        if loop is None:
            return []
        left = [f"task {task.get_name()}" for task in loop.tasks]
        left += [f"socket on port {port}" for port in sorted(self.host.sockets)]
        return left + [f"timer {handle!r}" for handle in loop.timers]
