"""The step function that the simulator runs where the user gives none, with a result known beforehand.

The state is a vector of float32, a count, and the history: for every step the view in which it was committed, by id and
number of ranks. A step computes one contribution for each of `WORKLOAD_SHARDS` logical shards, a function of the state,
the step, the view and the shard; reduces them to their mean in canonical order; and on commit adds the mean to the
vector. So the state after a step is a function of the history, however often each step was tried: `Reference` computes
it from there without a network, by sums in plain numpy. A step that is applied as it was in another view than that
in which it was committed is another state.

Beside the reduction each step calls one operation (quicoll.sim.operations), which checks its result itself. Where a
`Grouping` is given, some steps work in sub-groups meanwhile (quicoll.sim.subgroups), whose results are part of the
state too.

A quarter of the seeds have a table in their state, which the first step fills, and of which every later one changes one
row. It is large enough to be learned beside the steps (quicoll.state.learning), where `LEARN_FROM` is the setting.

A fifth of the seeds divide a vector between the ranks (quicoll.Sharded), with a copy of each part on the next rank.
Each step gives all of it new values, a function of the history too, so that each rank knows what the others own: before
it stages its part it compares what it has, and a part that nobody holds any more is read from there.

A tenth of the seeds leave their steps before they are decided, and compute the next one ahead of that
(`job.step(overlap=True)`). Which do is drawn apart from the rest of a load.

Where a setting asks for it, as it does for the seeds with lanes, the steps that reduce the whole vector send long
messages as well.

An eighth of the seeds change sets of tiers and share pieces of state, strong and eventual ones (quicoll.sim.tiered);
which do is a setting, so that a failure can be made smaller without them.

Every seed has a load of its own (`Load.of`): an algorithm, a few of the operations, and how often the whole vector is
reduced. The whole is above the size at which a reduction is divided between two owners, or three; the other steps
reduce the first `PART` elements, since what a run costs is mostly its datagrams.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll import checkpoint
from quicoll.errors import (
    CheckpointError,
    Diverged,
    JobDone,
    LocalError,
    Mismatch,
    Partitioned,
    QuicollError,
    StepAborted,
)
from quicoll.sim.digests import state_digest
from quicoll.sim.operations import OPERATIONS, CallSite, long_ones, several_at_once, tree
from quicoll.sim.subgroups import Grouping, Subgroups, after, beginning, grouping
from quicoll.sim.tiered import TieredWork, hot_after, hot_state
from quicoll.state.rank_state import SHARDED
from quicoll.state.sharded import Sharded

if TYPE_CHECKING:
    from quicoll.checkpoint.disk import Disk
    from quicoll.job import Job
    from quicoll.plan.schedule import AlgorithmName
    from quicoll.sim.tiered_checks import TieredChecker
    from quicoll.step.context import Step

__all__ = ["COMPUTE_S", "LEARN_FROM", "WORKLOAD_SHARDS", "Load", "Reference", "worker"]

WORKLOAD_SHARDS = 8
PART = 777  # odd, so that shares and chunks are uneven
SIZES = (4_159, 8_255)  # just above 16 and 32 KiB: two owners, three
CHECKPOINTS = "/data/checkpoints"
CHECKPOINT_EVERY = 3
ROWS, ROW_BYTES = 32, 1024  # of the table
DIVIDED = 160  # elements of the divided vector
LEARN_FROM = ROWS * ROW_BYTES
COMPUTE_S = 0.05  # of simulated time in each step by default, so that faults fall between and into collectives

_ALGORITHMS: tuple[AlgorithmName, ...] = ("auto", "direct", "tree", "exchange", "hierarchical")
_EACH = 3  # operations of one seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the steps of one run do.

    algorithm: of the reductions. elements: of the vector. whole_every: steps whose numbers are multiples of it reduce
    all of it. operations: called in turn, by name. at_once: while the reduction is in flight. groups: which steps
    work in sub-groups; None: none does. table: whether the state has a table. divided: whether a vector is divided.
    tiers: whether ranks change sets of tiers and share pieces of state. overlap: whether steps overlap. near: whether
    steps that reduce the whole vector call several things at once that ranks of one host hand each other through its
    memory, large ones as well. long_bytes: of the long messages that these steps send; 0: none does.
    """

    algorithm: AlgorithmName = "auto"
    elements: int = SIZES[0]
    whole_every: int = 3
    operations: tuple[str, ...] = ("all_gather",)
    at_once: bool = False
    groups: Grouping | None = None
    table: bool = False
    divided: bool = False
    tiers: bool = False
    overlap: bool = False
    near: bool = False
    long_bytes: int = 0

    @staticmethod
    def of(seed: int) -> Load:
        """Return the load of a seed. Drawn apart from all else that the seed decides."""
        draw = random.Random(f"quicoll.sim/load/{seed}").random  # noqa: S311 - a simulation has no secrets
        overlap = random.Random(f"quicoll.sim/overlap/{seed}").random() < 0.1  # noqa: S311 - likewise
        left = list(OPERATIONS)
        chosen = tuple(left.pop(int(draw() * len(left))) for _ in range(_EACH))
        return Load(
            algorithm=_ALGORITHMS[seed % len(_ALGORITHMS)],
            elements=SIZES[draw() < 0.3],
            whole_every=2 + int(3 * draw()),
            operations=chosen,
            at_once=draw() < 0.5,
            groups=grouping(seed),
            table=draw() < 0.25,
            divided=draw() < 0.2,
            overlap=overlap,
        )

    def reduced(self, step: int) -> int:
        """Return how many elements a step reduces."""
        return self.elements if step % self.whole_every == 0 else min(PART, self.elements)

    def in_groups(self, step: int) -> bool:
        """Return whether a step works in sub-groups."""
        return self.groups is not None and step % self.groups.every == 0

    def operation(self, step: int) -> str:
        """Return the operation of a step."""
        return self.operations[step % len(self.operations)]


