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

    def __init__(self, protocol: StepProtocol) -> None:
        self._protocol = protocol
        self._attempt = StepAttempt()

    @property
    def number(self) -> int:
        """The step's number, from 1; 0 before it is entered. A step that is attempted again keeps its number."""
        return self._attempt.number

    @property
    def view(self) -> View | None:
        """The view in which the step runs; None before it is entered."""
        return self._attempt.view

    def on_commit(self, callback: Callable[[], None]) -> None:
        """Run a function if, and only if, the step is committed, before its context is left.

        Callbacks run in the order of these calls. One that raises leaves this rank's state half changed: the caller
        gets the error, and the rank counts as behind until another one has handed it the state.

        Args:
            callback: A plain function without arguments. A coroutine would never be awaited.
        Raises:
            LocalError: The step has been left, or callback is no plain function.
        """
        if self._attempt.over:
            raise LocalError(f"step {self.number} has been left: nothing can be done at its commit any more")
        self._attempt.callbacks.append(plain(callback, "a callback of on_commit"))

    async def __aenter__(self) -> Self:
        await self._protocol.enter(self._attempt)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._protocol.leave(self._attempt, error)
