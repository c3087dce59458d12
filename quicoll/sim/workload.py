"""The step function that the simulator runs where the user gives none: small tensors, and a result known beforehand.

The state is a vector of float32 and a count. A step computes one contribution for each of `WORKLOAD_SHARDS` logical
shards, a function of the state, the step and the shard; reduces them to their mean in canonical order; gathers a
witness from every rank; and on commit adds the mean to the vector. So the state after step s is a function of s alone,
whatever the number of ranks and however often a step was tried: `Reference` computes it without a network, by sums in
plain numpy.

Where a `Grouping` is given, some steps work in sub-groups meanwhile (quicoll.sim.subgroups), whose results are part of
the state too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll import checkpoint
from quicoll.errors import CheckpointError, Diverged, LocalError, Mismatch, QuicollError
from quicoll.sim.invariants import state_digest
from quicoll.sim.subgroups import Grouping, Subgroups, after, beginning

if TYPE_CHECKING:
    from quicoll.checkpoint.disk import Disk
    from quicoll.job import Job
    from quicoll.plan.schedule import AlgorithmName

__all__ = ["COMPUTE_S", "ELEMENTS", "WORKLOAD_SHARDS", "Reference", "worker"]

WORKLOAD_SHARDS = 8
ELEMENTS = 777  # odd, so that shares and chunks are uneven
CHECKPOINTS = "/data/checkpoints"
CHECKPOINT_EVERY = 3
COMPUTE_S = 0.05  # of simulated time in each step, so that faults fall between and into collectives


def contribution(vector: Any, step: int, shard: int) -> Any:
    """float32 values whose sum depends on the order of adding."""
    bits = (np.arange(ELEMENTS, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(step * 97 + shard)) % np.uint64(
        100003
    )
    return (bits.astype(np.float32) / np.float32(317.0) - vector * np.float32(0.125)).astype(np.float32)


def applied(vector: Any, mean: Any) -> Any:
    return (vector + mean).astype(np.float32)


class Reference:
    """Digest of the state after each step, by the definition of the canonical order and nothing else.

    every: steps whose numbers are multiples of it work in sub-groups; 0: none does.
    """

    def __init__(self, every: int = 0) -> None:
        self._every = every
        self._vectors = [np.zeros(ELEMENTS, np.float32)]
        self._rows = [beginning() if every else None]
        self._digests: list[bytes] = []

    def __call__(self, step: int) -> bytes:
        while len(self._vectors) <= step:
            before, number = self._vectors[-1], len(self._vectors)
            leaves = [contribution(before, number, shard) for shard in range(WORKLOAD_SHARDS)]
            while len(leaves) > 1:  # a balanced tree over a power of two: neighbours, level by level
                leaves = [leaves[i] + leaves[i + 1] for i in range(0, len(leaves), 2)]
            self._vectors.append(applied(before, leaves[0] / np.float32(WORKLOAD_SHARDS)))
            rows = self._rows[-1]
            self._rows.append(after(rows, number) if _in_groups(self._every, number) else rows)
        while len(self._digests) <= step:
            number = len(self._digests)
            self._digests.append(state_digest(_state(self._vectors[number], number, self._rows[number])))
        return self._digests[step]


def _in_groups(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _state(vector: Any, count: int, rows: Any) -> dict[str, Any]:
    """rows: what sub-groups have made, where there are any."""
    return {"vector": vector, "count": np.array([count], np.int64), **({} if rows is None else {"rows": rows})}


async def worker(
    job: Job,
    done: Callable[[], bool],
    *,
    compute_s: float = COMPUTE_S,
    disk: Disk | None = None,
    algorithm: AlgorithmName = "auto",
    groups: Grouping | None = None,
) -> int:
    """Do steps until `done()`; the number of the last one. An aborted step is tried again.

    compute_s: simulated seconds that each step computes before its collectives. disk: where a checkpoint is kept of
    every CHECKPOINT_EVERY-th step, and found again by the next process; None keeps none. A disk that fails costs the
    checkpoint, not the step. algorithm: of the reductions. groups: which steps work in sub-groups; None: none does.
    """
    every = 0 if groups is None else groups.every
    divided = Subgroups(job, groups is not None and groups.keeps, algorithm)
    vector: Any = np.zeros(ELEMENTS, np.float32)
    rows: Any = beginning() if every else None
    count = 0
    found = None
    if disk is not None:
        with contextlib.suppress(CheckpointError):
            found = checkpoint.latest(CHECKPOINTS, disk=disk)
    if found is not None:
        vector, count, rows = found.tensors["vector"], found.step, found.tensors.get("rows")
        job.resume_from(found.step)

    def save() -> dict[str, Any]:
        return _state(vector, count, rows)  # the memory itself, as users' programs give it

    def load(state: Any) -> None:
        nonlocal vector, count, rows
        vector, count = state["vector"].copy(), int(state["count"][0])
        rows = state["rows"].copy() if every else None

    job.register_state(save, load)
    while not done():
        try:
            async with job.step() as step:
                shards = job.group.shards(WORKLOAD_SHARDS)
                await asyncio.sleep(compute_s)
                leaves = [contribution(vector, step.number, shard) for shard in shards]
                reduced = job.group.all_reduce(shards.leaves(leaves, like=vector), op="avg", algorithm=algorithm)
                new_rows = await divided.work(rows, step.number) if _in_groups(every, step.number) else rows
                mean = await reduced
                witness = await job.group.all_gather(np.array([step.number, count], np.int64))
                if not np.all(witness.reshape(-1, 2) == (step.number, count)):
                    raise AssertionError(f"ranks differ in what they do: {witness.tolist()}")

                def apply(mean: Any = mean, new_rows: Any = new_rows, number: int = step.number) -> None:
                    nonlocal vector, count, rows
                    vector, count, rows = applied(vector, mean), number, new_rows

                step.on_commit(apply)
        except QuicollError as error:
            if isinstance(error, LocalError | Mismatch | Diverged):
                raise
            continue
        if disk is not None and count % CHECKPOINT_EVERY == 0:
            with contextlib.suppress(CheckpointError):
                checkpoint.save(CHECKPOINTS, step=count, tensors=save(), disk=disk)
    return job.committed_step
