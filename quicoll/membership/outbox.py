"""The coordinator's actions in the order in which they are to be carried out, and the phrases that it says often."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from quicoll.membership.actions import Action, Drop, Event, Held, Note, Persist, StepAborted, Tell, ViewAborted
from quicoll.membership.messages import Aborted, CoordinatorMessage, Decision, Hold, Refuse, clip

if TYPE_CHECKING:
    from quicoll.membership.ballot import Ballot
    from quicoll.membership.hearing import Judgement
    from quicoll.membership.history import Record
    from quicoll.membership.roster import Candidate, Roster
    from quicoll.membership.view import Member, View

__all__ = ["Outbox"]


class Outbox:
    """A queue of actions; tells only those members of a view that are still connected as the same process."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._actions: deque[Action] = deque()
        self._held = ""

    def pop(self) -> Action | None:
        return self._actions.popleft() if self._actions else None

    def persist(self, record: Record) -> None:
        self._actions.append(Persist(record))

    def note(self, event: Event) -> None:
        self._actions.append(Note(event))

    def tell(self, member: Member | Candidate, message: CoordinatorMessage) -> None:
        candidate = self._roster.get(member.node)
        if candidate is not None and candidate.incarnation == member.incarnation:
            self._actions.append(Tell(member.node, member.incarnation, message))

    def drop(self, node: str, incarnation: int, reason: str) -> None:
        self._actions.append(Drop(node, incarnation, reason))

    def refuse(self, node: str, incarnation: int, reason: str) -> None:
        """Say no to a process that is on no list, and close its link."""
        self._actions.append(Tell(node, incarnation, Refuse(reason=clip(reason))))
        self.drop(node, incarnation, reason)

    def hold(self, cause: str, *, now_ns: int) -> None:
        """Tell everybody who waits for a view why there is none; each hears each reason once."""
        cause = clip(cause)
        if cause != self._held:
            self._held = cause
            self.note(Held(now_ns=now_ns, cause=cause))
        for candidate in self._roster:
            if candidate.told != cause:
                self.leave_waiting(candidate, cause)

    def leave_waiting(self, candidate: Candidate, cause: str) -> None:
        candidate.told = clip(cause)
        self.tell(candidate, Hold(cause=candidate.told))

    def resume(self) -> None:
        """A view is proposed: what was said about having to wait is over."""
        self._held = ""

    def failed(self, view: View, *, cause: str, lost: tuple[str, ...], now_ns: int) -> None:
        """The proposed view comes to nothing."""
        for member in view.members:
            self.tell(member, Aborted(view_id=view.view_id, cause=cause, lost=lost))
        self.note(ViewAborted(now_ns=now_ns, view_id=view.view_id, installed=False, cause=cause, lost=lost, culprit=""))

    def broken(self, view: View, ballot: Ballot | None, judgement: Judgement, *, now_ns: int) -> None:
        """The installed view is over, and the step of `ballot` is committed nowhere."""
        view_id = view.view_id
        cause, kind, culprit, lost = judgement.cause, judgement.kind, judgement.culprit, judgement.lost
        aborted = Aborted(view_id=view_id, cause=cause, lost=lost, culprit=culprit, kind=kind)
        if ballot is None:
            for member in view.members:
                self.tell(member, aborted)
        else:
            step = ballot.step
            decision = Decision(
                view_id=view_id, step=step, commit=False, cause=cause, lost=lost, culprit=culprit, kind=kind
            )
            for member in view.members:
                self.tell(member, decision if ballot.entered(member.node) else aborted)
            self.note(StepAborted(now_ns=now_ns, view_id=view_id, step=step, cause=cause, lost=lost, culprit=culprit))
        self.note(ViewAborted(now_ns=now_ns, view_id=view_id, installed=True, cause=cause, lost=lost, culprit=culprit))
