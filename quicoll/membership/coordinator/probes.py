"""Nodes that are left out try the paths to the others, and come back when these are good again.

A view that is tried with a node whose paths are still broken costs all the others a view. So the node itself is asked
to have a link to each member (`Probe`), tries for as long as it takes, and says when it has them (`Reached`). Only
then, and after its back-off (roster.py), is it tried. Who cannot dial, for instance through a firewall that lets the
others in only, is tried without that once in the longest back-off.

The members of a probe are those of the view at work or proposed; where there is none, all who are not left out. When
they change, another probe takes the place of the first one. Probes have numbers, so that an answer to an old one, or
from before the node was left out again, proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quicoll.membership.messages import Expect, Probe

if TYPE_CHECKING:
    from quicoll.membership.coordinator.roster import Candidate, Roster
    from quicoll.membership.view import View

__all__ = ["Probes"]


class Probes:
    """Who of the roster is left out, for which reason; and the probe that each was asked for last."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._asked: dict[str, tuple[int, tuple[tuple[str, int], ...]]] = {}
        self._last = 0
        self._reasons: dict[str, str] = {}  # why a node was left out last

    def leave_out(self, reasons: Mapping[str, str], *, now_ns: int) -> dict[str, str]:
        """Leave nodes out of the next views, each for a while; return what each that is here is told.

        Args:
            reasons: Why, by node.
            now_ns: The time now.
        """
        told = {}
        for node, why in reasons.items():
            if node in self._roster:
                seconds = self._roster.exclude(node, now_ns=now_ns) / 1e9
                self.forget(node)
                self._reasons[node] = why
                told[node] = f"left out for {seconds:g} s, and until it reaches the others: {why}"
        return told

    def words(self, *, now_ns: int) -> str:
        """Return which nodes are left out and why, for people; "" where none is."""
        out = [candidate.node for candidate in self._roster.left_out(now_ns=now_ns)]
        return "; ".join(f"{node} is left out: {self._reasons[node]}" for node in out if node in self._reasons)

    def due(self, view: View | None, *, now_ns: int) -> list[tuple[Candidate, Probe | Expect]]:
        """Return the probes that nodes have to be asked for now, by rank, and what the others have to hear of them.

        Args:
            view: At work, or proposed; None where there is none.
            now_ns: The time now.
        """
        out = self._roster.left_out(now_ns=now_ns)
        if not out:
            return []
        others = [
            candidate
            for candidate in self._roster
            if candidate not in out and (view is None or view.rank_of(candidate.node) is not None)
        ]
        due: list[tuple[Candidate, Probe | Expect]] = []
        for candidate in out:
            probe = self._ask(candidate, others)
            if probe is not None:
                due += [(candidate, probe), *_expected(candidate, others)]
        return due

    def answered(self, node: str, number: int) -> None:
        """Take in that a node reaches the members of the probe of this number, if it was asked for that one last."""
        if self._asked.get(node, (0, ()))[0] == number:
            self._roster.reached(node)

    def forget(self, node: str) -> None:
        """Forget what the node was asked for: it is left out anew, or its link is another one."""
        self._asked.pop(node, None)

    def _ask(self, candidate: Candidate, others: Sequence[Candidate]) -> Probe | None:
        """Return the probe for a node that is left out; None where it was asked for, or has nobody to reach."""
        wanted = tuple((other.node, other.incarnation) for other in others)
        if not wanted or self._asked.get(candidate.node, (0, ()))[1] == wanted:
            return None
        self._last += 1
        self._asked[candidate.node] = (self._last, wanted)
        members = tuple(other.member(rank) for rank, other in enumerate(others))
        return Probe(number=self._last, members=members, own=candidate.member(0))


def _expected(candidate: Candidate, others: Sequence[Candidate]) -> list[tuple[Candidate, Expect]]:
    """Return what the others are told of a probe: behind NAT a node is reached only by whom it expects."""
    return [
        (other, Expect(member=candidate.member(0), own=other.member(0)))
        for other in others
        if candidate.behind is not None or other.behind is not None
    ]
