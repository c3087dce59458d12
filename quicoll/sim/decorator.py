"""`@quicoll.sim.scenario`: a user's async function, tested on a whole cluster whose network breaks.

    @quicoll.sim.scenario(seeds=200, ranks=4)
    async def test_my_loop_survives(job, sim):
        await train(job, until=lambda: sim.everyone_at(10))

The function is called on every rank, again after every restart, with the job that the rank has joined and, if it asks
for a second argument, the simulation. For pytest it is a plain function with one test for each seed; each is one run of
`quicoll.sim.Simulation` under the faults that its seed generates, or under those of `script`. Keyword-only parameters
are fixtures (or parametrized) as usual.

The first generated scenario that fails a test is made small, as `quicoll.sim.scenario.shrink` does; what fails is run
once more, recorded. The error then carries, as a note, the faults, the story and the command that runs this seed again.
The note says which of the two runs it tells of, and what the loop may be doing wrong (quicoll.sim.hints). Should the
second run go otherwise than the first, the test depends on something beyond its seed (the real clock, a module's state,
the order of a set), and the note says so.

What the function says to pytest by `pytest.skip`, `pytest.xfail`, `pytest.fail` or `pytest.exit`, or to unittest by
SkipTest, reaches it as what it is, by whichever rank it is said first; that rank's node, the seed and the time are a
note of it.

Nothing here imports pytest; what pytest needs is in `quicoll.pytest_plugin`.
"""

from __future__ import annotations

import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Protocol

from quicoll.errors import LocalError
from quicoll.sim.cluster import Simulation
from quicoll.sim.hints import BEYOND_THE_SEED
from quicoll.sim.outcome import Outcome, Settings
from quicoll.sim.scenario.shrink import shrink
from quicoll.sim.scenario.swarm import FAULT_KINDS, generate, parse_kinds
from quicoll.sim.trace.recording import Recording
from quicoll.sim.workload import COMPUTE_S

if TYPE_CHECKING:
    from quicoll.sim.cluster import Worker
    from quicoll.sim.errors import RunFailed
    from quicoll.sim.invariants import ReferenceDigest
    from quicoll.sim.scenario.events import ScenarioEvent
    from quicoll.sim.scenario.swarm import Scenario
    from quicoll_transport.sim import Recorder

__all__ = ["SimulatedTest", "Trial", "scenario"]

_ARGUMENT = "sim_seed"  # by which pytest gives the seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The arguments of `scenario`: see there."""

    seeds: tuple[int, ...]
    ranks: int
    settings: Settings | None
    steps: int
    faults: tuple[str, ...]
    script: Callable[[Simulation], object] | None
    reference: ReferenceDigest | None
    compute: float | None
    shrink_runs: int

    def drawn(self, seed: int) -> Scenario | None:
        """Return the scenario that this seed generates; None where a script writes the faults."""
        if self.script is not None:
            return None
        return generate(seed, ranks=self.ranks, steps=self.steps, kinds=self.faults, settings=self.settings)

    def simulation(
        self, worker: Worker, seed: int, *, drawn: Scenario | None = None, recorder: Recorder | None = None
    ) -> Simulation:
        """Return the run of this seed. drawn: a smaller scenario in place of its own; None for its own."""
        if self.script is not None:
            given = replace(self.settings or Settings(), ranks=self.ranks)
            sim = Simulation(
                worker, seed=seed, settings=given, reference=self.reference, recorder=recorder, progress=_tell
            )
            self._write(sim)
            last_s = max((event.at_ns for event in sim.events), default=0) / 1e9
            sim.compute = (last_s / self.steps or COMPUTE_S) if self.compute is None else self.compute
            return sim
        scenario = drawn or self.drawn(seed)
        if scenario is None:
            raise AssertionError("neither a script nor a scenario")
        return Simulation(
            worker,
            seed=seed,
            settings=scenario.settings,
            events=scenario.events,
            reference=self.reference,
            compute=scenario.compute_s if self.compute is None else self.compute,
            recorder=recorder,
            progress=_tell,
        )

    def _write(self, sim: Simulation) -> None:
        """Let the script write its faults. Raises LocalError where its body has not run: the test would be of none."""
        if self.script is None:
            raise AssertionError("no script")
        made = self.script(sim)
        if inspect.isawaitable(made) or inspect.isgenerator(made) or inspect.isasyncgen(made):
            if inspect.iscoroutine(made):
                made.close()
            raise LocalError(f"the script {_name(self.script)} has given {_name(type(made))}, and has injected nothing")


class SimulatedTest(Protocol):
    """A decorated test. `run` makes one run by hand; it raises nothing that happened inside."""

    sim_trial: Trial
    __name__: str

    def __call__(self, *args: Any, **arguments: Any) -> None: ...
    def run(self, seed: int = 0, **fixtures: Any) -> Outcome: ...


