"""The supervisor: one coordinator and N workers on this machine, started again when they die, and never left behind.

States of one worker:

    waiting --start--> running --exit 0--> done
       ^                  |
       +---- backoff -----+  died (signal, or other exit status), at most `max_restarts` times within
                             `restart_window`, and only if a restart can help (`quicoll.launch.restarts`); otherwise
                             the run has failed

    done --asked for, after it was told to leave--> running

The number of workers follows what the job is asked for (`quicoll scale`, by way of the coordinator's events): where
more ranks are wanted, more workers are started, those first that were told to leave before; who is told to leave ends
by itself, and is done whatever its exit status. There is a certificate for `most` of them.

The coordinator is started again in the same way, on the port that it reported first, because the members know it by
that address; its journal is what it continues from.

What a worker gets: QUICOLL_COORDINATOR, QUICOLL_JOB, QUICOLL_NODE (worker-0 ...), QUICOLL_CERTS, QUICOLL_WORLD_SIZE,
QUICOLL_LISTEN, QUICOLL_EVENTS (always: the supervisor itself reads the coordinator's), QUICOLL_RESTARTS (how often this
worker was started before), torchrun's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, and OMP_NUM_THREADS=1 unless
set, as torchrun does, because workers that each take all cores slow one another down. The RANK is only where a worker
begins: views decide the rank.

The end: the workers' processes get SIGTERM, and as long as `grace` to end; then all that is left of their groups gets
SIGKILL. A Ctrl-C becomes a SIGTERM too, as with mpirun: it was meant for the run, at whose terminal it was typed,
while each worker has a session of its own; and of SIGINT each worker would die with a traceback. Only the processes
are asked, not what they have started, as systemd does with KillMode=mixed: a program that ends in order, as
`quicoll.train.Worker` does, may need its own children for that. Then the coordinator, which has the last decisions,
gets the same. No child outlives this: each has a process group of its own, ended in `finally`; if this process is
killed with SIGKILL, `quicoll.launch.reaper` ends the groups, and the next run removes the temporary directory
(`quicoll.rendezvous.scratch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quicoll.checks import MAX_MEMBERS, MAX_SECONDS, seconds
from quicoll.config import check_variables
from quicoll.errors import LocalError
from quicoll.launch import reaper
from quicoll.launch.child import Child, describe
from quicoll.launch.following import CoordinatorEvents, WorkerEvents
from quicoll.launch.narration import Narrator
from quicoll.launch.restarts import Death, RestartBudget, hopeless
from quicoll.launch.running import RunningJob, announce
from quicoll.membership.operators import OPERATOR, READER
from quicoll.observability.recording import record_flight
from quicoll.rendezvous.scratch import scratch_directory
from quicoll_transport.errors import TransportError
from quicoll_transport.net.addresses import format_address, parse_address
from quicoll_transport.security.authority import create_authority, issue
from quicoll_transport.security.credentials import AUTHORITY_KEY_FILE, Credentials, node_files
from quicoll_transport.security.identity import COORDINATOR, WORKER

if TYPE_CHECKING:
    from quicoll.launch.forked import ForkedProgram
    from quicoll.observability.flight import FlightRecorder

__all__ = ["RunExit", "Supervisor"]

_SUPERVISOR = "supervisor"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - for a coordinator that listens on every address
_CERTS_DAYS = 30
"""Longer than any run with throw-away certificates should last."""

_POLL_S = 0.02
_FOLLOW_S = 0.2
"""Seconds between two looks at the coordinator's events."""
_START_S = 30.0
"""Seconds that a coordinator may take from its start to its report of the address."""
_STAND_BY_S = 999_999
"""Seconds that a spare may wait for its first view: as long as there are settings for."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunExit:
    """How a run ended.

    Attributes:
        exit_status: 0 when every worker was done, 1 when one kept dying, 128 + number of the signal that ended it.
        reason: One sentence, "" for success.
        restarts: How often each node was started again, by node.
        joined: Whether a worker has joined the job, or has tried to.
    """

    exit_status: int
    reason: str
    restarts: Mapping[str, int]
    joined: bool = True


class _GivenUp(Exception):
    """A node died too often; ends the run from within the task that keeps it."""


class Supervisor:
    """Runs a command as N workers with a coordinator; used once."""

    def __init__(
        self,
        command: Sequence[str] | ForkedProgram,
        *,
        workers: int,
        job: str = "local",
        certs: Path | None = None,
        events: Path | None = None,
        qlog: Path | None = None,
        flight: Path | None = None,
        journal: Path | None = None,
        listen: str = "127.0.0.1:0",
        seed: int | None = None,
        max_restarts: int = 3,
        restart_window: float = 600.0,
        backoff: float = 0.5,
        grace: float = 10.0,
        lost_after: float | None = None,
        spares: int = 0,
        most: int | None = None,
        coordinator_options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        output: Callable[[str, str], None] | None = None,
        narrate: bool = False,
        coordinator: Sequence[str] | None = None,
    ) -> None:
        """Say what is to be run; `run` does it.

        Args:
            command: What each worker runs, for instance [sys.executable, "train.py"]; or a function of this process,
                which is forked.
            workers: How many.
            job: The job's name.
            certs: Directory with the nodes' certificates; None makes a throw-away authority in a temporary directory
                (mode 0700, gone afterwards).
            events: Directory for the events files; None takes the temporary one.
            qlog: Directory for a qlog trace of each connection of every process; None writes none.
            flight: Directory for what each process did last, written when something fails; None keeps nothing.
            journal: The coordinator's; None takes a temporary one, and the job begins anew. That one survives the
                coordinator's process, which may be started again, and not the machine, with which the run ends.
            listen: The coordinator's address; port 0 lets it pick one.
            seed: The job's; None takes the journal's or a drawn one, which the coordinator says.
            max_restarts: How often each node is started again within `restart_window`; not after a failure that no
                restart mends (`quicoll.launch.restarts`).
            restart_window: Seconds for which a restart counts.
            backoff: Seconds before the first restart, doubled for each further one in the window, up to 10.
            grace: Seconds between the polite signal and SIGKILL.
            lost_after: Seconds of silence after which members take a peer for lost; None leaves the default.
            spares: How many more workers stand by: the first view has `workers` ranks.
            most: How many workers there may be, spares included, once more are asked for; None: those that are there.
            coordinator_options: More options of `quicoll coordinator`.
            environment: For the workers, on top of this process's.
            output: Called with (node, line) for every line that a child writes; one that raises ends the run.
            narrate: Whether aborted steps, views after the first, and states that came back are lines of output too.
            coordinator: Command to run instead of our coordinator.
        Raises:
            LocalError: A setting makes no sense.
        """
        if workers < 1:
            raise LocalError(f"a run has 1 worker or more, not {workers}")
        if workers + spares > MAX_MEMBERS:
            raise LocalError(f"a run has {MAX_MEMBERS} workers and spares at most, not {workers + spares}")
        if spares < 0:
            raise LocalError(f"spares is 0 or more, not {spares}")
        if most is not None and most < workers + spares:
            raise LocalError(f"{workers} workers and {spares} spares are more than {most}")
        if max_restarts < 0:
            raise LocalError(f"max_restarts is 0 or more, not {max_restarts}")
        for name, given in (("backoff", backoff), ("grace", grace)):
            if not 0 <= given < MAX_SECONDS:
                raise LocalError(f"{name} is from 0 to a million seconds, not {given}")
        seconds(restart_window, "restart_window")
        check_variables({**os.environ, **(environment or {})})
        if isinstance(command, Sequence) and not command:
            raise LocalError("no command to run")
        if lost_after is not None:
            seconds(lost_after, "lost_after")
        if certs is not None and not certs.is_dir():
            raise LocalError(f"there is no directory of certificates at {certs}")
        self._command = list(command) if isinstance(command, Sequence) else command
        words = list(command) if isinstance(command, Sequence) else []
        # For people: what stands behind Python, or whatever else is run.
        self._script = next((word for word in words if word not in (sys.executable, "-m")), "")
        self._job = job
        self._certs = certs
        self._events = events
        self._qlog = qlog
        self._flight_dir = flight
        self._flight: FlightRecorder | None = None
        self._journal = journal
        self._listen = listen
        self._seed = seed
        self._restart_window = restart_window
        self._grace = grace
        self._lost_after = lost_after
        self._environment = dict(environment or {})
        self._output = output or _print_line
        self._narrator = Narrator() if narrate else None
        self._coordinator_command = list(coordinator) if coordinator is not None else None

        def child(node: str) -> Child:
            budget = RestartBudget(max_restarts, window=restart_window, backoff=backoff)
            return Child(node, budget, say=self._say, watch=self._watch)

        self._child = child
        self._coordinator = child(COORDINATOR)
        self._workers = [child(_worker(number)) for number in range(workers + spares)]
        self._world_size = workers
        self._wanted = workers
        self._spares = spares
        self._most = workers + spares if most is None else most
        self._coordinator_options = list(coordinator_options)
        self._told: dict[str, WorkerEvents] = {}
        self._joined = False
        self._address: str | None = None
        self._ended_by: signal.Signals | None = None
        self._outcome: asyncio.Future[str]
        self._watcher: asyncio.subprocess.Process | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the workers' nodes, in the order of their first ranks."""
        return tuple(child.node for child in self._workers)

    def pid(self, node: str) -> int | None:
        """Return the id of a node's present process; None while it has none.

        Args:
            node: "coordinator", or one of `nodes`.
        Raises:
            LocalError: There is no such node.
        """
        for child in (self._coordinator, *self._workers):
            if child.node == node:
                return child.pid
        raise LocalError(f"no node is called {node!r}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the run: SIGTERM to the workers. A second call kills them without grace.

        Args:
            number: The signal that the run's exit status is made of.
        """
        if self._ended_by is not None:
            for child in self._workers:
                child.signal_all(signal.SIGKILL)
            return
        self._ended_by = number
        self._decide("")

    async def run(self) -> RunExit:
        """Start everything, wait until all workers are done, end everything.

        SIGINT and SIGTERM to this process end it, as `stop` does.

        Returns:
            How it ended.
        Raises:
            LocalError: The run cannot begin: no such program, the port is taken, the certificates do not fit.
        """
        self._outcome = asyncio.get_running_loop().create_future()
        with scratch_directory() as temporary, self._signals():
            certs, events, journal = self._prepare(temporary)
            async with self._reaper():
                return await self._run(certs, events, journal, temporary)

    def _prepare(self, temporary: Path) -> tuple[Path, Path, Path]:
        """Where certificates, events and journal are; what the caller did not name is made in `temporary`."""
        certs = self._checked(self._certs) if self._certs is not None else self._make_certs(temporary / "certs")
        events = self._events.resolve() if self._events is not None else temporary / "events"
        journal = self._journal.resolve() if self._journal is not None else temporary / "journal.sqlite"
        try:
            events.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LocalError(f"cannot make the directory for events {events}: {error.strerror}") from error
        return certs, events, journal

    async def _run(self, certs: Path, events: Path, journal: Path, temporary: Path) -> RunExit:
        shared = {
            "QUICOLL_JOB": self._job,
            "QUICOLL_CERTS": str(certs),
            "QUICOLL_WORLD_SIZE": str(self._world_size),
            "QUICOLL_EVENTS": str(events),
        }
        if self._qlog is not None:
            shared["QUICOLL_QLOG"] = str(self._qlog.resolve())
        if self._flight_dir is not None:
            shared["QUICOLL_FLIGHT_DIR"] = str(self._flight_dir.resolve())
            self._flight = record_flight(self._flight_dir, job=self._job, node=_SUPERVISOR, role=_SUPERVISOR)
        if self._seed is not None:
            shared["QUICOLL_SEED"] = str(self._seed)
        if self._lost_after is not None:
            shared["QUICOLL_LOST_AFTER"] = str(self._lost_after)
        report = events / f"{COORDINATOR}.jsonl"
        seen = report.stat().st_size if report.exists() else 0
        tasks = [asyncio.create_task(self._guard(self._keep_coordinator(shared, journal)))]
        try:
            self._address = await self._first_address(report, seen)
            if self._address is not None and not self._outcome.done():
                # The workers are on this machine too: where the coordinator is reached, they can listen as well.
                host, port = parse_address(self._address)
                host = _LOOPBACK.get(host, host)
                shared["QUICOLL_COORDINATOR"] = format_address((host, port))
                shared["QUICOLL_LISTEN"] = format_address((host, 0))
                run = RunningJob(
                    pid=os.getpid(),
                    job=self._job,
                    coordinator=shared["QUICOLL_COORDINATOR"],
                    certs=certs,
                    script=self._script,
                    started=time.time(),
                )
                announce(temporary, run)
                if self._narrator is not None:
                    self._say(COORDINATOR, f"to look at this run: quicoll top --run {run.pid}")

                def keep(child: Child) -> None:
                    rank = self._workers.index(child)
                    told = self._told.setdefault(child.node, WorkerEvents(events / f"{child.node}.jsonl"))
                    tasks.append(asyncio.create_task(self._guard(self._keep_worker(rank, child, shared, told))))

                for child in self._workers:
                    keep(child)
                tasks.append(asyncio.create_task(self._guard(self._follow(report, certs, keep))))
            reason = await self._outcome
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end(self._workers)
            self._narrate()
            await self._end([self._coordinator])
            if self._flight is not None:
                self._flight.close()
        restarts = {child.node: child.restarts for child in (self._coordinator, *self._workers)}
        if self._ended_by is not None:
            return RunExit(
                exit_status=128 + self._ended_by, reason=f"ended by {self._ended_by.name}", restarts=restarts
            )
        return RunExit(exit_status=1 if reason else 0, reason=reason, restarts=restarts, joined=self._joined)

    async def _guard(self, keeping: Coroutine[None, None, None]) -> None:
        """Let the first failure decide the run."""
        try:
            await keeping
        except _GivenUp as error:
            self._decide(str(error))
        except Exception as error:
            if not self._outcome.done():
                self._outcome.set_exception(error)

    def _decide(self, reason: str) -> None:
        if not self._outcome.done():
            self._outcome.set_result(reason)

    async def _first_address(self, report: Path, seen: int) -> str | None:
        """Wait for the coordinator's report of where it listens, after the `seen` bytes of earlier runs.

        None where the run is over before it comes.
        """
        deadline = asyncio.get_running_loop().time() + _START_S
        while (address := _listening(report, seen)) is None:
            if self._outcome.done():
                return None
            if asyncio.get_running_loop().time() > deadline:
                raise LocalError(f"the coordinator reported no address within {_START_S:g} s")
            await asyncio.sleep(_POLL_S)
        return address

    async def _keep_coordinator(self, shared: Mapping[str, str], journal: Path) -> None:
        child = self._coordinator
        while True:
            argv = self._coordinator_argv(journal, self._address or self._listen)
            status = await child.run(argv, shared)
            self._ended(child, status)
            if self._address is None:
                detail = child.last_line.removeprefix("quicoll: ") or describe(status)
                raise LocalError(f"the coordinator could not start on {self._listen}: {detail}")
            await self._before_restart(child, status)

    async def _follow(self, report: Path, certs: Path, keep: Callable[[Child], None]) -> None:
        """Start workers as they are asked for, note who is told to leave, narrate: by events from now on.

        Args:
            report: The file of events.
            certs: Directory with the nodes' certificates.
            keep: Starts a worker, and again whenever it dies.
        """
        coordinator = CoordinatorEvents(report)
        while True:
            await asyncio.sleep(_FOLLOW_S)
            self._narrate()
            for event in coordinator.read():
                self._joined |= event.get("kind") == "node_joined"
                if event.get("kind") == "node_dismissed":
                    for child in self._workers:
                        if child.node == event["peer"]:
                            child.dismissed = True
                            self._say(child.node, "is told to leave the job")
                elif event.get("kind") == "scale_asked":
                    self._scale(int(event["world_size"]), event["leave"], certs, keep)

    def _narrate(self) -> None:
        """Say what workers have told since the last time."""
        told = [event for events in self._told.values() for event in events.read()]
        self._joined |= any(events.heard for events in self._told.values())
        if self._narrator is not None:
            for event in sorted(told, key=lambda event: float(event["t"])):
                if line := self._narrator.line(event):
                    self._say(COORDINATOR, line)

    def _scale(self, wanted: int, leave: Sequence[str], certs: Path, keep: Callable[[Child], None]) -> None:
        """Start as many workers as the job lacks to have `wanted` ranks, and the spares."""
        self._wanted = wanted
        staying = [child for child in self._workers if not (child.done or child.dismissed or child.node in leave)]
        lacking = wanted + self._spares - len(staying)
        back = [child for child in self._workers if child.done and child.dismissed and child.node not in leave]
        for child in back[: max(lacking, 0)]:
            child.done = child.dismissed = False
            lacking -= 1
            keep(child)
        while lacking > 0:
            node = _worker(len(self._workers))
            if not all(path.is_file() for path in node_files(certs, role=WORKER, node=node)):
                self._say(COORDINATOR, f"{lacking} workers more are wanted, but there is no certificate for {node}")
                return
            child = self._child(node)
            self._workers.append(child)
            lacking -= 1
            keep(child)

    async def _keep_worker(self, rank: int, child: Child, shared: Mapping[str, str], told: WorkerEvents) -> None:
        world = str(self._wanted)
        stands_by = self._spares or rank >= self._world_size or self._wanted != self._world_size
        fixed = {
            **({"QUICOLL_JOIN_TIMEOUT": str(_STAND_BY_S)} if stands_by else {}),
            **self._environment,
            **shared,
            "QUICOLL_NODE": child.node,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
        }
        before = None
        while (status := await child.run(self._command, {**fixed, "QUICOLL_RESTARTS": str(child.restarts)})) != 0:
            self._ended(child, status)
            if not child.dismissed:
                told.look()
                death = Death(status=status, last_line=child.last_line, committed=told.committed)
                if why := hopeless(death, before):
                    raise _GivenUp(f"{child.node} died with {describe(status)}; giving up: {why}{_last_line(child)}")
                before = death
                await self._before_restart(child, status)
                told.begin()
            if child.dismissed:  # which may be heard of a moment after its end
                self._say(child.node, f"ended with {describe(status)} and is not started again")
                break
        child.done = True
        if all(worker.done for worker in self._workers):
            self._decide("")

    def _ended(self, child: Child, status: int) -> None:
        """Keep how a process ended: it may have had no time to write down anything itself."""
        if self._flight is not None:
            self._flight.process_ended(child.node, str(child.last_pid), status, describe(status))

    async def _before_restart(self, child: Child, status: int) -> None:
        wait = child.budget.died(asyncio.get_running_loop().time())
        if wait is None:
            times = child.budget.recent
            how = f"{times} times within {self._restart_window:g} s, the last time " if times > 1 else ""
            raise _GivenUp(f"{child.node} died {how}with {describe(status)}; giving up{_last_line(child)}")
        child.restarts += 1
        self._say(child.node, f"died with {describe(status)}; start {child.restarts + 1} in {wait:g} s")
        await asyncio.sleep(wait)

    def _say(self, node: str, line: str) -> None:
        """Pass a line on. Where that fails (`quicoll run ... | head`), the run is over for a reason of its own: if the
        pipe were left unread, the worker would wait for it for ever; if it were closed, the worker would be blamed."""
        try:
            self._output(node, line)
        except Exception as error:
            self._decide(f"what {node} wrote cannot be passed on: {type(error).__name__}: {error}")

    async def _end(self, children: Sequence[Child]) -> None:
        """Polite signal to the process, grace, SIGKILL to the whole process group, of each."""
        alive = [child for child in children if child.process is not None]
        for child in alive:
            child.ask(signal.SIGTERM)
        waits = [asyncio.create_task(child.process.wait()) for child in alive if child.process is not None]
        if waits:
            await asyncio.wait(waits, timeout=self._grace)
        for child in alive:
            child.signal_all(signal.SIGKILL)
        await asyncio.gather(*waits)
        for child in alive:
            await child.bury()

    def _coordinator_argv(self, journal: Path, listen: str) -> list[str]:
        if self._coordinator_command is not None:
            return [*self._coordinator_command, "--listen", listen]
        argv = [sys.executable, "-m", "quicoll.cli.main", "coordinator", "--listen", listen, "--job", self._job]
        argv += ["--journal", str(journal), "--world-size", str(self._world_size), *self._coordinator_options]
        if self._journal is None:
            argv.append("--no-fsync")  # it goes with this run: after the machine has stopped nobody reads it
        return argv if self._lost_after is None else [*argv, "--lost-after", str(self._lost_after)]

    def _checked(self, certs: Path) -> Path:
        """Every node's files are there and can be used: a worker without them would only die again and again."""
        nodes = [(COORDINATOR, COORDINATOR), *((WORKER, child.node) for child in self._workers)]
        for role, node in nodes:
            for path in node_files(certs, role=role, node=node):
                if not path.is_file():
                    raise LocalError(f"{node} has no {path}: quicoll certs issue {certs} --role {role} --node {node}")
            try:
                job = Credentials.from_directory(certs, role=role, node=node).identity.job
            except TransportError as error:
                raise LocalError(str(error)) from error
            if job != self._job:
                raise LocalError(f"{node_files(certs, role=role, node=node)[0]}: is for job {job!r}, not {self._job!r}")
        return certs.resolve()

    def _make_certs(self, directory: Path) -> Path:
        """A throw-away authority and the nodes' certificates; the authority's key is gone before anything starts."""
        create_authority(directory, job=self._job, days=_CERTS_DAYS)
        issue(directory, role=COORDINATOR, node=COORDINATOR, days=_CERTS_DAYS)
        issue(directory, role=OPERATOR, node=OPERATOR, days=_CERTS_DAYS)
        issue(directory, role=READER, node=READER, days=_CERTS_DAYS)
        for number in range(self._most):
            issue(directory, role=WORKER, node=_worker(number), days=_CERTS_DAYS)
        (directory / AUTHORITY_KEY_FILE).unlink()
        return directory

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        try:
            for number in _SIGNALS:
                loop.add_signal_handler(number, self.stop, number)
        except (RuntimeError, ValueError):
            # Not the main thread: signals are handled elsewhere, and `stop` is there to be called.
            yield
            return
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    @contextlib.asynccontextmanager
    async def _reaper(self) -> AsyncIterator[None]:
        self._watcher = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", reaper.__file__, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            yield
        finally:
            if self._watcher.stdin is not None:
                self._watcher.stdin.close()
            await self._watcher.wait()

    def _watch(self, line: str) -> None:
        if self._watcher is not None and self._watcher.stdin is not None and not self._watcher.stdin.is_closing():
            self._watcher.stdin.write(f"{line}\n".encode())


def _last_line(child: Child) -> str:
    return f"; its last line: {child.last_line}" if child.last_line else ""


def _worker(number: int) -> str:
    """Return the name of a worker's node."""
    return f"worker-{number}"


def _listening(report: Path, offset: int) -> str | None:
    """The address in the newest "listening" event that was written after `offset` bytes."""
    try:
        with open(report, "rb") as file:
            file.seek(offset)
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is still being written
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        event = json.loads(line)
        if event.get("kind") == "listening":
            return str(event["address"])
    return None


def _print_line(node: str, line: str) -> None:
    sys.stdout.write(f"[{node}] {line}\n")
    sys.stdout.flush()
