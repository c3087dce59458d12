"""The same names for synchronous loops: `with quicoll.blocking.join(...) as job`, and no `await` anywhere.

Nothing is implemented twice. A collective is the asynchronous one, issued from this thread to the engine's, and waited
for here; with `async_op=True` the call gives a `BlockingHandle` at once, so that operations overlap:

    handles = [job.group.all_reduce(g, async_op=True) for g in gradients]
    totals = [handle.wait() for handle in handles]      # in any order

A `Worker` is made of a blocking job, and trains in one call until it is done: `Worker(job, task, shards=8).run(...)`.

Joining, steps and views run the asynchronous methods on a private event loop of this thread. A call blocks for as long
as the asynchronous one would be awaited, and raises what that raises. Use a job on the thread that made it, and in its
process: calls from others, or after the job's end, are a LocalError. Inside a running event loop use `quicoll.join`.

A plain thread beside an event loop may use a group of that loop's job: `quicoll.blocking.Group(job.group)`. The order
of the calls is what tells operations apart: a program whose threads share a group sees to it that all ranks call in one
order.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack

import quicoll.job as _asynchronous
import quicoll.step.context as _steps
import quicoll.tiers as _tiers
import quicoll.train.worker as _training
from quicoll.collectives.blocking_group import Group, documented_as
from quicoll.collectives.handle import BlockingHandle
from quicoll.engine.answers import loop_here
from quicoll.errors import LocalError
from quicoll.joining.entry import join as _join_asynchronously

if TYPE_CHECKING:
    from quicoll.config import Config, JoinSettings
    from quicoll.data.feed import Feed
    from quicoll.data.sampler import Sampler
    from quicoll.membership.view import View
    from quicoll.numerics.seed import Seed
    from quicoll.observability.events import Observer
    from quicoll.plan.schedule import AlgorithmName
    from quicoll.state.sharded import Sharded
    from quicoll.tiers import Consistency, TierSet
    from quicoll.train.architecture import Architecture
    from quicoll.train.divided import Divide
    from quicoll.train.figures import WorkerFigures
    from quicoll.train.outcome import TrainingResult
    from quicoll.train.saver import CheckpointPolicy
    from quicoll.train.task import Task
    from quicoll.train.worker import OnStep

__all__ = ["BlockingHandle", "Group", "Job", "SharedState", "Step", "Tiers", "Worker", "join"]

P = ParamSpec("P")
T = TypeVar("T")


def _job_method(
    method: Callable[Concatenate[_asynchronous.Job, P], T],
) -> Callable[Concatenate[Job, P], T]:
    """The same method: it waits for nothing."""

    @functools.wraps(method)
    def call(self: Job, /, *arguments: P.args, **options: P.kwargs) -> T:
        return method(self._inner, *arguments, **options)

    return call


def _awaited_job_method(
    method: Callable[Concatenate[_asynchronous.Job, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Job, P], T]:
    """The same method, which returns when the asynchronous one has."""

    @functools.wraps(method)
    def call(self: Job, /, *arguments: P.args, **options: P.kwargs) -> T:
        return self._home(method(self._inner, *arguments, **options))

    return call


class Step:
    """`with job.step() as step`; see `quicoll.Step`."""

    def __init__(self, step: _steps.Step, home: _Home) -> None:
        self._inner = step
        self._home = home

    @property
    @documented_as(_steps.Step.number)
    def number(self) -> int:
        return self._inner.number

    @property
    @documented_as(_steps.Step.view)
    def view(self) -> View | None:
        return self._inner.view

    @property
    @documented_as(_steps.Step.decided)
    def decided(self) -> bool:
        return self._inner.decided

    @documented_as(_steps.Step.on_commit)
    def on_commit(self, callback: Callable[[], None]) -> None:
        self._inner.on_commit(callback)

    @documented_as(_steps.Step.ready)
    def ready(self) -> None:
        self._home(self._inner.ready())

    def stage(self, sharded: Sharded, values: Mapping[str, Any]) -> None:
        """Give this rank's part of a sharded state new values, if the step is committed; see `quicoll.Sharded.stage`.

        Args:
            sharded: The state.
            values: By name, for all pieces: tensors of as many elements as this rank owns.
        """
        self._home(sharded.stage(self._inner, values))

    def __enter__(self) -> Step:
        self._home(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._home(self._inner.__aexit__(kind, error, trace))


class Tiers:
    """The tiers of a job on one rank; see `quicoll.Tiers`."""

    def __init__(self, tiers: _tiers.Tiers, home: _Home) -> None:
        self._inner = tiers
        self._home = home

    @property
    @documented_as(_tiers.Tiers.current)
    def current(self) -> TierSet:
        return self._inner.current

    @property
    @documented_as(_tiers.Tiers.pending)
    def pending(self) -> TierSet | None:
        return self._inner.pending

    @documented_as(_tiers.Tiers.propose)
    def propose(self, tier_set: TierSet) -> None:
        self._inner.propose(tier_set)

    @documented_as(_tiers.Tiers.on_change)
    def on_change(self, callback: Callable[[TierSet, TierSet], None]) -> None:
        self._inner.on_change(callback)

    @documented_as(_tiers.Tiers.weigh)
    def weigh(self, callback: Callable[[TierSet], str]) -> None:
        self._inner.weigh(callback)

    @documented_as(_tiers.Tiers.agree)
    def agree(self, step: Step) -> TierSet:
        return self._home(self._inner.agree(step))

    @documented_as(_tiers.Tiers.state)
    def state(self) -> dict[str, bytes]:
        return self._inner.state()

    @documented_as(_tiers.Tiers.load_state)
    def load_state(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state(state)


class SharedState:
    """State that the ranks share by name; see `quicoll.SharedState`."""

    def __init__(self, state: _tiers.SharedState, home: _Home) -> None:
        self._inner = state
        self._home = home
        self.name = state.name
        self.consistency = state.consistency

    @documented_as(_tiers.SharedState.stage)
    def stage(self, step: Step, values: Mapping[str, Any], *, delete: Sequence[str] = ()) -> None:
        self._inner.stage(step, values, delete=delete)

    @documented_as(_tiers.SharedState.state)
    def state(self) -> dict[str, Any]:
        return self._inner.state()

    @documented_as(_tiers.SharedState.load_state)
    def load_state(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state(state)

    @documented_as(_tiers.SharedState.write)
    def write(self, values: Mapping[str, Any], *, delete: Sequence[str] = ()) -> None:
        self._home(self._inner.write(values, delete=delete))

    @documented_as(_tiers.SharedState.read)
    def read(self) -> dict[str, Any]:
        return self._home(self._inner.read())

    @documented_as(_tiers.SharedState.strong)
    def strong(self, *, timeout: float | None = None) -> dict[str, Any]:
        return self._home(self._inner.strong(timeout=timeout))


class Job:
    """A rank's part in a job; see `quicoll.Job`."""

    def __init__(self, job: _asynchronous.Job, home: _Home) -> None:
        self._inner = job
        self._home = home
        self.group = Group(job.group, home.check)
        self.tiers = Tiers(job.tiers, home)

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def config(self) -> Config:
        """The settings in force, with their sources."""
        return self._inner.config

    @property
    @documented_as(_asynchronous.Job.rank)
    def rank(self) -> int:
        return self._inner.rank

    @property
    @documented_as(_asynchronous.Job.world_size)
    def world_size(self) -> int:
        return self._inner.world_size

    @property
    @documented_as(_asynchronous.Job.is_spare)
    def is_spare(self) -> bool:
        return self._inner.is_spare

    @property
    @documented_as(_asynchronous.Job.node)
    def node(self) -> str:
        return self._inner.node

    @property
    @documented_as(_asynchronous.Job.view)
    def view(self) -> View:
        return self._inner.view

    @property
    @documented_as(_asynchronous.Job.seed)
    def seed(self) -> Seed:
        return self._inner.seed

    @property
    @documented_as(_asynchronous.Job.committed_step)
    def committed_step(self) -> int:
        return self._inner.committed_step

    @property
    @documented_as(_asynchronous.Job.stopping)
    def stopping(self) -> bool:
        return self._inner.stopping

    stop = _job_method(_asynchronous.Job.stop)
    stop_at_sigterm = _job_method(_asynchronous.Job.stop_at_sigterm)

    @property
    @documented_as(_asynchronous.Job.state_torn)
    def state_torn(self) -> bool:
        return self._inner.state_torn

    emit = _job_method(_asynchronous.Job.emit)
    stragglers = _job_method(_asynchronous.Job.stragglers)
    audit = _job_method(_asynchronous.Job.audit)
    register_state = _job_method(_asynchronous.Job.register_state)
    resume_from = _job_method(_asynchronous.Job.resume_from)
    check_state = _awaited_job_method(_asynchronous.Job.check_state)
    ready = _awaited_job_method(_asynchronous.Job.ready)
    rotate_certificates = _awaited_job_method(_asynchronous.Job.rotate_certificates)
    deny = _awaited_job_method(_asynchronous.Job.deny)
    links = _awaited_job_method(_asynchronous.Job.links)

    @documented_as(_asynchronous.Job.shared_state)
    def shared_state(
        self,
        name: str,
        *,
        consistency: Consistency = "strong",
        max_bytes: int = 256 << 20,
        rate: float = 8 << 20,
    ) -> SharedState:
        made = self._inner.shared_state(name, consistency=consistency, max_bytes=max_bytes, rate=rate)
        return SharedState(made, self._home)

    @documented_as(_asynchronous.Job.step)
    def step(self, *, overlap: bool = False) -> Step:
        return Step(self._inner.step(overlap=overlap), self._home)

    def run(self, work: Callable[[_asynchronous.Job], Coroutine[Any, Any, T]]) -> T:
        """Run something that is written for the asynchronous job, and wait for it.

            async def saved(job):
                return await checkpointer.restore(read)

            job.run(saved)

        Args:
            work: Called with the asynchronous job that this one stands for; returns a coroutine.
        Returns:
            What the coroutine returns.
        Raises:
            LocalError: Called where nothing may block.
            Exception: What the coroutine raises.
        """
        return self._home(work(self._inner))


