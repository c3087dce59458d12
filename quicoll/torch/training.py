"""A torch loop as atomic steps: the loop that a program has anyway, with a few lines changed.

    for step in training.epochs(3):                     # steps, until every sample was used three times
        with step:                                      # committed on all ranks, or on none
            for x, y in step.shards:                    # the samples of this rank's logical shards, one after the other
                step.backward(loss(model(x), y))
            step.reduce()                               # .grad is the mean over the whole batch from here on
            clip_grad_norm_(model.parameters(), 1.0)    # whatever else the program does with gradients
        print(step.number, step.loss)

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
2. An attempt that is not committed leaves no gradient behind, and torch's generators where they were.
3. Every rank issues the same collectives in a step, an all_reduce for each dtype of a leaf, also where it has no shard.

Failures: a `for` that goes on although the step before was never entered with `with`, shards that are left before the
last one, a second `reduce`: LocalError; the step is aborted.

Two classes: `Training` for the jobs of quicoll.blocking, `AsyncTraining` for those of quicoll.join, whose loops have
`async for`, `async with` and `await step.reduce()`. What they do is in `_Loop` and `_Attempt`, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

import torch

from quicoll.checks import whole
from quicoll.data.feed import Feed
from quicoll.data.sampler import Sampler
from quicoll.errors import Corrupted, JobDone, LocalError, Partitioned, StepAborted, Terminated
from quicoll.torch.divided_optimizer import DividedOptimizer
from quicoll.torch.early import EarlyGradients
from quicoll.torch.leaves import LeafRecorder, LeafShape
from quicoll.torch.model_state import state_of
from quicoll.train.architecture import Architecture
from quicoll.train.packing import packed_state
from quicoll.train.saver import Saver, newest_state
from quicoll.train.torch_task import settings_of

if TYPE_CHECKING:
    from types import TracebackType

    from quicoll import blocking
    from quicoll.collectives.handle import Handle
    from quicoll.data.portions import Portion
    from quicoll.job import Job
    from quicoll.numerics.seed import Seed
    from quicoll.plan.schedule import AlgorithmName
    from quicoll.step.context import Step
    from quicoll.train.divided import Divide
    from quicoll.train.saver import CheckpointPolicy

__all__ = ["AsyncTraining", "AsyncTrainingStep", "Training", "TrainingStep"]

_log = logging.getLogger("quicoll.torch")

T = TypeVar("T")

_Averaging: TypeAlias = "Handle[list[torch.Tensor]]"

SchedulerEach = Literal["step", "epoch"]


class _Run(Protocol):
    """`quicoll.blocking.Job.run`."""

    def __call__(self, work: Callable[[Job], Coroutine[Any, Any, T]], /) -> T: ...


class _Over(Exception):
    """The job turned out to be over when the step was entered."""


class _Attempt:
    """One attempt at a step: what both kinds of `with` do. See the module's head."""

    def __init__(self, loop: _Loop, step: Step) -> None:
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
            return self._loop.optimizer.step
        if shape.early and not self._rest:  # gradients of all parameters are under way
            await self.reduce()
        if self._rest:  # and `.grad` is the program's
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
        try:
            try:
                if error is None:
                    self._step.on_commit(partial(self._commit, await self._update()))
            except BaseException as found:
                await left(self._step, found)
                raise
            await left(self._step, error)
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


class _Loop:
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
        self.divided: DividedOptimizer | None = None
        if divide is not None:
            if algorithm == "exchange":
                raise LocalError('a divided state takes a reduce_scatter, for which there is no algorithm "exchange"')
            directory = None if checkpoints is None else checkpoints.directory
            self.divided = DividedOptimizer(optimizer, self.shape.parameters, divide, directory)
            settings["divided"] = self.divided.text
        self.save, self.load = state_of(model, self.divided or optimizer, scheduler, self.sampler)
        self._checkpoints = checkpoints
        self._saver: Saver | None = None
        self._resumed = False
        self._over: Callable[[], bool] = lambda: True
        self.open: _Attempt | None = None
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
            self.job.resume_from(found.step)
            _log.info("resumed from %s", found.where)
        if policy.every:
            shards = None if self.divided is None else self.divided.parts
            self._saver = Saver(
                self.job, policy, self.save, shards=shards, resumed_from=0 if found is None else found.step
            )

    async def next(self) -> _Attempt | None:
        """Enter the next attempt at a step; None when the job is over."""
        if self.open is not None:
            await self.open.leave(LocalError("the step was not entered"))
            raise LocalError("the step before was not left: a loop over steps has `with step:` around its work")
        try:
            while True:
                try:
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

    async def _entered(self) -> _Attempt:
        step = self.job.step()
        await step.__aenter__()
        try:
            if self._over():
                raise _Over
            if self._saver is not None:
                await self._saver.in_step(step)
            return _Attempt(self, step)
        except BaseException as error:
            await left(step, error)
            raise

    def apply(self, rest: list[torch.Tensor], update: Callable[[], None]) -> None:
        """Change the state, at the commit of a step."""
        self.shape.buffers.move(rest[:-2])
        update()
        self.shape.clear()
        # The data has moved before: it was taken before this was asked for.
        if self._scheduler is not None and (not self._each_epoch or self._ends_an_epoch()):
            self._scheduler.step()

    def digest(self) -> str:
        """Of the state, and of what is divided by its blocks' digests."""
        return packed_state(self.save() | ({} if self.divided is None else {"divided": self.divided.digests()})).digest

    def _ends_an_epoch(self) -> bool:
        return self.sampler is not None and self.sampler.position.step == 0


