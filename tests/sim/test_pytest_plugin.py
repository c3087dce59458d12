"""What users of `@quicoll.sim.scenario` see in pytest; in this process, and once in a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import quicoll
import quicoll_transport
from quicoll import pytest_plugin
from quicoll.errors import LocalError, StepAborted
from quicoll.pytest_plugin import parse_seeds
from quicoll.sim import RunFailed, Settings, Simulation, scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quicoll.job import Job

    Pytest = Callable[..., tuple[int, str]]  # what is in the file, arguments: the exit status and what was printed

SOURCES = [str(Path(package.__file__ or "").resolve().parent.parent) for package in (quicoll, quicoll_transport)]

HEAD = """
import asyncio
import numpy as np
import quicoll.sim
from quicoll.errors import StepAborted

def split(sim):
    sim.at(0.1).partition({0}, {1, 2})
    sim.at(0.2).heal()

async def work(job, sim, steps=2):
    while not sim.everyone_at(steps):
        try:
            async with job.step():
                await asyncio.sleep(0.05)
                await job.group.all_reduce(np.ones(3))
        except StepAborted:
            pass
"""


def write_tests(directory: Path, source: str) -> None:
    (directory / "test_it.py").write_text(HEAD + source)
    (directory / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n"
    )


OPTIONS = ("-p", "quicoll.pytest_plugin", "-p", "no:cacheprovider")


@pytest.fixture
def run_pytest(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Pytest:
    """pytest inside this process: it has imported what takes longer than the tests that are run."""

    def run(source: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setenv("COLUMNS", "150")
        write_tests(pytester.path, source)
        done = pytester.runpytest_inprocess(*OPTIONS, *arguments)
        return int(done.ret), done.stdout.str() + done.stderr.str()

    return run


def run_process(directory: Path, *arguments: str) -> tuple[int, str]:
    """The same in a process of its own, as a user starts it."""
    command = [sys.executable, "-m", "pytest", *OPTIONS, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES), "COLUMNS": "150"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_every_seed_is_a_test_beside_asynchronous_tests_fixtures_and_parameters(run_pytest: Pytest) -> None:
    source = """
@quicoll.sim.scenario(seeds=2, ranks=3, script=split)
async def test_function(job, sim, *, tmp_path):
    assert tmp_path.is_dir()
    await work(job, sim)

class TestClass:
    import pytest

    @pytest.mark.parametrize("steps", [1, 2])
    @quicoll.sim.scenario(seeds=[7], ranks=3, script=split)
    async def test_method(self, job, sim, *, steps):
        await work(job, sim, steps)
        assert job.committed_step >= steps

async def test_of_pytest_asyncio():
    await asyncio.sleep(0)
"""
    code, text = run_pytest(source, "-v")
    assert code == 0, text
    for name in ("test_function[seed0]", "test_function[seed1]", "test_method[seed7-1]", "test_method[seed7-2]"):
        assert f"{name} PASSED" in text
    assert "5 passed" in text


def test_a_failure_has_the_user_s_line_the_story_the_faults_and_the_command(run_pytest: Pytest) -> None:
    source = """
@quicoll.sim.scenario(seeds=2, ranks=3, script=split)
async def test_wrong(job, sim):
    async with job.step():
        total = await job.group.all_reduce(np.ones(3))
        assert total[0] == 4 or sim.seed != 1
"""
    code, text = run_pytest(source)
    assert code == 1, text
    assert "1 passed" in text
    assert "1 failed" in text
    assert re.search(r"^> +assert total\[0\] == 4 or sim.seed != 1$", text, re.MULTILINE)
    assert "Seed 1: what happened, in seconds of simulated time." in text
    assert "The error above and the story below are of one run, as it was drawn or written." in text
    assert "VERDICT  FAILED  worker: AssertionError" in text
    assert "sim.at(0.1).partition({0}, {1, 2})" in text
    command = "Run it again:  pytest 'test_it.py::test_wrong[seed1]' --sim-seed 1"
    assert command in text
    assert "depends on something beyond its seed" not in text
    code, text = run_pytest(source, "test_it.py::test_wrong[seed1]", "--sim-seed", "1")
    assert code == 1
    assert command in text
    assert "1 failed" in text
    assert "passed" not in text


def test_what_a_rank_says_to_pytest_reaches_pytest_as_it_is(run_pytest: Pytest) -> None:
    source = """
