"""The worker loop: shards in, one all-reduce, one decision, the update; again from where it stands after any failure.

One step on every rank (contract C1):

    gradients of this rank's shards -> buckets of each shard -> all_reduce(avg) -> vote -> committed? -> apply

What makes it restartable:
1. A task changes its state only in `apply`, and `apply` runs only for a committed step, at the moment of the commit.
   An aborted step leaves no trace, so it is simply begun again in the next view.
2. Gradients depend on (state, shard, step number) and on nothing else. So whichever ranks compute the shards, and
   however often a step was aborted, the committed step has the same bits.
3. The state belongs to the job, not to a process. A rank that starts again, or was cut off, is handed the state of the
   newest committed step by the others at a step boundary (`job.register_state`). Only when all of them have gone does
   the job go back to the newest checkpoint that any of them holds (`job.resume_from`), and computes the steps since
   then again, with the same bits.

   A rank that comes when the job is done is handed nothing: it takes the final state from the job's last checkpoint
   (`final_result`).
4. A rank that is asked to stop (SIGTERM) leaves at a step boundary, and rank 0 writes a checkpoint before it goes: by
   itself, since the others may be in a step that waits for it, or gone.

All ranks write checkpoints together, each a part, from a copy, in a thread (`quicoll.train.checkpointer`): training
does not wait for the disk, but for the last one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quicoll import checkpoint
from quicoll.checkpoint.parts import Contents
from quicoll.errors import CheckpointError, JobDone, LocalError, Partitioned, StepAborted, Terminated
from quicoll.numerics.buffers import argument
from quicoll.train.checkpointer import Checkpointer
from quicoll.train.packing import packed_state, state_of

if TYPE_CHECKING:
    from quicoll.checkpoint.parts import Array
    from quicoll.checkpoint.storage import Place
    from quicoll.job import Job
    from quicoll.plan.schedule import AlgorithmName
    from quicoll.step.context import Step

__all__ = ["Bucket", "Task", "TrainingResult", "final_result", "run"]

_log = logging.getLogger("quicoll.train")


class Task(Protocol):
    """The thing that is trained. The loop calls its methods one at a time, from one thread."""

    @property
    def shards(self) -> int:
        """Number of logical shards of one step's batch; the same for the whole job."""
        ...

    def gradients(self, shard: int, step: int) -> Sequence[Array]:
        """Return the gradients of one shard's mean loss at the present state.

        Must be a pure function of (state, shard, step), to the last bit.

        Args:
            shard: From 0 to `shards` - 1.
            step: Counts from 1.
        Returns:
            float32 tensors, always in the same order and of the same shapes.
        """
        ...

    def apply(self, average: Sequence[Array]) -> None:
        """Update the state. Called only for committed steps.

        Args:
            average: The average over all shards; kinds, shapes and order as `gradients` returns them.
        """
        ...

    def state(self) -> Mapping[Any, Any]:
        """Return parameters and optimizer state by name: all that the methods depend on. May alias live memory.

        As for `Job.register_state`: tensors, and mappings, lists and values among them, as `state_dict()` gives.
        """
        ...

    def load_state(self, state: Mapping[Any, Any]) -> None:
        """Take over a state.

        Args:
            state: What `state` returned, here or on another rank. Copy what is kept.
        """
        ...


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
    """

    steps: int
    digest: str
    committed: int
    aborted: int
    resumed_from: int | None
    wall_s: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """The layout of gradients in one flat float32 buffer, so that one collective carries all of them.

    It changes no bits: an element never meets another one.

    Attributes:
        shapes: Of the gradients, in order.
    """

    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, gradients: Sequence[Array]) -> Bucket:
        """Make the layout for gradients of these shapes, in this order, without gaps.

        Args:
            gradients: Only their shapes count.
        Returns:
            The layout.
        """
        return cls(tuple(tuple(gradient.shape) for gradient in gradients))

    @property
    def size(self) -> int:
        """Number of float32 elements."""
        return sum(_count(shape) for shape in self.shapes)

    def pack(self, gradients: Sequence[Array]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Copy gradients into a new buffer.

        Args:
            gradients: float32, of the layout's shapes.
        Returns:
            An array of shape (size,).
        Raises:
            LocalError: Other shapes or dtypes; or a gradient that requires grad itself, where autograd records.
        """
        flat = np.empty(self.size, np.float32)
        found = tuple(tuple(gradient.shape) for gradient in gradients)
        if found != self.shapes:
            raise LocalError(f"gradients have shapes {found}, the bucket was made for {self.shapes}")
        start = 0
        for gradient, shape in zip(gradients, self.shapes, strict=True):
            if str(gradient.dtype).removeprefix("torch.") != "float32":
                raise LocalError(f"a bucket holds float32, this gradient is {gradient.dtype}")
            flat[start : start + _count(shape)] = argument(gradient).flat
            start += _count(shape)
        return flat

    def unpack(self, flat: Array, like: Sequence[Array]) -> list[Array]:
        """Return views into a buffer, one for each gradient.

        Args:
            flat: A buffer of `size` elements.
            like: One tensor for each view; where it is torch's, the view is a torch tensor, otherwise a numpy array.
        Returns:
            The views, with the layout's shapes.
        """
        buffer = np.asarray(flat).reshape(-1)
        out: list[Array] = []
        start = 0
        for shape, model in zip(self.shapes, like, strict=True):
            view = buffer[start : start + _count(shape)].reshape(shape)
            out.append(view if isinstance(model, np.ndarray) else _torch_view(view))
            start += _count(shape)
        return out


