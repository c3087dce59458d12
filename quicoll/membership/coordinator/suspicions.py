"""Which nodes are left out when members cannot reach each other.

A suspicion "a cannot reach b" proves that the pair is broken, not which end is: in a one-way or partial partition both
may reach the coordinator well. Both ends of a broken pair cannot stay, so those left out form a vertex cover of the
graph of broken pairs. The smallest cover is NP-hard (Karp 1972) and its choice among equals arbitrary; what is needed
is a rule that is deterministic, explains itself, and leaves out a node cut off from many before one cut off from few:
take out the node with most broken pairs, of equals the one that was part of more failures before (evidence.py), then
the one of the highest rank, and repeat. Without the second rule a member could have one honest node after the other
left out, by naming another one each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

__all__ = ["Suspicions", "vertex_cover"]

_NO_WEIGHTS: Mapping[str, int] = MappingProxyType({})


def vertex_cover(
    ranked: Sequence[str], pairs: Iterable[tuple[str, str]], weights: Mapping[str, int] = _NO_WEIGHTS
) -> tuple[str, ...]:
    """Return the nodes to leave out so that no broken pair is left, in the order of the decision.

    Args:
        ranked: Nodes by rank.
        pairs: Broken pairs, in any order and direction; pairs with a node not in `ranked`, and of a node with itself,
            do not count.
        weights: How much is held against a node from before; 0 for one that is not there.
    """
    rank = {node: index for index, node in enumerate(ranked)}
    broken = {(min(a, b), max(a, b)) for a, b in pairs if a in rank and b in rank and a != b}
    out: list[str] = []
    while broken:
        degree = dict.fromkeys(ranked, 0)
        for a, b in broken:  # a set, but sums do not depend on its order
            degree[a] += 1
            degree[b] += 1
        worst = max(ranked, key=lambda node: (degree[node], weights.get(node, 0), rank[node]))
        out.append(worst)
        broken = {pair for pair in broken if worst not in pair}
    return tuple(out)


class Suspicions:
    """Broken pairs as reported so far, each with its first cause. weights: as for `vertex_cover`."""

    def __init__(self, weights: Mapping[str, int] = _NO_WEIGHTS) -> None:
        self._weights = weights
        self._causes: dict[tuple[str, str], str] = {}

    def __bool__(self) -> bool:
        return bool(self._causes)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Who cannot reach whom, in the order of the reports."""
        return tuple(self._causes)

    def add(self, node: str, other: str, cause: str) -> None:
        """Add that `node` cannot reach `other`; the first cause of a pair is kept."""
        self._causes.setdefault((node, other), cause)

    def drop(self, node: str) -> None:
        """Drop what was reported by or about `node`: it is gone, or came anew."""
        self._causes = {pair: cause for pair, cause in self._causes.items() if node not in pair}

    def excluded(self, ranked: Sequence[str]) -> dict[str, str]:
        """Return the nodes to leave out, each with the reason."""
        return {node: self.describe(node) for node in vertex_cover(ranked, self._causes, self._weights)}

    def describe(self, node: str = "") -> str:
        """Return what was reported by or about `node`, for people; with "", by and about all."""
        return "; ".join(
            f"{a} cannot reach {b}" + (f": {cause}" if cause else "")
            for (a, b), cause in self._causes.items()
            if node in ("", a, b)
        )
