"""A whole cluster in one world: coordinator, ranks, the user's own code, and what breaks them.

Everything that runs is the real code: endpoint, aioquic, TLS, membership, journal, collectives, steps. Simulated are
what is outside of a process: time, the network, the disk, and whoever starts a process again. The fleet (fleet.py) has
the machines and the lives of their processes; here are the scenario, what breaks them, and the verdict.

A run goes through

    start       all machines start at time 0; the first view forms
    faults      events in the order of their times, equal ones in the order of writing
    end         when all events are over and every worker has returned: the coordinator is closed, leftovers are sought
    failure     the first broken invariant or unexpected error ends the run at once; so does its limit of time. Which
                errors of a process are unexpected, fleet.py says

KeyboardInterrupt belongs to the person at the keyboard, and ends everything.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from time import perf_counter as _real_time  # by name, since a world replaces the module's
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError
from quicoll.sim.disk.files import DiskFailure
from quicoll.sim.errors import InvariantBroken, RunFailed
from quicoll.sim.fleet import Fleet, node_names
from quicoll.sim.invariants import Checker, ReferenceDigest, ReplayedDigest
from quicoll.sim.misconduct import raise_alarm
from quicoll.sim.outcome import Outcome, Settings
from quicoll.sim.scenario import events as scenario
from quicoll.sim.scenario import schedule
from quicoll.sim.translators import opens, translators
from quicoll_transport.endpoint import LinkState
from quicoll_transport.faults.compose import PayloadCorrupt
from quicoll_transport.net.addresses import is_detour
from quicoll_transport.sim import SimulationError, World

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.observability.flight_record import FlightFile
    from quicoll.sim.disk.disk import SimDisk
    from quicoll.sim.machine import Machine
    from quicoll.sim.scenario.events import Fault, NodeRef, ScenarioEvent
    from quicoll.sim.scenario.schedule import FaultSchedule
    from quicoll_transport.sim import Recorder

__all__ = ["Simulation", "Worker"]

Worker = Callable[..., Awaitable[Any]]

_LOOK_NS = 500_000_000  # between looks at the memory of all endpoints
_TELL_S = 5.0  # of real time, between two lines of progress
_CLOSE_NS = 60_000_000_000  # for the end of the coordinator


class Simulation:
    """One run of one cluster. Write the scenario with `at` and `every`, then `run` it, once.

    Args:
        worker: A coroutine function, called on every rank with the job it has joined (`async def worker(job)`), and
            with the simulation as well if it takes two arguments. What it raises fails the run, except quicoll's errors
            after which a process is started again (see fleet.py).
        seed: Determines everything that happens.
        settings: Of the cluster; None for the defaults.
        events: Scheduled faults, in addition to those written with `at` and `every`.
        reference: Digest of the registered state after a step, where it is known beforehand.
        replay: The same where it depends on more than the step, and the state tells on what: a function of both.
        compute: Simulated seconds from the entry of each step to its body, for what the body computes: that takes no
            time of its own here. With 0 a loop that never sleeps does thousands of steps between two faults.
        recorder: Gets every event (quicoll.sim.trace.recording has one).
        flights: Whether ranks have flight recorders, which `flights_written` gives afterwards.
        progress: Called now and then while a run takes long in real time, with a line for people.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        seed: int = 0,
        settings: Settings | None = None,
        events: tuple[ScenarioEvent, ...] = (),
        reference: ReferenceDigest | None = None,
        replay: ReplayedDigest | None = None,
        compute: float = 0.0,
        recorder: Recorder | None = None,
        flights: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if not 0 <= compute < 3600:
            raise LocalError(f"a step computes for less than an hour and not for {compute!r} s")
        self.seed = seed
        self.settings = settings or Settings()
        self.events: list[ScenarioEvent] = list(events)
        self._worker = worker
        self._takes_simulation = _positional(worker) > 1
        self.compute = compute
        self._recorder = recorder
        self._flights = flights
        self._progress = progress
        self._told_at = 0.0
        self._replay = replay if reference is None else lambda step, _: reference(step)
        self._armed: dict[int, tuple[ScenarioEvent, bool]] = {}  # that wait for a vote, or were set off by one
        self._injected: dict[str, int] = {}
        self._events_left = 0
        self._failure: RunFailed | None = None
        self._world: World
        self._fleet: Fleet
        self.checker: Checker

    def __repr__(self) -> str:
        # Without an address: an assertion of the worker may show this, and its text is part of the run.
        return f"<Simulation seed={self.seed} ranks={self.settings.ranks}>"

    # -- the scenario --------------------------------------------------------------------------------------------

    def at(self, seconds: float) -> FaultSchedule:
        """Schedule a fault after so many seconds: `sim.at(1.2).partition({0, 1}, {2, 3})`."""
        return schedule.at(seconds, self.events.append)

    def every(self, seconds: float, *, start: float, until: float) -> FaultSchedule:
        """Schedule a fault repeatedly.

        Args:
            seconds: Time between two.
            start: Time of the first.
            until: They end before this time.
        """
        return schedule.every(seconds, start=start, until=until, add=self.events.append)

    def at_vote(self, node: NodeRef, *, start: float = 0.0, after: float = 0.0) -> FaultSchedule:
        """Schedule a fault for a vote: `sim.at_vote(2, start=1.0, after=0.001).crash("coordinator")`.

        Args:
            node: Whose vote. A healing that comes before it takes the fault back.
            start: Its first vote from this time on counts.
            after: Seconds from the vote to the fault. With 0 a path breaks before the vote leaves, and a process just
                after that; a decision takes two ways through the network.
        """
        return schedule.at_vote(node, start=start, after=after, add=self.events.append)

    # -- what a worker may ask -----------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds of true time since the beginning."""
        return self._world.elapsed_ns / 1e9

    def everyone_at(self, step: int) -> bool:
        """Return whether all workers that are not done have committed `step` in the last view, and no fault is to come.

        In the view, since one that was left out would come back to a job that the others have left, and wait in vain.
        """
        if self._events_left:
            return False
        held = self.checker.held
        members = self.checker.installed.nodes if self.checker.installed is not None else ()
        return all(
            machine.done
            or (machine.name in members and held.get(machine.name, (0, 0))[1] >= step)
            or self._stands_by(machine)
            for machine in self._fleet.workers
        )

    def _stands_by(self, machine: Machine) -> bool:
        """Return whether a worker is in no view because there are as many ranks as may be, or were asked for."""
        view, wanted = self.checker.installed, self.checker.wanted
        most = self.settings.ranks if self.settings.spares else None
        most = wanted if most is None or (wanted is not None and wanted < most) else most
        return (
            view is not None
            and most is not None
            and view.workers >= most
            and machine.name not in view.nodes[: view.workers]
        )

    @property
    def flights_written(self) -> tuple[FlightFile, ...]:
        """What the flight recorders of all processes wrote, for `quicoll.observability.post_mortem.conclude`."""
        machines = self._fleet.machines.values()
        return tuple(machine.flights[life] for machine in machines for life in sorted(machine.flights))

    def disk(self, job: Job) -> SimDisk:
        """Return the disk of the job's node, for `checkpoint.save(..., disk=sim.disk(job))`. It outlives processes."""
        return self._fleet.machines[job.node].disk

    # -- running -------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run to the end. What the simulated code raises, SystemExit too, is in `Outcome.error`."""
        started = self._told_at = _real_time()
        settings = self.settings
        self._check_nodes()
        with World(self.seed) as world:
            self._world = world
            self.checker = Checker(lambda: self.now, seed=self.seed, world_size=settings.ranks, replay=self._replay)
            world.recorder = self._recorder
            world.network.set_conditions(settings.conditions)
            self._fleet = Fleet(
                world,
                settings,
                seed=self.seed,
                newcomers=scenario.newcomers(self.events, settings.ranks + settings.spares),
                compute_s=self.compute,
                checker=self.checker,
                work=self._work,
                failed=self._fail,
                flights=self._flights,
            )
            for machine in self._fleet.machines.values():
                machine.on_vote = partial(self._voted, machine.name)
            self._fleet.start()
            self._events_left = len(self.events)
            for event in sorted(self.events, key=lambda each: each.at_ns):  # stable: equal times in order of writing
                world.at(world.now_ns + event.at_ns, self._due, event)
            world.after(_LOOK_NS, self._look)
            try:
                world.run(self._is_over, limit_ns=round(settings.limit * 1e9))
                if self._verdict() is None and any(machine.runs for machine in self._fleet.coordinators):
                    self._fleet.close_coordinators()
                    world.run(lambda: self._fleet.closed or self._verdict() is not None, limit_ns=_CLOSE_NS)
            except SimulationError as error:
                self._fail(type(error).__name__, f"{error}{self._fleet.troubles()}")
            outcome = self._outcome(world)
        wall = _real_time() - started
        return _with_wall(outcome, wall)

    def _check_nodes(self) -> None:
        count = self.settings.ranks + self.settings.spares
        own_relay = self.settings.relay == "own"
        here = node_names(count, coordinators=self.settings.coordinators, relay=own_relay)
        known = [*here, *scenario.newcomers(self.events, count)]
        several = self.settings.coordinators > 1
        reached = [*known, scenario.DATABASE_HOST] if several else known
        behind = [scenario.node_name(rank) for rank, kind in enumerate(self.settings.nats) if kind]
        for event in self.events:
            fault = event.fault
            if isinstance(fault, scenario.TakeOver | scenario.JournalFault) and not several:
                raise LocalError(f"{event}: there is one coordinator; Settings(coordinators=2) makes another")
            if isinstance(fault, scenario.JoinAnew) and fault.node in here:
                raise LocalError(f"{event}: {fault.node} is there from the beginning")
            if isinstance(fault, scenario.Meddle) and (self.settings.relay == "none" or not behind):
                raise LocalError(
                    f"{event}: nobody passes anything on; Settings(nats=...) has workers that need a relay"
                )
            if isinstance(fault, scenario.Unplug) and fault.number > self.settings.paths:
                raise LocalError(f"{event}: a host has {self.settings.paths} addresses; Settings(paths=...) gives more")
            if isinstance(fault, scenario.MemoryFault) and not self.settings.hosts:
                raise LocalError(f"{event}: no two share a host; Settings(hosts=...) has workers that do")
            if isinstance(fault, scenario.LaneFault) and not self.settings.lanes:
                raise LocalError(f"{event}: no rank has a lane; Settings(lanes=...) has workers that do")
            if isinstance(fault, scenario.EngineFault) and not self.settings.engine_processes:
                raise LocalError(f"{event}: no engine has a process; Settings(engine_processes=...) has some that do")
            if isinstance(fault, scenario.LaneFault) and (fault.only or 0) >= self.settings.lanes:
                raise LocalError(f"{event}: a rank has {self.settings.lanes} lanes, which are numbered from 0")
            if isinstance(fault, scenario.Rebind) and fault.node not in behind:
                raise LocalError(f"{event}: {fault.node} is behind no address translator; Settings(nats=...) has them")
            node = getattr(fault, "node", None)
            named = [getattr(fault, "to", None), event.voter or None, *getattr(fault, "leave", ())]
            ends = [*getattr(fault, "one", ()), *getattr(fault, "other", ())]
            (ends if isinstance(fault, scenario.Drift | scenario.Leap | scenario.StepWall) else named).append(node)
            for name, among in [*((name, known) for name in named), *((name, reached) for name in ends)]:
                if name is not None and name not in among:
                    raise LocalError(f"{event}: there is no node {name!r} among {', '.join(known)}")

    async def _work(self, job: Job) -> Any:
        return await self._worker(*((job, self) if self._takes_simulation else (job,)))

    # -- faults --------------------------------------------------------------------------------------------------

    def _due(self, event: ScenarioEvent) -> None:
        self._events_left -= 1
        if event.voter:
            self._armed[id(event)] = event, False
            self._world.note("armed", "sim", str(event), detail=event)
        else:
            self._apply(event)

    def _voted(self, node: str) -> None:
        """A node is about to cast its vote. A path breaks before it leaves; what befalls a process comes after this
        turn of its loop, or later."""
        for key, (event, set_off) in list(self._armed.items()):
            if event.voter == node and not set_off:
                self._armed[key] = event, True
                if event.after_ns or not isinstance(event.fault, scenario.PartitionPath | scenario.HoldPath):
                    self._world.after(event.after_ns, self._strike, key)
                else:
                    self._strike(key)

    def _strike(self, key: int) -> None:
        """Not where a healing has come between the vote and the fault."""
        event, _ = self._armed.pop(key, (None, False))
        if event is not None:
            self._apply(event)

    def _apply(self, event: ScenarioEvent) -> None:
        fault = event.fault
        self._world.note("fault", "sim", fault.source(), detail=fault)
        usual = self.settings.conditions
        if self._carry_out(fault):
            kinds = () if scenario.is_end(fault, usual) else scenario.kinds_of(fault, usual)
            for kind in (*kinds, *(("vote",) if event.voter else ())):
                self._injected[kind] = self._injected.get(kind, 0) + 1
        else:
            self._world.note("fault_void", "sim", fault.source(), detail=fault)

    def _carry_out(self, fault: Fault) -> bool:
        """Return whether it could be done: a process that is gone cannot be paused."""
        network = self._world.network
        match fault:
            case scenario.PartitionPath():
                network.partition(fault.one, fault.other, one_way=fault.one_way)
            case scenario.Unplug():
                network.unplug(fault.node, fault.number)
            case scenario.HoldPath():
                network.hold(fault.one, fault.other)
            case scenario.Repair():
                network.repair(fault.one or None, fault.other or None)
            case scenario.SetConditions():
                network.set_conditions(fault.conditions, fault.one or None, fault.other or None)
            case scenario.ScaleTo():
                self._fleet.scale(fault.world_size, fault.leave)
            case scenario.Heal():
                self._heal()
            case scenario.TakeOver():
                return self._lose_leader(fault.how)
            case scenario.JournalFault():
                self._fail_journal(fault.what)
            case scenario.Drift() | scenario.Leap() | scenario.StepWall():
                self._set_clock(fault)
            case scenario.Rebind():
                self._fleet.nats[fault.node].forget()
            case scenario.Meddle():
                self._fleet.meddling = fault.what
            case _:
                return self._disturb(fault)
        return True

    def _lose_leader(self, how: str) -> bool:
        leader = self._fleet.leader
        if leader is None:
            return False
        workers = [machine.name for machine in self._fleet.workers]
        match how:
            case "workers":
                self._world.network.partition([leader.name], workers)
            case "database":
                self._world.network.partition([leader.name], [scenario.DATABASE_HOST])
            case "pause":
                return self._disturb(scenario.Pause(leader.name, round(self.settings.lease * 1.5e9)))
            case _:
                return self._disturb(scenario.Crash(leader.name, power=how == "power"))
        return True

    def _fail_journal(self, what: str) -> None:
        database = self._fleet.database
        if database is None:
            raise AssertionError("events are checked before the run")
        if what in ("away", "back"):
            database.away = what == "away"
        else:
            database.fault = what

    def _set_clock(self, fault: scenario.Drift | scenario.Leap | scenario.StepWall) -> None:
        database, machine = self._fleet.database, self._fleet.machines.get(fault.node)
        host = machine.host if machine is not None else None if database is None else database.host
        if host is None:
            raise AssertionError("events are checked before the run")
        match fault:
            case scenario.Drift():
                host.set_drift(fault.ppm)
            case scenario.Leap():
                if machine is not None:
                    machine.disturbances += 1
                host.leap(fault.ns)
            case scenario.StepWall():
                host.clock.step_wall(fault.ns)

    def _disturb(self, fault: Any) -> bool:
        machine = self._fleet.machines[fault.node]
        host = machine.host
        match fault:
            case scenario.Crash():
                if machine.done or not (machine.runs or fault.power):
                    return False
                for each in self._fleet.beside(machine) if fault.power else (machine,):
                    each.end(power=fault.power)
                    each.stays_down = True
                    self.checker.ended(each.name)
            case scenario.Restart():
                if machine.done or (machine.runs and not machine.terminated):
                    return False
                machine.start()  # one that is still at its end is started again after it
            case scenario.JoinAnew():
                if not machine.awaited:
                    return False
                machine.awaited = False
                machine.start()
            case scenario.LeaveJob():
                if machine.done or machine.departs or not self._others(machine):
                    return False
                machine.departs = True
            case scenario.Terminate():
                if machine.done or not machine.runs or machine.terminated:
                    return False
                machine.terminate()
            case scenario.LieTo():
                machine.lies_to[fault.to] = None
            case scenario.Alarm():
                self._set_alarm(machine, fault.ns)
            case scenario.Forge():
                machine.forges = fault.what
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
            case scenario.DiskFault():
                machine.fail_disk(fault.what)
            case scenario.MemoryFault():
                hosts = self._fleet.hosts
                if hosts is None:
                    raise AssertionError("events are checked before the run")
                hosts.arm(machine.name, fault.what, fault.after)
            case scenario.LaneFault():
                lanes = self._fleet.lanes
                if lanes is None:
                    raise AssertionError("events are checked before the run")
                return lanes.strike(machine.name, fault.what, fault.only)
            case scenario.EngineFault():
                engines = self._fleet.engines
                if engines is None:
                    raise AssertionError("events are checked before the run")
                return engines.strike(machine.name, fault.what)
            case scenario.CorruptPayloads():
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

    def _others(self, machine: Machine) -> bool:
        """Return whether anybody is left when this one leaves."""
        return any(not (each.done or each.departs) for each in self._fleet.workers if each is not machine)

    def _set_alarm(self, machine: Machine, ns: int) -> None:
        ringing, machine.alarm_ns = machine.alarm_ns > 0, ns
        if ns and not ringing:
            self._world.after(ns, self._ring, machine)

    def _ring(self, machine: Machine) -> None:
        if not machine.alarm_ns:
            return
        engine, view = machine.engine, self.checker.installed
        if engine is not None and view is not None and machine.runs:
            raise_alarm(engine, view.view_id, machine.engine_loop)
        self._world.after(machine.alarm_ns, self._ring, machine)

    def _heal(self) -> None:
        world = self._world
        self._armed.clear()
        if self._fleet.database is not None:
            self._fleet.database.heal()
        self._fleet.meddling = ""
        world.network.repair()
        world.network.set_conditions(self.settings.conditions)
        for machine in self._fleet.machines.values():
            self._resume(machine, machine.host.lives)
            machine.host.slow_ns = 0
            machine.host.set_drift(0)
            machine.disturbances += 1
            machine.lies_to.clear()
            machine.alarm_ns = 0
            machine.forges = ""
            machine.mend_disk()
            if self._fleet.hosts is not None:
                self._fleet.hosts.mend(machine.name)
            if self._fleet.lanes is not None:
                self._fleet.lanes.mend(machine.name)
            machine.start()
            machine.commits_at_heal = machine.commits
        world.after(round(self.settings.recovery * 1e9), self._look_for_progress, self._events_left)

    # -- what is looked at ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        """At what the endpoints hold, now and then; and at the real clock, for who waits."""
        if self._progress is not None and _real_time() - self._told_at > _TELL_S:
            self._told_at = _real_time()
            steps, views = len(self.checker.commits), len(self.checker.views)
            self._progress(f"seed {self.seed}: {self.now:.1f} s simulated, {steps} steps committed, {views} views")
        for name, machine in self._fleet.machines.items():
            endpoint = machine.endpoint
            if endpoint is None:
                continue
            if self.settings.nats:
                self._look_at_ways(machine)
            if len(endpoint.links) > len(self._fleet.machines):
                self.checker.break_("memory", f"{name} has {len(endpoint.links)} links", node=name)
            for link in endpoint.links.values():
                held = link.snapshot().credit_held
                if held > endpoint.config.credit_bytes:
                    self.checker.break_("memory", f"{name} holds {held} bytes for {link.node}", node=name)
        self._world.after(_LOOK_NS, self._look)

    def _look_at_ways(self, machine: Machine) -> None:
        """At the ways by which a worker reaches others."""
        workers, nats = list(self._fleet.machines), self.settings.nats
        links = [] if machine.endpoint is None else list(machine.endpoint.links.values())
        for link in links:
            way = link.proved_address
            both = scenario.is_worker(machine.name) and scenario.is_worker(link.node)
            if link.state is not LinkState.UP or way is None or not both:
                continue
            one, other = (workers.index(name) - 1 for name in (machine.name, link.node))
            if is_detour(way):
                behind = translators(nats)
                if one not in behind and other not in behind:
                    self.checker.break_("ways", f"{machine.name} reaches {link.node} by the relay, and has no need to")
            elif not opens(nats, one, other):
                self.checker.break_("ways", f"{machine.name} reaches {link.node} without the relay, and cannot")

    def _look_for_progress(self, events_left: int) -> None:
        if events_left != self._events_left:  # it was not the last healing, or faults came after it
            return
        for machine in self._fleet.workers:
            if machine.done:
                continue
            if self._stands_by(machine):
                machine.done = self._others_ended_unheard() and not self._at_work()
            elif machine.commits == machine.commits_at_heal:
                if self._others_ended_unheard():
                    machine.done = True
                    continue
                self.checker.break_(
                    "progress",
                    f"{machine.name} has committed nothing within {self.settings.recovery:g} s of the last healing; "
                    + self._world.waiting()
                    + self._fleet.troubles(),
                    node=machine.name,
                )

    def _others_ended_unheard(self) -> bool:
        """Return whether so many ranks have ended well that no quorum is left, and the coordinator may not know.

        A rank that leaves while the coordinator is down waits a second for it and goes. The coordinator then waits for
        a node that never comes, and holds whoever is there: safe, and without progress by design.
        """
        view = self.checker.installed
        lives = sum(machine.host.lives for machine in self._fleet.coordinators)
        if view is None or lives < 2:
            return False
        left = [machine.name for machine in self._fleet.workers if not machine.done and machine.name in view.nodes]
        return 2 * len(left) <= len(view.nodes)

    def _at_work(self) -> list[str]:
        """Return the ranks of the installed view that have not ended well."""
        view = self.checker.installed
        ranks = () if view is None else view.nodes[: view.workers]
        return [machine.name for machine in self._fleet.workers if not machine.done and machine.name in ranks]

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
        return all(machine.done for machine in self._fleet.workers)

    # -- the end -------------------------------------------------------------------------------------------------

    def _outcome(self, world: World) -> Outcome:
        injected = dict(self._injected)
        for kind, count in world.network.injected.items():
            if kind != "too_long":  # nobody's doing: links look for the largest size that passes
                injected[f"datagram_{kind}"] = count
        if self._fleet.database is not None:
            injected |= self._fleet.database.injected
        if self._fleet.hosts is not None:
            injected |= self._fleet.hosts.injected
        if expired := sum(nat.expired for nat in dict.fromkeys(self._fleet.nats.values())):
            injected["mapping_expired"] = expired
        injected |= {f"meddled_{what}": count for what, count in self._fleet.meddled.items()}
        for machine in self._fleet.machines.values():
            for what, count in machine.forgeries.items():
                injected[f"forged_{what}"] = injected.get(f"forged_{what}", 0) + count
            for kind, count in machine.disk.injected.items():
                if count and kind not in (DiskFailure.POWER_LOSS, DiskFailure.KILL):  # every end of a process is one
                    injected[kind] = injected.get(kind, 0) + count
        return Outcome(
            seed=self.seed,
            error=self._verdict(),
            injected=dict(sorted(injected.items())),
            committed=len(self.checker.commits),
            aborted=self._fleet.aborted,
            views=len(self.checker.views),
            virtual_s=world.elapsed_ns / 1e9,
            wall_s=0.0,
            digest=world.digest,
            events=world.events,
            results=tuple(machine.result for machine in self._fleet.workers),
        )


def _with_wall(outcome: Outcome, wall_s: float) -> Outcome:
    return replace(outcome, wall_s=wall_s)


def _positional(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds for parameter in inspect.signature(function).parameters.values())
