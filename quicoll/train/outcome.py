"""How a worker's part in a job ends, also of one that comes when the job is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quicoll.errors import CheckpointError, JobDone, LocalError
from quicoll.train.architecture import Architecture
from quicoll.train.figures import WorkerFigures
from quicoll.train.packing import packed_state
from quicoll.train.saver import state_of_step

if TYPE_CHECKING:
    from quicoll.checkpoint.storage import Place
    from quicoll.train.task import Task

__all__ = ["TrainingResult", "demand_state", "final_result", "loaded"]

_log = logging.getLogger("quicoll.train")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The end of a worker's part in the job.

    Attributes:
        steps: The job's committed steps.
        digest: Of the task's state after them; the same on every rank. Of names and tensors alone it is
            `quicoll.checkpoint.digest`.
        committed: Steps that this process took part in and that were committed.
        aborted: Steps that this process took part in and that were aborted.
        resumed_from: Step of the checkpoint that it began with; None: it began without one.
        wall_s: Seconds within `run`.
        figures: Where the time of its steps went.
    """

    steps: int
    digest: str
    committed: int
    aborted: int
    resumed_from: int | None
    wall_s: float
    figures: WorkerFigures = field(default_factory=WorkerFigures)


async def final_result(task: Task, done: JobDone, checkpoint_dir: Place | None) -> TrainingResult:
    """Load the final state of a job that is done into a task, from the job's last checkpoint.

    `Worker.run` does so by itself. It is for a process that comes so late that `quicoll.join` raises JobDone:

        try:
            async with quicoll.join() as job:
                result = await quicoll.train.Worker(job, task, shards=8, checkpoints=policy).run(steps=1000)
        except quicoll.JobDone as done:
            result = await quicoll.train.final_result(task, done, policy.directory)

    Args:
        task: What was trained.
        done: Says at which step the job ended.
        checkpoint_dir: Where the workers wrote checkpoints; None: nowhere.
    Returns:
        The result of a worker that committed no step itself.
    Raises:
        LocalError: The state is none of a worker's, or the task refuses it.
        JobDone: The final state is not at hand here: there is no whole checkpoint of that step. Says what there is.
    """

    def load(state: Mapping[Any, Any]) -> None:
        demand_state(state, None)
        task.load_state(state["task"])

    return await loaded(load, task, done, checkpoint_dir)


async def loaded(
    load: Callable[[Mapping[Any, Any]], None],
    task: Task,
    done: JobDone,
    directory: Place | None,
) -> TrainingResult:
    """As `final_result`, with a function that takes the worker's state over."""
    began = time.monotonic()
    try:
        if directory is None:
            raise CheckpointError("no directory of checkpoints is given")
        found = await state_of_step(directory, done.step)
    except CheckpointError as error:
        said = f"the job is done: its other ranks have ended; the final state is not at hand here: {error}"
        _log.warning("%s", said)  # the error ends a program with status 0, and without a word
        raise JobDone(said, step=done.step) from error
    load(found.state)
    _log.info("the job is done; its final state is loaded from %s", found.where)
    digest = packed_state(task.state()).digest
    return TrainingResult(
        steps=done.step, digest=digest, committed=0, aborted=0, resumed_from=None, wall_s=time.monotonic() - began
    )


def demand_state(state: Mapping[Any, Any], architecture: Architecture | None) -> None:
    """Refuse what is no worker's state, or one of another architecture."""
    if not {"architecture", "task"} <= set(state):
        raise LocalError(f"this is no state of a worker: it has {', '.join(map(repr, state)) or 'nothing'}")
    found = Architecture.parse(state["architecture"])
    if architecture is not None:
        architecture.demand_same(found)
