"""What is due: looked at after every input, whatever it was. Looking again without one changes nothing.

While no view is there, in this order:

    the end of the last one    is announced when the reports on it are complete, or waited for no more
    the end of the job         where its work is done, those who wait hear that
    the nodes given up         where an operator asked for it, and it may be
    the next view              is proposed, or those who wait hear what is in its way

While one is installed and no step of it is open: nodes that are to leave are let go, and another view takes its place
where other nodes would be chosen. In any state: ranks that may stop are told, and nodes that are left out try paths.

Invariants: nothing changes while a step is open, since its decision looks again (and votes of a large view must not
each count all nodes). A node that only wants to join waits for such a boundary, and a little longer where no step is
open (`quiet_ns`), because Begins that are on their way would be aborted. Where something is due later without another
input, the time of that is returned, and the earliest one counts. A new view needs a quorum, and a member that holds the
last committed step (formation.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.deadlines import earlier
from quicoll.membership.coordinator.actions import NodeReleased, NodesForgotten
from quicoll.membership.coordinator.formation import Readiness
from quicoll.membership.coordinator.probes import MOVES_NS, expectations
from quicoll.membership.coordinator.stage import CoordinatorState
from quicoll.membership.messages import clip

if TYPE_CHECKING:
    from quicoll.membership.coordinator.active_view import ActiveView
    from quicoll.membership.coordinator.departures import Departures
    from quicoll.membership.coordinator.ending import Ending
    from quicoll.membership.coordinator.evidence import Evidence
    from quicoll.membership.coordinator.forgetting import Forgetting
    from quicoll.membership.coordinator.formation import Formation
    from quicoll.membership.coordinator.leaving import Leaving
    from quicoll.membership.coordinator.ledger import Ledger
    from quicoll.membership.coordinator.probes import Probes
    from quicoll.membership.coordinator.releases import Releases
    from quicoll.membership.coordinator.roster import Candidate, Roster
    from quicoll.membership.coordinator.stage import Stage
    from quicoll.membership.coordinator.succession import Succession

__all__ = ["Reconsidering"]


class Reconsidering:
    """See the module's head; remembers when to look again although nothing came in.

    Args:
        ledger: What the journal holds; takes what is recorded and said.
        roster: Connected nodes.
        stage: Which view there is.
        evidence: How soon views may follow each other.
        formation: Whether there can be a view.
        probes: Nodes that are left out.
        releases: Nodes that have asked whether they may stop.
        ending: Whether the job is done.
        forgetting: Nodes that an operator gives up.
        departures: Lets those go that are due to leave.
        succession: Begins and ends views.
        leaving: Ends steps that wait for a node which hands over what it owns.
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
        releases: Releases,
        ending: Ending,
        forgetting: Forgetting,
        departures: Departures,
        succession: Succession,
        leaving: Leaving,
    ) -> None:
        self._ledger = ledger
        self._out = ledger.out
        self._roster = roster
        self._stage = stage
        self._evidence = evidence
        self._formation = formation
        self._probes = probes
        self._releases = releases
        self._ending = ending
        self._forgetting = forgetting
        self._departures = departures
        self._succession = succession
        self._leaving = leaving
        self._wake_ns: int | None = None

    @property
    def wake_ns(self) -> int | None:
        """When to look again; None where only an input can change anything."""
        return earlier(self._wake_ns, self._probes.again_ns)

    def look(self, now_ns: int, *, stays: bool = False) -> None:
        """Do what is due.

        Args:
            now_ns: The time now.
            stays: Whether a step was committed at this very moment, and the view found to stay as it is.
        """
        self._wake_ns = None
        self._leaving.make_way(now_ns)
        if self._stage.state is CoordinatorState.FORMING:
            self._forming(now_ns)
        elif stays:
            self._wake_ns = self._formation.next_return(now_ns=now_ns)
        elif self._stage.active is not None:
            self._installed(self._stage.active, now_ns)
        for candidate in self._releases.may_go():
            self._out.note(NodeReleased(now_ns=now_ns, node=candidate.node))
            self._out.release(candidate)
        self._probe(now_ns)

    def _forming(self, now_ns: int) -> None:
        diagnosis = self._stage.diagnosis
        if diagnosis is not None:
            if not diagnosis.complete(self._succession.connected(diagnosis.view), now_ns=now_ns):
                self._wake_ns = diagnosis.deadline_ns
                return
            self._succession.announce_end("", now_ns)
            out = diagnosis.excluded(self._succession.connected(diagnosis.view))
            self._succession.leave_out(out, now_ns)
            self._stage.diagnosis = None
        if self._ledger.history.finished and self._look_at_end(now_ns):
            return
        readiness = self._formation.evaluate(self._ledger.history, now_ns=now_ns)
        if readiness.obstacle and self._forgetting.asked:
            readiness = self._try_to_forget(readiness, now_ns)
        if readiness.obstacle:
            self._wake_ns = readiness.retry_ns
            words = self._probes.words(now_ns=now_ns)
            obstacle = f"{readiness.obstacle}; {words}" if words else readiness.obstacle
            self._out.withhold(clip(obstacle), now_ns=now_ns)
            return
        self._forgetting.unneeded()
        self._succession.propose(readiness.chosen, now_ns)

    def _try_to_forget(self, readiness: Readiness, now_ns: int) -> Readiness:
        """Forget the nodes that the operator gives up, where that may be; return how it is then."""
        prospect = self._forgetting.look(self._roster, readiness.chosen, self._ledger.history, now_ns=now_ns)
        if prospect.record is not None:
            self._ledger.record(prospect.record)
            self._out.note(NodesForgotten(now_ns=now_ns, nodes=prospect.record.nodes))
            return self._formation.evaluate(self._ledger.history, now_ns=now_ns)
        wakes = [at for at in (readiness.retry_ns, prospect.wake_ns) if at is not None]
        obstacle = f"{readiness.obstacle}; {self._forgetting.words(prospect.refusal)}"
        return Readiness(readiness.chosen, obstacle, min(wakes, default=None))

    def _look_at_end(self, now_ns: int) -> bool:
        """Tell those who wait that the job is done, where it is; return whether there is no view for that reason."""
        outlook = self._ending.look(self._roster, self._ledger.history, now_ns=now_ns)
        for record in outlook.records:
            self._ledger.record(record)
        if not outlook.obstacle:
            return False
        self._wake_ns = outlook.wake_ns
        if outlook.event is not None:
            self._out.note(outlook.event)
        self._out.withhold(outlook.obstacle, now_ns=now_ns)
        for candidate in outlook.told:
            self._out.end(candidate, self._ledger.history.final_step)
        return True

    def moved(self, moved: Candidate, now_ns: int) -> None:
        """Tell who makes a link to this node, or is about to, that it is elsewhere by now."""
        view = None if self._stage.proposal is None else self._stage.proposal.view
        fast = moved.moved_ns is not None and now_ns < moved.moved_ns + MOVES_NS
        if view is not None and view.rank_of(moved.node) is not None and not fast:
            moved.moved_ns = now_ns
            others = [self._roster.get(node) for node in view.nodes if node != moved.node]
            for other, expected in expectations(moved, [other for other in others if other is not None]):
                self._out.tell(other, expected)
        self._ask(now_ns)

    def _probe(self, now_ns: int) -> None:
        """Have nodes that are left out try the paths to those that they would work with. While a step is open they
        are not counted anew; what is to be repeated is."""
        idle = self._stage.active is None or self._stage.active.ballot is None
        again_ns = self._probes.again_ns
        if idle or (again_ns is not None and again_ns <= now_ns):
            self._ask(now_ns)

    def _ask(self, now_ns: int) -> None:
        for candidate, message in self._probes.due(self._stage.view, now_ns=now_ns):
            self._out.tell(candidate, message)

    def _installed(self, active: ActiveView, now_ns: int) -> None:
        if active.ballot is not None:
            return
        if self._departures.due(active.view, now_ns):
            may_ns = max(active.quiet_ns, self._evidence.may_propose_ns())
            if now_ns < may_ns:
                self._wake_ns = may_ns
                return
            self._departures.dismiss(active.view, now_ns)
            if not self._formation.unchanged(active.view, self._ledger.history, now_ns=now_ns):
                self._succession.change(active, "", now_ns)
            self._departures.remove_leavers(now_ns)
            return
        history, quiet_ns = self._ledger.history, active.quiet_ns
        change = self._formation.due_change(active.view, history, quiet_ns=quiet_ns, now_ns=now_ns)
        if change.obstacle:
            self._wake_ns = change.retry_ns
        else:
            self._succession.change(active, "", now_ns)
