"""What a run has to keep of tiers and of shared state (quicoll.sim.tiered does it, on every rank that is told to).

    one-set      the set of tiers in force after a step is one on all ranks that have committed it, and it is in force
                 there when the next step begins, and in each attempt at it: no set is applied by some ranks only, and
                 none remains of a step that was not committed
    one-reading  pieces that are strong, and those that are made strong, are the same on all ranks in one step
    deleted      a value that was deleted is on no rank that has deleted it, or has made pieces strong together with
                 one that had; and when all have converged it is on none
    converge     when nothing breaks any more, all ranks of the view come to hold the same eventual pieces

Every value of an eventual state is a number that nobody else writes, so that it says by itself which write it is. A
deletion is of the values that its rank had read; what others write meanwhile is not part of it. A process that ends
takes its deletions along where nobody has heard of them, as it does with its writes: then nothing is claimed of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from quicoll.sim.digests import state_digest
from quicoll.tiers.pieces import unpacked

if TYPE_CHECKING:
    from quicoll.tiers.pieces import PieceStore
    from quicoll.tiers.tier_set import TierSet

__all__ = ["History", "TieredChecker"]

History: TypeAlias = tuple[tuple[int, int], ...]
"""For each committed step of a state the view in which it was, by id and number of ranks."""


class TieredChecker:
    """Follows the tiers and the shared state of one run.

    break_: called with the kind, a message and the node when an invariant is broken. members: gives the nodes whose
    ranks work in the last view.
    """

    def __init__(self, break_: Callable[..., None], members: Callable[[], Iterable[str]]) -> None:
        self._break = break_
        self._members = members
        self._sets: dict[History, tuple[TierSet, str]] = {}  # what is in force, and who said so first
        self._readings: dict[tuple[str, int, int], tuple[bytes, str, str]] = {}  # by state, view and step
        self._stores: dict[str, PieceStore] = {}  # of living processes
        self._knowing: dict[int, dict[str, None]] = {}  # by deleted value: living processes that have heard of it
        self._begun: dict[
            tuple[int, int], dict[str, tuple[int, ...]]
        ] = {}  # by view and step: what each rank knew then
        self._numbers = 0

    def number(self) -> int:
        """Return a value that nobody has written."""
        self._numbers += 1
        return self._numbers

    def holds(self, node: str, store: PieceStore) -> None:
        """A process begins to share eventual pieces."""
        self._stores[node] = store

    def ended(self, node: str) -> None:
        """The process is gone."""
        self._stores.pop(node, None)
        for knowing in self._knowing.values():
            knowing.pop(node, None)

    def in_force(self, node: str, history: History, tier_set: TierSet) -> None:
        """A rank that has committed these steps, and no others, has this set of tiers."""
        known, first = self._sets.setdefault(history, (tier_set, node))
        if known != tier_set:
            what = f"after step {len(history)} {node} has {tier_set!r}, and {first} {known!r}"
            self._break("one-set", what, node=node)

    def read(self, node: str, state: str, view_id: int, step: int, values: Mapping[str, Any]) -> None:
        """A rank has read pieces that are strong, in this step."""
        digest, said = state_digest(values), ", ".join(f"{name}={values[name].tolist()}" for name in sorted(values))
        known, first, words = self._readings.setdefault((state, view_id, step), (digest, node, said))
        if known != digest:
            what = f"in step {step} of view {view_id} {node} reads {said!r} of {state}, and {first} {words!r}"
            self._break("one-reading", what, node=node)

    def looked(self, node: str, values: Iterable[int]) -> None:
        """A rank has read eventual pieces."""
        for value in values:
            if node in self._knowing.get(value, ()):
                self._break("deleted", f"{node} reads {value}, of which it knows that it was deleted", node=node)

    def deleted(self, node: str, value: int) -> None:
        """A rank has deleted a value that it had read."""
        self._knowing.setdefault(value, {})[node] = None

    def strong_began(self, node: str, view_id: int, step: int) -> None:
        """A rank begins to make eventual pieces strong."""
        knows = tuple(value for value, knowing in self._knowing.items() if node in knowing)
        self._begun.setdefault((view_id, step), {})[node] = knows

    def strong_ended(self, node: str, view_id: int, step: int, values: Iterable[int]) -> None:
        """It has ended well on this rank: so all ranks of the view have told what they had when they began."""
        begun = self._begun[view_id, step]
        known = {value: member for member, knows in begun.items() for value in knows}
        for value in values:
            if value in known:
                what = f"step {step} of view {view_id} reads {value} on {node}, and {known[value]} had deleted it"
                self._break("deleted", what, node=node)
        for value in known:
            # Who has ended since has taken it along.
            self._knowing[value] |= dict.fromkeys(member for member in begun if member in self._stores)

    def converged(self) -> bool:
        """Return whether all ranks of the view hold the same eventual pieces. Then no deleted one is among them."""
        stores = {node: self._stores[node] for node in self._members() if node in self._stores}
        if len({store.digest for store in stores.values()}) > 1:
            return False
        for node, store in stores.items():
            for value in numbers(store):
                if self._knowing.get(value):
                    what = (
                        f"all have {value} in the end, {node} too; {', '.join(self._knowing[value])} know it as deleted"
                    )
                    self._break("deleted", what, node=node)
        return True

    def apart(self, node: str, seconds: float) -> None:
        """They have not come to the same pieces within this time."""
        held = {member: sorted(numbers(self._stores[member])) for member in self._members() if member in self._stores}
        self._break("converge", f"{seconds:g} s after all work was done pieces differ: {held}", node=node)


def numbers(store: PieceStore) -> list[int]:
    """Return the values in a store."""
    return [int(unpacked(piece)[0]) for piece in store.pieces().values() if not piece.entry.deleted]
