"""A whole cluster in one world: coordinator, ranks, the user's own code, and what breaks them.

Everything that runs is the real code: endpoint, aioquic, TLS, membership, journal, collectives, steps. Simulated are
what is outside of a process: time, the network, the disk, and whoever starts a process again.

A run goes through

    start       all machines start at time 0; the first view forms
    faults      events in the order of their times, equal ones in the order of writing
    end         when all events are over and every worker has returned: the coordinator is closed, leftovers are sought
    failure     the first broken invariant or unexpected error ends the run at once; so does its limit of time

How a process may end, and what follows:

    it returns                                   a worker is done, and is not started again
    one of quicoll's errors that blame the       it is started again after `restart_after` seconds, like a pod: a new
    world around it (`_AGAIN`): lost peers, a    process may well go on. The last error of each node is part of what
    partition, spoilt bytes, a failed disk       is said if the run then never comes to its end
    any other exception: Mismatch and            the run has failed. The code is wrong, or the test of it has; the next
    LocalError, since the same code would do     process would only do the same
    the same again; the user's own; Forbidden
    SystemExit in any task or callback, and      the run has failed as well: they pass by whatever waits for a process
    CancelledError, for nobody cancels it        that works, and so would look like none of these
    a fault                                      a crash stays down until `restart` or `heal`

KeyboardInterrupt belongs to the person at the keyboard, and ends everything.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from quicoll.config import Config
from quicoll.coordinator import NODE, CoordinatorService, coordinator_config
from quicoll.errors import (
    AuditError,
    CheckpointError,
    Corrupted,
    JournalError,
    LocalError,
    Partitioned,
    PeerError,
    StepAborted,
)
from quicoll.job import attended
from quicoll.membership.journal import Journal
from quicoll.observe import Event as Observed
from quicoll.observe import Observers
from quicoll.runtime import InlineRuntime
from quicoll.sim import events as scenario
from quicoll.sim.disk import DiskFault, SimDisk
from quicoll.sim.errors import InvariantBroken, RunFailed
from quicoll.sim.events import COORDINATOR_HOST, Event, Fault, Schedule, node_name
from quicoll.sim.invariants import CheckedJob, CheckedStore, Checker, Reference
from quicoll.sim.machine import Machine
from quicoll.sim.outcome import Outcome, Settings
from quicoll.starting import start_with
from quicoll_transport.authority import ephemeral
from quicoll_transport.endpoint import EndpointConfig
from quicoll_transport.faults import PayloadCorrupt
from quicoll_transport.identity import COORDINATOR, WORKER, Credentials, Identity
from quicoll_transport.sim import (
    WALL_EPOCH_NS,
    SimulatedSocket,
    SimulationError,
    World,
)

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll_transport.sim import Recorder

__all__ = ["Simulation", "Worker"]

Worker = Callable[..., Awaitable[Any]]

_JOB = "sim"
_PORT = 4433
_JOURNAL = "/data/journal.sqlite"
_LOOK_NS = 500_000_000  # between looks at the memory of all endpoints
_CLOSE_NS = 60_000_000_000  # for the end of the coordinator
_AGAIN = (PeerError, Partitioned, StepAborted, Corrupted, CheckpointError, AuditError, JournalError)
_SHOWN = 12  # nodes in one error
_CLIP = 600  # characters of each one: a Mismatch names both sides


class Simulation:
    """One run of one cluster. Write the scenario with `at` and `every`, then `run` it, once.

    worker: a coroutine function, called on every rank with the job it has joined (`async def worker(job)`), and with
    the simulation as well if it takes two arguments. What it raises fails the run, but for those of quicoll's errors by
    which a process is started again (see the head of this module).
    reference: the digest of the registered state after a step, where it is known beforehand. recorder: is told of
    everything that happens (quicoll.sim.trace has one).
    """

    def __init__(
        self,
        worker: Worker,
        *,
        seed: int = 0,
        settings: Settings | None = None,
        events: tuple[Event, ...] = (),
        reference: Reference | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.seed = seed
        self.settings = settings or Settings()
        self.events: list[Event] = list(events)
        self._worker = worker
        self._takes_simulation = _positional(worker) > 1
        self._recorder = recorder
        self._reference = reference
        self._machines: dict[str, Machine] = {}
        self._injected: dict[str, int] = {}
        self._aborted = 0
        self._events_left = 0
        self._failure: RunFailed | None = None
        self._world: World
        self.checker: Checker

    def __repr__(self) -> str:
        """Without an address: an assertion of the worker may show us, and its text is part of the run."""
        return f"<Simulation seed={self.seed} ranks={self.settings.ranks}>"

    # -- the scenario --------------------------------------------------------------------------------------------

    def at(self, seconds: float) -> Schedule:
        """Something happens after so many seconds: `sim.at(1.2).partition({0, 1}, {2, 3})`."""
        return scenario.at(seconds, self.events.append)

    def every(self, seconds: float, *, start: float, until: float) -> Schedule:
        """Something happens again and again, from `start` (included) to `until` (not included)."""
        return scenario.every(seconds, start=start, until=until, add=self.events.append)

    # -- what a worker may ask -----------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds of true time since the beginning."""
        return self._world.elapsed_ns / 1e9

    def everyone_at(self, step: int) -> bool:
        """Whether every worker that is not done has committed `step` and is in the last view, and no fault is to come.

        In the view, since one that was left out would come back to a job that the others have left, and wait in vain.
        """
        if self._events_left:
            return False
        held = self.checker.held
        members = self.checker.installed.nodes if self.checker.installed is not None else ()
        return all(
            machine.done or (name in members and held.get(name, (0, 0))[1] >= step)
            for name, machine in self._machines.items()
            if name != COORDINATOR_HOST
        )

    def disk(self, job: Job) -> SimDisk:
        """The disk of the job's node, for `checkpoint.save(..., disk=sim.disk(job))`. It outlives processes."""
        return self._machines[job.node].disk

    # -- running -------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run it to its end. Never raises for what the simulated code does, SystemExit too: see `Outcome.error`."""
        started = time.perf_counter()
        settings = self.settings
        self._check_nodes()
        with World(self.seed) as world:
            self._world = world
            self.checker = Checker(
                lambda: self.now, seed=self.seed, world_size=settings.ranks, reference=self._reference
            )
            world.recorder = self._recorder
            world.network.set_conditions(settings.conditions)
            self._build()
            self._events_left = len(self.events)
            for event in sorted(self.events, key=lambda each: each.at_ns):  # stable: equal times in order of writing
                world.at(world.now_ns + event.at_ns, self._apply, event)
            world.after(_LOOK_NS, self._look)
            try:
                world.run(self._is_over, limit_ns=round(settings.limit * 1e9))
                if self._verdict() is None:
                    self._machines[COORDINATOR_HOST].loop.call_soon(self._close_coordinator)
                    world.run(lambda: self._coordinator_done() or self._verdict() is not None, limit_ns=_CLOSE_NS)
            except SimulationError as error:
                self._fail(type(error).__name__, f"{error}{self._troubles()}")
            outcome = self._outcome(world)
        wall = time.perf_counter() - started
        return _with_wall(outcome, wall)

    def _build(self) -> None:
        names = (COORDINATOR_HOST, *(node_name(rank) for rank in range(self.settings.ranks)))
        for name in names:
            host = self._world.host(name)
            life = self._coordinate if name == COORDINATOR_HOST else self._work
            self._machines[name] = Machine(host, life, ended=self._process_ended, was_cut_off=self._cut_off)
        for name in names:
            self._machines[name].start()

    def _check_nodes(self) -> None:
        known = [COORDINATOR_HOST, *(node_name(rank) for rank in range(self.settings.ranks))]
        for event in self.events:
            fault = event.fault
            named = [getattr(fault, "node", None), *getattr(fault, "one", ()), *getattr(fault, "other", ())]
            for name in named:
                if name is not None and name not in known:
                    raise LocalError(f"{event}: there is no node {name!r} among {', '.join(known)}")

    # -- processes -----------------------------------------------------------------------------------------------

    async def _coordinate(self, machine: Machine) -> None:
        settings = self.settings
        loop = asyncio.get_running_loop()
        store = CheckedStore(Journal.open(_JOURNAL, job=_JOB, connect=machine.disk.connect), self.checker)
        service = CoordinatorService(
            credentials=_credentials(settings.ranks)[Identity(_JOB, COORDINATOR, NODE)],
            io=SimulatedSocket(machine.loop, _PORT),
            journal=store,
            config=coordinator_config(settings.ranks, settings.lost_after, self.seed),
            transport=EndpointConfig(lost_after_ns=round(settings.lost_after * 1e9)),
            loop=loop,
            incarnation=self._incarnation(machine),
            observers=self._observers(machine, loop),
            wall_clock=_wall_clock,
        )
        machine.endpoint = service.endpoint
        machine.faults = service.faults
        self._closing: asyncio.Future[None] = loop.create_future()
        failed = loop.create_task(service.wait_failed())
        try:
            await asyncio.wait({failed, self._closing}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
        finally:
            failed.cancel()
            await service.aclose()
            store.close()

    async def _work(self, machine: Machine) -> Any:
        settings = self.settings
        rank = int(machine.name.removeprefix("worker-"))
        config = Config.resolve(
            environ={},
            coordinator=f"{self._machines[COORDINATOR_HOST].host.ip}:{_PORT}",
            job=_JOB,
            node=machine.name,
            world_size=settings.ranks,
            rank_hint=rank,
            listen=f"{machine.host.ip}:0",
            site=settings.sites[rank] if settings.sites else None,
            lost_after=settings.lost_after,
            timeout=settings.timeout,
            join_timeout=settings.join_timeout,
            hold_timeout=settings.hold_timeout,
            chunk_bytes=settings.chunk_bytes,
        )
        engine, runtime = await start_with(
            config,
            credentials=_credentials(settings.ranks)[Identity(_JOB, WORKER, machine.name)],
            make_io=lambda _: SimulatedSocket(machine.loop),
            coordinator_address=(self._machines[COORDINATOR_HOST].host.ip, _PORT),
            incarnation=self._incarnation(machine),
            observers=(lambda event: self._observed(machine, event),),
            runtime=InlineRuntime(),
            wall_clock=_wall_clock,
        )
        machine.endpoint = engine.endpoint
        machine.faults = engine.faults
        try:
            view = await engine.wait_view(config.join_timeout, joining=True)
        except BaseException:
            await engine.aclose("not joined")
            raise
        job = CheckedJob(config, engine, runtime, view, machine=machine, checker=self.checker)
        async with attended(job):
            return await self._worker(*((job, self) if self._takes_simulation else (job,)))

    def _incarnation(self, machine: Machine) -> int:
        """Above every earlier one of the node, whatever its wall clock does."""
        return WALL_EPOCH_NS + machine.host.lives

    def _observers(self, machine: Machine, loop: asyncio.AbstractEventLoop) -> Observers:
        return Observers(machine.name, lambda: round(loop.time() * 1e9), lambda event: self._observed(machine, event))

    def _observed(self, machine: Machine, event: Observed) -> None:
        fields = " ".join(f"{name}={value}" for name, value in event.fields.items())
        self._world.note(event.kind, machine.name, fields, detail=event.fields)
        if machine.name == COORDINATOR_HOST and event.kind == "step_aborted":
            self._aborted += 1

    def _process_ended(self, machine: Machine) -> None:
        """A process has ended by itself."""
        error, node = machine.error, machine.name
        self._world.note("process_ended", node, "well" if error is None else _words(error))
        if error is not None:
            machine.failures += 1
            machine.troubled(error)
            if not isinstance(error, _AGAIN):
                self._fail("worker", _words(error), node=node, cause=error)
        leftovers = machine.leftovers()
        if leftovers:
            self.checker.break_("no-leftover", f"{node} left {', '.join(leftovers)}", node=node)
        machine.end()
        self.checker.ended(node)
        if error is not None:
            self._world.after(round(self.settings.restart_after * 1e9), self._start_again, machine)

    def _cut_off(self, machine: Machine) -> None:
        """A process was ended in the middle of writing. Like a pod, it comes back."""
        self._world.note("cut_off", machine.name, "while it wrote to its disk")
        self.checker.ended(machine.name)
        self._world.after(round(self.settings.restart_after * 1e9), self._start_again, machine)

    def _start_again(self, machine: Machine) -> None:
        if not machine.stays_down and not machine.runs:
            machine.start()

    # -- faults --------------------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        self._events_left -= 1
        fault = event.fault
        self._world.note("fault", "sim", fault.source(), detail=fault)
        usual = self.settings.conditions
        if self._carry_out(fault):
            for kind in () if scenario.is_end(fault, usual) else scenario.kinds_of(fault, usual):
                self._injected[kind] = self._injected.get(kind, 0) + 1
        else:
            self._world.note("fault_void", "sim", fault.source(), detail=fault)

    def _carry_out(self, fault: Fault) -> bool:
        """Whether it could be done: a process that is gone cannot be paused."""
        network = self._world.network
        match fault:
            case scenario.Partition():
                network.partition(fault.one, fault.other, one_way=fault.one_way)
            case scenario.Hold():
                network.hold(fault.one, fault.other)
            case scenario.Repair():
                network.repair(fault.one or None, fault.other or None)
            case scenario.SetConditions():
                network.set_conditions(fault.conditions, fault.one or None, fault.other or None)
            case scenario.Heal():
                self._heal()
            case _:
                return self._disturb(fault)
        return True

    def _disturb(self, fault: Any) -> bool:
        machine = self._machines[fault.node]
        host = machine.host
        match fault:
            case scenario.Crash():
                if machine.done or not (machine.runs or fault.power):
                    return False
                machine.end(power=fault.power)
                machine.stays_down = True
                self.checker.ended(machine.name)
            case scenario.Restart():
                if machine.done or machine.runs:
                    return False
                machine.start()
            case scenario.Pause():
                if host.state is not host.state.RUNNING:
                    return False
                machine.disturbances += 1
                host.pause()
                if fault.ns:
                    self._world.after(fault.ns, self._resume, machine, host.lives)
            case scenario.Resume():
                return self._resume(machine, host.lives)
            case scenario.Slow():
                machine.disturbances += 1
                host.slow_ns = fault.ns
            case scenario.Drift():
                host.set_drift(fault.ppm)
            case scenario.Leap():
                machine.disturbances += 1
                host.leap(fault.ns)
            case scenario.StepWall():
                host.clock.step_wall(fault.ns)
            case scenario.Disk():
                machine.fail_disk(fault.what)
            case scenario.Corrupt():
                if machine.faults is None:
                    return False
                machine.faults.add_payload(PayloadCorrupt(times=fault.times))
            case _:
                raise AssertionError(f"{fault!r} is not carried out")
        return True

    def _resume(self, machine: Machine, life: int) -> bool:
        host = machine.host
        if host.state is not host.state.PAUSED or host.lives != life:
            return False
        machine.disturbances += 1
        host.resume()
        return True

    def _heal(self) -> None:
        world = self._world
        world.network.repair()
        world.network.set_conditions(self.settings.conditions)
        for name in self._machines:
            machine = self._machines[name]
            self._resume(machine, machine.host.lives)
            machine.host.slow_ns = 0
            machine.host.set_drift(0)
            machine.disturbances += 1
            machine.mend_disk()
            machine.start()
            machine.commits_at_heal = machine.commits
        world.after(round(self.settings.recovery * 1e9), self._look_for_progress, self._events_left)

    # -- what is looked at ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        """At what the endpoints hold, now and then."""
        for name in self._machines:
            endpoint = self._machines[name].endpoint
            if endpoint is None:
                continue
            if len(endpoint.links) > len(self._machines):
                self.checker.break_("memory", f"{name} has {len(endpoint.links)} links", node=name)
            for link in endpoint.links.values():
                held = link.snapshot().credit_held
                if held > endpoint.config.credit_bytes:
                    self.checker.break_("memory", f"{name} holds {held} bytes for {link.node}", node=name)
        self._world.after(_LOOK_NS, self._look)

    def _look_for_progress(self, events_left: int) -> None:
        if events_left != self._events_left:  # it was not the last healing, or faults came after it
            return
        for name in self._machines:
            machine = self._machines[name]
            if name != COORDINATOR_HOST and not machine.done and machine.commits == machine.commits_at_heal:
                self.checker.break_(
                    "progress",
                    f"{name} has committed nothing within {self.settings.recovery:g} s of the last healing; "
                    + self._world.waiting()
                    + self._troubles(),
                    node=name,
                )

    def _troubles(self) -> str:
        """The last error of each node that is not done: why there is no end of a run, most likely."""
        told = []
        for machine in self._machines.values():
            if machine.trouble is not None and not machine.done:
                error, at = machine.trouble
                often = f" (its process ended by errors {machine.failures} times)" if machine.failures else ""
                told.append(f"; the last error of {machine.name}{often}, at {at:.6f} s: {_words(error)[:_CLIP]}")
        return "".join(told[:_SHOWN]) + ("; ..." if len(told) > _SHOWN else "")

    def _fail(self, kind: str, message: str, *, node: str = "", cause: BaseException | None = None) -> None:
        if self._failure is None:
            self._failure = RunFailed(kind, message, seed=self.seed, at=self.now, node=node)
            self._failure.__cause__ = cause

    def _verdict(self) -> RunFailed | None:
        if self.checker.broken is not None and self._failure is None:
            self._failure = self.checker.broken
        if self._world.failures and self._failure is None:
            node, text = self._world.failures[0]
            self._failure = InvariantBroken("no-surprise", f"on {node}: {text}", seed=self.seed, at=self.now, node=node)
        return self._failure

    def _is_over(self) -> bool:
        if self._verdict() is not None:
            return True
        if self._events_left:
            return False
        return all(machine.done for name, machine in self._machines.items() if name != COORDINATOR_HOST)

    # -- the end -------------------------------------------------------------------------------------------------

    def _close_coordinator(self) -> None:
        if not self._closing.done():
            self._closing.set_result(None)

    def _coordinator_done(self) -> bool:
        return self._machines[COORDINATOR_HOST].done and not self._machines[COORDINATOR_HOST].runs

    def _outcome(self, world: World) -> Outcome:
        injected = dict(self._injected)
        for kind, count in world.network.injected.items():
            injected[f"datagram_{kind}"] = count
        for machine in self._machines.values():
            for kind, count in machine.disk.injected.items():
                if count and kind not in (DiskFault.POWER_LOSS, DiskFault.KILL):  # every end of a process is one
                    injected[kind] = injected.get(kind, 0) + count
        workers = [machine for name, machine in self._machines.items() if name != COORDINATOR_HOST]
        return Outcome(
            seed=self.seed,
            error=self._verdict(),
            injected=dict(sorted(injected.items())),
            committed=len(self.checker.commits),
            aborted=self._aborted,
            views=len(self.checker.views),
            virtual_s=world.elapsed_ns / 1e9,
            wall_s=0.0,
            digest=world.digest,
            events=world.events,
            results=tuple(machine.result for machine in workers),
        )


def _words(error: BaseException) -> str:
    """An error in a line, by its class and what it says."""
    if isinstance(error, asyncio.CancelledError):
        text = str(error) or "nobody had cancelled this process; it cancelled itself, or awaited what was cancelled"
    else:
        text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _with_wall(outcome: Outcome, wall_s: float) -> Outcome:
    return replace(outcome, wall_s=wall_s)


def _positional(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds for parameter in inspect.signature(function).parameters.values())


def _wall_clock() -> datetime:
    """The date by which certificates are judged: the host's wall clock."""
    return datetime.fromtimestamp(time.time(), UTC)


@lru_cache(maxsize=16)
def _credentials(ranks: int) -> dict[Identity, Credentials]:
    """Of every node; the same in every world, so that they are made once in a process."""
    now = datetime.fromtimestamp(WALL_EPOCH_NS / 1e9, UTC) - timedelta(days=1)
    nodes = [(COORDINATOR, NODE), *((WORKER, node_name(rank)) for rank in range(ranks))]
    return ephemeral(_JOB, nodes, days=3650, now=now, entropy=random.Random("quicoll.sim/credentials").randbytes)  # noqa: S311