def _worker_method(
    method: Callable[Concatenate[_training.Worker, P], T],
) -> Callable[Concatenate[Worker, P], T]:
    """The same method: it waits for nothing."""

    @functools.wraps(method)
    def call(self: Worker, /, *arguments: P.args, **options: P.kwargs) -> T:
        return method(self._inner, *arguments, **options)

    return call


class Worker:
    """Trains a task as one rank of a job; see `quicoll.train.Worker`.

    The task, the loader and `on_step` are called from within `run`, where no other call to the job may wait.
    """

    @documented_as(_training.Worker.__init__)
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
        inner = job._inner  # noqa: SLF001 - a job of this module
        self._inner = _training.Worker(
            inner, task, data=data, shards=shards, checkpoints=checkpoints, divide=divide, tiers=tiers,
            on_step=on_step, phase_barrier=phase_barrier, bucket_bytes=bucket_bytes, algorithm=algorithm,
            report_every=report_every,
        )  # fmt: skip
        self._home = job._home  # noqa: SLF001 - likewise

    state = _worker_method(_training.Worker.state)
    load_state = _worker_method(_training.Worker.load_state)

    @property
    def architecture(self) -> Architecture:
        """What it trains, as it is compared with the other workers'."""
        return self._inner.architecture

    @property
    def figures(self) -> WorkerFigures:
        """Where the time of its steps has gone so far."""
        return self._inner.figures

    @documented_as(_training.Worker.run)
    def run(self, *, steps: int | None = None, epochs: int | None = None) -> TrainingResult:
        return self._home(self._inner.run(steps=steps, epochs=epochs))


