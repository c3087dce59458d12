"""Why a view ended, and who is to blame: heard from its members, then told to all of them alike.

    closed    the first report has come. No step of the view can be committed any more; those who wait are not told yet
    judged    every member is told the same cause, the same kind of failure and the same culprit
    over      what came in after that is heard too; then the next view may be proposed, without those left out

One report is the word of one end of a pair. Its other end names the first, and a third member would hear whichever came
sooner. So the judgement waits for the others, for `gather_ns` from the first word against a pair or until all have
spoken; the next view waits as long in any case. Where nobody accuses a pair (an exception in a step, a deadline), or a
node is known to be gone, nothing is waited for.

    failure      accused are pairs of                  culprit
    failed       who lost whom                         the first of those left out (complaints.py)
    corrupted    who got spoiled bits from whom        who is in most pairs, or the source of the first
    mismatch     who called something else than whom   who is in most pairs, if in more than half as many as there are
                                                       nodes in any; otherwise nobody

A node with damaged memory spoils what it gets from everybody, or what everybody gets from it; both show as many pairs
that share one node. A single pair does not tell which end it was, or whether it was the path; the source is named,
since its checksum is what the bits do not fit, and the cause names both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll.membership.coordinator.suspicions import Suspicions
from quicoll.membership.messages import Decline, FailureKind, Report, clip

if TYPE_CHECKING:
    from quicoll.membership.coordinator.ballot import Ballot
    from quicoll.membership.view import View

__all__ = ["Diagnosis", "ViewFailure", "most_suspected"]


@dataclass(frozen=True, slots=True)
class ViewFailure:
    """What every member is told. culprit: a node, "" where no single one is to blame. lost: gone, or left out."""

    cause: str
    kind: FailureKind = "failed"
    culprit: str = ""
    lost: tuple[str, ...] = ()


def most_suspected(pairs: Iterable[tuple[str, str]]) -> tuple[str, int, int]:
    """The node in most pairs, in how many it is, and how many nodes are in any; no node where two are in as many.

    pairs: in any order and direction; both directions of a pair count once.
    """
    partners: dict[str, dict[str, None]] = {}
    for a, b in pairs:
        partners.setdefault(a, {})[b] = None
        partners.setdefault(b, {})[a] = None
    most = max((len(others) for others in partners.values()), default=0)
    worst = [node for node, others in partners.items() if len(others) == most]
    return (worst[0] if len(worst) == 1 else ""), most, len(partners)


class Diagnosis:
    """From the end of an installed view to the next proposal. ballot: of the step that was open, if one was."""

    def __init__(self, view: View, ballot: Ballot | None, *, gather_ns: int) -> None:
        self.view = view
        self.ballot = ballot
        self.announced = False
        self.deadline_ns: int | None = None
        self._gather_ns = gather_ns
        self._kind: FailureKind = "failed"
        self._causes: list[str] = []
        self._reported_culprit = ""  # as the first report has it
        self._lost: dict[str, str] = {}
        self._suspicions = Suspicions()
        self._blamed: dict[tuple[str, str], None] = {}  # an ordered set
        self._reporters: dict[str, None] = {}  # an ordered set

    def add_report(self, node: str, report: Report | Decline, *, connected: Sequence[str], now_ns: int) -> None:
        """`node` says that the view cannot go on. connected: nodes that may be judged.

        One that declines has confirmed, then lost a link while the installation was on its way: the same as a report.
        """
        if isinstance(report, Decline):
            unreachable = tuple((other, report.reason) for other in report.unreachable)
            reason = "" if unreachable else report.reason
            report = Report(view_id=report.view_id, lost=unreachable, reason=reason)
        others = [other for other in self.view.nodes if other != node and other in connected]
        lost = [(other, cause) for other, cause in report.lost if other in others]
        blamed = [other for other in report.blamed if other in others]
        if not self._reporters:
            self._kind = report.kind
            self._reported_culprit = report.culprit
        self._reporters[node] = None
        for other, cause in lost:
            self._suspicions.add(node, other, cause)
        if report.kind == self._kind:
            self._blamed |= {(node, other): None for other in blamed}
            if report.reason or not lost:
                self._causes.append(f"{node}: {report.reason or 'the view cannot go on'}")
        if (lost or blamed) and self.deadline_ns is None:
            self.deadline_ns = now_ns + self._gather_ns

    def node_lost(self, node: str, cause: str) -> None:
        """`node` is known to be gone; what is said by and about it needs no other reason."""
        if self.view.rank_of(node) is not None:
            self._lost[node] = cause
            self._suspicions.drop(node)

    def complete(self, present: Sequence[str], *, now_ns: int) -> bool:
        """Whether there is nothing to wait for. present: nodes of the view that are still connected."""
        accused = self._suspicions or (self._blamed and not self.announced)
        heard = all(node in self._reporters for node in present)
        return self.deadline_ns is None or not accused or heard or now_ns >= self.deadline_ns

    def failure(self, present: Sequence[str]) -> ViewFailure:
        """By what has been heard so far. present: as in `over`."""
        if self._kind == "failed":
            lost = tuple(node for node in self.view.nodes if node in self._lost or node in self.excluded(present))
            order = (*self._lost, *self.excluded(present), self._reported_culprit)
            causes = [*self._lost.values(), self._suspicions.describe(), *self._causes]
            return ViewFailure(clip("; ".join(filter(None, causes))), culprit=order[0], lost=lost)
        return ViewFailure(clip("; ".join(self._causes)), self._kind, self._cause_node())

    def excluded(self, present: Sequence[str]) -> dict[str, str]:
        """Connected nodes that the next view is formed without, each with the reason, in the order of the decision."""
        return self._suspicions.excluded(present)

    def _cause_node(self) -> str:
        node, pairs, involved = most_suspected(self._blamed)
        if self._kind == "mismatch" and self._blamed:
            return node if 2 * pairs > involved else ""
        return node or self._reported_culprit
