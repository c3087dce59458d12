"""The same names for synchronous loops: `with quicoll.blocking.join(...) as job`, and no `await` anywhere.

Nothing is implemented twice: every call runs the asynchronous method on a private event loop of the calling thread,
while the engine lives on its own thread as always. A call blocks for as long as the asynchronous one would be awaited,
and raises what that raises. Use a job on the thread that made it, and in its process: calls from others, or after the
job's end, are a LocalError. Inside a running event loop use `quicoll.join`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import quicoll.collectives.group as _groups
import quicoll.job as _asynchronous
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from pathlib import Path

    from quicoll.collectives.handle import Handle
    from quicoll.collectives.reductions import ReduceOrder
    from quicoll.collectives.shards import Shards
    from quicoll.config import Config
    from quicoll.job import Load, Save
    from quicoll.membership.view import View
    from quicoll.numerics.codecs import WireFormat
    from quicoll.numerics.reduce import Precision, ReduceOp
    from quicoll.numerics.seed import Seed
    from quicoll.observability.events import Observer
    from quicoll.observability.stragglers import Straggler
    from quicoll.plan.schedule import AlgorithmName

__all__ = ["Group", "Job", "Step", "join"]

T = TypeVar("T")
_Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Group:
    """The collectives of `quicoll.Group`; see there for shapes, orders and errors."""

    def __init__(self, group: _groups.Group, run: _Run) -> None:
        self._group = group
        self._run = run

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._group.ranks

    @property
    def name(self) -> str:
        return self._group.name

    @property
    def stale(self) -> bool:
        return self._group.stale

    def shards(self, total: int) -> Shards:
        """Which of `total` logical shards this rank holds in the present view."""
        return self._group.shards(total)

    def split(self, color: int | None, key: int = 0, *, timeout: float | None = None) -> Group | None:
        """See `quicoll.Group.split`."""
        made = self._await(self._group.split, color, key, timeout=timeout)
        return None if made is None else Group(made, self._run)

    def all_reduce(
        self,
        x: Any,
        *,
        op: str | ReduceOp = "sum",
        out: Any = None,
        reduce_order: ReduceOrder = "canonical",
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        wire: WireFormat | None = None,
        timeout: float | None = None,
    ) -> Any:
        """See `quicoll.Group.all_reduce`."""
        return self._await(
            self._group.all_reduce,
            x,
            op=op,
            out=out,
            reduce_order=reduce_order,
            algorithm=algorithm,
            precision=precision,
            exact=exact,
            wire=wire,
            timeout=timeout,
        )

    def reduce(
        self,
        x: Any,
        *,
        root: int = 0,
        op: str | ReduceOp = "sum",
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """See `quicoll.Group.reduce`."""
        return self._await(
            self._group.reduce,
            x,
            root=root,
            op=op,
            out=out,
            algorithm=algorithm,
            precision=precision,
            exact=exact,
            timeout=timeout,
        )

    def reduce_scatter(
        self,
        x: Any,
        *,
        op: str | ReduceOp = "sum",
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """See `quicoll.Group.reduce_scatter`."""
        return self._await(
            self._group.reduce_scatter,
            x,
            op=op,
            counts=counts,
            out=out,
            algorithm=algorithm,
            precision=precision,
            exact=exact,
            timeout=timeout,
        )

    def broadcast(
        self,
        x: Any,
        *,
        root: int = 0,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
    ) -> Any:
        """See `quicoll.Group.broadcast`."""
        return self._await(self._group.broadcast, x, root=root, out=out, algorithm=algorithm, timeout=timeout)

    def all_gather(
        self, x: Any, *, out: Any = None, algorithm: AlgorithmName = "auto", timeout: float | None = None
    ) -> Any:
        """See `quicoll.Group.all_gather`."""
        return self._await(self._group.all_gather, x, out=out, algorithm=algorithm, timeout=timeout)

    def gather(
        self,
        x: Any,
        *,
        root: int = 0,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
    ) -> Any:
        """See `quicoll.Group.gather`."""
        return self._await(self._group.gather, x, root=root, out=out, algorithm=algorithm, timeout=timeout)

    def scatter(
        self,
        x: Any,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
    ) -> Any:
        """See `quicoll.Group.scatter`."""
        return self._await(
            self._group.scatter, x, root=root, counts=counts, out=out, algorithm=algorithm, timeout=timeout
        )

    def all_to_all(
        self, x: Any, *, counts: Sequence[int] | None = None, out: Any = None, timeout: float | None = None
    ) -> Any:
        """See `quicoll.Group.all_to_all`."""
        return self._await(self._group.all_to_all, x, counts=counts, out=out, timeout=timeout)

    def send(self, x: Any, *, to: int, timeout: float | None = None) -> None:
        """See `quicoll.Group.send`."""
        self._await(self._group.send, x, to=to, timeout=timeout)

    def recv(self, like: Any, *, source: int, out: Any = None, timeout: float | None = None) -> Any:
        """See `quicoll.Group.recv`."""
        return self._await(self._group.recv, like, source=source, out=out, timeout=timeout)

    def broadcast_object(self, value: Any = None, *, root: int = 0, timeout: float | None = None) -> Any:
        """See `quicoll.Group.broadcast_object`."""
        return self._await(self._group.broadcast_object, value, root=root, timeout=timeout)

    def all_gather_object(self, value: Any, *, timeout: float | None = None) -> list[Any]:
        """See `quicoll.Group.all_gather_object`."""
        return self._await(self._group.all_gather_object, value, timeout=timeout)

    def barrier(self, *, timeout: float | None = None) -> None:
        """See `quicoll.Group.barrier`."""
        self._await(self._group.barrier, timeout=timeout)

    def _await(self, operation: Callable[..., Handle[T]], *arguments: Any, **options: Any) -> T:
        """Start an operation inside the loop that it is awaited on."""

        async def run() -> T:
            return await operation(*arguments, **options)

        return cast("T", self._run(run()))


class Step:
    """`with job.step() as step`; see `quicoll.Step`."""

    def __init__(self, step: _asynchronous.Step, run: _Run) -> None:
        self._step = step
        self._run = run

    @property
    def number(self) -> int:
        return self._step.number

    @property
    def view(self) -> View | None:
        return self._step.view

    def on_commit(self, callback: Callable[[], None]) -> None:
        """See `quicoll.Step.on_commit`."""
        self._step.on_commit(callback)

    def __enter__(self) -> Step:
        self._run(self._step.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._step.__aexit__(kind, error, trace))


class Job:
    """A rank's part in a job; see `quicoll.Job`."""

    def __init__(self, job: _asynchronous.Job, run: _Run) -> None:
        self._job = job
        self._run = run
        self.group = Group(job.group, run)

    @property
    def config(self) -> Config:
        return self._job.config

    @property
    def rank(self) -> int:
        return self._job.rank

    @property
    def world_size(self) -> int:
        return self._job.world_size

    @property
    def node(self) -> str:
        return self._job.node

    @property
    def view(self) -> View:
        return self._job.view

    @property
    def seed(self) -> Seed:
        return self._job.seed

    @property
    def committed_step(self) -> int:
        return self._job.committed_step

    def stragglers(self) -> tuple[Straggler, ...]:
        """See `quicoll.Job.stragglers`."""
        return self._job.stragglers()

    def __repr__(self) -> str:
        return repr(self._job)

    def audit(self, path: str | Path) -> Path:
        """See `quicoll.Job.audit`."""
        return self._job.audit(path)

    def register_state(self, save: Save, load: Load) -> None:
        """See `quicoll.Job.register_state`."""
        self._job.register_state(save, load)

    def resume_from(self, step: int) -> None:
        """See `quicoll.Job.resume_from`."""
        self._job.resume_from(step)

    def ready(self, *, timeout: float | None = None) -> None:
        """See `quicoll.Job.ready`."""
        self._run(self._job.ready(timeout=timeout))

    def step(self) -> Step:
        """See `quicoll.Job.step`."""
        return Step(self._job.step(), self._run)


@contextmanager
def join(*, observer: Observer | None = None, **settings: Any) -> Iterator[Job]:
    """Join a job as one rank; settings and errors are those of `quicoll.join`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise LocalError("an event loop is running on this thread: use `async with quicoll.join(...)`")
    home = _Home()
    try:
        context = _asynchronous.join(observer=observer, **settings)
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
            return "called from another thread than the one that joined: a job belongs to its thread"
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return ""
        return "called from within another call, or where an event loop is running: there nothing may block"

    def close(self) -> None:
        self._closed = True
        if not self.forked:
            self._runner.close()
