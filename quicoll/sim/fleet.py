"""The machines of a simulated cluster, and the lives of the processes on them.

One machine has the coordinator, or two or three have one each (`Settings.coordinators`), which take over from each
other; one may have a relay (`Settings.relay`); each other machine has a worker. A process is the real code, started as
`quicoll.join`, `quicoll coordinator` and `quicoll relay` start it, with simulated sockets, disks and clocks, and with
credentials that are the same in every world. A machine
outlives its processes (machine.py); whoever starts them again, like the controller of a cluster of pods, is here.

How a process may end, and what follows:

    it returns, or ends by JobDone               a worker is done, and is not started again
    one of quicoll's errors that blame the       it is started again after `restart_after` seconds, like a pod: a new
    world around it (`_AGAIN`): lost peers, a    process may well go on. The last error of each node is part of what
    partition, spoilt bytes, a failed disk       is said if the run then never comes to its end
    what a forged state explains                 the same (`Checker.allowed`); and since such an error says that all
                                                 ranks are to be started anew, one that was made to leave is, too; and
                                                 from one checkpoint, where those of the ranks differ (anew.py)
    any other exception: Mismatch and            the run has failed. The code is wrong, or the test of it has; the next
    LocalError, since the same code would do     process would only do the same
    the same again; the user's own; Forbidden
    SystemExit in any task or callback, and      the run has failed as well: they pass by whatever waits for a process
    CancelledError, for nobody cancels it        that works, and so would look like none of these
    a fault                                      a crash stays down until `restart` or `heal`; so does a process that
    was asked to end (SIGTERM), while one that was made to leave is done

A process that ended by itself has to leave nothing behind: no task, no timer, no socket.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from quicoll.config import Config
from quicoll.engine.inline import InlineRuntime
from quicoll.engine.start import start_with
from quicoll.errors import (
    AuditError,
    CheckpointError,
    Corrupted,
    Dismissed,
    Diverged,
    JobDone,
    JournalError,
    LocalError,
    Partitioned,
    PeerError,
    StepAborted,
    Terminated,
)
from quicoll.joining.entry import attended
from quicoll.membership.incarnation import CHANCE_BYTES, first
from quicoll.membership.journal import Journal
from quicoll.membership.messages import COORDINATOR_NODE
from quicoll.membership.relay_service import RelayService
from quicoll.membership.relaying import RELAY
from quicoll.membership.service import CoordinatorService, coordinator_config
from quicoll.membership.serving import serve_in_turn
from quicoll.observability.events import Event as Observed
from quicoll.observability.events import Observers
from quicoll.observability.flight import FlightRecorder
from quicoll.sim.anew import leave_one
from quicoll.sim.checked import CheckedJob, memory_use
from quicoll.sim.database import DatabaseCalls, SimDatabase, SimStore
from quicoll.sim.engines import SimEngines
from quicoll.sim.hosts import SimHosts
from quicoll.sim.invariants import CheckedStore
from quicoll.sim.lanes import SimLanes
from quicoll.sim.machine import Departed, Machine
from quicoll.sim.misconduct import Lies, Meddling
from quicoll.sim.scenario.events import RELAY_HOST, coordinator_names, is_coordinator, is_worker, node_name
from quicoll.sim.translators import translators
from quicoll.step.protocol import at_work
from quicoll.stop import StopRequest
from quicoll_transport.endpoint import EndpointConfig
from quicoll_transport.net.addresses import parse_address
from quicoll_transport.net.multihomed import MultihomedIO
from quicoll_transport.relay.table import RelayLimits
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import COORDINATOR, WORKER, Identity
from quicoll_transport.sim import WALL_EPOCH_NS, HostState, SimulatedSocket

if TYPE_CHECKING:
    from quicoll.engine.engine import Engine
    from quicoll.engine.face import EngineFace
    from quicoll.engine.runtime import Runtime
    from quicoll.job import Job
    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.journal import RecordStore
    from quicoll.observability.events import Observer
    from quicoll.sim.engines import SimEngineProcess
    from quicoll.sim.hosts import SimHost
    from quicoll.sim.invariants import Checker
    from quicoll.sim.outcome import Settings
    from quicoll_transport.net.udp import DatagramIO
    from quicoll_transport.security.credentials import Credentials
    from quicoll_transport.sim import HostLoop, Nat, World

__all__ = ["Fleet", "node_names"]

_JOB = "sim"
_PORT = 4433
_JOURNAL = "/data/journal.sqlite"
_AGAIN = (PeerError, Partitioned, StepAborted, Corrupted, CheckpointError, AuditError, JournalError)
_ASK_NS = 100_000_000  # between two requests of an operator that nobody has taken
_SHOWN = 12  # nodes in one error
_CLIP = 600  # characters of each one: a Mismatch names both sides


class Failed(Protocol):
    """Told of what fails a run: the kind, a message, the node and the error behind it."""

    def __call__(self, kind: str, message: str, *, node: str, cause: BaseException) -> None: ...


def node_names(ranks: int, newcomers: tuple[str, ...] = (), *, coordinators: int = 1, relay: bool = False) -> list[str]:
    """Of all machines of a cluster: the coordinator's, then the workers' by rank, then those that come later, then
    those of further coordinators, then a relay's."""
    first, *others = coordinator_names(coordinators)
    relays = [RELAY_HOST] if relay else []
    return [first, *(node_name(rank) for rank in range(ranks)), *newcomers, *others, *relays]


