"""What a small call costs its caller's thread until the handle exists: checks, the operation, the way to the engine.

    python benchmarks/caller.py [--calls 6000]

Real groups, contexts and threads, and an engine that ends each operation as soon as it has begun, so nothing is sent.
CPU time of the caller's thread, by the clock of that thread: another thread that holds the interpreter's lock, or
another process on the processor, does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from quicoll.collectives.context import CallContext
from quicoll.collectives.group import Group
from quicoll.engine.runtime import ThreadRuntime
from quicoll.membership.view import Member, View

_WARM = 500


class _Nothing:
    """Sends nothing."""

    def gather(self) -> None:
        """As of an endpoint."""

    def send_gathered(self) -> None:
        """As of an endpoint."""


class _Engine:
    """Ends what it begins."""

    endpoint = _Nothing()

    def collective(self, view_id: int, call: object, ended: Callable[..., None], **how: Any) -> None:
        ended(0, None)


def _cases() -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {
        "numpy": (np.ones(1, np.float32), None),
        "numpy, out=": (np.ones(1, np.float32), np.ones(1, np.float32)),
    }
    try:
        import torch
    except ModuleNotFoundError:
        return found
    torch.set_num_threads(1)
    return found | {"torch": (torch.ones(1), None), "torch, out=": (torch.ones(1), torch.ones(1))}


async def measure(calls: int) -> dict[str, list[float]]:
    members = tuple(Member(rank=rank, node=name, incarnation=1) for rank, name in enumerate("ab"))
    view = View(view_id=1, members=members, seed=0, committed_step=0, committed_view=0)
    settings: Any = SimpleNamespace(node="b", timeout=30.0, chunk_bytes=1 << 20)
    engine: Any = _Engine()
    runtime = ThreadRuntime("benchmark")
    group = Group(CallContext(settings, engine, runtime, view))
    took: dict[str, list[float]] = {}
    for name, (x, out) in _cases().items():
        took[name] = []
        for number in range(_WARM + calls):
            began = time.thread_time()
            handle = group.all_reduce(x, out=out)
            spent = time.thread_time() - began
            await handle
            if number >= _WARM:
                took[name].append(spent)
    await runtime.aclose()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=6000)
    given = parser.parse_args()
    print(f"all_reduce of 4 bytes until the handle exists, us of CPU time; Python {sys.version.split()[0]}")
    for name, took in asyncio.run(measure(given.calls)).items():
        tenth, median = statistics.quantiles(took, n=10)[0], statistics.median(took)
        print(f"  {name:12} median {median * 1e6:5.1f}, a tenth of them below {tenth * 1e6:5.1f}")


if __name__ == "__main__":
    main()
