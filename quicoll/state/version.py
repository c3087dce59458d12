"""How new a state is, whose states differ, and who gives to whom. Every rank computes the same from the same numbers.

    newest      the version of the latest decision. A checkpoint does not know of which decision it is; while a rank
                holds the last one of all, it is older, however many steps it has. Where no rank does any more, a
                checkpoint of more steps is the newer: a rank that was left out long ago does not take back what the
                others have saved since
    holders     the ranks with the newest version whose state is whole. Among those that have registered one:
    kinds       names, types and shapes have to be equal. Where they are not, no rank may be given another's state: it
                may be a part that each rank has of its own (undeclared), and would be lost
    start       step 0, nothing was trained: the lowest rank gives to all that differ from it, as DDP does
    later       what more than half of them hold is right; the lowest rank of these gives to all that differ. After
                one decision all have done the same steps: a rank that counts them otherwise differs as well
    neither     nobody knows which state is right: the job stops

A torn state, half overwritten by a transfer that broke, is behind every version and is never given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["HeldState", "StateComparison", "StateVersion", "compare"]


@dataclass(frozen=True, slots=True, order=True)
class StateVersion:
    """How new a state is; the larger is the newer.

    decision: The coordinator's number of the latest decision in it; 0 where none was taken since this process began.
    step: The number of the last step in it; 0 at the start.
    """

    decision: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class HeldState:
    """What one rank says of its state.

    able: it has registered `save` and `load`. torn: it is half overwritten. kind: digest of names, types and shapes.
    digest: of all of it. lines: how many lines it has (quicoll.state.tree). nbytes: of its tensors. learned: it has
    learned the state outside of views (quicoll.state.learning). pupils: how many learn from it now. described: digest
    of what it is a state of (quicoll.state.description). described_lines: how many lines that has.
    """

    version: StateVersion
    able: bool = True
    torn: bool = False
    kind: bytes = b""
    digest: bytes = b""
    lines: int = 0
    nbytes: int = 0
    learned: bool = False
    pupils: int = 0
    described: bytes = b""
    described_lines: int = 0


@dataclass(frozen=True, slots=True)
class StateComparison:
    """What follows for all ranks.

    Attributes:
        newest: The newest version that a rank holds whole.
        behind: Ranks that do not hold it.
        sides: The holders that registered a state, by what they hold: the right ones first, else by their lowest rank.
        giver: The rank that gives its state to `receivers`; None where nothing can be given.
        alike: Whether the holders' names, types and shapes are equal.
        agreed: Whether it is known which side is right.
    """

    newest: StateVersion
    behind: tuple[int, ...]
    sides: tuple[tuple[int, ...], ...]
    giver: int | None
    alike: bool = True
    agreed: bool = True

    @property
    def differing(self) -> tuple[int, ...]:
        """Holders whose state is not the one that is right."""
        return tuple(sorted(rank for side in self.sides[1:] for rank in side))

    @property
    def receivers(self) -> tuple[int, ...]:
        """Ranks that are to be given the right state."""
        return tuple(sorted((*self.behind, *self.differing)))


def compare(held: Sequence[HeldState], *, committed: int = 0) -> StateComparison:
    """Find who gives the newest state to whom. Every rank calls this with the same values.

    Args:
        held: By rank.
        committed: The coordinator's number of the last decision, as all ranks know it.
    """
    whole = [rank.version for rank in held if not rank.torn]
    newest = max(whole, default=StateVersion())
    if 0 < newest.decision < committed:
        saved = max((version for version in whole if not version.decision), default=newest)
        newest = saved if saved.step > newest.step else newest
    current = [
        number
        for number, rank in enumerate(held)
        if not rank.torn and (rank.version == newest or (rank.able and rank.version.decision == newest.decision > 0))
    ]
    behind = tuple(number for number in range(len(held)) if number not in current)
    by_state: dict[tuple[int, bytes, bytes], list[int]] = {}
    for number in current:
        if held[number].able:
            here = held[number].version.step, held[number].kind, held[number].digest
            by_state.setdefault(here, []).append(number)
    sides = [tuple(side) for side in by_state.values()]
    alike = len({kind for _, kind, _ in by_state}) <= 1
    agreed = alike
    if len(sides) > 1 and alike and newest.step:
        most = max(sides, key=len)
        agreed = 2 * len(most) > sum(map(len, sides))
        if agreed:
            sides = [most, *(side for side in sides if side is not most)]
            newest = held[most[0]].version
    able = bool(sides) and agreed and all(held[number].able for number in behind)
    return StateComparison(newest, behind, tuple(sides), sides[0][0] if able else None, alike, agreed)
