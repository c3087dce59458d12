"""Tests of processes without the time that processes take to import: they are forked from one that has imported all.

A worker of pytest, when it has collected its tests and run none, forks a process that waits: the store. A test that is
marked `warm` runs in a child of that process, as pytest runs it, and its reports come back. In such a child
`subprocess` starts programs of Python's by another fork instead of an exec. They are real processes, children of who
starts them, with a pid, signals, pipes, a session and an environment of their own; only the interpreter's start and the
imports are inherited, most of what a short program costs (torch with an optimizer 3 s of CPU, quicoll 0.6 s).

What a program finds is what it finds in an interpreter that has just started, except for the modules in memory: its
arguments, path, standard streams, warnings, signals, logging, exit handlers, seeds; no module of the tests. A command
that asks for what a fork cannot give (an option of the interpreter, a variable that it reads at its start, another
quicoll, a module `sitecustomize`) is started as ever, and so is all that is not this Python. `make deep` and other
systems than Linux start everything as ever.

Threads do not come along with a fork, and what they hold stays locked. So the store is forked before the first test;
the one thread that a worker then has, of xdist, waits for orders. Torch computes with one thread in all that is forked.

    worker of pytest -> store: the number of a test
    store -> worker of pytest: the process of that test; when it has ended, its status. Its reports are in a file
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import gc
import json
import logging
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from inspect import signature
from io import BufferedReader, BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, Literal, NoReturn

import pytest
from _pytest.runner import runtestprotocol
from depth import DEEP

import quicoll
import quicoll_transport

__all__ = ["Program", "Store", "is_warm"]

LOADED = [
    "quicoll.blocking",
    "quicoll.checkpoint",
    "quicoll.cli.app",
    "quicoll.membership.leadership",
    "quicoll.membership.serving",
    "quicoll.testing",
    "quicoll.train",
]
"""What every store imports, when it is first asked for a test."""
LOADED_FOR_TORCH = [
    "torch._dynamo",  # which the first optimizer imports
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "quicoll.torch",
    "quicoll.torch.parallel",
    "quicoll.torch_backend",
]
"""And for a test with the mark `warm("torch")`."""

# Of modules, what has no type outside of them.
_ATEXIT: Any = atexit
_EVENTS: Any = asyncio.events
_FINALIZE: Any = weakref.finalize
_POPEN: Any = subprocess.Popen
_THREADING: Any = threading
_UTIL: Any = multiprocessing.util
_executes = _POPEN._execute_child

_of_pytest: dict[int, int] = {}
"""Numbers of the files that the standard streams of pytest write to, and of the streams that they are in place of."""

READ_LATE = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"}
"""Of the variables for the interpreter those that are done here."""
READ_AT_START = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
"""What this interpreter has read of all others, which has to be the same."""
FLAGS = {"-P", "-u"}
TORCHS_FIRST_SEED = 67280421310721
ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(str(ROOT / folder) for folder in ("tests", "examples", "benchmarks"))
SOURCES = [Path(package.__file__ or "").resolve().parent for package in (quicoll, quicoll_transport)]


def is_warm(item: pytest.Item) -> bool:
    return sys.platform == "linux" and not DEEP and item.get_closest_marker("warm") is not None


class Store:
    """The process that tests are forked from, as the worker of pytest sees it."""

    def __init__(self, items: Sequence[pytest.Item]) -> None:
        """Fork it. items: the tests that it may be asked for."""
        self._at = {item.nodeid: number for number, item in enumerate(items)}
        self._directory = tempfile.TemporaryDirectory(prefix="quicoll-warm-")
        self._reports = Path(self._directory.name) / "reports.json"
        fresh()
        config: Any = items[0].config
        config._tmp_path_factory.getbasetemp()  # made here: a child that made it would first remove it
        self._orders, orders = socket.socketpair()
        self.pid = fork()
        if not self.pid:
            self._orders.close()
            keep_warm(orders, items, self._reports)
        orders.close()
        self._answers = self._orders.makefile("r")

    def run(self, item: pytest.Item, following: pytest.Item | None) -> list[pytest.TestReport]:
        """Have a test run; its reports. following: the next one, for which what others have made here is kept."""
        return [*self._reports_of(item), *parted(item, following)]

    def _reports_of(self, item: pytest.Item) -> list[pytest.TestReport]:
        pid = self.pid
        try:
            self._orders.sendall(b"%d\n" % self._at[item.nodeid])
            pid = int(self._answers.readline() or pid)
            ended = self._answers.readline().strip()
        except pytest.fail.Exception as error:  # the time is up
            os.kill(pid, signal.SIGABRT)  # it says where it is
            ended = f"{self._answers.readline().strip()}: {error}"
        except BrokenPipeError:
            ended = ""
        try:
            reports = json.loads(self._reports.read_text())
            self._reports.unlink()
        except FileNotFoundError:
            how = f"ended with {ended}" if ended else "is gone, and the process that it was forked from too"
            return [failed(item, "call", f"the process of this test left no report, and {how}")]
        read = item.config.hook.pytest_report_from_serializable
        return [read(config=item.config, data=with_tuples(each)) for each in reports]

    def close(self) -> None:
        self._answers.close()
        self._orders.close()
        os.waitpid(self.pid, 0)
        self._directory.cleanup()


def failed(item: pytest.Item, when: Literal["call", "teardown"], why: str) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", why, when)


def parted(item: pytest.Item, following: pytest.Item | None) -> list[pytest.TestReport]:
    """End the fixtures here that tests of this file have left, where the next test is of another one."""
    session: Any = item.session
    try:
        session._setupstate.teardown_exact(following)
    except Exception:
        return [failed(item, "teardown", traceback.format_exc())]
    return []


def with_tuples(report: dict[str, Any]) -> dict[str, Any]:
    """As it was before it was JSON, which has no tuples: where a test was skipped is one, by which pytest knows it."""
    where = report["longrepr"]
    return {**report, "longrepr": tuple(where) if isinstance(where, list) else where}


def fork() -> int:
    with warnings.catch_warnings():
        # That a thread may hold a lock. Those of a worker of pytest and of a test wait for something from outside.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid and "torch" in sys.modules:
        # A child makes torch's pool of threads anew when torch is first asked for something; two threads that ask
        # at once get an internal error.
        sys.modules["torch"].set_num_threads(1)
    return pid


def keep_warm(orders: socket.socket, items: Sequence[pytest.Item], reports: Path) -> NoReturn:
    """Fork a process for each number that comes, until no more can come."""
    ended = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; whoever gives the orders ends, and so does this
        with orders.makefile("rb") as lines:
            for line in lines:
                item = items[int(line)]
                load(item)
                pid = fork()
                if not pid:
                    orders.close()
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    run_here(item, reports)
                orders.sendall(b"%d\n" % pid)
                orders.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        ended = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(ended)


def load(item: pytest.Item) -> None:
    """Import what the test says, for it and all that come after it."""
    mark = item.get_closest_marker("warm")
    assert mark is not None
    for name in LOADED + (LOADED_FOR_TORCH if "torch" in mark.args and find_spec("torch") else []):
        if name not in sys.modules:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # threads for its operations would not come along
    gc.collect()
    gc.freeze()


def run_here(item: pytest.Item, reports: Path) -> NoReturn:
    """Run the test in this process, and leave its reports."""
    ended = 1
    try:
        _POPEN._execute_child = _execute_child
        find_streams(item.config)
        write = item.config.hook.pytest_report_to_serializable
        made = [write(config=item.config, report=each) for each in runtestprotocol(item, log=False)]
        draft = reports.with_suffix(".draft")
        draft.write_text(json.dumps(made))
        draft.rename(reports)
        ended = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(ended)


def find_streams(config: pytest.Config) -> None:
    """Where pytest listens, as it did while tests were imported: loggers that were made then still write there."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        with contextlib.suppress(OSError):  # some have no file
            _of_pytest.update({each: number for each in [stream.fileno()] if each > 2})
    capture.suspend_global_capture()


