"""This member's state in one view: what it answered, its step, and what it reported of the others.

It begins with the proposal and ends with the view. In between

    asked       the view is proposed, and not answered
    confirmed   this member acts in no other view; until the installation it may withdraw that
    declined    it cannot take part; any later answer declines as well

and, while the view is installed, for one step after another

    free        no step is open here
    open        begun and not voted on: this member alone can make sure that the step is not committed. The coordinator
                hears of it by the vote; or by a Begin before it: at once in the first step of a view, by which it
                knows that who is here goes on with the job (coordinator/ending.py), and in a later one where the vote
                does not follow within `BEGIN_NS`, or where the view ends first. So a short step costs it one message of
                each member
    voted       the point of no return, if the vote is ok: only the coordinator knows what became of the step

until the view has `failed`: a report is on its way, the view cannot go on, and no step is begun in it any more.

What a Begin is for: the coordinator takes a boundary to be one on every member when `quiet_ns` have passed since the
last decision, and may have another view follow then. BEGIN_NS is a small part of that, no more than what the network
adds. At a view's end it tells the coordinator, and who listens to it, that a step was lost.

Invariants: a step is voted on once, after it was begun; a Begin comes before the vote or not at all; each lost peer is
reported once; at the end `Deactivate` comes
before the decision of the step that was open, since code that sees the abort may rely on it that nothing of the step
is running any more. Where the coordinator is lost after an ok vote, the step outlives the view as a doubt
(`step_in_doubt`), and the end of the view does not decide it.

Messages and actions are made here and returned; core.py says when, sends them, and has the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quicoll.membership.member.actions import Deactivate, Decided
from quicoll.membership.messages import BeginStep, Confirm, Decline, FailureKind, Report, Vote, clip

if TYPE_CHECKING:
    from quicoll.membership.member.actions import MemberAction
    from quicoll.membership.view import View

__all__ = ["BEGIN_NS", "LocalView", "ViewEnd"]

BEGIN_NS: Final = 5_000_000


@dataclass(frozen=True, slots=True)
class ViewEnd:
    """Why a view is over here.

    Attributes:
        cause: For people.
        lost: Members that are gone, or left out of the next view.
        culprit: The node that caused it; "" where none is known.
        kind: Kind of failure.
        partitioned: Whether it is over because the coordinator was lost.
    """

    cause: str
    lost: tuple[str, ...] = ()
    culprit: str = ""
    kind: FailureKind = "failed"
    partitioned: bool = False


class LocalView:
    """The state of `node` in `view`.

    Attributes:
        view: The view.
        confirmed: Whether it was confirmed.
        answered: Whether it was confirmed or declined.
        step: The step that is open here; None without one.
        vote: How it was voted on; None before.
        announce_ns: When the coordinator has to hear that the step is open; None where it has, or needs not.
        failed: Whether a report of this view is on its way.
    """

    def __init__(self, view: View, node: str) -> None:
        self.view = view
        self.confirmed = False
        self.answered = False
        self.step: int | None = None
        self.vote: bool | None = None
        self.announce_ns: int | None = None
        self.failed = False
        self._first = True  # no step of this view has been decided yet
        self._node = node
        self._lost: dict[str, None] = {}  # lost peers; an ordered set

    @property
    def free(self) -> bool:
        """Whether a step may be begun, as far as this view is concerned."""
        return self.step is None and not self.failed

    # Answers to the proposal

    def confirm(self) -> Confirm:
        """Confirm the proposal."""
        self.confirmed = self.answered = True
        return Confirm(view_id=self.view.view_id)

    def decline(self, unreachable: tuple[str, ...], reason: str) -> Decline:
        """Decline the proposal."""
        self.answered = True
        return Decline(view_id=self.view.view_id, unreachable=unreachable, reason=clip(reason))

    # Other members

    def is_new_loss(self, node: str) -> bool:
        """Return whether the loss of `node` concerns this view and was not reported yet."""
        return self.view.rank_of(node) is not None and node != self._node and node not in self._lost

    def withdraw(self, node: str, cause: str) -> Decline:
        """Withdraw a confirmation: a peer was lost before the installation."""
        self._lost[node] = None
        return self.decline((node,), cause)

    def lost(self, node: str, cause: str) -> Report:
        """Report that a peer was lost in the installed view."""
        self._lost[node] = None
        self.failed = True
        return Report(view_id=self.view.view_id, lost=((node, clip(cause)),), culprit=node)

    def fail(self, reason: str, *, culprit: str, kind: FailureKind, blamed: tuple[str, ...]) -> Report:
        """Report that a collective of the installed view failed or was cancelled."""
        self.failed = True
        return Report(view_id=self.view.view_id, blamed=blamed, reason=clip(reason), culprit=culprit, kind=kind)

    # Steps

    def begin(self, step: int, *, now_ns: int) -> None:
        """Begin a step."""
        self.step = step
        self.vote = None
        self.announce_ns = now_ns if self._first else now_ns + BEGIN_NS

    def announce(self) -> BeginStep | None:
        """Say that the step is open; None where the coordinator has heard of it, or none is."""
        if self.step is None or self.announce_ns is None:
            return None
        self.announce_ns = None
        return BeginStep(view_id=self.view.view_id, step=self.step)

    def cast_vote(
        self, step: int, *, ok: bool, digest: bytes, reason: str, culprit: str, groups: tuple[tuple[int, bytes], ...]
    ) -> Vote:
        """Vote on the step that is open."""
        self.vote = ok
        self.announce_ns = None
        return Vote(
            view_id=self.view.view_id,
            step=step,
            ok=ok,
            digest=digest,
            reason=clip(reason),
            culprit=culprit,
            groups=groups,
        )

    def contradiction(self, step: int) -> str:
        """Return why `step` cannot have been committed in this view, "" if it can."""
        if step == self.step and self.vote:
            return ""
        return f"step {step} is committed, but open here is {self.step} with vote {self.vote}"

    def decided(self) -> None:
        """Close the step: the coordinator has decided it, and the view goes on."""
        self.step = self.vote = self.announce_ns = None
        self._first = False

    def step_in_doubt(self) -> tuple[int, int] | None:
        """Return (view_id, step) of a step that may be committed although the coordinator was lost; None without one.

        It is removed from this view: neither the end of the view nor anything else here decides it.
        """
        if self.step is None or not self.vote:
            return None
        doubt = (self.view.view_id, self.step)
        self.step = self.vote = None
        return doubt

    # The end

    def end(self, end: ViewEnd) -> tuple[MemberAction, ...]:
        """Return the shell's actions at the end of the view. A step that is still open was committed nowhere."""
        view_id, cause, lost, culprit, kind = self.view.view_id, end.cause, end.lost, end.culprit, end.kind
        deactivate = Deactivate(view_id, cause, lost, culprit, end.partitioned, kind)
        if self.step is None:
            return (deactivate,)
        return deactivate, Decided(view_id, self.step, False, cause, lost, culprit, kind)
