"""Lives of a job on simulated machines: each begins from the checkpoints that the one before has left on its disks.

A life is a simulation of its own: real steps, real collectives, real checkpoints on simulated disks. Ranks are killed
or lose their power in it, in the middle of a disk's operation too. At its end all machines lose their power; what was
not synced may be lost or torn. The next life has another number of ranks, and the disks are in other machines, of
which one may have several.

The state is a function of the step, so every life knows what it has to find. The invariant: a checkpoint of which any
rank was told that it is complete, or a newer one, is restored in the next life, with the right bits.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quicoll.checkpoint import Contents, Shard
from quicoll.errors import CheckpointError, JobDone, Partitioned, PeerError, StepAborted
from quicoll.sim import Settings, Simulation
from quicoll.sim.disk.disk import SimDisk
from quicoll.train import Checkpointer

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.train.fetching import FetchedCheckpoint

__all__ = ["Forgotten", "Lives", "Plan", "SlowCheckpointer"]

FOLDER = "/data/checkpoints"
ROWS, COLUMNS = 24, 40
STEPS = 8  # of one life
COMPUTE_S = 0.1
HEALED_S = 6.0  # by then a life is over

Files = dict[str, bytes]
T = TypeVar("T")


class Forgotten(AssertionError):
    """A checkpoint that was told to be complete was not found, or something else than what was saved."""


@dataclass(frozen=True)
class Plan:
    """One life. ranks: how many. faults: what happens in it. crash: whether all lose their power at its end; or the
    processes end. lost: the number of a disk that is lost after it. rotten: whether a bit flips then in each file of
    the newest checkpoint. until: no rank ends before, in seconds. Who has ended, is cut off while its process ends and
    is started again asks for a new part of the job, and waits for all others, which have ended (docs/membership.md)."""

    ranks: int
    faults: Callable[[Simulation], object] = lambda sim: None
    crash: bool = True
    lost: int | None = None
    rotten: bool = False
    until: float = 0.0


def moments(step: int) -> Any:
    return np.random.default_rng(step).standard_normal((ROWS, COLUMNS))


def weights(step: int) -> Any:
    return np.random.default_rng(step + 1_000_000).standard_normal(500).astype(np.float32)


def bounds(rank: int, world: int) -> tuple[int, int]:
    return ROWS * rank // world, ROWS * (rank + 1) // world


class SlowCheckpointer(Checkpointer):
    """Whose disk takes time, so that much can happen meanwhile."""

    slow = 0.0

    async def _in_thread(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        await asyncio.sleep(self.slow)
        return await super()._in_thread(function, *arguments, **options)


@dataclass
class Lives:
    """See the module's head. shared: one disk for all ranks. slow: seconds that a call of a disk takes.
    slow_restore: also at the beginning, when who is killed takes its only copy along, which others want. told: the
    newest checkpoint that a rank was told of.
    found: what each life began with."""

    seed: int
    shared: bool = False
    copies: int = 1
    slow: float = 0.0
    slow_restore: bool = True
    told: int = 0
    found: list[int] = field(default_factory=list)
    disks: list[Files] = field(default_factory=list)
    spoilt: bool = False

    def live(self, plan: Plan) -> None:
        """One life, from the disks to the disks."""
        rng = random.Random(f"{self.seed}/{len(self.found)}")
        placed = _placed(self.disks, plan.ranks, rng)
        common = SimDisk(random.Random(rng.random()), now_ns=lambda: 0) if self.shared else None
        if common is not None and self.disks:
            _fill(common, [self.disks[0]])
        began: dict[str, int] = {}
        machines: dict[str, SimDisk] = {}

        async def worker(job: Job, sim: Simulation) -> int:
            if sim.now > HEALED_S:  # it was killed, and is started again when all is over
                return 0
            if common is None and job.node not in machines:
                _fill(sim.disk(job), placed[int(job.node.removeprefix("worker-"))])
            machines[job.node] = sim.disk(job)
            disk = common or sim.disk(job)
            saver = SlowCheckpointer(
                job, FOLDER, every=2, keep=2, shared=self.shared, copies=self.copies, disk=disk
            )  # fmt: skip
            saver.slow = self.slow if self.slow_restore else 0.0
            step = await self._restored(job, saver)
            began[job.node] = step
            saver.slow = self.slow
            last = await self._train(job, saver, step + STEPS)
            await saver.settle()
            await asyncio.sleep(max(0.0, plan.until - sim.now))
            return last

        simulation = Simulation(
            worker,
            seed=self.seed * 100 + len(self.found),
            settings=Settings(ranks=plan.ranks, lost_after=0.5, restart_after=30.0, limit=40.0),
            compute=COMPUTE_S,
        )
        plan.faults(simulation)
        simulation.at(HEALED_S).heal()
        outcome = simulation.run()
        if outcome.error is not None:
            raise Forgotten(f"in life {len(self.found)}: {outcome.error}") from outcome.error
        steps = set(began.values())
        if len(steps) != 1:
            raise Forgotten(f"ranks began from steps {sorted(steps)}")
        (first,) = steps
        if self.found and first < self.told and not self.spoilt:
            raise Forgotten(f"step {self.told} was told to be complete, and step {first} was found")
        self.found.append(first)
        disks = [common] if common is not None else [machines[node] for node in sorted(machines)]
        for disk in disks:
            disk.restart()
            (disk.crash if plan.crash else disk.kill)()
            disk.restart()
            if plan.rotten:
                self.spoilt = True
                newest = max(name for name in disk.names(Path(FOLDER)) if name.endswith(".json"))
                for name in disk.names(Path(FOLDER)):
                    if name.startswith(newest[:13]) and name != newest:
                        disk.rot(Path(FOLDER) / name)
        self.disks = [disk.files() for disk in disks]
        if plan.lost is not None:
            del self.disks[plan.lost % len(self.disks)]
        self.told = max(self._tolds, default=first)

    _tolds: list[int] = field(default_factory=list)

    async def _restored(self, job: Job, saver: Checkpointer) -> int:
        async def read(stored: FetchedCheckpoint) -> tuple[Any, Any]:
            first, end = bounds(job.rank, job.world_size)
            part = await stored.read("m", offset=(first, 0), shape=(end - first, COLUMNS))
            return np.asarray(part), np.asarray(await stored.read("w"))

        while True:
            try:
                found = await saver.restore(read)
                break
            except PeerError:
                await job.ready()
            except CheckpointError as error:
                raise Forgotten(str(error)) from error
        if found is None:
            return 0
        step, (part, w) = found
        first, end = bounds(job.rank, job.world_size)
        if not (np.array_equal(part, moments(step)[first:end]) and np.array_equal(w, weights(step))):
            raise Forgotten(f"what was restored is not the state after step {step}")
        job.resume_from(step)
        return step

    async def _train(self, job: Job, saver: Checkpointer, last: int) -> int:
        """Steps that write the state where it lies."""
        begin = job.committed_step
        held = {"w": weights(begin), "m": moments(begin)}
        job.register_state(lambda: {"w": held["w"]}, lambda state: held.update(w=state["w"].copy()))

        def contents() -> Contents:
            held["m"][:] = moments(job.committed_step)
            first, end = bounds(job.rank, job.world_size)
            return Contents(
                {"w": held["w"], "m": Shard(held["m"][first:end], shape=(ROWS, COLUMNS), offset=(first, 0))}
            )

        def apply(number: int) -> None:
            held["w"][:] = weights(number)
            held["m"][:] = moments(number)

        while job.committed_step < last:
            try:
                async with job.step() as step:
                    await saver.in_step(step, contents)
                    number = step.number
                    await job.group.barrier()
                    step.on_commit(lambda number=number: apply(number))
                self._tolds.append(saver.newest)
            except (StepAborted, Partitioned, PeerError):
                continue
            except JobDone:
                break
        return job.committed_step


def _placed(disks: Sequence[Files], machines: int, rng: random.Random) -> list[list[Files]]:
    """Disks in machines, in any order; several in one where there are more of them."""
    placed: list[list[Files]] = [[] for _ in range(machines)]
    order = list(range(machines))
    rng.shuffle(order)
    for number, files in enumerate(disks):
        placed[order[number % machines]].append(files)
    return placed


def _fill(disk: SimDisk, files: Sequence[Files]) -> None:
    for each in files:
        for name, data in sorted(each.items()):
            path = Path(name)
            if path.parent != Path(FOLDER):
                continue
            if not disk.find(FOLDER):
                disk.make_directory(path.parent)
                disk.sync_directory(path.parent.parent)
            if disk.find(name) is None:
                disk.create(path, [data])
                disk.sync_directory(path.parent)