# -- programs ----------------------------------------------------------------------------------------------------------

_parameters = signature(_executes)


def _execute_child(popen: Any, *arguments: Any, **named: Any) -> None:
    """Start a program, in place of subprocess.Popen's method of this name."""
    call = _parameters.bind(popen, *arguments, **named).arguments
    program = Program.of(call)
    if program is None:
        _executes(popen, *arguments, **named)
        return
    begun, beginning = os.pipe()  # at its end the process is in its session and directory, as after an exec
    pid = fork()
    if not pid:
        program.run(call)
    os.close(beginning)
    os.read(begun, 1)
    os.close(begun)
    popen.pid = pid
    popen._child_created = True
    popen._close_pipe_fds(*(call[name] for name in PIPES))


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
NOT_ASKED: dict[str, Any] = {
    "close_fds": True,
    "creationflags": 0,
    "gid": None,
    "gids": None,
    "pass_fds": (),
    "preexec_fn": None,
    "process_group": -1,
    "shell": False,
    "startupinfo": None,
    "uid": None,
    "umask": -1,
}


@dataclass(frozen=True)
class Program:
    """A program of Python's.

    Attributes:
        kind: "-c", "-m" or "script".
        what: Code, the name of a module, or a file.
        arguments: Those of the program.
        flags: Of the interpreter.
        environment: All variables.
        directory: Where it begins.
    """

    kind: str
    what: str
    arguments: tuple[str, ...]
    flags: frozenset[str]
    environment: Mapping[str, str]
    directory: str

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> Program | None:
        """Return what these arguments of Popen start; None if a fork cannot be it."""
        if any(name in call and call[name] != value for name, value in NOT_ASKED.items()):
            return None
        words = call["args"]
        if isinstance(words, (str, bytes, os.PathLike)) or call["executable"] not in (None, sys.executable):
            return None
        own, *rest = [os.fsdecode(each) for each in words]
        flags = set()
        while rest and rest[0] in FLAGS:
            flags.add(rest.pop(0))
        if own != sys.executable or not rest:
            return None
        kind = rest.pop(0) if rest[0] in ("-c", "-m") else "script"
        if not rest or (kind == "script" and rest[0].startswith("-")):
            return None
        given = os.environ if call["env"] is None else call["env"]
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()}
        made = cls(
            kind, rest[0], tuple(rest[1:]), frozenset(flags), environment, os.fsdecode(call["cwd"] or os.getcwd())
        )
        return made if made._can_be_forked() else None

    def _can_be_forked(self) -> bool:
        named = {name: value for name, value in self.environment.items() if name.startswith("PYTHON")}
        if any(named.get(name) != READ_AT_START.get(name) for name in {*named, *READ_AT_START} - READ_LATE):
            return False
        if not os.path.isdir(self.directory) or (self.kind == "script" and not os.path.isfile(self._file())):
            return False
        path = [Path(each).resolve() for each in self.path() if each]
        if any((each / f"{name}customize.py").exists() for each in path for name in ("site", "user")):
            return False
        for source in SOURCES:
            found = (each / source.name for each in path if (each / source.name).is_dir())
            if next(found, None) != source:
                return False
        return True

    def _file(self) -> str:
        return os.path.join(self.directory, self.what)

    def path(self) -> list[str]:
        """Return its sys.path."""
        safe = "-P" in self.flags or self.environment.get("PYTHONSAFEPATH")
        first = {"-c": "", "-m": self.directory, "script": os.path.dirname(os.path.realpath(self._file()))}[self.kind]
        given = self.environment.get("PYTHONPATH", "")
        more = [os.path.join(self.directory, each) for each in given.split(os.pathsep)] if given else []
        return [*([] if safe else [first]), *more, *fresh().path]

    def run(self, call: Mapping[str, Any]) -> NoReturn:
        """Be this program, in a process that was just forked. Ends it."""
        ended = 1
        try:
            self._begin(call)
            ended = status_of(lambda: exec(self._code(), sys.modules["__main__"].__dict__))  # noqa: S102 - as it is told
        except BaseException:
            os.write(2, traceback.format_exc().encode())  # whatever has become of the streams
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(ended)

    def _begin(self, call: Mapping[str, Any]) -> None:
        faulthandler.disable()
        if call["start_new_session"]:
            os.setsid()
        for end, number in (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2)):
            if call[end] != -1:
                os.dup2(call[end], number)
        os.chdir(self.directory)
        forget_signals()
        close_files()  # the last thing that who started it waits for
        os.environ.clear()
        os.environ.update(self.environment)
        forget_what_runs()
        unbuffered = "-u" in self.flags or bool(self.environment.get("PYTHONUNBUFFERED"))
        open_streams(unbuffered=unbuffered)
        sys.dont_write_bytecode = bool(self.environment.get("PYTHONDONTWRITEBYTECODE"))
        sys.path[:] = self.path()
        sys.argv[:] = [{"-c": "-c", "-m": "-m", "script": self.what}[self.kind], *self.arguments]
        sys.modules["__main__"] = types.ModuleType("__main__")

    def _code(self) -> Any:
        """The program, compiled; __main__ is told where it is from."""
        here = sys.modules["__main__"]
        if self.kind == "-c":
            return compile(self.what, "<string>", "exec", dont_inherit=True)
        if self.kind == "script":
            here.__file__ = self._file()
            return compile(Path(here.__file__).read_bytes(), here.__file__, "exec", dont_inherit=True)
        spec = spec_of(self.what)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = spec_of(f"{self.what}.__main__")
        if spec is None or spec.loader is None:
            raise SystemExit(f"{sys.executable}: No module named {self.what}")
        here.__spec__, here.__file__, here.__package__ = spec, spec.origin, spec.parent
        sys.argv[0] = spec.origin or self.what
        loader: Any = spec.loader
        return loader.get_code(spec.name)


