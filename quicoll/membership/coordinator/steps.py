"""The steps of an installed view, and what follows from their votes.

Invariants:

- A step is committed when every member of the installed view has voted ok for `committed_step + 1` with the same
  digest, and by nothing else; the record comes first, the announcement after it. Everything else aborts.
- Where a commit and another view come together, members get both in one message: between two they could begin a step
  of a view that is over.
- Nodes that were to go at this boundary have gone when the decision is taken: they voted, and hear it.

Failure cases: a "no", different digests, a broken rule (the view ends, and the outcome says who is to blame); votes
that do not come in time (likewise; who was late is left out where the others can do without).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.membership.coordinator.actions import StepCommitted
from quicoll.membership.coordinator.diagnosis import ViewFailure
from quicoll.membership.coordinator.history import Committed, WentOn
from quicoll.membership.messages import Decide, Vote, departure

if TYPE_CHECKING:
    from quicoll.membership.coordinator.active_view import ActiveView
    from quicoll.membership.coordinator.departures import Departures
    from quicoll.membership.coordinator.evidence import Evidence
    from quicoll.membership.coordinator.formation import Formation
    from quicoll.membership.coordinator.ledger import Ledger
    from quicoll.membership.coordinator.roster import Candidate, Roster
    from quicoll.membership.coordinator.succession import Succession
    from quicoll.membership.messages import BeginStep

__all__ = ["Steps"]


class Steps:
    """See the module's head.

    Args:
        ledger: Takes what is recorded, and what is said.
        roster: Connected nodes.
        evidence: What failed views say of nodes; commits clear them.
        formation: Whether there can be another view.
        departures: Lets those go that are due to leave.
        succession: Changes and ends views.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        roster: Roster,
        evidence: Evidence,
        formation: Formation,
        departures: Departures,
        succession: Succession,
    ) -> None:
        self._ledger = ledger
        self._roster = roster
        self._evidence = evidence
        self._formation = formation
        self._departures = departures
        self._succession = succession

    def receive(self, candidate: Candidate, message: BeginStep | Vote, active: ActiveView, now_ns: int) -> bool:
        """Take in that a member of the installed view began a step or voted.

        Returns:
            Whether the step was committed and the view found to stay as it is; see `commit`.
        """
        expected = self._ledger.history.committed_step + 1
        if isinstance(message, Vote):
            candidate.owns = message.owns
        outcome = active.receive(candidate.node, message, expected=expected, now_ns=now_ns)
        if active.entered(candidate.node):
            if self._ledger.history.finished:
                self._ledger.record(WentOn(active.view.view_id))  # whoever had finished: the job goes on
            candidate.committed_step = max(candidate.committed_step, expected - 1)  # where a step begins from
        if outcome is None:
            return False
        if outcome.commit:
            return self.commit(active, expected, outcome.digest, now_ns)
        failure = ViewFailure(outcome.cause, outcome.kind, outcome.culprit, (), outcome.contradiction)
        self._succession.abort(active, failure, now_ns)
        return False

    def commit(self, active: ActiveView, step: int, digest: bytes, now_ns: int) -> bool:
        """Commit the open step, and do what is due at the boundary.

        Returns:
            Whether it was found that the view stays as it is, so that it need not be looked at once more.
        """
        view, out = active.view, self._ledger.out
        self._ledger.record(Committed(step, view.view_id, digest))
        self._evidence.committed(view.nodes, now_ns=now_ns)
        self._succession.note_lessons(now_ns)
        active.step_decided(now_ns=now_ns)
        self._roster.committed(view, step)
        out.note(StepCommitted(now_ns=now_ns, view_id=view.view_id, step=step, digest=digest))
        decision = Decide(view_id=view.view_id, step=step, commit=True)
        if now_ns >= self._evidence.may_propose_ns():
            self._departures.dismiss(view, now_ns)
        leavers = self._roster.leavers
        waits = not leavers and now_ns < self._evidence.may_propose_ns()
        if waits or self._formation.unchanged(view, self._ledger.history, now_ns=now_ns):
            out.tell_all(view, decision)
            self._departures.remove_leavers(now_ns)
            return not (waits or leavers)
        for candidate in leavers:
            self._departures.retire(candidate)
        why = " and ".join(f"{candidate.node} {departure('')}" for candidate in leavers)
        self._succession.change(active, why, now_ns, decision)
        self._departures.remove_leavers(now_ns)
        return False

    def late(self, active: ActiveView, failure: ViewFailure, now_ns: int) -> None:
        """End the view for votes that did not come; leave the late members out where the others can go on."""
        self._succession.abort(active, failure, now_ns)
        if self._formation.can_spare(failure.lost, self._ledger.history, now_ns=now_ns):
            self._succession.leave_out(dict.fromkeys(failure.lost, failure.cause), now_ns)
