"""What a small call costs its caller's thread until the handle exists: checks, the operation, the way to the engine.

    python benchmarks/caller.py [--calls 2000] [--only numpy]

Real groups, contexts and threads, and an engine that sends nothing: it ends each operation in the next turn of its
loop, and hands that out in the middle of the turn, as it does with what a peer's packet ends.
CPU time of the caller's thread, by the clock of that thread: another thread that holds the interpreter's lock, or
another process on the processor, does not count. "alone": each is waited for before the next is called, so that the
engine's thread has run between and has to be asked again. "in a row": a call's part of eight that are waited for after
the last.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from quicoll import blocking
from quicoll.collectives.context import CallContext
from quicoll.collectives.group import Group
from quicoll.engine.runtime import ThreadRuntime
from quicoll.membership.view import Member, View

_WARM = 300
_ROW = 8


class _Nothing:
    """Sends nothing."""

    def gather(self) -> None:
        """As of an endpoint."""

    def send_gathered(self) -> None:
        """As of an endpoint."""


class _Engine:
    """Ends what it begins. runtime: whose loop it is on."""

    endpoint = _Nothing()

    def __init__(self, runtime: ThreadRuntime) -> None:
        self._runtime = runtime

    def near(self, view_id: int) -> None:
        """The two ranks share no host."""

    def collective(self, view_id: int, call: object, ended: Callable[..., None], **how: Any) -> None:
        self._runtime.loop.call_soon(self._arrived, ended)

    def _arrived(self, ended: Callable[..., None]) -> None:
        ended(0, None)
        self._runtime.hand_out()


@dataclass(frozen=True)
class Case:
    """call: gives a handle. loop: whether it is for a thread with an event loop."""

    name: str
    call: Callable[[], Any]
    loop: bool = True


def cases(group: Group) -> list[Case]:
    """Make all calls that are measured."""
    one, out, ten = np.ones(1, np.float32), np.ones(1, np.float32), [np.ones(1, np.float32) for _ in range(10)]
    eight, shards = [np.ones(1024, np.float32) for _ in range(8)], group.shards(16)
    waiting = blocking.Group(group)
    found = [
        Case("numpy", lambda: group.all_reduce(one)),
        Case("numpy, out=", lambda: group.all_reduce(one, out=out)),
        Case("numpy, list of 10", lambda: group.all_reduce(ten)),
        Case("numpy, 8 of 4 KiB", lambda: group.all_reduce(eight)),
        Case("numpy, 8 leaves", lambda: group.all_reduce(shards.leaves(eight))),
        Case("barrier", lambda: group.barrier()),
        Case("numpy, blocking", lambda: waiting.all_reduce(one, async_op=True), loop=False),
    ]
    try:
        import torch
        import torch.distributed as dist

        from quicoll.torch_backend.process_group import Described
        from quicoll.torch_backend.reconfiguration import Reconfigurable
    except ModuleNotFoundError:
        return found
    torch.set_num_threads(1)
    tensor, place, tensors = torch.ones(1), torch.ones(1), [torch.ones(1) for _ in range(10)]
    larger = [torch.ones(1024) for _ in range(8)]

    def made(self: Any) -> None:
        dist.ProcessGroup.__init__(self, 0, 1)
        self.begin_methods(group.for_threads(), timeout=30.0, engine_thread=lambda: False)

    process_group = type("Measured", (Described, Reconfigurable, dist.ProcessGroup), {"__init__": made})()
    options = dist.AllreduceOptions()
    return [
        *found,
        Case("torch", lambda: group.all_reduce(tensor)),
        Case("torch, out=", lambda: group.all_reduce(tensor, out=place)),
        Case("torch, list of 10", lambda: group.all_reduce(tensors)),
        Case("torch, 8 of 4 KiB", lambda: group.all_reduce(larger)),
        Case("torch, 8 leaves", lambda: group.all_reduce(shards.leaves(larger))),
        Case("torch, blocking", lambda: waiting.all_reduce(tensor, async_op=True), loop=False),
        Case("torch backend", lambda: process_group.allreduce([tensor], options), loop=False),
        Case("dist.all_reduce", lambda: dist.all_reduce(tensor, group=process_group, async_op=True), loop=False),
    ]


async def awaited(call: Callable[[], Any], calls: int, row: int) -> list[float]:
    """Return what each call took that was made on an event loop."""
    took: list[float] = []
    for _ in range((_WARM + calls) // row):
        began = time.thread_time()
        handles = [call() for _ in range(row)]
        took.append((time.thread_time() - began) / row)
        for handle in handles:
            await handle
        del handles, handle
    return took[_WARM // row :]


def waited(call: Callable[[], Any], calls: int, row: int) -> list[float]:
    """Return what each call took that was made on a thread without one."""
    took: list[float] = []
    for _ in range((_WARM + calls) // row):
        began = time.thread_time()
        handles = [call() for _ in range(row)]
        took.append((time.thread_time() - began) / row)
        for handle in handles:
            handle.wait()
        del handles, handle
    return took[_WARM // row :]


async def measure(calls: int, only: str) -> None:
    """Measure and print."""
    members = tuple(Member(rank=rank, node=name, incarnation=1) for rank, name in enumerate("ab"))
    view = View(view_id=1, members=members, seed=bytes(32), committed_step=0, committed_view=0)
    settings: Any = SimpleNamespace(node="b", timeout=30.0, chunk_bytes=1 << 20)
    runtime = ThreadRuntime("benchmark")
    engine: Any = _Engine(runtime)
    for case in cases(Group(CallContext(settings, engine, runtime, view))):
        if only not in case.name:
            continue
        shown: list[str] = []
        for row in (1, _ROW):
            if case.loop:
                took = await awaited(case.call, calls, row)
            else:
                took = await asyncio.to_thread(waited, case.call, calls, row)
            tenth, median = statistics.quantiles(took, n=10)[0], statistics.median(took)
            shown.append(f"{median * 1e6:6.1f} ({tenth * 1e6:5.1f})")
        print(f"  {case.name:18} {shown[0]:>18} {shown[1]:>18}")
    await runtime.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    given = parser.parse_args()
    print(f"a call of 4 bytes until its handle exists, us of CPU time; Python {sys.version.split()[0]}")
    print(f"  {'median (tenth)':18} {'alone':>18} {'in a row':>18}")
    asyncio.run(measure(given.calls, given.only))


if __name__ == "__main__":
    main()
