"""Nodes that come: a Join makes a candidate, or is answered with why not.

Invariants: of two processes of a node the later one counts; a Join of one that is older than any seen changes nothing.
Any other ends what the node's last process was part of, before it is judged: so a doubt that it brings along is settled
by the journal for good. Whoever is let in hears that (`Welcome`) before anything else, with why it still waits.

What a Join is answered with is a pure function (joins.py); who may be in a view, is not decided here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.membership.coordinator.actions import NodeJoined
from quicoll.membership.coordinator.joins import Acceptance, Adoption, Refusal, answer_to
from quicoll.membership.messages import Welcome, clip

if TYPE_CHECKING:
    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.coordinator.forgetting import Forgetting
    from quicoll.membership.coordinator.formation import Formation
    from quicoll.membership.coordinator.ledger import Ledger
    from quicoll.membership.coordinator.losses import Losses
    from quicoll.membership.coordinator.probes import Probes
    from quicoll.membership.coordinator.releases import Releases
    from quicoll.membership.coordinator.roster import Roster
    from quicoll.membership.coordinator.stage import Stage
    from quicoll.membership.messages import Join

__all__ = ["Arrivals"]


class Arrivals:
    """See the module's head.

    Args:
        ledger: What the journal holds; takes the answers.
        roster: Takes the candidates.
        stage: Which view there is.
        formation: Why there is none for them.
        losses: Ends what a node's last process was part of.
        forgetting: Hears who is alive.
        probes: Forgets what the node's last link was asked for.
        releases: Likewise.
        config: The coordinator's settings.
        seed: The job's.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        roster: Roster,
        stage: Stage,
        formation: Formation,
        losses: Losses,
        forgetting: Forgetting,
        probes: Probes,
        releases: Releases,
        config: CoordinatorConfig,
        seed: int,
    ) -> None:
        self._ledger = ledger
        self._roster = roster
        self._stage = stage
        self._formation = formation
        self._losses = losses
        self._forgetting = forgetting
        self._probes = probes
        self._releases = releases
        self._config = config
        self._seed = seed

    def join(self, node: str, message: Join, now_ns: int) -> None:
        """Answer a Join. node: by the name in its certificate."""
        out, newest = self._ledger.out, self._roster.newest(node)
        if message.incarnation < newest:
            out.outdate(node, message.incarnation, newest)
            return
        old = self._roster.get(node)
        if old is not None:
            how = "started anew" if message.incarnation > old.incarnation else "lost its link and joined again"
            self._losses.lost(old, f"{node} {how}", now_ns)
        connected, history, config = len(self._roster), self._ledger.history, self._config
        answer = answer_to(node, message, connected=connected, history=history, config=config, now_ns=now_ns)
        if isinstance(answer, Refusal):
            out.refuse(node, message.incarnation, answer.reason)
        elif isinstance(answer, Adoption):
            out.have_adopt(node, message.incarnation, answer.lost_after_ns)
        else:
            self._admit(answer, now_ns)

    def _admit(self, accepted: Acceptance, now_ns: int) -> None:
        candidate, out, history = accepted.candidate, self._ledger.out, self._ledger.history
        self._roster.add(candidate)
        self._forgetting.joined(candidate.node)
        self._probes.forget(candidate.node)
        self._releases.forget(candidate.node)
        out.note(NodeJoined(now_ns=now_ns, node=candidate.node, incarnation=candidate.incarnation))
        candidate.wait_reason = clip(self._stage.why_waits() or self._formation.why_none(history, now_ns=now_ns))
        welcome = Welcome(
            seed=self._seed,
            committed_step=history.committed_step,
            vote_timeout_ns=self._config.vote_timeout_ns,
            doubt_committed=accepted.doubt_committed,
            waiting_for=candidate.wait_reason,
            relay=self._config.relay,
        )
        out.tell(candidate, welcome)
