"""Whether the job is done: some ranks have ended as they should, and nobody goes on.

A rank that ends cleanly says so when it leaves (`Leave.finished`), and the journal keeps it (`Left.finished`). From
then on the coordinator looks, while no view is installed or proposed, who is here:

    goes on   a process of the last view that holds the last committed step: it may want further steps
    anew      a node that had ended is back: it asks for a new part of the job, and the rest of the last view is waited
              for no more. As for a first view, `world_size` nodes are needed
    ending    neither: processes of the last view may be on their way back, for `settle_ns`
    done      nor did any come back. Who is here, and whoever comes later, hears that the job is done: `settle_ns` after
              its Join, since where a job is run again the node that asks for more may come a little later

Rules, and why:

- At least half of those who were at work when the first of them ended have ended (`History.ended`). One rank that
  leaves a job that shrinks, and a power cut right after it, do not end the job of the others.
- Whoever begins a step after that goes on, with the view it is in: `core` records it (`WentOn`), and nobody has ended.
- A new process of a lost node may have been in the last view and got no state before the others ended. It holds less
  than the last committed step; alone it would take the job back. So it does not count as one that goes on.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll.membership.coordinator.actions import JobFinished
from quicoll.membership.coordinator.history import Left

if TYPE_CHECKING:
    from quicoll.membership.coordinator.history import History
    from quicoll.membership.coordinator.roster import Candidate

__all__ = ["Ending", "EndingState", "Outlook", "goes_on", "left_record"]


class EndingState(enum.Enum):
    GOES_ON = "goes on"
    ANEW = "anew"
    ENDING = "ending"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is to be done.

    Attributes:
        state: See the module's head.
        records: What is to be recorded before a view is looked for.
        obstacle: Why there is no view, for those who wait; "" where a view is looked for.
        event: For observers; once when the job is done.
        told: Nodes that hear now that the job is done.
        wake_ns: When to look again although nothing came in; None where only an input can change it.
    """

    state: EndingState
    records: tuple[Left, ...] = ()
    obstacle: str = ""
    event: JobFinished | None = None
    told: tuple[Candidate, ...] = ()
    wake_ns: int | None = None


def _of_last_view(candidate: Candidate, history: History) -> bool:
    """Return whether this very process is a member of the last installed view."""
    member = history.view.member(candidate.node) if history.view is not None else None
    return member is not None and member.incarnation == candidate.incarnation


def goes_on(candidates: Iterable[Candidate], history: History) -> bool:
    """Return whether one of these may want further steps: a process of the last view that holds the last one."""
    return any(
        _of_last_view(candidate, history)
        and candidate.committed_step >= history.committed_step
        and not candidate.leaving
        and not candidate.told_end
        for candidate in candidates
    )


def left_record(candidate: Candidate, history: History) -> Left | None:
    """Return what is recorded when a node goes of its own will; None where that is known or says nothing new.

    It takes the node out of the base of quorums, and of those that may hold the last step, or a restarted coordinator
    would wait for it; and it keeps at which
    step the node finished, if that was where the job is, or would not know of its end.
    """
    at_end = _of_last_view(candidate, history) and candidate.committed_step >= history.committed_step
    finished = candidate.finished if at_end or candidate.told_end else None
    if finished is not None and candidate.node not in history.finished:
        return Left(candidate.node, finished)
    return Left(candidate.node) if candidate.node in history.holders else None


class Ending:
    """Remembers since when nobody goes on, and whether observers know that the job is done."""

    def __init__(self, *, settle_ns: int) -> None:
        self._settle_ns = settle_ns
        self._since_ns: int | None = None
        self._noted = False

    def look(self, candidates: Iterable[Candidate], history: History, *, now_ns: int) -> Outlook:
        """Look at the connected nodes while no view is installed or proposed.

        Args:
            candidates: Connected nodes, by rank.
            history: What the journal holds.
            now_ns: The time now.
        """
        here = [candidate for candidate in candidates if not candidate.leaving and not candidate.told_end]
        if not history.ended or goes_on(here, history):
            self._since_ns = None
            self._noted = False
            return Outlook(EndingState.GOES_ON)
        if any(candidate.node in history.finished for candidate in here):
            self._noted = False
            # The rest is waited for no more, in a restarted coordinator either.
            return Outlook(EndingState.ANEW, tuple(Left(node) for node in history.holders))
        step = history.final_step
        obstacle = f"the job is done at step {step}, unless nodes that have ended come back for more"
        self._since_ns = now_ns if self._since_ns is None else self._since_ns
        over_ns = self._since_ns + self._settle_ns
        if now_ns < over_ns:
            return Outlook(EndingState.ENDING, obstacle=obstacle, wake_ns=over_ns)
        event = None if self._noted else JobFinished(now_ns=now_ns, step=step, nodes=history.finished)
        self._noted = True
        told = tuple(candidate for candidate in here if candidate.joined_ns + self._settle_ns <= now_ns)
        waits = [candidate.joined_ns + self._settle_ns for candidate in here if candidate not in told]
        wake_ns = min(waits, default=None)
        return Outlook(EndingState.DONE, obstacle=obstacle, event=event, told=told, wake_ns=wake_ns)
