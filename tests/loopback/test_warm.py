"""What is forked (tests/helpers/warm.py) is what it would be if it were started: each is compared with the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from depth import DEEP
from warm import Program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.warm,
    pytest.mark.skipif(DEEP or sys.platform != "linux", reason="everything is started as ever"),
]

ROOT = Path(__file__).parents[2]
STARTED = "-B"
"""An option of the interpreter's, with which a program is not forked; no program here writes bytecode."""

# What there is, and what the environment and the command decide.
LOOK = """
import asyncio, json, logging, os, signal, sys, threading, warnings

try:
    import torch_processes
    helpers = "found"
except ImportError:
    helpers = "none"
def files_of(numbers):
    found = set()
    for each in numbers:
        try:
            found.add(os.readlink(f"/proc/self/fd/{each}"))
        except FileNotFoundError:
            pass  # it was the directory's
    return found

files = files_of(os.listdir("/proc/self/fd"))
streams = [sys.stdin, sys.stdout, sys.stderr]
found = {
    "argv": sys.argv,
    "path": sys.path,
    "environment": dict(os.environ),
    "directory": os.getcwd(),
    "streams": [
        [each.fileno(), each.encoding, each.errors, each.line_buffering, each.write_through] for each in streams
    ],
    "the same": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "signals": [str(signal.getsignal(each)) for each in sorted(signal.valid_signals()) if each != signal.SIGINT],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "filters": [[str(each) for each in rule] for rule in warnings.filters if rule[1] is None],
    "handlers": [str(each) for each in logging.root.handlers],
    "threads": len(threading.enumerate()),
    "main": threading.current_thread() is threading.main_thread(),
    "session": os.getsid(0) == os.getpid(),
    "parent": os.getppid(),
    "name": __name__,
    "file": globals().get("__file__"),
    "package": __package__,
    "helpers": helpers,
    "of pytest": [type(each).__module__ for each in sys.meta_path if "pytest" in type(each).__module__],
    "other files": sorted(each for each in files - files_of([0, 1, 2]) if not each.startswith("/proc/")),
    "hooks": [sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__],
}
forked = "pytest" in sys.modules
asyncio.run(asyncio.sleep(0))
print(json.dumps([forked, found]))
"""


def both(*words: str, **options: Any) -> list[subprocess.CompletedProcess[str]]:
    """Run a program forked, and then as ever."""
    return [
        subprocess.run([sys.executable, *how, *words], capture_output=True, text=True, check=False, **options)
        for how in ([], [STARTED])
    ]


def looked(*words: str, **options: Any) -> None:
    seen = []
    for done, forked in zip(both(*words, **options), (True, False), strict=True):
        assert done.returncode == 0, done.stderr
        was_forked, found = json.loads(done.stdout)
        assert was_forked == forked
        seen.append(found)
    here, there = seen
    assert {name: here[name] for name in here if here[name] != there[name]} == {
        name: there[name] for name in there if here[name] != there[name]
    }


