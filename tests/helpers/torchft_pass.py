"""torchft's own tests, one pass: `torchft_pass.py BACKEND RESULTS [NAME...]`; no names: all of MODULES.

torchft ships them in its package. They name the class of the group that they make, `ProcessGroupGloo` or
`ProcessGroupBabyGloo`, and for a group of torch's the backend "gloo"; where quicoll is asked, these names stand for its
own (examples/torchft_groups.py) in the modules of the tests, and nothing else of torchft's is touched.

The tests of a class are run in a process, forked from this one, which has imported everything and started no thread. A
line of JSON is written for each test when it ends: how, and how many groups were made for it. A process that goes
silent is killed.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed
import torch.multiprocessing

__all__ = ["main"]

MODULES = [
    "process_group_test",
    "reconfigure_test",
    "manager_integ_test",
    "local_sgd_integ_test",
    "parameter_server_test",
]
LENDER = "gloo"
NEEDS_S = {"gloo": 100, "quicoll": 300}
"""For each test. What Gloo does not do in so much less time, it is not said to pass."""
NATIVE = timedelta(seconds=60)  # for a group of torch's, which are given none
PATIENCE = 10
"""The tests give a sound group a second or ten for what takes long on a busy machine; it gets so many times as much."""
NEVER = timedelta(0)

_made = 0  # groups, in this process


def counted(make: Callable[..., Any]) -> Callable[..., Any]:
    """Note each call of what makes groups; and be patient, where it is not a time that is to run out."""

    def made(*given: Any, **named: Any) -> Any:
        global _made
        _made += 1
        if named.get("timeout", NEVER) >= timedelta(seconds=1):
            named["timeout"] *= PATIENCE
        group = make(*given, **named)
        if "Baby" in type(group).__name__:  # its timeout is for its process to be started, too
            give = group.set_timeout
            group.set_timeout = lambda within: give(within * PATIENCE if within >= timedelta(seconds=10) else within)
        return group

    return made


def lend(module: Any, backend: str) -> None:
    """Let the names of groups in a module of tests stand for those of a backend."""
    groups: Any = None if backend == LENDER else importlib.import_module("torchft_groups")
    for name in ("ProcessGroupGloo", "ProcessGroupBabyGloo"):
        if hasattr(module, name):
            theirs = getattr(module, name)
            setattr(module, name, counted(getattr(groups, name.replace("Gloo", "Quicoll")) if groups else theirs))
    if hasattr(module, "dist"):
        module.dist = lent(torch.distributed, native(backend))
    if hasattr(module, "mp"):
        spawn = torch.multiprocessing.spawn

        def start(work: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> Any:
            return spawn(over, args=(backend, work, args), nprocs=nprocs)

        module.mp = lent(torch.multiprocessing, {"spawn": counted(start)})


def lent(module: Any, others: dict[str, Any]) -> Any:
    """A module with some other names."""
    return SimpleNamespace(**{**vars(module), **others})


def native(backend: str) -> dict[str, Any]:
    """torch's own class of a group, and Gloo in it; or one group over quicoll in their place."""
    if backend == LENDER:
        return {"ProcessGroupGloo": counted(torch.distributed.ProcessGroupGloo)}
    group_at: Any = counted(importlib.import_module("quicoll.torch_backend").group_at)

    class Shape:
        BackendType = torch.distributed.ProcessGroup.BackendType
        reconfigure = None  # the tests ask whether there is one

        def __new__(cls, store: Any, rank: int, size: int) -> Any:
            group = group_at(store, rank, size, timeout=NATIVE, enable_reconfigure=True)
            group._set_default_backend = group._register_backend = lambda *_: None
            return group

    return {"ProcessGroup": Shape, "ProcessGroupGloo": lambda *_, **__: None}


def over(rank: int, backend: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    """In a process that a test has started: what it was started for."""
    if backend != LENDER:
        importlib.import_module("quicoll.torch_backend")  # where it is not installed
    work(rank, *(backend if each == LENDER else each for each in args))


def each_test(tests: Any) -> Iterator[unittest.TestCase]:
    for test in tests:
        if isinstance(test, unittest.TestSuite):
            yield from each_test(test)
        else:
            yield test


class Told(unittest.TestResult):
    """Says of each test how it ended, when it ends."""

    def __init__(self, sink: Any) -> None:
        super().__init__()
        self._sink = sink
        self._before: tuple[int, int, float] = (0, 0, 0.0)
        self._shared: int | None = None  # groups of the class

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        print(f"== {test.id()}", flush=True)  # noqa: T201 - in front of what the test says
        if self._shared is None:
            self._shared = _made
        self._before = len(self.skipped), len(self.failures + self.errors), time.monotonic()
        self._made = _made

    def stopTest(self, test: unittest.TestCase) -> None:
        skipped, failed, began = self._before
        why = (self.failures + self.errors)[failed:] or self.skipped[skipped:]
        ended = "failed" if len(self.failures + self.errors) > failed else "skipped" if why else "passed"
        self.tell(test, ended, why[0][1] if why else "", time.monotonic() - began, _made - self._made)
        super().stopTest(test)

    def tell(self, test: unittest.TestCase, ended: str, why: str, seconds: float = 0.0, made: int = 0) -> None:
        groups = made + (self._shared or 0)
        found = {"test": test.id(), "ended": ended, "seconds": round(seconds, 1), "groups": groups}
        self._sink.send({**found, "why": why} if why else found)


def run(tests: Sequence[unittest.TestCase], sink: Any) -> None:
    """In a process of its own: run the tests of a class."""
    os.setsid()
    result = Told(sink)
    unittest.TestSuite(tests).run(result)
    if result.testsRun == 0:  # what they share could not be made
        for test in tests:
            result.tell(test, "failed", result.errors[0][1], made=_made)
    sys.stdout.flush()
    os._exit(0)  # a thread of a test may not end


def judge(tests: Sequence[unittest.TestCase], within: float) -> Iterator[dict[str, Any]]:
    """Run the tests of a class in a process; how they ended."""
    context = multiprocessing.get_context("fork")
    source, sink = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(tests, sink))
    process.start()
    sink.close()
    left = {test.id() for test in tests}
    why = f"nothing has ended within {within:g} s"
    try:
        while source.poll(within):
            found = source.recv()
            left.discard(found["test"])
            yield found
    except EOFError:
        why = "its process ended before it"
    try:
        os.killpg(process.pid or 0, signal.SIGKILL)  # with whatever it has left behind
    except ProcessLookupError:
        pass
    process.join()
    yield from ({"test": test.id(), "ended": "failed", "why": why} for test in tests if test.id() in left)


def main() -> None:
    backend, results, *names = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    run_all(backend, results, names)


def run_all(backend: str, results: str, names: Sequence[str]) -> None:
    if backend != LENDER:
        importlib.import_module("quicoll.torch_backend.process_group")  # once, not by each test
    classes: dict[str, list[unittest.TestCase]] = {}
    lend(importlib.import_module("torchft._test.diloco_trainer"), backend)
    for name in MODULES:
        module = importlib.import_module(f"torchft.{name}")
        lend(module, backend)
        for test in each_test(unittest.defaultTestLoader.loadTestsFromModule(module)):
            if type(test).__module__ == module.__name__ and (not names or test.id() in names):
                classes.setdefault(f"{name}.{type(test).__name__}", []).append(test)
    with open(results, "a") as out:
        for tests in classes.values():
            for found in judge(tests, NEEDS_S[backend]):
                out.write(json.dumps(found) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