def spec_of(module: str) -> ModuleSpec | None:
    """Where a module is found, and not by whom it was loaded: pytest's loader changes what it loads."""
    parent = module.rpartition(".")[0]
    return PathFinder.find_spec(module, import_module(parent).__path__ if parent else None)


def status_of(program: Callable[[], object]) -> int:
    """Run a program to the end of its interpreter; its exit status."""
    status = 0
    try:
        program()
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        status = 0 if ended.code is None else ended.code & 0xFF if isinstance(ended.code, int) else 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _THREADING._shutdown()
    _ATEXIT._run_exitfuncs()
    if status == -signal.SIGINT:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status


def close_files() -> None:
    """All but the standard ones. Modules may have kept the streams of pytest, which from now on lead to those."""
    for fileno, standard in _of_pytest.items():
        os.dup2(standard, fileno, inheritable=False)
    begin = 3
    for fileno in [*sorted(_of_pytest), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(begin, fileno)
        begin = fileno + 1


def forget_signals() -> None:
    """Whoever handles one here does so no more; one that is ignored stays so, as after an exec."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def forget_what_runs() -> None:
    """Leave the loop, the exit handlers, the warnings and the log of who was forked, and all modules of the tests."""
    gc.freeze()  # no file or socket of who was forked may ever be closed here: its number may be another's by then
    _EVENTS._set_running_loop(None)
    asyncio.set_event_loop(None)
    _ATEXIT._clear()
    _FINALIZE._registry.clear()
    _FINALIZE._registered_with_atexit = False
    _UTIL._finalizer_registry.clear()
    atexit.register(_UTIL._exit_function)
    atexit.register(logging.shutdown)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    warnings.resetwarnings()
    rules: Any = warnings.filters
    rules[:] = [("default", None, DeprecationWarning, "__main__", 0)] + [
        ("ignore", None, category, None, 0)
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
    ]
    sys.meta_path[:] = [each for each in sys.meta_path if not type(each).__module__.startswith("_pytest")]
    for name in list(outsiders(sys.modules)):
        del sys.modules[name]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(TORCHS_FIRST_SEED)


def outsiders(modules: Mapping[str, Any]) -> Iterator[str]:
    """The modules that neither the standard library nor a package that is installed has, nor quicoll: the tests'."""
    homes = (*fresh().path, *map(str, SOURCES))
    for name, module in modules.items():
        where = getattr(module, "__file__", None)
        if where is None or name.endswith("__mypyc"):  # the library of the compiled modules is beside their packages
            continue
        if where.startswith(OURS) or not where.startswith(homes):
            yield name


@dataclass(frozen=True)
class Fresh:
    """What an interpreter has at its start, without any script, directory and variable of its own.

    Attributes:
        path: sys.path.
        encoding: Of the standard streams.
        errors: What these do where a character is none.
    """

    path: tuple[str, ...]
    encoding: str
    errors: str


@lru_cache(maxsize=1)
def fresh() -> Fresh:
    code = "import json, sys; print(json.dumps([sys.path, sys.stdout.encoding, sys.stdout.errors]))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, check=True).stdout
    path, encoding, errors = json.loads(said)
    return Fresh(tuple(path), encoding, errors)


def open_streams(*, unbuffered: bool) -> None:
    """As the interpreter opens them at its start."""
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        raw: Any = FileIO(number, "r" if number == 0 else "w", closefd=False)
        if number == 0:
            raw = BufferedReader(raw)
        elif not unbuffered:
            raw = BufferedWriter(raw)
        made = TextIOWrapper(
            raw,
            encoding=fresh().encoding,
            errors="backslashreplace" if number == 2 else fresh().errors,
            line_buffering=not unbuffered and (number == 2 or os.isatty(number)),
            write_through=unbuffered,
        )
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
