"""`async with job.step() as step`: what a user holds of one attempt at a step. `Job.step` makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from quicoll.checks import plain
from quicoll.errors import LocalError
from quicoll.step.attempt import StepAttempt

if TYPE_CHECKING:
    from types import TracebackType

    from quicoll.membership.view import View
    from quicoll.step.protocol import StepProtocol

__all__ = ["Step"]


class Step:
    """One attempt at a step; a context manager that is entered once. `Job.step` makes it."""

    def __init__(self, protocol: StepProtocol, *, overlap: bool = False) -> None:
        self._protocol = protocol
        self._attempt = StepAttempt(overlap=overlap)

    @property
    def number(self) -> int:
        """The step's number, from 1; 0 before it is entered. A step that is attempted again keeps its number."""
        return self._attempt.number

    @property
    def view(self) -> View | None:
        """The view in which the step runs; None before it is entered."""
        return self._attempt.view

    @property
    def decided(self) -> bool:
        """Whether `ready` would not wait for the step before: it is decided, however, or this step has begun."""
        return self._protocol.is_decided(self._attempt)

    def on_commit(self, callback: Callable[[], None]) -> None:
        """Run a function if, and only if, the step is committed, before its context is left.

        Callbacks run in the order of these calls. One that raises leaves this rank's state half changed: the caller
        gets the error, and the rank counts as behind until another one has handed it the state.

        Args:
            callback: A plain function without arguments. A coroutine would never be awaited.
        Raises:
            LocalError: The step has been left, or has not begun because the one before it is not decided; or callback
                is no plain function.
        """
        if self._attempt.over:
            raise LocalError(f"step {self.number} has been left: nothing can be done at its commit any more")
        self._protocol.demand_begun(self._attempt)
        self._attempt.callbacks.append(plain(callback, "a callback of on_commit"))

    async def ready(self) -> None:
        """Wait until the step before this one is decided, if it was left with `overlap=True`; then this one begins.

        The callbacks of the step before run here where it is committed. Only then does this step have collectives and
        callbacks of its own. Leaving a step does the same first, where it was not done.

        Raises:
            StepAborted: The step before this one, or this one, was committed on no rank: leave it, and try again.
            Mismatch: The ranks called different operations or had different results in the step before this one.
            Partitioned: This rank is cut off, and does not know what became of the step before this one; the next entry
                finds out.
            LocalError: The step is not entered, or has been left, or another task waits here.
            Terminated: This rank was asked to stop, and no decision came.
        """
        await self._protocol.proceed(self._attempt)

    async def __aenter__(self) -> Self:
        await self._protocol.enter(self._attempt)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._protocol.leave(self._attempt, error)