async def left(step: Step, error: BaseException | None) -> None:
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


class _StepOfLoop:
    """What a loop over steps is given; see the module's head."""

    def __init__(self, attempt: _Attempt) -> None:
        self._attempt = attempt

    @property
    def number(self) -> int:
        """The step's number, from 1. One that is attempted again keeps its number."""
        return self._attempt.number

    @property
    def shards(self) -> Iterator[Any]:
        """Iterate once, within `with`, over the samples of this rank's logical shards; there may be none.

        With a data set or a feed, each is what the loader made of the shard's samples; with a sampler, their indices,
        a tensor of int64; without data a pair: the number of the shard, and the seed for what is random in it.
        """
        return self._attempt.shards()

    @property
    def shard(self) -> int | None:
        """The logical shard that is being computed; None between them."""
        return self._attempt.shard

    @property
    def seed(self) -> Seed:
        """The step's seed, equal on all ranks, and for each attempt. Within a shard torch is seeded from it already."""
        return self._attempt.seed

    @property
    def loss(self) -> float:
        """The mean over the batch of what `backward` was given; NaN before `reduce`. The same bits on all ranks."""
        return self._attempt.loss

    @property
    def committed(self) -> bool:
        """Whether the step is committed, and the optimizer has stepped."""
        return self._attempt.committed

    def backward(self, loss: torch.Tensor, *, more: bool = False) -> None:
        """Compute the gradients of a shard, or of a part of it; gradients and losses of several calls add up.

        Args:
            loss: The mean over the samples of this shard, a scalar.
            more: Further calls for this shard follow. Only needed with `bucket_bytes`.
        Raises:
            LocalError: It is no scalar; or no shard is being computed; or with `bucket_bytes` the call before was the
                last one, or a gradient comes twice in it.
        """
        self._attempt.backward(loss, more=more)


class TrainingStep(_StepOfLoop):
    """One attempt at a step, in a loop over `Training.steps` or `Training.epochs`; `with` enters it once."""

    def __init__(self, attempt: _Attempt, run: _Run) -> None:
        super().__init__(attempt)
        self._run = run

    def reduce(self) -> None:
        """Average the gradients over all shards of the step: `.grad` of each parameter is the mean over the batch.

        Without this call it is done when the step is left. `.grad` is None where no shard had a gradient.

        Raises:
            LocalError: Not all shards are computed; or it was called before.
            PeerError: A rank was lost; it leads to another attempt, like all that aborts a step.
        """
        self._run(lambda _: self._attempt.reduce())

    def __enter__(self) -> TrainingStep:
        self._attempt.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._run(lambda _: self._attempt.leave(error))


class AsyncTrainingStep(_StepOfLoop):
    """One attempt at a step, in a loop over `AsyncTraining.steps` or `.epochs`; `async with` enters it once."""

    async def reduce(self) -> None:
        """Do as `TrainingStep.reduce`."""
        await self._attempt.reduce()

    async def __aenter__(self) -> AsyncTrainingStep:
        self._attempt.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return await self._attempt.leave(error)


