"""What a Join is answered with: a pure function of the Join, of the nodes that are here and of the journal.

    Refusal     the node can never take part as it is (admission.py), or there is no room
    Adoption    it has another value of a setting that all have to share, and is ready to take the coordinator's: it
                joins again with that
    Acceptance  it is a candidate from now on; where it is in doubt of a step, it hears what became of it

A Join of a process that is older than one already seen is answered before all this: `Outdated`, by the core. It says
nothing about the node, whose later process may be at work; while any other Join ends what the old process was part of,
and is judged by the journal as that leaves it. So a doubt is settled for good: its view is over by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll.membership.coordinator.admission import differs, join_refusal
from quicoll.membership.coordinator.roster import Candidate
from quicoll.membership.view import MAX_MEMBERS

if TYPE_CHECKING:
    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.coordinator.history import History
    from quicoll.membership.messages import Join

__all__ = ["Acceptance", "Adoption", "Refusal", "answer_to"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The node cannot take part; `reason` is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class Adoption:
    """The node has to join again with this `lost_after_ns`."""

    lost_after_ns: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The node takes part.

    Attributes:
        candidate: As it is to be kept.
        doubt_committed: Whether the step that it is in doubt of was committed; None where it is in no doubt.
    """

    candidate: Candidate
    doubt_committed: bool | None


def answer_to(
    node: str, join: Join, *, connected: int, history: History, config: CoordinatorConfig, now_ns: int
) -> Refusal | Adoption | Acceptance:
    """Return the answer to a Join of a process that is no older than any seen.

    Args:
        node: Who joins, by the name in its certificate.
        join: Its Join.
        connected: Number of other nodes that are here.
        history: What the journal holds. No view in it that this node was in at its last link goes on.
        config: The coordinator's settings.
        now_ns: The time now.
    """
    reason = join_refusal(node, join, history=history, config=config)
    if not reason and connected >= MAX_MEMBERS:
        reason = f"{MAX_MEMBERS} nodes are connected already"
    if reason:
        return Refusal(reason)
    if config.lost_after_ns is not None and differs(join, config=config):
        return Adoption(config.lost_after_ns)
    committed: bool | None = None
    holds = join.committed_step
    if join.doubt is not None:
        committed = history.committed(*join.doubt)
        holds = max(holds, join.doubt[1]) if committed else holds
    return Acceptance(Candidate(node, join, holds, joined_ns=now_ns, owns=join.owns), committed)
