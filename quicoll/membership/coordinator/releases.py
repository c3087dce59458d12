"""Ranks that were asked to stop (SIGTERM), and when each of them may go.

A rank that stops says so at a step boundary (`AskToLeave`) and waits there, for a bounded time, to hear that it may go
(`MayLeave`). It may at once, but for one case: it holds the newest state, others are here that do not, and nobody else
who stays holds it. Gone, it would take committed steps along. It stays in its views then, takes part in what brings the
others to its state when a view begins, and may go as soon as one of them has begun a step from there.

Who owns part of the state (`Candidate.owns`) hears nothing: it goes after a view in which it hands that over, like
those that an operator wants gone (scaling.py).

    of no interest --AskToLeave--> asks --may_go()--> told --Leave, lost, or the link joins anew--> of no interest

Invariants: whoever has asked counts as nobody who stays, so of several holders that stop at once the last one stays;
each is told once; nothing here is in the journal, since a rank asks again when it has joined again.

Failure cases:

nobody else is here                   it may go: there is nobody to leave the state to
the others cannot be in a view        it waits for as long as it likes, `stop_timeout`, and leaves all the same
the others are asked to stop too      all may go
it is lost while it waits             as when any rank is lost: nobody here holds the state
the coordinator ends                  its ranks join the next one, and ask again
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quicoll.membership.coordinator.roster import Candidate, Roster

__all__ = ["Releases"]


class Releases:
    """Remembers who has asked, and who was told."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._told: dict[str, bool] = {}  # whether it was, by node that has asked

    def ask(self, node: str) -> None:
        """Take in that a node was asked to stop."""
        self._told.setdefault(node, False)

    def forget(self, node: str) -> None:
        """Take in that a node is gone, or is there as a new process or over a new link."""
        self._told.pop(node, None)

    def may_go(self) -> list[Candidate]:
        """Return those who may go from now on, each once, by rank."""
        if all(self._told.values()):
            return []
        here = [candidate for candidate in self._roster if not candidate.leaving and not candidate.told_end]
        stay = [candidate for candidate in here if candidate.node not in self._told]
        newest = max((candidate.committed_step for candidate in here), default=0)
        safe = not stay or any(candidate.committed_step >= newest for candidate in stay)
        asking = [each for each in here if self._told.get(each.node) is False and not each.parting]
        going = [candidate for candidate in asking if safe or candidate.committed_step < newest]
        for candidate in going:
            self._told[candidate.node] = True
        return going
