"""Who is left out when members cannot reach each other.

A complaint "a cannot reach b" proves that the pair is broken, not which end is: in a one-way or partial partition both
may hear the coordinator well. Pairs that can both stay must not be broken, so those left out form a vertex cover of
the graph of broken pairs. The smallest cover is NP-hard (Karp 1972) and its choice among equals arbitrary; what is
needed is a rule which is deterministic, explains itself, and puts the blame on a node cut off from many before one
cut off from few: take out the node with most broken pairs, of equals the one of the highest rank, and repeat.

A node left out is tried again after a back-off that doubles, so that a pair which stays broken costs a bounded share
of the time, and one that is repaired comes back by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Backoff", "Complaints", "cover"]


def cover(ranked: Sequence[str], pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """The nodes to leave out so that no broken pair is left, in the order of the decision.

    ranked: nodes by rank. pairs: broken ones, in any order and direction; pairs with a node not in `ranked`, and of a
    node with itself, do not count.
    """
    rank = {node: index for index, node in enumerate(ranked)}
    broken = {(min(a, b), max(a, b)) for a, b in pairs if a in rank and b in rank and a != b}
    out: list[str] = []
    while broken:
        degree = dict.fromkeys(ranked, 0)
        for a, b in broken:  # a set, but sums do not depend on its order
            degree[a] += 1
            degree[b] += 1
        worst = max(ranked, key=lambda node: (degree[node], rank[node]))
        out.append(worst)
        broken = {pair for pair in broken if worst not in pair}
    return tuple(out)


class Complaints:
    """Broken pairs as told so far, each with its first cause."""

    def __init__(self) -> None:
        self._causes: dict[tuple[str, str], str] = {}

    def __bool__(self) -> bool:
        return bool(self._causes)

    def add(self, node: str, other: str, cause: str) -> None:
        """`node` cannot reach `other`."""
        self._causes.setdefault((node, other), cause)

    def drop(self, node: str) -> None:
        """Forget what is said by or about `node`: it is gone, or came anew."""
        self._causes = {pair: cause for pair, cause in self._causes.items() if node not in pair}

    def verdict(self, ranked: Sequence[str]) -> dict[str, str]:
        """Who is left out, each with the reason."""
        return {node: self.told(node) for node in cover(ranked, self._causes)}

    def told(self, node: str = "") -> str:
        """What was said by or about `node`; "": by and about everybody."""
        return "; ".join(
            f"{a} cannot reach {b}" + (f": {cause}" if cause else "")
            for (a, b), cause in self._causes.items()
            if node in ("", a, b)
        )


@dataclass(slots=True)
class Backoff:
    """When a node that was left out may be tried again; times in nanoseconds on the coordinator's clock."""

    count: int = 0
    retry_ns: int = 0

    def evict(self, now_ns: int, *, shortest_ns: int, longest_ns: int) -> int:
        """Left out once more; the time from which it may be tried again.

        The wait doubles from `shortest_ns` to `longest_ns`. A node that was in for longer than the longest wait starts
        anew: what broke then has little to do with what breaks now.
        """
        if self.count and now_ns - self.retry_ns > 2 * longest_ns:
            self.count = 0
        # the exponent is bounded before it is used: a count of years must not make an integer of megabytes
        wait_ns = min(longest_ns, shortest_ns << min(self.count, 30))
        self.count += 1
        self.retry_ns = now_ns + wait_ns
        return self.retry_ns
