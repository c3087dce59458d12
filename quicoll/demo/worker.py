"""One worker of the demo (`python -m quicoll.demo.worker`), or the undisturbed process it is compared with.

Steps take milliseconds and a process seconds to start, so faults and steps wait for each other:

- The worker that is to be killed stays between two steps until it is.
- While the world is incomplete a worker waits a little between steps, and before the step of the cut and the last one
  until the world is whole again. Otherwise the training could be over before who was lost is back, and the demo would
  not show how it comes back.

The waits change when steps happen, never what they compute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["main", "prepare"]

_PATIENCE = 3.0
"""A quarter of the steps, at the slowed pace, lasts this many times as long as this worker took to start and join."""
_SLOWEST_S = 2.0
_LOOK_S = 0.05


def prepare() -> None:
    """Import what a worker needs, for those that are forked from this process."""
    for module in ("digits", "worker"):
        import_module(f"quicoll.demo.{module}")
    for module in ("checkpoint", "job", "testing", "train.worker"):
        import_module(f"quicoll.{module}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the result as JSON. arguments: those of the command; None takes the process's."""
    parser = argparse.ArgumentParser(prog="quicoll.demo.worker", description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=0, help="samples per shard and step; 0 takes the task's own")
    parser.add_argument("--result", type=Path, required=True, help="directory for NODE.json")
    parser.add_argument("--baseline", action="store_true", help="alone, without any network")
    parser.add_argument("--kill-node", default="", help="node whose first process waits to be killed")
    parser.add_argument("--kill-at", type=int, default=0, help="after this step")
    parser.add_argument("--cut-node", default="", help="node that cuts its own network once")
    parser.add_argument("--cut-at", type=int, default=0, help="after the first step from this one on with a full world")
    parser.add_argument("--cut-for", type=float, default=0.0, help="seconds")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    node, report = _alone(options) if options.baseline else asyncio.run(_member(options, began))
    path = options.result / f"{node}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report))
    temporary.replace(path)


def _alone(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    from quicoll import checkpoint
    from quicoll.demo.digits import baseline, pin_torch

    pin_torch()
    began = time.monotonic()
    task = baseline(steps=options.steps, seed=options.seed)
    return "baseline", {
        "steps": options.steps,
        "digest": checkpoint.digest(task.state()),
        "accuracy": task.accuracy(),
        "train_s": time.monotonic() - began,
    }


async def _member(options: argparse.Namespace, began: float) -> tuple[str, dict[str, Any]]:
    import quicoll
    from quicoll.demo.digits import BATCH, SHARDS, Digits, pin_torch
    from quicoll.testing import cut_network
    from quicoll.train.worker import Worker

    pin_torch()
    task = Digits(seed=options.seed, batch=options.batch or BATCH)
    full = int(os.environ["QUICOLL_WORLD_SIZE"])
    node = os.environ["QUICOLL_NODE"]
    to_cut = node == options.cut_node
    to_be_killed = node == options.kill_node and os.environ["QUICOLL_RESTARTS"] == "0"
    # Over the network, whose failures this shows, though all workers are on one host.
    async with quicoll.join(local=False) as job:
        started = time.monotonic()
        pace = min(_PATIENCE * (started - began) / max(1.0, options.steps / 4), _SLOWEST_S)

        async def between(step: int) -> None:
            nonlocal to_cut
            if task.loss is not None:
                job.emit("progress", step=step, loss=task.loss)
            if to_cut and step >= options.cut_at and job.world_size == full:
                to_cut = False
                cut_network(job, options.cut_for)
            if to_be_killed and step >= options.kill_at:
                await asyncio.Event().wait()
            if job.world_size < full:
                await asyncio.sleep(pace)
            while job.world_size < full and step in (options.cut_at - 1, options.steps - 1):
                await asyncio.sleep(_LOOK_S)
                with suppress(quicoll.StepAborted):
                    await job.ready()

        result = await Worker(job, task, shards=SHARDS, on_step=between).run(steps=options.steps)
        return node, {
            "steps": result.steps,
            "digest": result.digest,
            "accuracy": task.accuracy(),
            "committed": result.committed,
            "aborted": result.aborted,
            "train_s": time.monotonic() - started,
        }


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # told to end by who started us; a traceback of every worker would say nothing more
