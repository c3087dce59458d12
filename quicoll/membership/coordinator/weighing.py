"""A failure is held against those who can have caused it, and may then cost one of them its place.

What failed views have in common is kept in evidence.py. Here it is asked for one failure, before that is announced:
whether a node is left out for it, where a view can be made without that node, and what the members are then told.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quicoll.membership.messages import clip

if TYPE_CHECKING:
    from quicoll.membership.coordinator.diagnosis import ViewFailure
    from quicoll.membership.coordinator.evidence import Evidence
    from quicoll.membership.coordinator.formation import Formation
    from quicoll.membership.coordinator.history import History
    from quicoll.membership.view import View

__all__ = ["Weighed", "weigh"]


@dataclass(frozen=True, slots=True)
class Weighed:
    """A failure as it is announced.

    Attributes:
        failure: With what follows from it.
        left_out: Who is left out for it and those before, with the reason that the node is told.
    """

    failure: ViewFailure
    left_out: dict[str, str] = field(default_factory=dict)


def weigh(
    failure: ViewFailure,
    view: View,
    evidence: Evidence,
    formation: Formation,
    history: History,
    *,
    now_ns: int,
) -> Weighed:
    """Take a failure down as evidence, and return it with what follows.

    Args:
        failure: Why the view ended; one that contradicts nobody is held against nobody.
        view: The view.
        evidence: Where it is taken down.
        formation: Says whether a view can be made without a node.
        history: What the journal holds.
        now_ns: The time now.
    """
    if not failure.contradiction:
        return Weighed(failure)

    def can_spare(node: str) -> bool:
        rest = [each for each in formation.choose(history, now_ns=now_ns) if each.node not in (node, *failure.lost)]
        return not formation.obstacle(rest, history)

    verdict = evidence.failed(view.nodes, failure.contradiction, can_spare=can_spare, now_ns=now_ns)
    if not verdict.left_out:
        return Weighed(failure)
    why = f"left out for {verdict.for_ns / 1e9:g} s, {verdict.why}"
    lost = tuple(node for node in view.nodes if node in (*failure.lost, verdict.left_out))
    cause = clip(f"{failure.cause}; {verdict.left_out} is {why}")
    return Weighed(replace(failure, cause=cause, lost=lost), {verdict.left_out: why})
