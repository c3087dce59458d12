"""Run scenarios: one here, or thousands in worker processes.

A sweep's result depends on its seeds alone, not on how many processes ran it or which of them had which seed: every
seed is a world of its own. What a seed gave is therefore kept by seed, and the sweep has a digest over all of them.

    parent                         worker process, `python -m quicoll.sim.runner`
    {"seed": 17, ...}  ------>     runs it
                       <------     {"seed": 17, "ok": true, ...}

Lines of JSON over pipes. A worker that dies, or that is silent for `wall_limit` seconds of real time on one seed (code
that loops without ever giving the simulated loop a turn), is ended and reported with its seed as a failure of kind
"worker-died" or "worker-stuck"; a new one takes its place.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError
from quicoll.sim.cluster import Simulation
from quicoll.sim.scenario.events import LieTo
from quicoll.sim.scenario.swarm import FAULT_KINDS, Scenario, generate
from quicoll.sim.workload import LEARN_FROM, Load, Reference, worker

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim.outcome import Outcome
    from quicoll_transport.sim import Recorder

__all__ = ["SeedResult", "Sweep", "run_scenario", "run_seed", "run_seeds"]

_MOST_LIED = 160 << 10  # bytes of a vector that all ranks send to all, where one lies


def run_scenario(scenario: Scenario, *, recorder: Recorder | None = None) -> Outcome:
    """Run the built-in workload under this scenario. The seed also decides what its steps do.

    Where ranks share a host, what can go through its memory does: no algorithm is asked for by name.

    Where a rank lies, they only exchange: there each rank reduces what it was sent itself, and the votes differ. By any
    other algorithm all ranks would agree on what the liar has made of its own part, which nobody can tell from the
    truth but the reference; and the other operations end the run with what they find.
    """
    settings = scenario.settings
    load = replace(Load.of(scenario.seed), tiers=settings.tiers, long_bytes=settings.long_bytes)
    if settings.hosts:
        load = replace(load, algorithm="auto", near=True)
    if any(isinstance(event.fault, LieTo) for event in scenario.events):
        load = replace(load, algorithm="exchange", operations=("barrier",), groups=None, tiers=False, near=False)
        # Whole vectors go from rank to rank then, so these are the long messages.
        load = replace(load, long_bytes=0, elements=max(load.elements, min(settings.long_bytes, _MOST_LIED) // 4))

    async def life(job: Job, simulation: Simulation) -> int:
        return await worker(
            job,
            lambda: simulation.everyone_at(scenario.steps),
            load=load,
            disk=simulation.disk(job),
            checker=simulation.checker.tiered,
        )

    return Simulation(
        life,
        seed=scenario.seed,
        settings=replace(settings, learn_from_bytes=LEARN_FROM) if load.table else settings,
        events=scenario.events,
        replay=Reference(load),
        compute=scenario.compute_s,
        recorder=recorder,
    ).run()


def run_seed(
    seed: int,
    *,
    ranks: int = 4,
    steps: int = 8,
    kinds: Iterable[str] = FAULT_KINDS,
    recorder: Recorder | None = None,
) -> Outcome:
    """Run the scenario that the swarm generator makes of this seed."""
    return run_scenario(generate(seed, ranks=ranks, steps=steps, kinds=kinds), recorder=recorder)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    """The result of one seed of a sweep. kind, message: of the failure, None if all was well."""

    seed: int
    kind: str | None = None
    message: str | None = None
    injected: dict[str, int] = field(default_factory=dict)
    committed: int = 0
    aborted: int = 0
    views: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    digest: str = ""

    @property
    def ok(self) -> bool:
        return self.kind is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All results, by seed. wall_s: of the whole sweep; cpu_s in `results`: of each run alone."""

    ranks: int
    steps: int
    kinds: tuple[str, ...]
    jobs: int
    results: tuple[SeedResult, ...]
    wall_s: float

    @property
    def failures(self) -> tuple[SeedResult, ...]:
        return tuple(result for result in self.results if not result.ok)

    @property
    def digest(self) -> str:
        """Digest of all digests by seed: two sweeps of the same seeds and code have the same one."""
        found = blake2b(digest_size=16)
        for result in self.results:
            found.update(f"{result.seed}:{result.digest}\n".encode())
        return found.hexdigest()

    def summary(self, commands: dict[int, str] | None = None) -> dict[str, Any]:
        """Return the sweep as JSON has it. commands: for failed seeds, better ones than the seed's own."""
        known = commands or {}
        injected: dict[str, int] = {}
        for result in self.results:
            for kind, count in result.injected.items():
                injected[kind] = injected.get(kind, 0) + count
        cpu_s = sum(result.cpu_s for result in self.results)
        slowest = sorted(self.results, key=lambda result: (-result.cpu_s, result.seed))[:5]
        return {
            "seeds": len(self.results),
            "first_seed": self.results[0].seed if self.results else None,
            "last_seed": self.results[-1].seed if self.results else None,
            "ranks": self.ranks,
            "steps": self.steps,
            "faults": list(self.kinds),
            "failed": [
                {
                    "seed": result.seed,
                    "kind": result.kind,
                    "message": result.message,
                    "command": known.get(result.seed, self.command(result.seed)),
                }
                for result in self.failures
            ],
            "faults_injected": dict(sorted(injected.items())),
            "steps_committed": sum(result.committed for result in self.results),
            "steps_aborted": sum(result.aborted for result in self.results),
            "views": sum(result.views for result in self.results),
            "virtual_s": round(sum(result.virtual_s for result in self.results), 6),
            "wall_s": round(self.wall_s, 3),
            "cpu_s": round(cpu_s, 3),
            "scenarios_per_s": round(len(self.results) / self.wall_s, 3) if self.wall_s else None,
            "scenarios_per_cpu_s": round(len(self.results) / cpu_s, 3) if cpu_s else None,
            "jobs": self.jobs,
            "slowest": [{"seed": result.seed, "cpu_s": round(result.cpu_s, 3)} for result in slowest],
            "digest": self.digest,
        }

    def command(self, seed: int) -> str:
        """Return the command that runs this seed again."""
        faults = "" if self.kinds == FAULT_KINDS else f" --faults {','.join(self.kinds)}"
        return f"quicoll sim --seed {seed} --ranks {self.ranks} --steps {self.steps}{faults}"


