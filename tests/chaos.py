"""A training that is broken in every way, for as long as you like: `python tests/chaos.py --minutes 5`.

A coordinator and workers, each a real process, train together (tests/helpers/chaos_worker.py). One fault after the
other, drawn from --seed, hits them:

    kill         SIGKILL for a worker; it is started again a moment later
    pause        SIGSTOP for a worker, shorter than lost_after
    long pause   longer, so that the others go on without it
    coordinator  SIGKILL for the coordinator; it comes back and reads its journal
    cut          a worker's network is gone for a while
    bad memory   a worker takes other bits for what it received, and no checksum notices
    false vote   a worker votes with another digest than that of its results

Every step that a worker applies is compared with the same training in plain numpy, here, without a network. The run
fails when a state differs (a wrong commit), when a step is applied twice, and when a wait takes longer than its bound.
Who has lied is well again after a moment, and still left out: for twice as long each time, up to what the membership
says, which the bound of that wait follows from.
At its end all workers stop after the same step with the state of the undisturbed training.

For cuts each worker has a network namespace of its own, inside one of this run's; nothing of this machine's network is
touched. Where namespaces cannot be made there are no cuts, and a line says so; all is on the loopback interface then.
With --hosts N the workers are in N namespaces, those of each share memory, and a cut is that of a host. With one a part
of each step goes through memory, and is compared as well; with more so do the long messages of the training itself
between workers of a host.
Everything started here ends with this process, however it ends. A failed run keeps its directory, and names its seed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

# A script, and no test that pytest finds the helpers for: the path comes before the imports that need it (E402).
HELPERS = Path(__file__).parent / "helpers"
sys.path.insert(0, str(HELPERS))

import chaos_worker
from chaos_worker import SHARDS, SIZE, applied, digest, gradient
from ports import named_port

import quicoll
import quicoll_transport
from quicoll.launch import reaper
from quicoll.membership.coordinator.evidence import LONGEST_LEAVE
from quicoll.membership.service import coordinator_config
from quicoll_transport.security.authority import create_authority, issue
from quicoll_transport.security.identity import COORDINATOR, WORKER

JOB, LOST_AFTER = "chaos", 1.5
START_S = 90.0  # until the first commit
PROGRESS_S = 60.0  # without a commit, after any fault
BACK_S = 120.0  # until all workers commit again, where none is left out
LONGEST_LEAVE_S = LONGEST_LEAVE * coordinator_config(4, LOST_AFTER, None).retry_max_ns / 1e9
END_S = 120.0  # until all workers have ended
MORE_STEPS = 20  # from the last one seen to the last one of all
DEATHS = 20  # of processes, by themselves
KINDS = ("kill", "pause", "long pause", "coordinator", "cut", "bad memory", "false vote")
INSIDE = "QUICOLL_TEST_CHAOS_NAMESPACE"
SOURCES = [str(Path(package.__file__ or "").resolve().parent.parent) for package in (quicoll, quicoll_transport)]

Array = np.ndarray[Any, Any]


class ChaosError(Exception):
    """The run failed."""


# ---------------------------------------------------------------------------------------------------------------------
# What is expected


def canonical(leaves: list[Array]) -> Array:
    """The sum in the canonical order: the left part is the largest power of two below the number of leaves."""
    if len(leaves) == 1:
        return leaves[0]
    left = 1
    while 2 * left < len(leaves):
        left *= 2
    return np.asarray(canonical(leaves[:left]) + canonical(leaves[left:]))


class Reference:
    """The training without a network: digests by step."""

    def __init__(self) -> None:
        self._weights = np.zeros(SIZE, np.float32)
        self._digests = [digest(self._weights)]

    def at(self, step: int) -> str:
        while len(self._digests) <= step:
            number = len(self._digests)
            total = canonical([gradient(self._weights, shard, number) for shard in range(SHARDS)])
            self._weights = applied(self._weights, total / np.float32(SHARDS))
            self._digests.append(digest(self._weights))
        return self._digests[step]


class Commits:
    """What the workers have written of themselves. Raises ChaosError for what may never be."""

    def __init__(self, directory: Path, nodes: list[str]) -> None:
        self._files = {node: directory / f"{node}.record" for node in nodes}
        self._read = dict.fromkeys(nodes, 0)
        self._reference = Reference()
        self.newest = dict.fromkeys(nodes, 0)  # the last step of each node
        self.first_s: dict[int, float] = {}  # when each step was first applied by anybody
        self.checked = self.aborted = self.wrong = self.near = self.parcels = 0
        self.lies: Counter[str] = Counter()
        self.ended: dict[str, int] = {}

    @property
    def step(self) -> int:
        return max(self.newest.values())

    def read(self) -> None:
        for node, path in self._files.items():
            if not path.exists():
                continue
            with path.open("rb") as record:
                record.seek(self._read[node])
                data = record.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[node] += len(whole)
            for line in whole.decode().splitlines():
                self.take(node, line.split())

    def take(self, node: str, words: list[str]) -> None:
        """Look at what a worker says."""
        match words:
            case ["commit", step, found, ns]:
                number = int(step)
                self.checked += 1
                if found != self._reference.at(number):
                    self.wrong += 1
                    raise ChaosError(
                        f"WRONG COMMIT: {node} has {found} after step {number}, not {self._reference.at(number)}"
                    )
                if number <= self.newest[node]:
                    raise ChaosError(f"{node} applied step {number} after step {self.newest[node]}")
                self.newest[node] = number
                at = int(ns) / 1e9
                self.first_s[number] = min(at, self.first_s.get(number, at))
            case ["near", step, right]:
                self.near += 1
                if right != "1":
                    self.wrong += 1
                    raise ChaosError(f"WRONG: {node} got other values in step {step} through shared memory")
            case ["parcels", count]:
                self.parcels += int(count)
            case ["abort"]:
                self.aborted += 1
            case ["lies", kind, count]:
                self.lies[kind] += int(count)
            case ["end", step, found]:
                if found != self._reference.at(int(step)):
                    self.wrong += 1
                    raise ChaosError(f"{node} ends after step {step} with {found}, not {self._reference.at(int(step))}")
                self.ended[node] = int(step)
            case _:
                raise ChaosError(f"{node} says {' '.join(words)!r}")

    def longest_gap(self, since: float, until: float) -> float:
        """Seconds without a commit by anybody, at most, in this time."""
        times = sorted(at for at in self.first_s.values() if since < at < until)
        marks = [since, *times, until]
        return max(after - before for before, after in pairwise(marks))


# ---------------------------------------------------------------------------------------------------------------------
# Networks


@dataclass(frozen=True)
class Net:
    """Where processes run. spaces: a namespace for each worker, whose line to the others can be taken away. hosts: so
    many are used, by as many workers each as can be; 0: by one each."""

    coordinator: str
    spaces: bool
    workers: int
    hosts: int = 0

    def _space(self, index: int) -> int:
        return index * self.hosts // self.workers if self.hosts else index

    def command(self, index: int) -> list[str]:
        """What goes before the command of a worker."""
        return ["ip", "netns", "exec", f"worker{self._space(index)}"] if self.spaces else []

    def listen(self, index: int) -> str:
        if self.spaces:
            return f"10.77.0.{10 + self._space(index)}:0"
        return f"127.0.0.{1 + self._space(index) if self.hosts else 1}:0"

    def cut(self, index: int) -> None:
        ip(f"link set line{self._space(index)} down")

    def mend(self, index: int) -> None:
        ip(f"link set line{self._space(index)} up")


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)  # noqa: S607 - as in a shell


def network(workers: int, *, hosts: int = 0) -> Net:
    """Namespaces inside this one, if this process is in one of its own; otherwise the loopback interface."""
    if INSIDE not in os.environ:
        return Net(f"127.0.0.1:{named_port()}", spaces=False, workers=workers, hosts=hosts)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)  # noqa: S607 - of this mount namespace alone
    ip("link set lo up")
    ip("link add hub type bridge")
    ip("addr add 10.77.0.1/24 dev hub")
    ip("link set hub up")
    for index in range(workers):
        ip(f"netns add worker{index}")
        ip(f"link add line{index} type veth peer name eth0 netns worker{index}")
        ip(f"link set line{index} master hub up")
        ip(f"-n worker{index} addr add 10.77.0.{10 + index}/24 dev eth0")
        ip(f"-n worker{index} link set lo up")
        ip(f"-n worker{index} link set eth0 up")
    return Net("10.77.0.1:4433", spaces=True, workers=workers, hosts=hosts)


def enter_namespace(script: str, arguments: list[str], *, user: bool = True) -> str:
    """Begin a program again in namespaces of its own; return why that cannot be, if it cannot.

    user: with one of users as well, in which there is nobody but root; without it the caller has to be root.
    """
    if INSIDE in os.environ:
        return ""
    for tool in ("unshare", "ip", "mount"):
        if shutil.which(tool) is None:
            return f"there is no command {tool!r}"
    into = ["unshare", *(("--user", "--map-root-user") if user else ()), "--net", "--mount"]
    trial = (
        "mount -t tmpfs tmpfs /run && ip link add hub type bridge && ip netns add worker0"
        " && ip link add line0 type veth peer name eth0 netns worker0"
    )
    tried = subprocess.run([*into, "sh", "-c", trial], capture_output=True, text=True, check=False)
    if tried.returncode:
        return (tried.stderr.strip().splitlines() or ["unshare failed"])[-1]
    environment = {**os.environ, INSIDE: "1"}
    os.execvpe(into[0], [*into, sys.executable, os.path.abspath(script), *arguments], environment)  # noqa: S606 - the caller


# ---------------------------------------------------------------------------------------------------------------------
# Processes


class Processes:
    """The coordinator and the workers: started, hit, started again, ended. Each has a process group of its own."""

    def __init__(self, directory: Path, net: Net, workers: int) -> None:
        self.nodes = [f"worker-{index}" for index in range(workers)]
        self._directory = directory
        self._net = net
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._words: list[str] = []  # for whoever is started from now on
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        self.deaths: list[str] = []
        certs = directory / "certs"
        create_authority(certs, job=JOB, days=2)
        issue(certs, role=COORDINATOR, node=COORDINATOR, days=2)
        for node in self.nodes:
            issue(certs, role=WORKER, node=node, days=2)

    def command(self, node: str) -> tuple[list[str], dict[str, str]]:
        """Return what starts a process, and what its environment has beyond that of all."""
        certs = str(self._directory / "certs")
        if node == COORDINATOR:
            command = [sys.executable, "-m", "quicoll.cli.main", "coordinator", "--job", JOB, "--certs", certs]
            command += ["--world-size", str(len(self.nodes)), "--journal", str(self._directory / "journal.db")]
            return [*command, "--listen", self._net.coordinator, "--lost-after", str(LOST_AFTER)], {}
        index = self.nodes.index(node)
        record = self._directory / f"{node}.record"
        environment = {"QUICOLL_JOB": JOB, "QUICOLL_NODE": node, "QUICOLL_CERTS": certs}
        environment |= {"QUICOLL_COORDINATOR": self._net.coordinator, "QUICOLL_LISTEN": self._net.listen(index)}
        return [*self._net.command(index), sys.executable, chaos_worker.__file__, str(record)], environment

    def may_end(self, node: str, status: int) -> bool:
        """Return whether a process ends like this in the order of things, and is only started again."""
        return False

    def start(self, node: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QUICOLL_")}
        environment |= {"PYTHONPATH": os.pathsep.join(SOURCES), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        command, more = self.command(node)
        environment |= more
        with (self._directory / f"{node}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, text=True, process_group=0
            )
        self._running[node] = process
        self._tell_reaper(f"+{process.pid}")
        for words in self._words:
            self.tell(node, words)

    def _tell_reaper(self, line: str) -> None:
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(line + "\n")
        self._reaper.stdin.flush()

    def tell(self, node: str, words: str) -> None:
        process = self._running.get(node)
        if node not in self.nodes or process is None or process.stdin is None:
            return
        try:
            process.stdin.write(words + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died; `watch` finds it

    def tell_all(self, words: str) -> None:
        """Also those that are started from now on."""
        self._words.append(words)
        for node in self.nodes:
            self.tell(node, words)

    def signal(self, node: str, number: signal.Signals) -> None:
        if (process := self._running.get(node)) is not None:
            process.send_signal(number)

    def kill(self, node: str) -> None:
        process = self._running.pop(node, None)
        if process is not None:
            process.kill()
            self._gone(process)

    def _gone(self, process: subprocess.Popen[str]) -> None:
        process.wait()
        self._tell_reaper(f"-{process.pid}")
        if process.stdin is not None:
            try:
                process.stdin.close()
            except BrokenPipeError:
                pass

    def watch(self, *, done: bool) -> None:
        """Start again whoever ended by itself. done: workers may end, with status 0."""
        for node, process in list(self._running.items()):
            status = process.poll()
            if status is None:
                continue
            del self._running[node]
            self._gone(process)
            if status == 0 and done and node in self.nodes:
                continue
            if self.may_end(node, status):
                self.start(node)
                continue
            self.deaths.append(f"{node} ended by itself with status {status}")
            if len(self.deaths) > DEATHS:
                raise ChaosError(f"processes end again and again: {self.deaths[-1]}")
            self.start(node)

    @property
    def workers_running(self) -> list[str]:
        return [node for node in self.nodes if node in self._running]

    def close(self) -> None:
        for node in list(self._running):
            self.kill(node)
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        self._reaper.wait()


# ---------------------------------------------------------------------------------------------------------------------
# Faults


@dataclass
class Fault:
    """One fault that was injected, and what became of it."""

    kind: str
    since: float
    until: float = 0.0
    together_s: float | None = None


@dataclass
class Run:
    processes: Processes
    commits: Commits
    net: Net
    rng: random.Random
    interrupted: list[int]
    only: tuple[str, ...] = ()  # kinds; () for all
    faults: list[Fault] = field(default_factory=list)
    ending: bool = False

    def wait(self, seconds: float, ready: Callable[[], bool] = lambda: False) -> bool:
        """Keep all going until `ready`, or for so many seconds; whether it was ready."""
        end = time.monotonic() + seconds
        while True:
            if self.interrupted:
                raise KeyboardInterrupt
            self.processes.watch(done=self.ending)
            self.commits.read()
            if ready():
                return True
            if (left := end - time.monotonic()) <= 0:
                return False
            time.sleep(min(0.02, left))

    def need(self, seconds: float, ready: Callable[[], bool], what: str) -> None:
        if not self.wait(seconds, ready):
            raise ChaosError(f"{what} not within {seconds:g} s; newest steps: {self.commits.newest}")

    def progress(self, seconds: float, after: str) -> None:
        seen = self.commits.step
        self.need(seconds, lambda: self.commits.step > seen + 1, f"a commit after {after}:")

    def together(self, after: str) -> None:
        """All workers commit, as one world or one after the other."""
        seen = self.commits.step
        limit = LONGEST_LEAVE_S + BACK_S
        self.need(limit, lambda: min(self.commits.newest.values()) > seen, f"all workers together after {after}:")

    # -- kinds ---------------------------------------------------------------------------------------------------

    def kinds(self) -> dict[str, Callable[[str], None]]:
        found: dict[str, Callable[[str], None]] = {
            "kill": self._kill,
            "pause": self._pause,
            "long pause": self._long_pause,
            "coordinator": self._coordinator,
            "bad memory": lambda node: self._lie(node, "memory"),
            "false vote": lambda node: self._lie(node, "vote"),
        }
        found |= {"cut": self._cut} if self.net.spaces else {}
        return {kind: found[kind] for kind in found if not self.only or kind in self.only}

    def _kill(self, node: str) -> None:
        self.processes.kill(node)
        self.wait(self.rng.uniform(0.1, LOST_AFTER))
        self.processes.start(node)

    def _pause(self, node: str) -> None:
        self._stop(node, self.rng.uniform(0.2, 0.6) * LOST_AFTER)

    def _long_pause(self, node: str) -> None:
        self._stop(node, self.rng.uniform(1.5, 2.5) * LOST_AFTER)

    def _stop(self, node: str, seconds: float) -> None:
        self.processes.signal(node, signal.SIGSTOP)
        try:
            self.wait(seconds)
        finally:
            self.processes.signal(node, signal.SIGCONT)

    def _coordinator(self, node: str) -> None:
        self.processes.kill(COORDINATOR)
        self.wait(self.rng.uniform(0.1, 1.5) * LOST_AFTER)
        self.processes.start(COORDINATOR)

    def _cut(self, node: str) -> None:
        index = self.processes.nodes.index(node)
        self.net.cut(index)
        try:
            self.wait(self.rng.uniform(0.5, 2.5) * LOST_AFTER)
        finally:
            self.net.mend(index)

    def _lie(self, node: str, kind: str) -> None:
        seconds = self.rng.uniform(1.0, 3.0)
        self.processes.tell(node, f"lie {kind} {seconds:.3f}")
        self.wait(seconds)

    # -- the run -------------------------------------------------------------------------------------------------

    def go(self, seconds: float, say: Callable[[str], None]) -> None:
        for node in (COORDINATOR, *self.processes.nodes):
            self.processes.start(node)
        self.need(START_S, lambda: min(self.commits.newest.values()) > 0, "a first commit of all workers:")
        began = time.monotonic()
        for kind in self._drawn():
            if time.monotonic() - began >= seconds:
                break
            node = self.rng.choice(self.processes.nodes)
            fault = Fault(kind, time.monotonic())
            self.faults.append(fault)
            say(
                f"{fault.since - began:7.1f} s  step {self.commits.step:5}  {kind}"
                + ("" if kind == "coordinator" else f": {node}")
            )
            self.kinds()[kind](node)
            over = time.monotonic()
            self.progress(PROGRESS_S, kind)
            if self.rng.random() < 0.7:  # otherwise the next fault meets who has not come back from this one
                self.together(kind)
                fault.together_s = time.monotonic() - over
            self.wait(self.rng.uniform(0.1, 0.8))
            fault.until = time.monotonic()
        self.together("all faults")
        self.ending = True
        last = self.commits.step + MORE_STEPS
        self.processes.tell_all(f"until {last}")
        self.need(END_S, lambda: not self.processes.workers_running, "the end of all workers:")
        if self.commits.ended != dict.fromkeys(self.processes.nodes, last):
            raise ChaosError(f"the workers ended after other steps than {last}: {self.commits.ended}")
        if self.net.hosts == 1 and not self.commits.near:
            raise ChaosError("nothing went through shared memory")
        if self.net.hosts > 1 and not self.commits.parcels:
            raise ChaosError("no message went through shared memory")

    def _drawn(self) -> Iterator[str]:
        """Every kind once, in any order, again and again."""
        while True:
            kinds = list(self.kinds())
            self.rng.shuffle(kinds)
            yield from kinds

    def table(self) -> list[str]:
        lines = ["fault          times  longest without a commit  longest until all were together again"]
        for kind in self.kinds():
            met = [fault for fault in self.faults if fault.kind == kind and fault.until]
            if not met:
                continue
            gap = max(self.commits.longest_gap(fault.since, fault.until) for fault in met)
            back = [fault.together_s for fault in met if fault.together_s is not None]
            lines.append(f"{kind:13} {len(met):6} {gap:23.1f} s  " + (f"{max(back):.1f} s" if back else "-"))
        return lines


# ---------------------------------------------------------------------------------------------------------------------
# The command


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Yield a list that SIGINT and SIGTERM are added to, to be looked at where nothing is half done.

    An exception at any place could come between the start of a process and the note of its number.
    """
    met: list[int] = []
    before = {
        number: signal.signal(number, lambda found, _: met.append(found)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield met
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    seconds: float,
    *,
    workers: int,
    seed: int,
    keep: bool,
    only: tuple[str, ...],
    hosts: int,
    say: Callable[[str], None],
    interrupted: list[int],
) -> int:
    directory = Path(tempfile.mkdtemp(prefix="quicoll-chaos-"))
    net = network(workers, hosts=hosts)
    processes = Processes(directory, net, workers)
    commits = Commits(directory, processes.nodes)
    chaos = Run(processes, commits, net, random.Random(seed), interrupted, only)
    failure = "an error of this program"
    try:
        chaos.go(seconds, say)
        failure = ""
    except ChaosError as error:
        failure = str(error)
    except KeyboardInterrupt:
        failure = ""
        raise
    finally:
        processes.close()
        for line in chaos.table():
            say(line)
        say(
            f"seed {seed}: {len(chaos.faults)} faults, {commits.step} steps committed ({commits.checked} commits of "
            f"workers compared), {commits.near} attempts of workers with shared memory, {commits.parcels} messages "
            f"through it, {commits.aborted} attempts of workers given up, {sum(commits.lies.values())} lies told, "
            f"wrong commits: {commits.wrong}"
        )
        for death in processes.deaths:
            say(death)
        if keep:
            say(f"what the processes said is in {directory}")
        elif not failure:
            shutil.rmtree(directory)
    if failure:
        say(f"FAILED: {failure}")
        say(
            f"what the processes said is in {directory}; again: python tests/chaos.py --seed {seed} --workers {workers}"
            + (f" --hosts {hosts}" if hosts else "")
            + "".join(f" --only '{kind}'" for kind in only)
        )
        return 1
    say(f"all {workers} workers end with the state of the undisturbed training")
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=4, help="3 or more")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; drawn, and printed, if not given")
    parser.add_argument("--only", action="append", choices=KINDS, help="this kind of fault; may be given again")
    parser.add_argument("--hosts", type=int, default=0, help="whose memory workers share; 0: each has its own")
    parser.add_argument("--keep", action="store_true", help="keep what the processes said, if all went well too")
    parser.add_argument("--no-namespaces", action="store_true", help="stay on the loopback interface, without cuts")
    options = parser.parse_args(arguments)
    only = tuple(dict.fromkeys(options.only or ()))
    if options.workers < 3:
        parser.error("fewer than 3 workers have no majority without one")
    if not 0 <= options.hosts <= options.workers:
        parser.error("no more hosts than workers")
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    why = "--no-namespaces" if options.no_namespaces else enter_namespace(__file__, [*arguments, "--seed", str(seed)])

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    say(f"seed {seed}, {options.workers} workers, lost_after {LOST_AFTER:g} s")
    if why and only == ("cut",):
        parser.error(f"no cuts: no network namespaces here ({why})")
    if why and (not only or "cut" in only):
        say(f"no cuts: no network namespaces here ({why})")
    try:
        with interrupts() as interrupted:
            how = {"workers": options.workers, "seed": seed, "keep": options.keep, "only": only}
            how |= {"hosts": options.hosts}
            return run(60 * options.minutes, **how, say=say, interrupted=interrupted)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
