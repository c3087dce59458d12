"""Nodes that learn the state beside the steps of the others: `Learn` and `Learned`.

Invariants: a node that learns is taken out of the base of quorums, as if it had left, and counts as a holder of no
step. It is in no view until it says that it has learned, joins anew, or the others are too few without it
(formation.py). A spare that steps out of the view in which it was shown is warm from then on (spares.py).

Failure cases: it is lost meanwhile (as any node of no view); it learns no more (`Learned`, and a spare is cold again);
it steps out while a step is open (the step is aborted, as by any change of members).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.membership.coordinator.diagnosis import ViewFailure
from quicoll.membership.coordinator.history import Left
from quicoll.membership.coordinator.spares import cold_again, warmed
from quicoll.membership.messages import clip

if TYPE_CHECKING:
    from quicoll.membership.coordinator.active_view import ActiveView
    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.coordinator.ledger import Ledger
    from quicoll.membership.coordinator.roster import Candidate
    from quicoll.membership.coordinator.succession import Succession

__all__ = ["Learners"]


class Learners:
    """See the module's head.

    Args:
        ledger: Takes what is recorded.
        succession: Changes views.
        config: The coordinator's settings.
    """

    def __init__(self, *, ledger: Ledger, succession: Succession, config: CoordinatorConfig) -> None:
        self._ledger = ledger
        self._succession = succession
        self._config = config

    def step_out(self, candidate: Candidate, active: ActiveView, now_ns: int) -> None:
        """Go on without a node that learns the state meanwhile."""
        candidate.learning, candidate.committed_step = True, 0
        member = active.view.member(candidate.node)
        if member is not None and member.spare:
            warmed(candidate)
        if candidate.node in self._ledger.history.holders:
            self._ledger.record(Left(candidate.node))
        why = f"{candidate.node} learns the state before it takes part"
        if active.ballot is None:
            self._succession.change(active, why, now_ns)
        else:
            self._succession.abort(active, ViewFailure(clip(why)), now_ns)

    def learned(self, candidate: Candidate, now_ns: int) -> None:
        """Take in that a node is to be in views again."""
        if candidate.warm:
            least, most = self._config.retry_min_ns, self._config.retry_max_ns
            cold_again(candidate, pause_ns=least, longest_ns=most, now_ns=now_ns)
        candidate.learning = False
