"""An installed view: which of its steps is open, and until when its votes are awaited.

    boundary    no step is open. Members may come or go; once `quiet_ns` have passed since the last decision, no Begin
                can be on its way any more, and the boundary is taken to be one on every member
    open        the first Begin or Vote of a step has come; its ballot collects the votes (ballot.py)
    voting      the first vote has come, and the last one has to come within `vote_timeout_ns` of it

and back to the boundary with the decision. A view that ends takes what is open with it.

Invariants: a ballot is for the step after the last committed one, and there is one at a time; a member votes once. A
member that breaks this ends its view, since its state may be in doubt: the outcome is then an abort that names it.

Failure cases: votes that do not come (`late`). The core decides what follows from an outcome or from lateness; nothing
here is durable, and nothing is sent from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.membership.coordinator.admission import name_list
from quicoll.membership.coordinator.ballot import Ballot, BallotResult
from quicoll.membership.coordinator.diagnosis import ViewFailure
from quicoll.membership.coordinator.evidence import Contradiction
from quicoll.membership.messages import BeginStep, Vote, clip

if TYPE_CHECKING:
    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.view import View

__all__ = ["ActiveView"]


class ActiveView:
    """Steps and votes of `view`, from its installation at `now_ns` to its end.

    Attributes:
        view: The view.
        ballot: Of the step that is open; None at a boundary.
        late_ns: When a vote that has not come is late; None before the first vote.
        opened_ns: When the step that is open was heard of first; None at a boundary.
    """

    def __init__(self, view: View, config: CoordinatorConfig, *, now_ns: int) -> None:
        self.view = view
        self.ballot: Ballot | None = None
        self.late_ns: int | None = None
        self.opened_ns: int | None = None
        self._config = config
        self._boundary_ns = now_ns

    @property
    def quiet_ns(self) -> int:
        """Time from which the boundary is one on every member, if no step is opened before."""
        return self._boundary_ns + self._config.quiet_ns

    @property
    def voting_ns(self) -> int | None:
        """When the first vote of the step that is open came; None where there is none."""
        return None if self.late_ns is None else self.late_ns - self._config.vote_timeout_ns

    def entered(self, node: str) -> bool:
        """Return whether `node` is known to be inside the step that is open."""
        return self.ballot is not None and self.ballot.entered(node)

    def receive(self, node: str, message: BeginStep | Vote, *, expected: int, now_ns: int) -> BallotResult | None:
        """Take in that a member began a step or voted.

        Args:
            node: The member.
            message: Its message.
            expected: The step after the last committed one.
            now_ns: The time now.
        Returns:
            The result of the ballot; None while there is none.
        """
        if message.step != expected:
            word = "voted on" if isinstance(message, Vote) else "began"
            cause = f"{node} {word} step {message.step}, but the next one is {expected}"
            return BallotResult(commit=False, cause=cause, culprit=node, contradiction=Contradiction((node,)))
        if self.ballot is None:
            self.ballot = Ballot(self.view, step=expected)
            self.opened_ns = now_ns
        if isinstance(message, BeginStep):
            self.ballot.begin(node)
            return None
        if self.ballot.voted(node):
            cause = f"{node} voted twice on step {message.step}"
            return BallotResult(commit=False, cause=cause, culprit=node, contradiction=Contradiction((node,)))
        outcome = self.ballot.vote(node, message)
        if outcome is None:
            self.late_ns = self.late_ns or now_ns + self._config.vote_timeout_ns
        return outcome

    def late(self, now_ns: int) -> ViewFailure | None:
        """Return the failure for votes that are late, which names their members; None while they are still awaited."""
        if self.ballot is None or self.late_ns is None or now_ns < self.late_ns or not self.ballot.silent:
            return None
        late, seconds = self.ballot.silent, self._config.vote_timeout_ns / 1e9
        cause = clip(f"no vote on step {self.ballot.step} within {seconds:g} s from {name_list(late)}")
        culprit = late[0] if len(late) == 1 else ""
        return ViewFailure(cause, "failed", culprit, late, Contradiction(late, enough=True))

    def step_decided(self, *, now_ns: int) -> None:
        """Close the ballot: the step is decided and the view goes on."""
        self.ballot = None
        self.late_ns = self.opened_ns = None
        self._boundary_ns = now_ns