@pytest.mark.parametrize("more", [{}, {"PYTHONUNBUFFERED": "1"}, {"OF": "mine", "PYTHONSAFEPATH": "1"}], ids=list)
def test_a_program_finds_what_it_finds_in_an_interpreter_that_has_just_started(
    more: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    (tmp_path / "look.py").write_text(LOOK)
    path = os.environ.get("PYTHONPATH") or os.pathsep.join([str(ROOT), str(ROOT / "transport")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([path, str(tmp_path)]), **more}
    options = {"env": environment, "cwd": tmp_path, "stdin": subprocess.DEVNULL}
    looked("look.py", "one", "-two", **options)
    looked(str(tmp_path / "look.py"), **options, start_new_session=True)
    looked("-c", LOOK, "one", **options)
    looked("-m", "look", "one", **options)


ENDS = {
    "of itself": "print('said')",
    "a status": "import sys; sys.exit(3)",
    "words": "import sys; sys.exit('words')",
    "an error": "print('said'); 1 / 0",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(100)",
    "killed": "import os, signal; print('said', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "threads": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
    "handlers": "import atexit; atexit.register(print, 'first'); atexit.register(print, 'second')",
    "a warning": "import warnings; warnings.warn('look here')",
    "a log": "import logging; logging.getLogger('some').warning('look here'); logging.info('not here')",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_program_ends_as_it_would(how: str) -> None:
    forked, started = both("-c", ENDS[how])
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


def test_what_a_program_says_is_its_own_where_pytest_listens_too(capsys: pytest.CaptureFixture[str]) -> None:
    forked, _ = both("-c", "print('said')")
    subprocess.run([sys.executable, "-c", "print('to the file of this process')"], check=True)
    assert (forked.stdout, capsys.readouterr().out) == ("said\n", "")


def test_its_first_random_numbers_are_nobody_elses() -> None:
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    said = {number for _ in range(2) for done in both("-c", code) for number in done.stdout.split()}
    assert len(said) == 8


def test_what_it_starts_is_forked_as_well() -> None:
    inner = "import os, sys; print('pytest' in sys.modules, os.getppid())"
    outer = f"import os, subprocess, sys; print(os.getpid()); subprocess.run([sys.executable, '-c', {inner!r}])"
    forked, started = both("-c", outer)
    for done, so in ((forked, "True"), (started, "False")):
        assert sorted(done.stdout.split()) == sorted([done.stdout.split()[0]] * 2 + [so]), done.stdout


# Begun at once, as the ranks of a cluster in one process do; torch then makes what a fork has left it without.
THREADS = """
import sys, threading, torch

begin, sums = threading.Barrier(4), []

def sort():
    begin.wait()
    sums.append(torch.sort(torch.ones(2000, 64), dim=1, descending=True, stable=True).values.sum().item())

threads = [threading.Thread(target=sort) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("pytest" in sys.modules, sums)
"""


@pytest.mark.warm("torch")
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_torch_computes_in_several_threads_of_a_program() -> None:
    for done, forked in zip(both("-c", THREADS), ("True", "False"), strict=True):
        assert (done.stdout, done.stderr) == (f"{forked} {[128000.0] * 4}\n", "")


def call(*words: str, **others: Any) -> dict[str, Any]:
    return {"args": [sys.executable, *words], "executable": None, "env": None, "cwd": None, **others}


def test_what_a_fork_cannot_be_is_started(tmp_path: Path) -> None:
    assert Program.of(call("-c", "pass")) is not None
    assert Program.of(call("-u", "-P", "-m", "json.tool")) is not None
    for words in (["-W", "error", "-c", "pass"], ["-I", "-c", "pass"], [], ["-c"], ["absent.py"]):
        assert Program.of(call(*words)) is None, words
    (tmp_path / "sitecustomize.py").touch()
    (tmp_path / "other" / "quicoll").mkdir(parents=True)
    for more in ({"PYTHONHASHSEED": "7"}, {"PYTHONPATH": str(tmp_path)}, {"PYTHONPATH": str(tmp_path / "other")}):
        assert Program.of(call("-c", "pass", env={**os.environ, **more})) is None, more
    for others in ({"shell": True}, {"pass_fds": (7,)}, {"preexec_fn": print}, {"cwd": tmp_path / "none"}):
        assert Program.of(call("-c", "pass", **others)) is None, others
    assert Program.of({**call("-c", "pass"), "args": ["/bin/true", "-c", "pass"]}) is None


CONFTEST = f"""
import importlib.util, sys
sys.path.insert(0, {str(ROOT / "tests" / "helpers")!r})
spec = importlib.util.spec_from_file_location("of_quicoll", {str(ROOT / "tests" / "conftest.py")!r})
found = importlib.util.module_from_spec(spec)
spec.loader.exec_module(found)
pytest_runtestloop, pytest_runtest_protocol = found.pytest_runtestloop, found.pytest_runtest_protocol
pytest_unconfigure = found.pytest_unconfigure

def pytest_configure(config):
    config.addinivalue_line("markers", "warm: as in quicoll's tests")
"""

TESTS = """
import logging, os, signal, subprocess, sys, time
import pytest

pytestmark = pytest.mark.warm
worker = os.getpid()
logging.getLogger("early").addHandler(logging.StreamHandler())  # to what pytest has there now

def test_a_logger_that_was_made_before_writes_to_the_program_s_own_stream():
    code = "import logging, os; os.pipe(); logging.getLogger('early').warning('from there')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "from there\\n"

def test_passes(tmp_path, capsys):
    print("said")
    assert capsys.readouterr().out == "said\\n"
    assert os.getpid() != worker

def test_fails(): assert 1 + 1 == len("three")
def test_is_skipped(): pytest.skip("because of this")
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.timeout(1)
def test_hangs(): time.sleep(600)
def test_passes_too(): pass
"""


AMONG = """
import os
import pytest

ended = []

@pytest.fixture(scope="module")
def made():
    yield os.getpid()
    ended.append(os.getpid())
    assert len(ended) == 1

def test_one(made): assert made == os.getpid()
@pytest.mark.warm
def test_forked(made): assert made == os.getpid()
def test_other(made): assert made == os.getpid() and not ended
@pytest.mark.warm
def test_forked_last(made): assert made == os.getpid()
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_test_that_fails_dies_or_hangs_is_a_failure_and_the_next_one_is_run(
    workers: list[str], pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_among=AMONG, test_last="def test_here(): pass", test_ways=TESTS)
    command = [
        sys.executable,
        STARTED,
        "-m",
        "pytest",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir=.",
    ]
    done = subprocess.run([*command, *workers], cwd=pytester.path, capture_output=True, text=True, check=False)
    assert "3 failed, 8 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "assert (1 + 1) == 5" in done.stdout
    assert "because of this" in done.stdout
    assert f"left no report, and ended with {-signal.SIGKILL}" in done.stdout
    assert f"left no report, and ended with {-signal.SIGABRT}: Timeout" in done.stdout