def mark(step: int, view_id: int, world: int) -> int:
    """One number for a step in a view."""
    return step * 10_007 + view_id * 101 + world


def contribution(vector: Any, number: int, shard: int) -> Any:
    """float32 values whose sum depends on the order of adding. number: the mark of the step."""
    index = np.arange(len(vector), dtype=np.uint64) * np.uint64(2654435761)
    bits = (index + np.uint64(number * 97 + shard)) % np.uint64(100003)
    return (bits.astype(np.float32) / np.float32(317.0) - vector * np.float32(0.125)).astype(np.float32)


def applied(vector: Any, mean: Any) -> Any:
    """The vector after a step: its first elements have changed."""
    found = vector.copy()
    found[: len(mean)] += mean
    return found


def beginning_of_table() -> Any:
    """The table before the first step."""
    return np.zeros((ROWS, ROW_BYTES), np.uint8)


def change_table(table: Any, step: int) -> None:
    """Change the table by a step."""
    if step == 1:
        table[:] = (np.arange(table.size) % 251).reshape(table.shape) + 1
    else:
        table[step % ROWS] = step % 251


def divided_after(before: Any, start: int, number: int) -> Any:
    """A part of the divided vector after a step. before: it. start: its first element. number: the mark of the step."""
    index = np.arange(start, start + len(before), dtype=np.uint64)
    changed = (index * np.uint64(2654435761) + np.uint64(number)) % np.uint64(100003)
    return before * np.float32(0.5) + changed.astype(np.float32)


@dataclass(frozen=True, slots=True)
class _After:
    """The state after some steps: what a history comes to."""

    vector: Any
    rows: Any
    table: Any
    hot: Any


