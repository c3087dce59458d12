"""A proposed view and the answers to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.membership.coordinator.suspicions import Suspicions
from quicoll.membership.messages import Confirm, Decline, Report

if TYPE_CHECKING:
    from quicoll.membership.messages import BeginStep, Vote
    from quicoll.membership.view import View

__all__ = ["Proposal"]


class Proposal:
    """Waits for every member's answer; says who is to be left out when some decline or are silent.

    A member that declines names those it cannot reach, which is evidence against the pair; so the others are heard too,
    for `gather_ns` from the first complaint, before anyone is judged. One that names nobody is left out itself.
    """

    def __init__(self, view: View, *, now_ns: int, timeout_ns: int, gather_ns: int) -> None:
        self.view = view
        self._timeout_ns = timeout_ns
        self._gather_ns = gather_ns
        self._deadline_ns = now_ns + timeout_ns
        self.decide_ns = self._deadline_ns
        self._confirmed: dict[str, None] = {}  # an ordered set
        self._declined: dict[str, str] = {}
        self._suspicions = Suspicions()

    @property
    def confirmed(self) -> bool:
        """Every member confirmed, and none took it back."""
        return not self._declined and not self._silent

    @property
    def disputed(self) -> bool:
        return bool(self._declined)

    def decidable(self, now_ns: int) -> bool:
        """Whether those who are silent are waited for no more."""
        return not self._silent or now_ns >= self.decide_ns

    def receive(self, node: str, message: Confirm | Decline | Report | BeginStep | Vote, *, now_ns: int) -> None:
        """The member `node` spoke of this view; what belongs to an installed one says nothing here."""
        if isinstance(message, Confirm):
            self._confirmed[node] = None
        elif isinstance(message, Decline):
            self.decline(node, unreachable=message.unreachable, reason=message.reason, now_ns=now_ns)
        elif isinstance(message, Report):
            lost = tuple(other for other, _ in message.lost)
            self.decline(node, unreachable=lost, reason=message.reason, now_ns=now_ns)

    def decline(self, node: str, *, unreachable: tuple[str, ...], reason: str, now_ns: int) -> None:
        others = [other for other in unreachable if other != node and self.view.rank_of(other) is not None]
        for other in others:
            self._suspicions.add(node, other, reason)
        self._declined[node] = "" if others else f"{node} declined" + (f": {reason}" if reason else "")
        self.decide_ns = min(self.decide_ns, now_ns + self._gather_ns)

    def excluded(self, *, now_ns: int) -> dict[str, str]:
        """Who is left out, each with the reason. A dispute always costs somebody the place, or it would repeat."""
        out = {node: why for node in self.view.nodes if (why := self._declined.get(node))}
        if now_ns >= self._deadline_ns:
            seconds = self._timeout_ns / 1e9
            out |= {node: f"{node} did not answer within {seconds:g} s" for node in self._silent}
        return out | self._suspicions.excluded([node for node in self.view.nodes if node not in out])

    @property
    def _silent(self) -> list[str]:
        return [node for node in self.view.nodes if node not in self._confirmed and node not in self._declined]
