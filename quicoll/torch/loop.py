"""A torch loop as atomic steps: what the loops of quicoll.torch.training have in common.

What a shard's passes compute depends on the state, the shard and its samples alone (quicoll.torch.leaves); the mean
over shards has the bits of the canonical order (quicoll.collectives); the optimizer steps when the step is committed,
with what `.grad` holds then. So the state after a committed step has the same bits on any number of ranks. Where the
optimizer's state is divided between the ranks, `quicoll.torch.divided_optimizer` steps in its place.

States of an attempt, which is what a loop is given:

    open --its `with` is left--> committed    `committed` is True, the optimizer and the scheduler have stepped
    open --StepAborted---------> aborted      nothing has changed; the loop is given the same step again
    open --Partitioned---------> in doubt     the loop goes on when this rank is heard again, and learns what came of it
    open --another error-------> aborted      on all ranks; the error goes to the program

`open` begins in the loop's `for`: there a rank waits for the next view, is handed a state where it is behind, and finds
that the job is over. StepAborted never reaches the program; what ends the job does.

Invariants.
1. Parameters, buffers, optimizer, scheduler and the data's position change in the callback of a committed step, and
   nowhere else. Between `reduce` and the end of its `with`, `.grad` is the program's.
   With a divided optimizer state `.grad` is taken at the end of `with`, before the vote.
   While the loop runs nobody else steps the optimizer or the scheduler (quicoll.torch.ownership).
2. An attempt that is not committed leaves no gradient behind, and torch's generators where they were.
3. Every rank issues the same collectives in a step, an all_reduce for each dtype of a leaf, also where it has no shard.

Failures: a `for` that goes on although the step before was never entered with `with`, shards that are left before the
last one, a second `reduce`, a `step()` of the optimizer's or the scheduler's that is not the loop's, gradients that are
computed past `backward` or thrown away before the update: LocalError; the step is aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from quicoll.checks import whole
from quicoll.data.feed import Feed
from quicoll.data.sampler import Sampler
from quicoll.errors import Corrupted, JobDone, LocalError, Partitioned, StepAborted, Terminated
from quicoll.torch.contents import contents_of
from quicoll.torch.divided_optimizer import DividedOptimizer
from quicoll.torch.early import EarlyGradients
from quicoll.torch.leaves import LeafRecorder, LeafShape
from quicoll.torch.model_state import state_of
from quicoll.torch.ownership import Ownership
from quicoll.train.architecture import Architecture
from quicoll.train.packing import packed_state
from quicoll.train.saver import Saver, newest_state
from quicoll.train.torch_task import settings_of

if TYPE_CHECKING:
    from quicoll.collectives.handle import Handle
    from quicoll.data.portions import Portion
    from quicoll.job import Job
    from quicoll.plan.schedule import AlgorithmName
    from quicoll.step.context import Step
    from quicoll.train.divided import Divide
    from quicoll.train.saver import CheckpointPolicy

__all__ = ["SchedulerEach", "TorchAttempt", "TorchLoop"]

_log = logging.getLogger("quicoll.torch")

_Averaging: TypeAlias = "Handle[list[torch.Tensor]]"

SchedulerEach = Literal["step", "epoch"]


class _Over(Exception):
    """The job turned out to be over when the step was entered."""


class TorchAttempt:
    """One attempt at a step: what both kinds of `with` do. See the module's head."""

    def __init__(self, loop: TorchLoop, step: Step) -> None:
        self._loop = loop
        self._step = step
        self._recorder = LeafRecorder(loop.shape)
        self._shards = loop.job.group.shards(loop.shards)
        self._portions: Sequence[Portion] | None = None
        self._rest: list[torch.Tensor] = []  # the mean of what a leaf has beside gradients, once it is there
        self._handles: list[_Averaging] = []  # of the runs of a leaf that are under way
        self._begun = self._entered = self._left = False
        self.number = step.number
        self.shard: int | None = None
        self.seed = loop.job.seed.for_step(step.number)
        self.loss = float("nan")
        self.committed = False
        if loop.data is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(self.seed.derive("loader")))  # a DataLoader draws a number when it begins
                self._portions = loop.data.take(step, self._shards)

    def shards(self) -> Iterator[Any]:
        if not self._entered or self._left:
            raise LocalError("the shards of a step are computed within `with step:`")
        if self._begun:
            raise LocalError("the shards of a step are computed once")
        self._begun = True
        portions = self._portions
        for place, shard in enumerate(self._shards):
            part = None if portions is None else portions[place]
            if part is not None and not part.indices.size:
                self._recorder.skip()
                continue
            seed = self.seed.for_shard(shard)
            weight = 1.0 if part is None else part.weight
            self.shard = shard
            last = place == len(self._shards) - 1
            self._recorder.begin(seed, self._early_gradients(weight) if last and self._loop.shape.early else None)
            yield (shard, seed) if part is None else _samples(part)
            self._recorder.end(weight)
            self.shard = None
        self._recorder.over()

    def backward(self, loss: torch.Tensor, *, more: bool) -> None:
        try:
            self._recorder.backward(loss, more=more)
        except Corrupted as error:
            if error.step is not None:
                raise
            here = self._loop.job  # what was computed again here does not know in which step
            raise Corrupted(
                error.message, rank=here.rank, node=here.node, view=here.view.view_id, step=self.number
            ) from error

    def _early_gradients(self, weight: float) -> EarlyGradients:
        """Those of the last shard: a bucket is reduced with what the shards before have of it."""
        shape, before = self._loop.shape, self._recorder.leaves

        def issue(number: int, gradients: list[torch.Tensor]) -> None:
            places = shape.early[number]
            self._handles.append(self._averaging([*(_chosen(leaf, places) for leaf in before), gradients], gradients))

        return EarlyGradients(shape.parameters, shape.early, issue, weight=weight)

    def _averaging(self, leaves: list[list[torch.Tensor]], like: list[torch.Tensor]) -> _Averaging:
        """Average a run of the leaves; called on the loop's thread, or on one of torch's in a backward pass."""
        loop = self._loop
        group = loop.job.group if _on_a_loop() else loop.job.group.for_threads()
        return group.all_reduce(self._shards.leaves(leaves, like=like), op="avg", algorithm=loop.algorithm)

    async def reduce(self) -> None:
        if not self._entered or self._left:
            raise LocalError("a step is reduced within `with step:`")
        if self._rest:
            raise LocalError("a step is reduced once")
        shape = self._loop.shape
        mean = await self._averaged(self._computed(), shape.runs(), self._handles)
        self._rest = shape.rest(mean)
        self.loss = shape.put(mean)

    def _computed(self) -> list[list[torch.Tensor]]:
        """The leaves of all shards of this rank."""
        if self._recorder.computing or len(self._recorder.leaves) != len(self._shards):
            done = len(self._recorder.leaves)
            raise LocalError(f"{done} of the {len(self._shards)} shards of this rank are computed; all have to be")
        return self._recorder.leaves

    async def _averaged(
        self, leaves: list[list[torch.Tensor]], runs: Sequence[Sequence[int]], early: Sequence[_Averaging] = ()
    ) -> list[torch.Tensor]:
        """The mean over all shards of the step of what stands at these places of a leaf, in the places' order.

        early: of the first runs, which are under way.
        """
        loop = self._loop
        like = leaves[0] if leaves else loop.shape.zeros()
        late = [
            self._averaging([_chosen(leaf, run) for leaf in leaves], _chosen(like, run)) for run in runs[len(early) :]
        ]
        mean: dict[int, torch.Tensor] = {}
        for run, handle in zip(runs, [*early, *late], strict=True):
            mean.update(zip(run, await handle, strict=True))
        leaves.clear()
        return [mean[place] for place in sorted(mean)]

    async def _update(self) -> Callable[[], None]:
        """Do what has to be done before the vote; return what is left for the commit."""
        divided, shape = self._loop.divided, self._loop.shape
        if divided is None:
            if not self._rest:
                await self.reduce()
            shape.demand_gradients(self._rest)
            return self._loop.optimizer.step
        if shape.early and not self._rest:  # gradients of all parameters are under way
            await self.reduce()
        if self._rest:  # and `.grad` is the program's
            shape.demand_gradients(self._rest)
            gradients = [parameter.grad for parameter in shape.parameters.values()]
            return await divided.stage(
                self._step, self._loop.job.group, divided.owned(gradients), [each is not None for each in gradients]
            )
        leaves, group = self._computed(), self._loop.job.group
        owned = await divided.scattered(group, self._shards, leaves, self._loop.algorithm)
        self._rest = await self._averaged(leaves, [shape.rest(range(len(shape)))])
        self.loss = float(self._rest[-1])
        return await divided.stage(self._step, group, owned, [bool(each) for each in self._rest[-2].tolist()])

    def enter(self) -> None:
        if self._entered:
            raise LocalError("a step is entered once")
        self._entered = True

    async def leave(self, error: BaseException | None) -> bool:
        """Commit or abort. Returns whether `error` is dealt with; raises what goes to the program instead."""
        with self._loop.ownership.unless_raised():
            dealt_with = await self._leave(error)
        if error is not None and not dealt_with:
            self._loop.ownership.release()
        return dealt_with

    async def _leave(self, error: BaseException | None) -> bool:
        try:
            try:
                if error is None:
                    with self._loop.ownership.changing():  # a divided state is stepped before the vote
                        update = await self._update()
                    self._step.on_commit(partial(self._commit, update))
            except BaseException as found:
                await _left(self._step, found)
                raise
            await _left(self._step, error)
        except StepAborted as aborted:
            _log.info("begun again in the next view: %s", aborted)
            return True
        except Partitioned as partitioned:
            _log.warning("whether the step is committed is known when this rank is heard again: %s", partitioned)
            return True
        finally:
            self._left = True
            self._recorder.over()
            if not self.committed:
                self._loop.shape.clear()
            self._loop.open = None
        return isinstance(error, StepAborted | Partitioned)

    def _commit(self, update: Callable[[], None]) -> None:
        self._loop.apply(self._rest, update)
        self.committed = True


