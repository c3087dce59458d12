"""Engines of simulated ranks in processes of their own (`engine="process"`), on the virtual clock.

What runs is the real code: the engine and what serves it here, the proxy in the rank's program. In the place of the
system: memory that both see at once, a line that takes a time by the seed and keeps its order, and a loop for each
engine on its rank's host. It ends with its rank: whoever kills one process of a simulated host kills all of it.

Faults of a node's engine (quicoll.sim.scenario.events.EngineFault): "kill", its process ends; "hang", it does nothing
any more, and nobody is told.

Invariants: times of lines draw from a generator of their own (`engines/times`), so a world without such engines is the
same as without this module. A process that has ended by itself has no engine left (`leftovers`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quicoll.engine_process.proxy import EngineProxy
from quicoll.engine_process.server import EngineServer
from quicoll.errors import LocalError
from quicoll.local.arena import arena_here
from quicoll.sim.line import SimLine
from quicoll_transport.sim import HostLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    from quicoll.config import Config
    from quicoll.engine.engine import Engine
    from quicoll.local.arena import Arena
    from quicoll.observability.events import Observers
    from quicoll.sim.machine import Machine
    from quicoll_transport.net.udp import DatagramIO
    from quicoll_transport.security.credentials import Credentials
    from quicoll_transport.sim.timeline import Timeline

__all__ = ["SimEngineProcess", "SimEngines"]

_OPEN_S = 10.0  # for a process to be there; a real one has a minute, for imports


class SimEngines:
    """All engines of a world that are in processes of their own. wall_clock: date and time."""

    def __init__(
        self, timeline: Timeline, wall_clock: Callable[[], datetime], *, on_end: Callable[[str], None]
    ) -> None:
        """on_end: called with a node whose engine's process has ended: so has what that has started."""
        self.timeline = timeline
        self.on_end = on_end
        self.wall_clock = wall_clock
        self.draw = timeline.rng("engines/times")
        self._of: dict[str, SimEngineProcess] = {}  # by node
        self._struck: dict[str, None] = {}  # nodes whose engine was, in this life

    async def start(
        self,
        machine: Machine,
        config: Config,
        observers: Observers,
        credentials: Credentials,
        make: Callable[[SimEngineProcess], Awaitable[Engine]],
    ) -> EngineProxy:
        """Start the engine of a machine's process, and wait until it is there.

        Args:
            machine: The machine.
            config: Of the rank.
            observers: Of its program.
            credentials: Of the rank.
            make: Makes the engine, in its own process.
        Raises:
            LocalError: It is not there.
        """
        arena = arena_here()
        if arena is None:
            raise LocalError("this process can have no memory that engines would share with their programs")
        self._struck.pop(machine.name, None)
        proxy = EngineProxy(
            config,
            loop=machine.loop,
            arena=arena,
            observers=observers,
            stacks=lambda most: "",
            wall_clock=self.wall_clock,
        )
        process = self._of[machine.name] = SimEngineProcess(self, machine, proxy, arena, make)
        proxy.use(process)
        proxy.endpoint.credentials = credentials
        try:
            await proxy.opening(_OPEN_S)
        except BaseException:
            await proxy.aclose("not joined")
            raise
        return proxy

    def ended(self, node: str) -> None:
        """The process of a node has ended, however: so does its engine."""
        process = self._of.pop(node, None)
        if process is not None:
            process.die()

    def leftovers(self, node: str) -> list[str]:
        """Return which engines a process has."""
        process = self._of.get(node)
        return [] if process is None or process.gone else ["engine"]

    def strike(self, node: str, what: str) -> bool:
        """Let a fault befall the engine of a node. Return whether there is one."""
        process = self._of.get(node)
        if process is None or process.gone:
            return False
        self._struck[node] = None
        if what == "hang":
            process.hang()
        else:
            process.die()
            process.hear_of_end()
        return True

    def was_struck(self, node: str) -> bool:
        """Return whether a fault has befallen the engine of a node's present process, or of its last one."""
        return node in self._struck


class SimEngineProcess:
    """quicoll.engine_process.proxy.ServingProcess.

    loop, server: of the engine's process. sockets: that it has opened.
    """

    def __init__(
        self,
        engines: SimEngines,
        machine: Machine,
        proxy: EngineProxy,
        arena: Arena,
        make: Callable[[SimEngineProcess], Awaitable[Engine]],
    ) -> None:
        self.sockets: list[DatagramIO] = []
        self._engines = engines
        self._proxy = proxy
        self._make = make
        self._node = machine.name
        self._program = machine.loop
        self.loop = HostLoop(engines.timeline, machine.host, machine.loop.interface)
        self._line = SimLine(engines.timeline, engines.draw, starter=self._program, started=self.loop)
        self._closed = False  # the program hears nothing of it any more
        self._over: asyncio.Future[None] | None = None  # whom its end is told to that was asked for
        self.server = EngineServer(loop=self.loop, arena=arena, tell=self._tell, on_over=self._leave)
        self._line.start(self._begin)

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return self._line.gone

    def _begin(self) -> None:
        async def open_engine() -> None:
            try:
                engine = await self._make(self)
            except LocalError as error:
                self.server.not_opened(error)
            else:
                self.server.use(engine)

        self.loop.create_task(open_engine())

    def send(self, data: bytes) -> None:
        if not self._closed:
            self._line.to_started(lambda: self.server.hear(data))

    def _tell(self, data: bytes) -> None:
        self._line.to_starter(lambda: self._hear(data))

    def _hear(self, data: bytes) -> None:
        if not self._closed:
            self._proxy.hear(data)

    def hear_of_end(self) -> None:
        """The program is told that the process has ended."""
        self._line.to_starter(self._hear_end)

    def _hear_end(self) -> None:
        if not self._closed:
            self._closed = True
            self._proxy.process_ended("its process has ended (signal 9)")

    def end(self, why: str) -> None:
        self._closed = True
        self.die()
        self._proxy.process_ended(why)

    async def aclose(self) -> None:
        self._closed = True
        if self.gone or self._program.dead:
            return
        if self.loop.dead:  # it does not end by itself
            self.die()
            return
        self._over = self._program.create_future()
        self._line.to_started(self._end_of_line)
        await self._over

    def _end_of_line(self) -> None:
        self.loop.create_task(self.server.program_ended())

    def _leave(self) -> None:
        """The engine is closed: its process ends by itself."""
        self._engines.timeline.after(0, self.die)

    def hang(self) -> None:
        """Not one more line of it runs; it is there all the same."""
        self.loop.die()

    def die(self) -> None:
        """It is there no more."""
        if not self.gone:
            self._line.gone = True
            for each in self.sockets:
                each.close()
            self.loop.die()
            self._engines.on_end(self._node)
            if self._over is not None:  # however it ended while its end was waited for
                self._line.to_starter(self._tell_over)

    def _tell_over(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
