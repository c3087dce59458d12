"""A training whose coordinator is lost again and again: `python tests/takeovers.py --journal postgresql --times 50`.

Workers train as in the chaos run (chaos.py), with coordinators that are real processes. Events, drawn from --seed:

    kill           SIGKILL for the coordinator that leads; it is started again at once
    stop           SIGSTOP for it, for longer than its lease: it wakes up deposed, and stands by again
    cut            its network is gone for longer than its lease, to the workers and to the database; likewise
    fast clock     one whose clocks go twice as fast, and an hour later, has to lead
    slow clock     one whose clocks go at a tenth of the pace, and an hour earlier, has to lead
    fast restart   the database is shut down in order, and started again
    hard restart   it is shut down like in a crash, and started again

With a journal in SQLite there is one coordinator, and only the first of them.

After each event the journal is read: steps without a gap, each of them once, the tokens of their leaders never going
back. Every step that a worker applies is in it, is applied once, and gives the state of the same training in plain
numpy. At the end all workers stop after the same step, which is the journal's last. No coordinator ends by itself.

Printed as a table at the end, of a run that failed too, and written with --json: for each kind, the seconds without a
committed step that an event has brought, from the last one before it to the first one after it. For cuts this has to be
run by root (namespaces, and a server that refuses to be root); else a line says that there are none.

Workers, coordinators, the database and the namespaces are this run's own, and end with it, however it ends.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

# A script: the path comes before the imports that need it (E402).
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE / "helpers"))

import chaos
from chaos import JOB, LOST_AFTER, MORE_STEPS, SOURCES, ChaosError, Commits, Net, Processes
from ports import named_port

from quicoll.membership.coordinator.history import Committed
from quicoll_transport.security.identity import COORDINATOR

if TYPE_CHECKING:
    from postgresql_server import Server

KINDS = ("kill", "stop", "cut", "fast clock", "slow clock", "fast restart", "hard restart")
ROLES = ("a", "b", "c")
READY_S = 60.0  # until all coordinators listen and one leads
PORT = 4433
HOUR_S = 3600.0
KNOWS_THE_DATABASE = ("\nstands by: ", "\nleads job ")  # a coordinator's own words
DOES_NOT = ("\nstands by again: ", "journal postgresql ")  # likewise: it has lost the lead, or the database


class Cluster(Processes):
    """Workers in this namespace; coordinators, where there can be cuts, in one of their own each."""

    def __init__(self, directory: Path, net: Net, workers: int, coordinators: int, lease: float) -> None:
        super().__init__(directory, net, workers)
        self.directory, self.net, self.lease = directory, net, lease
        self.url = ""  # of the database; "" for a journal in SQLite
        self.coordinators = [COORDINATOR] if coordinators == 1 else [f"{COORDINATOR}-{each}" for each in ROLES]
        self.coordinators = self.coordinators[:coordinators]
        ports = [PORT] * coordinators if net.spaces else [named_port() for _ in range(coordinators)]
        self.addresses = {
            node: f"{net.listen(index).rpartition(':')[0]}:{ports[index]}"
            for index, node in enumerate(self.coordinators)
        }
        self.clocks: dict[str, str] = {}  # of coordinators whose clocks are wrong
        self._starts = dict.fromkeys(self.coordinators, 0)

    def command(self, node: str) -> tuple[list[str], dict[str, str]]:
        if node in self.nodes:
            command, environment = super().command(node)
            listen = "10.77.0.1:0" if self.net.spaces else "127.0.0.1:0"
            addresses = {"QUICOLL_COORDINATOR": ",".join(self.addresses.values()), "QUICOLL_LISTEN": listen}
            return command[len(self.net.command(0)) :], environment | addresses
        certs, journal = str(self.directory / "certs"), self.url or str(self.directory / "journal.db")
        command = [*self.net.command(self.coordinators.index(node)), sys.executable, "-m", "quicoll.cli.main"]
        command += ["coordinator", "--job", JOB, "--certs", certs, "--world-size", str(len(self.nodes))]
        command += ["--journal", journal, "--lease", str(self.lease), "--listen", self.addresses[node]]
        command += ["--lost-after", str(LOST_AFTER)]
        if node not in self.clocks:
            return command, {}
        path = ":".join([str(HERE / "helpers" / "wrong_clock"), *SOURCES])
        return command, {"PYTHONPATH": path, "QUICOLL_TEST_CLOCK": self.clocks[node]}

    def guard(self, server: Server) -> None:
        """Have the server ended with this process, however that ends."""
        self._tell_reaper(f"+{server.pid}")

    def unguard(self, server: Server) -> None:
        """Take that back: the server is about to be ended in order."""
        self._tell_reaper(f"-{server.pid}")

    def start(self, node: str) -> None:
        if node in self._starts:
            self._starts[node] += 1
        super().start(node)

    def at_work(self, node: str) -> bool:
        """Return whether the process that was started last listens, and knows the database.

        One that is started needs seconds for that, one that was deposed a moment: a second loss meanwhile would find
        nobody who could take over.
        """
        log = self.directory / f"{node}.log"
        said = log.read_text() if log.exists() else ""
        _, listening, since = said.rpartition("listening on")
        if not listening or said.count("listening on") < self._starts[node]:
            return False
        return not self.url or max(map(since.rfind, KNOWS_THE_DATABASE)) > max(map(since.rfind, DOES_NOT))


class Applied(Commits):
    """Of each worker also all steps that it has applied itself; others it was given with a state."""

    def __init__(self, directory: Path, nodes: list[str]) -> None:
        super().__init__(directory, nodes)
        self.steps: dict[str, list[int]] = {node: [] for node in nodes}

    def take(self, node: str, words: list[str]) -> None:
        super().take(node, words)
        if words[0] == "commit":
            self.steps[node].append(int(words[1]))


class Decisions:
    """The journal's commits, read from time to time. Raises ChaosError for what may never be in it."""

    def __init__(self, directory: Path, server: Server | None) -> None:
        self._directory = directory
        self._server = server
        self._number = self._token = 0  # of the last record that was read
        self.last = 0  # step
        self.leaders: dict[int, None] = {}  # tokens by which something was committed

    def read(self) -> None:
        for step, token in self._commits():
            if step != self.last + 1:
                raise ChaosError(f"the journal has step {step} after step {self.last}")
            if token < self._token:
                raise ChaosError(f"step {step} was written by token {token}, after one by {self._token}")
            self.last, self._token = step, token
            self.leaders[token] = None

    def _commits(self) -> Iterator[tuple[int, int]]:
        if self._server is None:
            yield from self._of_file()
            return
        from quicoll.membership.postgresql.records import row_record

        rows = self._server.execute(
            "SELECT number, kind, body, token FROM quicoll.records WHERE job = $1::text AND number > $2::bigint "
            "ORDER BY number",
            JOB,
            self._number,
        )
        for number, kind, body, token in rows:
            if number != self._number + 1:
                raise ChaosError(f"the journal has record {number} after record {self._number}")
            self._number += 1
            if isinstance(body, bytes) and isinstance(record := row_record(str(kind), body), Committed):
                yield record.step, int(token or 0)

    def _of_file(self) -> Iterator[tuple[int, int]]:
        """From a copy, as the coordinator has the file for itself; it does not run meanwhile."""
        with tempfile.TemporaryDirectory() as copy:
            for path in self._directory.glob("journal.db*"):
                shutil.copy(path, copy)
            database = sqlite3.connect(Path(copy) / "journal.db")
            try:
                rows = database.execute(
                    "SELECT step FROM commits WHERE step > ? ORDER BY step", (self.last,)
                ).fetchall()
            finally:
                database.close()
        yield from ((int(step), 0) for (step,) in rows)


