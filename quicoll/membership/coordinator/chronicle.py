"""What has happened of late, for people who look at the job: nothing is decided by it.

It hears what observers are told (`Note`), in the same order and at the same moment: when the shell takes the action, so
after everything before it is in the journal. A commit that the disk has refused is in no chronicle.

Invariants: memory is bounded whatever happens: the last MAX_STATUS_EVENTS events other than commits, the times of the
last 64 commits, the last MAX_LOST nodes that went. A node that has come back is none that is lost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low
from typing import TYPE_CHECKING, Final

from quicoll.membership.coordinator.actions import (
    NodeJoined,
    NodeLost,
    StepCommitted,
    ViewAborted,
    ViewInstalled,
    ViewProposed,
    ViewWithheld,
)
from quicoll.membership.status import MAX_STATUS_EVENTS

if TYPE_CHECKING:
    from quicoll.membership.coordinator.actions import MembershipEvent

__all__ = ["MAX_LOST", "Chronicle", "Departure"]

MAX_LOST: Final = 64
_COMMITS: Final = 64


@dataclass(frozen=True, slots=True)
class Departure:
    """That a node went. at_ns: when; cause: for people; left: whether of its own will, or as it was told."""

    at_ns: int
    cause: str
    left: bool


class Chronicle:
    """See the module's head.

    Args:
        now_ns: When the coordinator began.

    Attributes:
        began_ns: Then.
        events: The last ones, the newest last.
        departed: Nodes that went and are not back, in the order in which they did.
        held: Why there can be no view, "" where there is one or one is proposed.
        stage_ns: When the view was installed or proposed, or the last one ended.
        without_ns: Since when no view is installed; None while one is.
        committed_ns: When the last step was committed; None where none was since the coordinator began.
    """

    def __init__(self, *, now_ns: int) -> None:
        self.began_ns = now_ns
        self.events: deque[MembershipEvent] = deque(maxlen=MAX_STATUS_EVENTS)
        self.departed: dict[str, Departure] = {}
        self.held = ""
        self.stage_ns = now_ns
        self.without_ns: int | None = now_ns
        self.committed_ns: int | None = None
        self._commits: deque[int] = deque(maxlen=_COMMITS)

    def take(self, event: MembershipEvent) -> None:
        """Take in what has happened."""
        match event:
            case StepCommitted():
                self.committed_ns = event.now_ns
                self._commits.append(event.now_ns)
                return  # there may be thousands a second, and everything else would be pushed out
            case NodeJoined():
                self.departed.pop(event.node, None)
            case NodeLost():
                self.departed.pop(event.node, None)  # to the end of the order
                self.departed[event.node] = Departure(event.now_ns, event.cause, event.left)
                if len(self.departed) > MAX_LOST:
                    del self.departed[next(iter(self.departed))]
            case ViewWithheld():
                self._unless_without(event.now_ns)
                self.held = event.cause
            case ViewProposed():
                self._unless_without(event.now_ns)
                self.held, self.stage_ns = "", event.now_ns
            case ViewInstalled():
                self.held, self.stage_ns, self.without_ns = "", event.now_ns, None
            case ViewAborted():
                self._unless_without(event.now_ns)
                self.stage_ns = event.now_ns
            case _:
                pass
        self.events.append(event)

    @property
    def step_ns(self) -> int:
        """The median time from one commit to the next, of the last ones; 0 where there were not two."""
        times = list(self._commits)
        return median_low([later - earlier for earlier, later in pairwise(times)] or [0])

    def recent(self, now_ns: int) -> tuple[int, int]:
        """Return how many steps were committed after the first of the last ones, and in which time until now."""
        if not self._commits:
            return 0, 0
        return len(self._commits) - 1, max(0, now_ns - self._commits[0])

    def _unless_without(self, now_ns: int) -> None:
        if self.without_ns is None:
            self.without_ns = self.stage_ns = now_ns
