"""Nodes that go: lost, of their own will or told to, each is taken off the list of those that are here in one place.

    here       it has joined, and neither of these is true of it yet
    leaving    it has said that it goes, or was let go: it votes on the step that it is in, and is gone at the boundary
    gone       off the roster; nobody asks or tells it anything, and what was asked of it alone is forgotten

Invariants: what is recorded of a node that leaves (`Left`) is recorded before it is gone, and once; a node that is lost
without having said that it leaves stays in the base of quorums. A node is told that it is dismissed before its link is
dropped. Nodes that own a part of the state are let go in a view that names them (`View.parting`), never before.

Who is dismissed, and when, scaling.py says. Which views end for it, is not decided here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.membership.coordinator import scaling
from quicoll.membership.coordinator.actions import NodeDismissed, NodeLost
from quicoll.membership.coordinator.ending import left_record
from quicoll.membership.coordinator.history import Scaled
from quicoll.membership.messages import departure

if TYPE_CHECKING:
    from quicoll.membership.coordinator.formation import Formation
    from quicoll.membership.coordinator.ledger import Ledger
    from quicoll.membership.coordinator.releases import Releases
    from quicoll.membership.coordinator.roster import Candidate, Roster
    from quicoll.membership.coordinator.stage import Stage
    from quicoll.membership.view import View

__all__ = ["Departures"]


class Departures:
    """See the module's head.

    Args:
        ledger: Takes what is recorded.
        roster: Connected nodes.
        stage: Which view there is; the report on the last one hears of a loss.
        formation: Says who could be in a view without those that go.
        releases: Nodes that have asked whether they may stop.
    """

    def __init__(
        self, *, ledger: Ledger, roster: Roster, stage: Stage, formation: Formation, releases: Releases
    ) -> None:
        self._ledger = ledger
        self._roster = roster
        self._stage = stage
        self._formation = formation
        self._releases = releases

    def remove(self, candidate: Candidate, cause: str, now_ns: int) -> None:
        """Take a node off the roster. cause: for people."""
        if candidate.leaving:
            self.retire(candidate)
        self._roster.remove(candidate.node)
        self._releases.forget(candidate.node)
        if self._stage.diagnosis is not None:
            self._stage.diagnosis.node_lost(candidate.node, cause)
        lost = NodeLost(now_ns=now_ns, node=candidate.node, cause=cause, left=candidate.leaving)
        self._ledger.out.note(lost)

    def remove_leavers(self, now_ns: int) -> None:
        """Take those off the roster that were to go at this boundary."""
        for candidate in self._roster.leavers:
            if candidate.dismissal:
                self._ledger.out.dismiss(candidate)
            self.remove(candidate, candidate.dismissal or f"{candidate.node} {departure('')}", now_ns)

    def retire(self, candidate: Candidate) -> None:
        """Record of a node that leaves what is to be known of it, if that is not known already."""
        record = left_record(candidate, self._ledger.history)
        if record is not None:
            self._ledger.record(record)

    def due(self, view: View, now_ns: int) -> list[Candidate]:
        """Return who is to leave at this boundary of the installed view."""
        return scaling.due(view, self._formation, self._roster, self._ledger.history, now_ns=now_ns)

    def dismiss(self, view: View, now_ns: int) -> None:
        """Take those out of the job that are due to leave it; they are told with what follows at this boundary."""
        more = scaling.surplus(self._ledger.history)
        if more is not None:
            self._ledger.record(more)
        going = self.due(view, now_ns)
        if not going:
            return
        # Whoever has come with this view owns something before it has voted.
        if any(candidate.owns for candidate in self._roster if view.rank_of(candidate.node) is not None):
            for candidate in going:
                candidate.parting = True  # in the view that follows; the first that has parted lets all of them go
            return
        self.let_go(going, now_ns)

    def let_go(self, going: list[Candidate], now_ns: int) -> None:
        """Take nodes out of the job; those that still are here are told with what follows."""
        history = self._ledger.history
        for candidate in going:
            if candidate.node in history.to_leave:
                candidate.dismissal = f"{candidate.node} leaves the job, which is to have {history.wanted} ranks"
                dismissed = NodeDismissed(now_ns=now_ns, node=candidate.node, cause=candidate.dismissal)
                self._ledger.out.note(dismissed)
            candidate.leaving = True
            self.retire(candidate)
        names = [candidate.node for candidate in going]
        rest = tuple(node for node in history.to_leave if node not in names)
        if rest != history.to_leave:
            self._ledger.record(Scaled(history.wanted or 0, rest))
