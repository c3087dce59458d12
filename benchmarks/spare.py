"""How long a job stands still when a rank is killed, and until it has all ranks again: with a spare or without one.

    python benchmarks/spare.py [--mib 64] [--workers 3] [--rounds 5] [--dense | --sharded] [--torch] [--json FILE]

Real processes on this machine. The last rank (--victim: another one) ends by SIGKILL after some steps; in one round
at the beginning of a step, in the others further and further into it. Told are the seconds from there to the next
committed step, and to the first one with all ranks, for

    restarted   no spare: `quicoll run` starts the worker anew
    cold        a spare waits in `quicoll.join`; it makes its model when it has the place
    warm        a spare with --warm-spares 1

and where they go: until the first rank knows of the loss, until all ranks are in the next view, until they have the
state and all blocks, and the step itself. Beside it stands what a step takes when nothing happens, since the one that
was open is done again; the processor time of all ranks and the spare from the last commit before the loss to the first
one after it; and the load of the machine, from /proc/stat: processor time of others makes all of it longer.

Making the model takes each program --model seconds, besides the state of --mib. Of the state 1 MiB changes in a step;
--dense lets every step change all of it. With --sharded each rank owns a part of it, the next one keeps a copy, and
every step changes all of it. --torch: a `quicoll.train.Worker` with a torch module and AdamW, of --mib with gradients
and moments; all on each rank, or with --sharded the moments divided (`Divide(backup=1)`).
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
import threading
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
_PHASES = ("found", "view", "state", "step")


class Clock(threading.Thread):
    """Looks at the processor time of this process, fifty times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, float]] = []

    def run(self) -> None:
        while True:
            self.seen.append((time.monotonic(), time.process_time()))
            time.sleep(0.02)


class Victim:
    """Ends this process by SIGKILL some way into a step, if it is the one."""

    def __init__(self, job: quicoll.Job, given: argparse.Namespace) -> None:
        self._job = job
        self._first = os.environ.get("QUICOLL_RESTARTS", "0") == "0"
        self._rank: int = given.victim
        self._into: float = given.into
        self._file: Path = given.directory / "killed"
        self._committed: list[float] = []

    def committed(self, step: int) -> None:
        """Take note of a committed step; from the one at which it is time on, there is not much left."""
        self._committed.append(time.monotonic())
        if self._first and step == _BEFORE and self._job.rank == self._rank:
            usual = statistics.median(np.diff(self._committed[-11:]))
            timer = threading.Timer(float(usual) * self._into, self._kill)
            timer.daemon = True
            timer.start()

    def _kill(self) -> None:
        self._file.write_text(json.dumps([self._job.node, time.monotonic()]))
        os.kill(os.getpid(), signal.SIGKILL)


