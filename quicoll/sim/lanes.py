"""Lanes of simulated ranks: each a process of its own on its rank's host, on the virtual clock.

What runs is the real code: a lane's worker and endpoint here, what is agreed on in the engine. In the place of the
system: memory that both see at once, a line that takes a time by the seed and keeps its order, and a loop for each lane
on its rank's interface. A lane ends with its rank.

Faults of a node's lanes (quicoll.sim.scenario.events.LaneFault); all but the first two end with the healing:

    kill      their processes end
    hang      they do nothing any more, and nobody is told
    cut       their datagrams are lost, both ways, while those of the rank itself go their way
    slow      their datagrams take half a second more
    spoil     what they receive stands in memory with another bit

Where its rank lies to another one (quicoll.sim.misconduct.Lies), what it is given for that one is spoilt before it is
sent, and the notice has the checksum of that.

Invariants: what befalls lanes draws from generators of its own (`lanes/...`), so a world without lanes is the same as
without this module. A process that has ended by itself has no lane left (`leftovers`).
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from quicoll.lanes.orders import LaneOver, LaneReceive, LaneSend
from quicoll.lanes.worker import LaneWorker
from quicoll.sim.line import SimLine
from quicoll.sim.misconduct import spoilt
from quicoll_transport.endpoint import Endpoint, EndpointConfig
from quicoll_transport.errors import TransportError
from quicoll_transport.faults.compose import Faults, Only
from quicoll_transport.faults.rules import Cut, Delay
from quicoll_transport.faults.socket import FaultyIO
from quicoll_transport.quic import SessionConfig
from quicoll_transport.security.identity import WORKER
from quicoll_transport.security.policy import Policy
from quicoll_transport.sim import HostLoop, SimulatedSocket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from quicoll.lanes.orders import LaneOrder, LaneReport, LaneSettings
    from quicoll.lanes.starting import LaneHandle
    from quicoll.sim.machine import Machine
    from quicoll_transport.faults.compose import Installed
    from quicoll_transport.net.udp import DatagramIO
    from quicoll_transport.security.credentials import Credentials
    from quicoll_transport.sim import AccessLink
    from quicoll_transport.sim.timeline import Timeline

__all__ = ["SimLanes"]

_SLOTS = 3  # so few that some messages find none
_SLOW_NS = 500_000_000


class SimLanes:
    """All lanes of a world. wall_clock: the date that certificates are checked against. access: links of the lanes of
    each worker, by their number."""

    def __init__(
        self, timeline: Timeline, wall_clock: Callable[[], datetime], *, access: Sequence[AccessLink] = ()
    ) -> None:
        self.timeline = timeline
        self.access = access
        self.wall_clock = wall_clock
        self.draw = timeline.rng("lanes/times")
        self.faults = timeline.rng("lanes/faults")
        self.of: dict[str, list[_SimLane]] = {}  # by node
        self.wrong: dict[str, dict[tuple[str, int | None], None]] = {}  # until the healing: what, and which lane

    def host_of(self, machine: Machine) -> _SimLaneHost:
        """Return where the lanes of a machine's process run."""
        return _SimLaneHost(self, machine)

    def ended(self, node: str) -> None:
        """The process of a node has ended, however: so do its lanes."""
        for lane in self.of.pop(node, []):
            lane.die()

    def leftovers(self, node: str) -> list[str]:
        """Return which lanes a process has."""
        return ["lane" for lane in self.of.get(node, []) if not lane.gone]

    def strike(self, node: str, what: str, only: int | None) -> bool:
        """Let a fault befall the lanes of a node, or one of them. Return whether there is any that it befalls."""
        lanes = [lane for lane in self.of.get(node, []) if not lane.gone and only in (None, lane.number)]
        if what in ("kill", "hang"):
            for lane in lanes:
                lane.die()
                if what == "kill":
                    lane.hear_of_end()
            return bool(lanes)
        self.wrong.setdefault(node, {})[what, only] = None
        for lane in lanes:
            lane.suffer(what)
        return True

    def mend(self, node: str) -> None:
        """Let all be well with the lanes of a node, as far as they are alive."""
        self.wrong.pop(node, None)
        for lane in self.of.get(node, []):
            lane.mend()


class _SimLaneHost:
    """quicoll.lanes.starting.LaneHost."""

    slots = _SLOTS

    def __init__(self, lanes: SimLanes, machine: Machine) -> None:
        self._lanes = lanes
        self._machine = machine

    def start(
        self,
        settings: LaneSettings,
        credentials: Credentials,
        *,
        loop: asyncio.AbstractEventLoop,
        on_report: Callable[[LaneReport], None],
        on_end: Callable[[str], None],
    ) -> LaneHandle:
        of_node = self._lanes.of.setdefault(self._machine.name, [])
        lane = _SimLane(self._lanes, self._machine, len(of_node), settings, credentials, on_report, on_end)
        of_node.append(lane)
        return lane


class _Places:
    """quicoll.lanes.memory.LanePlaces."""

    def __init__(self, largest: int, slots: int) -> None:
        self._largest = largest
        self._slots: list[memoryview | None] = [None] * (2 * slots)

    def make(self, slot: int) -> None:
        self._slots[slot] = np.zeros(self._largest, np.uint8).data  # whose pages come when they are touched

    def place(self, slot: int, nbytes: int) -> memoryview:
        made = self._slots[slot]
        if made is None:
            raise AssertionError(f"slot {slot} has no memory")
        return made[:nbytes]


