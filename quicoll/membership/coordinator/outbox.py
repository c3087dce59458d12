"""The coordinator's actions in the order in which they are to be carried out, and the phrases that it says often."""

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
    Install,
    Propose,
    RefuseJoin,
    Withhold,
    clip,
)

if TYPE_CHECKING:
    from quicoll.membership.coordinator.ballot import Ballot
    from quicoll.membership.coordinator.diagnosis import Judgement
    from quicoll.membership.coordinator.history import JournalRecord
    from quicoll.membership.coordinator.roster import Candidate, Roster
    from quicoll.membership.view import Member, View

__all__ = ["ActionQueue"]


class ActionQueue:
    """A queue of actions; tells only those members of a view that are still connected as the same process."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._actions: deque[CoordinatorAction] = deque()
        self._held = ""

    def pop(self) -> CoordinatorAction | None:
        return self._actions.popleft() if self._actions else None

    def persist(self, record: JournalRecord) -> None:
        self._actions.append(Persist(record))

    def note(self, event: MembershipEvent) -> None:
        self._actions.append(Note(event))

    def tell(self, member: Member | Candidate, message: CoordinatorMessage) -> None:
        candidate = self._roster.get(member.node)
        if candidate is not None and candidate.incarnation == member.incarnation:
            self._actions.append(TellMember(member.node, member.incarnation, message))

    def tell_all(self, view: View, message: CoordinatorMessage) -> None:
        for member in view.members:
            self.tell(member, message)

    def drop(self, node: str, incarnation: int, reason: str) -> None:
        self._actions.append(DropLink(node, incarnation, reason))

    def refuse(self, node: str, incarnation: int, reason: str) -> None:
        """Say no to a process that is on no list, and close its link."""
        self._actions.append(TellMember(node, incarnation, RefuseJoin(reason=clip(reason))))
        self.drop(node, incarnation, reason)

    def have_adopt(self, node: str, incarnation: int, lost_after_ns: int) -> None:
        """Tell a process that is on no list which setting it has to join with."""
        self._actions.append(TellMember(node, incarnation, Adopt(lost_after_ns=lost_after_ns)))

    def hold(self, cause: str, *, now_ns: int) -> None:
        """Tell everybody who waits for a view why there is none; each hears each reason once."""
        cause = clip(cause)
        if cause != self._held:
            self._held = cause
            self.note(ViewWithheld(now_ns=now_ns, cause=cause))
        for candidate in self._roster:
            if candidate.told != cause:
                self.leave_waiting(candidate, cause)

    def leave_waiting(self, candidate: Candidate, cause: str) -> None:
        candidate.told = clip(cause)
        self.tell(candidate, Withhold(cause=candidate.told))

    def proposed(self, view: View, previous: View | None, boundary: Decide | None, *, now_ns: int) -> None:
        """A view is proposed: its members are asked, and those who are in it no more are told so.

        previous: the view at work until now. boundary: the decision of its step, if one has just been taken; who stays
        gets the proposal inside of it, in one message: between the two nobody could begin a step of the old view.
        What was said about having to wait is over.
        """
        informed: tuple[str, ...] = ()
        if previous is not None:
            informed = previous.nodes if boundary is not None else ()
            for member in previous.members:
                stays = view.rank_of(member.node) is not None
                if boundary is not None:
                    self.tell(member, msgspec.structs.replace(boundary, next_view=view if stays else None))
                if not stays:
                    self.tell(member, Aborted(view_id=previous.view_id, cause=f"not in view {view.view_id}"))
        for member in view.members:
            if member.node not in informed:
                self.tell(member, Propose(view=view))
            candidate = self._roster.get(member.node)
            if candidate is not None:
                candidate.told = ""
        self._held = ""
        self.note(ViewProposed(now_ns=now_ns, view=view))

    def installed(self, view: View, *, now_ns: int) -> None:
        self.tell_all(view, Install(view_id=view.view_id))
        self.note(ViewInstalled(now_ns=now_ns, view=view))

    def failed(self, view: View, *, cause: str, lost: tuple[str, ...], now_ns: int) -> None:
        """The proposed view comes to nothing."""
        self.tell_all(view, Aborted(view_id=view.view_id, cause=cause, lost=lost))
        self.note(ViewAborted(now_ns=now_ns, view_id=view.view_id, installed=False, cause=cause, lost=lost, culprit=""))

    def broken(self, view: View, ballot: Ballot | None, judgement: Judgement, *, now_ns: int) -> None:
        """The installed view is over, and the step of `ballot` is committed nowhere."""
        view_id = view.view_id
        cause, kind, culprit, lost = judgement.cause, judgement.kind, judgement.culprit, judgement.lost
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
