"""How new a state is, and who hands the newest one to whom. Every rank computes the same from the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StateComparison", "StateVersion", "compare"]


@dataclass(frozen=True, slots=True, order=True)
class StateVersion:
    """How new a state is; the larger is the newer.

    decision: The coordinator's number of the latest decision in it; 0 where none was taken since this process began.
    step: The number of the last step in it; 0 at the start.
    """

    decision: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class StateComparison:
    """Who has the newest state. giver: the rank that hands it to `behind`; None where it cannot be handed over."""

    newest: StateVersion
    current: tuple[int, ...]
    behind: tuple[int, ...]
    giver: int | None


def compare(held: Sequence[tuple[StateVersion, bool]]) -> StateComparison:
    """Find who gives the newest state to whom. Every rank calls this with the same values.

    Args:
        held: By rank: the version of its state, and whether it has registered `save` and `load`.
    """
    newest = max(version for version, _ in held)
    current = tuple(rank for rank, (version, _) in enumerate(held) if version == newest)
    behind = tuple(rank for rank, (version, _) in enumerate(held) if version != newest)
    givers = [rank for rank in current if held[rank][1]]
    able = bool(givers) and all(held[rank][1] for rank in behind)
    return StateComparison(newest, current, behind, givers[0] if able else None)
