"""How much of a job's throughput is kept while ranks fail: simulated, with the real code, on a virtual clock.

    python benchmarks/goodput.py [--ranks 32] [--minutes 30] [--faults 62] [--compute 5] [--restart 10] [--spares 0]
                                 [--cuts 4] [--lost-after 2] [--seed 1] [--json FILE]

Processes are killed at random times (so many faults in all), one in --cuts has its machine cut off instead, for as
long; a killed one is started again after --restart seconds. A rank computes for --compute seconds, then reduces what it
has in a step, and commits it. A step that is aborted is tried again with what was computed; a rank that has just come
in, and computed nothing for the step that the others are at, takes part in it with nothing, so that nobody waits for
it. With --spares so many more ranks are kept warm.

Told is the work that was committed, in steps that ranks have computed, as a share of what the job commits without a
fault (which is run for a tenth of the time); and the steps, whoever took part in them. Then what each kind of fault has
cost, from one fault to the next: the time that all ranks stood still, beyond what a step takes without a fault; and the
work of ranks that were not there, or had computed nothing for the step. A line on the way says how far it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.errors import Partitioned, StepAborted
from quicoll.sim import Settings, Simulation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quicoll.job import Job

_VALUES = 4096


class Training:
    """What a rank trains, and how much was committed, as one rank that is never hit has it."""

    def __init__(self, until_s: float, compute_s: float) -> None:
        self.work = 0
        self.steps = 0
        self.commits: dict[int, tuple[float, int]] = {}  # by step: when, and how many had computed it
        self.ended: list[bytes] = []
        self._until_s = until_s
        self._compute_s = compute_s

    async def worker(self, job: Job, sim: Simulation) -> None:
        state = {"weights": np.zeros(_VALUES, np.float32), "work": np.zeros(1, np.int64)}

        def load(new: Mapping[str, Any]) -> None:
            for name, value in new.items():
                np.copyto(state[name], value)

        job.register_state(lambda: state, load)
        over = await self._commit(job, sim, state, computed=0)
        while not over:
            await asyncio.sleep(self._compute_s)  # of the next step, from the state that this rank has
            over = await self._commit(job, sim, state, computed=job.committed_step + 1)
        self.ended.append(state["weights"].tobytes())
        # For the first step, by which ranks come in, nobody has computed anything.
        self.steps, self.work = job.committed_step - 1, int(state["work"][0])

    async def _commit(self, job: Job, sim: Simulation, state: dict[str, Any], *, computed: int) -> bool:
        """Try until a step is committed; return whether it was the last, as all ranks agree. computed: for which."""
        while True:
            try:
                async with job.step() as step:
                    counts = computed == step.number
                    mine = np.full(_VALUES, (job.rank + step.number) * counts, np.float32)
                    mine[:2] = sim.now >= self._until_s, counts
                    total = await job.group.all_reduce(mine)

                    def apply(total: Any = total, number: int = step.number) -> None:
                        self.commits.setdefault(number, (sim.now, int(total[1])))
                        state["weights"] += total
                        state["work"] += int(total[1])

                    step.on_commit(apply)
                return bool(total[0])
            except (StepAborted, Partitioned):
                continue


def run(given: argparse.Namespace, faults: int) -> dict[str, Any]:
    until_s = given.minutes * 60.0
    training = Training(until_s, given.compute)
    settings = Settings(
        ranks=given.ranks, spares=given.spares, warm_spares=given.spares, restart_after=given.restart,
        lost_after=given.lost_after, timeout=60.0, join_timeout=600.0, recovery=600.0, limit=until_s * 2 + 600,
    )  # fmt: skip
    simulation = Simulation(training.worker, seed=given.seed, settings=settings, compute=0.0, progress=_tell)
    chance = random.Random(given.seed)
    nodes = given.ranks + given.spares
    everyone = {"coordinator", *range(nodes)}
    busy = [0.0] * nodes  # until when a rank is not there
    struck: list[tuple[float, str]] = []
    for number in range(faults):
        at = (number + chance.random()) * (until_s - 60) / max(faults, 1) + 5
        node = chance.choice([node for node in range(nodes) if busy[node] < at])
        busy[node] = at + 2 * given.restart
        struck.append((at, "killed" if not given.cuts or number % given.cuts else "cut off"))
        if struck[-1][1] == "killed":
            simulation.at(at).crash(node)
            simulation.at(at + given.restart).restart(node)
        else:
            simulation.at(at).partition({node}, everyone - {node})
            simulation.at(at + given.restart).repair()
    began = time.process_time()
    outcome = simulation.run()
    if outcome.error is not None:
        raise SystemExit(f"{outcome.error}")
    if len(set(training.ended)) != 1:
        raise SystemExit("the ranks have ended with different states")
    return {
        "faults": faults, "steps": training.steps, "work": training.work, "aborted": outcome.aborted,
        "views": outcome.views, "virtual_s": round(outcome.virtual_s, 1),
        "cpu_s": round(time.process_time() - began, 1), "struck": struck,
        "commits": [training.commits[step] for step in sorted(training.commits)],
    }  # fmt: skip


def costs(ranks: int, struck: list[tuple[float, str]], commits: list[tuple[float, int]], usual_s: float) -> list[str]:
    """Return a line for each kind of fault.

    Args:
        ranks: Of the job.
        struck: When each fault came, and of which kind.
        commits: When each step was committed, and how many ranks had computed it.
        usual_s: From one commit to the next, without a fault.
    """
    found: dict[str, list[float]] = {}
    for (before, _), (at, computed) in pairwise(commits):
        last = [kind for when, kind in struck if when < at]
        kind = last[-1] if last else "nothing yet"
        each = found.setdefault(kind, [0.0, 0.0, 0.0])
        each[0] = sum(kind == other for _, other in struck)
        each[1] += at - before - usual_s
        each[2] += ranks - computed
    return [
        f"{kind}: {faults:.0f} times; all stood still for {still_s:.1f} s, {still_s / max(faults, 1):.2f} s each time; "
        f"{missed:.0f} steps of one rank were not computed, {missed / max(faults, 1):.2f} each time"
        for kind, (faults, still_s, missed) in found.items()
    ]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--faults", type=int, default=62)
    parser.add_argument("--compute", type=float, default=5.0)
    parser.add_argument("--restart", type=float, default=10.0)
    parser.add_argument("--cuts", type=int, default=4, help="0: none is cut off")
    parser.add_argument("--lost-after", type=float, default=2.0)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # each rank warns of the timeouts that are meant to be so
    with_faults = run(given, given.faults)
    given.minutes /= 10
    without = run(given, 0)
    kept = with_faults["work"] / with_faults["virtual_s"] / (without["work"] / without["virtual_s"])
    steps = with_faults["steps"] / with_faults["virtual_s"] / (without["steps"] / without["virtual_s"])
    gaps = [after - before for (before, _), (after, _) in pairwise(without["commits"])]
    for name, found in (("without faults", without), ("with faults", with_faults)):
        print(f"{name}: { {key: value for key, value in found.items() if key not in ('commits', 'struck')} }")
    print(f"{kept:.2%} of the throughput is kept; steps a second: {steps:.2%}")
    print("\n".join(costs(given.ranks, with_faults["struck"], with_faults["commits"], statistics.median(gaps))))
    if given.json is not None:
        found = {"kept": kept, "steps_kept": steps, "with": with_faults, "without": without}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