def run_seeds(
    seeds: Iterable[int],
    *,
    ranks: int = 4,
    steps: int = 8,
    kinds: Iterable[str] = FAULT_KINDS,
    jobs: int = 1,
    wall_limit: float = 600.0,
    progress: Callable[[SeedResult], None] | None = None,
) -> Sweep:
    """Run all of these in `jobs` processes. progress: called with each result, in the order of their ends.

    wall_limit: seconds of real time that one seed may take before its process is given up.
    """
    if jobs < 1:
        raise LocalError(f"a sweep needs a process, not {jobs}")
    chosen = tuple(kinds)
    pool = _Pool(list(seeds), {"ranks": ranks, "steps": steps, "kinds": chosen}, wall_limit, progress)
    began = time.monotonic()
    try:
        pool.run(jobs)
    finally:
        pool.close()
    results = tuple(pool.results[seed] for seed in sorted(pool.results))
    return Sweep(ranks=ranks, steps=steps, kinds=chosen, jobs=jobs, results=results, wall_s=time.monotonic() - began)


class _Pool:
    """The parent's side."""

    def __init__(
        self,
        seeds: list[int],
        settings: dict[str, Any],
        wall_limit: float,
        progress: Callable[[SeedResult], None] | None,
    ) -> None:
        self.results: dict[int, SeedResult] = {}
        self._todo = list(reversed(dict.fromkeys(seeds)))
        self._settings = settings
        self._wall_limit = wall_limit
        self._progress = progress
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()

    def run(self, jobs: int) -> None:
        for _ in range(min(jobs, len(self._todo))):
            self._begin(_Worker())
        while self._workers:
            limit = min(each.since for each in self._workers) + self._wall_limit - time.monotonic()
            for key, _ in self._selector.select(max(0.0, limit)):
                self._hear(key.data)
            for stuck in [each for each in self._workers if time.monotonic() - each.since > self._wall_limit]:
                self._lost(stuck, "worker-stuck", f"nothing came of it within {self._wall_limit:g} s of real time")

    def close(self) -> None:
        for each in self._workers:
            each.end()
        self._selector.close()

    def _begin(self, each: _Worker) -> None:
        self._workers.append(each)
        self._selector.register(each.stdout, selectors.EVENT_READ, each)
        self._next(each)

    def _next(self, each: _Worker) -> None:
        if self._todo:
            each.ask({"seed": self._todo.pop(), **self._settings})
        else:
            self._remove(each)

    def _remove(self, each: _Worker) -> int:
        self._selector.unregister(each.stdout)
        self._workers.remove(each)
        return each.end()

    def _hear(self, each: _Worker) -> None:
        line = each.answer()
        if line is None:
            return
        if line == b"":
            self._lost(each, "worker-died", "the process that ran it ended")
            return
        self._take(SeedResult(**json.loads(line)))
        self._next(each)

    def _lost(self, each: _Worker, kind: str, why: str) -> None:
        status = self._remove(each)
        self._take(SeedResult(seed=each.seed, kind=kind, message=f"{why} (exit status {status})"))
        if self._todo:
            self._begin(_Worker())

    def _take(self, result: SeedResult) -> None:
        self.results[result.seed] = result
        if self._progress is not None:
            self._progress(result)