class _SimLane:
    """quicoll.lanes.starting.LaneHandle."""

    def __init__(
        self,
        lanes: SimLanes,
        machine: Machine,
        number: int,
        settings: LaneSettings,
        credentials: Credentials,
        on_report: Callable[[LaneReport], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.number = number
        self.memory = _Places(settings.largest, settings.slots)
        self._lanes = lanes
        self._node = machine.name
        self._lies_to, self._lied = machine.lies_to, machine.lied_by_lanes
        self._engine = machine.loop
        self._loop = HostLoop(lanes.timeline, machine.host, machine.loop.interface)
        self._line = SimLine(lanes.timeline, lanes.draw, starter=self._engine, started=self._loop)
        self._on_report = on_report
        self._on_end = on_end
        self._closed = False
        self._over: asyncio.Future[None] | None = None  # whom its end is told to that was asked for
        self._credentials = credentials
        self._settings = settings
        self._socket: SimulatedSocket | None = None
        self._endpoint: Endpoint | None = None
        self._rules: dict[str, Installed] = {}
        self._faults = Faults(random.Random(lanes.faults.randrange(1 << 62)))  # noqa: S311 - faults, not keys
        self._receives: dict[int, LaneReceive] = {}
        self._worker = LaneWorker(job=credentials.identity.job, memory=self.memory, tell=self._tell)
        self._line.start(self._begin)

    def _begin(self) -> None:
        settings = self._settings
        self._socket = SimulatedSocket(self._loop)
        attached: DatagramIO = self._socket
        if self.number < len(self._lanes.access):
            link, rules = self._lanes.access[self.number], Faults(random.Random(0))  # noqa: S311 - they draw nothing
            for line, outgoing in ((link.uplink(), True), (link.downlink(), False)):
                if line is not None:
                    rules.add(Only(line, outgoing=outgoing))
            attached = FaultyIO(self._socket, rules, loop=self._loop)
        self._endpoint = Endpoint(
            credentials=self._credentials,
            config=EndpointConfig(
                lost_after_ns=settings.lost_ns,
                connect_ns=settings.connect_ns,
                session=SessionConfig(congestion=settings.congestion, parity=settings.parity),
            ),
            io=attached,
            loop=self._loop,
            incarnation=settings.incarnation,
            authorize=Policy(roles=(WORKER,), denied=settings.denied),
            on_link=self._worker.on_link,
            faults=self._faults,
            wall_clock=self._lanes.wall_clock,
        )
        for what, only in self._lanes.wrong.get(self._node, ()):
            if only in (None, self.number):
                self.suffer(what)
        self._worker.use(self._endpoint)

    @property
    def gone(self) -> bool:
        """Whether its process has ended."""
        return self._line.gone

    # -- for the engine ------------------------------------------------------------------------------------------

    def order(self, order: LaneOrder) -> None:
        if isinstance(order, LaneSend) and order.node in self._lies_to:
            payload = self.memory.place(order.slot, order.nbytes)
            payload[:] = spoilt(payload)
            self._lied[order.number] = xxhash.xxh3_64_intdigest(payload)
        if not self._closed:
            self._line.to_started(lambda: self._obey(order))

    def _obey(self, order: LaneOrder) -> None:
        if isinstance(order, LaneReceive):
            self._receives[order.number] = order
        try:
            self._worker.obey(msgspec.convert(msgspec.to_builtins(order), type(order)))  # what is told is told in bytes
        except TransportError:
            self.die()
            self.hear_of_end()

    def renew(self, credentials: Credentials) -> None:
        if not self._closed:
            self._line.to_started(lambda: self._rotate(credentials))

    def _rotate(self, credentials: Credentials) -> None:
        if self._endpoint is not None:
            self._endpoint.rotate(credentials)

    def kill(self) -> None:
        self._closed = True
        self.die()

    async def aclose(self) -> None:
        self._closed = True
        if self.gone:
            return
        self._over = self._engine.create_future()
        self._line.to_started(self._end_well)
        await self._over

    def _end_well(self) -> None:
        async def close() -> None:
            if self._endpoint is not None:
                await self._endpoint.aclose(timeout=0.0, reason="its rank has ended")
            self._lanes.timeline.after(0, self.die)

        self._loop.create_task(close())

    # -- for the lane --------------------------------------------------------------------------------------------

    def _tell(self, report: LaneReport) -> None:
        if isinstance(report, LaneOver):
            received = self._receives.pop(report.number, None)
            if received is not None and report.well and self._spoils():
                self.memory.place(received.slot, received.nbytes)[self._lanes.faults.randrange(received.nbytes)] ^= 1
        self._line.to_starter(lambda: self._hear(report))

    def _spoils(self) -> bool:
        wrong = self._lanes.wrong.get(self._node, {})
        return ("spoil", None) in wrong or ("spoil", self.number) in wrong

    def _hear(self, report: LaneReport) -> None:
        if not self._closed:
            self._on_report(report)

    def hear_of_end(self) -> None:
        """The engine is told that its process has ended."""
        self._line.to_starter(self._hear_end)

    def _hear_end(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_end("its process has ended (signal 9)")

    # -- what befalls it -----------------------------------------------------------------------------------------

    def suffer(self, what: str) -> None:
        """A fault begins."""
        if what in ("cut", "slow") and what not in self._rules:
            self._rules[what] = self._faults.add(Cut() if what == "cut" else Delay(_SLOW_NS))

    def mend(self) -> None:
        """All faults end that do."""
        rules, self._rules = self._rules, {}
        for rule in rules.values():
            rule.remove()

    def die(self) -> None:
        """Not one more line of it runs."""
        if not self.gone:
            self._line.gone = True
            self._loop.die()
            if self._socket is not None:
                self._socket.close()
            if self._over is not None:  # however it ended while its end was waited for
                self._line.to_starter(self._tell_over)

    def _tell_over(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
