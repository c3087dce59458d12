"""Facts that a member keeps from view to view, and by which it detects a coordinator on another journal.

    seed            of the job; of the first Welcome, and the same in every other
    last_view_id    the largest view ever proposed to this process; views only grow
    committed       the last step that is known to be committed: where the next one of a view begins
    holds           the last step whose result is here; where it is behind `committed`, another member's state is needed
    owns            whether part of the job's state may be nowhere but here
    doubt           the step voted on with ok in a view that is over, until a Welcome says what the journal has of it

The vote is the point of no return. Before it, this member alone can make sure that the step is not committed: losing
the coordinator aborts the step here. After a vote with ok, only the coordinator knows. So from an ok vote to the
decision the step is in doubt: when the link is lost the view is deactivated, but nothing is said about the step until
the answer to the next Join, from the journal, settles it. This is the blocking of two-phase commit (Bernstein,
Hadzilacos and Goodman 1987, "Concurrency Control and Recovery in Database Systems", section 7.4); it cannot be avoided
with a single decider, and costs time only, never state.

The coordinator is trusted to decide, not to be free of faults. What its rules exclude (a view id that goes back,
another seed, a view that begins before what is held here, an answer to no question) means that it has lost its journal
or has another job's. The member then does not guess: each check says what contradicts, and the core stops with
`Refused`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.membership.messages import Welcome
    from quicoll.membership.view import View

__all__ = ["JobProgress"]


class JobProgress:
    """Progress of the job, as known to a process that started with the state after step `holds`.

    seed: The job's, or the one that this process asks for as long as it has not heard; None for any.
    admitted: Whether a coordinator has ever taken this process into its job.
    """

    def __init__(self, holds: int, *, seed: int | None = None) -> None:
        self.seed = seed
        self.admitted = False
        self.last_view_id = 0
        self.committed = 0
        self.holds = holds
        self.owns = False
        self.doubt: tuple[int, int] | None = None  # (view_id, step)

    def contradiction(self, message: Welcome) -> str:
        """Return what of a Welcome contradicts this progress, "" if nothing does."""
        if (self.doubt is None) != (message.doubt_committed is None):
            return f"the doubt is {self.doubt}, the answer {message.doubt_committed}"
        if self.seed is not None and self.seed != message.seed:
            return f"the seed was {self.seed} and is {message.seed}"
        return ""

    def welcome(self, message: Welcome) -> tuple[int, int] | None:
        """Take in a Welcome that contradicts nothing; return the doubt that it settles, if there was one."""
        self.seed = message.seed
        self.admitted = True
        doubt, self.doubt = self.doubt, None
        return doubt

    def contradiction_of_view(self, view: View, *, node: str, incarnation: int) -> str:
        """Return why `view` cannot be proposed to this process of `node`, "" if it can."""
        member = view.member(node)
        if view.view_id <= self.last_view_id:
            return f"view {view.view_id} is proposed after view {self.last_view_id}"
        if member is None or member.incarnation != incarnation:
            return f"view {view.view_id} has no {node} of incarnation {incarnation}"
        if view.committed_step < self.holds or view.seed != self.seed:
            theirs = f"step {view.committed_step} and seed {view.seed}"
            return f"view {view.view_id} has {theirs}, this node step {self.holds} and seed {self.seed}"
        return ""

    def proposed(self, view: View) -> None:
        """Take in a proposal that has this process."""
        self.last_view_id = view.view_id
        self.committed = view.committed_step

    def commit(self, step: int) -> None:
        """Take in that the step is committed and its result is here."""
        self.holds = self.committed = step

    def caught_up(self, step: int) -> None:
        """Take in the state after `step` from another member, 0 for one that it has from a checkpoint.

        Raises:
            LocalError: No member can hold it.
        """
        if step and not self.holds <= step <= self.committed:
            raise LocalError(f"step {step} is not in {self.holds}..{self.committed}", step=step)
        self.holds = step

    def state_lost(self) -> None:
        """Take in that the state that was here is whole no more: this process counts as one that begins anew."""
        self.holds = 0
