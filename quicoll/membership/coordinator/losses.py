"""Nodes that are lost: their links are gone for good, they began anew, or they broke a rule.

Invariants: a node that is lost ends the view that it is in, proposed or installed, at once: its state may be in doubt.
It is off the roster before that is announced, so nothing is told to a process that is not there. It counts in the base
of quorums as before, unless it had said that it leaves. What the others have reported of each other by then is used:
their view was about to fail for that, and the loss may be a consequence.

Failure cases: the last node of a view is lost (nobody hears of its end, and nobody has to); one that has left is lost
(nothing is held against it); one of a view that has ended, while reports on it come in (its end is announced now).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.membership.coordinator.diagnosis import ViewFailure
from quicoll.membership.coordinator.evidence import NOBODY, Contradiction

if TYPE_CHECKING:
    from quicoll.membership.coordinator.departures import Departures
    from quicoll.membership.coordinator.roster import Candidate
    from quicoll.membership.coordinator.stage import Stage
    from quicoll.membership.coordinator.succession import Succession

__all__ = ["Losses"]


class Losses:
    """See the module's head.

    Args:
        stage: Which view there is.
        departures: Takes nodes off the roster.
        succession: Ends views.
    """

    def __init__(self, *, stage: Stage, departures: Departures, succession: Succession) -> None:
        self._stage = stage
        self._departures = departures
        self._succession = succession

    def lost(self, candidate: Candidate, cause: str, now_ns: int) -> None:
        """Remove a node, and end any view that it is in. cause: for people."""
        node = candidate.node
        contradiction = NOBODY if candidate.leaving else Contradiction((node,), paths=True)
        self._departures.remove(candidate, cause, now_ns)
        proposal, active = self._stage.proposal, self._stage.active
        if proposal is not None and proposal.view.rank_of(node) is not None:
            if proposal.disputed:
                # what the others reported by now must not be lost
                proposal.decline(node, unreachable=(), reason=cause, now_ns=now_ns)
                self._succession.reject(proposal, now_ns)
            else:
                failure = ViewFailure(cause, "failed", "", (node,), contradiction)
                self._succession.give_up(proposal.view, failure, now_ns)
        elif active is not None and active.view.rank_of(node) is not None:
            self._succession.abort(active, ViewFailure(cause, "failed", node, (node,), contradiction), now_ns)
        else:
            self._succession.announce_end(node, now_ns)
