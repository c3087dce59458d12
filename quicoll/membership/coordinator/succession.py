"""How views follow each other: every view is proposed, installed, given up, replaced and ended here, and only here.

    propose     a view of the chosen nodes; at a step boundary in one message with the decision of the step
    check       its answers: installed, given up, or waited for
    change      another view takes the place of the installed one at a boundary, if there can be one; else it ends
    abort       the installed view ends; the step that is open is committed nowhere
    end         the same without a word to anybody yet: more reports may come, so that all members get one cause

Invariants:

- Any change of members ends the view, and the next one has a larger id, recorded before it is sent (`Proposed`). So the
  view id alone says whether a message is current, and nothing of an old view can be taken for something of a new one.
- A view is installed when all of its members have confirmed it, and in the journal before they hear that.
- Once a view has ended nothing of it can be committed: `Stage` has no active view any more, and steps.py asks for one.
- The end of a view is announced once. What follows for those who can have caused it is weighed and written down first,
  so that its members hear it with the cause.
- A step that was open in a view that is over is noted as rejected once, whenever it is heard of: a member that had not
  said so yet says it at the view's end (`was_open`), which may come after the announcement.

Failure cases: too few are left for another view (`change` ends the installed one, with the obstacle for a cause); a
proposal that fails uses up its id; a node that is left out is told so, and for how long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll.membership.coordinator.actions import StepRejected
from quicoll.membership.coordinator.ballot import Ballot
from quicoll.membership.coordinator.diagnosis import ViewFailure
from quicoll.membership.coordinator.history import InstalledView, Noted, Proposed
from quicoll.membership.coordinator.weighing import Weighed, weigh
from quicoll.membership.messages import clip

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quicoll.membership.coordinator.active_view import ActiveView
    from quicoll.membership.coordinator.departures import Departures
    from quicoll.membership.coordinator.diagnosis import Diagnosis
    from quicoll.membership.coordinator.evidence import Evidence
    from quicoll.membership.coordinator.formation import Formation
    from quicoll.membership.coordinator.ledger import Ledger
    from quicoll.membership.coordinator.probes import Probes
    from quicoll.membership.coordinator.proposal import Proposal
    from quicoll.membership.coordinator.roster import Candidate, Roster
    from quicoll.membership.coordinator.stage import Stage
    from quicoll.membership.messages import BeginStep, Decide
    from quicoll.membership.view import View

__all__ = ["Succession"]


@dataclass(slots=True)
class _Over:
    """The view that was installed last, when it is over.

    Attributes:
        view: It.
        step: The one that may have been open in it.
        noted: Whether it is known that the step was open.
        failure: Why the view is over, once that was announced.
    """

    view: View
    step: int
    noted: bool
    failure: ViewFailure | None = None


class Succession:
    """See the module's head.

    Args:
        ledger: Takes what is recorded, and what is said.
        roster: Connected nodes.
        stage: Which view there is; its transitions are made from here.
        evidence: What failed views say of nodes.
        formation: Whether there can be a view, and of which nodes.
        probes: Who is left out.
        departures: Takes those off the roster that go at a boundary.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        roster: Roster,
        stage: Stage,
        evidence: Evidence,
        formation: Formation,
        probes: Probes,
        departures: Departures,
    ) -> None:
        self._ledger = ledger
        self._out = ledger.out
        self._roster = roster
        self._stage = stage
        self._evidence = evidence
        self._formation = formation
        self._probes = probes
        self._departures = departures
        self._over: _Over | None = None

    # A view begins

    def propose(self, chosen: list[Candidate], now_ns: int, boundary: Decide | None = None) -> None:
        """Propose a view of `chosen`; at a step boundary, inside the decision of the step."""
        previous = self._stage.active.view if self._stage.active is not None else None
        view = self._formation.next_view(chosen, self._ledger.history)
        if previous is not None:
            step = self._ledger.history.committed_step + 1
            self._over = _Over(previous, step, noted=False, failure=ViewFailure(f"view {view.view_id} is proposed"))
        for candidate in chosen:
            candidate.learning = candidate.warm = False
        for candidate in chosen[view.workers :]:
            candidate.shown += 1
        self._ledger.record(Proposed(view.view_id))
        self._evidence.proposed(now_ns=now_ns)
        self._stage.propose(view, weights=self._evidence.weights(view.nodes), now_ns=now_ns)
        self._out.announce_proposal(view, previous, boundary, now_ns=now_ns)

    def check(self, proposal: Proposal, now_ns: int) -> None:
        """Install the proposal, reject it, or wait on."""
        if proposal.confirmed:
            self._install(proposal.view, now_ns)
        elif proposal.decidable(now_ns):
            self.reject(proposal, now_ns)

    def _install(self, view: View, now_ns: int) -> None:
        self._ledger.record(InstalledView(view))
        self._stage.install(view, now_ns=now_ns)
        self._out.announce_installation(view, now_ns=now_ns)

    def reject(self, proposal: Proposal, now_ns: int) -> None:
        """Give up the proposed view for what its members have answered, and leave out who cannot be reached."""
        out = proposal.excluded(now_ns=now_ns)
        self.give_up(proposal.view, proposal.failure(now_ns=now_ns), now_ns)
        self.leave_out(out, now_ns)

    def give_up(self, view: View, failure: ViewFailure, now_ns: int) -> None:
        """Give up the proposed view."""
        self._stage.give_up()
        weighed = self._weigh(failure, view, now_ns)
        lost, cause = weighed.failure.lost, weighed.failure.cause
        self._out.announce_failed_proposal(view, cause=cause, lost=lost, now_ns=now_ns)
        self._out.withhold_from_all(weighed.left_out)

    # It gives way, or ends

    def change(self, active: ActiveView, cause: str, now_ns: int, boundary: Decide | None = None) -> None:
        """Replace the installed view by the next, at a boundary; end it where too few nodes are left for one."""
        readiness = self._formation.successor(self._ledger.history, now_ns=now_ns)
        if not (obstacle := readiness.obstacle):
            self.propose(readiness.chosen, now_ns, boundary)
            return
        if boundary is not None:
            self._out.tell_all(active.view, boundary)
        self.abort(active, ViewFailure(clip(f"{cause}; {obstacle}" if cause else obstacle)), now_ns)

    def abort(self, active: ActiveView, failure: ViewFailure, now_ns: int) -> None:
        """End the installed view and announce it. The step that is open is committed nowhere."""
        self._announce(self.end(active), failure, now_ns)

    def end(self, active: ActiveView) -> Diagnosis:
        """End the installed view without announcing it. Nothing of it can be committed any more."""
        self._over = _Over(active.view, self._ledger.history.committed_step + 1, noted=active.ballot is not None)
        weights = self._evidence.weights(active.view.nodes)
        return self._stage.end(active, weights=weights, patient=self._evidence.failing)

    def announce_end(self, node: str, now_ns: int) -> None:
        """Announce the end of a view, if it is not announced yet; because of `node`, only if it was in the view."""
        diagnosis = self._stage.diagnosis
        if diagnosis is not None and not diagnosis.announced and (not node or diagnosis.view.rank_of(node) is not None):
            self._announce(diagnosis, diagnosis.failure(self.connected(diagnosis.view)), now_ns)

    def _announce(self, diagnosis: Diagnosis, failure: ViewFailure, now_ns: int) -> None:
        diagnosis.announced = True
        weighed = self._weigh(failure, diagnosis.view, now_ns)
        if self._over is not None:
            self._over.failure = weighed.failure
        self._out.announce_end(diagnosis.view, diagnosis.ballot, weighed.failure, now_ns=now_ns)
        self._out.withhold_from_all(weighed.left_out)
        self._departures.remove_leavers(now_ns)

    def was_open(self, node: str, message: BeginStep, now_ns: int) -> None:
        """Take in that a step was open in a view that is over, of which nothing was known.

        Args:
            node: Who had begun it.
            message: Its message. What it says of any other view than the last, or of another step, is nothing.
            now_ns: The time now.
        """
        over, diagnosis = self._over, self._stage.diagnosis
        if over is None or over.noted or (over.view.view_id, over.step) != (message.view_id, message.step):
            return
        if over.view.rank_of(node) is None:
            return
        over.noted = True
        if over.failure is not None:
            failure = over.failure
            self._out.note(
                StepRejected(
                    now_ns=now_ns,
                    view_id=over.view.view_id,
                    step=over.step,
                    cause=failure.cause,
                    lost=failure.lost,
                    culprit=failure.culprit,
                )
            )
        elif diagnosis is not None:  # the announcement follows, and says it
            diagnosis.ballot = Ballot(over.view, step=over.step)
            diagnosis.ballot.begin(node)

    # What follows for its nodes

    def connected(self, view: View) -> list[str]:
        """Return the nodes of a view that are here, by rank."""
        return [node for node in view.nodes if node in self._roster]

    def leave_out(self, reasons: Mapping[str, str], now_ns: int) -> None:
        """Leave connected nodes out of the next views, each for a while, and tell them."""
        self._out.withhold_from_all(self._probes.leave_out(reasons, now_ns=now_ns))

    def note_lessons(self, now_ns: int) -> None:
        """Record what is to be known of failed views by whoever reads the journal next, if that has changed."""
        lessons = self._evidence.news(now_ns=now_ns)
        if lessons is not None and lessons != self._ledger.history.lessons:
            self._ledger.record(Noted(lessons))

    def _weigh(self, failure: ViewFailure, view: View, now_ns: int) -> Weighed:
        """Hold a failure against those who can have caused it, and write down what follows before it is told."""
        weighed = weigh(failure, view, self._evidence, self._formation, self._ledger.history, now_ns=now_ns)
        self.note_lessons(now_ns)
        return weighed