import pytest
import unittest

calm = quicoll.sim.scenario(seeds=[3], ranks=2, script=lambda sim: None)

@calm
async def test_skips(job, sim):
    async with job.step():
        pytest.skip("no such device")

@calm
async def test_skips_like_unittest(job):
    raise unittest.SkipTest("no such module")

@calm
async def test_needs_what_is_missing(job):
    pytest.importorskip("there_is_no_such_module")

@calm
async def test_is_known_to_fail(job):
    pytest.xfail("known")

@pytest.mark.xfail(raises=pytest.fail.Exception, strict=True)
@calm
async def test_is_expected_to_fail(job):
    pytest.fail("expected")

@calm
async def test_fails(job):
    pytest.fail("this is wrong")
"""
    code, text = run_pytest(source, "-v", "-rsxf")
    assert code == 1, text
    assert "3 skipped, 2 xfailed" in text
    assert "1 failed" in text
    assert "test_it.py::test_fails[seed3] FAILED" in text
    for reason in ("no such device", "no such module", "could not import 'there_is_no_such_module'"):
        assert re.search(rf"^SKIPPED .*{reason}", text, re.MULTILINE), text
    assert "Failed: this is wrong" in text
    assert re.search(r"said by worker-[01], seed 3, at 0\.\d{6} s of simulated time", text)
    assert "VERDICT  FAILED  worker: Failed: this is wrong" in text
    assert "Run it again:  pytest 'test_it.py::test_fails[seed3]' --sim-seed 3" in text


def test_a_state_that_is_changed_before_its_commit_is_a_hint_of_the_report() -> None:
    async def hasty(job: Job, sim: Simulation) -> None:
        total = np.zeros(3, np.float32)
        job.register_state(lambda: {"total": total}, lambda state: np.copyto(total, state["total"]))
        for _ in range(3):
            async with job.step():
                total += await job.group.all_reduce(np.ones(3, np.float32), op="avg")
        assert not total.any()

    with pytest.raises(RunFailed) as caught:
        scenario(seeds=1, ranks=2, script=lambda sim: None)(hasty)(sim_seed=0)
    (note,) = caught.value.__notes__
    assert "Hint: 'total' of the registered state was changed inside step 1 on worker-" in note
    assert note.index("Hint: ") < note.index("Seed 0: what happened")


def test_progress_is_told_now_and_then_while_seeds_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    progress = pytest_plugin._Progress(told.append)
    progress.seed_done("test_it.py::test_loop", 3, failed=False)
    assert told == [], "not at once"
    monkeypatch.setattr(pytest_plugin, "_EVERY_S", 0.0)
    progress.seed_done("test_it.py::test_loop", 3, failed=True)
    progress.seed_done("test_it.py::test_loop", 3, failed=False)
    assert told == ["test_it.py::test_loop: 2 of 3 seeds, 1 failed"], "and not at the end, which pytest tells"


def test_pytest_exit_in_a_rank_stops_pytest(run_pytest: Pytest) -> None:
    source = """
import pytest

@quicoll.sim.scenario(seeds=3, ranks=2, script=lambda sim: None)
async def test_gives_up(job):
    pytest.exit("enough", returncode=7)