@dataclass
class Event:
    kind: str
    since: float
    until: float = 0.0


@dataclass
class Run(chaos.Run):
    """Of the chaos run it has the waiting; the events are its own."""

    processes: Cluster
    commits: Applied
    server: Server | None = None
    decisions: Decisions = field(init=False)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.decisions = Decisions(self.processes.directory, self.server)

    # -- who leads -----------------------------------------------------------------------------------------------

    @property
    def lease(self) -> float:
        return self.processes.lease

    def holder(self) -> str:
        """Return who has a lease that has not run out; "" where nobody has."""
        if self.server is None:
            return COORDINATOR
        rows = self.server.execute(
            "SELECT holder FROM quicoll.leases WHERE job = $1::text AND until > clock_timestamp()", JOB
        )
        names = {address: node for node, address in self.processes.addresses.items()}
        return names.get(str(rows[0][0]), "") if rows else ""

    def leader(self) -> str:
        """Wait until all coordinators listen and one of them leads; return that one."""
        self.need(READY_S, self._all_ready, "a leader, and all coordinators at work:")
        return self.holder()

    def _all_ready(self) -> bool:
        return all(map(self.processes.at_work, self.processes.coordinators)) and bool(self.holder())

    def led_by_another(self, than: str) -> None:
        self.need(READY_S + 4 * self.lease, lambda: self.holder() not in ("", than), f"another leader than {than}:")

    def _longer_than_lease(self) -> float:
        return self.lease + LOST_AFTER + self.rng.uniform(0.2, 1.0) * self.lease

    # -- events --------------------------------------------------------------------------------------------------

    def all_kinds(self) -> dict[str, Callable[[], None]]:
        if self.server is None:
            return {"kill": self._kill_leader}
        found: dict[str, Callable[[], None]] = {
            "kill": self._kill_leader,
            "stop": self._stop_leader,
            "cut": self._cut_leader,
            "fast clock": lambda: self._wrong_clock(f"{HOUR_S} 2"),
            "slow clock": lambda: self._wrong_clock(f"-{HOUR_S} 0.1"),
            "fast restart": lambda: self._restart_database(signal.SIGINT),
            "hard restart": lambda: self._restart_database(signal.SIGQUIT),
        }
        if not self.net.spaces:
            del found["cut"]
        return found

    def _kill_leader(self) -> None:
        leader = self.leader()
        self.processes.kill(leader)
        if self.server is None:
            self.decisions.read()
        self.processes.start(leader)

    def _stop_leader(self) -> None:
        leader = self.leader()
        self.processes.signal(leader, signal.SIGSTOP)
        try:
            self.wait(self._longer_than_lease())
        finally:
            self.processes.signal(leader, signal.SIGCONT)

    def _cut_leader(self) -> None:
        leader = self.leader()
        index = self.processes.coordinators.index(leader)
        self.net.cut(index)
        try:
            self.wait(self._longer_than_lease())
        finally:
            self.net.mend(index)

    def _wrong_clock(self, clock: str) -> None:
        """One that stands by gets the clock, and is the only one until it leads. Then the others come back."""
        leader = self.leader()
        wrong, *others = [node for node in self.processes.coordinators if node != leader]
        self.processes.kill(wrong)
        self.processes.clocks[wrong] = clock
        self.processes.start(wrong)
        self.leader()
        for node in (leader, *others):
            self.processes.kill(node)
        self.led_by_another(leader)
        for node in (leader, *others):
            self.processes.start(node)
        self.wait(self._longer_than_lease())
        del self.processes.clocks[wrong]
        self.processes.kill(wrong)
        self.processes.start(wrong)

    def _restart_database(self, number: signal.Signals) -> None:
        self.leader()
        if self.server is not None:
            self.processes.unguard(self.server)
            self.server.stop(number)
            self.wait(self.rng.uniform(0.0, 0.3) * self.lease)
            self.server.start()
            self.processes.guard(self.server)

    # -- the run -------------------------------------------------------------------------------------------------

    def hit(self, times: int, say: Callable[[str], None]) -> None:
        """Start all, hit it so many times in each way, and let it come to its end."""
        for node in (*self.processes.coordinators, *self.processes.nodes):
            self.processes.start(node)
        self.need(chaos.START_S, lambda: min(self.commits.newest.values()) > 0, "a first commit of all workers:")
        began = time.monotonic()
        for kind in self._in_turn(times):
            self.leader()
            self.wait(self.rng.uniform(0.1, 0.5))
            event = Event(kind, time.monotonic())
            self.events.append(event)
            say(f"{event.since - began:7.1f} s  step {self.commits.step:5}  {kind}")
            self.all_kinds()[kind]()
            self.progress(chaos.PROGRESS_S, kind)
            self.together(kind)
            event.until = time.monotonic()
            self._compare()
            say(f"{'':28}{self._gap(event):6.2f} s without a commit")
        self.ending = True
        last = self.commits.step + MORE_STEPS
        self.processes.tell_all(f"until {last}")
        self.need(chaos.END_S, lambda: not self.processes.workers_running, "the end of all workers:")
        if self.commits.ended != dict.fromkeys(self.processes.nodes, last):
            raise ChaosError(f"the workers ended after other steps than {last}: {self.commits.ended}")
        for node in self.processes.coordinators:
            self.processes.kill(node)
        self._compare()
        if self.decisions.last != last:
            raise ChaosError(f"the journal ends after step {self.decisions.last}, the workers after {last}")

    def _in_turn(self, times: int) -> Iterator[str]:
        for _ in range(times):
            kinds = [kind for kind in self.all_kinds() if not self.only or kind in self.only]
            self.rng.shuffle(kinds)
            yield from kinds

    def _compare(self) -> None:
        """What was applied is decided. What was decided last is perhaps not applied yet."""
        if self.server is None and not self.ending:
            return  # read where the coordinator is down
        applied = self.commits.step
        self.decisions.read()
        if applied > self.decisions.last:
            raise ChaosError(f"step {applied} was applied; the journal ends with {self.decisions.last}")

    def summary(self) -> dict[str, Any]:
        kinds: dict[str, Any] = {}
        for kind in self.all_kinds():
            gaps = [self._gap(event) for event in self.events if event.kind == kind and event.until]
            if gaps:
                kinds[kind] = {
                    "times": len(gaps),
                    "median_s": round(statistics.median(gaps), 2),
                    "p90_s": round(within(gaps, 0.9), 2),
                    "worst_s": round(max(gaps), 2),
                }
        given = {node: self.commits.newest[node] - len(steps) for node, steps in self.commits.steps.items()}
        return {
            "journal": "sqlite" if self.server is None else "postgresql",
            "coordinators": len(self.processes.coordinators),
            "workers": len(self.processes.nodes),
            "lease_s": self.lease if self.server is not None else None,
            "lost_after_s": LOST_AFTER,
            "events": len(self.events),
            "without_a_commit": kinds,
            "steps_committed": self.decisions.last,
            "commits_compared": self.commits.checked,
            "attempts_given_up": self.commits.aborted,
            "steps_given_with_a_state": sum(given.values()),
            "leaders": len(self.decisions.leaders),
        }

    def _gap(self, event: Event) -> float:
        """Seconds without a commit, at most, from the last one before the event on."""
        before = [at for at in self.commits.first_s.values() if at <= event.since]
        return self.commits.longest_gap(max(before, default=event.since), event.until)


