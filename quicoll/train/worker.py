"""A worker: its part of the data, forward, backward, one reduction, one decision, the update; and after any failure
again from where the job stands.

One step on every rank (contract C1):

    its logical shards' samples -> forward -> [barrier] -> backward -> all_reduce(avg) -> vote -> committed? -> apply

States of a worker:

    made --run()--> resumed from the newest checkpoint, its state registered --> stepping --> ended
                                                                                 stepping --> stopped (SIGTERM)

What makes it restartable:
1. A task changes its state only in `apply`, and the data moves only with it: both run for a committed step alone, at
   the moment of the commit. An aborted step leaves no trace, so it is simply begun again in the next view.
2. Gradients depend on (state, shard, step, samples) and on nothing else, and which samples a step has depends on the
   data's position alone (quicoll.data). So whichever ranks compute the shards, and however often a step was aborted,
   the committed step has the same bits, and each sample is used once in an epoch.
3. The state (the task's, the data's position, the architecture) belongs to the job, not to a process. A rank that
   starts again, or was cut off, is handed the state of the newest committed step by the others at a step boundary. Only
   when all of them have gone does the job go back to the newest checkpoint that any of them holds, and computes the
   steps since then again, with the same bits and the same samples.
4. A worker that does not train what the job trains (another architecture, other data) cannot take over that state, and
   ends with a LocalError that names what differs, before it takes part in a step. The others go on.

   A rank that comes when the job is done is handed nothing: it takes the final state from the job's last checkpoint
   (`final_result`).
5. A rank that is asked to stop (SIGTERM) leaves at a step boundary, and rank 0 writes a checkpoint before it goes: by
   itself, since the others may be in a step that waits for it, or gone.

All ranks write checkpoints together, each a part, from a copy, in a thread (quicoll.train.saver): training does not
wait for the disk, but for the last one.

With `phase_barrier` a barrier stands between forward and backward: no rank begins a backward pass before all have ended
their forward passes (S5). It costs a round trip, and memory: what `forward` returns is kept for all shards of this rank
at once. It changes no bits.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.checks import whole
from quicoll.data.feed import Feed
from quicoll.errors import CheckpointError, JobDone, LocalError, Partitioned, StepAborted, Terminated
from quicoll.train.architecture import Architecture
from quicoll.train.bucket import Bucket, cut
from quicoll.train.figures import StepTimes, WorkerFigures
from quicoll.train.packing import packed_state
from quicoll.train.saver import CheckpointPolicy, Saver, newest_state, state_of_step
from quicoll.train.task import Part

if TYPE_CHECKING:
    from quicoll.checkpoint.storage import Place
    from quicoll.collectives.shards import Shards
    from quicoll.data.portions import Portion
    from quicoll.data.sampler import Sampler
    from quicoll.job import Job
    from quicoll.plan.schedule import AlgorithmName
    from quicoll.step.context import Step
    from quicoll.train.task import Task

__all__ = ["OnStep", "TrainingResult", "Worker", "final_result"]

_log = logging.getLogger("quicoll.train")

OnStep = Callable[[int], Awaitable[None] | None]
Leaf = list[np.ndarray[Any, np.dtype[np.float32]]]
"""The gradients of one shard, one buffer for each bucket."""


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


class Worker:
    """Trains a task as one rank of a job. See the module's head; every rank makes an equal one.

    Attributes:
        architecture: What it trains, as it is compared with the other workers'.
        figures: Where the time of its steps has gone so far.
    """

    def __init__(
        self,
        job: Job,
        task: Task,
        *,
        data: Sampler | Feed | None = None,
        shards: int | None = None,
        checkpoints: CheckpointPolicy | None = None,
        on_step: OnStep | None = None,
        phase_barrier: bool = False,
        bucket_bytes: int = 0,
        algorithm: AlgorithmName = "auto",
        report_every: int = 0,
    ) -> None:
        """Make a worker. Nothing is sent yet.

        Args:
            job: A joined job.
            task: What is trained.
            data: Which samples each part has, or a feed with the samples too. None: the task finds its data by shard
                and step.
            shards: Logical shards of a step, the same for the whole job; of the data where there is some.
            checkpoints: When they are written; None: never, and none is looked for.
            on_step: Called with the step's number after each step that this rank committed, and awaited if it returns
                an awaitable, before the next step begins.
            phase_barrier: Whether all ranks wait for each other between forward and backward.
            bucket_bytes: Gradients travel in buckets of at most so many bytes, one collective each, all at once; 0: all
                in one. Changes no bits.
            algorithm: As in `Group.all_reduce`. Changes no bits.
            report_every: An event "progress" comes after each so many committed steps; 0: none.
        Raises:
            LocalError: An argument is invalid.
        """
        if bucket_bytes < 0 or report_every < 0:
            raise LocalError(f"bucket_bytes and report_every are 0 or more, not {bucket_bytes} and {report_every}")
        self._job = job
        self._task = task
        self._data = data
        self._sampler = data.sampler if isinstance(data, Feed) else data
        self._shards = self._count_shards(shards)
        self._checkpoints = checkpoints
        self._on_step = on_step
        self._phase_barrier = bool(phase_barrier)
        self._algorithm: AlgorithmName = algorithm
        self._report_every = report_every
        parameters = task.parameters()
        self.architecture = Architecture.of(parameters, {**task.architecture(), "shards": self._shards})
        self._like = list(parameters.values())  # their shapes and kinds are the gradients'
        self._cuts = cut(self._like, bucket_bytes)
        self._buckets = [Bucket.of(self._like[each]) for each in self._cuts]
        self.figures = WorkerFigures()
        self._reported = self.figures
        self._saver: Saver | None = None
        self._steps: int | None = None
        self._epochs: int | None = None

    def _count_shards(self, shards: int | None) -> int:
        if self._sampler is not None:
            if shards not in (None, self._sampler.shards):
                raise LocalError(f"the data has {self._sampler.shards} shards, not {shards}")
            return self._sampler.shards
        if shards is None:
            raise LocalError("how many logical shards has a step? Pass shards=, or data=")
        return whole(shards, "the number of shards")

    # -- the state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what is the job's: the task's state, where the data stands, and the architecture.

        It is what ranks are handed and what checkpoints hold. May alias live memory.
        """
        found: dict[str, Any] = {"architecture": self.architecture.text, "task": self._task.state()}
        if self._sampler is not None:
            found["data"] = self._sampler.state()
        return found

    def load_state(self, state: Mapping[Any, Any]) -> None:
        """Take over a state.

        Args:
            state: What `state` returned, here or on another rank.
        Raises:
            LocalError: It is of another architecture or of other data, and says in what; nothing has changed. Or the
                task refuses it.
        """
        _demand_state(state, self.architecture)
        if self._sampler is not None:
            if "data" not in state:
                raise LocalError("the state is of a worker without data, this one has some")
            self._sampler.demand_same(state["data"])
        elif "data" in state:
            raise LocalError("the state is of a worker with data, this one has none")
        self._task.load_state(state["task"])
        if self._sampler is not None:
            self._sampler.load_state(state["data"])

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def run(self, *, steps: int | None = None, epochs: int | None = None) -> TrainingResult:
        """Train until the job has committed so many steps, or epochs, through every abort and change of membership.

        SIGTERM asks this rank to stop, unless the program handles it, or the setting `handle_sigterm` is False: the
        open step is ended, rank 0 writes a checkpoint by itself where there are to be some, and `run` raises
        Terminated, by which the rank leaves the job and the process ends with status 143.

        Args:
            steps: The last step; 1 or more. The same on every rank.
            epochs: In place of it: how often each sample is used; 1 or more. Needs data.
        Returns:
            What this worker did, and the digest of the final state.
        Raises:
            LocalError: An argument is invalid; or this worker does not train what the job trains.
            Mismatch: The ranks called different things.
            Partitioned: There was no quorum for the job's `hold_timeout`.
            Diverged: The ranks hold different states, and nobody knows which is right.
            JobDone: The other ranks have ended before this one had the state of the last step, and there is no
                checkpoint of it; says so. Where there is one, its state is loaded and the result returned.
            CheckpointError: The last checkpoint could not be written; raised after all steps are committed, or instead
                of Terminated. Failures of earlier ones are logged, and training goes on.
            Terminated: This rank was asked to stop.
            Exception: What the task or the loader raises. StepAborted is never raised.
        """
        self._steps, self._epochs = self._demand_end(steps, epochs)
        began = time.monotonic()
        resumed_from = await self._resume()
        job = self._job
        job.register_state(self.state, self.load_state)
        policy = self._checkpoints
        if policy is not None and policy.every:
            self._saver = Saver(job, policy, self.state, resumed_from=resumed_from or 0)
        else:
            self._saver = None
        before = self.figures
        late: TrainingResult | None = None
        try:
            with job.stop_at_sigterm():
                late = await self._train()
                if self._saver and late is None:
                    await self._saver.finish()
        except Terminated:
            if self._saver:
                await self._saver.leave()
            raise
        finally:
            if self._saver:
                await self._saver.settle()
        figures = self.figures.since(before)
        return TrainingResult(
            steps=job.committed_step if late is None else late.steps,
            digest=packed_state(self._task.state()).digest,
            committed=figures.steps,
            aborted=figures.aborted,
            resumed_from=resumed_from,
            wall_s=time.monotonic() - began,
            figures=figures,
        )

    def _demand_end(self, steps: int | None, epochs: int | None) -> tuple[int | None, int | None]:
        if (steps is None) == (epochs is None):
            raise LocalError("say either how many steps or how many epochs are trained")
        if steps is not None and whole(steps, "steps") < 1:
            raise LocalError(f"steps is 1 or more, not {steps}")
        if epochs is not None and whole(epochs, "epochs") < 1:
            raise LocalError(f"epochs is 1 or more, not {epochs}")
        if epochs is not None and self._sampler is None:
            raise LocalError("epochs are of data: pass data= to the worker, or say how many steps")
        return steps, epochs

    def _over(self) -> bool:
        """Whether the state of this rank is that after the last step."""
        if self._epochs is not None and self._sampler is not None:
            return self._sampler.epoch >= self._epochs
        return self._steps is not None and self._job.committed_step >= self._steps

    async def _resume(self) -> int | None:
        found = await newest_state(self._checkpoints) if self._checkpoints is not None else None
        if found is None:
            return None
        self.load_state(found.state)
        self._job.resume_from(found.step)
        _log.info("resumed from %s", found.where)
        return found.step

    async def _train(self) -> TrainingResult | None:
        """Step until all is over. Returns a result where the job ended without this rank, and its state is loaded."""
        while True:
            try:
                # A rank that was cut off in its vote, or joins late, learns here that the job is further.
                await self._job.ready()
                if self._over():
                    return None
                number = await self._one_step()
            except StepAborted as error:
                _log.info("begun again in the next view: %s", error)
            except _InDoubt as error:
                _log.warning("whether the step is committed will be known when this rank is heard again: %s", error)
            except JobDone as error:
                if self._over():
                    return None
                if self._steps is not None and error.step < self._steps:
                    raise
                directory = None if self._checkpoints is None else self._checkpoints.directory
                found = await _loaded(self.load_state, self._task, error, directory)
                if self._epochs is not None and not self._over():
                    raise  # the others were told to end earlier than this one
                return found
            except _Finished:
                return None
            else:
                await self._committed(number)

    async def _committed(self, number: int) -> None:
        if self._report_every and number % self._report_every == 0:
            self._report(number)
        if self._on_step is not None:
            waiting = self._on_step(number)
            if inspect.isawaitable(waiting):
                await waiting

    def _report(self, number: int) -> None:
        recent, self._reported = self.figures.since(self._reported), self.figures
        self._job.emit(
            "progress",
            step=number,
            epoch=0 if self._sampler is None else self._sampler.epoch,
            step_s=round(recent.step_seconds, 6),
            communication_share=round(recent.communication_share, 4),
            data_share=round(recent.data_share, 4),
            samples_per_s=round(recent.samples_per_second, 3),
        )

    # -- one step ------------------------------------------------------------------------------------------------------

    async def _one_step(self) -> int:
        """One attempt at the next step; returns its number once it is committed and applied."""
        clock = asyncio.get_running_loop().time
        times, began = StepTimes(), clock()
        applied = [0.0]
        step = self._job.step()
        try:
            async with step:
                if self._over():
                    raise _Finished
                if self._saver:
                    await self._saver.in_step(step)
                times.communication = clock() - began
                averages = await self._averages(step, times)

                def apply() -> None:
                    started = clock()
                    parts = zip(self._buckets, averages, self._cuts, strict=True)
                    self._task.apply(
                        [part for bucket, flat, at in parts for part in bucket.unpack(flat, self._like[at])]
                    )
                    applied[0] = clock() - started

                step.on_commit(apply)
                left = clock()
        except StepAborted:
            times.seconds = clock() - began
            self.figures = self.figures.lost(times)
            raise
        except Partitioned as error:
            raise _InDoubt(str(error)) from error
        times.communication += clock() - left - applied[0]
        times.seconds = clock() - began
        self.figures = self.figures.committed(times)
        return step.number

    async def _averages(self, step: Step, times: StepTimes) -> list[Any]:
        clock = asyncio.get_running_loop().time
        # Asked for inside the step: only here is it certain which view, and so which shards, the step is about.
        shards = self._job.group.shards(self._shards)
        began = clock()
        work = self._parts(step, shards, times)
        times.data = clock() - began
        if self._phase_barrier:
            losses = [self._forward(part) for part, _ in work]
            began = clock()
            await self._job.group.barrier()
            times.communication += clock() - began
            leaves = [self._leaf(loss, weight) for loss, (_, weight) in zip(losses, work, strict=True)]
        else:
            leaves = [self._leaf(self._forward(part), weight) for part, weight in work]
        pending = []
        for number, bucket in enumerate(self._buckets):
            # More ranks than shards: this one has no leaf, says its shape and contributes nothing.
            mine = shards.leaves([leaf[number] for leaf in leaves], like=np.empty(bucket.size, np.float32))
            pending.append(self._job.group.all_reduce(mine, op="avg", algorithm=self._algorithm))
        began = clock()
        averages = [await each for each in pending]
        times.communication += clock() - began
        return averages

    def _parts(self, step: Step, shards: Shards, times: StepTimes) -> list[tuple[Part | None, float]]:
        """The parts of this rank's shards and their weights; None for one that has no samples."""
        seed = self._job.seed.for_step(step.number)
        if self._data is None or self._sampler is None:
            return [(Part(step.number, shard, seed.for_shard(shard)), 1.0) for shard in shards]
        position = self._sampler.position
        portions: Sequence[Portion] = self._data.take(step, shards)
        times.samples = self._sampler.samples(position)
        return [
            (
                Part(step.number, each.shard, seed.for_shard(each.shard), each.indices, each.samples)
                if each.indices.size
                else None,
                each.weight,
            )
            for each in portions
        ]

    def _forward(self, part: Part | None) -> Any:
        return None if part is None else self._task.forward(part)

    def _leaf(self, loss: Any, weight: float) -> Leaf:
        """The gradients of one shard in buckets, so weighted that the mean over shards is the mean over samples."""
        if not weight:
            return [np.zeros(bucket.size, np.float32) for bucket in self._buckets]
        gradients = self._task.backward(loss)
        if len(gradients) != len(self._like):
            raise LocalError(f"{len(gradients)} gradients for {len(self._like)} parameters")
        leaf = [bucket.pack(gradients[at]) for bucket, at in zip(self._buckets, self._cuts, strict=True)]
        if weight != 1.0:
            for flat in leaf:
                flat *= np.float32(weight)
        return leaf


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
        _demand_state(state, None)
        task.load_state(state["task"])

    return await _loaded(load, task, done, checkpoint_dir)


async def _loaded(
    load: Callable[[Mapping[Any, Any]], None],
    task: Task,
    done: JobDone,
    directory: Place | None,
) -> TrainingResult:
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


def _demand_state(state: Mapping[Any, Any], architecture: Architecture | None) -> None:
    """Refuse what is no worker's state, or one of another architecture."""
    if not {"architecture", "task"} <= set(state):
        raise LocalError(f"this is no state of a worker: it has {', '.join(map(repr, state)) or 'nothing'}")
    found = Architecture.parse(state["architecture"])
    if architecture is not None:
        architecture.demand_same(found)


class _InDoubt(Exception):
    """Cut off between the vote and its outcome. Partitioned from elsewhere has waited `hold_timeout` and gets out."""


class _Finished(Exception):
    """The job turned out to have committed its last step without this rank."""