def _cut(gradients: Sequence[Array], most: int) -> list[slice]:
    """The gradients, in order, in runs of at most `most` bytes, or of one that is larger. 0: all in one."""
    cuts, filled = [0], 0
    for index, gradient in enumerate(gradients):
        nbytes = 4 * _count(tuple(gradient.shape))
        if most and filled and filled + nbytes > most:
            cuts.append(index)
            filled = 0
        filled += nbytes
    return [slice(start, stop) for start, stop in pairwise([*cuts, len(gradients)])]


OnStep = Callable[[int], Awaitable[None] | None]


async def run(
    job: Job,
    task: Task,
    *,
    steps: int,
    checkpoint_dir: Place | None = None,
    checkpoint_every: int = 0,
    checkpoint_shared: bool = True,
    keep: int = 3,
    on_step: OnStep | None = None,
    bucket_bytes: int = 0,
    algorithm: AlgorithmName = "auto",
) -> TrainingResult:
    """Train until the job has committed `steps` steps, through every abort, partition and change of membership.

    SIGTERM asks this rank to stop, unless the program handles it, or the setting `handle_sigterm` is False: the open
    step is ended, rank 0 writes a checkpoint where there are to be some, and `run` raises Terminated, by which the rank
    leaves the job and the process ends with status 143.

    Args:
        job: A joined job. Every rank calls this with equal arguments.
        task: What is trained.
        steps: The last step; 1 or more.
        checkpoint_dir: Where to look for a checkpoint at the start, and where they are written: a path, or an fsspec
            URL. None: no checkpoints.
        checkpoint_every: The ranks write one, each a part of it, after every so many steps and after the last; 0: none.
            One that is due while another is under way begins after that.
        checkpoint_shared: Whether checkpoint_dir is the same place for all ranks. Otherwise each has a disk of its own,
            and writes all of the state.
        keep: How many checkpoints stay.
        on_step: Called with the step's number after each step that this rank committed, and awaited if it returns an
            awaitable, before the next step begins.
        bucket_bytes: Gradients travel in buckets of at most so many bytes, one collective each, all at once; 0: all in
            one. Changes no bits.
        algorithm: As in `Group.all_reduce`. Changes no bits.
    Returns:
        What this worker did, and the digest of the final state.
    Raises:
        LocalError: An argument is invalid.
        Mismatch: The ranks called different things.
        Partitioned: There was no quorum for the job's `hold_timeout`.
        Diverged: The ranks hold different states, and nobody knows which is right.
        JobDone: The other ranks have ended before this one had the state of the last step, and there is no checkpoint
            of it in `checkpoint_dir`; says so. Where there is one, its state is loaded and the result returned.
        CheckpointError: The last checkpoint could not be written; raised after all steps are committed, or instead of
            Terminated. Failures of earlier ones are logged, and training goes on.
        Terminated: This rank was asked to stop.
        Exception: What the task raises. StepAborted is never raised.
    """
    if steps < 1 or checkpoint_every < 0:
        raise LocalError(f"steps is 1 or more and checkpoint_every 0 or more, not {steps} and {checkpoint_every}")
    if bucket_bytes < 0:
        raise LocalError(f"bucket_bytes is 0 or more, not {bucket_bytes}")
    began = time.monotonic()
    resumed_from = await _resume(job, task, checkpoint_dir)
    job.register_state(task.state, task.load_state)
    saver = None
    if checkpoint_dir is not None and checkpoint_every:
        saver = Checkpointer(
            job,
            checkpoint_dir,
            every=checkpoint_every,
            keep=keep,
            shared=checkpoint_shared,
            resumed_from=resumed_from or 0,
        )

    def contents() -> Contents:
        packed = packed_state(task.state())
        return Contents(packed.tensors, packed.metadata)

    committed = aborted = 0
    try:
        with job.stop_at_sigterm():
            while True:
                try:
                    # A rank that was cut off in its vote, or joins late, learns here that the job is further.
                    await job.ready()
                    if job.committed_step >= steps:
                        break
                    first = None if saver is None else partial(saver.in_step, contents=contents)
                    number = await _one_step(
                        job, task, last=steps, first=first, bucket_bytes=bucket_bytes, algorithm=algorithm
                    )
                except StepAborted as error:
                    aborted += 1
                    _log.info("begun again in the next view: %s", error)
                    continue
                except _InDoubt as error:
                    _log.warning("whether the step is committed will be known when this rank is heard again: %s", error)
                    continue
                except JobDone as error:
                    if job.committed_step >= steps:
                        break
                    if error.step < steps:
                        raise
                    result = await final_result(task, error, checkpoint_dir)
                    return replace(
                        result,
                        committed=committed,
                        aborted=aborted,
                        resumed_from=resumed_from,
                        wall_s=time.monotonic() - began,
                    )
                except _Finished:
                    break
                committed += 1
                if on_step is not None:
                    waiting = on_step(number)
                    if inspect.isawaitable(waiting):
                        await waiting
            if saver:
                await saver.finish(contents)
    except Terminated:
        if saver and (job.rank == 0 or not checkpoint_shared) and not job.state_torn:
            await saver.save_alone(contents)
        raise
    finally:
        if saver:
            await saver.settle()
    if saver:
        saver.raise_last()
    return TrainingResult(
        steps=job.committed_step,
        digest=packed_state(task.state()).digest,
        committed=committed,
        aborted=aborted,
        resumed_from=resumed_from,
        wall_s=time.monotonic() - began,
    )


