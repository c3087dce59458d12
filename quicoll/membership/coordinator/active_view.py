"""An installed view at work: which of its steps is open, and until when its votes are waited for.

    boundary    no step is open. Members may come or go; once `quiet_ns` have passed since the last decision, no Begin
                can be on its way any more, and the boundary is taken to be one on every member
    open        the first Begin or Vote of a step has come; its ballot collects the votes (ballot.py)
    counting    the first vote has come, and the last one has to come within `vote_timeout_ns` of it

and back to the boundary with the decision. A view that ends takes what is open with it.

Invariants: a ballot is for the step after the last committed one, and there is one at a time; a member votes once. A
member that breaks this ends its view, since its state may be in doubt: the outcome is then an abort that names it.

Failure cases: votes that do not come (`late`). What follows from an outcome or from lateness is the coordinator's to do
(coordinator.py); nothing here is durable, and nobody is told anything from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.membership.coordinator.ballot import Ballot, BallotResult
from quicoll.membership.messages import BeginStep, Vote

if TYPE_CHECKING:
    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.view import View

__all__ = ["ActiveView"]


class ActiveView:
    """From the installation of `view`, at `now_ns`, to its end."""

    def __init__(self, view: View, config: CoordinatorConfig, *, now_ns: int) -> None:
        self.view = view
        self.ballot: Ballot | None = None  # of the step that is open
        self.late_ns: int | None = None  # when a vote that has not come is late
        self._config = config
        self._boundary_ns = now_ns

    @property
    def quiet_ns(self) -> int:
        """When the boundary is one on every member, if no step is opened before."""
        return self._boundary_ns + self._config.quiet_ns

    def entered(self, node: str) -> bool:
        """Whether `node` is known to be inside the step that is open."""
        return self.ballot is not None and self.ballot.entered(node)

    def receive(self, node: str, message: BeginStep | Vote, *, expected: int, now_ns: int) -> BallotResult | None:
        """The member `node` began a step or voted; what that decides, None if nothing yet.

        expected: the step after the last committed one.
        """
        if message.step != expected:
            word = "voted on" if isinstance(message, Vote) else "began"
            cause = f"{node} {word} step {message.step}, but the next one is {expected}"
            return BallotResult(commit=False, cause=cause, culprit=node)
        if self.ballot is None:
            self.ballot = Ballot(self.view, step=expected)
        if isinstance(message, BeginStep):
            self.ballot.begin(node)
            return None
        if self.ballot.voted(node):
            return BallotResult(commit=False, cause=f"{node} voted twice on step {message.step}", culprit=node)
        outcome = self.ballot.vote(node, message)
        if outcome is None:
            self.late_ns = self.late_ns or now_ns + self._config.vote_timeout_ns
        return outcome

    def late(self, now_ns: int) -> tuple[str, ...]:
        """Members whose votes are late, by rank; none while the votes are still waited for."""
        if self.ballot is None or self.late_ns is None or now_ns < self.late_ns:
            return ()
        return self.ballot.silent

    def step_decided(self, *, now_ns: int) -> None:
        """The step is decided and the view goes on: the next boundary begins."""
        self.ballot = None
        self.late_ns = None
        self._boundary_ns = now_ns
