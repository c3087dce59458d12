"""Torch's own tests of a backend, one pass: `torch_suite_pass.py BACKEND HOW WORLD RESULTS [NAME...]`; no names: all.

The tests come with torch, as `DistributedTest._DistTestBase`, for backends that torch knows by name. By the name, too,
it is decided which of them are run, when the module is imported; so here it is imported for Gloo, whatever runs it:

    asked    those that torch runs for Gloo on a machine without GPUs
    all      every one: nothing is skipped, whatever it is for, and where one asks for a GPU it gets the CPU
    rpc      others than these: DDP beside torch's RPC and its distributed autograd, with numbers of ranks of their own

After the import the name is that of the backend again, and is equal to Gloo's where a test's body compares the two.
`dist.monitored_barrier` would refuse every other backend by its name, so the tests call the group's own.

Each test has ranks of its own, forked from this process, which has imported everything and started no thread. A line of
JSON is written for each test when it ends, so what is known stays known if this process does not come to its end.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch.multiprocessing
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed, common_utils

__all__ = ["main"]

LENDER = "gloo"
FORKED: Any = torch.multiprocessing.get_context("fork").Process
MEETING_S = 120  # torch's own 10 s for all ranks of a test to begin or to end are few on a busy machine
# Those of torch's tests of RPC that make a process group.
WITH_A_GROUP = [
    "test_deadlock",
    "test_dynamic_and_static_init_rpc_together",
    "test_init_pg_then_rpc",
    "test_init_rpc_then_pg",
    "test_pg_init_no_rpc_init",
]


class Lent(str):
    """The name of a backend that is equal to the lender's too."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == LENDER

    def __ne__(self, other: object) -> bool:
        return not self == other


def suite(backend: str, how: str, world: int, place: Path) -> dict[str, Any]:
    """Import torch's tests as one for Gloo, for another backend; by their names, the classes that they are in."""
    if how == "rpc":
        return beside_rpc(backend)
    (place / "barrier").mkdir()
    os.environ |= {
        "BACKEND": LENDER,
        "WORLD_SIZE": str(world),
        "TEMP_DIR": str(place),
        "INIT_METHOD": f"file://{place}/met",
    }
    with nothing_skipped(world) if how == "all" else contextlib.nullcontext():
        module: Any = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    os.environ["BACKEND"] = backend
    common_distributed.TIMEOUT_OVERRIDE.clear()  # a test that hangs on Gloo is asked of nobody
    module.BACKEND = Lent(backend)
    module.dist.monitored_barrier = monitored_barrier
    base: Any = module.TestDistBackend

    def start(self: Any) -> None:
        base.setUp(self)
        self._start_processes(FORKED)

    def meet(self: Any, **named: Any) -> None:
        module.Barrier.sync(**{"timeout": MEETING_S, **named})

    def run_test(self: Any, *given: Any) -> None:
        with on_the_cpu() if how == "all" else contextlib.nullcontext():
            base.run_test(self, *given)

    body = {"setUp": start, "_barrier": meet, "run_test": run_test}
    return named(type("TorchSuite", (base, module.DistributedTest._DistTestBase), body))


def named(tests: Any) -> dict[str, Any]:
    return dict.fromkeys(unittest.defaultTestLoader.getTestCaseNames(tests), tests)


def beside_rpc(backend: str) -> dict[str, Any]:
    """All that make a process group beside RPC. They ask for "gloo" in their bodies."""
    internal = "torch.testing._internal.distributed"
    fixture: Any = importlib.import_module(f"{internal}.rpc.tensorpipe_rpc_agent_test_fixture")
    ddp: Any = importlib.import_module(f"{internal}.ddp_under_dist_autograd_test")
    rpc: Any = importlib.import_module(f"{internal}.rpc.rpc_test")
    init: Any = torch.distributed.init_process_group
    process: Any = common_distributed.MultiProcessTestCase

    def start(self: Any) -> None:
        process.setUp(self)
        self._start_processes(FORKED)

    def run_test(self: Any, *given: Any) -> None:
        def over(**named: Any) -> None:
            init(**{**named, "backend": backend})

        with mock.patch.object(torch.distributed, "init_process_group", over):
            process.run_test(self, *given)

    body = {"setUp": start, "run_test": run_test}
    found: dict[str, Any] = {}
    for tests in (ddp.DdpUnderDistAutogradTest, ddp.DdpComparisonTest, rpc.RpcTest, rpc.TensorPipeAgentRpcTest):
        made = type(tests.__name__, (fixture.TensorPipeRpcAgentTestFixture, tests, process), body)
        found |= {name: made for name in named(made) if tests.__module__ == ddp.__name__ or name in WITH_A_GROUP}
    return found


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """torch's, without the question for the backend's name."""
    if group is not torch.distributed.GroupMember.NON_GROUP_MEMBER:
        limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
        (group or torch.distributed.group.WORLD).monitored_barrier(limit, wait_all_ranks=wait_all_ranks)