class Training:
    """The training of a torch module as one rank of a `quicoll.blocking.Job`. See the module's head."""

    def __init__(
        self,
        job: blocking.Job,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Any = None,
        *,
        batch_size: int | None = None,
        shards: int | None = None,
        loader: Mapping[str, Any] | None = None,
        scheduler: Any = None,
        scheduler_each: SchedulerEach = "step",
        checkpoints: CheckpointPolicy | None = None,
        divide: Divide | None = None,
        moving: Sequence[str] = (),
        algorithm: AlgorithmName = "auto",
        bucket_bytes: int = 0,
    ) -> None:
        """Say what is trained, equally on every rank, and register it as the job's state. Nothing is sent yet.

        Args:
            job: A joined job.
            model: What is trained; parameters of any floating dtype. Its buffers that a forward pass moves (BatchNorm)
                move at the commit, by the mean over the shards.
            optimizer: Of its parameters. It steps when a step is committed; the program does not call its `step`.
            data: A data set with `len()` and samples by number, for which a `quicoll.data.Sampler` and a DataLoader are
                made; or a Sampler or Feed; or None, where the program finds its samples by shard and seed.
            batch_size: With a data set: samples of a step on all ranks together, a multiple of `shards`.
            shards: Logical shards of a step, more than there will ever be ranks. The bits depend on it.
            loader: With a data set: further arguments for DataLoader, such as `{"num_workers": 2}`.
            scheduler: Its `step()` follows the optimizer's.
            scheduler_each: After each "step", or after the last step of each "epoch".
            checkpoints: When and where they are written, by all ranks together; found again at the start.
            divide: How the optimizer's state is divided between the ranks; None: each has all of it. The optimizer
                works element by element then, and has not stepped. Changes no bits.
            moving: Names of further buffers that a forward pass moves.
            algorithm: As in `Group.all_reduce`. Changes no bits.
            bucket_bytes: Gradients travel while the backward pass of a rank's last shard goes on, whenever so many of
                their bytes are there (25 << 20 is a good size); 0: all when the step is reduced. Changes no bits. A
                shard with several calls of `backward` then says which is the last (`more`). With `divide` all ranks get
                all gradients then, which is more traffic.
        Raises:
            LocalError: An argument is invalid.
        """
        self._run = job.run
        self._loop = _Loop(
            job.run(_itself), model, optimizer, data, batch_size=batch_size, shards=shards, loader=loader,
            scheduler=scheduler, scheduler_each=scheduler_each, checkpoints=checkpoints, divide=divide, moving=moving,
            algorithm=algorithm, bucket_bytes=bucket_bytes,
        )  # fmt: skip

    def steps(self, count: int) -> Iterator[TrainingStep]:
        """Iterate over attempts at steps until the job has committed so many, counted from the job's beginning.

        Args:
            count: The last step; the same on every rank.
        Returns:
            An iterator; each of its steps is entered with `with`.
        Raises:
            LocalError: As `quicoll.Job.ready`; the iterator raises what that raises, but for StepAborted.
        """
        self._loop.until(steps=count)
        return self._attempts()

    def epochs(self, count: int) -> Iterator[TrainingStep]:
        """Iterate over attempts at steps until each sample was used so many times, counted from the job's beginning.

        Args:
            count: Epochs; the same on every rank.
        Returns:
            As `steps`.
        Raises:
            LocalError: There is no data; else as `steps`.
        """
        self._loop.until(epochs=count)
        return self._attempts()

    def _attempts(self) -> Iterator[TrainingStep]:
        self._run(lambda _: self._loop.begin())
        while (attempt := self._run(lambda _: self._loop.next())) is not None:
            yield TrainingStep(attempt, self._run)

    def state(self) -> dict[str, Any]:
        """Return the state of model, optimizer, scheduler and data, less what is divided. It may alias live memory."""
        return self._loop.save()

    def digest(self) -> str:
        """Return a digest of that state: equal on all ranks after a committed step, and on any number of them."""
        return self._loop.digest()


class AsyncTraining:
    """The training of a torch module as one rank of a `quicoll.Job`. See the module's head."""

    def __init__(
        self,
        job: Job,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Any = None,
        *,
        batch_size: int | None = None,
        shards: int | None = None,
        loader: Mapping[str, Any] | None = None,
        scheduler: Any = None,
        scheduler_each: SchedulerEach = "step",
        checkpoints: CheckpointPolicy | None = None,
        divide: Divide | None = None,
        moving: Sequence[str] = (),
        algorithm: AlgorithmName = "auto",
        bucket_bytes: int = 0,
    ) -> None:
        """Say what is trained; arguments and errors are those of `Training`."""
        self._loop = _Loop(
            job, model, optimizer, data, batch_size=batch_size, shards=shards, loader=loader, scheduler=scheduler,
            scheduler_each=scheduler_each, checkpoints=checkpoints, divide=divide, moving=moving, algorithm=algorithm,
            bucket_bytes=bucket_bytes,
        )  # fmt: skip

    def steps(self, count: int) -> AsyncIterator[AsyncTrainingStep]:
        """Do as `Training.steps`, for `async for`."""
        self._loop.until(steps=count)
        return self._attempts()

    def epochs(self, count: int) -> AsyncIterator[AsyncTrainingStep]:
        """Do as `Training.epochs`, for `async for`."""
        self._loop.until(epochs=count)
        return self._attempts()

    async def _attempts(self) -> AsyncIterator[AsyncTrainingStep]:
        await self._loop.begin()
        while (attempt := await self._loop.next()) is not None:
            yield AsyncTrainingStep(attempt)

    def state(self) -> dict[str, Any]:
        """Return the state of model, optimizer, scheduler and data, less what is divided. It may alias live memory."""
        return self._loop.save()

    def digest(self) -> str:
        """Return a digest of that state: equal on all ranks after a committed step, and on any number of them."""
        return self._loop.digest()


async def _itself(job: Job) -> Job:
    return job