class Reference:
    """Digest of the state after each step, by the definition of the canonical order and nothing else."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._after = lru_cache(maxsize=256)(self._replay)

    def __call__(self, step: int, state: Mapping[str, Any]) -> bytes:
        """Return the digest of the state that the history in `state` comes to."""
        history = np.asarray(state["history"], np.int64).reshape(-1, 2)
        views = tuple((int(view_id), int(world)) for view_id, world in history[:step])
        found = self._after(views)
        replayed = _state(found.vector, step, views, found.rows, found.table)
        if found.hot is not None:
            replayed |= hot_state(found.hot)
            replayed["tiers"] = state["tiers"]  # which hangs on who proposed what: equal on all ranks
        if SHARDED in state:  # digests, by which the product itself judges the parts; they are equal on all ranks
            replayed[SHARDED] = state[SHARDED]
        return state_digest(replayed)

    def _replay(self, views: tuple[tuple[int, int], ...]) -> _After:
        load = self._load
        if not views:
            rows = beginning() if load.groups is not None else None
            table = beginning_of_table() if load.table else None
            return _After(np.zeros(load.elements, np.float32), rows, table, {} if load.tiers else None)
        before, step = self._after(views[:-1]), len(views)
        part = before.vector[: load.reduced(step)]
        number = mark(step, *views[-1])
        total = tree([contribution(part, number, shard) for shard in range(WORKLOAD_SHARDS)])
        rows = after(before.rows, step) if load.in_groups(step) else before.rows
        table = before.table
        if load.table:
            table = table.copy()
            change_table(table, step)
        hot = hot_after(before.hot, step, number) if load.tiers else None
        return _After(applied(before.vector, total / np.float32(WORKLOAD_SHARDS)), rows, table, hot)


def _state(vector: Any, count: int, views: tuple[tuple[int, int], ...], rows: Any, table: Any) -> dict[str, Any]:
    """rows: what sub-groups have made, where there are any. table: None where there is none."""
    history = np.array(views, np.int64).reshape(-1, 2)
    found = {"vector": vector, "count": np.array([count], np.int64), "history": history}
    return found | ({} if rows is None else {"rows": rows}) | ({} if table is None else {"table": table})


class _Held:
    """What one process holds of the state."""

    def __init__(self, load: Load) -> None:
        self._grouped = load.groups is not None
        self.vector: Any = np.zeros(load.elements, np.float32)
        self.count = 0
        self.views: tuple[tuple[int, int], ...] = ()
        self.rows: Any = beginning() if self._grouped else None
        self.table: Any = beginning_of_table() if load.table else None
        self.tiered: TieredWork | None = None
        self.part: Sharded | None = None
        if load.divided:
            self.part = Sharded(DIVIDED, {"part": "float32"}, blocks=WORKLOAD_SHARDS, backup=1, read=self._read)
        self._divided: tuple[int, Any] = 0, np.zeros(DIVIDED, np.float32)  # after so many of `views`

    def divided(self, step: int) -> Any:
        """The whole of the divided vector after a step that is in the history."""
        count, found = self._divided
        if count > step or count > len(self.views):
            count, found = 0, np.zeros(DIVIDED, np.float32)
        for number, view in enumerate(self.views[count:step], count + 1):
            found = divided_after(found, 0, mark(number, *view))
        self._divided = step, found
        return found

    def _read(self, step: int, name: str, start: int, stop: int) -> Any:
        return self.divided(step)[start:stop]

    async def stage(self, step: Step, number: int) -> None:
        """Give the divided vector new values. number: the mark of the step."""
        if self.part is None:
            return
        mine, owned = self.part.mine, self.part["part"]
        if not np.array_equal(owned, self.divided(self.count)[mine]):
            raise AssertionError(f"elements {mine} of the divided vector are not those of step {self.count}")
        await self.part.stage(step, {"part": divided_after(owned, mine.start, number)})

    def save(self) -> dict[str, Any]:
        # The memory itself, as users' programs give it.
        found = _state(self.vector, self.count, self.views, self.rows, self.table)
        return found if self.tiered is None else found | self.tiered.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.vector, self.count = state["vector"].copy(), int(state["count"][0])
        self.views = tuple((int(view_id), int(world)) for view_id, world in state["history"])
        self.rows = state["rows"].copy() if self._grouped else None
        self.table = state["table"].copy() if self.table is not None else None
        self._divided = 0, np.zeros(DIVIDED, np.float32)
        if self.tiered is not None:
            self.tiered.load(state)

    def apply(self, mean: Any, rows: Any, number: int, view: tuple[int, int]) -> None:
        self.vector, self.count, self.rows = applied(self.vector, mean), number, rows
        self.views = (*self.views, view)
        if self.table is not None:
            change_table(self.table, number)


async def worker(
    job: Job,
    done: Callable[[], bool],
    *,
    load: Load | None = None,
    disk: Disk | None = None,
    checker: TieredChecker | None = None,
) -> int:
    """Do steps until `done()`; the number of the last one. An aborted step is tried again.

    load: what they do; None: the default of everything. disk: where a checkpoint is kept of every CHECKPOINT_EVERY-th
    step, and found again by the next process; None keeps none. A disk that fails costs the checkpoint, not the step.
    checker: looks at tiers and shared state, where the load has them.
    """
    load = load or Load()
    divided = Subgroups(job, load.groups is not None and load.groups.keeps, load.algorithm)
    held = _Held(load)
    if load.tiers and checker is not None:
        held.tiered = TieredWork(job, checker)
    found = None
    if disk is not None:
        with contextlib.suppress(CheckpointError):
            found = checkpoint.latest(CHECKPOINTS, disk=disk)
    if found is not None:
        held.load(found.tensors)
        job.resume_from(found.step)
    job.register_state(held.save, held.load, sharded=None if held.part is None else {"divided": held.part})
    while not done():
        try:
            await _step(job, held, load, divided)
        except QuicollError as error:
            if isinstance(error, JobDone | LocalError | Mismatch | Diverged):
                raise
            continue
        if disk is not None and held.count % CHECKPOINT_EVERY == 0:
            with contextlib.suppress(CheckpointError):
                checkpoint.save(CHECKPOINTS, step=held.count, tensors=held.save(), disk=disk)
    if held.tiered is not None:
        await held.tiered.converge()
    if load.overlap:
        with contextlib.suppress(StepAborted, Partitioned):  # of the last step: enough of them are committed
            await job.aclose()
    return job.committed_step


async def _step(job: Job, held: _Held, load: Load, divided: Subgroups) -> None:
    async with job.step(overlap=load.overlap) as step:
        await step.ready()
        number = step.number
        shards = job.group.shards(WORKLOAD_SHARDS)
        view = job.view.view_id, job.world_size
        here = CallSite(job.rank, job.world_size, mark(number, *view))
        part = held.vector[: load.reduced(number)]
        leaves = [contribution(part, here.mark, shard) for shard in shards]
        reduced = job.group.all_reduce(shards.leaves(leaves, like=part), op="avg", algorithm=load.algorithm)
        rows = await divided.work(held.rows, number) if load.in_groups(number) else held.rows
        mean = None if load.at_once else await reduced
        if held.tiered is not None:
            await held.tiered.work(step, here.mark, held.views)
        await OPERATIONS[load.operation(number)](job.group, here)
        if load.near and number % load.whole_every == 0:
            await several_at_once(job.group, here)
        if load.long_bytes and number % load.whole_every == 0:
            await long_ones(job.group, here, load.long_bytes)
        await held.stage(step, here.mark)
        mean = await reduced if mean is None else mean
        step.on_commit(lambda: held.apply(mean, rows, number, view))