@contextmanager
def join(*, observer: Observer | None = None, **settings: Unpack[JoinSettings]) -> Iterator[Job]:
    """Join a job as one rank; settings and errors are those of `quicoll.join`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise LocalError(
            "an event loop is running on this thread: use `async with quicoll.join(...)`, and AsyncTraining where you "
            "have Training; a scenario of quicoll.sim is given its job"
        )
    home = _Home()
    try:
        context = _join_asynchronously(observer=observer, **settings)
        job = home(context.__aenter__())
        try:
            yield Job(job, home)
        except BaseException as error:
            if home.forked or not home(context.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            if not home.forked:
                home(context.__aexit__(None, None, None))
    finally:
        home.close()


async def _cancelled(begun: list[asyncio.Task[Any] | None]) -> None:
    """Cancel the call that was begun, if there is one, and wait for its end."""
    await asyncio.sleep(0)  # one that had not begun sees here that it is dropped
    for task in begun:
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()


class _Home:
    """The private loop of the thread that joined; calling it runs a coroutine there."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self._closed = False

    @property
    def forked(self) -> bool:
        """Whether this is the child of a fork. The loop is its parent's: epoll, for one, is shared, and what the child
        took out of it the parent would wait for in vain. So a child leaves it alone, at the end too."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise LocalError where the job may not be used."""
        refused = self._refusal()
        if refused:
            raise LocalError(refused)

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        refused = self._refusal()
        if refused:
            work.close()
            raise LocalError(refused)
        begun: list[asyncio.Task[Any] | None] = []
        dropped = False

        async def run() -> T:
            if dropped:
                work.close()
                raise asyncio.CancelledError
            begun.append(asyncio.current_task())
            return await work

        try:
            return self._runner.run(run())
        except BaseException:
            # A signal handler that raises ends the loop's turn and not the call, which would go on behind the back of
            # whoever was told that it is over: at the next call, in the same step or after it.
            dropped = True
            if not begun or (begun[0] is not None and not begun[0].done()):
                self._runner.run(_cancelled(begun))
            raise

    def _refusal(self) -> str:
        if self.forked:
            return "this process is a fork of the one that joined, whose engine it does not have; join in the child"
        if self._closed:
            return "the job is closed"
        if threading.get_ident() != self._thread:
            return (
                "called from another thread than the one that joined: a job belongs to its thread; hand the work to "
                "that one, for instance by a queue.Queue, and call the job there"
            )
        if loop_here() is None:
            return ""
        return (
            "called from within another call, or where an event loop is running: there nothing may block; call it "
            "after that, or join by `async with quicoll.join(...)` where the program has a loop"
        )

    def close(self) -> None:
        self._closed = True
        if not self.forked:
            self._runner.close()