def within(seconds: list[float], share: float) -> float:
    """Return the shortest time within which this share of them is."""
    return sorted(seconds)[math.ceil(share * len(seconds)) - 1]


def table(summary: dict[str, Any]) -> list[str]:
    """Return the lines of what is printed at the end."""
    lines = [f"{'seconds without a commit':26}{'times':>6}{'median':>9}{'p90':>9}{'worst':>9}"]
    for kind, found in summary["without_a_commit"].items():
        times = f"{found['median_s']:9.2f}{found['p90_s']:9.2f}{found['worst_s']:9.2f}"
        lines.append(f"{kind:26}{found['times']:6}{times}")
    return lines


def run(options: argparse.Namespace, seed: int, say: Callable[[str], None], interrupted: list[int]) -> int:
    directory = Path(tempfile.mkdtemp(prefix="quicoll-takeovers-"))
    coordinators = 1 if options.journal == "sqlite" else options.coordinators
    failure = "an error of this program"
    with ExitStack() as stack:
        stack.callback(lambda: shutil.rmtree(directory, ignore_errors=True) if interrupted else None)  # as the last
        net = chaos.network(coordinators)
        cluster = Cluster(directory, net, options.workers, coordinators, options.lease)
        stack.callback(cluster.close)
        server = None
        if options.journal == "postgresql":
            from postgresql_server import Server

            server = stack.enter_context(Server("10.77.0.1/24" if net.spaces else ""))
            cluster.guard(server)
            cluster.url = f"postgresql://quicoll@{'10.77.0.1' if net.spaces else '127.0.0.1'}:{server.port}/postgres"
        commits = Applied(directory, cluster.nodes)
        only = tuple(options.only or ())
        found = Run(cluster, commits, net, random.Random(seed), interrupted, only, server=server)
        try:
            found.hit(options.times, say)
            failure = ""
            if deaths := [death for death in cluster.deaths if COORDINATOR in death]:
                failure = f"a coordinator ended by itself: {deaths[0]}"
        except ChaosError as error:
            failure = str(error)
        except KeyboardInterrupt:
            failure = "interrupted"
            raise
        finally:
            summary = found.summary() | {"seed": seed, "failed": failure}
            say(json.dumps(summary, indent=2))
            if options.json:
                options.json.write_text(json.dumps(summary, indent=2) + "\n")
            for line in (*cluster.deaths, *table(summary)):
                say(line)
    if failure:
        say(f"FAILED: {failure}\nwhat the processes said is in {directory}")
        return 1
    if options.keep:
        say(f"what the processes said is in {directory}")
    else:
        shutil.rmtree(directory)
    say(f"no committed step was lost, none was applied twice; all {options.workers} workers end with the same state")
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--journal", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--times", type=int, default=50, help="of each kind of event")
    parser.add_argument("--only", action="append", choices=KINDS, help="this kind of event; may be given again")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--coordinators", type=int, choices=(2, 3), default=2, help="with PostgreSQL")
    parser.add_argument("--lease", type=float, default=5.0, help="seconds, with PostgreSQL")
    parser.add_argument("--seed", type=int, default=None, help="of the events; drawn, and printed, if not given")
    parser.add_argument("--json", type=Path, default=None, help="file for what was measured")
    parser.add_argument("--keep", action="store_true", help="keep what the processes said, if all went well too")
    parser.add_argument("--no-namespaces", action="store_true", help="stay on the loopback interface, without cuts")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    if options.journal == "postgresql":
        import postgresql_server

        if why := postgresql_server.missing():
            parser.error(why)
        why = "--no-namespaces"
        if not options.no_namespaces:
            # Not in a namespace of users: in that there is nobody but root, which the server refuses to be.
            again = [*arguments, "--seed", str(seed)]
            why = chaos.enter_namespace(__file__, again, user=False)
        if why:
            say(f"no cuts: no network namespaces here ({why})")
            if options.only == ["cut"]:
                return 1
    say(f"seed {seed}, {options.workers} workers, lost_after {LOST_AFTER:g} s, lease {options.lease:g} s")
    try:
        with chaos.interrupts() as interrupted:
            return run(options, seed, say, interrupted)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
