"""How long a job stands still when a rank is killed, and until it has all ranks again: with a spare or without one.

    python benchmarks/spare.py [--mib 64] [--workers 3] [--rounds 3] [--dense | --sharded] [--json FILE]

Real processes on this machine. The last worker ends by SIGKILL after some steps. Told are the seconds from there to the
next committed step, and to the first one with all ranks, for

    restarted   no spare: `quicoll run` starts the worker anew
    cold        a spare waits in `quicoll.join`; it makes its model when it has the place
    warm        a spare with --warm-spares 1

Making the model takes each program --model seconds, besides the state of --mib. Of the state 1 MiB changes in a step;
--dense lets every step change all of it. With --sharded each rank owns a part of it, the next one keeps a copy, and
every step changes all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import quicoll
from quicoll import checkpoint
from quicoll.launch.supervisor import Supervisor

_MIB = 1 << 20
_COMPUTE_S = 0.1
_BEFORE, _AFTER = 20, 15  # steps until one is killed, and steps with all ranks after that
_CASES = {"restarted": (0, 0), "cold": (1, 0), "warm": (1, 1)}


async def train(mib: int, model_s: float, directory: Path, *, dense: bool, sharded: bool) -> None:
    """Steps until there have been enough with all ranks since the kill; who has the last rank then is killed."""
    workers = int(os.environ["QUICOLL_WORLD_SIZE"])
    commits: list[tuple[float, int]] = []
    frozen = 0 if sharded else (mib - 1) * _MIB
    state = {"frozen": np.zeros(frozen, np.uint8), "hot": np.zeros(_MIB // 8)}
    moments = quicoll.Sharded(mib * _MIB // 4, {"m": "float32"}, blocks=48, backup=1) if sharded else None

    def load(new: Mapping[str, Any]) -> None:
        for name, value in new.items():
            np.copyto(state[name], value)

    def apply(number: int, world_size: int) -> None:
        state["hot"] += number
        if dense:
            state["frozen"] += 1
        commits.append((time.time(), world_size))

    async with quicoll.join() as job:
        await asyncio.sleep(model_s)
        job.register_state(lambda: state, load, sharded=None if moments is None else {"m": moments})
        victim = job.node == f"worker-{workers - 1}" and os.environ.get("QUICOLL_RESTARTS", "0") == "0"
        full = 0
        while full < _AFTER:
            try:
                async with job.step() as step:
                    await asyncio.sleep(_COMPUTE_S)
                    await job.group.all_reduce(np.ones(8))
                    if moments is not None:
                        await moments.stage(step, {"m": moments["m"] + np.float32(1)})
                    number, world_size = step.number, job.world_size
                    step.on_commit(lambda number=number, world_size=world_size: apply(number, world_size))
            except quicoll.StepAborted:
                continue
            if victim and job.committed_step == _BEFORE:
                (directory / "killed").write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            full += job.committed_step > _BEFORE and world_size == workers
    (directory / f"{job.node}.json").write_text(json.dumps({"commits": commits, "digest": checkpoint.digest(state)}))


def run(case: str, given: argparse.Namespace) -> dict[str, float]:
    spares, warm = _CASES[case]
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="quicoll-bench-") as name:
        directory = Path(name)
        command = [sys.executable, __file__, "--mib", str(given.mib), "--model", str(given.model), "--directory", name]
        ranks = Supervisor(
            [*command, *(["--dense"] if given.dense else []), *(["--sharded"] if given.sharded else [])],
            workers=given.workers, job="spare", spares=spares,
            max_restarts=1, coordinator_options=["--max-world-size", str(given.workers), "--warm-spares", str(warm)],
            output=lambda node, line: lines.append(f"{node}: {line}"),
        )  # fmt: skip
        outcome = asyncio.run(ranks.run())
        if outcome.exit_status:
            raise SystemExit("\n".join([*lines, outcome.reason]))
        killed = float((directory / "killed").read_text())
        found = {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}
    if len({each["digest"] for each in found.values()}) != 1:
        raise SystemExit("the states differ")
    after = [(at - killed, world) for at, world in found["worker-0"]["commits"] if at > killed]
    # The rank that was killed has committed the step; the others may hear of that a moment later.
    after = [each for each in after if each[0] > _COMPUTE_S / 2]
    return {"next": after[0][0], "all_ranks": next(at for at, world in after if world == given.workers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--model", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--directory", type=Path, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.directory is not None and "QUICOLL_NODE" in os.environ:
        asyncio.run(train(given.mib, given.model, given.directory, dense=given.dense, sharded=given.sharded))
        return
    rounds = {case: [run(case, given) for _ in range(given.rounds)] for case in _CASES}
    found: dict[str, Any] = {
        "mib": given.mib,
        "workers": given.workers,
        "dense": given.dense,
        "sharded": given.sharded,
        "model_s": given.model,
    }
    for case, each in rounds.items():
        found[case] = {what: sorted(round(one[what], 2) for one in each) for what in ("next", "all_ranks")}
        told = [f"{statistics.median(found[case][what]):.2f} s ({found[case][what]})" for what in found[case]]
        print(f"{case}: next committed step after {told[0]}, with all ranks after {told[1]}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