def scenario(
    function: None = None,
    /,
    *,
    seeds: int | Iterable[int] = 100,
    ranks: int | None = None,
    steps: int = 10,
    faults: Iterable[str] | None = None,
    script: Callable[[Simulation], object] | None = None,
    settings: Settings | None = None,
    reference: ReferenceDigest | None = None,
    compute: float | None = None,
    shrink_runs: int = 30,
) -> Callable[[Worker], SimulatedTest]:
    """Run the decorated `async def test(job)` or `async def test(job, sim)` on a simulated cluster, once for each seed.

    The test fails with InvariantBroken or RunFailed.

    Args:
        seeds: How many, from 0 on, or which; pytest's `--sim-seed N` and `--sim-seeds A:B` choose others.
        ranks: Number of workers; None for that of `settings`.
        steps: About so many steps the test does, so that faults fall into them.
        faults: Kinds of faults to generate; None for all (see quicoll.sim.scenario.swarm).
        script: Writes the faults instead: `def script(sim): sim.at(1.2).partition({0, 1}, {2, 3}); sim.at(3.0).heal()`.
            Randomness (of losses, of delays) still depends on the seed.
        settings: Of the cluster; None to generate them with the scenario.
        reference: Digest of the registered state after a step, if it is known.
        compute: Simulated seconds between the entry of a step and its body, for what the loop computes: a loop that
            never sleeps would otherwise do thousands of steps while the faults last. None for so many that about
            `steps` of them are done until the last fault; 0 for none, where the loop sleeps itself.
        shrink_runs: Runs that may be spent on finding fewer faults that fail alike, for the first seed of the test that
            fails; 0 for none.
    Returns:
        A decorator; the test that it makes also has `run(seed)`.
    Raises:
        LocalError: An argument, or the function, cannot work.
    """
    if function is not None:
        raise LocalError(f"{_name(function)}: write @scenario() with its parentheses")
    if settings is not None and not isinstance(settings, Settings):
        raise LocalError(f"settings are a quicoll.sim.Settings, not {settings!r}")
    base = settings or Settings()
    steps, shrink_runs = _whole("steps", steps), _whole("shrink_runs", shrink_runs)
    if steps < 1:
        raise LocalError(f"a test does at least one step, not {steps}")
    if shrink_runs < 0:
        raise LocalError(f"a number of runs is not negative: {shrink_runs}")
    if script is not None and faults is not None:
        raise LocalError("either the faults are generated, or a script writes them")
    if script is not None:
        _check_script(script)
    if reference is not None and not callable(reference):
        raise LocalError(f"a reference is a function of a step, not {reference!r}")
    pause: object = compute
    if pause is not None and not (isinstance(pause, int | float) and 0 <= pause < 3600):
        raise LocalError(f"compute: seconds, not below 0 and less than an hour, not {compute!r}")
    found = Trial(
        seeds=_seeds(seeds),
        ranks=base.ranks if ranks is None else replace(base, ranks=_whole("ranks", ranks)).ranks,
        settings=settings,
        steps=steps,
        faults=FAULT_KINDS if faults is None else _kinds(faults),
        script=script,
        reference=reference,
        compute=compute,
        shrink_runs=shrink_runs,
    )

    def decorate(function: Worker) -> SimulatedTest:
        return _test(function, found)

    return decorate


def _name(what: object) -> str:
    return getattr(what, "__qualname__", repr(what))


def _whole(what: str, value: Any) -> int:
    """As an integer, numpy's as well."""
    try:
        return operator.index(value)
    except TypeError:
        raise LocalError(f"{what}: a whole number, not {value!r}") from None


def _seeds(seeds: Any) -> tuple[int, ...]:
    if hasattr(seeds, "__iter__") and not isinstance(seeds, str | bytes):
        chosen = tuple(_whole("seeds", seed) for seed in seeds)
    else:
        chosen = tuple(range(_whole("seeds", seeds)))
    if not chosen or min(chosen) < 0:
        raise LocalError(f"there is at least one seed, and seeds are not negative: {seeds!r}")
    return chosen


def _kinds(faults: Any) -> tuple[str, ...]:
    names = list(faults) if hasattr(faults, "__iter__") and not isinstance(faults, str | bytes) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise LocalError(f"faults: a list of kinds of fault, not {faults!r}")
    return parse_kinds(",".join(names))


def _check_script(script: Any) -> None:
    """Check that a call of it runs its body, with the simulation; one without a signature is checked when called."""
    if not callable(script):
        raise LocalError(f"a script is a function of the simulation, not {script!r}")
    body = script if inspect.isroutine(script) or isinstance(script, partial) else script.__call__
    if any(
        deferred(body)
        for deferred in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    ):
        raise LocalError(
            f"the script {_name(script)} is async or a generator: called, it would inject nothing. A script is a plain "
            "function that writes its faults with sim.at(...) and sim.every(...)"
        )
    try:
        signature = inspect.signature(script)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise LocalError(f"the script {_name(script)} is called with the simulation: {error}") from None


