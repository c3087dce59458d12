"""One step's ballot: who is inside the step, how each member votes, and the result.

    every member votes ok, all digests equal     commit
    a member votes no                            abort at once: one "no" decides, and the others need not finish
    every member votes ok, digests differ        abort; name the minority, which computed wrongly or was sent something
                                                 else than the others, or both sides of a tie
    the same, but the digests of a sub-group     abort likewise; the digests of one id are compared with each other

Digests are compared only when all are there: with the votes of a part, a minority could look like a majority, and the
wrong node would be named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll.membership.coordinator.evidence import NOBODY, Contradiction
from quicoll.membership.messages import FailureKind, Vote, clip

if TYPE_CHECKING:
    from quicoll.membership.view import View

__all__ = ["Ballot", "BallotResult"]


@dataclass(frozen=True, slots=True)
class BallotResult:
    """Commit, or abort with its cause.

    Attributes:
        commit: Whether the step is committed.
        digest: Of the result, where it is committed.
        cause: Of an abort, for people.
        culprit: The node that caused the abort; "" where no single one did.
        kind: Kind of failure.
        contradiction: Who can have caused it.
    """

    commit: bool
    digest: bytes = b""
    cause: str = ""
    culprit: str = ""
    kind: FailureKind = "failed"
    contradiction: Contradiction = NOBODY


class Ballot:
    """Collects the votes of `view` on `step`; knows nothing of time."""

    def __init__(self, view: View, *, step: int) -> None:
        self.view = view
        self.step = step
        self._inside: dict[str, None] = {}  # an ordered set
        self._votes: dict[str, Vote] = {}

    def __repr__(self) -> str:
        return f"<Ballot view={self.view.view_id} step={self.step} votes={len(self._votes)}/{self.view.world_size}>"

    @property
    def silent(self) -> tuple[str, ...]:
        """Members that have not voted, by rank."""
        return tuple(node for node in self.view.nodes if node not in self._votes)

    def entered(self, node: str) -> bool:
        """Return whether `node` is known to be inside the step."""
        return node in self._inside

    def voted(self, node: str) -> bool:
        """Return whether `node` has voted."""
        return node in self._votes

    def begin(self, node: str) -> None:
        """Take in that `node` is inside the step."""
        self._inside[node] = None

    def vote(self, node: str, vote: Vote) -> BallotResult | None:
        """Count a vote, which also shows that `node` is inside; return the result once there is one."""
        self._inside[node] = None
        self._votes[node] = vote
        if not vote.ok:
            cause = clip(f"{node} voted no: {vote.reason or 'no reason given'}")
            parts = (
                (node,) if vote.culprit in ("", node) or vote.culprit not in self.view.nodes else (node, vote.culprit)
            )
            return BallotResult(
                commit=False, cause=cause, culprit=vote.culprit or node, contradiction=Contradiction(parts)
            )
        if len(self._votes) < self.view.world_size:
            return None
        sides: dict[bytes, list[str]] = {}
        for member in self.view.nodes:
            sides.setdefault(self._votes[member].digest, []).append(member)
        if len(sides) > 1:
            return _mismatch(f"digests of step {self.step}", sides)
        groups: dict[int, dict[bytes, list[str]]] = {}
        for member in self.view.nodes:
            for group, digest in self._votes[member].groups:
                groups.setdefault(group, {}).setdefault(digest, []).append(member)
        for group in sorted(groups):
            if len(groups[group]) > 1:
                return _mismatch(f"digests of a sub-group's results in step {self.step}", groups[group])
        return BallotResult(commit=True, digest=vote.digest)


def _mismatch(what: str, sides: dict[bytes, list[str]]) -> BallotResult:
    most = max(len(nodes) for nodes in sides.values())
    largest = [digest for digest, nodes in sides.items() if len(nodes) == most]
    described = [f"{', '.join(nodes)} have {digest[:8].hex() or 'none'}" for digest, nodes in sides.items()]
    if len(largest) > 1:
        cause = f"{what} differ and no side is larger: {'; '.join(described)}"
        everyone = Contradiction(tuple(node for nodes in sides.values() for node in nodes), sent=True)
        return BallotResult(commit=False, cause=clip(cause), kind="corrupted", contradiction=everyone)
    minority = tuple(node for digest, nodes in sides.items() if digest != largest[0] for node in nodes)
    cause = f"{what} differ; wrong: {', '.join(minority)}, or who sends to it ({'; '.join(described)})"
    culprit = minority[0] if len(minority) == 1 else ""
    contradiction = Contradiction(minority, tuple(sides[largest[0]]), sent=True)
    return BallotResult(commit=False, cause=clip(cause), culprit=culprit, kind="corrupted", contradiction=contradiction)