"""
    code, text = run_pytest(source)
    assert code == 7, text
    assert "Exit: enough" in text


def test_a_generated_scenario_that_fails_is_made_small_once() -> None:
    async def careless(job: Job, sim: Simulation) -> None:
        """Fails on every rank but in the first view."""
        while not sim.everyone_at(3):
            try:
                async with job.step():
                    await job.group.barrier()
                    if job.view.view_id > 1:
                        raise ValueError("a second view was not thought of")
                    await asyncio.sleep(0.1)
            except StepAborted:
                pass

    decorated = scenario(seeds=1, ranks=3, faults=["crash"], steps=3, shrink_runs=4)(careless)
    seed = next(seed for seed in range(50) if decorated.run(seed).error is not None)
    notes: list[str] = []
    for _ in range(2):
        with pytest.raises(RunFailed, match="a second view was not thought of") as caught:
            decorated(sim_seed=seed)
        notes += caught.value.__notes__
    assert "The error above is of the run as it was drawn. The story and the faults below are of the" in notes[0]
    assert re.search(r"Seed \d+, made smaller \(\d of 3 ranks, \d of \d+ events\): what happened", notes[0])
    assert "The faults of the smaller scenario:" in notes[0]
    assert notes[0].count("  sim.at(") <= notes[1].count("  sim.at(")
    assert "VERDICT  FAILED  worker: ValueError" in notes[0]
    assert "Its faults:" in notes[1]


def test_a_test_that_depends_on_more_than_its_seed_is_told_so(run_pytest: Pytest) -> None:
    source = """
calls = []

@quicoll.sim.scenario(seeds=3, ranks=2, script=lambda sim: None)
async def test_wrong(job):
    calls.append(job)
    await asyncio.sleep(0.001 * len(calls))
    raise ValueError("always")
"""
    code, text = run_pytest(source, "-x")
    assert code == 1, text
    assert "1 failed" in text, "the first failure stops, where it is asked for"
    assert "the test depends on something beyond its seed" in text.replace("\n    ", " ")


def test_options_choose_the_seeds_of_every_test(run_pytest: Pytest) -> None:
    source = """
@quicoll.sim.scenario(seeds=20, ranks=1, script=lambda sim: None)
async def test_function(job, sim):
    await work(job, sim, 1)