def _test(function: Worker, found: Trial) -> SimulatedTest:
    bound, fixtures = _parameters(function)
    runs_left = [found.shrink_runs]  # a test that fails with every seed is made small once

    @wraps(function)
    def test(*args: Any, sim_seed: int, **given: Any) -> None:
        __tracebackhide__ = True
        outcome = found.simulation(partial(function, *args, **given), sim_seed).run()
        error = outcome.error
        if error is None:
            return
        cause = error.__cause__
        if cause is not None and isinstance(cause, _spoken("skip", "xfail", "exit")):
            cause.add_note(_place(error))
            raise cause
        runs, runs_left[0] = runs_left[0], 0
        explained = _explained(partial(function, *args, **given), found, outcome, runs)
        if cause is not None and isinstance(cause, _spoken("fail")):
            cause.add_note(f"{_place(error)}\n{explained}")
            raise cause
        error.add_note(explained)
        raise error

    def run(seed: int = 0, **given: Any) -> Outcome:
        return found.simulation(partial(function, **given), seed).run()

    # pytest asks for the fixtures that a signature names; `wraps` would show it the function's own.
    seed = inspect.Parameter(_ARGUMENT, inspect.Parameter.KEYWORD_ONLY)
    made: Any = test  # a function with attributes of its own, which no type names
    made.__signature__ = inspect.Signature([*bound, seed, *fixtures])
    made.sim_trial = found
    made.run = run
    shown: SimulatedTest = made
    return shown


def _parameters(function: Worker) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """`self` of a test class, and the fixtures. Raises LocalError for a function that cannot be a rank's."""
    name = _name(function)
    if not inspect.iscoroutinefunction(function):
        raise LocalError(f"{name} is not an async function: `async def {name}(job): ...`")
    parameters = list(inspect.signature(function).parameters.values())
    positional = [each for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    bound = [each for each in positional[:1] if each.name == "self"]
    if not 1 <= len(positional) - len(bound) <= 2:
        raise LocalError(f"{name} takes (job) or (job, sim), and fixtures as keyword-only parameters")
    fixtures = [each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    if any(each.name == _ARGUMENT for each in fixtures):
        raise LocalError(f"{name}: {_ARGUMENT} is taken; the simulation has the seed (sim.seed)")
    return bound, fixtures


def _spoken(*names: str) -> tuple[type[BaseException], ...]:
    """Return what these functions of pytest raise; nothing without pytest, as then nobody can have called them."""
    pytest = sys.modules.get("pytest")
    found = [] if pytest is None else [getattr(pytest, name).Exception for name in names]
    unittest = sys.modules.get("unittest")
    if unittest is not None and "skip" in names:
        found.append(unittest.SkipTest)
    return tuple(found)


def _place(error: RunFailed) -> str:
    return f"said by {error.node}, seed {error.seed}, at {error.at:.6f} s of simulated time"


def _explained(worker: Worker, found: Trial, outcome: Outcome, shrink_runs: int) -> str:
    """Return a report of a run that failed: for a person to understand it, and with the command that runs it again."""
    recording = Recording()
    sim = found.simulation(worker, outcome.seed, recorder=recording.record)
    told = sim.run()
    parts, which = [""], ""
    hints = sim.checker.habits.hints()
    if told.digest != outcome.digest:
        parts.append(f"{BEYOND_THE_SEED}\n")
    else:
        small = _shrunk(worker, found, outcome, shrink_runs)
        if small is not None:
            whole = len(sim.events)
            recording = Recording()
            sim = found.simulation(worker, outcome.seed, drawn=small, recorder=recording.record)
            told = sim.run()
            which = f"made smaller ({small.ranks} of {found.ranks} ranks, {len(sim.events)} of {whole} events)"
            parts.append(
                "The error above is of the run as it was drawn. The story and the faults below are of the smallest "
                "scenario found that fails alike.\n"
            )
        else:
            parts.append("The error above and the story below are of one run, as it was drawn or written.\n")
    parts += hints
    parts.append(recording.explain(told, of=which))
    if sim.events:
        heading = "The faults of the smaller scenario:" if which else "Its faults:"
        parts.append(f"{heading}\n" + "".join(f"  {event}\n" for event in sorted(sim.events, key=_when)))
    # pytest says where we are; the seed is part of the name, and has to be among those that are run.
    node = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
    if node:
        parts.append(f"Run it again:  pytest '{node}' --sim-seed {outcome.seed}")
    return "\n".join(parts)


def _shrunk(worker: Worker, found: Trial, outcome: Outcome, runs: int) -> Scenario | None:
    """A smaller scenario that breaks the same promise; None where a script wrote it, or nothing smaller does."""
    scenario, error = found.drawn(outcome.seed), outcome.error
    if scenario is None or error is None or runs == 0:
        return None

    def verdict(candidate: Scenario) -> str | None:
        failure = found.simulation(worker, outcome.seed, drawn=candidate).run().error
        return None if failure is None else _way(failure)

    small = shrink(scenario, _way(error), verdict, runs=runs).scenario
    return None if small == scenario else small


def _way(failure: RunFailed) -> str:
    """Return the kind of a failure. Two different errors of the user's code are two kinds."""
    return f"{failure.kind} {type(failure.__cause__).__name__}"


def _tell(line: str) -> None:
    """To the terminal of pytest, where there is one; from a run that takes long."""
    plugin = sys.modules.get("quicoll.pytest_plugin")
    if plugin is not None:
        plugin.show_progress(line)


def _when(event: ScenarioEvent) -> int:
    return event.at_ns
