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

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quicoll.membership.messages import Probe

if TYPE_CHECKING:
    from quicoll.membership.coordinator.roster import Candidate

__all__ = ["Probes"]


class Probes:
    """The probe that each node was asked for last."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[int, tuple[tuple[str, int], ...]]] = {}
        self._last = 0

    def ask(self, candidate: Candidate, others: Sequence[Candidate]) -> Probe | None:
        """Return the probe that this node has to be asked for; None where it was, or where there is nobody to reach.

        Args:
            candidate: A node that is left out.
            others: Those that it would work with.
        """
        wanted = tuple((other.node, other.incarnation) for other in others)
        if not wanted or self._asked.get(candidate.node, (0, ()))[1] == wanted:
            return None
        self._last += 1
        self._asked[candidate.node] = (self._last, wanted)
        return Probe(number=self._last, members=tuple(other.member(rank) for rank, other in enumerate(others)))

    def answers(self, node: str, number: int) -> bool:
        """Return whether this is the number of the probe that the node was asked for last."""
        return self._asked.get(node, (0, ()))[0] == number

    def forget(self, node: str) -> None:
        """Forget what the node was asked for: it is left out anew, or its link is another one."""
        self._asked.pop(node, None)
