"""Nodes that are left out try the paths to the others, and come back when these are good again.

A view that is tried with a node whose paths are still broken costs all the others a view. So the node itself is asked
to have a link to each member (`Probe`), tries for as long as it takes, and says when it has them (`Reached`). Only
then, and after its back-off (roster.py), is it tried. Who cannot dial, for instance through a firewall that lets the
others in only, is tried without that once in the longest back-off.

The members of a probe are those of the view at work or proposed; where there is none, all who are not left out. When
they change, or one of them or the node itself is seen at another address, another probe takes the place of the first
one. Probes have numbers, so that an answer to an old one, or from before the node was left out again, proves nothing.

The other side, where one of the two is behind NAT, has to take its part as well: each member is told whom it is to
expect, with the probe, and again every AGAIN_NS until the probe is answered. What a member does for a link that it
expects has an end, and so has what its router remembers of it; the probe has none.

    left out      nobody is asked: there is nobody to reach
    asked         the probe is out. again_ns: when the members hear of it next; None where none is behind NAT
    answered      it reaches them, and waits for the rest of its back-off. Nobody is told anything more

A node that is seen at one address after the other costs all others a message at most once in MOVES_NS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll.deadlines import earlier
from quicoll.membership.messages import Expect, Probe

if TYPE_CHECKING:
    from quicoll.membership.coordinator.roster import Candidate, Roster
    from quicoll.membership.view import View

__all__ = ["AGAIN_NS", "MOVES_NS", "Probes", "expectations"]

AGAIN_NS = 5_000_000_000
"""How often the members of a probe are told again whom they are to expect. Longer than openers go out for one link."""

MOVES_NS = 1_000_000_000
"""How often others hear at once that a node has moved."""


@dataclass(slots=True)
class _Asked:
    """The probe that a node was asked for last, and when.

    members: by name and incarnation. places: where the node and they are seen. again_ns: see the head.
    """

    number: int
    members: tuple[tuple[str, int], ...]
    places: tuple[tuple[str, int] | None, ...]
    asked_ns: int
    again_ns: int | None = None


class Probes:
    """Who of the roster is left out, for which reason; and the probe that each was asked for last.

    again_ns: when `due` has something to repeat; None: never, as things are.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.again_ns: int | None = None
        self._asked: dict[str, _Asked] = {}
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
        self.again_ns = None
        if not out:
            return []
        others = [
            candidate
            for candidate in self._roster
            if candidate not in out and (view is None or view.rank_of(candidate.node) is not None)
        ]
        due: list[tuple[Candidate, Probe | Expect]] = []
        for candidate in out:
            due += self._ask(candidate, others, now_ns)
            asked = self._asked.get(candidate.node)
            if asked is not None:
                self.again_ns = earlier(self.again_ns, asked.again_ns)
        return due

    def answered(self, node: str, number: int) -> None:
        """Take in that a node reaches the members of the probe of this number, if it was asked for that one last."""
        asked = self._asked.get(node)
        if asked is not None and asked.number == number:
            asked.again_ns = None
            self._roster.reached(node)

    def forget(self, node: str) -> None:
        """Forget what the node was asked for: it is left out anew, or its link is another one."""
        self._asked.pop(node, None)

    def _ask(
        self, candidate: Candidate, others: Sequence[Candidate], now_ns: int
    ) -> list[tuple[Candidate, Probe | Expect]]:
        """Return the probe for a node that is left out, and what the others hear of it.

        Nothing where it has nobody to reach, or they have heard all that not long ago.
        """
        if not others:
            return []
        members = tuple((other.node, other.incarnation) for other in others)
        places = (candidate.behind, *(other.behind for other in others))
        asked = self._asked.get(candidate.node)
        told: list[tuple[Candidate, Probe | Expect]] = []
        if asked is not None and asked.members == members:
            if asked.places != places and now_ns < (may_ns := asked.asked_ns + MOVES_NS):
                asked.again_ns = may_ns
                return []
            if asked.places == places and (asked.again_ns is None or now_ns < asked.again_ns):
                return []
        if asked is None or asked.members != members or asked.places != places:
            self._last += 1
            asked = self._asked[candidate.node] = _Asked(self._last, members, places, now_ns)
            shown = tuple(other.member(rank) for rank, other in enumerate(others))
            told.append((candidate, Probe(number=self._last, members=shown, own=candidate.member(0))))
        expected = expectations(candidate, others)
        asked.again_ns = now_ns + AGAIN_NS if expected else None
        return [*told, *expected]


def expectations(candidate: Candidate, others: Sequence[Candidate]) -> list[tuple[Candidate, Expect]]:
    """Return what the others are told where a node tries to reach them: behind NAT it is reached only by whom it
    expects, and lets in only whom it has sent to."""
    return [
        (other, Expect(member=candidate.member(0), own=other.member(0)))
        for other in others
        if candidate.behind is not None or other.behind is not None
    ]