class Fleet:
    """machines: by name, the coordinator's first. nats: address translators, by the workers that are behind them.
    meddling: what the relay makes of the datagrams that it passes on; "": nothing. meddled: how often, by what.
    aborted: steps, by what the coordinator tells its observers.
    hosts: those that workers share; None where each has its own. lanes: of all workers; None where they have none.
    database: where several coordinators have their journal; None where there is one.

    seed: of the run, and of the job. newcomers: nodes that come later. compute_s: of each step. work(job): the user's
    code, on every rank that has joined. checker: hears of ends, and watches what each process does. failed: is told
    of an end that is the fault of the code, or of its test. flights: whether ranks have flight recorders.
    """

    def __init__(
        self,
        world: World,
        settings: Settings,
        *,
        seed: int,
        newcomers: tuple[str, ...],
        compute_s: float,
        checker: Checker,
        work: Callable[[Job], Awaitable[Any]],
        failed: Failed,
        flights: bool = False,
    ) -> None:
        self.machines: dict[str, Machine] = {}
        self.aborted = 0
        self._world = world
        self._settings = settings
        self._seed = seed
        self._compute_s = compute_s
        self._checker = checker
        self._work = work
        self._failed = failed
        self._flights = flights
        self._closing: dict[str, asyncio.Future[None]] = {}  # of the coordinators' processes, by machine
        self._services: dict[str, tuple[asyncio.AbstractEventLoop, CoordinatorService]] = {}  # likewise
        self._asked: tuple[int, tuple[str, ...]] | None = None  # what an operator asks for, until it is taken
        self._leaving: dict[str, bool] = {}  # who was about to leave when all ranks were to be started anew
        own_relay = settings.relay == "own"
        names = node_names(
            settings.ranks + settings.spares, newcomers, coordinators=settings.coordinators, relay=own_relay
        )
        self._credentials = _credentials(tuple(name for name in names if is_worker(name)), relay=own_relay)
        lives = {name: self._run_coordinator for name in names if is_coordinator(name)}
        lives[RELAY_HOST] = self._run_relay
        for name in names:
            self.machines[name] = Machine(
                world.host(name, addresses=settings.paths),
                lives.get(name, self._run_worker),
                ended=self._process_ended,
                was_cut_off=self._cut_off,
                awaited=name in newcomers,
            )
        workers = [name for name in names if is_worker(name)]
        for place, name in enumerate(workers if settings.access else ()):
            world.network.set_access(settings.access[min(place, len(settings.access) - 1)], [name])
        self.nats = self._add_nats()
        self.meddling = ""
        self.meddled: dict[str, int] = {}
        self.hosts: SimHosts | None = None
        if settings.hosts:
            where = {name: settings.hosts[place % settings.ranks] for place, name in enumerate(workers)}
            self.hosts = SimHosts(world, where)
        self.lanes: SimLanes | None = (
            SimLanes(world, _wall_clock, access=settings.lane_access) if settings.lanes else None
        )
        self.engines: SimEngines | None = (
            SimEngines(world, _wall_clock, on_end=self._engine_ended) if settings.engine_processes else None
        )
        for name in workers:
            self.machines[name].on_end = partial(self._let_go, name)
        self.database: SimDatabase | None = None
        if settings.coordinators > 1:
            self.database = SimDatabase(world, lease_ns=round(settings.lease * 1e9), checker=checker)

    def _let_go(self, node: str) -> None:
        """The process of a worker has ended, however: so has what its host does for it."""
        for each in (self.hosts, self.lanes, self.engines):
            if each is not None:
                each.ended(node)

    def _engine_ended(self, node: str) -> None:
        if self.lanes is not None:
            self.lanes.ended(node)

    def _add_nats(self) -> dict[str, Nat]:
        settings = self._settings
        found: dict[str, Nat] = {}
        behind = translators(settings.nats)
        for owner in dict.fromkeys(owner for owner, _ in behind.values()):
            names = [node_name(worker) for worker, (whose, _) in behind.items() if whose == owner]
            lifetime_ns = round(settings.nat_lifetime * 1e9)
            nat = self._world.network.add_nat(behind[owner][1], *names, lifetime_ns=lifetime_ns)
            found |= dict.fromkeys(names, nat)
        return found

    def _socket(self, machine: Machine) -> DatagramIO:
        """Return the socket of a process that may be the job's relay."""
        socket = self._sockets(machine.loop, _PORT)
        return Meddling(socket, lambda: self.meddling, self.meddled) if self._settings.nats else socket

    def _sockets(self, loop: HostLoop, port: int) -> DatagramIO:
        """Return a socket of a process at the address of its machine, or one at each."""
        sockets = [SimulatedSocket(loop, port, at=at) for at in range(self._settings.paths)]
        return sockets[0] if len(sockets) == 1 else MultihomedIO(sockets)

    @property
    def coordinators(self) -> list[Machine]:
        return [machine for name, machine in self.machines.items() if is_coordinator(name)]

    @property
    def leader(self) -> Machine | None:
        """Which of several coordinators has a lease that runs; None where none has."""
        holder = "" if self.database is None else self.database.holder
        ip = parse_address(holder)[0] if holder else ""
        return next((machine for machine in self.coordinators if machine.host.ip == ip), None)

    def beside(self, machine: Machine) -> list[Machine]:
        """Return who loses power together with a machine: those of its host that are not done, and itself."""
        where = {} if self.hosts is None else self.hosts.where
        host = where.get(machine.name)
        others = [] if host is None else [each for each in self.workers if where.get(each.name) == host]
        return [each for each in others if each is not machine and not each.done] + [machine]

    @property
    def workers(self) -> list[Machine]:
        """Those that have come, by rank."""
        return [machine for machine in self._all_workers if not machine.awaited]

    @property
    def _all_workers(self) -> list[Machine]:
        return [machine for name, machine in self.machines.items() if is_worker(name)]

    def start(self) -> None:
        for machine in self.machines.values():
            machine.start()

    def close_coordinators(self) -> None:
        """Let those that run end by themselves; `closed` says when they have."""
        for machine in self.coordinators:
            # One of several that has failed, and is to be started again, would stay: nobody ends it any more.
            machine.stays_down = len(self.coordinators) > 1
            if machine.runs:
                machine.loop.call_soon(self._close, machine.name)

    def scale(self, world_size: int, leave: tuple[str, ...]) -> None:
        """Ask for so many ranks, as an operator does: again and again, until it is taken or something else is asked."""
        self._asked = world_size, leave
        self._ask_for_ranks(self._asked)

    def _ask_for_ranks(self, asked: tuple[int, tuple[str, ...]]) -> None:
        if asked is not self._asked:
            return
        for machine in self.coordinators:
            if machine.host.state is HostState.RUNNING:
                machine.loop.call_soon(self._take_request, machine.name, asked)
        self._world.after(_ASK_NS, self._ask_for_ranks, asked)

    def _take_request(self, name: str, asked: tuple[int, tuple[str, ...]]) -> None:
        """On a coordinator's loop."""
        loop, service = self._services.get(name, (None, None))
        # Of a process that was killed nothing is taken out of the table until the next one is there.
        if service is None or loop is not asyncio.get_running_loop() or asked is not self._asked or not service.leads:
            return
        refusal = service.scale(*asked)
        self._world.note("asked", name, refusal or "taken", detail=asked)
        if not service.failed:
            self._asked = None
            self._world.after(0, self._start_lacking, *(asked if not refusal else (0, ())))

    def _start_lacking(self, world_size: int, leave: tuple[str, ...]) -> None:
        """Start workers as `quicoll run` does where more are wanted."""
        workers = self._all_workers
        staying = [each for each in workers if not (each.awaited or each.done or each.departs or each.name in leave)]
        lacking = world_size - len(staying)
        free = [each for each in workers if each.name not in leave and (each.awaited or (each.done and each.dismissed))]
        for machine in free[: max(lacking, 0)]:
            machine.awaited = machine.done = machine.dismissed = False
            machine.start()

    @property
    def closed(self) -> bool:
        first, *others = self.coordinators
        return not any(machine.runs for machine in (first, *others)) and (first.done or bool(others))

    def troubles(self) -> str:
        """The last error of each node that is not done: why there is no end of a run, most likely."""
        told = []
        for machine in self.machines.values():
            if machine.trouble is not None and not machine.done:
                error, at = machine.trouble
                often = f" (its process ended by errors {machine.failures} times)" if machine.failures else ""
                told.append(f"; the last error of {machine.name}{often}, at {at:.6f} s: {_words(error)[:_CLIP]}")
        return "".join(told[:_SHOWN]) + ("; ..." if len(told) > _SHOWN else "")

    # -- what runs -----------------------------------------------------------------------------------------------

    async def _run_coordinator(self, machine: Machine) -> None:
        settings = self._settings
        config = coordinator_config(
            settings.ranks,
            settings.lost_after,
            self._seed,
            max_world_size=settings.ranks if settings.spares else None,
            warm_spares=settings.warm_spares,
            relay=f"{self.machines[RELAY_HOST].host.ip}:{_PORT}" if settings.relay == "own" else settings.relay,
        )
        observers = self._observers(machine, asyncio.get_running_loop())
        if self.database is None:
            store = CheckedStore(Journal.open(_JOURNAL, job=_JOB, connect=machine.disk.connect), self._checker)
            service = self._service(machine, config, observers, journal=store)
            try:
                await self._until_closed(machine, service, service.wait_failed())
            finally:
                await service.aclose()
                store.close()
            return
        reach = partial(_reach, self.database, machine.name)
        service = self._service(machine, config, observers, journal=None)
        serving = serve_in_turn(service, reach, config=config, lease=settings.lease, observers=observers)
        await self._until_closed(machine, service, serving)

    def _service(
        self, machine: Machine, config: CoordinatorConfig, observers: Observers, *, journal: RecordStore | None
    ) -> CoordinatorService:
        return CoordinatorService(
            credentials=self._credentials[Identity(_JOB, COORDINATOR, COORDINATOR_NODE)],
            io=self._socket(machine),
            journal=journal,
            config=config,
            transport=EndpointConfig(lost_after_ns=round(self._settings.lost_after * 1e9)),
            loop=asyncio.get_running_loop(),
            incarnation=self._incarnation(machine),
            observers=observers,
            wall_clock=_wall_clock,
        )

    async def _run_relay(self, machine: Machine) -> None:
        service = RelayService(
            credentials=self._credentials[Identity(_JOB, RELAY, RELAY)],
            io=self._socket(machine),
            limits=RelayLimits(),
            transport=EndpointConfig(lost_after_ns=round(self._settings.lost_after * 1e9)),
            loop=asyncio.get_running_loop(),
            incarnation=self._incarnation(machine),
            wall_clock=_wall_clock,
        )
        machine.endpoint = service.endpoint
        try:
            await asyncio.get_running_loop().create_future()  # until its machine is ended
        finally:
            await service.aclose()

    async def _until_closed(
        self, machine: Machine, service: CoordinatorService, serving: Coroutine[Any, Any, None]
    ) -> None:
        """Serve until it is asked to end, or raise what it ends by."""
        loop = asyncio.get_running_loop()
        machine.endpoint, machine.faults = service.endpoint, service.faults
        closing = self._closing[machine.name] = loop.create_future()
        self._services[machine.name] = loop, service
        machine.on_sigterm = partial(self._close, machine.name)
        task = loop.create_task(serving)
        try:
            await asyncio.wait({task, closing}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            del self._services[machine.name]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run_worker(self, machine: Machine) -> Any:
        try:
            result = await self._take_part(machine)
        except JobDone as error:  # which ends a program well, as a SystemExit with status 0
            machine.note("job_done", step=error.step)
            result = None
        except Dismissed as dismissal:  # likewise
            machine.note("dismissed", reason=dismissal.message)
            machine.dismissed = True
            machine.terminated = False
            return None
        except Terminated:
            if not machine.terminated:  # the user's own doing, with the status of a process that was ended
                raise
            return None
        machine.terminated = False  # a SIGTERM that found nothing left to stop: status 0, and nobody starts it again
        return result

    async def _take_part(self, machine: Machine) -> Any:
        settings = self._settings
        stop = StopRequest()
        machine.on_sigterm = stop.ask
        rank = list(self.machines).index(machine.name) - 1
        config = Config.resolve(
            environ={},
            coordinator=",".join(_joined(each.host.ips, _PORT) for each in self.coordinators),
            job=_JOB,
            node=machine.name,
            world_size=settings.ranks,
            rank_hint=rank,
            listen=_joined(machine.host.ips, 0),
            site=settings.sites[rank % settings.ranks] if settings.sites else None,
            lost_after=settings.lost_after,
            timeout=settings.timeout,
            join_timeout=settings.join_timeout,
            hold_timeout=settings.hold_timeout,
            chunk_bytes=settings.chunk_bytes,
            state_check_every=settings.state_check_every,
            learn_from_bytes=settings.learn_from_bytes,
            congestion=settings.congestion,
            lanes=settings.lanes,
            parity=settings.parity,
            handle_sigterm=False,  # the process is the simulator's; its ranks are stopped by events
        )
        credentials = self._credentials[Identity(_JOB, WORKER, machine.name)]
        engine: EngineFace
        if self.engines is not None and rank >= settings.ranks + settings.spares - settings.engine_processes:
            runtime: Runtime = InlineRuntime()
            observers = self._observers(machine, runtime.loop)
            make = partial(self._engine_apart, machine, config, credentials)
            engine = await self.engines.start(machine, config, observers, credentials, make)
        else:
            engine, runtime = await self._engine(
                machine,
                config,
                credentials,
                self._sockets(machine.loop, 0),
                observer=lambda event: self._observed(machine, event),
                host=self._shared_host(machine),
            )
        try:
            with stop.interrupting():
                view = at_work(await engine.wait_view(config.join_timeout, joining=True))
        except BaseException:
            await engine.aclose("not joined")
            raise
        job = CheckedJob(
            config,
            engine,
            runtime,
            view,
            stop=stop,
            machine=machine,
            checker=self._checker,
            compute_s=self._compute_s,
        )
        machine.flip_bit = job.flip_bit
        async with attended(job):
            try:
                return await self._work(job)
            except Departed:
                return None

    async def _engine_apart(
        self, machine: Machine, config: Config, credentials: Credentials, process: SimEngineProcess
    ) -> Engine:
        """Make the engine of a machine in a process of its own."""
        io = self._sockets(process.loop, 0)
        process.sockets.append(io)
        server = process.server
        engine, _ = await self._engine(
            machine, config, credentials, io, observer=server.observe, host=None, stacks=server.stacks
        )
        return engine

    async def _engine(
        self,
        machine: Machine,
        config: Config,
        credentials: Credentials,
        io: DatagramIO,
        *,
        observer: Observer,
        host: SimHost | None,
        stacks: Callable[[int, Callable[[str], None]], None] | None = None,
    ) -> tuple[Engine, Runtime]:
        """Make the engine of a machine, on the loop that runs."""
        engine, runtime = await start_with(
            config,
            credentials=credentials,
            make_io=lambda _: io,
            coordinators=[[(ip, _PORT) for ip in each.host.ips] for each in self.coordinators],
            incarnation=self._incarnation(machine),
            observers=(observer,),
            runtime=InlineRuntime(),
            wall_clock=_wall_clock,
            host=host,
            flight=self._flight(machine) if self._flights else None,
            stacks=stacks,
            lane_host=None if self.lanes is None else self.lanes.host_of(machine),
        )
        machine.engine, machine.endpoint, machine.engine_loop = engine, engine.endpoint, asyncio.get_running_loop()
        Lies(engine.endpoint, machine.lies_to, machine.lied_by_lanes)
        machine.faults = engine.faults
        _tell_of_votes(engine, machine)
        return engine, runtime

    def _flight(self, machine: Machine) -> FlightRecorder:
        """Return the flight recorder of a process, which writes to its machine's memory at once."""
        loop, life = machine.loop, machine.host.lives
        flight = FlightRecorder(
            job=_JOB,
            node=machine.name,
            process=str(life),
            clock=machine.name,
            host=machine.name,
            now_ns=lambda: round(loop.time() * 1e9),
            wall_ns=lambda: round(_wall_clock().timestamp() * 1e9),
        )

        def keep() -> None:
            if machine.host.loop is loop:  # what is left of a process that was killed writes nothing
                machine.flights[life] = flight.snapshot()

        flight.keep = keep
        return flight

    def _shared_host(self, machine: Machine) -> SimHost | None:
        if self.hosts is None:
            return None
        return self.hosts.begin(machine.name, machine.loop, machine.cut_off_in_memory)

    def _incarnation(self, machine: Machine) -> int:
        """As a real process has it: no clock and no memory of the node's earlier ones, only chance of this host's."""
        return first(os.urandom(CHANCE_BYTES))

    def _observers(self, machine: Machine, loop: asyncio.AbstractEventLoop) -> Observers:
        return Observers(machine.name, lambda: round(loop.time() * 1e9), lambda event: self._observed(machine, event))

    def _observed(self, machine: Machine, event: Observed) -> None:
        fields = " ".join(f"{name}={value}" for name, value in event.fields.items())
        self._world.note(event.kind, machine.name, fields, detail=event.fields)
        if is_coordinator(machine.name):
            self._follow(machine.name, event)
        if event.kind == "view_installed" and machine.engine is not None and self.hosts is not None:
            view_id, nodes, where = event.fields["view"], event.fields["nodes"], self.hosts.where
            beside = tuple(each for each in nodes if each != machine.name and where[each] == where[machine.name])
            carrier = memory_use(machine.engine, view_id, nodes)
            if carrier is not None:
                self._checker.carried(machine.name, view_id, carrier, beside)

    def _follow(self, coordinator: str, event: Observed) -> None:
        match event.kind:
            case "step_aborted":
                self.aborted += 1
            case "node_joined":
                self._checker.joined(coordinator, event.fields["peer"])
            case "peer_lost":
                self._checker.lost(coordinator, event.fields["peer"])
            case "node_released":
                stopping = [each.name for each in self.workers if each.terminated]
                self._checker.released(coordinator, event.fields["peer"], stopping)

    # -- how it ends ---------------------------------------------------------------------------------------------

    def _close(self, name: str) -> None:
        closing = self._closing.get(name)
        if closing is not None and not closing.done():
            closing.set_result(None)

    def _process_ended(self, machine: Machine) -> None:
        """A process has ended by itself."""
        error, node = machine.error, machine.name
        self._world.note("process_ended", node, "well" if error is None else _words(error))
        if error is not None:
            machine.failures += 1
            machine.troubled(error)
            if isinstance(error, self._checker.allowed):
                self._start_all_anew()
                if isinstance(error, Diverged):
                    self._leave_one_checkpoint(error)
            elif not isinstance(error, _AGAIN) and not self._lost_engine(node, error):
                self._failed("worker", _words(error), node=node, cause=error)
        leftovers = machine.leftovers()
        for each in (self.hosts, self.lanes, self.engines):
            leftovers += [] if each is None else each.leftovers(node)
        if leftovers:
            self._checker.break_("no-leftover", f"{node} left {', '.join(leftovers)}", node=node)
        machine.end()
        self._checker.ended(node)
        if self._leaving.pop(node, False) and machine.done:
            self._call_back(machine)
        if (error is not None or machine.terminated) and not machine.stays_down:
            self._world.after(round(self._settings.restart_after * 1e9), self._start_again, machine)

    def _lost_engine(self, node: str, error: BaseException) -> bool:
        """Whether a process has ended since its engine's has."""
        return self.engines is not None and self.engines.was_struck(node) and isinstance(error, LocalError)

    def _start_all_anew(self) -> None:
        """Those that had left as well: when all have ended, a job begins again with all of its nodes or not at all."""
        for machine in self.workers:
            if machine.departs:
                machine.departs = False
                if machine.done:
                    self._call_back(machine)
                else:
                    self._leaving[machine.name] = True

    def _leave_one_checkpoint(self, error: Diverged) -> None:
        """What the error asks of people, where the ranks have come to it by what they began with."""
        kept = leave_one(error, {machine.name: machine.disk for machine in self.workers})
        if kept:
            self._world.note("checkpoint_chosen", kept, f"of step {error.step}")
            self._checker.chosen(error.step or 0)

    def _call_back(self, machine: Machine) -> None:
        machine.done = False
        self._world.after(round(self._settings.restart_after * 1e9), self._start_again, machine)

    def _cut_off(self, machine: Machine, when: str) -> None:
        """A process was ended in the middle of writing. Like a pod, it comes back."""
        self._world.note("cut_off", machine.name, when)
        self._checker.ended(machine.name)
        self._world.after(round(self._settings.restart_after * 1e9), self._start_again, machine)

    def _start_again(self, machine: Machine) -> None:
        if not machine.stays_down and not machine.runs:
            machine.start()


def _tell_of_votes(engine: Engine, machine: Machine) -> None:
    """Have the machine told of each vote that its engine is about to cast, by its view and the coordinator's number."""
    vote = engine.voting.vote

    def told(view_id: int, *arguments: Any, **more: Any) -> Any:
        if engine.steps.open is not None:
            machine.on_cast(view_id, engine.steps.open[0])
        return vote(view_id, *arguments, **more)

    engine.voting.vote = told  # type: ignore[method-assign]  # in its place, for the checker


def _reach(database: SimDatabase, host: str) -> tuple[SimStore, DatabaseCalls]:
    """Return the journal for one leadership of a host's coordinator, and the way to it."""
    store = SimStore(database, host)
    return store, DatabaseCalls(database, store)


def _joined(ips: Sequence[str], port: int) -> str:
    return "+".join(f"{ip}:{port}" for ip in ips)


def _words(error: BaseException) -> str:
    """An error in a line, by its class and what it says."""
    if isinstance(error, asyncio.CancelledError):
        text = str(error) or "nobody had cancelled this process; it cancelled itself, or awaited what was cancelled"
    else:
        text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _wall_clock() -> datetime:
    """The date by which certificates are judged: the host's wall clock."""
    return datetime.fromtimestamp(time.time(), UTC)


@lru_cache(maxsize=32)
def _credentials(workers: tuple[str, ...], *, relay: bool) -> dict[Identity, Credentials]:
    """Of every node; the same in every world, so that they are made once in a process."""
    now = datetime.fromtimestamp(WALL_EPOCH_NS / 1e9, UTC) - timedelta(days=1)
    nodes = [
        (COORDINATOR, COORDINATOR_NODE),
        *((WORKER, name) for name in workers),
        *([(RELAY, RELAY)] if relay else []),
    ]
    rng = random.Random("quicoll.sim/credentials")  # noqa: S311 - a simulation has no secrets
    return ephemeral(_JOB, nodes, days=3650, now=now, entropy=rng.randbytes)
