"""What became of this rank's steps, and of the views that are over: for callers, who hear of it late.

A caller computes for as long as it likes between two words with the engine. Meanwhile a step may be decided and a view
may end, and others may follow; what was the case is kept here, until it cannot be asked for any more.

A step is, on this rank,

    open        begun in a view that is at work. This rank has not voted, so nobody can commit it: where the view breaks
                here, the step is aborted at once, and its caller need not wait for the coordinator
    voted       only the coordinator knows; what breaks here decides nothing
    decided     by the coordinator, or by the journal after it was lost; kept by view and index, since an index may be
                tried in many views
    in doubt    voted, and its caller waits no longer: its time was up, or it was cancelled. The caller waits for the
                decision again before it does anything else, in whatever view; a rank that was lost meanwhile is in no
                view before its doubt is settled (membership/knowledge.py)

Of a view that is over the verdict is kept: what all its ranks are told. Invariant: nothing here grows with the number
of steps or views.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll.errors import PeerError, QuicollError, again

if TYPE_CHECKING:
    from quicoll.membership.member.actions import Decided
    from quicoll.membership.messages import FailureKind
    from quicoll.observability.events import Observers

__all__ = ["Decision", "Steps", "Verdicts"]

_DECISIONS = 16  # only the last one is ever asked for
_VERDICTS = 16


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of a vote. index: the coordinator's number of it."""

    index: int
    commit: bool
    cause: str
    lost: tuple[str, ...]
    culprit: str
    kind: FailureKind


class Steps:
    """open: (index, number) of the step between its begin and its decision, the coordinator's number and the user's.

    cast: (view_id, index) of the vote for the step that was begun last, None before it.
    """

    def __init__(self, observers: Observers) -> None:
        self.open: tuple[int, int] | None = None
        self.cast: tuple[int, int] | None = None
        self._observers = observers
        self._decisions: dict[tuple[int, int], Decision] = {}  # by view and index

    def begin(self, index: int, number: int) -> None:
        self.open = (index, number)
        self.cast = None

    def voted(self, view_id: int) -> None:
        """A vote for the open step is on its way."""
        if self.open is None:
            raise AssertionError("a vote without a step")
        self.cast = (view_id, self.open[0])

    def broke(self, view_id: int, cause: str, lost: tuple[str, ...]) -> None:
        """The view broke here: a step that has not been voted for cannot be committed any more."""
        if self.open is not None and self.cast is None:
            number, self.open = self.open[1], None
            self._observers.emit("step_aborted", step=number, view=view_id, cause=cause, lost=list(lost))

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
            self._observers.emit("step_committed", step=number, view=action.view_id)
        else:
            self._observers.emit(
                "step_aborted", step=number, view=action.view_id, cause=action.cause, lost=list(action.lost)
            )

    def decision(self, view_id: int, index: int) -> Decision | None:
        """What became of the vote for `index` in `view_id`, None if that is not known, or too long ago."""
        return self._decisions.get((view_id, index))


class Verdicts:
    """How views ended, by id."""

    def __init__(self) -> None:
        self._verdicts: dict[int, QuicollError] = {}

    def keep(self, view_id: int, verdict: QuicollError) -> None:
        self._verdicts[view_id] = verdict
        while len(self._verdicts) > _VERDICTS:  # oldest first
            del self._verdicts[next(iter(self._verdicts))]

    def past(self, view_id: int, *, op: str = "", step: int | None = None) -> QuicollError:
        """The error for a caller that speaks of a view that is over: the verdict of that one, whatever followed it."""
        told = self._verdicts.get(view_id)
        if told is None:
            return PeerError("the view is over", view=view_id, op=op, step=step)
        return again(told, node=told.node, rank=told.rank, view=view_id, op=op, step=step)