class TorchLoop:
    """What is trained, and how far it is. See the module's head."""

    def __init__(
        self,
        job: Job,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Any,
        *,
        batch_size: int | None,
        shards: int | None,
        loader: Mapping[str, Any] | None,
        scheduler: Any,
        scheduler_each: SchedulerEach,
        checkpoints: CheckpointPolicy | None,
        divide: Divide | None,
        moving: Sequence[str],
        algorithm: AlgorithmName,
        bucket_bytes: int,
    ) -> None:
        if bucket_bytes < 0:
            raise LocalError(f"bucket_bytes is 0 or more, not {bucket_bytes}")
        if scheduler_each not in ("step", "epoch"):
            raise LocalError(f"scheduler_each is 'step' or 'epoch', not {scheduler_each!r}")
        self.job = job
        self.algorithm: AlgorithmName = algorithm
        self.shape = LeafShape(model, optimizer, moving, bucket_bytes=bucket_bytes)
        self.optimizer = optimizer
        self._scheduler = scheduler
        self._each_epoch = scheduler_each == "epoch"
        self.data = _as_data(job, data, batch_size, shards, loader)
        self.sampler = self.data.sampler if isinstance(self.data, Feed) else self.data
        if self.sampler is None and self._each_epoch and scheduler is not None:
            raise LocalError("epochs are of data: without data the scheduler steps with each step")
        if self.sampler is not None and shards not in (None, self.sampler.shards):
            raise LocalError(f"the data has {self.sampler.shards} shards, not {shards}")
        if self.sampler is None and shards is None:
            raise LocalError("how many logical shards has a step? Pass shards=, more than there will ever be ranks")
        self.shards = self.sampler.shards if self.sampler is not None else whole(shards, "the number of shards")
        settings = settings_of(model, optimizer, scheduler)
        # Apart, so that a rank that has another one is told which.
        settings |= {"optimizer": type(optimizer).__name__, **_each_setting(optimizer)}
        contents = contents_of(data)
        if contents is not None:
            settings["data"] = contents
        self.divided: DividedOptimizer | None = None
        if divide is not None:
            if algorithm == "exchange":
                raise LocalError('a divided state takes a reduce_scatter, for which there is no algorithm "exchange"')
            directory = None if checkpoints is None else checkpoints.directory
            self.divided = DividedOptimizer(optimizer, self.shape.parameters, divide, directory)
            settings["divided"] = self.divided.text
        self.ownership = Ownership(optimizer, scheduler)
        self.save, self.load = state_of(model, self.divided or optimizer, scheduler, self.sampler)
        self._checkpoints = checkpoints
        self._saver: Saver | None = None
        self._resumed = False
        # A step was committed in which this rank took part: after the last one it waits for no other view, since the
        # others may have left by then, with what they own of the state.
        self._committed = False
        self._over: Callable[[], bool] = lambda: True
        self.open: TorchAttempt | None = None
        described = Architecture.of(self.shape.parameters, {**settings, "shards": self.shards})
        sharded = None if self.divided is None else self.divided.sharded
        job.register_state(self.save, self.load, sharded=sharded, architecture=dict(described.lines))

    # -- the loop ------------------------------------------------------------------------------------------------------

    def until(self, *, steps: int | None = None, epochs: int | None = None) -> None:
        if steps is not None:
            last = whole(steps, "steps")
            self._over = lambda: self.job.committed_step >= last
        else:
            if self.sampler is None:
                raise LocalError("epochs are of data: pass data, or say how many steps")
            sampler, times = self.sampler, whole(epochs, "epochs")
            self._over = lambda: sampler.epoch >= times

    async def begin(self) -> None:
        """Go on from the newest checkpoint, if there is one; the first time."""
        policy = self._checkpoints
        if policy is None or self._resumed:
            return
        self._resumed = True
        found = await newest_state(policy)
        if found is not None:
            if self.divided is None and "progress" in found.state.get("optimizer", ()):
                raise LocalError(f"the optimizer's state in {found.where} is divided between ranks: pass divide=")
            self.load(found.state)
            self.job.resume_from(found.step, source=str(found.where))
            _log.info("resumed from %s", found.where)
        if policy.every:
            shards = None if self.divided is None else self.divided.parts
            self._saver = Saver(
                self.job, policy, self.save, shards=shards, resumed_from=0 if found is None else found.step
            )

    async def next(self) -> TorchAttempt | None:
        """Enter the next attempt at a step; None when the job is over."""
        if self.open is not None:
            await self.open.leave(LocalError("the step was not entered"))
            raise LocalError("the step before was not left: a loop over steps has `with step:` around its work")
        with self.ownership.unless_raised():
            self.ownership.hold()
            found = await self._next()
        if found is None:
            self.ownership.release()
        return found

    def ended(self) -> None:
        """The program has left its loop over steps, perhaps before its end."""
        if self.open is None:
            self.ownership.release()

    async def _next(self) -> TorchAttempt | None:
        try:
            while True:
                try:
                    if not (self._committed and self._over()):
                        await self.job.ready()
                    self.open = None if self._over() else await self._entered()
                except StepAborted as aborted:
                    _log.info("begun again in the next view: %s", aborted)
                    continue
                except JobDone:
                    if not self._over():
                        raise
                except _Over:
                    continue
                if self.open is None and self._saver is not None:
                    await self._saver.finish()
                    await self._saver.settle()
                return self.open
        except Terminated:
            if self._saver is not None:
                await self._saver.leave()
            raise

    async def _entered(self) -> TorchAttempt:
        step = self.job.step()
        await step.__aenter__()
        try:
            if self._over():
                raise _Over
            if self._saver is not None:
                await self._saver.in_step(step)
            return TorchAttempt(self, step)
        except BaseException as error:
            await _left(step, error)
            raise

    def apply(self, rest: list[torch.Tensor], update: Callable[[], None]) -> None:
        """Change the state, at the commit of a step."""
        with self.ownership.changing():
            self.shape.buffers.move(rest[:-2])
            update()
            self.shape.clear()
            self._committed = True
            # The data has moved before: it was taken before this was asked for.
            if self._scheduler is not None and (not self._each_epoch or self._ends_an_epoch()):
                self._scheduler.step()

    def digest(self) -> str:
        """Of the state, and of what is divided by its blocks' digests."""
        return packed_state(self.save() | ({} if self.divided is None else {"divided": self.divided.digests()})).digest

    def _ends_an_epoch(self) -> bool:
        return self.sampler is not None and self.sampler.position.step == 0


