"""The coordinator's actions, in the order in which they are carried out, and the announcements made of several."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from quicoll.membership.coordinator.actions import (
    CoordinatorAction,
    DropLink,
    MembershipEvent,
    Note,
    Persist,
    StepRejected,
    TellMember,
    ViewAborted,
    ViewInstalled,
    ViewProposed,
    ViewWithheld,
)
from quicoll.membership.messages import (
    Aborted,
    Adopt,
    CoordinatorMessage,
    Decide,
    Dismiss,
    Install,
    JobEnded,
    MayLeave,
    Outdated,
    Propose,
    RefuseJoin,
    Withhold,
    clip,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quicoll.membership.coordinator.ballot import Ballot
    from quicoll.membership.coordinator.diagnosis import ViewFailure
    from quicoll.membership.coordinator.history import JournalRecord
    from quicoll.membership.coordinator.roster import Candidate, Roster
    from quicoll.membership.view import Member, View

__all__ = ["ActionQueue"]


class ActionQueue:
    """A queue of actions. Messages to a view go only to members still connected as the same process."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._actions: deque[CoordinatorAction] = deque()
        self._withheld = ""

    def pop(self) -> CoordinatorAction | None:
        """Remove and return the next action; None when there is none."""
        return self._actions.popleft() if self._actions else None

    def persist(self, record: JournalRecord) -> None:
        """Write a record to the journal before anything that follows."""
        self._actions.append(Persist(record))

    def note(self, event: MembershipEvent) -> None:
        """Pass an event to observers."""
        self._actions.append(Note(event))

    def tell(self, member: Member | Candidate, message: CoordinatorMessage) -> None:
        """Send to a member, if it is still connected as the same process."""
        candidate = self._roster.get(member.node)
        if candidate is not None and candidate.incarnation == member.incarnation:
            self._actions.append(TellMember(member.node, member.incarnation, message))

    def tell_all(self, view: View, message: CoordinatorMessage) -> None:
        """Send to all members of a view."""
        for member in view.members:
            self.tell(member, message)

    def drop(self, node: str, incarnation: int, reason: str) -> None:
        """Close the link of a process."""
        self._actions.append(DropLink(node, incarnation, reason))

    def refuse(self, node: str, incarnation: int, reason: str) -> None:
        """Refuse a process that is not in the roster, and close its link."""
        self._actions.append(TellMember(node, incarnation, RefuseJoin(reason=clip(reason))))
        self.drop(node, incarnation, reason)

    def have_adopt(self, node: str, incarnation: int, lost_after_ns: int) -> None:
        """Tell a process that is on no list which setting it has to join with."""
        self._actions.append(TellMember(node, incarnation, Adopt(lost_after_ns=lost_after_ns)))

    def outdate(self, node: str, incarnation: int, latest: int) -> None:
        """Tell a process that is on no list which incarnation of its node is the latest."""
        self._actions.append(TellMember(node, incarnation, Outdated(latest=latest)))

    def end(self, candidate: Candidate, step: int) -> None:
        """Tell a node that the job is done, and close its link when it has had time to say that it has heard."""
        candidate.told_end = True
        self.tell(candidate, JobEnded(step=step))
        self.drop(candidate.node, candidate.incarnation, "the job is done")

    def dismiss(self, candidate: Candidate) -> None:
        """Tell a node to leave, if it was not told so in a decision, and close its link when it has had time to go."""
        if not candidate.dismissed:
            candidate.dismissed = True
            self.tell(candidate, Dismiss(reason=clip(candidate.dismissal)))
        self.drop(candidate.node, candidate.incarnation, "it was told to leave")

    def release(self, candidate: Candidate) -> None:
        """Tell a node that has asked to leave that it may."""
        self.tell(candidate, MayLeave())

    def withhold(self, cause: str, *, now_ns: int) -> None:
        """Tell every node that waits why there is no view; each gets each reason once."""
        cause = clip(cause)
        if cause != self._withheld:
            self._withheld = cause
            self.note(ViewWithheld(now_ns=now_ns, cause=cause))
        for candidate in self._roster:
            if candidate.wait_reason != cause:
                self.withhold_from(candidate, cause)

    def withhold_from(self, candidate: Candidate, cause: str) -> None:
        """Tell one node why it is in no view."""
        candidate.wait_reason = clip(cause)
        self.tell(candidate, Withhold(cause=candidate.wait_reason))

    def withhold_from_all(self, reasons: Mapping[str, str]) -> None:
        """Tell nodes why they are in no view, each its own reason, those that are there."""
        for node, why in reasons.items():
            candidate = self._roster.get(node)
            if candidate is not None:
                self.withhold_from(candidate, why)

    def announce_proposal(self, view: View, previous: View | None, boundary: Decide | None, *, now_ns: int) -> None:
        """Send a proposal to its members, and the end of the view before it to members it has no more.

        Args:
            view: The proposal.
            previous: The view installed until now.
            boundary: The decision of its step, if one has just been taken. Members that stay get the proposal inside
                of it, in one message: between two messages they could begin a step of the old view.
            now_ns: The time now.
        """
        informed: tuple[str, ...] = ()
        if previous is not None:
            informed = previous.nodes if boundary is not None else ()
            for member in previous.members:
                stays = view.rank_of(member.node) is not None
                candidate = self._roster.get(member.node)
                if candidate is not None and candidate.dismissal:
                    # In one message with the decision: between two it could begin a step that is never committed.
                    if boundary is not None and not candidate.dismissed:
                        candidate.dismissed = True
                        self.tell(member, msgspec.structs.replace(boundary, dismissal=clip(candidate.dismissal)))
                    continue
                if boundary is not None:
                    self.tell(member, msgspec.structs.replace(boundary, next_view=view if stays else None))
                if not stays:
                    self.tell(member, Aborted(view_id=previous.view_id, cause=f"not in view {view.view_id}"))
        for member in view.members:
            if member.node not in informed:
                self.tell(member, Propose(view=view))
            candidate = self._roster.get(member.node)
            if candidate is not None:
                candidate.wait_reason = ""
        self._withheld = ""
        self.note(ViewProposed(now_ns=now_ns, view=view))

    def announce_installation(self, view: View, *, now_ns: int) -> None:
        """Tell the members that the view is installed."""
        self.tell_all(view, Install(view_id=view.view_id))
        self.note(ViewInstalled(now_ns=now_ns, view=view))

    def announce_failed_proposal(self, view: View, *, cause: str, lost: tuple[str, ...], now_ns: int) -> None:
        """Tell the members that the proposed view is given up."""
        self.tell_all(view, Aborted(view_id=view.view_id, cause=cause, lost=lost))
        self.note(ViewAborted(now_ns=now_ns, view_id=view.view_id, installed=False, cause=cause, lost=lost, culprit=""))

    def announce_end(self, view: View, ballot: Ballot | None, failure: ViewFailure, *, now_ns: int) -> None:
        """Tell the members that the installed view is over, and that the step of `ballot` is committed nowhere."""
        view_id = view.view_id
        cause, kind, culprit, lost = failure.cause, failure.kind, failure.culprit, failure.lost
        aborted = Aborted(view_id=view_id, cause=cause, lost=lost, culprit=culprit, kind=kind)
        if ballot is None:
            self.tell_all(view, aborted)
        else:
            step = ballot.step
            decision = Decide(
                view_id=view_id, step=step, commit=False, cause=cause, lost=lost, culprit=culprit, kind=kind
            )
            for member in view.members:
                self.tell(member, decision if ballot.entered(member.node) else aborted)
            self.note(StepRejected(now_ns=now_ns, view_id=view_id, step=step, cause=cause, lost=lost, culprit=culprit))
        self.note(ViewAborted(now_ns=now_ns, view_id=view_id, installed=True, cause=cause, lost=lost, culprit=culprit))