async def final_result(task: Task, done: JobDone, checkpoint_dir: Place | None) -> TrainingResult:
    """Load the final state of a job that is done into a task, from the job's last checkpoint.

    `run` does so by itself. It is for a process that comes so late that `quicoll.join` raises JobDone:

        try:
            async with quicoll.join() as job:
                result = await quicoll.train.run(job, task, steps=1000, checkpoint_dir=directory, checkpoint_every=100)
        except quicoll.JobDone as done:
            result = await quicoll.train.final_result(task, done, directory)

    Args:
        task: What was trained.
        done: Says at which step the job ended.
        checkpoint_dir: Where `run` wrote checkpoints; None: nowhere.
    Returns:
        The result of a worker that committed no step itself.
    Raises:
        JobDone: The final state is not at hand here: there is no whole checkpoint of that step. Says what there is.
    """
    began = time.monotonic()
    try:
        if checkpoint_dir is None:
            raise CheckpointError("no checkpoint_dir is given")
        found = await asyncio.to_thread(checkpoint.of_step, checkpoint_dir, done.step)
        state = state_of(found)
    except CheckpointError as error:
        said = f"the job is done: its other ranks have ended; the final state is not at hand here: {error}"
        _log.warning("%s", said)  # the error ends a program with status 0, and without a word
        raise JobDone(said, step=done.step) from error
    task.load_state(state)
    _log.info("the job is done; its final state is loaded from %s", found.path)
    return TrainingResult(
        steps=done.step,
        digest=packed_state(task.state()).digest,
        committed=0,
        aborted=0,
        resumed_from=None,
        wall_s=time.monotonic() - began,
    )


async def _resume(job: Job, task: Task, directory: Place | None) -> int | None:
    found = await asyncio.to_thread(checkpoint.latest, directory) if directory is not None else None
    if found is None:
        return None
    task.load_state(state_of(found))
    job.resume_from(found.step)
    _log.info("resumed from %s", found.path)
    return found.step


async def _one_step(
    job: Job,
    task: Task,
    *,
    last: int,
    first: Callable[[Step], Awaitable[None]] | None,
    bucket_bytes: int,
    algorithm: AlgorithmName,
) -> int:
    """One attempt at the next step; returns its number once it is committed and applied. first: done at its begin."""
    step = job.step()
    try:
        async with step:
            if step.number > last:
                raise _Finished
            if first is not None:
                await first(step)
            # Asked for inside the step: only here is it certain which view, and so which shards, the step is about.
            mine = job.group.shards(task.shards)
            gradients = [task.gradients(shard, step.number) for shard in mine]
            # More ranks than shards: this one computes a shard for its shapes alone and contributes nothing.
            model = gradients[0] if gradients else task.gradients(0, step.number)
            cuts = _cut(model, bucket_bytes)
            buckets = [Bucket.of(model[cut]) for cut in cuts]
            pending = []
            for cut, bucket in zip(cuts, buckets, strict=True):
                leaves = [bucket.pack(gradient[cut]) for gradient in gradients]
                like = leaves[0] if leaves else np.empty(bucket.size, np.float32)
                pending.append(job.group.all_reduce(mine.leaves(leaves, like=like), op="avg", algorithm=algorithm))
            averages = [await each for each in pending]

            def apply() -> None:
                parts = zip(buckets, averages, cuts, strict=True)
                task.apply([part for bucket, flat, cut in parts for part in bucket.unpack(flat, model[cut])])

            step.on_commit(apply)
    except Partitioned as error:
        raise _InDoubt(str(error)) from error
    return step.number


class _InDoubt(Exception):
    """Cut off between the vote and its outcome. Partitioned from elsewhere has waited `hold_timeout` and gets out."""


class _Finished(Exception):
    """The job turned out to have committed its last step without this rank."""


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _torch_view(array: np.ndarray[Any, Any]) -> Array:
    import torch

    return torch.from_numpy(array)