"""
    collected = ("--collect-only", "-q")
    assert run_pytest(source, *collected)[1].count("::test_function[seed") == 20
    text = run_pytest(source, *collected, "--sim-seeds", "500:503", "--sim-seed", "9", "--sim-seed", "501")[1]
    assert [line for line in text.splitlines() if "::" in line] == [
        f"test_it.py::test_function[seed{seed}]" for seed in (9, 501, 500, 502)
    ]
    code, text = run_pytest(source, *collected, "--sim-seeds=5:5")
    assert code != 0
    assert "seeds are given as A:B with A < B, for A to B - 1, not as '5:5'" in text


def test_seeds_are_a_range_of_integers_that_are_not_negative() -> None:
    assert parse_seeds("3:7") == range(3, 7)
    for wrong in ("3", "5:5", "7:3", "a:b", ":5", "5:", "-1:5", "1:2:3", ""):
        with pytest.raises(ValueError, match="seeds are given as A:B"):
            parse_seeds(wrong)


def test_pytest_starts_without_importing_more_of_quicoll_than_its_errors(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import sys\n"
        "def pytest_sessionfinish():\n"
        "    rooms = ('aioquic', 'cryptography', 'msgspec', 'numpy', 'quicoll', 'quicoll_transport', 'torch')\n"
        "    print('imported:', *sorted(name for name in sys.modules if name.split('.')[0] in rooms))\n"
    )
    (tmp_path / "test_plain.py").write_text("def test_nothing(): pass\n")
    code, text = run_process(tmp_path, "test_plain.py", "-s")
    assert code == 0, text
    assert "imported: quicoll quicoll.errors quicoll.pytest_plugin\n" in text


# -- what is refused, before anything runs ---------------------------------------------------------------------------


async def fine(job: Job) -> None:
    """Nothing."""


async def asynchronous(sim: Simulation) -> None:
    """A script that no call runs."""
    sim.at(0.1).crash(0)


def generating(sim: Simulation) -> Iterator[None]:
    """The same."""
    sim.at(0.1).crash(0)
    yield


class AsynchronousObject:
    """The same."""

    async def __call__(self, sim: Simulation) -> None:
        sim.at(0.1).crash(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": 0}, "at least one seed"),
        ({"seeds": [3, -1]}, "not negative"),
        ({"steps": 0}, "at least one step"),
        ({"shrink_runs": -1}, "not negative"),
        ({"ranks": 0}, "1 to 256 ranks"),
        ({"faults": ["loss", "earthquake"]}, "no kind of fault 'earthquake'"),
        ({"faults": ["loss"], "script": lambda sim: None}, "either the faults are generated, or a script"),
        ({"faults": "loss"}, "faults: a list of kinds of fault, not 'loss'"),
        ({"faults": 3}, "faults: a list of kinds of fault, not 3"),
        ({"faults": [3]}, "faults: a list of kinds of fault"),
        ({"seeds": 2.5}, "seeds: a whole number, not 2.5"),
        ({"seeds": None}, "seeds: a whole number"),
        ({"seeds": "17"}, "seeds: a whole number, not '17'"),
        ({"seeds": [1, 2.5]}, "seeds: a whole number, not 2.5"),
        ({"steps": 2.5}, "steps: a whole number"),
        ({"shrink_runs": None}, "shrink_runs: a whole number"),
        ({"ranks": "4"}, "ranks: a whole number, not '4'"),
        ({"settings": {"ranks": 3}}, "settings are a quicoll.sim.Settings"),
        ({"settings": Settings}, "settings are a quicoll.sim.Settings"),
        ({"reference": b"digest"}, "a reference is a function of a step"),
        ({"compute": -1.0}, "compute: seconds, not below 0"),
        ({"compute": "0.1"}, "compute: seconds, not below 0 and less than an hour, not '0.1'"),
        ({"script": 3}, "a script is a function of the simulation, not 3"),
        ({"script": asynchronous}, "the script asynchronous is async or a generator"),
        ({"script": partial(asynchronous)}, "is async or a generator"),
        ({"script": generating}, "the script generating is async or a generator"),
        ({"script": AsynchronousObject()}, "is async or a generator"),
        ({"script": lambda: None}, "is called with the simulation: too many positional arguments"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(LocalError, match=message):
        scenario(**arguments)


def test_a_decorator_without_parentheses_is_refused() -> None:
    with pytest.raises(LocalError, match=r"fine: write @scenario\(\) with its parentheses"):
        scenario(fine)


@pytest.mark.parametrize("hidden", [asynchronous, generating])
def test_a_script_that_turns_out_to_have_written_nothing_fails_its_test(hidden: Callable[[Simulation], object]) -> None:
    decorated = scenario(seeds=1, ranks=2, script=lambda sim: hidden(sim))(fine)
    with pytest.raises(LocalError, match="has injected nothing"):
        decorated(sim_seed=0)


def test_seeds_of_other_kinds_of_integers_are_taken() -> None:
    assert scenario(seeds=np.int64(2), ranks=np.int8(3))(fine).sim_trial.seeds == (0, 1)
    assert scenario(seeds=iter(np.arange(3)))(fine).sim_trial.seeds == (0, 1, 2)


def test_a_function_that_no_rank_can_run_is_refused() -> None:
    def synchronous(job: Job) -> None:
        """Not a coroutine."""

    async def without() -> None:
        """Takes no job."""

    async def three(job: Job, sim: Simulation, tmp_path: Path) -> None:
        """A fixture has to be keyword-only."""

    async def taken(job: Job, *, sim_seed: int) -> None:
        """The name is ours."""

    for function, message in (
        (synchronous, "not an async function"),
        (without, "takes .job. or .job, sim."),
        (three, "keyword-only"),
        (taken, "sim_seed is taken"),
    ):
        with pytest.raises(LocalError, match=message):
            scenario()(function)


def test_run_gives_the_outcome_and_ranks_go_before_those_of_settings() -> None:
    decorated = scenario(ranks=2, settings=Settings(ranks=7, limit=50.0), script=lambda sim: None)(fine)
    assert decorated.sim_trial.ranks == 2
    outcome = decorated.run(seed=5)
    assert (outcome.seed, outcome.ok, outcome.results) == (5, True, (None, None))
    assert decorated.run(seed=5).digest == outcome.digest
    assert decorated.run(seed=6).digest != outcome.digest
