"""The collectives for code without an event loop: `quicoll.blocking.Group`.

Each operation is declared twice for type checkers, because a ParamSpec cannot take one option more: without `async_op`
it gives the result, with it a handle. What runs is made of the asynchronous method, and a test holds the declarations
equal to it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import quicoll.collectives.group as _groups
from quicoll.collectives.handle import BlockingHandle, Handle
from quicoll.engine.answers import loop_here
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.collectives.base import TensorsT, TensorT
    from quicoll.collectives.reductions import ReduceOrder
    from quicoll.collectives.shards import Leaves, Shards
    from quicoll.numerics.codecs import WireFormat
    from quicoll.numerics.reduce import Precision, ReduceOp
    from quicoll.plan.schedule import AlgorithmName

__all__ = ["Group", "documented_as"]

F = TypeVar("F", bound=Callable[..., Any])


def documented_as(original: object) -> Callable[[F], F]:
    """Give a function the docstring of the asynchronous one."""

    def documented(function: F) -> F:
        function.__doc__ = original.__doc__
        return function

    return documented


def _operation(method: Callable[..., Handle[Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make what is declared of the asynchronous operation: issued, and waited for unless `async_op` says otherwise."""

    def made(declared: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Group, *arguments: Any, async_op: bool = False, **options: Any) -> Any:
            self._check()
            handle = BlockingHandle(method(self._inner, *arguments, **options).pending)
            return handle if async_op else handle.wait()

        call.__module__, call.__qualname__ = declared.__module__, declared.__qualname__
        own = inspect.signature(method)
        option = inspect.Parameter("async_op", inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool")
        result = str(own.return_annotation).removeprefix("Handle[").removesuffix("]")
        call.__signature__ = own.replace(  # type: ignore[attr-defined]  # no type has the name; `inspect` does
            parameters=[*own.parameters.values(), option], return_annotation=f"{result} | BlockingHandle[{result}]"
        )
        return call

    return made


def _demand_no_loop() -> None:
    """Refuse a call before anything is sent: its wait would be refused in any case."""
    if loop_here() is not None:
        raise LocalError("an event loop is running on this thread: await the operations of the job's own group here")


class Group:
    """The collectives of `quicoll.Group`, with its arguments, results and errors: each waits for its end.

    With `async_op=True` a call gives a `BlockingHandle` at once; its `wait` gives the result or raises the error.
    """

    def __init__(self, group: _groups.Group, check: Callable[[], None] = _demand_no_loop) -> None:
        """Use a group from threads without an event loop.

        Args:
            group: A group of an asyncio job.
            check: Raises LocalError where a call is not allowed; called before each.
        """
        self._inner = group.for_threads()
        self._check = check

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    @documented_as(_groups.Group.rank)
    def rank(self) -> int:
        return self._inner.rank

    @property
    @documented_as(_groups.Group.world_size)
    def world_size(self) -> int:
        return self._inner.world_size

    @property
    @documented_as(_groups.Group.ranks)
    def ranks(self) -> tuple[int, ...]:
        return self._inner.ranks

    @property
    @documented_as(_groups.Group.name)
    def name(self) -> str:
        return self._inner.name

    @property
    @documented_as(_groups.Group.stale)
    def stale(self) -> bool:
        return self._inner.stale

    @documented_as(_groups.Group.subgroup)
    def subgroup(self, ranks: Sequence[int], name: str) -> Group:
        return Group(self._inner.subgroup(ranks, name), self._check)

    @documented_as(_groups.Group.for_threads)
    def for_threads(self) -> _groups.ThreadGroup:
        return self._inner

    @documented_as(_groups.Group.next_sender)
    def next_sender(self, *, tag: int = 0, timeout: float | None = None) -> int:
        self._check()
        return self._inner.wait_for_sender(tag=tag, timeout=timeout)

    @documented_as(_groups.Group.shards)
    def shards(self, total: int) -> Shards:
        return self._inner.shards(total)

    @overload
    def all_reduce(
        self,
        x: TensorsT | Leaves[TensorsT],
        *,
        op: str | ReduceOp = "sum",
        out: Any = None,
        reduce_order: ReduceOrder = "canonical",
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        wire: WireFormat | None = None,
        residual: TensorsT | Leaves[TensorsT] | None = None,
        timeout: float | None = None,
        async_op: Literal[False] = False,
    ) -> TensorsT: ...

    @overload
    def all_reduce(
        self,
        x: TensorsT | Leaves[TensorsT],
        *,
        op: str | ReduceOp = "sum",
        out: Any = None,
        reduce_order: ReduceOrder = "canonical",
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        wire: WireFormat | None = None,
        residual: TensorsT | Leaves[TensorsT] | None = None,
        timeout: float | None = None,
        async_op: Literal[True],
    ) -> BlockingHandle[TensorsT]: ...

    @_operation(_groups.Group.all_reduce)
    def all_reduce(self, *arguments: Any, **options: Any) -> Any: ...

    @overload
    def reduce(
        self,
        x: TensorsT | Leaves[TensorsT],
        *,
        root: int = 0,
        op: str | ReduceOp = "sum",
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        timeout: float | None = None,
        async_op: Literal[False] = False,
    ) -> TensorsT | None: ...

    @overload
    def reduce(
        self,
        x: TensorsT | Leaves[TensorsT],
        *,
        root: int = 0,
        op: str | ReduceOp = "sum",
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        timeout: float | None = None,
        async_op: Literal[True],
    ) -> BlockingHandle[TensorsT | None]: ...

    @_operation(_groups.Group.reduce)
    def reduce(self, *arguments: Any, **options: Any) -> Any: ...

    @overload
    def reduce_scatter(
        self,
        x: TensorT | Leaves[TensorT],
        *,
        op: str | ReduceOp = "sum",
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        timeout: float | None = None,
        async_op: Literal[False] = False,
    ) -> TensorT: ...

    @overload
    def reduce_scatter(
        self,
        x: TensorT | Leaves[TensorT],
        *,
        op: str | ReduceOp = "sum",
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        precision: Precision = "default",
        exact: bool = False,
        timeout: float | None = None,
        async_op: Literal[True],
    ) -> BlockingHandle[TensorT]: ...

    @_operation(_groups.Group.reduce_scatter)
    def reduce_scatter(self, *arguments: Any, **options: Any) -> Any: ...

    @overload
    def broadcast(
        self,
        x: TensorsT,
        *,
        root: int = 0,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
        async_op: Literal[False] = False,
    ) -> TensorsT: ...

    @overload
    def broadcast(
        self,
        x: TensorsT,
        *,
        root: int = 0,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
        async_op: Literal[True],
    ) -> BlockingHandle[TensorsT]: ...

    @_operation(_groups.Group.broadcast)
    def broadcast(self, *arguments: Any, **options: Any) -> Any: ...

    @overload
    def all_gather(
        self,
        x: TensorT,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
        async_op: Literal[False] = False,
    ) -> TensorT: ...

    @overload
    def all_gather(
        self,
        x: TensorT,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
        async_op: Literal[True],
    ) -> BlockingHandle[TensorT]: ...

    @_operation(_groups.Group.all_gather)
    def all_gather(self, *arguments: Any, **options: Any) -> Any: ...

    @overload
    def gather(
        self,
        x: TensorT,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
        async_op: Literal[False] = False,
    ) -> TensorT | None: ...

    @overload
    def gather(
        self,
        x: TensorT,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
        async_op: Literal[True],
    ) -> BlockingHandle[TensorT | None]: ...

    @_operation(_groups.Group.gather)
    def gather(self, *arguments: Any, **options: Any) -> Any: ...

    @overload
    def scatter(
        self,
        x: TensorT,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
        async_op: Literal[False] = False,
    ) -> TensorT: ...

    @overload
    def scatter(
        self,
        x: TensorT,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: AlgorithmName = "auto",
        timeout: float | None = None,
        async_op: Literal[True],
    ) -> BlockingHandle[TensorT]: ...

    @_operation(_groups.Group.scatter)
    def scatter(self, *arguments: Any, **options: Any) -> Any: ...

    @overload
    def all_to_all(
        self,
        x: TensorsT,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        timeout: float | None = None,
        async_op: Literal[False] = False,
    ) -> TensorsT: ...

    @overload
    def all_to_all(
        self,
        x: TensorsT,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        timeout: float | None = None,
        async_op: Literal[True],
    ) -> BlockingHandle[TensorsT]: ...

    @_operation(_groups.Group.all_to_all)
    def all_to_all(self, *arguments: Any, **options: Any) -> Any: ...

    @overload
    def send(
        self, x: TensorsT, *, to: int, tag: int = 0, timeout: float | None = None, async_op: Literal[False] = False
    ) -> None: ...

    @overload
    def send(
        self, x: TensorsT, *, to: int, tag: int = 0, timeout: float | None = None, async_op: Literal[True]
    ) -> BlockingHandle[None]: ...

    @_operation(_groups.Group.send)
    def send(self, *arguments: Any, **options: Any) -> Any: ...

    @overload
    def recv(
        self,
        like: TensorsT,
        *,
        source: int,
        out: Any = None,
        tag: int = 0,
        timeout: float | None = None,
        async_op: Literal[False] = False,
    ) -> TensorsT: ...

    @overload
    def recv(
        self,
        like: TensorsT,
        *,
        source: int,
        out: Any = None,
        tag: int = 0,
        timeout: float | None = None,
        async_op: Literal[True],
    ) -> BlockingHandle[TensorsT]: ...

    @_operation(_groups.Group.recv)
    def recv(self, *arguments: Any, **options: Any) -> Any: ...

    @overload
    def broadcast_object(
        self, value: Any = None, *, root: int = 0, timeout: float | None = None, async_op: Literal[False] = False
    ) -> Any: ...

    @overload
    def broadcast_object(
        self, value: Any = None, *, root: int = 0, timeout: float | None = None, async_op: Literal[True]
    ) -> BlockingHandle[Any]: ...

    @_operation(_groups.Group.broadcast_object)
    def broadcast_object(self, *arguments: Any, **options: Any) -> Any: ...

    @overload
    def all_gather_object(
        self, value: Any, *, timeout: float | None = None, async_op: Literal[False] = False
    ) -> list[Any]: ...

    @overload
    def all_gather_object(
        self, value: Any, *, timeout: float | None = None, async_op: Literal[True]
    ) -> BlockingHandle[list[Any]]: ...

    @_operation(_groups.Group.all_gather_object)
    def all_gather_object(self, *arguments: Any, **options: Any) -> Any: ...

    @overload
    def barrier(self, *, timeout: float | None = None, async_op: Literal[False] = False) -> None: ...

    @overload
    def barrier(self, *, timeout: float | None = None, async_op: Literal[True]) -> BlockingHandle[None]: ...

    @_operation(_groups.Group.barrier)
    def barrier(self, *arguments: Any, **options: Any) -> Any: ...

    @overload
    def split(
        self, color: int | None, key: int = 0, *, timeout: float | None = None, async_op: Literal[False] = False
    ) -> Group | None: ...

    @overload
    def split(
        self, color: int | None, key: int = 0, *, timeout: float | None = None, async_op: Literal[True]
    ) -> BlockingHandle[Group | None]: ...

    @documented_as(_groups.Group.split)
    def split(self, color: int | None, key: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        self._check()
        handle = self._inner.split_into(lambda group: Group(group, self._check), color, key, timeout=timeout)
        blocking = BlockingHandle(handle.pending)
        return blocking if async_op else blocking.wait()