class _Worker:
    """One process and its pipes. seed: what it runs; since: real time at which it was asked."""

    def __init__(self) -> None:
        # It has to import what this process has imported, wherever that came from: with -P no source tree that happens
        # to be the working directory comes first, whose quicoll would be used with the transport of another one.
        command = [sys.executable, "-P", "-m", "quicoll.sim.runner"]
        environment = {
            "OPENBLAS_NUM_THREADS": "1",  # a worker has one core: threads that wait there for work take it from others
            **os.environ,
            "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path),
        }
        process = subprocess.Popen(  # noqa: S603 - the interpreter that runs this
            # A group of its own: who interrupts a sweep interrupts this process, and this one ends its workers.
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,
        )
        stdin, stdout = process.stdin, process.stdout
        if stdin is None or stdout is None:
            raise AssertionError("pipes were asked for")
        self._process, self._stdin, self.stdout = process, stdin, stdout
        self._buffer = b""
        self.seed = -1
        self.since = time.monotonic()

    def ask(self, request: dict[str, Any]) -> None:
        self.seed = request["seed"]
        self.since = time.monotonic()
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            pass  # its output ends too, and tells

    def answer(self) -> bytes | None:
        """A line, None if it is not complete yet, empty at the end of the process."""
        data = os.read(self.stdout.fileno(), 1 << 16)
        if not data:
            return b""
        self._buffer += data
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        return line

    def end(self) -> int:
        """Its exit status; it is killed where it has not ended."""
        try:
            self._stdin.close()
        except BrokenPipeError:
            pass
        self._process.kill()
        self.stdout.close()
        return self._process.wait()


def result_of(outcome: Outcome) -> SeedResult:
    """An outcome without what JSON cannot carry."""
    error = outcome.error
    return SeedResult(
        seed=outcome.seed,
        kind=None if error is None else error.kind,
        message=None if error is None else str(error),
        injected=outcome.injected,
        committed=outcome.committed,
        aborted=outcome.aborted,
        views=outcome.views,
        virtual_s=outcome.virtual_s,
        wall_s=outcome.wall_s,
        digest=outcome.digest,
    )


def _serve() -> None:
    """The worker's side: until its input ends.

    Garbage is collected after each run, and only what is of it, not what modules have made when they were imported. A
    world is one large cycle: to look for garbage while it is still held, and among all else, took 3 % of a run.
    """
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what simulated code prints is no answer
    logging.disable(logging.CRITICAL)  # what a broken cluster logs is expected, and making it costs time
    gc.disable()
    gc.freeze()
    for line in sys.stdin.buffer:
        result = _result(json.loads(line))
        text = json.dumps({name: getattr(result, name) for name in SeedResult.__dataclass_fields__})
        try:
            answers.write(text.encode() + b"\n")
        except BrokenPipeError:  # whoever asked is gone
            return


def _result(request: dict[str, Any]) -> SeedResult:
    """Run a seed, and let go of all of it."""
    started = time.process_time()
    result = result_of(run_seed(**request))
    gc.collect()
    return replace(result, cpu_s=time.process_time() - started)


if __name__ == "__main__":
    _serve()
