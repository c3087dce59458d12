"""What a communicator has under way: operations, and waits for what a peer calls first."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from quicoll.engine.calls import Call, Slot
    from quicoll.engine.executor import Execution
    from quicoll.observability.flight import CalledEntry

__all__ = ["Ended", "Headway", "InFlight", "Watch"]

Ended: TypeAlias = Callable[[int | None, BaseException | None], None]
"""Called with an operation's number in its group, or with why it has none."""


class Headway(IntEnum):
    """How far an operation is on this rank: what it waits for next. See the head of `communicator`."""

    CALLED = 0  # that all have called, where its work depends on what they called
    AGREED = 1  # the network of its group, where its work depends on that
    ASKED = 2  # its work, where its caller makes that elsewhere
    RUNNING = 3  # that all have called
    COMPARED = 4  # its plan
    OVER = 5


class InFlight:
    """An operation in flight.

    late: its deadline has passed. execution: of its plan, from when that begins. ending: waits for why the view is
    over, once it has failed. entry, algorithm: for the flight recorder, where there is one. due: when to look at it
    next: who has not called is asked where it is shortly before the deadline.
    """

    __slots__ = (
        "_cancel",
        "algorithm",
        "call",
        "deadline",
        "due",
        "ended",
        "ending",
        "entry",
        "execution",
        "late",
        "slot",
        "stage",
        "step",
        "timeout",
    )

    def __init__(
        self,
        call: Call,
        slot: Slot,
        ended: Ended,
        cancel: Callable[[InFlight], None],
        *,
        deadline: float,
        timeout: float,
        step: int | None,
    ) -> None:
        self.call = call
        self.slot = slot
        self.ended = ended
        self._cancel = cancel
        self.deadline = self.due = deadline
        self.timeout = timeout
        self.step = step
        self.stage = Headway.CALLED
        self.late = False
        self.execution: Execution | None = None
        self.ending: asyncio.Task[None] | None = None
        self.entry: CalledEntry | None = None
        self.algorithm = ""

    def cancel(self) -> None:
        """Nobody waits for it any more, which ends the view. Nothing where it is over."""
        self._cancel(self)

    def close(self) -> None:
        """Take its transfers back, before anyone reuses the memory."""
        execution, self.execution = self.execution, None  # it knows of us: together we would outlive the operation
        if execution is not None:
            execution.close()


class Watch:
    """A wait for what a peer calls first: ends once, by that, by its deadline, by a failure, or cancelled."""

    __slots__ = ("_cancel", "deadline", "ended", "groups", "step", "timeout", "timer")

    def __init__(
        self,
        groups: Mapping[int, int],
        ended: Ended,
        cancel: Callable[[Watch], None],
        *,
        deadline: float,
        timeout: float,
        step: int | None,
    ) -> None:
        self.groups = groups
        self.ended = ended
        self._cancel = cancel
        self.deadline = deadline
        self.timeout = timeout
        self.step = step
        self.timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Nobody waits any more. Nothing was called, so no view ends."""
        self._cancel(self)