async def train_numpy(given: argparse.Namespace) -> str:
    """Steps until there have been enough with all ranks since the kill. Returns the digest of the state."""
    workers = int(os.environ["QUICOLL_WORLD_SIZE"])
    frozen = 0 if given.sharded else (given.mib - 1) * _MIB
    state = {"frozen": np.zeros(frozen, np.uint8), "hot": np.zeros(_MIB // 8)}
    size = given.mib * _MIB // 4
    moments = quicoll.Sharded(size, {"m": "float32"}, blocks=48, backup=1) if given.sharded else None

    def load(new: Mapping[str, Any]) -> None:
        for name, value in new.items():
            np.copyto(state[name], value)

    def apply(number: int) -> None:
        state["hot"] += number
        if given.dense:
            state["frozen"] += 1

    async with quicoll.join() as job:
        await asyncio.sleep(given.model)
        job.register_state(lambda: state, load, sharded=None if moments is None else {"m": moments})
        victim = Victim(job, given)
        full = 0
        while full < _AFTER:
            try:
                async with job.step() as step:
                    await asyncio.sleep(_COMPUTE_S)
                    await job.group.all_reduce(np.ones(8))
                    if moments is not None:
                        await moments.stage(step, {"m": moments["m"] + np.float32(1)})
                    number, world_size = step.number, job.world_size
                    step.on_commit(lambda number=number: apply(number))
            except quicoll.StepAborted:
                continue
            victim.committed(number)
            full += number > _BEFORE and world_size == workers
    return checkpoint.digest(state)


async def train_torch(given: argparse.Namespace) -> str:
    """The same with a worker."""
    import torch

    from quicoll.train import Divide, Part, TorchTask, Worker

    torch.set_num_threads(1)
    async with quicoll.join() as job:
        await asyncio.sleep(given.model)
        torch.manual_seed(1)
        width = int((given.mib * _MIB / 3 / 4 / 4) ** 0.5)  # four layers; as much again for each of the moments
        layers = [torch.nn.Linear(width, width) for _ in range(4)]
        module = torch.nn.Sequential(*(each for layer in layers for each in (layer, torch.nn.Tanh())))
        rows = torch.randn(8, width)

        def loss(module: torch.nn.Module, part: Part) -> torch.Tensor:
            return torch.as_tensor((module(rows * (1 + part.shard)) - rows).square().mean())

        task = TorchTask(module, torch.optim.AdamW(module.parameters(), lr=1e-3), loss)
        divide = Divide(blocks=48, backup=1) if given.sharded else None
        worker = Worker(job, task, shards=6, divide=divide, on_step=Victim(job, given).committed)
        return (await worker.run(steps=_BEFORE + 3 * _AFTER)).digest


def train(given: argparse.Namespace) -> None:
    clock = Clock()
    clock.start()
    digest = asyncio.run(train_torch(given) if given.torch else train_numpy(given))
    node = os.environ["QUICOLL_NODE"]
    (given.directory / f"{node}.digest").write_text(digest)
    (given.directory / f"{node}.clock").write_text(json.dumps(clock.seen))


def busy() -> tuple[float, float]:
    """Seconds of processor time that this machine has worked, and that this process and its children have."""
    fields = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    ours = os.times()
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK"), sum(ours[:4])


def run(case: str, number: int, given: argparse.Namespace) -> dict[str, float]:
    """One job with one kill; returns what it took."""
    spares, warm = _CASES[case]
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="quicoll-bench-") as name:
        directory = Path(name)
        command = [sys.executable, __file__, "--mib", str(given.mib), "--model", str(given.model), "--directory", name]
        command += ["--victim", str(given.victim), "--into", str(number / given.rounds)]
        command += [f"--{each}" for each in ("dense", "sharded", "torch") if getattr(given, each)]
        ranks = Supervisor(
            command, workers=given.workers, job="spare", spares=spares, events=directory / "events", max_restarts=1,
            coordinator_options=["--max-world-size", str(given.workers), "--warm-spares", str(warm)],
            output=lambda node, line: lines.append(f"{node}: {line}"),
        )  # fmt: skip
        began, (all_of_it, ours) = time.monotonic(), busy()
        outcome = asyncio.run(ranks.run())
        took = time.monotonic() - began
        others = busy()[0] - all_of_it - (busy()[1] - ours)
        if outcome.exit_status:
            raise SystemExit("\n".join([*lines, outcome.reason]))
        digests = {path.read_text() for path in directory.glob("*.digest")}
        events = [
            json.loads(line) for path in (directory / "events").glob("worker-*") for line in path.open(encoding="utf-8")
        ]
        victim, killed = json.loads((directory / "killed").read_text())
        clocks = [np.array(json.loads(path.read_text())) for path in directory.glob("*.clock")]
    if len(digests) != 1:
        raise SystemExit("the states differ")
    events.sort(key=lambda event: float(event["t"]))
    return {"others": others / took} | told(events, clocks, victim, killed, given)


def told(
    events: list[dict[str, Any]], clocks: list[Any], victim: str, killed: float, given: argparse.Namespace
) -> dict[str, float]:
    """What the events of all ranks, by their time, and their clocks say."""
    done = [event for event in events if event["kind"] == "step_committed" and event["node"] != victim]
    commits = [event for event in done if event["node"] == done[0]["node"]]
    before = [event["t"] for event in commits if event["t"] < killed]
    found = next(event["t"] for event in events if event["t"] > killed and event["kind"] == "view_ended")
    # What was decided before the others knew is no step after the loss.
    after = [event for event in commits if event["t"] > found]
    view = after[0]["view"]
    installed = [event for event in events if event["kind"] == "view_installed" and event["view"] == view]
    worlds = {event["view"]: event["world_size"] for event in events if event["kind"] == "view_installed"}
    ready = [event["t"] for event in installed]
    ready += [
        event["t"]
        for event in events
        if event["kind"] in ("state_received", "shards_received") and found < event["t"] < after[0]["t"]
    ]
    at = [killed, found, max(event["t"] for event in installed), max(ready), after[0]["t"]]
    window = [before[-1], at[-1]]
    return {
        "usual": statistics.median(np.diff(before[-11:])),
        "processor": float(sum(np.diff(np.interp(window, each[:, 0], each[:, 1]))[0] for each in clocks)),
        "next": at[-1] - killed,
        "all_ranks": next(event["t"] for event in after if worlds[event["view"]] == given.workers) - killed,
        "blocks": sum(
            event["blocks"] for event in events if event["kind"] == "shards_received" and event["view"] == view
        ),
    } | {phase: until - since for phase, since, until in zip(_PHASES, at, at[1:], strict=False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--model", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--victim", type=int, default=None, help="the rank that is killed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--cases", default=",".join(_CASES), help="of these, with commas between them")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--directory", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.victim = given.workers - 1 if given.victim is None else given.victim
    if given.directory is not None and "QUICOLL_NODE" in os.environ:
        train(given)
        return
    names = ("mib", "workers", "victim", "dense", "sharded", "torch")
    found: dict[str, Any] = {name: getattr(given, name) for name in names} | {"model_s": given.model}
    for case in given.cases.split(","):
        rounds = [run(case, number, given) for number in range(given.rounds)]
        found[case] = {what: [round(one[what], 3) for one in rounds] for what in rounds[0]}
        middle = {what: statistics.median(values) for what, values in found[case].items()}
        print(
            f"{case}: next committed step after {middle['next']:.2f} s ({sorted(found[case]['next'])}), with all ranks "
            f"after {middle['all_ranks']:.2f} s; {', '.join(f'{each} {middle[each]:.2f}' for each in _PHASES)}; a step "
            f"takes {middle['usual']:.2f} s; {middle['processor']:.2f} s of processor time; "
            f"{middle['blocks']:.0f} blocks moved; others use {middle['others']:.1f} cores"
        )
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
