"""One attempt at a step, as the protocol knows it, and the errors with which one ends that is not committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quicoll.checks import done
from quicoll.errors import Mismatch, QuicollError, StepAborted

if TYPE_CHECKING:
    from quicoll.engine.decisions import Decision
    from quicoll.membership.view import View

__all__ = ["StepAttempt", "aborted", "not_committed", "reason_of"]


@dataclass(slots=True, eq=False)
class StepAttempt:
    """What the protocol knows of one `async with job.step()`.

    number: The step's number; 0 until it is entered. view: The view in which it runs; None until then.
    over: It has been left. overlap: It is left before it is decided. failure: Why it did not begin, once it was entered
    ahead of the decision on the step before.
    """

    number: int = 0
    view: View | None = None
    over: bool = False
    overlap: bool = False
    failure: BaseException | None = None
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    def run_callbacks(self) -> None:
        """Run the callbacks in order. None of them runs another time, even if one raises."""
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            done(callback(), "a callback of on_commit")


def aborted(error: QuicollError, *, number: int, view_id: int) -> StepAborted:
    """Return the error for a step that another one ended before its vote."""
    return StepAborted(
        f"step {number} was not committed: {error.message}",
        lost=error.lost,
        rank=error.rank,
        node=error.node,
        view=view_id,
        step=number,
        op=error.op,
    )


def not_committed(decision: Decision, *, number: int, view_id: int) -> QuicollError:
    """Return the error for a step that the coordinator decided not to commit."""
    if decision.kind == "mismatch":
        return Mismatch(decision.cause, node=decision.culprit, view=view_id, step=number)
    return StepAborted(
        f"step {number} was not committed: {decision.cause}",
        lost=decision.lost,
        node=decision.culprit,
        view=view_id,
        step=number,
    )


def reason_of(error: BaseException) -> str:
    """Return why a body ended its step, for the other ranks."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
