"""This member's seat in one view: what it answered, what it does there, and what it has said of the others.

A seat is taken with the proposal and given up with the end of the view, whatever ends it. In between

    asked       the view is proposed, and not answered
    confirmed   this member acts in no other view; until the installation it may take that back
    declined    it cannot take part; what it says after that is more of the same

and, while the view is installed, for one step after another

    free        no step is open here
    open        begun and not voted on: this member alone can make sure that the step is not committed
    voted       the point of no return, if the vote is ok: only the coordinator knows what became of the step

until the view has `failed`: a report is on its way, the view cannot go on, and no step is begun in it any more.

Invariants: a step is voted on once, after it was begun; each lost peer is named once; at the end `Deactivate` comes
before the news of the step that was open, since who hears of the abort may rely on it that nothing of the step is
running any more. Where the coordinator is lost after an ok vote, the step outlives the seat as a doubt
(`step_in_doubt`), and the end says nothing of it.

Messages and actions are made here, and returned; the member's core (member.py) says when, sends them, and has the
clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.membership.member.actions import Deactivate, Decided
from quicoll.membership.messages import BeginStep, Confirm, Decline, FailureKind, Report, Vote, clip

if TYPE_CHECKING:
    from quicoll.membership.member.actions import MemberAction
    from quicoll.membership.view import View

__all__ = ["LocalView"]


class LocalView:
    """The seat of `node` in `view`."""

    def __init__(self, view: View, node: str) -> None:
        self.view = view
        self.confirmed = False
        self.answered = False  # confirmed or declined
        self.step: int | None = None  # the step that is open here
        self.vote: bool | None = None  # how it was voted on, None before
        self.failed = False  # a report of this view is on its way
        self._node = node
        self._lost: dict[str, None] = {}  # lost peers; an ordered set

    @property
    def free(self) -> bool:
        """Whether a step may be begun, as far as this view is concerned."""
        return self.step is None and not self.failed

    # Answers to the proposal

    def confirm(self) -> Confirm:
        self.confirmed = self.answered = True
        return Confirm(view_id=self.view.view_id)

    def decline(self, unreachable: tuple[str, ...], reason: str) -> Decline:
        self.answered = True
        return Decline(view_id=self.view.view_id, unreachable=unreachable, reason=clip(reason))

    # Other members

    def is_new_loss(self, node: str) -> bool:
        """Whether the loss of `node` concerns this view and was not named yet."""
        return self.view.rank_of(node) is not None and node != self._node and node not in self._lost

    def withdraw(self, node: str, cause: str) -> Decline:
        """A peer is lost after the confirmation, before the installation."""
        self._lost[node] = None
        return self.decline((node,), cause)

    def lost(self, node: str, cause: str) -> Report:
        """A peer is lost in the installed view."""
        self._lost[node] = None
        self.failed = True
        return Report(view_id=self.view.view_id, lost=((node, clip(cause)),), culprit=node)

    def fail(self, reason: str, *, culprit: str, kind: FailureKind, blamed: tuple[str, ...]) -> Report:
        """A collective of the installed view failed or was cancelled."""
        self.failed = True
        return Report(view_id=self.view.view_id, blamed=blamed, reason=clip(reason), culprit=culprit, kind=kind)

    # Steps

    def begin(self, step: int) -> BeginStep:
        self.step = step
        self.vote = None
        return BeginStep(view_id=self.view.view_id, step=step)

    def cast_vote(
        self, step: int, *, ok: bool, digest: bytes, reason: str, culprit: str, groups: tuple[tuple[int, bytes], ...]
    ) -> Vote:
        """Vote on the step that is open."""
        self.vote = ok
        return Vote(
            view_id=self.view.view_id,
            step=step,
            ok=ok,
            digest=digest,
            reason=clip(reason),
            culprit=culprit,
            groups=groups,
        )

    def decided(self) -> None:
        """The coordinator has decided the open step, and the view goes on."""
        self.step = self.vote = None

    def step_in_doubt(self) -> tuple[int, int] | None:
        """The link to the coordinator is lost: (view_id, step) of a step that may have been committed, if there is one.

        It is no part of the seat any more: neither the end of the view nor anything else here decides it.
        """
        if self.step is None or not self.vote:
            return None
        doubt = (self.view.view_id, self.step)
        self.step = self.vote = None
        return doubt

    # The end

    def end(
        self, cause: str, *, lost: tuple[str, ...], culprit: str, partitioned: bool, kind: FailureKind
    ) -> tuple[MemberAction, ...]:
        """What the shell has to do at the end of the view. A step that is open by now was committed nowhere."""
        view_id = self.view.view_id
        deactivate = Deactivate(view_id, cause, lost, culprit, partitioned, kind)
        if self.step is None:
            return (deactivate,)
        return deactivate, Decided(view_id, self.step, False, cause, lost, culprit, kind)
