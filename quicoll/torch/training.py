"""A torch loop as atomic steps: the loop that a program has anyway, with a few lines changed.

    for step in training.epochs(3):                     # steps, until every sample was used three times
        with step:                                      # committed on all ranks, or on none
            for x, y in step.shards:                    # the samples of this rank's logical shards, one after the other
                step.backward(loss(model(x), y))
            step.reduce()                               # .grad is the mean over the whole batch from here on
            clip_grad_norm_(model.parameters(), 1.0)    # whatever else the program does with gradients
        print(step.number, step.loss)

The state after a committed step has the same bits on any number of ranks. StepAborted never reaches the program: the
loop is given the same step again; what ends the job does. Why, the states of an attempt, what holds in each and the
failure cases: quicoll.torch.loop.

Two classes: `Training` for the jobs of quicoll.blocking, `AsyncTraining` for those of quicoll.join, whose loops have
`async for`, `async with` and `await step.reduce()`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from quicoll.errors import LocalError
from quicoll.torch.loop import SchedulerEach, TorchAttempt, TorchLoop

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from quicoll import blocking
    from quicoll.job import Job
    from quicoll.numerics.seed import Seed
    from quicoll.plan.schedule import AlgorithmName
    from quicoll.train.divided import Divide
    from quicoll.train.saver import CheckpointPolicy

__all__ = ["AsyncTraining", "AsyncTrainingStep", "Training", "TrainingStep"]

T = TypeVar("T")


class _Run(Protocol):
    """`quicoll.blocking.Job.run`."""

    def __call__(self, work: Callable[[Job], Coroutine[Any, Any, T]], /) -> T: ...


class _StepOfLoop:
    """What a loop over steps is given; see the module's head."""

    def __init__(self, attempt: TorchAttempt) -> None:
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
            LocalError: It is no scalar; or no shard is being computed; or there are gradients that came past this call
                (`loss.backward()`), or those of the call before are gone (`zero_grad()`); or with `bucket_bytes` the
                call before was the last one, or a gradient comes twice in it.
        """
        self._attempt.backward(loss, more=more)


class TrainingStep(_StepOfLoop):
    """One attempt at a step, in a loop over `Training.steps` or `Training.epochs`; `with` enters it once."""

    def __init__(self, attempt: TorchAttempt, run: _Run) -> None:
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
            optimizer: Of its parameters. It steps when a step is committed. While a loop over steps runs its `step` and
                the scheduler's raise LocalError where the program calls them.
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
        if not hasattr(job, "run"):
            raise LocalError(
                f"Training is for a job of quicoll.blocking; with a {type(job).__module__}.{type(job).__name__}, as a "
                "scenario and `async with quicoll.join()` give it, use AsyncTraining, `async for` and `async with`"
            )
        self._run = job.run
        self._loop = TorchLoop(
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
        try:
            while (attempt := self._run(lambda _: self._loop.next())) is not None:
                yield TrainingStep(attempt, self._run)
        finally:
            self._loop.ended()

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
        self._loop = TorchLoop(
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
        try:
            while (attempt := await self._loop.next()) is not None:
                yield AsyncTrainingStep(attempt)
        finally:
            self._loop.ended()

    def state(self) -> dict[str, Any]:
        """Return the state of model, optimizer, scheduler and data, less what is divided. It may alias live memory."""
        return self._loop.save()

    def digest(self) -> str:
        """Return a digest of that state: equal on all ranks after a committed step, and on any number of them."""
        return self._loop.digest()


async def _itself(job: Job) -> Job:
    return job
