"""Nodes that go of their own will: `AskToLeave` before, `Leave` at the end.

    AskToLeave   it was asked to stop, and waits at a boundary until it may go (releases.py). Where part of the state is
                 its own, it hands that over first: the next view names it (`View.parting`), and a step that the others
                 have begun without it is given up for that view
    Leave        inside a step it votes first, and the decision takes it out; at a boundary the next view follows at
                 once; anywhere else it is like a loss, with nothing held against it

Invariants: a view is never kept waiting by a node that has left. Who hands over what it owns takes part in no step
until then, so a step that waits for its Begin is ended (`make_way`), and once for each view.

Failure cases: it leaves twice (the second one says nothing); it leaves while reports on its view come in (their end is
announced while it is still there to get it); it is lost before it has handed over (the next view has what it owned from
a copy or a checkpoint); its process was another one when it asked (the one that is there now was asked nothing).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.membership.coordinator.diagnosis import ViewFailure
from quicoll.membership.messages import clip, departure

if TYPE_CHECKING:
    from quicoll.membership.coordinator.departures import Departures
    from quicoll.membership.coordinator.ledger import Ledger
    from quicoll.membership.coordinator.losses import Losses
    from quicoll.membership.coordinator.releases import Releases
    from quicoll.membership.coordinator.roster import Candidate, Roster
    from quicoll.membership.coordinator.stage import Stage
    from quicoll.membership.coordinator.succession import Succession
    from quicoll.membership.messages import AskToLeave, Leave

__all__ = ["Leaving"]


class Leaving:
    """See the module's head; remembers who is to hand over what it owns.

    Args:
        ledger: What is committed.
        roster: Connected nodes.
        stage: Which view there is.
        releases: Nodes that have asked whether they may stop.
        departures: Takes nodes off the roster.
        succession: Changes views.
        losses: Where it is like a loss.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        roster: Roster,
        stage: Stage,
        releases: Releases,
        departures: Departures,
        succession: Succession,
        losses: Losses,
    ) -> None:
        self._ledger = ledger
        self._roster = roster
        self._stage = stage
        self._releases = releases
        self._departures = departures
        self._succession = succession
        self._losses = losses
        self._to_part: dict[
            str, Candidate
        ] = {}  # who is to hand over what it owns before it leaves: this process of it

    def ask(self, candidate: Candidate, message: AskToLeave) -> None:
        """Take in that a node was asked to stop."""
        self._releases.ask(candidate.node)
        candidate.owns = message.owns
        if candidate.owns and len(self._roster) > 1:
            candidate.parting = True  # in the next view
            self._to_part[candidate.node] = candidate

    def leave(self, candidate: Candidate, message: Leave, now_ns: int) -> None:
        """Take in that a node goes."""
        if candidate.leaving:
            return
        self._succession.announce_end(candidate.node, now_ns)  # while it is still there to get it
        candidate.leaving = True
        candidate.finished = message.finished
        holds = min(message.committed_step, self._ledger.history.committed_step)
        candidate.committed_step = max(candidate.committed_step, holds)
        node, active = candidate.node, self._stage.active
        if active is not None and active.entered(node):
            return  # it votes first; the decision takes it out
        if message.parted and active is not None and node in active.view.parting:
            self._departures.let_go([one for one in self._roster if one.node in active.view.parting], now_ns)
        why = f"{node} {departure(message.reason)}"
        if active is not None and active.ballot is None and active.view.rank_of(node) is not None:
            self._departures.remove(candidate, why, now_ns)
            self._succession.change(active, clip(why), now_ns)
            self._departures.remove_leavers(now_ns)
        else:
            # The others cannot finish a step that it did not begin; and a proposal cannot be confirmed without it.
            self._losses.lost(candidate, clip(why), now_ns)

    def make_way(self, now_ns: int) -> None:
        """End an open step that a node of the view takes no part in, because it is to hand over what it owns."""
        active = self._stage.active
        if active is None or active.ballot is None:
            return
        for node, candidate in list(self._to_part.items()):
            if self._roster.get(node) is not candidate or node in active.view.parting:
                del self._to_part[node]
            elif active.view.rank_of(node) is not None and not active.entered(node):
                why = f"{node} hands over what it owns before it leaves"
                self._succession.abort(active, ViewFailure(clip(why)), now_ns)
                return
