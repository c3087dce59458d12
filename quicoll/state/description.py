"""What a rank's state is a state of, in its user's words, and which ranks do not belong together by that.

Two ranks may hold states that fit into each other's memory and yet are of different models: another activation, another
learning rate. And where names or shapes differ, a handover fails in the middle. So what a rank trains can be described
when its state is registered, as names and texts in an order, and the descriptions are compared by digest in each view,
before anything of a state moves, lessons of ranks that are behind and of spares included.

    right       what more than half of those describe that hold the newest state; at the start these are all
    refused     whoever describes something else: LocalError there, with the first line that differs. The others begin
                again without it
    neither     no more than half agree: Diverged on all ranks

A rank without a registered state has no description and is not refused; one that registers a state without describing
it describes nothing, which is a description like others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError
from quicoll.state.tree import MAX_NODES, Line

if TYPE_CHECKING:
    from quicoll.state.version import HeldState, StateComparison

__all__ = ["Description", "Misfits", "described", "misfits"]


@dataclass(frozen=True, slots=True)
class Description:
    """What a state is of. lines: names and texts, in order. digest: of all of them; zeros where there are none."""

    lines: tuple[Line, ...] = ()
    digest: bytes = bytes(16)

    @classmethod
    def of(cls, given: Any) -> Description:
        """Read what a user has said.

        Args:
            given: A mapping of names to texts; their order counts.
        Raises:
            LocalError: It is no such mapping, or has too many names.
        """
        if not isinstance(given, Mapping) or not all(
            isinstance(name, str) and isinstance(text, str) for name, text in given.items()
        ):
            raise LocalError('an architecture is described by names and texts: {"model": repr(model)}')
        if len(given) > MAX_NODES:
            raise LocalError(f"an architecture of {len(given)} lines; {MAX_NODES} are the most")
        if not given:
            return cls()
        lines, total = [], blake2b(digest_size=16)
        for name, text in given.items():
            one = blake2b(f"{len(name)} {name} {text}".encode(errors="surrogatepass"), digest_size=16).digest()
            lines.append(Line(name, text, one, b""))
            total.update(one)
        return cls(tuple(lines), total.digest())


@dataclass(frozen=True, slots=True)
class Misfits:
    """Ranks whose descriptions differ. sides: by what they describe, the right one first, else by their lowest rank.
    agreed: whether it is known which is right."""

    sides: tuple[tuple[int, ...], ...]
    agreed: bool

    @property
    def refused(self) -> tuple[int, ...]:
        """Those that describe something else than the job is; none where nobody knows what is right."""
        return tuple(sorted(rank for side in self.sides[1:] for rank in side)) if self.agreed else ()


def misfits(held: Sequence[HeldState], found: StateComparison) -> Misfits | None:
    """Find the ranks whose states are of something else than the job's. Every rank calls this with the same values.

    Args:
        held: What all ranks have told, spares too.
        found: What follows from that for their states.
    Returns:
        None where all ranks that have registered a state describe the same.
    """
    sides: dict[bytes, list[int]] = {}
    for rank, told in enumerate(held):
        if told.able:
            sides.setdefault(told.described, []).append(rank)
    if len(sides) <= 1:
        return None
    holders = [rank for side in found.sides for rank in side] or [rank for side in sides.values() for rank in side]
    votes: dict[bytes, int] = {}
    for rank in holders:
        votes[held[rank].described] = votes.get(held[rank].described, 0) + 1
    right = max(votes, key=lambda each: votes[each])
    if 2 * votes[right] <= len(holders):
        return Misfits(tuple(tuple(side) for side in sides.values()), agreed=False)
    others = [tuple(side) for described, side in sides.items() if described != right]
    return Misfits((tuple(sides[right]), *others), agreed=True)


def described(held: Sequence[HeldState]) -> tuple[HeldState, ...]:
    """Return the same with the number of lines of their descriptions, for the search for the first that differs."""
    return tuple(replace(told, lines=max(told.described_lines, 1)) for told in held)