async def _left(step: Step, error: BaseException | None) -> None:
    """Leave the context of a step, as `async with` does."""
    await step.__aexit__(None if error is None else type(error), error, None if error is None else error.__traceback__)


def _as_data(
    job: Job, data: Any, batch_size: int | None, shards: int | None, loader: Mapping[str, Any] | None
) -> Feed | Sampler | None:
    if isinstance(data, Feed | Sampler) or data is None:
        if batch_size is not None or loader is not None:
            raise LocalError("batch_size and loader are of a data set; a Sampler and a Feed have their own")
        return data
    if batch_size is None or shards is None:
        raise LocalError("with a data set pass batch_size=, of all ranks together, and shards=, which divide it")
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise LocalError(f"a data set has len() and samples by number; this is a {type(data).__name__}")
    options = dict(loader or {})
    sampler = Sampler(len(data), batch_size=batch_size, shards=shards, seed=job.seed)
    return Feed(sampler, lambda lists: torch.utils.data.DataLoader(data, batch_sampler=lists, **options))


def _each_setting(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    kind = type(optimizer).__name__
    return {
        f"optimizer, {name} of {kind}": str(value) for name, value in optimizer.defaults.items() if name != "params"
    }


def _chosen(leaf: list[torch.Tensor], places: Sequence[int]) -> list[torch.Tensor]:
    return [leaf[place] for place in places]


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _samples(part: Portion) -> Any:
    return torch.from_numpy(part.indices) if part.samples is None else part.samples
