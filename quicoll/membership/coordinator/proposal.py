"""A proposed view and the answers to it.

open        answers are awaited; a member that is silent for too long counts as one that declined
disputed    a member declined; the others have `gather_ns` to report what they cannot reach
decidable   all have answered or the time is up: the view is installed, or rejected without some of its members
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from quicoll.membership.coordinator.diagnosis import ViewFailure
from quicoll.membership.coordinator.evidence import Contradiction, contradiction_of
from quicoll.membership.coordinator.suspicions import Suspicions
from quicoll.membership.messages import Confirm, Decline, Report, clip

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quicoll.membership.messages import BeginStep, Vote
    from quicoll.membership.view import View

__all__ = ["Proposal"]


class Proposal:
    """Collects every member's answer; decides who is left out when some decline or are silent.

    A member that declines names those it cannot reach, which is evidence against the pair and not against either end;
    so the others' answers are awaited too, for `gather_ns` from the first. One that names nobody is left out itself.

    Attributes:
        view: The proposed view.
        decide_ns: When missing answers are awaited no more.
    """

    def __init__(
        self, view: View, *, now_ns: int, timeout_ns: int, gather_ns: int, weights: Mapping[str, int] | None = None
    ) -> None:
        self.view = view
        self._timeout_ns = timeout_ns
        self._gather_ns = gather_ns
        self._deadline_ns = now_ns + timeout_ns
        self.decide_ns = self._deadline_ns
        self._confirmed: dict[str, None] = {}  # an ordered set
        self._declined: dict[str, str] = {}
        self._suspicions = Suspicions(weights or {})

    @property
    def confirmed(self) -> bool:
        """Whether every member confirmed and none withdrew that."""
        return not self._declined and not self._silent

    @property
    def disputed(self) -> bool:
        """Whether a member declined."""
        return bool(self._declined)

    def answer_of(self, node: str) -> Literal["asked", "confirmed", "declined"]:
        """Return what a member has answered; "asked" where nothing has come of it."""
        if node in self._declined:
            return "declined"
        return "confirmed" if node in self._confirmed else "asked"

    def decidable(self, now_ns: int) -> bool:
        """Return whether no further answer is awaited."""
        return not self._silent or now_ns >= self.decide_ns

    def receive(self, node: str, message: Confirm | Decline | Report | BeginStep | Vote, *, now_ns: int) -> None:
        """Take in a message of `node` about this view. BeginStep and Vote belong to installed views and are ignored."""
        if isinstance(message, Confirm):
            self._confirmed[node] = None
        elif isinstance(message, Decline):
            self.decline(node, unreachable=message.unreachable, reason=message.reason, now_ns=now_ns)
        elif isinstance(message, Report):
            lost = tuple(other for other, _ in message.lost)
            self.decline(node, unreachable=lost, reason=message.reason, now_ns=now_ns)

    def decline(self, node: str, *, unreachable: tuple[str, ...], reason: str, now_ns: int) -> None:
        """Take in that `node` cannot take part, because of members it cannot reach or for a reason of its own."""
        others = [other for other in unreachable if other != node and self.view.rank_of(other) is not None]
        for other in others:
            self._suspicions.add(node, other, reason)
        self._declined[node] = "" if others else f"{node} declined" + (f": {reason}" if reason else "")
        self.decide_ns = min(self.decide_ns, now_ns + self._gather_ns)

    def excluded(self, *, now_ns: int) -> dict[str, str]:
        """Return who is left out, each with the reason. A dispute always leaves somebody out, or it would repeat."""
        out = {node: why for node in self.view.nodes if (why := self._declined.get(node))}
        if now_ns >= self._deadline_ns:
            seconds = self._timeout_ns / 1e9
            out |= {node: f"{node} did not answer within {seconds:g} s" for node in self._silent}
        return out | self._suspicions.excluded([node for node in self.view.nodes if node not in out])

    def failure(self, *, now_ns: int) -> ViewFailure:
        """Return why it fails and who is left out for that, where it is decidable and not confirmed."""
        out = self.excluded(now_ns=now_ns)
        cause = clip("; ".join(out.values()))
        return ViewFailure(cause, lost=tuple(out), contradiction=self._contradiction(now_ns=now_ns))

    def _contradiction(self, *, now_ns: int) -> Contradiction:
        """Return who can have caused it that this proposal fails."""
        alone = [node for node, why in self._declined.items() if why]
        if now_ns >= self._deadline_ns:
            alone += self._silent
        if alone:
            return Contradiction(tuple(alone))
        return contradiction_of(self._suspicions.pairs, paths=True)

    @property
    def _silent(self) -> list[str]:
        return [node for node in self.view.nodes if node not in self._confirmed and node not in self._declined]
