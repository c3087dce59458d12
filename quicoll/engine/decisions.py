"""What became of this rank's steps, and how views ended: kept for callers, who ask late.

A caller computes for as long as it likes between two calls of the engine. Meanwhile a step may be decided, a view may
end, and others may follow.

A step is, on this rank,

    open        begun in a view that is at work. This rank has not voted, so nobody can commit it: where the view breaks
                here, the step is aborted at once, and its caller need not wait for the coordinator
    voted       only the coordinator knows; what breaks here decides nothing
    decided     by the coordinator, or by the journal after it was lost; kept by view and index, since an index may be
                tried in many views
    in doubt    voted, and its caller waits no longer: its time was up, or it was cancelled. The caller waits for the
                decision again before it does anything else, in whatever view; a rank that was lost meanwhile is in no
                view before its doubt is settled (membership/member/knowledge.py)

Of a view that is over the error is kept that all its ranks are given. Invariant: nothing here grows with the number of
steps or views.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll.errors import PeerError, QuicollError, again

if TYPE_CHECKING:
    from quicoll.membership.member.actions import Decided
    from quicoll.membership.messages import FailureKind

__all__ = ["Decision", "StepOutcomes", "ViewEnds"]

_DECISIONS = 16  # only the last one is ever asked for
_ENDS = 16


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of a vote.

    index: the coordinator's number of the step. culprit: the node that caused the failure, "" if there is none.
    """

    index: int
    commit: bool
    cause: str
    lost: tuple[str, ...]
    culprit: str
    kind: FailureKind


class StepOutcomes:
    """The steps of this rank. See the module's head.

    open: (index, number) of the step between its begin and its decision, the coordinator's number and the user's.

    cast: (view_id, index) of the vote for the step that was begun last, None before it.
    """

    def __init__(self, emit: Callable[..., None]) -> None:
        """Start with no step.

        Args:
            emit: Called with (kind, **fields) for each event.
        """
        self.open: tuple[int, int] | None = None
        self.cast: tuple[int, int] | None = None
        self._emit = emit
        self._decisions: dict[tuple[int, int], Decision] = {}  # by view and index

    def begin(self, index: int, number: int) -> None:
        self.open = (index, number)
        self.cast = None

    def not_begun(self) -> None:
        """A step could not begin. What its caller does in it fails; no vote of an earlier one may be taken for its."""
        self.open = self.cast = None

    def voted(self, view_id: int) -> None:
        """A vote for the open step is on its way."""
        if self.open is None:
            raise AssertionError("a vote without a step")
        self.cast = (view_id, self.open[0])

    def broke(self, view_id: int, cause: str, lost: tuple[str, ...]) -> None:
        """The view broke here: a step that has not been voted for cannot be committed any more."""
        if self.open is not None and self.cast is None:
            number, self.open = self.open[1], None
            self._emit("step_aborted", step=number, view=view_id, cause=cause, lost=list(lost))

    def decided(self, action: Decided) -> None:
        self._decisions[action.view_id, action.step] = Decision(
            action.step, action.commit, action.cause, tuple(action.lost), action.culprit, action.kind
        )
        while len(self._decisions) > _DECISIONS:  # oldest first
            del self._decisions[next(iter(self._decisions))]
        if self.open is None or self.open[0] != action.step:
            return
        number, self.open = self.open[1], None
        if action.commit:
            self._emit("step_committed", step=number, view=action.view_id)
        else:
            self._emit("step_aborted", step=number, view=action.view_id, cause=action.cause, lost=list(action.lost))

    def decision(self, view_id: int, index: int) -> Decision | None:
        """What became of the vote for `index` in `view_id`, None if that is not known, or too long ago."""
        return self._decisions.get((view_id, index))


class ViewEnds:
    """How views ended, by id: the error that all ranks of a view are given."""

    def __init__(self) -> None:
        self._ends: dict[int, QuicollError] = {}

    def keep(self, view_id: int, error: QuicollError) -> None:
        """Keep the error with which a view ended; the oldest is forgotten."""
        self._ends[view_id] = error
        while len(self._ends) > _ENDS:  # oldest first
            del self._ends[next(iter(self._ends))]

    def past(self, view_id: int, *, op: str = "", step: int | None = None) -> QuicollError:
        """Return the error for a caller that speaks of a view that is over, whatever followed it.

        Args:
            view_id: The view.
            op: The operation that was called in it.
            step: The number of the step that was open.
        """
        kept = self._ends.get(view_id)
        if kept is None:
            return PeerError("the view is over", view=view_id, op=op, step=step)
        return again(kept, node=kept.node, rank=kept.rank, view=view_id, op=op, step=step)