# -- the pass of all tests -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing_skipped(world: int) -> Iterator[None]:
    """Whatever is decorated in this context is not skipped, for no reason."""

    def kept(function: Any) -> Any:
        return functools.wraps(function)(lambda *given, **named: function(*given, **named))  # they look into what wraps

    def keeps(*_: Any, **__: Any) -> Any:
        return kept

    decorators = {
        common_distributed: [
            "nccl_skip_if_lt_x_gpu",
            "require_n_gpus_for_nccl_backend",
            "requires_nccl_version",
            "skip_if_lt_x_gpu",
        ],
        common_utils: ["skip_but_pass_in_sandcastle", "skip_but_pass_in_sandcastle_if"],
        unittest: ["skip", "skipIf", "skipUnless"],
    }
    plain = ["skip_if_no_gpu", "skip_if_odd_worldsize", "skip_if_rocm_multiprocess", "skip_if_small_worldsize"]
    with contextlib.ExitStack() as patches:
        for module, names in decorators.items():
            for name in names:
                patches.enter_context(mock.patch.object(module, name, keeps))
        for name in plain:
            patches.enter_context(mock.patch.object(common_distributed, name, kept))
        gpus = {rank: [rank] for rank in range(world)}
        patches.enter_context(mock.patch.object(common_distributed, "init_multigpu_helper", return_value=gpus))
        yield


class OnTheCpu(TorchFunctionMode):
    """The CPU wherever a GPU is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(moved, args[1:]))
        named = dict(kwargs or {})
        if named.get("device") is not None:
            named["device"] = "cpu"
        return func(*args, **named)


def moved(where: Any) -> Any:
    """The CPU, if this is a device."""
    return "cpu" if type(where) in (int, str, torch.device) else where


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Run a test for GPUs on the CPU, as far as that goes."""
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    made, to = ddp.__init__, torch.nn.Module.to

    def make(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *a: Any, **named: Any) -> None:
        made(self, module, None, None, *a, **named)

    def move(self: Any, *where: Any, **named: Any) -> Any:
        return to(self, *map(moved, where), **named)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(ddp, "__init__", make))
        patches.enter_context(mock.patch.object(torch.nn.Module, "to", move))
        for name, gives in (("set_device", None), ("synchronize", None), ("_sleep", None), ("current_device", 0)):
            patches.enter_context(mock.patch.object(torch.cuda, name, lambda *_, gives=gives, **__: gives))
        patches.enter_context(OnTheCpu())
        yield


# -- the tests -------------------------------------------------------------------------------------------------------


def run(tests: Any, name: str) -> dict[str, Any]:
    """Run a test; how it ended."""
    found: dict[str, Any] = {"test": name}
    method = getattr(tests, name)
    if getattr(method, "__unittest_skip__", False):
        return found | {"ended": "skipped", "why": method.__unittest_skip_why__}
    result, began = unittest.TestResult(), time.monotonic()
    tests(name).run(result)
    seconds = round(time.monotonic() - began, 1)
    if result.skipped:
        return found | {"ended": "skipped", "seconds": seconds, "why": result.skipped[0][1]}
    failed = result.failures + result.errors
    if failed:
        return found | {"ended": "failed", "seconds": seconds, "why": failed[0][1]}
    return found | {"ended": "passed", "seconds": seconds}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="torch-suite-pass-") as place:
        tempfile.tempdir = place  # torch's tests leave files behind
        run_all(*sys.argv[1:5], Path(place), sys.argv[5:])


def run_all(backend: str, how: str, world: str, results: str, place: Path, names: Sequence[str]) -> None:
    tests = suite(backend, how, int(world), place)
    if backend == "quicoll":
        importlib.import_module("quicoll.torch_backend")  # where it is not installed
        importlib.import_module("quicoll.torch_backend.process_group")  # once, not by each rank of each test
    with open(results, "a") as out:
        for name in names or tests:
            print(f"== {name}", flush=True)  # noqa: T201 - in front of what the ranks of this test say
            out.write(json.dumps(run(tests[name], name)) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
