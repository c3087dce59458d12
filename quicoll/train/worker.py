"""A worker: its part of the data, forward, backward, one reduction, one decision, the update; and after any failure
again from where the job stands.

One step on every rank (contract C1):

    its logical shards' samples -> forward -> [barrier] -> backward -> all_reduce(avg) -> vote -> committed? -> apply

States of a worker:

    made --run()--> resumed from the newest checkpoint, its state registered --> stepping --> ended
                                                                                 stepping --> stopped (SIGTERM)

A worker whose steps may overlap (`_overlaps`; this one's do not, DiLoCo's do) leaves a step when its vote is cast, and
enters the next one ahead of the decision (`job.step(overlap=True)`):

    left --decided, in the next step's `_begin`, or where job.ready() is awaited--> committed, or lost

Until `_begin` nothing of the next step is sent, and the state is that before the step that was left. What is said and
written of a step, figures, `on_step`, a checkpoint, follows its decision, wherever that is heard.

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
4. A worker that does not train what the job trains is refused in its first view, before anything of a state moves: it
   gets a LocalError that names it and the first difference (quicoll.state.description). One with other data gets it
   when it takes over the state. The others go on.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.checks import whole
from quicoll.data.feed import Feed
from quicoll.errors import JobDone, LocalError, Partitioned, StepAborted, Terminated
from quicoll.tiers.tier_set import TierSet
from quicoll.train.architecture import Architecture
from quicoll.train.bucket import Bucket, cut
from quicoll.train.divided import Divide, Moments
from quicoll.train.figures import StepTimes, WorkerFigures
from quicoll.train.outcome import TrainingResult, demand_state, loaded
from quicoll.train.packing import packed_state
from quicoll.train.saver import CheckpointPolicy, Saver, newest_state
from quicoll.train.task import Part

if TYPE_CHECKING:
    from quicoll.checkpoint.parts import Shard
    from quicoll.collectives.shards import Leaves, Shards
    from quicoll.data.portions import Portion
    from quicoll.data.sampler import Sampler
    from quicoll.job import Job
    from quicoll.plan.schedule import AlgorithmName
    from quicoll.state.sharded import Sharded
    from quicoll.step.context import Step
    from quicoll.train.task import Task

__all__ = ["OnStep", "Worker"]

_log = logging.getLogger("quicoll.train")

OnStep = Callable[[int], Awaitable[None] | None]
Leaf = list[np.ndarray[Any, np.dtype[np.float32]]]
"""The gradients of one shard, one buffer for each bucket."""


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
        divide: Divide | None = None,
        tiers: TierSet | None = None,
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
            divide: How the optimizer's state is divided between the ranks; None: each has all of it. The task is a
                `DivisibleTask` then, as `TorchTask` is. Changes no bits with the number of ranks.
            tiers: The set of tiers that the job begins with; None: the worker has nothing to do with tiers. Otherwise
                the set in force is a part of the state, and what is proposed (`job.tiers.propose`) is agreed in the
                next step.
            on_step: Called with the step's number after each step that this rank committed, and awaited if it returns
                an awaitable, before anything of the next step is sent.
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
        if divide is not None and (bucket_bytes or algorithm == "exchange"):
            raise LocalError('a divided state takes one reduce_scatter: no bucket_bytes, and no algorithm "exchange"')
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
        parameters, settings = task.parameters(), {**task.architecture(), "shards": self._shards}
        self._like = list(parameters.values())  # their shapes and kinds are the gradients'
        self._cuts = cut(self._like, bucket_bytes)
        self._buckets = [Bucket.of(self._like[each]) for each in self._cuts]
        self._moments: Moments | None = None
        if divide is not None:
            directory = None if checkpoints is None else checkpoints.directory
            self._moments = Moments(task, divide, self._buckets[0].size, directory)
            settings["divided"] = self._moments.text
        self._tiers = tiers
        self.architecture = Architecture.of(parameters, settings)
        self.figures = WorkerFigures()
        self._reported = self.figures
        self._saver: Saver | None = None
        self._attempts: list[_Attempt] = []  # whose outcome is not counted yet
        self._overlap = False  # of the step that is entered now
        self._applied = 0.0  # seconds that were spent in applying steps
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
        """Return what is the job's: the task's state, where the data stands, the tiers, and the architecture.

        It is what ranks are handed and what checkpoints hold. May alias live memory.
        """
        found: dict[str, Any] = {"architecture": self.architecture.text, "task": self._task.state()}
        if self._sampler is not None:
            found["data"] = self._sampler.state()
        if self._tiers is not None:
            found["tiers"] = self._job.tiers.state()
        return found

    def load_state(self, state: Mapping[Any, Any]) -> None:
        """Take over a state.

        Args:
            state: What `state` returned, here or on another rank.
        Raises:
            LocalError: It is of another architecture or of other data, and says in what; nothing has changed. Or the
                task refuses it.
        """
        demand_state(state, self.architecture)
        if self._sampler is not None:
            if "data" not in state:
                raise LocalError("the state is of a worker without data, this one has some")
            self._sampler.demand_same(state["data"])
        elif "data" in state:
            raise LocalError("the state is of a worker with data, this one has none")
        if (self._tiers is not None) != ("tiers" in state):
            one, other = ("without", "some") if self._tiers is not None else ("with", "none")
            raise LocalError(f"the state is of a worker {one} tiers, this one has {other}")
        self._task.load_state(state["task"])
        if self._sampler is not None:
            self._sampler.load_state(state["data"])
        if self._tiers is not None:
            self._job.tiers.load_state(state["tiers"])

    def _sharded(self) -> Mapping[str, Sharded]:
        """What is the job's beside `state`, by name: of it each rank has a part."""
        return {} if self._moments is None else self._moments.named

    def _sharded_parts(self) -> Mapping[str, Shard]:
        """What this rank writes of that in a checkpoint."""
        return {} if self._moments is None else self._moments.parts()

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
            ShardLost: A part of the divided state is nowhere; see `Divide.backup`.
            JobDone: The other ranks have ended before this one had the state of the last step, and there is no
                checkpoint of it; says so. Where there is one, its state is loaded and the result returned.
            CheckpointError: The last checkpoint could not be written; raised after all steps are committed, or instead
                of Terminated. Failures of earlier ones are logged, and training goes on.
            Terminated: This rank was asked to stop.
            Exception: What the task or the loader raises. StepAborted is never raised.
        """
        self._steps, self._epochs = self._demand_end(steps, epochs)
        began = time.monotonic()
        job = self._job
        if self._tiers is not None and job.tiers.current == TierSet():
            job.tiers.load_state({"tier_set": self._tiers.encoded})
        resumed_from = await self._resume()
        job.register_state(
            self.state,
            self.load_state,
            sharded=self._sharded() or None,
            architecture=dict(self.architecture.lines),
        )
        policy = self._checkpoints
        if policy is not None and policy.every:
            self._saver = Saver(job, policy, self.state, shards=self._sharded_parts, resumed_from=resumed_from or 0)
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
            await self._conclude()
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
        self._job.resume_from(found.step, source=str(found.where))
        _log.info("resumed from %s", found.where)
        return found.step

    async def _train(self) -> TrainingResult | None:
        """Step until all is over. Returns a result where the job ended without this rank, and its state is loaded."""
        ahead = False
        while True:
            try:
                if not ahead:
                    # A rank that was cut off in its vote, or joins late, learns here that the job is further.
                    self._start_over()
                    await self._job.ready()
                    await self._conclude()
                    if self._over():
                        return None
                ahead = False
                ahead = await self._one_step()
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
                found = await loaded(self.load_state, self._task, error, directory)
                if self._epochs is not None and not self._over():
                    raise  # the others were told to end earlier than this one
                return found
            except _Finished:
                return None
            else:
                if not ahead and self._over():
                    # No other view is waited for: the others may have left by now, with what they own of the state.
                    return None

    async def _conclude(self) -> None:
        """Count the attempts whose outcome is known now, and say which step is committed."""
        attempts, self._attempts = self._attempts, []
        for each in attempts:
            if each.applied:
                self.figures = self.figures.committed(each.times)
                await self._committed(each.number)
            else:
                self.figures = self.figures.lost(each.times)

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

    def _start_over(self) -> None:
        """Forget what was done ahead of a decision: that may have been against it, or the state is another one now."""

    def _overlaps(self) -> bool:
        """Whether the step that is entered now is left before it is decided. Not the last one."""
        return False

    async def _one_step(self) -> bool:
        """One attempt at the next step. Whether it is left before it is decided; else it is committed and applied."""
        clock = asyncio.get_running_loop().time
        began, self._overlap = clock(), self._overlaps()
        step = self._job.step(overlap=self._overlap)
        attempt = _Attempt(times := StepTimes())
        try:
            async with step:
                attempt.number = step.number
                times.communication = clock() - began
                update = await self._update(step, times)

                def apply() -> None:
                    started = clock()
                    update()
                    self._applied += clock() - started
                    attempt.applied = True

                step.on_commit(apply)
                waited, applied = clock(), self._applied
            times.communication += clock() - waited - (self._applied - applied)
        except (StepAborted, Partitioned) as error:
            times.seconds = clock() - began
            self._attempts.append(attempt)
            if isinstance(error, Partitioned):
                raise _InDoubt(str(error)) from error
            await self._conclude()
            raise
        times.seconds = clock() - began
        self._attempts.append(attempt)
        if not self._overlap:
            await self._conclude()
        return self._overlap

    async def _begin(self, step: Step, times: StepTimes) -> None:
        """Begin a step, when the one before it is decided, and do what comes first in it on all ranks."""
        clock = asyncio.get_running_loop().time
        began, applied = clock(), self._applied
        await step.ready()
        times.communication += clock() - began - (self._applied - applied)
        await self._conclude()
        began = clock()
        if self._over():
            raise _Finished
        if self._saver:
            await self._saver.in_step(step)
        if self._tiers is not None:
            await self._job.tiers.agree(step)
        times.communication += clock() - began

    async def _update(self, step: Step, times: StepTimes) -> Callable[[], None]:
        """Begin the step, compute this rank's part, and all that is done together; return what is left to the commit.

        What is computed before `_begin` is ahead of the decision on the step before.
        """
        await self._begin(step, times)
        # Asked for inside the step: only here is it certain which view, and so which shards, the step is about.
        shards = self._job.group.shards(self._shards)
        leaves = await self._leaves(step, shards, times)
        # More ranks than shards: this one has no leaf, says its shape and contributes nothing.
        parts = [
            shards.leaves([leaf[number] for leaf in leaves], like=np.empty(bucket.size, np.float32))
            for number, bucket in enumerate(self._buckets)
        ]
        if self._moments is not None:
            values = await self._divided(step, self._moments, parts[0], times)
            task = self._moments.task
            return lambda: task.advance(self._buckets[0].unpack(values, self._like))
        clock = asyncio.get_running_loop().time
        pending = [self._job.group.all_reduce(part, op="avg", algorithm=self._algorithm) for part in parts]
        began = clock()
        averages = [await each for each in pending]
        times.communication += clock() - began
        return lambda: self._task.apply(self._unpacked(averages))

    async def _divided(self, step: Step, moments: Moments, part: Leaves[Any], times: StepTimes) -> Any:
        """Reduce, update what this rank owns, and give all ranks the new values; return these."""
        clock, group, sharded = asyncio.get_running_loop().time, self._job.group, moments.sharded
        began = clock()
        mean = await group.reduce_scatter(part, counts=sharded.counts, op="avg", algorithm=self._algorithm)
        times.communication += clock() - began
        mine, kept = moments.update(mean)
        began = clock()
        await sharded.stage(step, kept)
        values = await group.all_gather(mine, counts=sharded.counts)
        times.communication += clock() - began
        return values

    def _unpacked(self, flats: Sequence[Any]) -> list[Any]:
        """The tensors in the buckets' buffers."""
        parts = zip(self._buckets, flats, self._cuts, strict=True)
        return [part for bucket, flat, at in parts for part in bucket.unpack(flat, self._like[at])]

    async def _leaves(self, step: Step, shards: Shards, times: StepTimes) -> list[Leaf]:
        """The gradients of this rank's shards."""
        clock = asyncio.get_running_loop().time
        began = clock()
        work = self._parts(step, shards, times)
        times.data = clock() - began
        if self._phase_barrier:
            losses = [self._forward(part) for part, _ in work]
            began = clock()
            await self._job.group.barrier()
            times.communication += clock() - began
            return [self._leaf(loss, weight) for loss, (_, weight) in zip(losses, work, strict=True)]
        return [self._leaf(self._forward(part), weight) for part, weight in work]

    def _parts(self, step: Step, shards: Shards, times: StepTimes) -> list[tuple[Part | None, float]]:
        """The parts of this rank's shards and their weights; None for one that has no samples."""
        seed = self._job.seed.for_step(step.number)
        tiers = None if self._tiers is None else self._job.tiers.current
        if self._data is None or self._sampler is None:
            return [(Part(step.number, shard, seed.for_shard(shard), tiers=tiers), 1.0) for shard in shards]
        position = self._sampler.position
        portions: Sequence[Portion] = self._data.take(step, shards)
        times.samples = self._sampler.samples(position)
        return [
            (
                Part(step.number, each.shard, seed.for_shard(each.shard), each.indices, each.samples, tiers)
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


@dataclass(slots=True)
class _Attempt:
    """An attempt at a step. number: of the step; 0 until it is entered. applied: It is committed, and applied here."""

    times: StepTimes
    number: int = 0
    applied: bool = False


class _InDoubt(Exception):
    """Cut off between the vote and its outcome. Partitioned from elsewhere has waited `hold_timeout` and gets out."""


class _Finished(Exception):
    """The job turned out to have committed its last step without this rank."""
